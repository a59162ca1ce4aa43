"""Data sets: storage formats, and the iterators that feed them to Paddle."""
