"""What a training loop that saves by itself has to do for MalleTrain: report, ask whether a
checkpoint is wanted, say that it is there.

Decides that all ranks learn of a request at the same step, and what follows a checkpoint. How a
checkpoint is made is the library's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import malletrain
from malletrain.protocol import env
from malletrain.protocol.worker_channel import Capable, SnapshotTaken
from malletrain.training import report
from malletrain.training.drain import wait_to_be_stopped
from malletrain.training.ranks import rank_and_world
from malletrain.training.side_group import new_side_group
from malletrain.training.steadfast import bear_one_sigterm


class StateGuard:
    """One run as MalleTrain sees it. Call :meth:`step` at the end of each training step, on every
    rank. Its collectives go over a gloo group of its own, so that they never meet the script's.
    """

    def __init__(self) -> None:
        self._inside = bool(
            os.environ.get(env.FLAGS)
        )  # the same on all ranks, whether or not the flags can be read here
        self._flags = report.open_flags()
        self._served = 0
        self._request = 0
        self._agreed = False
        self._announced = False
        self._handler: Any = None
        self._group: tuple[Any, Any] = (None, None)
        """The script's group, and the one beside it."""
        self.late = False
        """Whether a checkpoint was due on any rank at the last step."""

    def step(self, samples: float) -> bool:
        """A step is done; ``samples``: of this process. Returns what :meth:`wants_checkpoint`
        does.
        """
        malletrain.report(samples)
        return self.wants_checkpoint()

    def wants_checkpoint(self, late: bool | None = None) -> bool:
        """Whether MalleTrain wants a checkpoint now, on all ranks alike.

        Args:
            late: whether this process's clock says that a checkpoint is due; :attr:`late` says
                afterwards whether it is on any rank. None: the library decides that by itself.

        Inside MalleTrain, and where the clock counts, this is one small all-reduce of all ranks.
        """
        self.late = bool(late)
        if not self._inside:
            if late is not None:
                self.late = self.any_rank(late)
            return False
        self._go_on()
        bear_one_sigterm()
        number = 0
        if rank_and_world()[0] == 0 and self._flags is not None:
            if not self._announced:
                self._announced = True
                report.send(Capable)
            number = self._flags.drain_request()
        self._request = number if number != self._served else 0
        self._agreed, self.late = map(bool, self._most([int(bool(self._request)), int(self.late)]))
        return self._agreed

    def saved(self, path: str, began: float | None = None, over: bool = False) -> None:
        """The part of this rank of the checkpoint that was wanted is on disk at ``path``; call it
        on every rank. Once all have, rank 0 says so and waits until it is stopped; the
        others go on, and wait for it in their next collective.

        Args:
            path: of the checkpoint.
            began: when saving began (``time.monotonic()``).
            over: the training is over. What the script does after it is done in this process, so
                that nobody waits to be stopped; one that has to stop there leaves this checkpoint.
        """
        agreed, self._agreed = self._agreed, False
        if not agreed or over:
            return
        report.flush()
        self.any_rank(False)
        self._let_go()
        number, self._request = self._request, 0
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

    def any_rank(self, mine: bool) -> bool:
        """Whether ``mine`` is true on any rank; every rank calls it at the same place."""
        return bool(self._most([int(mine)])[0])

    def mean(self, mine: float) -> float:
        """The mean of ``mine`` over all ranks; every rank calls it at the same place."""
        group = self._own_group()
        if group is None:
            return mine
        import torch
        import torch.distributed as dist

        value = torch.tensor([mine], dtype=torch.float64)
        dist.all_reduce(value, group=group)
        return float(value.item()) / dist.get_world_size(group)

    def _most(self, mine: list[int]) -> list[int]:
        """The largest of each number over all ranks."""
        group = self._own_group()
        if group is None:
            return mine
        import torch
        import torch.distributed as dist

        numbers = torch.tensor(mine)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        most: list[int] = numbers.tolist()
        return most

    def _own_group(self) -> Any:
        """A group beside the script's; None for one rank. Made at the first step's end, and again
        where the script has made its own anew.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            return None
        scripts = distributed.group.WORLD
        if self._group[0] is not scripts:
            self._group = scripts, new_side_group()
        return self._group[1]

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
