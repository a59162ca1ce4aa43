"""Programs rewritten."""
