"""What a training loop that saves by itself has to do for MalleTrain: report, ask whether a
checkpoint is wanted, say that it is there.

Decides that all ranks learn of a request at the same step, and what follows a checkpoint. How a
checkpoint is made is the library's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import malletrain
from malletrain.protocol import env
from malletrain.protocol.worker_channel import Capable, SnapshotTaken
from malletrain.training import report
from malletrain.training.drain import wait_to_be_stopped
from malletrain.training.ranks import rank_and_world
from malletrain.training.steadfast import bear_one_sigterm


class StateGuard:
    """One run as MalleTrain sees it. Call :meth:`step` at the end of each training step, on every
    rank.
    """

    def __init__(self) -> None:
        self._inside = bool(
            os.environ.get(env.FLAGS)
        )  # the same on all ranks, whether or not the flags can be read here
        self._flags = report.open_flags()
        self._served = 0
        self._wanted = 0
        self._agreed = False
        self._announced = False
        self._handler: Any = None

    def step(self, samples: float) -> bool:
        """A step is done; ``samples``: of this process. Returns, on all ranks alike, whether a
        checkpoint is wanted now.

        Inside MalleTrain and with several ranks this is one small all-reduce.
        """
        malletrain.report(samples)
        if not self._inside:
            return False
        self._go_on()
        bear_one_sigterm()
        rank, world = rank_and_world()
        number = 0
        if rank == 0 and self._flags is not None:
            if not self._announced:
                self._announced = True
                report.send(Capable)
            number = self._flags.drain_request()
        self._wanted = number if number != self._served else 0
        self._agreed = any_rank(bool(self._wanted)) if world > 1 else bool(self._wanted)
        return self._agreed

    def saved(self, path: str, began: float | None = None) -> None:
        """The part of this rank of the checkpoint that was wanted is on disk at ``path``; call it
        on every rank. Once all have, rank 0 says so and waits until it is stopped; the
        others go on, and wait for it in their next collective. ``began``: when saving began
        (``time.monotonic()``).
        """
        agreed, self._agreed = self._agreed, False
        if not agreed:
            return
        report.flush()
        if rank_and_world()[1] > 1:
            any_rank(False)
        self._let_go()
        number, self._wanted = self._wanted, 0
        if not number or self._flags is None:
            return
        samples, steps = report.totals()
        seconds = 0.0 if began is None else time.monotonic() - began
        report.send(
            SnapshotTaken,
            saved=True,
            path=path,
            bytes=0,
            seconds=seconds,
            samples=samples,
            steps=steps,
        )
        self._served = wait_to_be_stopped(self._flags, number)
        self._go_on()

    def _let_go(self) -> None:
        """All is on disk: SIGTERM, which is about to come, may end this process at once. A
        library's handler would finish the step first, or talk to the other ranks, until the time
        for that is up and the process is killed.
        """
        if threading.current_thread() is threading.main_thread() and callable(
            signal.getsignal(signal.SIGTERM)
        ):
            self._handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _go_on(self) -> None:
        """It did not come; the handler of before counts again."""
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None


def any_rank(mine: bool) -> bool:
    """Whether ``mine`` is true on any rank; a small all-reduce when there are several."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return mine
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flag = torch.tensor([int(mine)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
