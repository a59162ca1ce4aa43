"""Save and restore runs: checkpoint folders, their variables, the saved state, and the choice of the initial
checkpoint."""
