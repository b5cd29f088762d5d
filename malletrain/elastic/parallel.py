"""The model over the ranks of the round: DistributedDataParallel, wrapped again after every change
of the group.

Decides nothing about gradients: torch's reducer collects them in buckets and exchanges these during
the backward pass, so a run without changes is a DDP run. With gloo, buckets and buffers are
exchanged through the group, so that the exchange can be aborted.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from malletrain.elastic.group import Group
from malletrain.training.step_times import counted_as

_NO_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Parallel(torch.nn.Module):
    """A replacement for the script's DistributedDataParallel model. Its state is that of
    ``module``.

    Args:
        module: the script's model.
        used: called before each forward pass.
        options: options of DistributedDataParallel.
    """

    def __init__(
        self, module: torch.nn.Module, used: Callable[[], None], options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.module = module
        self._used = used
        self._options = options
        option = options.get("forward_sync_buffers", options.get("broadcast_buffers"))
        self._sync_buffers = option is not False
        self._group: Group | None = None
        self._round: Group | None = None
        self._wrapped_parameters: list[torch.nn.Parameter] = []
        self._requires_grad: list[bool] = []
        self.__dict__["_ddp"] = None  # not a submodule: it holds ``module`` itself

    def rebuild(self, group: Group) -> None:
        """Wrap the module again for a new group. Exchanges nothing, because all ranks already have
        the same state.

        Drops the gradients. They belong to the last step, and the next step starts without them;
        DDP would copy them into its new buckets.
        """
        self.__dict__["_ddp"], self._group, self._round = None, None, group
        self._wrapped_parameters = list(self.module.parameters())
        self._requires_grad = [p.requires_grad for p in self._wrapped_parameters]
        self.module.zero_grad(set_to_none=True)
        if not group.several or not any(p.requires_grad for p in self.module.parameters()):
            return
        options = dict(self._options)
        first = next(self.module.parameters())
        if first.is_cuda and not group.by_host:
            options.setdefault("device_ids", [first.device])
        else:
            options.pop("broadcast_buffers", None)
            options[_NO_BUFFERS] = False
            # Without a hook, DDP divides gradients while it copies them into buckets; a hook needs
            # a pass of its own. The view saves copying them back, which compensates for that.
            options.setdefault("gradient_as_bucket_view", True)
            self._group = group
        ddp = DistributedDataParallel(self.module, init_sync=False, **options)
        if self._group is not None:
            ddp.register_comm_hook(group, _exchange)
        self.__dict__["_ddp"] = ddp

    def _agree_on_buffers(self, group: Group) -> None:
        """Give all ranks the buffers (running statistics) of rank 0, as DDP does."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self.module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer.detach())
        for same in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in same]).cpu()
            group.wait(dist.broadcast(flat, 0, async_op=True))
            for buffer, part in zip(same, flat.split([b.numel() for b in same]), strict=True):
                buffer.copy_(part.view_as(buffer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, through DDP if there are peers."""
        self._used()
        if self._round and self._requires_grad != [
            p.requires_grad for p in self._wrapped_parameters
        ]:
            # DDP exchanges the gradients of the parameters that were trained when it was made.
            self.rebuild(self._round)
        ddp = self.__dict__["_ddp"]
        if ddp is None:
            return self.module(*args, **kwargs)
        if self._group is not None and self._sync_buffers and torch.is_grad_enabled():
            self._agree_on_buffers(self._group)
        return ddp(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "register_comm_hook":  # so that hasattr() is false
            raise AttributeError(
                "run.ddp has no register_comm_hook: in live mode the exchange of the gradients is "
                "the run's own. Leave the hook out, or train in restart mode, with "
                "DistributedDataParallel and malletrain.Snapshot."
            )
        return super().__getattr__(name)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in DistributedDataParallel: gradients are accumulated and not exchanged."""
        ddp = self.__dict__["_ddp"]
        with contextlib.nullcontext() if ddp is None else ddp.no_sync():
            yield

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the module, so that it loads without this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the module."""
        return self.module.load_state_dict(*args, **kwargs)


@counted_as("exchange")
def average_gradients(group: Group, module: torch.nn.Module) -> None:
    """Average the gradients of ``module`` over all ranks of ``group``."""
    if not group.several:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in (p.grad for p in module.parameters() if p.grad is not None):
        by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for same in by_kind.values():
        flat = torch.cat([grad.reshape(-1) for grad in same])
        if flat.is_cuda and not group.by_host:
            dist.all_reduce(flat)
            flat.div_(group.place.size)
        else:
            group.average(flat).wait()
        for grad, part in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
            grad.copy_(part.view_as(grad))


def _exchange(group: Group, bucket: dist.GradBucket) -> Any:
    return group.average(bucket.buffer())


# DDP checks the annotation, which must be the class; annotations in this file are strings.
_exchange.__annotations__.update(bucket=dist.GradBucket)
_exchange.__annotations__.pop("return")
