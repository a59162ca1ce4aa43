"""Data sets: their storage formats, and the iterators that feed their images to Paddle."""
