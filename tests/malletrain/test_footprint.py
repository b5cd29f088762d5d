"""The daemon's share of memory: what it imports and opens stays far below its 150 MB, and nothing of it is torch."""

import subprocess
import sys

LIMIT_MB = 120  # the daemon may take 150; the rest is for its state

PROGRAM = """
import sys
from pathlib import Path
import highspy, numpy, zmq.asyncio
from malletrain import confdocs, config, keys, logs, metrics, statedir, store
state = Path(sys.argv[1])
logs.configure("info", "json")
lock = statedir.lock_state_dir(state)
ring = keys.KeyRing(state)
opened = store.Store.open(f"sqlite:///{state}/malletrain.db")  # a new database: Alembic is loaded too
job = opened.add_job(store.JobRow(opened.new_job_id(), "x", "ada", "{}", "queued"))
for i in range(2000):
    opened.add_event(store.EventRow(float(i), "step", job=job.id, data={"i": i}))
m = metrics.Metrics()
m.serve("127.0.0.1:0")
config.parse_config(confdocs.example_toml())
m.stop()
assert "alembic" in sys.modules
assert not {"torch", "sklearn", "matplotlib"} & sys.modules.keys(), "the daemon imports a training library"
print(next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_the_daemons_parts_are_small(tmp_path):
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < LIMIT_MB
