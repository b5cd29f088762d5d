"""Sweeps: many trials of one script, each a malleable job. Runs where ``malletrain sweep run`` is
called, in a process of its own that may die at any time.

Decides which trials there are, when one is given up and how much each counts; Optuna decides what
to try next. The daemon knows nothing of sweeps. :class:`EarlyCurve` and its pruner are of use
without the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from malletrain.sweep.earlycurve import EarlyCurve, Prediction
    from malletrain.sweep.front import run_sweep
    from malletrain.sweep.pruner import EarlyCurvePruner
    from malletrain.sweep.spec import Sweep, SweepError, load_sweep

__all__ = [
    "EarlyCurve",
    "EarlyCurvePruner",
    "Prediction",
    "Sweep",
    "SweepError",
    "load_sweep",
    "run_sweep",
]

_HOME = {
    "EarlyCurve": "malletrain.sweep.earlycurve",
    "EarlyCurvePruner": "malletrain.sweep.pruner",
    "Prediction": "malletrain.sweep.earlycurve",
    "Sweep": "malletrain.sweep.spec",
    "SweepError": "malletrain.sweep.spec",
    "load_sweep": "malletrain.sweep.spec",
    "run_sweep": "malletrain.sweep.front",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'malletrain.sweep' has no attribute {name!r}")
    return getattr(import_module(home), name)
