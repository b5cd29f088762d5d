"""Random bids for the property tests: small, hostile, and of every unit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hypothesis import strategies as st

from allocator import Bid, ScalingCurve, SizeValues

# Whole numbers make ties, the others make sums that round.
_WORTHS = {
    "ties": st.integers(-2, 6).map(float),
    "floats": st.floats(-10, 100, allow_nan=False).map(lambda v: round(v, 6)),
    "zero": st.just(0.0),
}


@st.composite
def options(draw: st.DrawFn, largest: int, kind: str) -> SizeValues:
    sizes = sorted(draw(st.sets(st.integers(1, largest), max_size=6)))
    return SizeValues(sizes, [draw(_WORTHS[kind]) for _ in sizes])


@st.composite
def bid_lists(
    draw: st.DrawFn, classes: tuple[str, ...] = ("default",), forced: bool = True
) -> tuple[list[Bid], dict[str, int]]:
    """Bids and capacities; some bids are alike, some must run, some cannot, and all are scaled to
    one unit.
    """
    kind = draw(st.sampled_from(sorted(_WORTHS)))
    unit = 10.0 ** draw(st.integers(-9, 9))
    capacity = {name: draw(st.integers(0, 16)) for name in classes}
    kinds = draw(
        st.lists(
            st.fixed_dictionaries({}, optional={name: options(9, kind) for name in classes}),
            min_size=1,
            max_size=4,
        )
    )
    idle = st.sampled_from([0.0, 0.0, 0.0, -1.5, 2.0] + ([-math.inf] if forced else []))
    bids = []
    for j, which in enumerate(draw(st.lists(st.integers(0, len(kinds) - 1), max_size=7))):
        bids.append(Bid(f"j{j}", _scaled(kinds[which], unit), draw(idle) * unit))
    return bids, capacity


def _scaled(by_class: Mapping[str, SizeValues], unit: float) -> dict[str, SizeValues]:
    return {name: SizeValues(o.sizes, o.values * unit) for name, o in by_class.items()}


@st.composite
def curves(draw: st.DrawFn, largest: int = 16) -> ScalingCurve:
    """Curves as measured or worse: not concave, with sizes that do nothing."""
    nodes = sorted(draw(st.sets(st.integers(1, largest), min_size=1, max_size=6)))
    return ScalingCurve(
        tuple((n, draw(st.one_of(st.just(0.0), st.floats(0.1, 100.0)))) for n in nodes)
    )
