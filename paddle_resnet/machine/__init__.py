"""Adapters for Paddle versions, GPU checks, and access to CUDA libraries from Python packages."""
