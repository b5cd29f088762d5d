"""EarlyCurve as a pruner, in studies that know nothing of MalleTrain."""

from __future__ import annotations

import optuna
import pytest

from malletrain.sweep.pruner import EarlyCurvePruner

STEPS = 30


def crossing(quality: float, step: int) -> float:
    """A slow start for the good ones: at half of the steps the order is the wrong way round."""
    return quality + (1.2 - quality) / (1 + (0.1 + 0.5 * quality) * step)


def ended(pruner, qualities, curve=crossing, direction="minimize"):
    """The study after these trials, one after another."""
    sign = 1 if direction == "minimize" else -1
    study = optuna.create_study(direction=direction, pruner=pruner)
    for quality in qualities:
        trial = study.ask()
        trial.set_user_attr("quality", quality)
        for step in range(1, STEPS + 1):
            trial.report(sign * curve(quality, step), step)
            if trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, sign * curve(quality, STEPS))
    return study


QUALITIES = [0.5, 0.6, 0.7, 0.8, 0.9, 0.2, 0.95, 0.85, 0.1, 0.75]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_hopeless_are_given_up_at_theta_and_the_best_are_not(direction):
    pruner = EarlyCurvePruner(STEPS, theta=0.5, keep=2, startup=5)
    study = ended(pruner, QUALITIES, direction=direction)
    pruned = [t for t in study.trials if t.state.name == "PRUNED"]
    assert {t.user_attrs["quality"] for t in pruned} == {0.95, 0.85, 0.75}
    assert {t.last_step for t in pruned} == {15}
    assert study.best_trial.user_attrs["quality"] == 0.1


def test_it_sees_what_the_median_does_not():
    """Curves that cross: the best trial at half of the steps is not the best one in the end."""

    def late(end, step):
        """Those that end below 0.3 are slow."""
        return end + (1 - end) / (1 + (0.1 if end < 0.3 else 1.0) * step)

    qualities = [0.45, 0.47, 0.5, 0.48, 0.46, 0.2]
    median = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=8)
    assert ended(median, qualities, late).trials[-1].state.name == "PRUNED"
    early = ended(EarlyCurvePruner(STEPS, theta=0.3, keep=1), qualities, late)
    assert early.trials[-1].state.name == "COMPLETE"
    assert early.best_trial.number == 5


def test_nobody_is_given_up_before_enough_have_ended():
    study = ended(EarlyCurvePruner(STEPS, theta=0.5, keep=1, startup=50), QUALITIES)
    assert all(t.state.name == "COMPLETE" for t in study.trials)


def test_trials_of_one_time_are_compared_by_what_is_predicted_of_them():
    pruner = EarlyCurvePruner(STEPS, theta=0.5, keep=2, startup=4)
    study = optuna.create_study(pruner=pruner)
    trials = [study.ask() for _ in range(6)]
    given_up = set()
    for step in range(1, 20):
        for trial, quality in zip(trials, [0.9, 0.8, 0.1, 0.7, 0.2, 0.6], strict=True):
            if trial.number not in given_up:
                trial.report(crossing(quality, step), step)
                if trial.should_prune():
                    given_up.add(trial.number)
    assert given_up == {0, 1, 3, 5}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"max_steps": 0}, "max_steps"), ({"max_steps": 9, "theta": 0.0}, "theta is a share")],
)
def test_misuse(arguments, words):
    with pytest.raises(ValueError, match=words):
        EarlyCurvePruner(**arguments)
