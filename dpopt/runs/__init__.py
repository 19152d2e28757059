"""Run cells: prepare one, train it, and workers that take cells until none is left."""
