"""Paddle's versions, GPUs, and CUDA libraries from packages."""
