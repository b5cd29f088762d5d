"""The launcher: TorchElastic's local agent for one job on one node, run by MalleTrain's agent
(``python -m malletrain.launch.restart``).

Decides how workers are started, watched and stopped on this node. Does not decide which nodes are
in a round, or how often to try. After a failure it reports and waits for the daemon. After success
it waits, because the store in the launcher of rank 0 must exist until all nodes are done. It
differs from the torchrun command:

* Workers end with the launcher.
* It acts on a new round within milliseconds.
* The time between SIGTERM and SIGKILL is that of the job, not 30 s.
* There is no exit barrier, which waits 300 s and ignores changes of membership.
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
from malletrain.launch.node_samples import node_samples
from malletrain.launch.rendezvous import DaemonRendezvous
from malletrain.launch.round_store import job_secret
from malletrain.launch.script import script_command
from malletrain.launch.worker_variables import WorkerVariables
from malletrain.memory.folder import MemoryFolder
from malletrain.memory.keeper import Keeper
from malletrain.protocol import env
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.payloads import RoundLayout
from malletrain.training.torch_private import node_agent

MONITOR_INTERVAL_S = 0.05
_UNLIMITED = 1_000_000


def worker_command(order: LaunchOrder) -> list[str]:
    """Return the command of one worker. The worker ends with the launcher, and writes unbuffered
    to its own log. If there is a fork server, the worker is a fork of it.
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
    """Run the job's workers on this node, round after round. Return the exit code. Raises
    SignalException after a stop that a signal requested.
    """
    spec = order.spec
    variables = WorkerVariables(tunes_threads="threads" in spec.tuned)
    samples = node_samples(order)
    variables.set(spec.layout)
    if spec.mode == "live":
        return live.LiveLauncher(order, worker_command(order), variables, samples).run()
    keeper = _keeper(order)
    handler = DaemonRendezvous(
        *(order.job, order.endpoint, order.host, order.join_timeout_s),
        keeper=keeper.address if keeper else "",
        samples=samples,
    )
    command = worker_command(order)
    worker_spec = WorkerSpec(
        role="default",
        local_world_size=spec.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=_UNLIMITED,
        monitor_interval=MONITOR_INTERVAL_S,
    )

    def use_layout(layout: RoundLayout | None) -> None:
        # TorchElastic reads the number when it starts the workers of the round.
        worker_spec.local_world_size = (layout or spec.layout).processes
        variables.set(layout or spec.layout)

    handler.on_layout = use_layout
    workers = node_agent(worker_spec, handler, order.stop_grace_s, stop_signal())
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
        if samples:
            samples.close()
    return 0


def _keeper(order: LaunchOrder) -> Keeper | None:
    """Return the keeper of the snapshots in this node's memory; None if there is no directory for
    them. Workers get its address in their environment.
    """
    place, limit = os.environ.get(env.MEMORY, ""), os.environ.get(env.MEMORY_LIMIT, "")
    if not os.path.isdir(place) or not limit.isdigit():
        return None
    folder = MemoryFolder(Path(place), int(limit))
    try:
        keeper = Keeper(folder, job_secret(), order.job, order.host)
    except (OSError, ValueError) as error:  # the job also runs without a keeper
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
    # TorchElastic would log warnings about closing signals at every planned restart.
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
    # An orderly shutdown of torch takes half a second, during which the node is not free.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
