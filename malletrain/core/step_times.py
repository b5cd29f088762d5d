"""Says where the time of a job's training steps goes, and gives one piece of advice. Pure.

Each rank measures three parts of its steps: waiting for data, exchanges with other ranks, and
snapshots (:mod:`malletrain.training.step_times`). What is left is computing. An exchange ends on
all ranks at once, so the rank that is in exchanges for the shortest time comes last and waits for
nobody: its time is that of the transfer, and what other ranks spend beyond it is waiting for other
ranks. For the same reason only the parts of that rank delay the job: the others would wait for it
anyway. The cause of a delay is therefore taken from that rank. If exchanges are not measured, it is
not known which rank comes last: none is called slow, and the cause is taken from the rank that
waits longest for data.

Decides nothing about the plan. Which nodes are swapped out: :mod:`malletrain.core.slow_nodes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median

DATA, COMPUTING, OTHERS, TRANSFER, SNAPSHOT = "data", "computing", "others", "transfer", "snapshot"
SHARES = (DATA, COMPUTING, OTHERS, TRANSFER, SNAPSHOT)
"""Parts of a step, in the order in which they are shown."""
MIN_RATIO = 1.5
"""Ratio of the time for which the last rank waits for data to the median of the others, above which
its node is the cause.
"""


@dataclass(frozen=True)
class RankTimes:
    """The mean step of one rank."""

    rank: int
    """Number of the rank."""
    node: str
    """Its node."""
    step_s: float
    """Duration of a step, seconds."""
    data_s: float | None = None
    """Of that, waiting for data, seconds; None if not measured."""
    exchange_s: float | None = None
    """In exchanges with other ranks, seconds; None if there was none, or they are not measured."""
    snapshot_s: float | None = None
    """In snapshots, seconds; None if there was none."""

    @property
    def computing_s(self) -> float:
        """The rest of the step, seconds."""
        parts = (self.data_s, self.exchange_s, self.snapshot_s)
        return max(0.0, self.step_s - sum(part or 0.0 for part in parts))


class Bottleneck(Enum):
    """The largest cause of delay in a job's steps."""

    DATA = "data"
    """All ranks wait for data."""
    DATA_OF_ONE_RANK = "data-of-one-rank"
    """One rank waits for data much longer than the others."""
    SLOW_RANK = "slow-rank"
    """One rank computes longer than the others."""
    SNAPSHOT = "snapshot"
    """Snapshots stop the training."""
    TRANSFER = "transfer"
    """The exchange of gradients."""
    MOSTLY_TRANSFER = "mostly-transfer"
    """The exchange of gradients takes more time than everything else."""
    NOTHING = "nothing"
    """No part stands out."""


ADVICE: tuple[tuple[Bottleneck, float, str], ...] = (
    (
        Bottleneck.MOSTLY_TRANSFER,
        0.5,
        "{share} of a step exchanges gradients. This job uses nodes badly: give it fewer nodes at "
        "most (malletrain scale), or a larger batch.",
    ),
    (
        Bottleneck.TRANSFER,
        0.15,
        "{share} of a step exchanges gradients. A larger batch has fewer exchanges for the same "
        "samples.",
    ),
    (
        Bottleneck.DATA_OF_ONE_RANK,
        0.1,
        "{share} of a step waits for the data of {place}, which takes longer there than elsewhere. "
        "Look at the disk and the network of that node.",
    ),
    (
        Bottleneck.DATA,
        0.1,
        "{share} of a step waits for data. Give the loader more workers (num_workers, or submit "
        "with --loader-workers auto), or keep the data in the memory of the nodes "
        "(malletrain.DataCache).",
    ),
    (
        Bottleneck.SLOW_RANK,
        0.1,
        "{share} of a step waits for {place}, which computes longer than the others. Tell the "
        "operator of that node. Where it pays, the job moves off it, unless the site has turned "
        "that off ([nodes] slow_nodes).",
    ),
    (
        Bottleneck.SNAPSHOT,
        0.05,
        "{share} of the time is taken by snapshots. Save less often (every_s), or to a faster "
        "disk.",
    ),
    (Bottleneck.NOTHING, 0.0, "No part of a step stands out: {share} is computing."),
)
"""(cause, minimum share of a step, sentence). Of the causes that reach their minimum, the one with
the largest share counts; of equal ones, such as the first two, the first. ``NOTHING`` counts if
none reaches it.
"""


