"""Save and restore runs: choose the initial checkpoint, write, verify and delete checkpoint folders, and load variables
and the training state."""
