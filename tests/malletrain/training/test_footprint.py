"""The daemon's share of memory: what it imports and opens stays far below its 150 MB, and nothing
of it is torch.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LIMIT_MB = 120  # the daemon may take 150; the rest is for its state

PROGRAM = """
import sys
from pathlib import Path
import highspy, numpy, zmq.asyncio
from malletrain.config import model as config, reference
from malletrain.daemon.site import logs, metrics
from malletrain.identity import keys
from malletrain.identity import state_directory
from malletrain.store import records, store
state = Path(sys.argv[1])
logs.configure("info", "json")
lock = state_directory.lock_state_dir(state)
ring = keys.KeyRing(state)
# a new database: Alembic is loaded too
opened = store.Store.open(f"sqlite:///{state}/malletrain.db")
job = opened.add_job(records.JobRow(opened.new_job_id(), "x", "ada", "{}", "queued"))
for i in range(2000):
    opened.add_event(records.EventRow(float(i), "step", job=job.id, data={"i": i}))
m = metrics.Metrics()
m.serve("127.0.0.1:0")
config.parse_config(reference.example_toml())
m.stop()
assert "alembic" in sys.modules
assert not {"torch", "sklearn", "matplotlib"} & sys.modules.keys(), "the daemon imports a training library"
print(next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""  # noqa: E501


def test_the_daemons_parts_are_small(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < LIMIT_MB
