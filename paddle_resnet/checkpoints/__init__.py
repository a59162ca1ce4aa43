"""Saving and restoring a run: folders on disk, the variables in them, what to save, where to start."""
