"""Outputs of a run for users: TensorBoard events, predictions, the HTML page, and comparisons of runs."""
