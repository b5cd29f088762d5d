"""What a script of the zoo writes down, and the points at which a driver may change its nodes.

All processes of all rounds append to one file, a line of JSON for each point. The points of the
undisturbed run are the boundaries at which a driver changes nodes: its k-th line of a process is
the k-th point of a disturbed run, until the change.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malletrain.protocol import env

STEP, SAMPLE, WEIGHTS = "step", "sample", "weights"
POINT = "point"
"""Kind of a line that is a boundary and records nothing."""


@dataclass(frozen=True)
class Record:
    """One line of a trace."""

    number: int
    """Number of the point in its process, from 0; -1: it is no boundary."""
    kind: str
    key: str
    """Position of the point among those of its kind: an epoch, or epoch and position of a step."""
    values: dict[str, Any]
    rank: int
    world_size: int
    round: int
    """Number of the round; the round of a change is the next one."""
    pid: int

    @property
    def name(self) -> str:
        """Return the name of the boundary in tables."""
        return f"{self.kind} {self.key}" if self.kind != POINT else self.key

    @property
    def names_step(self) -> bool:
        """Whether the line stands for a step that its rank has done."""
        return self.kind == STEP or (self.kind == POINT and self.key == STEP)


class Trace:
    """The recorder that a driver hands to a script.

    Args:
        path: of the trace.
        save_every_s: what the script is to pass as ``every_s`` of its snapshots.
        at_point: called with the number of each point after its line is written.
    """

    def __init__(
        self,
        path: Path,
        save_every_s: float = 3600.0,
        at_point: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.save_every_s = save_every_s
        self._at_point = at_point
        self._number = 0
        self._pid = os.getpid()
        self._place = _place()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    # --- what scripts call ---

    def step(self, key: object, samples: Iterable[int], lr: float, **values: Any) -> None:
        """A step is done by this rank.

        Args:
            key: the same on all ranks and in every run: (epoch, position), or the run's count.
            samples: numbers of the samples that this rank trained on.
            lr: learning rate of the update.
        """
        self._write(STEP, key, {"samples": sorted(map(int, samples)), "lr": lr, **values})

    def samples(self, epoch: int, numbers: Iterable[int]) -> None:
        """A step is done whose samples depend on the number of ranks: each sample is recorded by
        itself, and is trained on once an epoch.
        """
        for number in map(int, numbers):
            self._line(-1, SAMPLE, (epoch, number), {})
        self.point(STEP)

    def note(self, kind: str, key: object, **values: Any) -> None:
        """Something was done that is done once for each ``key``, by every rank or by rank 0."""
        self._write(kind, key, values)

    def point(self, name: str) -> None:
        """A boundary at which nothing is recorded."""
        self._write(POINT, name, {})

    def finish(self, *models: Any) -> None:
        """Record the final weights of this rank."""
        weights = [
            float(number)
            for model in models
            for value in model.state_dict().values()
            for number in value.detach().double().reshape(-1)
        ]
        self._write(WEIGHTS, "end", {"weights": weights})
        # DistributedDataParallel's end after that of its group can hang in torch; a process of the
        # zoo ends without it.
        self._alive = sys._getframe(1).f_locals  # noqa: SLF001

    def watch_updates(self) -> None:
        """Make a point before and after each update of any optimizer."""
        from torch.optim import optimizer

        optimizer.register_optimizer_step_pre_hook(lambda *_: self.point("before an update"))
        optimizer.register_optimizer_step_post_hook(lambda *_: self.point("after an update"))

    # --- the file ---

    def _write(self, kind: str, key: object, values: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # a worker of a loader
            return
        number, self._number = self._number, self._number + 1
        self._line(number, kind, key, values)
        self._at_point(number)

    def _line(self, number: int, kind: str, key: object, values: dict[str, Any]) -> None:
        if env.LIVE in os.environ:
            self._place = _place()
        line = {
            "number": number,
            "kind": kind,
            "key": " ".join(map(str, key)) if isinstance(key, tuple) else str(key),
            "values": {name: _plain(value) for name, value in values.items()},
            **self._place,
            "pid": self._pid,
        }
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def _place() -> dict[str, int]:
    """Return the place of this process in its round. Live mode keeps these variables up to date;
    Lightning changes them.
    """
    return {
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "round": int(os.environ.get(env.GENERATION, "1")),
    }


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def read(path: Path) -> list[Record]:
    """The lines of a trace, in the order in which they were written."""
    if not path.exists():
        return []
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
