import pickle
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


class InProcess:
    """Stands in for `Remote`, without a process: a copy of the subject is asked right here."""

    def __init__(self, subject):
        self.subject, self.failure = pickle.loads(pickle.dumps(subject)), ""

    def ask(self, method, limit=None):
        if not self.failure:
            try:
                return getattr(self.subject, method)(), ""
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
        return None, self.failure

    def close(self):
        pass


@pytest.fixture
def in_process(monkeypatch):
    """Measures without processes of their own, which take seconds to start."""
    monkeypatch.setattr("dpopt.bench.measure.Remote", InProcess)
    monkeypatch.setattr("speed.largest.Remote", InProcess)
