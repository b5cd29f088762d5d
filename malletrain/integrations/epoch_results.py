"""Preserves means and metrics that Lightning accumulates over an epoch when the epoch continues at
another number of ranks: the checkpoint has the sums over all ranks, and one rank continues with
them.

Decides what a checkpoint stores of the trained part of an epoch. The library decides what is
logged, and when.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

States = dict[str, dict[str, Any]]
"""Accumulated values over all ranks, by kind (``means``, ``metrics``) and name."""


class EpochResults:
    """The accumulated results of one trainer.

    Args:
        total: sums each number over the ranks. Collective.
    """

    def __init__(self, total: Callable[[list[float]], list[float]]) -> None:
        self._total = total
        self._restored: dict[str, Any] = {}
        """Restored means that this rank has not logged since."""

    def whole(self, trainer: Any, module: Any) -> States:
        """Return the results of this epoch so far over all ranks. Collective."""
        means: dict[str, Any] = {}
        for name, result in _means(trainer):
            size = float(result.cumulated_batch_size)
            means[name] = self._total([float(result.value), size])
        metrics = {name: _synced_state(metric) for name, metric in _metrics(module)}
        return {"means": {**self._restored, **means}, "metrics": metrics}

    def restore(self, module: Any, states: States, continues_here: bool) -> None:
        """Continue with the results of a checkpoint on one rank.

        Args:
            module: the LightningModule.
            states: result of :meth:`whole` in the checkpoint.
            continues_here: whether this rank is the one that continues with them.
        """
        if not continues_here:
            return
        self._restored = dict(states.get("means", {}))
        saved = states.get("metrics", {})
        metrics = {
            name: part for name, part in _parts(module) if name in saved and _is_metric(part)
        }
        for name, metric in metrics.items():
            for key, value in saved[name].items():
                listed = isinstance(metric._defaults[key], list) and isinstance(value, torch.Tensor)
                setattr(metric, key, [value] if listed else value)
            metric._update_count = 1

    def after_batch(self, trainer: Any) -> None:
        """Add the restored means to those that were logged in this process."""
        for name, result in _means(trainer):
            # Lightning averages this number over the ranks, and would truncate an integer.
            result.cumulated_batch_size = result.cumulated_batch_size.to(torch.float64)
            if name in self._restored:
                value, size = self._restored.pop(name)
                result.value = result.value + value
                result.cumulated_batch_size = result.cumulated_batch_size + size

    def forget(self) -> None:
        """Drop the restored results: the epoch is over."""
        self._restored = {}


def _means(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the means over a training epoch, with their names."""
    results: Any = trainer.fit_loop.epoch_loop._results
    for name, result in results.items():
        if result.is_tensor and result.meta.on_epoch and result.meta.is_mean_reduction:
            yield name, result


def _parts(module: Any) -> Iterator[tuple[str, Any]]:
    return iter(module.named_modules())


def _is_metric(part: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(part, torchmetrics.Metric)


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics objects that have data which the ranks can combine, with their
    names.
    """
    for name, part in _parts(module):
        if _is_metric(part) and part.update_called and part._defaults:
            lone = (isinstance(value, torch.Tensor) and part._reductions[key] is None
                    for key, value in part._defaults.items())  # fmt: skip
            if not any(lone):
                yield name, part


def _synced_state(metric: Any) -> dict[str, Any]:
    """Return the state of a metric over all ranks."""
    with metric.sync_context(should_sync=torch.distributed.is_initialized()):
        return {name: getattr(metric, name) for name in metric._defaults}
