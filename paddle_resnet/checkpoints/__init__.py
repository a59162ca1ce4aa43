"""Save and restore runs: folders on disk, the variables in them, the state to save, the checkpoint to start from."""
