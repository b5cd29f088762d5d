"""The training of benchmarks/peers.py under torchft: one process is one replica group.

Written after torchft's own example (train_ddp.py). Its sampler loses samples by design, so here
each step's samples are chosen by the step's number and the replica's place in it. SIGTERM, the
notice, ends the process after the step in progress.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchmarks.peers_training import Log, arguments, loss_of, network, share

TIMEOUT = timedelta(seconds=float(os.environ.get("PEERS_TORCHFT_TIMEOUT_S", "5")))


def train(folder: str, mb: float, step_s: float, leaving: Callable[[], bool]) -> None:
    """Train as one replica group until ``leaving`` returns true after a step.

    Args:
        folder: folder of the logs.
        mb: parameters in MB.
        step_s: sleep in every step, seconds.
        leaving: whether the process is to leave.
    """
    # here, so that --help works without torchft
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, plain = network(mb)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        replica_id=f"replica_{os.getpid()}",
    )
    net = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    log = Log(folder)
    while not leaving():
        optimizer.zero_grad()  # begins the quorum
        place, world = manager.participating_rank(), manager.num_participants()
        step = manager.current_step() + 1
        # a replica that is still healing participates without samples of its own
        samples = share(step, place, world) if place is not None else []
        if samples:
            log.draw(step, world, place, samples)
        loss_of(net, samples).backward()
        time.sleep(step_s)
        before = manager.current_step()
        optimizer.step()
        if samples and manager.current_step() > before:
            log.done(step, world, place)
    manager.shutdown(wait=False)


def main() -> None:
    args = arguments(__doc__)
    notice: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: notice.append(number))
    train(args.folder, args.mb, args.step_s, lambda: bool(notice))
    os._exit(0)


if __name__ == "__main__":
    main()
