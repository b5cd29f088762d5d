"""HyperQueue's side of benchmarks/farm_peers.py, run by the Python of its own environment.

    hyperqueue_farm.py server FOLDER RESULTS COUNT COMMAND…   server, and a job of that many tasks
    hyperqueue_farm.py worker FOLDER CORES                    a worker on this node

The package of the Python index has server and worker, and no program ``hq``: its worker runs in the
process of a server. A worker here starts with a server of its own that stays idle, and connects to
the real one, whose access file takes the place of its own.

When Slurm ends the job of a worker, the tasks get its SIGTERM too, and HyperQueue counts them as
failed. So those that have no file in RESULTS when the job has ended are submitted again.
"""

import sys
import tempfile
import time
from pathlib import Path

from hyperqueue import Client, Job
from hyperqueue.ffi.cluster import Cluster

CURRENT = "hq-current"
"""Link in a server directory to the access file of the running server."""


def serve(folder: Path, results: Path, count: int, command: list[str]) -> None:
    """Run a server until all tasks have a result. ``{}`` in the command is the task."""
    cluster = Cluster(str(folder))
    client = Client(folder)
    while missing := [number for number in range(count) if not (results / str(number)).exists()]:
        job = Job(default_workdir="/tmp", max_fails=None)
        for number in missing:
            words = [word.replace("{}", str(number)) for word in command]
            job.program(words, stdout=None, stderr=None)
        submitted = client.submit(job)
        (folder / "ready").touch()
        client.wait_for_jobs([submitted], raise_on_error=False)
    cluster.stop()


def work(folder: Path, cores: int) -> None:
    """Run a worker of the server in ``folder``."""
    with tempfile.TemporaryDirectory(prefix="hq-worker-") as own:
        cluster = Cluster(own)
        link = Path(own) / CURRENT
        link.unlink()
        link.symlink_to(folder / CURRENT)
        cluster.add_worker(cores)
        while True:  # the batch scheduler ends it
            time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    else:
        work(Path(sys.argv[2]), int(sys.argv[3]))
