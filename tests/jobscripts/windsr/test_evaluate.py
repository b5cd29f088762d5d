"""Scores against what they are by definition, and the distributions by terrain."""

from __future__ import annotations

import numpy as np
import pytest
from windsr.evaluate import cdfs, crps, scores


def test_scores_of_a_perfect_field_and_of_a_shifted_one():
    truth = np.random.default_rng(0).uniform(0, 20, (3, 16, 16))
    shifted = scores(truth, truth[:, None] + 0.5, 20.0)
    assert shifted["bias"] == pytest.approx(0.5)
    assert shifted["mae"] == shifted["rmse"] == pytest.approx(0.5)
    assert shifted["psnr"] == pytest.approx(20 * np.log10(20 / 0.5))
    assert scores(truth, truth[:, None] + 1e-9, 20.0)["ssim"] == pytest.approx(1.0)
    assert shifted["spread"] == 0.0
    assert "psnr_member" not in shifted


def test_crps_is_the_energy_form_and_fair():
    rng = np.random.default_rng(1)
    truth, members = rng.normal(size=(2, 3, 3)), rng.normal(size=(2, 5, 3, 3))
    pairs = np.abs(members[:, :, None] - members[:, None]).sum(axis=(1, 2)).mean() / (5 * 4)
    assert crps(truth, members) == pytest.approx(
        np.abs(members - truth[:, None]).mean() - pairs / 2
    )
    assert crps(truth, members[:, :1]) == pytest.approx(np.abs(members[:, 0] - truth).mean())


def test_distributions_by_class_of_terrain():
    terrain = np.array([[0.0, 0.0, 50.0, 400.0]])
    truth = np.array([[[1.0, 3.0, 5.0, 9.0]]])
    by_terrain = cdfs({"truth": truth, "made": truth + 1}, terrain)
    assert list(by_terrain) == ["sea and coast", "low land", "mountains"]
    sea = by_terrain["sea and coast"]
    assert sea["share"] == 0.5
    assert sea["truth"][sea["at"].index(1.0)] == 0.5
    assert sea["made"][sea["at"].index(1.0)] == 0.0
    assert sea["distance"]["made"] == 0.5
    assert sea["truth"][-1] == sea["made"][-1] == 1.0
