"""Helpers that do not need Paddle, for run modes, meters, logging, errors and CPU affinity."""
