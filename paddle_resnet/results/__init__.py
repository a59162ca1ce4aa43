"""What a user takes away from a run: TensorBoard events, predictions, the HTML page, the comparison of runs."""
