"""Run the steps of a program, from the host scalars to the metrics."""
