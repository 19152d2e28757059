"""Suite -> planned cells -> engines that run them. Results are written through a `Store` that the caller hands in."""
