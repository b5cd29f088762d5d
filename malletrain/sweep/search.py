"""Creates Optuna's samplers, pruners and distributions from a sweep's description.

Decides nothing that Optuna decides. :mod:`malletrain.sweep.ledger` reports trials to Optuna.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from malletrain.sweep.space import Parameter, Value
from malletrain.sweep.spec import MAX_SEED, Sweep, SweepError

try:
    import optuna
except ImportError:
    raise SweepError(
        "Sweeps need Optuna, which is not installed here: "
        "pip install --find-links WHEELS 'malletrain[sweep]'."
    ) from None

SEED = 0
"""Default seed of samplers; a restarted sweep adds to it what it has drawn."""


def sampler_of(sweep: Sweep, drawn: int = 0) -> optuna.samplers.BaseSampler:
    """Return the sampler. ``drawn``: number of trials and of their values, added to the seed so
    that a new sampler does not draw the same values again. The number of trials alone is the same
    before and after the values of the newest one are drawn.

    Raises:
        SweepError: the sampler cannot be imported or created.
    """
    s = sweep.sampler
    seed = ((SEED if s.seed is None else s.seed) + drawn) % (MAX_SEED + 1)
    try:
        if s.kind == "tpe":
            # Running trials count as bad, so that simultaneous trials differ.
            return optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=s.startup, constant_liar=True
            )
        if s.kind == "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed, n_startup_trials=1)
        if s.kind == "grid":
            return optuna.samplers.GridSampler(sweep.grid(), seed=SEED)
        if s.kind == "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=s.population)
        if s.kind == "python":
            return _own(s.python, sweep.job.workdir, {**s.options, "seed": seed})
    except ImportError as error:
        raise SweepError(f"The sampler {s.kind} needs a package: {error}") from None
    return optuna.samplers.RandomSampler(seed=seed)


def sampler_warnings(sweep: Sweep) -> list[str]:
    """Return warnings about parameters of which the sampler learns nothing, which Optuna logs."""
    lists = [name for name, p in sweep.parameters.items() if len(p.choices) > 1]
    if sweep.sampler.kind != "cmaes" or not lists:
        return []
    return [
        f"Warning: cmaes learns nothing of {', '.join(lists)}: it searches ranges, and draws from "
        'lists at random. The sampler "tpe" learns of both.'
    ]


def own(named: str, workdir: Path | None, values: dict[str, Any]) -> Any:
    """Return the result of the owner's ``MODULE:NAME``, called with these values."""
    where, _, name = named.rpartition(":")
    if (folder := str(workdir or ".")) not in sys.path:
        sys.path.append(folder)
    return getattr(importlib.import_module(where), name)(**values)


def _own(named: str, workdir: Path | None, options: dict[str, Any]) -> optuna.samplers.BaseSampler:
    try:
        sampler = own(named, workdir, options)
    except Exception as error:  # it is the owner's class
        why = f"{type(error).__name__}: {error}"
        raise SweepError(f"The sampler {named} cannot be made: {why}") from error
    if not isinstance(sampler, optuna.samplers.BaseSampler):
        raise SweepError(f"{named} is no sampler of Optuna, but a {type(sampler).__name__}.")
    return sampler


def pruner_of(sweep: Sweep) -> optuna.pruners.BasePruner:
    """Return the pruner."""
    p = sweep.pruner
    if p.kind == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=p.min_steps, reduction_factor=p.reduction
        )
    if p.kind == "hyperband":
        return optuna.pruners.HyperbandPruner(
            min_resource=p.min_steps,
            max_resource=p.max_steps or "auto",
            reduction_factor=p.reduction,
        )
    if p.kind == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=p.startup, n_warmup_steps=p.min_steps - 1
        )
    if p.kind == "earlycurve":
        assert p.max_steps is not None  # checked with the sweep
        from malletrain.sweep.pruner import EarlyCurvePruner  # scipy takes its time

        return EarlyCurvePruner(
            p.max_steps, theta=p.theta, keep=p.keep, startup=p.startup, min_steps=p.min_steps
        )
    return optuna.pruners.NopPruner()


def suggest(trial: optuna.Trial, name: str, p: Parameter) -> Value:
    """Return the trial's value of a parameter; the same at each call."""
    if p.choices:
        chosen = trial.suggest_categorical(name, p.choices)
        assert chosen is not None  # None is not a valid choice
        return chosen
    if p.whole:
        step = int(p.step) if p.step is not None else 1
        return trial.suggest_int(name, int(p.low), int(p.high), step=step, log=p.log)
    step_f = None if p.step is None else float(p.step)
    return trial.suggest_float(name, float(p.low), float(p.high), step=step_f, log=p.log)
