import os
import sys
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")  # it would close the handlers that catch what tests print
# The same few examples each time, so that a failure belongs to the change that made it; or ten times as many, new ones.
settings.register_profile("few", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("full", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """No test reads or writes the user's calibration cache; processes that share the tests share one."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["DPOPT_CACHE"] = str(root / "cache")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def at_marks(monkeypatch):
    """A context in which a function is called with the number of draws that a cell has taken, at each of its marks."""

    @contextmanager
    def told(call):
        from dpopt.store import Store

        with monkeypatch.context() as patch:
            append = Store.append_curve

            def appended(self, run_id, entry):
                append(self, run_id, entry)
                call(entry["draw"])

            patch.setattr(Store, "append_curve", appended)
            yield

    return told


@pytest.fixture(autouse=True)
def _no_figure_left_open():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
