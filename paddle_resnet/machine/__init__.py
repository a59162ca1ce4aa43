"""Differences between Paddle versions, GPU checks, and CUDA libraries from Python packages."""
