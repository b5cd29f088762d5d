"""Connects a training loop that writes its own checkpoints to MalleTrain: reports steps, asks
whether a checkpoint is requested, and reports that it is written.

All ranks learn of a request at the same step. Decides what follows a checkpoint. The library writes
the checkpoint.
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
from malletrain.training.drain import StepFlush, wait_to_be_stopped
from malletrain.training.first_sigterm import ignore_first_sigterm
from malletrain.training.ranks import rank_and_world
from malletrain.training.side_group import Team, new_side_group


class StateGuard:
    """Connection of one run to MalleTrain. Call :meth:`step` at the end of each training step, on
    every rank. It uses a gloo group of its own, so that its collectives never mix with the
    script's.
    """

    def __init__(self) -> None:
        # the same on all ranks, even if this rank cannot read the flags
        self._in_malletrain = bool(os.environ.get(env.FLAGS))
        self._flags = report.open_flags()
        self._served_request = 0
        self._request = 0
        self._is_requested = False
        self._announced = False
        self._flush = StepFlush()
        self._handler: Any = None
        self._group: tuple[Any, Any] = (None, None)
        """The script's default group, and the gloo group that was created for it."""
        self.late = False
        """True if a checkpoint was due on any rank at the last step."""

    def step(self, samples: float) -> bool:
        """Report a finished step with ``samples`` samples of this process. Return the result of
        :meth:`wants_checkpoint`.
        """
        malletrain.report(samples)
        return self.wants_checkpoint()

    def announce(self) -> None:
        """Tell the agent that this process saves on request."""
        if not self._in_malletrain:
            return
        self._restore_sigterm_handler()
        ignore_first_sigterm()
        if not self._announced and self._flags is not None and rank_and_world()[0] == 0:
            self._announced = True
            report.send(Capable)

    def wants_checkpoint(self, late: bool | None = None) -> bool:
        """Return whether MalleTrain requests a checkpoint now; the same on all ranks.

        Inside MalleTrain, or if ``late`` is not None, this is one small all-reduce over all ranks.

        Args:
            late: whether a checkpoint is due by this process's clock. Afterwards :attr:`late` is
                True if it is due on any rank. None if the library decides that itself.
        """
        self.late = bool(late)
        if not self._in_malletrain:
            if late is not None:
                self.late = self.any_rank(late)
            return False
        self.announce()
        number = 0
        if rank_and_world()[0] != 0:
            self._flush.after_step()
        elif self._flags is not None:
            number = self._flags.drain_request()
        self._request = number if number != self._served_request else 0
        self._is_requested, self.late = map(
            bool, self._max_over_ranks([int(bool(self._request)), int(self.late)])
        )
        return self._is_requested

    def saved(self, path: str, began: float | None = None, over: bool = False) -> None:
        """Report that this rank's part of the requested checkpoint is on disk. Call it on every
        rank. When all ranks have called it, rank 0 reports the checkpoint and waits to be stopped.
        The other ranks continue, and wait for rank 0 in their next collective.

        Args:
            path: path of the checkpoint.
            began: start of saving (``time.monotonic()``); None if unknown.
            over: whether the training is over. Then rank 0 does not wait, because the script's
                remaining code runs in this process; if the process is stopped there, this is the
                newest checkpoint.
        """
        is_requested, self._is_requested = self._is_requested, False
        if not is_requested or over:
            return
        report.flush()
        self.any_rank(False)
        self._reset_sigterm_handler()
        request, self._request = self._request, 0
        if not request or self._flags is None:
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
        self._served_request = wait_to_be_stopped(self._flags, request)
        self._restore_sigterm_handler()

    def any_rank(self, own_value: bool) -> bool:
        """Return whether ``own_value`` is true on any rank. Collective."""
        return bool(self._max_over_ranks([int(own_value)])[0])

    def from_rank_0(self, text: str) -> str:
        """Return on every rank the ``text`` of rank 0. Collective."""
        return Team(self._gloo_group()).from_rank_0(lambda: text)

    def mean(self, own_value: float) -> float:
        """Return the mean of ``own_value`` over all ranks. Collective."""
        group = self._gloo_group()
        if group is None:
            return own_value
        import torch
        import torch.distributed as dist

        value = torch.tensor([own_value], dtype=torch.float64)
        dist.all_reduce(value, group=group)
        return float(value.item()) / dist.get_world_size(group)

    def _max_over_ranks(self, own_values: list[int]) -> list[int]:
        """Return the maximum of each number over all ranks. Collective."""
        group = self._gloo_group()
        if group is None:
            return own_values
        import torch
        import torch.distributed as dist

        numbers = torch.tensor(own_values)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        maxima: list[int] = numbers.tolist()
        return maxima

    def _gloo_group(self) -> Any:
        """Return the gloo group; None for one rank. It is created at the end of the first step, and
        again if the script has created a new default group.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            return None
        default_group = distributed.group.WORLD
        if self._group[0] is not default_group:
            self._group = default_group, new_side_group()
        return self._group[1]

    def _reset_sigterm_handler(self) -> None:
        """Let the coming SIGTERM end this process at once, because the checkpoint is on disk. A
        library's handler would finish the step first, or use collectives, until the process is
        killed.
        """
        if threading.current_thread() is threading.main_thread() and callable(
            signal.getsignal(signal.SIGTERM)
        ):
            self._handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _restore_sigterm_handler(self) -> None:
        """Restore the previous SIGTERM handler: the signal did not come."""
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None
