"""A process of another user of this host, for tests of what that user must not reach."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

SOMEBODY = 4242
"""Id of the other user."""

only_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="another user's process takes root to start"
)

_BECOME = f"""
import os
os.setgroups([])
os.setgid({SOMEBODY})
os.setuid({SOMEBODY})
"""


@contextmanager
def as_somebody(
    imports: str, script: str, *arguments: object
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run ``script`` as :data:`SOMEBODY` in a Python that imports its modules as this user, because
    the other user may not have access to the packages. It ends with the block. It is not a fork of
    this process, whose threads may hold locks.
    """
    argv = [sys.executable, "-c", f"{imports}{_BECOME}{script}", *map(str, arguments)]
    process = subprocess.Popen(argv, cwd=Path(__file__).parents[1])
    try:
        yield process
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
