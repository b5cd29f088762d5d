"""Trains the clients of a round on one node, one after another, and averages their models."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedcase.clients import ClientFailure, ClientResult
from fedcase.hot_samples import plan_epoch
from fedcase.node_cache import ReadAccount
from fedcase.task import Arrays, Task


class ClientSamples(Protocol):
    """The samples of one client, such as :class:`fedcase.node_cache.ClientCache`."""

    hot: list[int]
    """The samples that are in memory."""
    account: ReadAccount

    def read(self, samples: Sequence[int]) -> list[Any]:
        """Return samples in their order."""

    def keep_hottest(
        self, samples: Sequence[int], values: Sequence[Any], losses: Sequence[float]
    ) -> None:
        """Record the losses of samples that were read, and keep the hottest samples in memory."""

    def close(self) -> None:
        """End the use of the samples."""


class NodeMemory(Protocol):
    """The memory of a node, such as :class:`fedcase.node_cache.NodeCache`."""

    def client(self, client: int, dataset: Any) -> ClientSamples:
        """Return the samples of a client. ``dataset``: the client's data set."""


@dataclass(frozen=True)
class LocalOptions:
    """How a client trains."""

    epochs: int = 1
    cold_share: float = 0.3
    """Part of the samples outside memory that an epoch reads, above 0 to 1."""
    seed: int = 0


@dataclass(frozen=True)
class NodeResult:
    """The clients of one node, averaged by their numbers of samples."""

    arrays: Arrays
    """The average; empty if the training of each client failed."""
    results: tuple[ClientResult, ...]
    reads: ReadAccount
    failures: tuple[ClientFailure, ...] = ()
    """The other clients."""


def train_clients(
    task: Task,
    arrays: Arrays,
    clients: Iterable[int],
    number: int,
    cache: NodeMemory,
    options: LocalOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> NodeResult:
    """Train clients in turn, each from the same model. A client whose training raises is left out;
    its traceback is printed.

    Args:
        task: what is trained.
        arrays: the model of the round.
        clients: numbers of the clients, at least one.
        number: number of the round. The draws of a client depend on it, so a round that is made
            again has the same draws.
        cache: the hot samples of this node.
        options: how a client trains.
        clock: seconds.
    """
    total: dict[str, Any] = {}
    weight = 0
    results: list[ClientResult] = []
    failures: list[ClientFailure] = []
    reads = ReadAccount()
    for client in clients:
        begin = clock()
        try:
            after, loss, samples, account = _train(task, arrays, client, number, cache, options)
        except Exception as error:  # the other clients must not lose their training
            traceback.print_exc()
            failures.append(ClientFailure(client, reason_of(error)))
            continue
        results.append(ClientResult(client, samples, loss, clock() - begin))
        reads.add(account)
        for name, array in after.items():
            part = np.asarray(array, dtype=np.float64) * samples
            total[name] = total[name] + part if name in total else part
        weight += samples
    averaged = {
        name: (array / weight).astype(np.asarray(arrays[name]).dtype)
        for name, array in total.items()
    }
    return NodeResult(averaged, tuple(results), reads, tuple(failures))


MAX_REASON = 300
"""Maximum length of a reason, characters."""


def reason_of(error: Exception) -> str:
    """Return what went wrong, in one line: the kind of the error and its message."""
    words = " ".join(str(error).split()).rstrip(".")
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"


def _train(
    task: Task, arrays: Arrays, client: int, number: int, cache: NodeMemory, options: LocalOptions
) -> tuple[Arrays, float, int, ReadAccount]:
    dataset = task.dataset(client)
    random = np.random.default_rng([options.seed, number, client])
    own = cache.client(client, dataset)
    loss = 0.0
    try:
        for epoch in range(options.epochs):
            plan = plan_epoch(len(dataset), own.hot, options.cold_share, random)
            values = own.read(plan.samples)
            arrays, losses = task.train(arrays, values, plan.weights, random)
            if epoch == 0:
                loss = float(np.average(losses, weights=plan.weights))
            own.keep_hottest(plan.samples, values, losses)
    finally:
        own.close()
    return arrays, loss, len(dataset), own.account
