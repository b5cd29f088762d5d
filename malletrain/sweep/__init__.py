"""Sweeps: many trials of one script, each a malleable job. Runs in the process of ``malletrain
sweep run``, which may be killed at any time.

Decides which trials exist, when one is pruned and the weight of each; Optuna decides what to try
next. :class:`EarlyCurve` and its pruner can be used without the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from malletrain.sweep.earlycurve import EarlyCurve, Prediction
    from malletrain.sweep.process import run_sweep
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

_MODULE_OF = {
    "EarlyCurve": "malletrain.sweep.earlycurve",
    "EarlyCurvePruner": "malletrain.sweep.pruner",
    "Prediction": "malletrain.sweep.earlycurve",
    "Sweep": "malletrain.sweep.spec",
    "SweepError": "malletrain.sweep.spec",
    "load_sweep": "malletrain.sweep.spec",
    "run_sweep": "malletrain.sweep.process",
}


def __getattr__(name: str) -> Any:
    home = _MODULE_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'malletrain.sweep' has no attribute {name!r}")
    return getattr(import_module(home), name)
