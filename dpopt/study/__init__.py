"""The (C, B, eta) study: what clipping and noise do to a gradient, and which batch sizes and bounds to begin with.

Rehn, Zhao, Heikkilä and Honkela, "On optimal hyperparameters for differentially private deep transfer learning", ICLR
2026, arXiv 2510.20616. `optimal_clip` and `diagnostics` look at raw gradients: diagnostics that are not private, for
records that say so, and never for an optimizer. `batch_size` takes public numbers only.
"""
