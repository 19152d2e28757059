"""Jobs on clusters: what a node does with the signals that it gets."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dpopt.runs.launchers import Job


class Sleeper(Job):
    """A job whose process waits to be ended."""

    def start(self):
        code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
        code += "; print(1, flush=True); signal.pause()"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        process.stdout.readline()
        return process


@pytest.fixture
def node():
    submitit = pytest.importorskip("dpopt.runs.slurm")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR2)
    yield submitit._Node(Sleeper(None, ""))
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGUSR2, before[1])


def signalled(number, is_ready):
    """Send a signal to this process once it is ready for it."""

    def wait():
        while not is_ready():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait).start()


def test_a_node_hands_on_that_it_is_to_end(node):
    before = signal.getsignal(signal.SIGTERM)
    signalled(signal.SIGTERM, lambda: signal.getsignal(signal.SIGTERM) is not before)
    assert node() == 7


def test_a_node_whose_time_is_up_ends_its_cells_and_is_submitted_again(node):
    """The signal comes while the node waits for its process: whoever waits in the handler must not wait for that."""
    again = []
    signal.signal(signal.SIGUSR2, lambda *_: again.append(node.checkpoint()))
    signalled(signal.SIGUSR2, lambda: hasattr(node, "_process"))
    assert node() == 7
    assert type(again[0].function) is type(node)
