"""Memory for the optimizer state that a joiner is about to get: allocated and touched while the
others still train.

The model is there when a script calls ``elastic.Run``, its optimizer's state is not: it comes with
the first step, or from a peer. Memory that is first touched while it is received costs the time of
page faults, in which everybody waits. Decides what is made ready; nothing depends on it: what was
not, or does not fit, is allocated when it comes.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections import defaultdict
from collections.abc import Iterable

import torch

LEAST_BYTES = 1 << 16
"""Smaller tensors are not worth the trouble."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

Kind = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape, type, and whether it is on a GPU."""


def described(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """What a joiner needs memory for, by what is here; empty while the optimizers make a step for
    the first time. For any thread: nothing is copied.
    """
    tensors = []
    try:
        for optimizer in optimizers:
            for state in list(optimizer.state.values()):
                for value in list(state.values()):
                    if isinstance(value, torch.Tensor) and value.nbytes >= LEAST_BYTES:
                        dtype = str(value.dtype).removeprefix("torch.")
                        tensors.append([list(value.shape), dtype, value.is_cuda])
    except (AttributeError, RuntimeError):  # it changes at this moment, or is of a kind of its own
        return "[]"
    return json.dumps(tensors)


def keep_freed() -> bool:
    """Have the C library keep memory that was freed, for what is allocated next: gradients and
    buckets are made anew after every change of the group, and pages that went back to the kernel
    would be faulted in once more while everybody waits. Pieces of more than 32 MB go back all the
    same (mallopt(3), glibc).

    Returns:
        Whether that was done; not where the environment says how memory is managed.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


class Rooms:
    """Of one process. ``device``: where tensors of a peer's GPU go here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[Kind, list[torch.Tensor]] = defaultdict(list)

    def make(self, data: str) -> None:
        """Have memory ready for what was :func:`described`; calling it again adds what is lacking.

        Raises:
            ValueError: It was not described so.
            MemoryError, RuntimeError: There is too little memory.
        """
        counts: dict[Kind, int] = defaultdict(int)
        for shape, dtype, cuda in json.loads(data):
            counts[tuple(shape), getattr(torch, dtype), cuda] += 1
        for kind, count in counts.items():
            shape, dtype, cuda = kind
            device = self._device if cuda else torch.device("cpu")
            while len(self._free[kind]) < count:
                self._free[kind].append(torch.empty(shape, dtype=dtype, device=device).fill_(0))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, cuda: bool) -> torch.Tensor | None:
        """One that is ready; None: there is none."""
        free = self._free.get((shape, dtype, cuda))
        return free.pop() if free else None

    def clear(self) -> None:
        """Give back what nobody took."""
        self._free.clear()
