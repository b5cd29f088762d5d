"""MalleTrain: trains neural networks on supercomputer nodes that would otherwise be idle.

Training scripts do ``import malletrain``, so importing this package imports only the standard
library; other modules are imported when one of their names is used. The training-side library:
:func:`report`, :func:`metric`, :func:`mark`, :func:`describe`, :func:`timed`,
:func:`loader_workers`, :class:`Snapshot`, :class:`ElasticSampler`, :class:`ElasticStream`,
:class:`ImportanceSampler`, :class:`AdaptiveBatch`, :class:`DataCache`. They run in the user's
process. :class:`Client` submits jobs from Python, :class:`AsyncClient` from asyncio.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from malletrain.api.aio import AsyncClient
    from malletrain.api.client import Client
    from malletrain.datacache.cache import DataCache
    from malletrain.training.adaptive_batch import AdaptiveBatch
    from malletrain.training.importance_sampler import ImportanceSampler
    from malletrain.training.loader_workers import loader_workers
    from malletrain.training.report import describe, mark, metric, report
    from malletrain.training.sampler import ElasticSampler
    from malletrain.training.snapshot import Snapshot, SnapshotError
    from malletrain.training.step_times import timed
    from malletrain.training.stream import ElasticStream

__version__ = "0.1.0"
__all__ = [
    "AdaptiveBatch",
    "AsyncClient",
    "Client",
    "DataCache",
    "ElasticSampler",
    "ElasticStream",
    "ImportanceSampler",
    "Snapshot",
    "SnapshotError",
    "__version__",
    "describe",
    "loader_workers",
    "mark",
    "metric",
    "report",
    "timed",
]

_MODULE_OF = {
    "AdaptiveBatch": "malletrain.training.adaptive_batch",
    "AsyncClient": "malletrain.api.aio",
    "Client": "malletrain.api.client",
    "DataCache": "malletrain.datacache.cache",
    "ElasticSampler": "malletrain.training.sampler",
    "ElasticStream": "malletrain.training.stream",
    "ImportanceSampler": "malletrain.training.importance_sampler",
    "Snapshot": "malletrain.training.snapshot",
    "SnapshotError": "malletrain.training.snapshot",
    "describe": "malletrain.training.report",
    "loader_workers": "malletrain.training.loader_workers",
    "mark": "malletrain.training.report",
    "metric": "malletrain.training.report",
    "report": "malletrain.training.report",
    "timed": "malletrain.training.step_times",
}


def __getattr__(name: str) -> Any:
    home = _MODULE_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'malletrain' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if (
    "MALLETRAIN_SOCKET" in os.environ and "RANK" in os.environ
):  # A worker of a job reports the time of this import, which is part of a rescale's cost.
    import_module("malletrain.training.report").mark_import()
    import_module("malletrain.training.loader_workers").install()
