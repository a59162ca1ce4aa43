"""Data-set tools, which training never imports."""
