"""The part of ``malletrain show`` on where the time of a job's steps goes. Decides the words and
the columns. The advice is the daemon's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import RenderableType
from rich.text import Text

from malletrain.protocol.views import JobDetail, RankTimesView, RateView, StepTimesView
from malletrain.render.columns import Column, FittedTable
from malletrain.render.text import plain

WORDS = {
    "data": "waiting for data",
    "computing": "computing",
    "others": "waiting for other ranks",
    "transfer": "exchanging gradients",
    "snapshot": "in snapshots",
}
"""Part of a step → text after its share."""
HEADS = {
    "data": "DATA",
    "computing": "COMPUTING",
    "others": "OTHER RANKS",
    "transfer": "EXCHANGE",
    "snapshot": "SNAPSHOTS",
}
"""Part of a step → head of its column."""
MAX_SHOWN_RANKS = 8
"""Maximum number of ranks of which each has a line. Of more, some have one."""
LAST_RANKS, FIRST_RANKS = 5, 2
"""Of more ranks: the number of lines for those that come last to exchanges, and for those that come
first.
"""


def step_times(detail: JobDetail) -> list[RenderableType]:
    """Return the part of ``malletrain show`` on the times of a job's steps; empty if they are not
    measured.
    """
    if detail.steps is None:
        return []
    head = Text("\nA step: ", "bold")
    head.append(f"{sentence(detail.steps.shares)}.", "default")
    parts: list[RenderableType] = [head, Text(plain(detail.steps.advice))]
    measured = [rate for rate in detail.rates if rate.steps is not None]
    if len(measured) > 1:
        parts.append(_by_scale(measured))
    parts += _ranks(detail.steps)
    return parts


def _ranks(steps: StepTimesView) -> list[RenderableType]:
    """Return a line for each of a few ranks. Of more it returns a sentence, and lines for those
    that delay the others most, for those that wait longest for them, and for the median.
    """
    ranks, count = steps.ranks, max(steps.rank_count, len(steps.ranks))
    if count < 2:
        return []
    if count <= MAX_SHOWN_RANKS:
        return [_by_rank(ranks)]
    exchanges = any(rank.exchange_s is not None for rank in ranks)
    last_first = sorted(ranks, key=lambda rank: (rank.exchange_s or 0.0, -(rank.data_s or 0.0)))
    last = "come last to exchanges" if exchanges else "wait longest for data"
    first = "come first" if exchanges else "wait shortest"
    if count > len(ranks):  # the others are not known
        shown = last_first[: LAST_RANKS + FIRST_RANKS]
        text = f"Of {count:,} ranks the {len(shown)} that {last}:"
        return [Text(f"\n{text}"), _by_rank(shown)]
    text = (
        f"Of {count:,} ranks the {LAST_RANKS} that {last}, the {FIRST_RANKS} that {first}, and "
        "the median of all:"
    )
    shown = [*last_first[:LAST_RANKS], *last_first[-FIRST_RANKS:]]
    return [Text(f"\n{text}"), _by_rank(shown, median_of=ranks)]


def sentence(shares: Mapping[str, float]) -> str:
    """Return the shares of a step as text: ``41 % waiting for data, 48 % computing, 11 % waiting
    for other ranks``. Parts below half a percent are left out.
    """
    return ", ".join(
        f"{100 * shares[part]:.0f} % {words}"
        for part, words in WORDS.items()
        if shares.get(part, 0.0) >= 0.005
    )


def _by_scale(rates: list[RateView]) -> FittedTable:
    """Return a line for each number of nodes."""
    table = FittedTable(
        Column("NODES", right=True),
        Column("STEP", right=True, drop=1),
        *(Column(name, right=True, drop=2 + i) for i, name in enumerate(HEADS.values())),
    )
    for rate in rates:
        steps = rate.steps
        if steps is not None:
            shares = (
                f"{100 * steps.shares[part]:.0f} %" if part in steps.shares else ""
                for part in HEADS
            )
            table.add_row(str(rate.nodes), seconds(steps.step_s), *shares)
    return table


def _by_rank(
    ranks: Sequence[RankTimesView], median_of: Sequence[RankTimesView] = ()
) -> FittedTable:
    """Return a line for each rank, and one for the median of others if there are any. The time in
    exchanges is the wait for other ranks and the transfer.
    """
    table = FittedTable(
        Column("RANK", right=True),
        Column("NODE", drop=4),
        Column("STEP", right=True, drop=5),
        Column("DATA", right=True, drop=1),
        Column("COMPUTING", right=True, drop=1),
        Column("IN EXCHANGES", right=True, drop=2),
        Column("SNAPSHOTS", right=True, drop=3),
    )
    for rank in ranks:
        table.add_row(str(rank.rank), plain(rank.node), *map(_cell, _times(rank)))
    if median_of:
        columns = zip(*map(_times, median_of), strict=True)
        table.add_row("median", "", *(_cell(_median(column)) for column in columns))
    return table


def _times(rank: RankTimesView) -> tuple[float | None, ...]:
    return rank.step_s, rank.data_s, rank.computing_s, rank.exchange_s, rank.snapshot_s


def _median(times: Sequence[float | None]) -> float | None:
    measured = [each for each in times if each is not None]
    return median(measured) if measured else None


def _cell(duration: float | None) -> str:
    return "" if duration is None else seconds(duration)


def seconds(duration: float) -> str:
    """Return a duration within a step as text: ``3.1 s``, ``120 ms``, ``0.25 ms``."""
    if duration >= 1.0:
        return f"{duration:.3g} s"
    return f"{1e3 * duration:.3g} ms" if duration else "0"
