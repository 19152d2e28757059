"""`python -m dpopt.runs.job`: the process of a job that a launcher has started; it reads from stdin what to run."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace

from dpopt.runs import stopping
from dpopt.runs.run_suite import run_suite


def main() -> int:
    """Run the cells of a suite until nothing is left; 1 if this was stopped before."""
    stopping.end_with(int(os.environ["DPOPT_PARENT"]))
    suite, results = pickle.load(sys.stdin.buffer)
    suite = replace(suite, engine="local", options={}, workers=1, max_hours=None)
    return int(run_suite(suite, results, progress=False).is_stopped)


if __name__ == "__main__":
    raise SystemExit(main())
