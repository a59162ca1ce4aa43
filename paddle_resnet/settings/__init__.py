"""The flags: declaration, parsing, validation and inheritance from checkpoints."""
