"""Who iterates a sampler: the iterator of a DataLoader, or a wrapper that misreads the batches.

Decides which wrappers are refused. torch is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def calling_object() -> Any:
    """Return the object whose method called ``iter()`` on the sampler; None if a plain function
    called it.
    """
    return _caller_variable("self")


def calling_loader() -> Any:
    """Return the DataLoader that called ``iter()`` on the sampler; None if another object did."""
    return _caller_variable("loader")


def _caller_variable(name: str) -> Any:
    """Return a variable of the function that called the function of the sampler."""
    frame = inspect.currentframe()
    try:
        for _ in range(3):
            frame = frame.f_back if frame else None
        return frame.f_locals.get(name) if frame else None
    finally:
        del frame  # breaks a reference cycle that would keep the loader's workers alive


def is_loader_iterator(caller: object) -> bool:
    """Whether ``caller`` is the iterator of a DataLoader, without importing torch."""
    return any(cls.__name__ == "_BaseDataLoaderIter" for cls in type(caller).__mro__)


def call_before_each_batch(iterator: Any, function: Callable[[], None]) -> bool:
    """Call ``function`` each time a batch is requested from a DataLoader's iterator. Return False
    if the installed torch has no place for that.
    """
    from malletrain.training import step_hooks

    return step_hooks.call_before_each_batch(iterator, function)


def reject_wrapper(sampler: object, caller: object) -> None:
    """Raise TypeError if ``caller`` misinterprets the batches. torch's BatchSampler treats them as
    single samples, accelerate's BatchSamplerShard as batches of all ranks, and its SkipBatchSampler
    as the batches of a whole epoch.
    """
    names = {cls.__name__ for cls in type(caller).__mro__}
    if "SkipBatchSampler" in names and getattr(caller, "skip_batches", None) != 0:
        raise TypeError(
            "ElasticSampler begins at the first sample that was not trained on, so that "
            "skip_first_batches() would skip the same batches twice. Use the loader as it is."
        )
    if "BatchSamplerShard" in names:
        raise TypeError(
            "ElasticSampler yields only this rank's share, and accelerator.prepare(loader) would "
            "split it again. Use the loader as it is: leave it out of prepare()."
        )
    if "BatchSampler" in names and getattr(caller, "sampler", None) is sampler:
        raise TypeError(
            "ElasticSampler yields whole batches, but the DataLoader was given it as sampler=. "
            "Write DataLoader(dataset, batch_sampler=sampler), without batch_size, shuffle and "
            "drop_last."
        )
