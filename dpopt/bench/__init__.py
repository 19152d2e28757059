"""The cost of a private step: times and peak memory of engines and optimizers, as ratios within one run."""
