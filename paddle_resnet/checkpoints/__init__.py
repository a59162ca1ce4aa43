"""What a run saves, and where it starts from."""
