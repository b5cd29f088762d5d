"""The arguments with which a script describes a run with a sharded model.

Decides which arguments fit together, and the error messages for those that do not.
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
    """The arguments that describe a sharded model; see :class:`malletrain.elastic.Run`."""

    build: Build | None
    """Returns the model."""
    parallelize: Parallelize | None
    """Shards the model."""
    over: str
    """Ranks over which it is sharded: ``all`` or ``node``."""
    replicate_every: int
    """Number of steps between copies; 0 for none."""


def sharded_training(
    shards: Shards,
    objects: dict[str, Any],
    device: torch.device,
    snapshot: str | os.PathLike[str] | bool | None,
    every_s: float,
    warmup: Callable[[], None] | None,
) -> ShardedTraining:
    """Return the training that the arguments of a run describe.

    Args:
        shards: arguments for the sharded model.
        objects: the other objects of the run, by name.
        device: device of the shards.
        snapshot: path of the snapshots; True for the job's own, None or False for none.
        every_s: interval between snapshots, seconds.
        warmup: the run's ``warmup``, which must be None.

    Raises:
        TypeError: an argument is missing, or has the wrong type.
        ValueError: the value of an argument is not possible.
    """
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
    built = {**objects, "optimizer": make_optimizer(model)}
    make_scheduler = objects.get("scheduler")
    if callable(make_scheduler):
        built["scheduler"] = make_scheduler(built["optimizer"])
    return ShardedTraining(
        model, built, shards.over, shards.replicate_every, device, snapshot, every_s
    )
