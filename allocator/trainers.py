"""Trainers: disjoint parts of one machine, each with its own objective and jobs, decided in
parallel processes.

Decides which nodes belong to which part, and that every part is solved at the same time. What a
part's jobs are worth is in their bids; a trainer's objective is how its bids were made
(:mod:`allocator.objectives`).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from allocator.allocation import Allocation
from allocator.bids import Bid
from allocator.milp import solve
from allocator.placement import NodeInfo


class TrainerError(ValueError):
    """Parts that overlap, share a name, or ask for nonsense."""


@dataclass(frozen=True)
class Trainer:
    """One part of the machine: its nodes and the bids of its jobs.

    Args:
        name: unique among the trainers solved together.
        nodes: the nodes of this part, none of which another trainer has.
        bids: of its jobs. Jobs belong to one trainer; two trainers may well have jobs of one name.
        warm: the trainer's last allocation.
    """

    name: str
    nodes: Mapping[str, NodeInfo]
    bids: Sequence[Bid]
    warm: Allocation | None = field(default=None, compare=False)

    @property
    def capacity(self) -> dict[str, int]:
        """Nodes by class."""
        total: dict[str, int] = {}
        for info in self.nodes.values():
            total[info.node_class] = total.get(info.node_class, 0) + 1
        return total


def partition(
    nodes: Mapping[str, NodeInfo], shares: Mapping[str, float]
) -> dict[str, dict[str, NodeInfo]]:
    """Split ``nodes`` into disjoint parts in proportion to ``shares``, each class by itself.

    Whole nodes are shared out by largest remainders (so the parts of a class are exact to one
    node); topology groups are kept together as far as the shares allow. The same arguments give the
    same parts, whatever the order of ``nodes``.

    Raises:
        TrainerError: when there are nodes but no share above 0, or a share is negative or no
            number.
    """
    for name, share in shares.items():
        if not 0 <= share < float("inf"):
            raise TrainerError(
                f"Trainer {name} is given a share of {share}; give a number, 0 or more."
            )
    total = sum(shares.values())
    if nodes and not total > 0:
        raise TrainerError(
            "No trainer has a share above 0, so the nodes belong to nobody; give at least one."
        )
    parts: dict[str, dict[str, NodeInfo]] = {name: {} for name in shares}
    by_class: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda n: (str(nodes[n].group), n)):
        by_class.setdefault(nodes[node].node_class, []).append(node)
    for members in by_class.values():
        exact = {name: len(members) * share / total for name, share in shares.items()}
        counts = {name: int(x) for name, x in exact.items()}
        most_owed = sorted(shares, key=lambda name: counts[name] - exact[name])
        for name in most_owed[: len(members) - sum(counts.values())]:
            counts[name] += 1
        at = 0
        for name, count in counts.items():
            parts[name].update((node, nodes[node]) for node in members[at : at + count])
            at += count
    return parts


def check(trainers: Sequence[Trainer]) -> None:
    """Refuse trainers that share a name or a node.

    Raises:
        TrainerError: naming the trainers, and the node.
    """
    owner: dict[str, str] = {}
    names: set[str] = set()
    for trainer in trainers:
        if trainer.name in names:
            raise TrainerError(
                f"Two trainers are called {trainer.name}; give each a name of its own."
            )
        names.add(trainer.name)
        for node in trainer.nodes:
            if owner.setdefault(node, trainer.name) != trainer.name:
                raise TrainerError(
                    f"Node {node} belongs to both {owner[node]} and {trainer.name}; parts must "
                    "not overlap."
                )


class Trainers:
    """Worker processes that solve trainers side by side; they are started once and live until
    :meth:`close`.

    Args:
        processes: worker processes; None for one a processor.
        time_limit_s, gap: of each solve, see :func:`allocator.milp.solve`.
    """

    def __init__(
        self, processes: int | None = None, *, time_limit_s: float = 2.0, gap: float = 0.0
    ) -> None:
        self.time_limit_s, self.gap = time_limit_s, gap
        # Workers are spawned, not forked: the daemon has threads, and a fork would copy their
        # locks.
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))

    def solve(self, trainers: Sequence[Trainer]) -> dict[str, Allocation]:
        """The allocation of every trainer, by name.

        Raises:
            TrainerError: when they share a name or a node.
            BidError: as :func:`allocator.milp.solve` does.
        """
        check(trainers)
        running = [
            (
                t.name,
                self._pool.submit(
                    solve,
                    t.bids,
                    t.capacity,
                    time_limit_s=self.time_limit_s,
                    gap=self.gap,
                    warm=t.warm,
                ),
            )
            for t in trainers
        ]
        return {name: future.result() for name, future in running}

    def close(self) -> None:
        """End the worker processes."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Trainers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()
