"""Cases that fail, each with its reason. Strict: one that passes must be taken out."""

from __future__ import annotations

from collections.abc import Sequence

from tests.zoo.cases import Outcome

_BREAK = (
    "the script leaves its loop by a condition that its snapshot does not hold: resumed after "
    "that, it trains on"
)
_OFFLINE_ROWS = (
    "W&B offline keeps its last rows in the memory of a process of its own: they are lost with a "
    "process that has no notice"
)
_LAST_BEFORE_BREAK = (
    *("before an update #3", "after an update #3", "step 0 12"),
    *("before an update #6", "after an update #6", "step 1 12"),
    *("before an update #9", "after an update #9", "step 2 12"),
)
KNOWN_FAILURES: dict[tuple[str, str, str], str] = {
    **{
        ("restart/cut_short", change, boundary): _BREAK
        for change in ("same", "grow", "shrink")
        for boundary in _LAST_BEFORE_BREAK
    },
    ("restart/cut_short", "loss", ""): _BREAK,
    ("restart/cut_short", "loss-of-all", ""): _BREAK,
    ("restart/weights_and_biases", "loss", ""): _OFFLINE_ROWS,
    ("restart/weights_and_biases", "loss-of-all", ""): _OFFLINE_ROWS,
    ("live/early_stopping", "loss", ""): _BREAK,
    ("restart/early_stopping", "loss-of-all", "weights end"): _BREAK,
}
"""Reason by script, change and boundary. An empty boundary: some of the boundaries fail."""


def reason(outcome: Outcome) -> str:
    """Why the case is known to fail; empty where it is to pass."""
    key = (outcome.script, outcome.change, outcome.boundary)
    return KNOWN_FAILURES.get(key, KNOWN_FAILURES.get((*key[:2], ""), ""))


def resolved(outcomes: Sequence[Outcome], whole: bool) -> list[str]:
    """The known failures that pass, as sentences.

    Args:
        outcomes: of one script and one change.
        whole: whether they are of all its boundaries.
    """
    passed = [
        (outcome.script, outcome.change, outcome.boundary)
        for outcome in outcomes
        if not outcome.problems
    ]
    keys = [key for key in passed if key in KNOWN_FAILURES]
    if whole and len(passed) == len(outcomes):
        keys += sorted({(*key[:2], "") for key in passed} & KNOWN_FAILURES.keys())
    return [f"{' '.join(key).strip()} passes, and is in KNOWN_FAILURES" for key in keys]
