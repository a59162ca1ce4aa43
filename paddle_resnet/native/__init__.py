"""The project's own Paddle operators in C++ and CUDA."""
