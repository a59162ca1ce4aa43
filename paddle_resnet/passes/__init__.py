"""Passes that rewrite programs."""
