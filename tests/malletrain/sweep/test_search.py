"""Samplers made from a description."""

from __future__ import annotations

import pytest

from malletrain.sweep.search import sampler_of
from malletrain.sweep.spec import MAX_SEED
from tests.malletrain.sweep.sweep_world import described


@pytest.mark.parametrize("kind", ["random", "tpe", "nsga2"])
def test_the_largest_seed_can_be_resumed(kind):
    sweep = described(pruner="none")
    sampler = sweep.sampler.model_copy(update={"kind": kind, "seed": MAX_SEED})
    sampler_of(sweep.model_copy(update={"sampler": sampler}), drawn=7)
