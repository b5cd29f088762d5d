"""The model over the ranks of the round: DistributedDataParallel, made anew whenever the group is.

Decides nothing about gradients: torch's own reducer averages them, overlapping the backward pass, so an undisturbed run is a DDP run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class Parallel(torch.nn.Module):
    """Use it where a script uses its DistributedDataParallel model. ``module`` is the script's own, and its state is this one's."""

    def __init__(self, module: torch.nn.Module, used: Callable[[], None], options: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._used = used
        self._options = options
        self.__dict__["_ddp"] = None  # not a submodule: it holds ``module`` itself

    def rebuild(self, several: bool) -> None:
        """A new group, or none (``several`` false). Nothing is exchanged: all ranks hold the same state by now."""
        self.__dict__["_ddp"] = None
        if several and any(p.requires_grad for p in self.module.parameters()):
            options = dict(self._options)
            first = next(self.module.parameters())
            if first.is_cuda:
                options.setdefault("device_ids", [first.device])
            self.__dict__["_ddp"] = DistributedDataParallel(self.module, init_sync=False, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's."""
        self._used()
        ddp = self.__dict__["_ddp"]
        return self.module(*args, **kwargs) if ddp is None else ddp(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DistributedDataParallel's: gradients are added up and not exchanged."""
        ddp = self.__dict__["_ddp"]
        with contextlib.nullcontext() if ddp is None else ddp.no_sync():
            yield

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, so that it loads anywhere."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the module."""
        return self.module.load_state_dict(*args, **kwargs)
