"""Samplers made from a description."""

from __future__ import annotations

import pytest

from malletrain.sweep.search import sampler_of, sampler_warnings
from malletrain.sweep.spec import MAX_SEED, SweepError
from tests.malletrain.sweep.sweep_world import described


@pytest.mark.parametrize("kind", ["random", "tpe", "nsga2"])
def test_the_largest_seed_can_be_resumed(kind):
    sweep = described(pruner="none")
    sampler = sweep.sampler.model_copy(update={"kind": kind, "seed": MAX_SEED})
    sampler_of(sweep.model_copy(update={"sampler": sampler}), drawn=7)


@pytest.mark.parametrize("kind", ["cmaes", "tpe"])
def test_lists_of_which_a_sampler_learns_nothing_are_told(kind):
    """Optuna logs it in each trial, and the sweep does not show its log."""
    sweep = described(pruner="none")
    sampler = sweep.sampler.model_copy(update={"kind": kind})
    ranges = sweep.model_copy(update={"sampler": sampler})
    assert sampler_warnings(ranges) == []
    space = {**sweep.space, "act": ["relu", "tanh"], "fixed": [1]}
    warnings = sampler_warnings(ranges.model_copy(update={"space": space}))
    assert warnings == (
        [
            "Warning: cmaes learns nothing of act: it searches ranges, and draws from lists at "
            'random. The sampler "tpe" learns of both.'
        ]
        if kind == "cmaes"
        else []
    )


def test_a_sampler_of_the_owners_that_breaks_is_a_sentence(tmp_path):
    (tmp_path / "broken_sampler.py").write_text(
        "class Mine:\n    def __init__(self, **options): 1 / 0\n"
    )
    sweep = described(pruner="none")
    sampler = sweep.sampler.model_copy(update={"kind": "python", "python": "broken_sampler:Mine"})
    job = sweep.job.model_copy(update={"workdir": tmp_path})
    words = "sampler broken_sampler:Mine cannot be made: ZeroDivisionError: division by zero"
    with pytest.raises(SweepError, match=words):
        sampler_of(sweep.model_copy(update={"sampler": sampler, "job": job}))
