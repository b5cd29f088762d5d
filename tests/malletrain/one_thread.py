"""The computations of tests use one thread. The conftest of a folder of tests imports the fixture.

With more, the threads of one test wait for each other at OpenMP's barriers, where they use a
processor while that of another test has the other one: on a machine whose cores are all in use that
is most of the processor time of a small model.
"""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Let torch compute with one thread in the process of the tests, if a test has imported it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
