"""Optimizers, learning-rate schedules, mixed precision and sparsity."""
