"""Memory for the optimizer state that a joiner is about to receive: allocated and touched while the
other ranks still train.

When a script calls ``elastic.Run``, its model exists, and the state of its optimizer does not: that
comes with the first step, or from a peer. If a process first touches the memory while it receives
the state, all ranks wait for its page faults. Decides what is allocated in advance. Nothing depends
on it: a tensor without prepared memory is allocated when it arrives.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections import defaultdict
from collections.abc import Iterable

import torch

MIN_BYTES = 1 << 16
"""Minimum size of a tensor for which memory is prepared."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

Kind = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape, dtype, and whether the tensor is on a GPU."""


def describe_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return, as JSON, the kinds of the tensors for which a joiner needs memory: those of the
    optimizers here. The list is empty until the optimizers have made their first step. Can be
    called from any thread; copies nothing.
    """
    tensors = []
    try:
        for optimizer in optimizers:
            for state in list(optimizer.state.values()):
                for value in list(state.values()):
                    if isinstance(value, torch.Tensor) and value.nbytes >= MIN_BYTES:
                        dtype = str(value.dtype).removeprefix("torch.")
                        tensors.append([list(value.shape), dtype, value.is_cuda])
    except (AttributeError, RuntimeError):  # the state changes meanwhile, or has another structure
        return "[]"
    return json.dumps(tensors)


def keep_freed() -> bool:
    """Make the C library keep freed memory for later allocations. Gradients and buckets are
    allocated again after every change of the group. If their pages had gone back to the kernel, all
    ranks would wait for page faults. Allocations of more than 32 MB are returned to the kernel
    anyway (mallopt(3), glibc).

    Returns:
        Whether the setting was made. It is not if the environment configures the allocator.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


class Rooms:
    """The prepared memory of one process. ``device``: device for what a peer has on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[Kind, list[torch.Tensor]] = defaultdict(list)

    def make(self, data: str) -> None:
        """Allocate memory for the tensors in ``data``, a result of :func:`describe_tensors`. A
        further call adds only what is missing.

        Raises:
            ValueError: ``data`` is not a result of :func:`describe_tensors`.
            MemoryError, RuntimeError: there is too little memory.
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
        """Return a prepared tensor; None if there is none.

        Args:
            shape: shape of the tensor.
            dtype: its dtype.
            cuda: whether the peer has it on a GPU.
        """
        free = self._free.get((shape, dtype, cuda))
        return free.pop() if free else None

    def clear(self) -> None:
        """Free the memory that was not used."""
        self._free.clear()
