"""Suite -> plan -> cells -> engines. Results are written through a `Store` that the caller hands in."""
