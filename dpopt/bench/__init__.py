"""What a private step costs: times and peak memory of engines and optimizers, as ratios within one run."""
