"""Which pool each job is reckoned with where trainers share several. Pure.

A job runs on nodes of one pool. To count it in each pool that it may use would set nodes aside for
it that it never has, so it is counted in one, its home. Decides which: the pool whose nodes it has,
else one with room, else, as long as its trainer has less than its part of all pools together, where
that gets most by it, and then where the others lose least. A job whose home is asked for too much
moves where nodes would stand idle. Where it runs in the end is its trainer's plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from allocator import NodeInfo
from malletrain.core.parts import Wish, part_of, shares_of
from malletrain.core.planning import Candidate

MOST_MOVES = 64
"""Jobs that move in one plan: each is chosen among all."""


@dataclass(frozen=True)
class _Guest:
    """One job that may be at home in several pools."""

    trainer: str
    job: Candidate
    able: Sequence[str]


def homes(
    groups: Mapping[str, Sequence[Candidate]], nodes: Mapping[str, NodeInfo]
) -> dict[str, str]:
    """Job → its home, for those that can run at all. ``groups``: trainer → its candidates."""
    found = _Homes(groups, nodes)
    movable = []
    for trainer, c in _by_turns(groups):
        held = [n for n in c.nodes if n in nodes]
        mine = nodes[held[0]].node_class if held else None
        able = [mine] if c.fixed and mine else [] if c.fixed else found.able(c)
        if not able:
            continue
        if mine in able:
            found.put(trainer, c, mine, held)
        else:
            found.put(trainer, c, found.best(trainer, c, able))
        if len(able) > 1:
            movable.append(_Guest(trainer, c, able))
    found.settle(movable)
    return found.of


def _by_turns(groups: Mapping[str, Sequence[Candidate]]) -> Iterator[tuple[str, Candidate]]:
    """Those that have nodes first; then the job of the trainer that asked for least so far, by its
    part.
    """
    asked, waiting = {}, {}
    for name, group in groups.items():
        holders = [c for c in group if c.nodes]
        yield from ((name, c) for c in holders)
        asked[name] = sum(c.max_nodes for c in holders) / part_of(group)
        waiting[name] = [c for c in reversed(group) if not c.nodes]
    while left := [name for name in groups if waiting[name]]:
        name = min(left, key=asked.__getitem__)
        c = waiting[name].pop()
        asked[name] += c.max_nodes / part_of(groups[name])
        yield name, c


class _Homes:
    """Jobs at home so far, and what each trainer has by it."""

    def __init__(
        self, groups: Mapping[str, Sequence[Candidate]], nodes: Mapping[str, NodeInfo]
    ) -> None:
        self.of: dict[str, str] = {}
        self._sizes = Counter(info.node_class for info in nodes.values())
        self._wishes = {
            pool: {name: Wish(part_of(group)) for name, group in groups.items()}
            for pool in self._sizes
        }
        self._counts: dict[str, dict[str, int]] = {}
        self._aims = self._fair(groups)

    def _fair(self, groups: Mapping[str, Sequence[Candidate]]) -> dict[str, int]:
        """Trainer → its part of the pools that it shares, all together, if jobs were of sand."""
        sharing: dict[frozenset[str], dict[str, Wish]] = {}
        for name, group in groups.items():
            pools = frozenset(pool for pool in self._sizes for c in group if c.may_use(pool))
            most = sum(len(c.nodes) if c.fixed else c.max_nodes for c in group)
            sharing.setdefault(pools, {})[name] = Wish(part_of(group), most=most)
        found = {}
        for pools, wishes in sharing.items():
            found.update(shares_of(wishes, sum(self._sizes[pool] for pool in pools)))
        return found

    def able(self, c: Candidate) -> list[str]:
        """The pools in which there is room for its smallest size."""
        least = c.smallest
        if least is None:
            return []
        return [pool for pool, size in self._sizes.items() if least <= size and c.may_use(pool)]

    def put(self, trainer: str, c: Candidate, pool: str, held: Sequence[str] = ()) -> None:
        """The job is at home in the pool."""
        self.of[c.job] = pool
        self._wishes[pool][trainer].add(c, held)
        self._counts.pop(pool, None)

    def _has(self, pool: str) -> dict[str, int]:
        if pool not in self._counts:
            self._counts[pool] = shares_of(self._wishes[pool], self._sizes[pool])
        return self._counts[pool]

    def _room(self, pool: str) -> int:
        return self._sizes[pool] - sum(wish.most for wish in self._wishes[pool].values())

    def best(self, trainer: str, c: Candidate, able: Sequence[str]) -> str:
        """Where a job without nodes is to be at home."""
        if len(able) == 1:
            return able[0]
        roomiest = max(able, key=lambda pool: (self._room(pool), pool))
        if self._room(roomiest) >= c.max_nodes:
            return roomiest
        short = self._aims[trainer] - sum(self._has(pool)[trainer] for pool in self._sizes)

        def brings(pool: str) -> tuple[int, int, str]:
            wishes = dict(self._wishes[pool])
            wishes[trainer] = copy(wishes[trainer])
            wishes[trainer].add(c, ())
            before, after = self._has(pool), shares_of(wishes, self._sizes[pool])
            more = after[trainer] - before[trainer]
            lost = sum(before[name] - after[name] for name in after if name != trainer)
            return max(0, min(short, more)), -lost, pool

        return max(able, key=brings)

    def settle(self, movable: Sequence[_Guest]) -> None:
        """Move jobs as long as more nodes are used by it, each once, those without nodes first. No
        trainer has fewer by it.
        """
        left = list(movable)
        while (
            left
            and len(movable) - len(left) < MOST_MOVES
            and any(self._room(pool) > 0 for pool in self._sizes)
        ):
            moves = [
                (gain, not guest.job.nodes, number, pool)
                for number, guest in enumerate(left)
                for pool in guest.able
                if (gain := self._gain(guest, pool)) > 0
            ]
            if not moves:
                return
            *_, number, pool = max(moves)
            guest = left.pop(number)
            home = self.of[guest.job.job]
            wish = self._wishes[home][guest.trainer]
            wish.most -= guest.job.max_nodes
            wish.held = [n for n in wish.held if n not in guest.job.nodes]
            if guest.job.must_run:
                wish.due -= guest.job.smallest or 0
            self._counts.pop(home, None)
            self.put(guest.trainer, guest.job, pool)

    def _gain(self, guest: _Guest, pool: str) -> int:
        """How many nodes more are in use if the job moves to the pool; 0: it had better not."""
        home, most = self.of[guest.job.job], guest.job.max_nodes
        over, room = -self._room(home), self._room(pool)
        if over <= 0 or room < max(1, guest.job.smallest or 1):
            return 0
        brings, others = min(room, most), self._wishes[home][guest.trainer].most - most
        if brings < self._has(home)[guest.trainer] - others:
            return 0  # its trainer would have fewer
        return brings - max(0, most - over)
