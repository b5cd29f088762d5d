"""The launcher: TorchElastic's local agent for one job on one node, run by MalleTrain's agent
(``python -m malletrain.launch.restart``).

Decides how workers are started, watched and stopped on this node. It does not decide who is in a
round or how often to try: after a failure it reports and waits for the daemon, and after success it
waits, because the store in the launcher of rank 0 must stay until all are done. Unlike the torchrun
command, it ties workers to the launcher's life and acts on a new round within milliseconds; the
time between SIGTERM and SIGKILL is the job's and not 30 s; and there is no exit barrier, which
waits 300 s and ignores changes of membership.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from malletrain.launch import live
from malletrain.launch.loop import order_from_arguments, stop_signal
from malletrain.launch.rendezvous import DaemonRendezvous
from malletrain.launch.round_store import job_secret
from malletrain.launch.script import script_command
from malletrain.memory.folder import MemoryFolder
from malletrain.memory.keeper import Keeper
from malletrain.protocol import env
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.training.torch_private import node_agent

MONITOR_INTERVAL_S = 0.05
_UNLIMITED = 1_000_000


def worker_command(order: LaunchOrder) -> list[str]:
    """The command of one worker: tied to the launcher, output to its own file, unbuffered; a fork
    of the fork server where there is one.
    """
    server = os.environ.get(env.FORK_SERVER)
    helper, options = (
        ("fork_client.py", ["--fork-server", server]) if server else ("supervisor.py", [])
    )
    tie = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name(helper)),
        "--parent",
        str(os.getpid()),
        *options,
    ]
    where = ["--chdir", order.spec.workdir, "--per-rank-log", order.log_dir]
    return [*tie, *where, "--", *script_command(order.spec)]


def run(order: LaunchOrder) -> int:
    """Run the job's workers on this node round after round. Returns the exit code; SignalException:
    asked to stop, and done so.
    """
    spec = order.spec
    if spec.nproc_per_node > 1:
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # as torchrun does: several workers share the cores
    if spec.mode == "live":
        return live.LiveLauncher(order, worker_command(order)).run()
    keeper = _keeper(order)
    handler = DaemonRendezvous(
        *(order.job, order.endpoint, order.host, order.join_timeout_s),
        keeper=keeper.address if keeper else "",
    )
    command = worker_command(order)
    workers = node_agent(
        WorkerSpec(
            role="default",
            local_world_size=spec.nproc_per_node,
            rdzv_handler=handler,
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=_UNLIMITED,
            monitor_interval=MONITOR_INTERVAL_S,
        ),
        handler,
        order.stop_grace_s,
        stop_signal(),
    )
    try:
        workers.run()
    except RendezvousClosedError as error:
        print(f"malletrain launcher: {error}", flush=True)
    except RendezvousError as error:
        print(f"malletrain launcher: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        handler.shutdown()
        if keeper:
            keeper.close()
    return 0


def _keeper(order: LaunchOrder) -> Keeper | None:
    """Serves the snapshots in this node's memory, where there is a place for them; the workers hear
    of it by their environment.
    """
    place, limit = os.environ.get(env.MEMORY, ""), os.environ.get(env.MEMORY_LIMIT, "")
    if not os.path.isdir(place) or not limit.isdigit():
        return None
    folder = MemoryFolder(Path(place), int(limit))
    try:
        keeper = Keeper(folder, job_secret(), order.job, order.host)
    except (OSError, ValueError) as error:  # without it the job runs all the same
        print(f"malletrain launcher: no snapshots in memory: {error}", flush=True)
        return None
    os.environ[env.KEEPER] = keeper.address
    return keeper


def main() -> int:
    """Read the order and run it."""
    order = order_from_arguments(
        "malletrain.launch.restart", "Run the workers of one job on this node."
    )
    if order is None:
        return 2
    try:
        job_secret()
    except ValueError as error:
        print(f"malletrain launcher: {error}", file=sys.stderr, flush=True)
        return 2
    # Every planned restart of the workers would be logged as warnings about closing signals.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(
            os.environ.get("LOGLEVEL", "ERROR")
        )
    try:
        code = run(order)
    except (SignalException, KeyboardInterrupt):
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # taking torch down in order would take half a second, during which the node is not free


if __name__ == "__main__":
    sys.exit(main())
