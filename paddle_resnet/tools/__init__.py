"""Data-set tools. Training does not import this package."""
