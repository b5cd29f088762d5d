"""The dispatcher's view of replicas. Decides which replicas a request fits, and which one it gets.
Pure.

A request fits a replica if a slot is free and its prompt and ``max_tokens`` fit into the free KV
memory: then no engine has to evict a sequence that it has begun. Among these replicas the request
gets, in this order of criteria:

1. one that is expected to last until the answer is complete;
2. for long answers, the one that is expected to last longest (within a factor of two);
3. the one that has most of the prompt in its prefix cache;
4. the one with the fewest requests in relation to its slots.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmserve.states import REPLICA_TRANSITIONS, ReplicaEvent, ReplicaState

PREFIX_BLOCK = 64
"""Ids in a block of a prefix: a multiple of 16, the block size of engines, for fewer entries."""
MAX_PREFIX_BLOCKS = 4096
"""Maximum number of prefix blocks that are recorded for a replica: 262,144 ids."""
LONG_ANSWER_S = 30.0
"""Duration from which an answer is long, seconds: only long answers prefer lasting replicas."""


@dataclass(frozen=True)
class Capacity:
    """The size and the speed of a replica."""

    slots: int
    """Maximum number of requests."""
    kv_tokens: int
    """Maximum number of tokens of all its requests."""
    token_s: float = 0.0
    """Seconds for each token of one answer while all slots are in use; 0: not known."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.kv_tokens < 1:
            raise ValueError(
                f"A replica needs a slot and KV memory; got {self.slots} slots and "
                f"{self.kv_tokens} tokens."
            )


def prefix_blocks(ids: Sequence[int]) -> list[int]:
    """Return a hash for each whole block of a prompt, of all ids up to the end of the block."""
    blocks, digest = [], 0
    for start in range(0, len(ids) - PREFIX_BLOCK + 1, PREFIX_BLOCK):
        digest = zlib.crc32(array("I", ids[start : start + PREFIX_BLOCK]).tobytes(), digest)
        blocks.append(digest << 32 | start)
    return blocks


class PrefixMemory:
    """The prefixes that a replica probably has in its cache: those that were posted last."""

    def __init__(self, size: int = MAX_PREFIX_BLOCKS) -> None:
        self._size = size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Iterable[int]) -> None:
        """Record the blocks of a prompt that is posted."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._size:
            self._blocks.popitem(last=False)

    def match(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that are cached."""
        for number, block in enumerate(blocks):
            if block not in self._blocks:
                return number
        return len(blocks)


@dataclass
class DispatcherReplica:
    """One replica."""

    name: str
    capacity: Capacity
    state: ReplicaState = ReplicaState.LOADING
    lasts_until: float = math.inf
    """Time at which it is expected to end; after a notice, the time at which it ends. Seconds on
    the clock of the caller."""
    requests: dict[str, int] = field(default_factory=dict)
    """Name of each request on it → tokens reserved. Changed by :meth:`hold` and :meth:`release`."""
    free_tokens: int = field(init=False)
    """KV tokens that no request has reserved."""
    reserved_for: str | None = None
    """Request for which it is reserved, to run alone on it; None: it is not reserved."""
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)

    def __post_init__(self) -> None:
        self.free_tokens = self.capacity.kv_tokens

    def change(self, event: ReplicaEvent) -> None:
        """Change to the next state. Raises KeyError for an event that is invalid in this state."""
        self.state = REPLICA_TRANSITIONS[self.state, event]

    def hold(self, request: str, tokens: int) -> None:
        """Reserve a slot and KV memory."""
        self.requests[request] = tokens
        self.free_tokens -= tokens

    def release(self, request: str) -> None:
        """Release what a request has reserved."""
        self.free_tokens += self.requests.pop(request)
        if self.reserved_for == request:
            self.reserved_for = None

    def fits(self, request: str, tokens: int) -> bool:
        """Return whether the request can be posted now."""
        return (
            self.state is ReplicaState.READY
            and self.reserved_for in (None, request)
            and (self.reserved_for is None or not self.requests)
            and len(self.requests) < self.capacity.slots
            and tokens <= self.free_tokens
        )

    def rank(
        self, answer_tokens: int, blocks: Sequence[int], now: float
    ) -> tuple[bool, float, int, float]:
        """Return the rank of this replica among those that fit; the smallest is best.

        Args:
            answer_tokens: tokens that are still to be generated.
            blocks: prefix blocks of the prompt.
            now: seconds on the clock of the caller.
        """
        answer_s = answer_tokens * self.capacity.token_s
        remaining_s = max(1.0, self.lasts_until - now)
        life = 0.0
        if answer_s >= LONG_ANSWER_S:
            life = math.inf if math.isinf(remaining_s) else math.floor(math.log2(remaining_s))
        load = len(self.requests) / self.capacity.slots
        return (remaining_s < answer_s, -life, -self.prefixes.match(blocks), load)


def best_replica(
    replicas: Iterable[DispatcherReplica],
    request: str,
    tokens: int,
    answer_tokens: int,
    blocks: Sequence[int],
    now: float,
) -> DispatcherReplica | None:
    """Return the replica that a request is posted to; None if it fits nowhere.

    Args:
        replicas: replicas in any fixed order; of equal ones the first is chosen.
        request: its name.
        tokens: KV tokens to reserve.
        answer_tokens: tokens that are still to be generated.
        blocks: prefix blocks of the prompt.
        now: seconds on the clock of the caller.
    """
    return min(
        (replica for replica in replicas if replica.fits(request, tokens)),
        key=lambda replica: replica.rank(answer_tokens, blocks, now),
        default=None,
    )
