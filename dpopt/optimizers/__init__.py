"""The optimizers, one method per file. Each sees an oracle only; see `base` for what they share."""
