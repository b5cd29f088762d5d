"""A process of another user of this host, for what must be kept from one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

SOMEBODY = 4242
"""Another user's number."""

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
    """A Python that imports as this user (the other one may have no way to the packages) and then
    runs ``script`` as :data:`SOMEBODY`; it has ended when the block is left. Not a fork of this
    process, whose threads may hold locks.
    """
    argv = [sys.executable, "-c", f"{imports}{_BECOME}{script}", *map(str, arguments)]
    process = subprocess.Popen(argv, cwd=Path(__file__).parents[1])
    try:
        yield process
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
