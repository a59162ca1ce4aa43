"""How one step runs."""
