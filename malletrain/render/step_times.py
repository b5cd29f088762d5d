"""The part of ``malletrain show`` on where the time of a job's steps goes. Decides the words and
the columns. The advice is the daemon's.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.text import Text

from malletrain.protocol.views import JobDetail, RankTimesView, RateView
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
"""Maximum number of ranks with a line of their own."""


def step_times(detail: JobDetail) -> list[RenderableType]:
    """Returns the part of ``malletrain show`` on the times of a job's steps; empty if they are not
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
    ranks = detail.steps.ranks
    if 1 < len(ranks) <= MAX_SHOWN_RANKS:
        parts.append(_by_rank(ranks))
    return parts


def sentence(shares: Mapping[str, float]) -> str:
    """Returns the shares of a step as text: ``41 % waiting for data, 48 % computing, 11 % waiting
    for other ranks``. Parts below half a percent are left out.
    """
    return ", ".join(
        f"{100 * shares[part]:.0f} % {words}"
        for part, words in WORDS.items()
        if shares.get(part, 0.0) >= 0.005
    )


def _by_scale(rates: list[RateView]) -> FittedTable:
    """Returns a line for each number of nodes."""
    made = FittedTable(
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
            made.add_row(str(rate.nodes), seconds(steps.step_s), *shares)
    return made


def _by_rank(ranks: tuple[RankTimesView, ...]) -> FittedTable:
    """Returns a line for each rank. The time in exchanges is the wait for other ranks and the
    transfer.
    """
    made = FittedTable(
        Column("RANK", right=True),
        Column("NODE", drop=4),
        Column("STEP", right=True, drop=5),
        Column("DATA", right=True, drop=1),
        Column("COMPUTING", right=True, drop=1),
        Column("IN EXCHANGES", right=True, drop=2),
        Column("SNAPSHOTS", right=True, drop=3),
    )
    for rank in ranks:
        parts = (rank.data_s, rank.computing_s, rank.exchange_s, rank.snapshot_s)
        made.add_row(
            str(rank.rank),
            plain(rank.node),
            seconds(rank.step_s),
            *("" if part is None else seconds(part) for part in parts),
        )
    return made


def seconds(duration: float) -> str:
    """Returns a duration within a step as text: ``3.1 s``, ``120 ms``, ``0.25 ms``."""
    if duration >= 1.0:
        return f"{duration:.3g} s"
    return f"{1e3 * duration:.3g} ms" if duration else "0"
