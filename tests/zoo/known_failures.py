"""Cases that fail, each with its reason. Strict: one that passes must be taken out, unless its
reason is one of chance.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.zoo.cases import Outcome

_OFFLINE_ROWS = (
    "W&B offline keeps its last rows in the memory of a process of its own: they are lost with a "
    "process that has no notice"
)
_ROWS_OF_LOST_RANK = (
    "a rank that is lost without notice takes with it the rows in its buffers of a step that the "
    "others have finished, and rank 0 saved"
)
OF_CHANCE = {_OFFLINE_ROWS, _ROWS_OF_LOST_RANK}
"""Reasons that depend on the instant at which a process is lost: a run may pass everywhere."""
KNOWN_FAILURES: dict[tuple[str, str, str], str] = {
    ("restart/weights_and_biases", "loss", ""): _OFFLINE_ROWS,
    ("restart/weights_and_biases", "loss-of-all", ""): _OFFLINE_ROWS,
    ("live/weights_and_biases", "loss-first", ""): _OFFLINE_ROWS,
    ("live/weights_and_biases", "loss-of-all", ""): _OFFLINE_ROWS,
    **{
        (f"restart/{script}", change, ""): _OFFLINE_ROWS
        for script in ("trainer_wandb", "fit_wandb")
        for change in ("loss", "loss-of-all")
    },
    ("restart/rows_of_all_ranks", "loss", ""): _ROWS_OF_LOST_RANK,
}
"""Reason by script, change and boundary. An empty boundary: some of the boundaries fail."""


def reason(outcome: Outcome) -> str:
    """Why the case is known to fail; empty where it is to pass."""
    key = (outcome.script, outcome.change, outcome.boundary)
    return KNOWN_FAILURES.get(key, KNOWN_FAILURES.get((*key[:2], ""), ""))


def resolved(outcomes: Sequence[Outcome], whole: bool) -> list[str]:
    """The known failures that pass, as sentences, without those of chance.

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
    return [
        f"{' '.join(key).strip()} passes, and is in KNOWN_FAILURES"
        for key in keys
        if KNOWN_FAILURES[key] not in OF_CHANCE
    ]
