"""Cases that fail, each with its reason. Strict: one that passes must be taken out."""

from __future__ import annotations

from tests.zoo.cases import Outcome

KNOWN_FAILURES: dict[tuple[str, str, str], str] = {}
"""Reason by script, change and boundary (empty: any boundary)."""


def reason(outcome: Outcome) -> str:
    """Why the case is known to fail; empty where it is to pass."""
    key = (outcome.script, outcome.change, outcome.boundary)
    return KNOWN_FAILURES.get(key, KNOWN_FAILURES.get((*key[:2], ""), ""))


def is_resolved(outcome: Outcome) -> bool:
    """Whether the case passes though it is known to fail."""
    key = (outcome.script, outcome.change, outcome.boundary)
    return key in KNOWN_FAILURES and not outcome.problems
