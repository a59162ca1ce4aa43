"""Execution of a step."""
