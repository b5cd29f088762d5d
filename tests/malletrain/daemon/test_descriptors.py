"""The daemon may have as many connections as its machine allows, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from malletrain.daemon.site.process import allow_many
soft, hard, target = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_many(target), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "target", "now"),
    [(64, 512, 256, 256), (64, 128, 256, 128), (300, 512, 256, 300)],
)
def test_it_is_raised_as_far_as_wanted_and_allowed(soft, hard, target, now):
    argv = [sys.executable, "-c", PROGRAM, *map(str, (soft, hard, target))]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(now), str(now), str(hard)]
