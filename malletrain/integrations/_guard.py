"""What a training loop that saves by itself has to do for MalleTrain: report, ask whether a checkpoint is wanted, say that it is there.

Decides that all ranks learn of a request at the same step, and what follows a checkpoint. How a checkpoint is made is the library's.
"""

from __future__ import annotations

import time

import malletrain
from malletrain import progress
from malletrain.local_channel import Capable, SnapshotTaken
from malletrain.sampler import rank_and_world
from malletrain.snapshot import STAND_STILL_S
from malletrain.standstill import stand_still


class Guard:
    """One run as MalleTrain sees it. Call :meth:`step` at the end of each training step, on every rank."""

    def __init__(self) -> None:
        self._flags = progress.open_flags()
        self._served = 0
        self._wanted = 0
        self._announced = False

    def step(self, samples: float) -> bool:
        """A step is done; ``samples``: of this process. Returns, on all ranks alike, whether a checkpoint is wanted now.

        Inside MalleTrain and with several ranks this is one small all-reduce.
        """
        malletrain.report(samples)
        if self._flags is None:
            return False
        rank, world = rank_and_world()
        if not self._announced:
            self._announced = True
            if rank == 0:
                progress.send(Capable)
        number = self._flags.drain_request() if rank == 0 else 0
        self._wanted = number if number != self._served else 0
        return bool(_any(bool(self._wanted)) if world > 1 else self._wanted)

    def saved(self, path: str, began: float | None = None) -> None:
        """The checkpoint that was wanted is on disk at ``path``. Rank 0 says so and stands still until it is stopped; the others go on,
        and wait for it in their next collective. ``began``: when saving began (``time.monotonic()``)."""
        number, self._wanted = self._wanted, 0
        if not number or self._flags is None:
            return
        samples, steps = progress.totals()
        seconds = 0.0 if began is None else time.monotonic() - began
        progress.send(SnapshotTaken, saved=True, path=path, bytes=0, seconds=seconds, samples=samples, steps=steps)
        progress.flush()
        self._served = stand_still(self._flags, number, STAND_STILL_S)


def _any(mine: bool) -> bool:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return mine
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flag = torch.tensor([int(mine)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