@dataclass(frozen=True)
class StepBreakdown:
    """Where the time of a job's steps goes, averaged over its ranks."""

    step_s: float
    """Duration of a step, seconds."""
    shares: Mapping[str, float]
    """Part of a step (one of :data:`SHARES`) → its share. Parts that are not measured are absent
    and count as computing.
    """
    cause: Bottleneck
    """The largest cause of delay."""
    cause_share: float
    """Share of a step that the cause takes."""
    place: str = ""
    """Rank and node of the cause; empty if it is not at one rank."""

    def advice(self) -> str:
        """Return the advice, a sentence or two."""
        sentence = next(text for cause, _, text in ADVICE if cause is self.cause)
        return sentence.format(share=percent(self.cause_share), place=self.place)


def advice_with_measured_loaders(data_share: float) -> str:
    """Return the advice for a job that still waits for data with the best number of loader workers.

    Args:
        data_share: share of a step that waits for data.
    """
    return (
        f"{percent(data_share)} of a step waits for data, with the number of loader workers that "
        "was measured to be the fastest. Keep the data in the memory of the nodes "
        "(malletrain.DataCache), or prepare them before the training."
    )


def percent(share: float) -> str:
    """Return a share as text: ``41 %``."""
    return f"{100 * share:.0f} %"


def breakdown(ranks: Sequence[RankTimes]) -> StepBreakdown | None:
    """Return where the time of the steps goes; None if there is no rank with steps.

    Args:
        ranks: the mean step of each rank over the same time.
    """
    ranks = [rank for rank in ranks if rank.step_s > 0]
    if not ranks:
        return None
    step_s = fmean(rank.step_s for rank in ranks)
    exchanges = any(rank.exchange_s is not None for rank in ranks)
    if exchanges:
        last = min(ranks, key=lambda rank: rank.exchange_s or 0.0)
    else:
        last = max(ranks, key=lambda rank: rank.data_s or 0.0)
    transfer_s = last.exchange_s or 0.0
    parts: dict[str, float] = {}
    if any(rank.data_s is not None for rank in ranks):
        parts[DATA] = fmean(rank.data_s or 0.0 for rank in ranks)
    if exchanges:
        parts[OTHERS] = fmean((rank.exchange_s or 0.0) - transfer_s for rank in ranks)
        parts[TRANSFER] = transfer_s
    if any(rank.snapshot_s is not None for rank in ranks):
        parts[SNAPSHOT] = fmean(rank.snapshot_s or 0.0 for rank in ranks)
    # Parts and steps are read at slightly different moments.
    whole = max(step_s, sum(parts.values()))
    shares = {name: seconds / whole for name, seconds in parts.items()}
    shares[COMPUTING] = max(0.0, 1.0 - sum(shares.values()))
    cause, cause_share, place = _cause(ranks, last, shares[COMPUTING])
    ordered = {name: shares[name] for name in SHARES if name in shares}
    return StepBreakdown(step_s, ordered, cause, cause_share, place)


def _cause(
    ranks: Sequence[RankTimes], last: RankTimes, computing: float
) -> tuple[Bottleneck, float, str]:
    """Return the cause of the largest delay, its share of a step, and its place."""
    others = [rank for rank in ranks if rank is not last]
    place = f"rank {last.rank} on {last.node}"

    def share(seconds: float) -> float:
        return min(1.0, seconds / last.step_s)

    data_s = last.data_s or 0.0
    data = share(data_s)
    usual_data_s = median(rank.data_s or 0.0 for rank in others) if others else data_s
    one_rank = data_s > MIN_RATIO * usual_data_s
    usual_s = median(rank.computing_s for rank in others) if others else last.computing_s
    is_known = last.exchange_s is not None
    slow = share(max(0.0, last.computing_s - usual_s)) if is_known else 0.0
    transfer = share(last.exchange_s or 0.0)
    shares = {
        Bottleneck.MOSTLY_TRANSFER: transfer,
        Bottleneck.TRANSFER: transfer,
        Bottleneck.DATA_OF_ONE_RANK: data if one_rank else 0.0,
        Bottleneck.DATA: 0.0 if one_rank else data,
        Bottleneck.SLOW_RANK: slow,
        # the rank that saves stops the others, whichever comes last on average
        Bottleneck.SNAPSHOT: max(share(rank.snapshot_s or 0.0) for rank in ranks),
    }
    reached = [cause for cause, minimum, _ in ADVICE if shares.get(cause, 0.0) >= minimum > 0]
    if not reached:
        return Bottleneck.NOTHING, computing, ""
    cause = max(reached, key=lambda each: shares[each])  # of equal ones the first in the table
    local = cause in (Bottleneck.DATA_OF_ONE_RANK, Bottleneck.SLOW_RANK)
    return cause, shares[cause], place if local else ""
