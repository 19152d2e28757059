"""Student's interval by SciPy, which tables and figures are compared with."""

import scipy.stats


def student(values, level=0.95):
    """The ends of the interval of the mean of `values`."""
    return tuple(scipy.stats.ttest_1samp(values, 0).confidence_interval(level))
