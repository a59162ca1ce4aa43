"""Code shared by export and predict."""
