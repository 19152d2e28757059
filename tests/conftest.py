import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")  # the same examples each time: a failure belongs to the change that made it


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """No test reads or writes the user's calibration cache."""
    os.environ["DPOPT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
