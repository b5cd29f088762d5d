"""What an ensemble is measured by, against ensembles whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from windsr.verification import (
    ensemble_scores,
    fine_power,
    rank_histogram,
    spectrum,
    spread_skill,
    tails,
)


def drawn(members: int, width: float = 1.0, seed: int = 0):
    """Truth and members around one centre; the members ``width`` times as wide as the truth."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(0, 3, (6, 40, 40))
    truth = centre + rng.normal(size=centre.shape)
    around = rng.normal(size=(6, members, 40, 40)) * width
    return truth, centre[:, None] + around


@pytest.mark.parametrize("members", [2, 8, 32])
def test_spread_equals_skill_where_the_truth_could_be_a_member(members):
    assert spread_skill(*drawn(members)) == pytest.approx(1.0, abs=0.03)


def test_a_narrow_ensemble_has_little_spread_and_a_hollow_histogram():
    truth, members = drawn(16, 0.5)
    assert spread_skill(truth, members) == pytest.approx(0.5 / np.sqrt((16 + 0.25) / 17), abs=0.03)
    ranks = rank_histogram(truth, members)
    assert ranks[0] > 3 / 17
    assert ranks[-1] > 3 / 17
    assert ranks[8] < 1 / 17
    assert np.isnan(spread_skill(truth, members[:, :1]))


def test_ranks_are_flat_where_the_truth_could_be_a_member_and_shared_by_ties():
    truth, members = drawn(7)
    ranks = rank_histogram(truth, members)
    assert ranks.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(ranks, 1 / 8, atol=0.012)
    same = rank_histogram(np.zeros((1, 2, 2)), np.zeros((1, 3, 2, 2)))
    np.testing.assert_allclose(same, 1 / 4)


def test_a_wave_is_found_at_its_wavelength():
    at = np.arange(64) * 2000.0
    wave = np.sin(2 * np.pi * at / 16_000)[None, None].repeat(64, axis=1)
    wavelength, power = spectrum(wave, 2000.0)
    assert wavelength[power.argmax()] == pytest.approx(16_000)
    assert power[np.abs(wavelength - 16_000) < 3500].sum() > 0.98 * power.sum()


def test_power_below_the_coarse_grid_is_lost_by_smoothing_and_kept_by_another_draw():
    rng = np.random.default_rng(0)
    truth, other = rng.normal(size=(2, 8, 64, 64))
    smooth = truth.reshape(8, 8, 8, 8, 8).mean(axis=(2, 4)).repeat(8, axis=1).repeat(8, axis=2)
    assert fine_power(truth, other, 2000.0, 8) == pytest.approx(1.0, abs=0.05)
    assert fine_power(truth, truth / 2, 2000.0, 8) == pytest.approx(0.25)
    assert fine_power(truth, smooth, 2000.0, 8) < 0.05


def test_tails_are_differences_of_quantiles():
    truth = np.linspace(0, 10, 1001).reshape(1, 7, 143)
    assert tails(truth, truth * 1.1)["0.99"] == pytest.approx(0.99, abs=1e-6)


def test_all_of_it_is_said_of_one_member_too():
    truth, members = drawn(1)
    scores = ensemble_scores(truth, members, 2000.0, 8)
    assert scores["members"] == 1
    assert scores["rmse"] == scores["rmse_member"]
    assert scores["crps"] == pytest.approx(np.abs(members[:, 0] - truth).mean())
