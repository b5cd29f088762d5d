"""What is tried next: random cells, or the children of good ones. Samplers of Optuna over the
parameters ``edges`` and ``ops`` of :mod:`nas.codes`, which a sweep file names.

Evolution is that of Real et al. (Regularized Evolution for Image Classifier Architecture Search,
AAAI 2019, arXiv 1802.01548, algorithm 1): of the youngest trials some are drawn, the best of them
has a child, the oldest die by being forgotten. Weights are not inherited (as ENAS does): a trial's
result would then depend on who was tried before it, and trials that come and go with their nodes
would share state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from nas import NasError
from nas.codes import MOST_EDGES_CODE, MOST_OPS_CODE, decode, draw, neighbour

_MOST_DRAWN = 100
"""A cell that was tried already is drawn anew so often: its training would tell the same again."""
SPACE: dict[str, BaseDistribution] = {
    "edges": IntDistribution(0, MOST_EDGES_CODE),
    "ops": IntDistribution(0, MOST_OPS_CODE),
}


class RandomCells(optuna.samplers.BaseSampler):
    """Valid cells, each drawn by itself; other parameters at random."""

    def __init__(self, seed: int | None = None) -> None:
        self._rng = np.random.default_rng(seed)
        self._others = optuna.samplers.RandomSampler(seed)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The two parameters that make a cell."""
        return SPACE

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A cell."""
        edges, ops = self.next_cell(study)
        return {"edges": edges, "ops": ops}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """What is no part of a cell."""
        return self._others.sample_independent(study, trial, param_name, param_distribution)

    def next_cell(self, study: optuna.Study) -> tuple[int, int]:
        """What is tried next."""
        return draw(self._rng)


class EvolvingCells(RandomCells):
    """Children of good cells.

    Args:
        seed: makes its choices repeatable.
        population: so many of the youngest trials may have children; before there are as many,
            cells are random.
        tournament: so many of them are drawn, and the best of those has a child.
    """

    def __init__(self, seed: int | None = None, population: int = 20, tournament: int = 5) -> None:
        super().__init__(seed)
        if not 1 <= tournament <= population:
            raise ValueError("The tournament is drawn from the population, and 1 at least.")
        self._population, self._tournament = population, tournament

    def next_cell(self, study: optuna.Study) -> tuple[int, int]:
        """A child of the best of some, or a random cell while there are few; one that no trial has
        had, unless none is found.
        """
        trials = study.get_trials(deepcopy=False)
        tried = {(t.params.get("edges"), t.params.get("ops")) for t in trials}
        grown = [t for t in trials if _has_cell(t)]
        for _ in range(_MOST_DRAWN):
            cell = self._drawn(study, grown)
            if cell not in tried:
                break
        return cell

    def _drawn(self, study: optuna.Study, grown: list[FrozenTrial]) -> tuple[int, int]:
        if len(grown) < self._population:
            return draw(self._rng)
        young = grown[-self._population :]
        drawn = self._rng.choice(len(young), size=self._tournament, replace=False)
        sign = -1.0 if study.direction.name == "MAXIMIZE" else 1.0
        parent = min((young[int(k)] for k in drawn), key=lambda t: (_rank(t, sign), t.number))
        return neighbour(parent.params["edges"], parent.params["ops"], self._rng)


def _has_cell(trial: FrozenTrial) -> bool:
    if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
        return False
    try:
        decode(trial.params["edges"], trial.params["ops"])
    except (KeyError, NasError):
        return False
    return True


def _rank(trial: FrozenTrial, sign: float) -> tuple[int, float]:
    """Small is good. One that was given up is worse than any that came to its end; of those the one
    that came farther is the better.
    """
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        return 0, sign * trial.value
    return 1, -float(trial.last_step or 0)
