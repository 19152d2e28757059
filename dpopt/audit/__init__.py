"""Empirical lower bounds on epsilon: the audit of what the rest of the kernel claims.

`audit` plays two games against an optimizer and the `DataOracle` (`games`) and turns the adversary's scores
into bounds (`estimators`). It is itself audited on mechanisms that are known to leak (`mistakes`).
"""

from dpopt.audit.driver import Result, audit
from dpopt.audit.estimators import clopper_pearson, gaussian_epsilon, likely_threshold, one_run
from dpopt.audit.games import Scores, one_run_scores, simulated, worst_case
from dpopt.audit.mistakes import Control, controls

__all__ = [
    "Control",
    "Result",
    "Scores",
    "audit",
    "clopper_pearson",
    "controls",
    "gaussian_epsilon",
    "likely_threshold",
    "one_run",
    "one_run_scores",
    "simulated",
    "worst_case",
]
