"""Data sets: what is stored where, and the iterators that feed it to Paddle."""
