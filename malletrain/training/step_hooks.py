"""Replaces functions of torch, so that the library sees the steps of a script without a change to
it: the request of a batch of a DataLoader, which ends the step before
(:func:`call_around_batches`), and the parts of a training step, for
:mod:`malletrain.training.step_times`.

The parts are a wait for a batch of a DataLoader, a wait for a collective, the broadcast of a
model's buffers, and the end of a backward pass, at which DistributedDataParallel waits for the
exchange of the gradients.

Decides nothing. Each function is replaced once in each process, by one that calls the original and,
while a clock runs, measures it. The collectives that a backward pass starts run beside it, so only
what is left of them when the last gradient is computed counts as exchange. A model that FSDP shards
on GPUs exchanges within its computation, where nothing waits that could be measured: the exchanges
of such a process are not known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from malletrain.training import step_times
from malletrain.training.torch_private import (
    batches_class,
    buffers_sync,
    queue_after_backward,
    sharded_parameters,
    work_class,
)

_MARK = "counts_for_malletrain"
"""Attribute of a replaced function."""
_AROUND_BATCHES = "_malletrain_around_batches"
"""Attribute of a DataLoader's iterator: the functions that are called before each batch, and when
there is none left.
"""


def call_around_batches(
    iterator: Any, before_each: Callable[[], None], after_all: Callable[[], None]
) -> bool:
    """Call ``before_each`` each time the script requests a batch from a DataLoader's ``iterator``,
    and ``after_all`` when there is none left. Return False if ``iterator`` is none that this torch
    makes.
    """
    loader_iterator = batches_class()
    if loader_iterator is None or not isinstance(iterator, loader_iterator):
        return False
    _see_batches(loader_iterator)
    setattr(iterator, _AROUND_BATCHES, (before_each, after_all))
    return True


def _see_batches(loader_iterator: Any) -> None:
    """Replace the method that a loop calls for a batch, once. What is called before a batch is no
    wait for data.
    """
    original = loader_iterator.__next__
    if hasattr(original, _MARK):
        return
    measured = step_times.counted_as("data")(original)

    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        calls = iterator.__dict__.get(_AROUND_BATCHES)
        if calls is None:
            return measured(iterator)
        before_each, after_all = calls
        before_each()
        try:
            return measured(iterator)
        except StopIteration:
            after_all()
            raise

    _replace(loader_iterator, "__next__", next_batch)


def install() -> None:
    """Replace the functions of torch, once. Leaves out those that the installed torch lacks."""
    if (loader_iterator := batches_class()) is not None:
        _see_batches(loader_iterator)
    for owner, name, part in (
        (work_class(), "wait", "exchange"),
        (*buffers_sync(), "exchange"),
    ):
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, _MARK):
            _replace(owner, name, step_times.counted_as(part)(original))  # type: ignore[arg-type]
    for owner, name in sharded_parameters():
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, _MARK):
            _replace(owner, name, _exchanging_unmeasured(original))
    if not hasattr(torch.autograd.backward, _MARK):
        _replace(torch.autograd, "backward", _counting_backward(torch.autograd.backward))


def _replace(owner: Any, name: str, function: Any) -> None:
    setattr(function, _MARK, True)
    setattr(owner, name, function)


def _exchanging_unmeasured(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        clock = step_times.current()
        if clock is not None and step_times.uses_gpu():
            clock.leave_out("exchange")
        return function(*args, **kwargs)

    return call


def _counting_backward(backward: Callable[..., None]) -> Callable[..., None]:
    """Return ``backward``, measured in the thread whose steps are: torch may run what it starts in
    threads of its own, for which that thread waits.
    """

    @functools.wraps(backward)
    def count(tensors: Any, *args: Any, **kwargs: Any) -> None:
        clock = step_times.current()
        root = tensors if isinstance(tensors, torch.Tensor) else None
        if (
            clock is None
            or not clock.is_of_this_thread
            or root is None
            or root.grad_fn is None
            or not (dist.is_available() and dist.is_initialized())
            or dist.get_world_size() < 2
        ):
            return backward(tensors, *args, **kwargs)
        end = _BackwardEnd(clock)
        # The hook of the root is the first function that runs in the backward pass. So its callback
        # is called before that of DistributedDataParallel, which waits for the gradients.
        hook = root.register_hook(end.announce)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            hook.remove()
            end.close()

    return count


class _BackwardEnd:
    """The time between the end of a backward pass's computation and its return."""

    def __init__(self, clock: step_times.StepClock) -> None:
        self._clock = clock
        self._has_begun = False

    def announce(self, gradient: torch.Tensor) -> None:
        """Request the call of :meth:`begin` after the last gradient."""
        queue_after_backward(self.begin)

    def begin(self) -> None:
        """Begin the exchange. torch may call this in a thread of its own, for which the clock's
        thread waits.
        """
        self._has_begun = self._clock.begin("exchange", any_thread=True)

    def close(self) -> None:
        """End the exchange."""
        if self._has_begun:
            self._clock.end()
