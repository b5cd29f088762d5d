"""The scaling of a job as a table: observed and expected throughput at each size.

Decides columns and wording of that part of ``malletrain show``. The numbers come from the daemon.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import RenderableType
from rich.text import Text

from malletrain.config.units import show_duration
from malletrain.protocol.views import ProfileView, RateView
from malletrain.render.columns import Column, FittedTable
from malletrain.render.text import clock, count, plain, rate

STANDS = {
    "off": "not measured",
    "waiting": "not measured yet",
    "profiling": "being measured now",
    "measured": "measured",
    "partial": "measured in part",
    "unknown": "not known",
    "gone": "measured in part",
    "known": "known without a measurement of its own",
}
"""State of a profile → text."""


def scaling(
    profile: ProfileView | None, seen: Sequence[RateView], *, owner_curve: bool
) -> list[RenderableType]:
    """Returns the part of ``malletrain show`` on the job's scaling; empty if nothing is known.
    ``owner_curve``: whether its owner gave the curve.
    """
    if profile is None and not seen:
        return []
    head = Text("\nScaling: ", "bold")
    if profile is None:
        head.append("only what was seen is known, because profiling is off here.", "default")
    else:
        stands = "given" if owner_curve else STANDS.get(profile.state, plain(profile.state))
        head.append(f"{stands}.", "default")
        head.append(f" {plain(profile.sentence)}" if profile.sentence else "", "default")
    parts: list[RenderableType] = [head]
    if seen or (profile is not None and profile.points):
        parts.append(_sizes(profile, seen, owner_curve))
    if profile is None:
        return parts
    if profile.up_s or profile.down_s or profile.start_s:
        parts.append(
            Text(
                f"The plan counts with a pause of {profile.up_s:.1f} s to grow, "
                f"{profile.down_s:.1f} s to shrink and {profile.start_s:.1f} s to start."
            )
        )
    for i in profile.interruptions:
        parts.append(
            Text(
                f"Interrupted {clock(i.time)}: {i.before} → {i.nodes} nodes, so that "
                f"{plain(i.by)} could be measured."
            )
        )
    return parts


def _sizes(profile: ProfileView | None, seen: Sequence[RateView], owner_curve: bool) -> FittedTable:
    """Returns a line for each number of nodes: the expected rate and the observed one."""
    points = {p.nodes: p for p in profile.points} if profile else {}
    rates = _by_nodes(seen)
    made = FittedTable(
        Column("NODES", right=True),
        Column("EXPECTED", right=True, drop=1),
        Column("GIVE OR TAKE", right=True, drop=5),
        Column("FROM", drop=3),
        Column("PER NODE", right=True, drop=6),
        Column("PLANNED AS", right=True, drop=8),
        Column("SEEN", right=True, drop=2),
        Column("SAMPLES", right=True, drop=7),
        Column("TIME", right=True, drop=4),
    )
    for nodes in sorted(points.keys() | rates.keys()):
        p, r = points.get(nodes), rates.get(nodes)
        expected = ["", "", "", "", ""]
        if p is not None:
            source = "measured" if p.measured else "given" if owner_curve else "estimated"
            margin = f"± {rate(p.spread)}" if p.spread > 0 else ""
            expected = [rate(p.rate), margin, source, rate(p.rate / p.nodes), rate(p.bid)]
        looked = [rate(r.rate), count(r.samples), show_duration(r.seconds)] if r else ["", "", ""]
        made.add_row(str(nodes), *expected, *looked)
    return made


def _by_nodes(seen: Sequence[RateView]) -> dict[int, RateView]:
    """Returns the observed rates by number of nodes, over all batch sizes."""
    made: dict[int, RateView] = {}
    for r in seen:
        if (so_far := made.get(r.nodes)) is None:
            made[r.nodes] = r
            continue
        seconds = so_far.seconds + r.seconds
        share = r.seconds / seconds if seconds > 0 else 0.5
        made[r.nodes] = msgspec.structs.replace(
            so_far,
            rate=(1 - share) * so_far.rate + share * r.rate,
            samples=so_far.samples + r.samples,
            seconds=seconds,
        )
    return made
