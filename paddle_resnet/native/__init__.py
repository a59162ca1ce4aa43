"""Custom Paddle operators in C++ and CUDA."""
