"""The trials of a sweep as rows, the best first, for ``malletrain sweep show``.

Decides which facts of a trial are shown and in which order.
"""

from __future__ import annotations

from typing import Any

from optuna.trial import FrozenTrial, TrialState

from malletrain.sweep import ledger as book
from malletrain.sweep.ledger import Ledger


def results(ledger: Ledger) -> list[dict[str, Any]]:
    """Return a row for each trial: completed ones first, the best of them first; then the others,
    those with most steps first.
    """
    ranks = {t.number: n for n, t in enumerate(ledger.best(len(ledger.trials())))}
    best = {t.number for t in ledger.best()}

    def order(trial: FrozenTrial) -> tuple[float, ...]:
        if trial.number in ranks:
            return (0, ranks[trial.number])
        state = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.PRUNED, TrialState.FAIL)
        place = state.index(trial.state) if trial.state in state else len(state)
        return (1, place, -(trial.last_step or 0), trial.number)

    return [_row(ledger, t, t.number in best) for t in sorted(ledger.trials(), key=order)]


def _row(ledger: Ledger, trial: FrozenTrial, best: bool) -> dict[str, Any]:
    metrics = ledger.sweep.sweep.metrics
    values = list(trial.values or ())
    if not values and trial.intermediate_values:
        values = [trial.intermediate_values[max(trial.intermediate_values)]]
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "job": trial.user_attrs.get(book.JOB, ""),
        "values": dict(zip(metrics, values, strict=False)),
        "step": trial.last_step,
        "parameters": dict(trial.params),
        "node_hours": trial.user_attrs.get(book.NODE_S, 0.0) / 3600,
        "best": best,
        "note": trial.user_attrs.get(book.WHY, ""),
    }
