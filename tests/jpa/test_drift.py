"""The CUSUM: lasting shifts are found soon, single outliers and noise are not."""

import random

from jpa.points import Cusum, step


def _run(values, mean=100.0, std=2.0):
    state, alarms = Cusum(), []
    for i, value in enumerate(values):
        state, shift = step(state, value, mean, std)
        if shift is not None:
            assert shift.before == mean
            alarms.append((i, shift.after))
    return alarms


def test_a_lasting_shift_is_found_within_a_few_observations_with_its_new_level():
    for level in (80.0, 120.0):
        alarms = _run([100.0] * 20 + [level] * 6)
        assert alarms
        at, seen = alarms[0]
        assert 20 <= at <= 24
        assert abs(seen - level) < 1


def test_a_single_wild_observation_raises_no_alarm():
    for wild in (0.0, 1000.0):
        assert _run([100.0] * 5 + [wild] + [100.0] * 50) == []


def test_three_wild_ones_in_a_row_raise_none_and_four_do():
    assert _run([0.0] * 3 + [100.0] * 30) == []
    assert len(_run([0.0] * 4)) == 1


def test_noise_alone_hardly_ever_raises_an_alarm():
    rng = random.Random(3)
    alarms = _run([rng.gauss(100, 2) for _ in range(20000)])
    assert len(alarms) <= 10  # two sides, one in about 19,000 each by Siegmund's approximation


def test_a_slow_shift_of_one_and_a_half_deviations_is_found_too():
    rng = random.Random(4)
    alarms = _run([rng.gauss(103, 2) for _ in range(60)])
    assert alarms
    assert alarms[0][0] < 40
