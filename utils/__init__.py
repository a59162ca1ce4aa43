"""Helpers without Paddle: run modes, meters, log, errors, CPU affinity."""
