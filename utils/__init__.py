"""Helpers that do not need Paddle: run modes, meters, log, errors, CPU affinity."""
