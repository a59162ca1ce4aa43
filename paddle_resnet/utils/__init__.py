"""Helpers that do not need Paddle: command line, errors, files, logging, meters, signals and others."""
