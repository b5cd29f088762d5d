"""EarlyCurve as a pruner of Optuna, for any study, without the rest of MalleTrain.

SpotTune's rule without its barrier: a trial trains to a fraction ``theta`` of its steps, its final
value is predicted, and it continues only if it may be among the ``keep`` best. It is compared with
the final values of completed trials, and with the predictions for other trials that have come as
far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

try:
    import optuna
except ImportError:
    raise ImportError(
        "This pruner is one of Optuna's, which is not installed here: "
        "pip install --find-links WHEELS 'malletrain[sweep]'."
    ) from None
import numpy as np
from optuna.trial import FrozenTrial, TrialState

from malletrain.sweep.earlycurve import EarlyCurve, Prediction


class EarlyCurvePruner(optuna.pruners.BasePruner):
    """Prunes trials whose predicted final value is not among the best.

    Args:
        max_steps: the last step of a trial.
        theta: fraction of ``max_steps`` after which trials are judged.
        keep: a trial continues if it may be among this many best trials.
        startup: number of completed or judged trials before any is pruned.
        min_steps: no trial is pruned before this step.
        stages: steps at which the learning rate changes; None: they are detected.
        bounds: range of possible values of the metric.
        confidence: minimum probability that a trial is not among the best, 0 to 1.
    """

    def __init__(
        self,
        max_steps: int,
        theta: float = 0.7,
        keep: int = 3,
        startup: int = 5,
        min_steps: int = 1,
        stages: Sequence[int] | None = None,
        bounds: tuple[float, float] = (-math.inf, math.inf),
        confidence: float = 0.8,
    ) -> None:
        if max_steps < 1 or keep < 1 or startup < 0:
            raise ValueError("max_steps and keep are 1 at least, and startup is not below 0.")
        if not 0 < theta <= 1:
            raise ValueError(f"theta is a share of max_steps, above 0 and up to 1, not {theta!r}.")
        self.max_steps, self.keep, self.startup = max_steps, keep, startup
        self.judged_at = max(min_steps, math.ceil(theta * max_steps))
        self._stages, self._bounds, self._confidence = stages, bounds, confidence
        self._predictions: dict[tuple[str, int], Prediction | None] = {}

    def prune(self, study: optuna.study.Study, trial: FrozenTrial) -> bool:
        """Return whether to prune the trial at its current step."""
        step = trial.last_step
        if step is None or step >= self.max_steps:
            return False
        sign = -1.0 if study.direction.name == "MAXIMIZE" else 1.0
        curve = EarlyCurve(
            "minimize" if sign > 0 else "maximize", self._stages, self._bounds, self._confidence
        )
        prediction = self._prediction_of(study, curve, trial)
        if prediction is None:
            return False
        others, errors = self._others(study, curve, trial, sign)
        if len(others) < max(self.startup, self.keep):
            return False
        optimistic_value = prediction.low if sign > 0 else -prediction.high
        if len(errors) >= max(self.startup, 2):
            # Earlier prediction errors are a better measure than the quality of the fit.
            optimistic_value = sign * prediction.value + float(
                np.quantile(errors, (1 - self._confidence) / 2)
            )
        return optimistic_value > sorted(others)[self.keep - 1]

    def _others(
        self, study: optuna.study.Study, curve: EarlyCurve, trial: FrozenTrial, sign: float
    ) -> tuple[list[float], list[float]]:
        """Return the results of the other trials, signed so that small is good: final values, or
        predictions; and the prediction errors (final value minus prediction) of the ended trials.
        """
        outcomes, errors = [], []
        for other in study.get_trials(deepcopy=False):
            if other.number == trial.number:
                continue
            judged = self._prediction_of(study, curve, other)
            if other.state == TrialState.COMPLETE and other.value is not None:
                outcomes.append(sign * other.value)
                if judged is not None:
                    errors.append(sign * (other.value - judged.value))
            elif other.state in (TrialState.RUNNING, TrialState.PRUNED) and judged is not None:
                outcomes.append(sign * judged.value)
        return outcomes, errors

    def _prediction_of(
        self, study: optuna.study.Study, curve: EarlyCurve, trial: FrozenTrial
    ) -> Prediction | None:
        """Return the prediction for the trial at the step at which it is judged; None before that
        step, or if no prediction is possible.
        """
        key = (study.study_name, trial.number)
        if key not in self._predictions:
            points = sorted(trial.intermediate_values.items())
            until = next((n for n, (step, _) in enumerate(points, 1) if step >= self.judged_at), 0)
            if not until:
                return None
            steps, values = zip(*points[:until], strict=True)
            self._predictions[key] = curve.predict(steps, values, self.max_steps)
        return self._predictions[key]
