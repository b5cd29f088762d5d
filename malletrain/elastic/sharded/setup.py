"""A run with a sharded model, as the script says it.

Decides what arguments fit each other; the sentences of those that do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from malletrain.elastic.sharded.model import Build, Parallelize, ShardedModel
from malletrain.elastic.sharded.training import ShardedTraining
from malletrain.training.torch_private import require

_HOW = (
    "elastic.Run: a sharded model needs build=, parallelize= and optimizer=, all functions, e.g. "
    "elastic.Run(build=make_model, parallelize=shard, optimizer=lambda model: "
    "torch.optim.AdamW(model.parameters()), sampler=sampler)."
)


@dataclass(frozen=True)
class Shards:
    """What a script says of its sharded model; see :class:`malletrain.elastic.Run`."""

    build: Build | None
    """Makes the model."""
    parallelize: Parallelize | None
    """Shards it."""
    over: str
    """``all`` or ``node``."""
    replicate_every: int
    """Steps between copies; 0 for none."""


def sharded_training(
    shards: Shards,
    objects: dict[str, Any],
    device: torch.device,
    snapshot: str | os.PathLike[str] | bool | None,
    every_s: float,
    warmup: Callable[[], None] | None,
) -> ShardedTraining:
    """The training that the arguments of a run describe. Raises TypeError or ValueError."""
    make_optimizer = objects.get("optimizer")
    if shards.build is None or shards.parallelize is None or not callable(make_optimizer):
        raise TypeError(_HOW)
    if isinstance(make_optimizer, torch.optim.Optimizer) or "model" in objects:
        raise TypeError(_HOW)
    if warmup is not None:
        raise TypeError(
            "elastic.Run: warmup cannot run a sharded model, whose parameters exist only in a "
            "group."
        )
    if shards.over not in ("all", "node"):
        raise ValueError(f"elastic.Run: shard must be 'all' or 'node', not {shards.over!r}.")
    if shards.replicate_every < 0:
        raise ValueError(
            "elastic.Run: replicate_every must be a number of steps from 0, not "
            f"{shards.replicate_every!r}."
        )
    if shards.over == "node" and shards.replicate_every:
        raise ValueError(
            "elastic.Run: with shard='node' every node holds the whole state; leave out "
            "replicate_every."
        )
    require("sharded live mode")
    model = ShardedModel(shards.build, shards.parallelize, device)
    made = {**objects, "optimizer": make_optimizer(model)}
    make_scheduler = objects.get("scheduler")
    if callable(make_scheduler):
        made["scheduler"] = make_scheduler(made["optimizer"])
    return ShardedTraining(
        model, made, shards.over, shards.replicate_every, device, snapshot, every_s
    )
