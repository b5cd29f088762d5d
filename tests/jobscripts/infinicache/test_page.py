"""The Python of the page about the cache, as it is written, on a pool of this process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.protocol.views import MembersView, MemberView
from tests.jobscripts.infinicache.pool import KEY
from tests.jobscripts.infinicache.test_forks import served as served
from tests.malletrain.cli.fake_daemon import FakeDaemon, default_answers
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "infinicache.md"
BEFORE = """
import numpy

data = numpy.arange(1000)
samples = numpy.arange(80, dtype="i4").reshape(20, 4)

def read_from_disk(key):
    raise KeyError(key)
"""
AFTER = """
assert value == data.tobytes() and len(part) == receipt.size == 8000
for _ in range(2):
    assert torch.equal(torch.cat(list(batches)), torch.from_numpy(samples))
cache.close()
assert lasting.get("weights") == data.tobytes()
lasting.close()
"""


def test_the_examples_run(served, tmp_path):
    pytest.importorskip("torch")
    members = tuple(MemberView(f"n{i}", "h", at) for i, at in enumerate(served.addresses))
    answers = {"members": lambda params: MembersView("j1", 1, members, KEY.hex())}
    daemon = FakeDaemon(tmp_path / "state", {**default_answers(), **answers})
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    script = tmp_path / "page.py"
    script.write_text("\n".join([BEFORE, *blocks, AFTER]))
    try:
        done = subprocess.run(
            [sys.executable, script],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                "MALLETRAIN_STATE_DIR": str(daemon.state_dir),
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    finally:
        daemon.stop()
    assert len(blocks) == 3
    assert done.returncode == 0, done.stderr
