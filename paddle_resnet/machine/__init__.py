"""Compatibility with Paddle 2.6 and 3, GPU checks, and loading of CUDA libraries from Python packages."""
