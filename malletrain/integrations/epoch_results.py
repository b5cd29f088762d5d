"""Means and metrics that Lightning gathers over an epoch, when the epoch goes on at another number
of ranks: sums over all ranks in the checkpoint, which one rank has from then on.

Decides what a checkpoint has of the part of the epoch that was trained. What is logged, and when,
is the library's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

States = dict[str, dict[str, Any]]
"""What was gathered until now over all ranks, by kind and name."""


class EpochResults:
    """Of one trainer.

    Args:
        total: sums numbers over the ranks; every rank calls it at the same place.
    """

    def __init__(self, total: Callable[[list[float]], list[float]]) -> None:
        self._total = total
        self._restored: dict[str, Any] = {}
        """Means of before that this rank has not met since."""

    def whole(self, trainer: Any, module: Any) -> States:
        """What was gathered in this epoch over all ranks; all of them call it at the same place."""
        means: dict[str, Any] = {}
        for name, result in _means(trainer):
            size = float(result.cumulated_batch_size)
            means[name] = self._total([float(result.value), size])
        metrics = {name: _gathered(metric) for name, metric in _metrics(module)}
        return {"means": {**self._restored, **means}, "metrics": metrics}

    def restore(self, module: Any, states: States, has_them: bool) -> None:
        """Have one rank go on with ``states``, of :meth:`whole`.

        Args:
            module: Lightning's.
            states: of the checkpoint.
            has_them: whether it is this one.
        """
        if not has_them:
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
        """Something was logged in this process."""
        for name, result in _means(trainer):
            # Lightning averages this number over the ranks, and would cut a whole one.
            result.cumulated_batch_size = result.cumulated_batch_size.to(torch.float64)
            if name in self._restored:
                value, size = self._restored.pop(name)
                result.value = result.value + value
                result.cumulated_batch_size = result.cumulated_batch_size + size

    def forget(self) -> None:
        """The epoch is over."""
        self._restored = {}


def _means(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The means over an epoch of its training, by name."""
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
    """Metrics of torchmetrics that have gathered something which the ranks can put together, by
    name.
    """
    for name, part in _parts(module):
        if _is_metric(part) and part.update_called and part._defaults:
            lone = (isinstance(value, torch.Tensor) and part._reductions[key] is None
                    for key, value in part._defaults.items())  # fmt: skip
            if not any(lone):
                yield name, part


def _gathered(metric: Any) -> dict[str, Any]:
    """The state of a metric over all ranks."""
    with metric.sync_context(should_sync=torch.distributed.is_initialized()):
        return {name: getattr(metric, name) for name in metric._defaults}
