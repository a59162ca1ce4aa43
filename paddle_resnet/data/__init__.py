"""What feeds the DALI pipelines."""
