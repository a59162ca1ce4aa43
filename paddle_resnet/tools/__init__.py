"""Data-set tools that training never needs."""
