"""What foretells how long gaps last yet, on worlds whose law is known: it finds the law, says no
more than it can know, and survives a restart.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.gap_features import NAMES, GapFeatures, group_of
from scavenger.horizon import SurvivalEstimator
from scavenger.lifetimes import BINS, EDGES_S, LifetimeModel, Lifetimes, expected

pytestmark = pytest.mark.slow

BEGAN = 1.7e9


def world(seed, hours=12, nodes=24, every_s=60.0, mean_s=lambda k: 900.0, gap_ends=None):
    """Polls of nodes that are busy for ten minutes and idle for an exponential time, whose mean
    depends on the node: (time, idle since). ``gap_ends``: gets the end of each gap that is seen.
    """
    rng = np.random.default_rng(seed)
    events = []
    for k in range(nodes):
        at, name = float(rng.uniform(0, 600)), f"r{k % 2}n{k:02}"
        while at < hours * 3600:
            end = at + float(rng.exponential(mean_s(k)))
            events += [(at, name, end), (end, name, None)]
            at = end + 600.0
    events.sort(key=lambda event: event[0], reverse=True)
    seen, ends = {}, {}
    for now in np.arange(every_s, hours * 3600, every_s).tolist():
        while events and events[-1][0] <= now:
            _, name, end = events.pop()
            seen.pop(name, None)
            if end is not None:
                seen[name], ends[name] = BEGAN + now, end
        if gap_ends is not None:
            gap_ends.update({(name, now): ends[name] for name in seen})
        yield now, dict(seen)


def fed(polls):
    lifetimes = Lifetimes(SurvivalEstimator())
    for now, seen in polls:
        lifetimes.update(seen, BEGAN + now)
    return lifetimes


class TestModel:
    def test_knows_nothing_but_the_life_table_at_first(self):
        rows, table = np.ones((3, len(NAMES))), np.full((3, BINS), -2.0)
        hazard = 1 / (1 + math.exp(2.0))
        assert LifetimeModel().survival(rows, table) == pytest.approx(
            np.tile((1 - hazard) ** np.arange(BINS + 1), (3, 1))
        )

    def test_learns_that_one_number_tells_and_the_others_do_not(self):
        rng, model = np.random.default_rng(3), LifetimeModel()
        for _ in range(1500):
            rows = np.zeros((20, len(NAMES)))
            rows[:, 0] = 1.0
            rows[:, 6] = rng.normal(size=20)
            ended = (rng.random(20) < 1 / (1 + np.exp(1.0 - 1.5 * rows[:, 6]))).astype(float)
            model.learn(0, rows, np.full(20, -2.0), ended, np.ones(20))
        # The law: log odds -1 + 1.5·x, of which the table says -2.
        assert model.weights[0, 0] == pytest.approx(1.0, abs=0.15)
        assert model.weights[0, 6] == pytest.approx(1.5, abs=0.2)
        assert not model.weights[1:].any()
        assert model.trust[0, 1] > 0.9

    def test_is_not_followed_where_the_table_foretells_better(self):
        rng, model = np.random.default_rng(4), LifetimeModel()
        rows = np.ones((20, len(NAMES)))
        model.weights[0] = 0.5  # what was true once
        ended = (rng.random(20) < 0.12).astype(float)
        model.learn(0, rows, np.full(20, -2.0), ended, np.ones(20))
        assert model.trust[0, 1] < 0.05

    def test_follows_the_base_rate_where_neither_age_nor_the_numbers_tell(self):
        """Half of the gaps end in a bin, of which the table says an eighth; the numbers change
        their meaning from one moment to the next.
        """
        rng, model = np.random.default_rng(5), LifetimeModel()
        rows, table = np.zeros((20, len(NAMES))), np.full((20, BINS), -2.0)
        for turn in range(300):
            rows[:, 6] = rng.normal(size=20)
            ended = (rng.random(20) < 0.5 + 0.4 * np.sign(rows[:, 6]) * (-1) ** turn).astype(float)
            model.learn(0, rows, table[:, 0], ended, np.ones(20))
        rows[:, 6] = 2.0
        risk = 1.0 - model.survival(rows, table)[:, 1]
        assert model.trust[0].argmax() == 2
        assert risk == pytest.approx(np.full(20, 0.5), abs=0.05)


class TestLifetimes:
    def test_is_calibrated_on_gaps_of_one_law(self):
        """Exponential gaps: one open now still is in 10 minutes with probability exp(-600/900)."""
        ends = {}
        estimates, outcomes = [], []
        lifetimes = Lifetimes(SurvivalEstimator())
        k = EDGES_S.index(600.0)
        for now, seen in world(1, gap_ends=ends):
            lifetimes.update(seen, BEGAN + now)
            if now > 4 * 3600 and now % 600 == 0:
                names = sorted(seen)
                estimates += lifetimes.survival(names, BEGAN + now)[:, k].tolist()
                outcomes += [ends[name, now] > now + 600.0 for name in names]
        assert np.mean(estimates) == pytest.approx(math.exp(-600 / 900), abs=0.04)
        assert np.mean(estimates) == pytest.approx(np.mean(outcomes), abs=0.06)

    def test_finds_nodes_whose_gaps_last_longer(self):
        """Nodes of one rack are idle for twenty minutes on average, of the other for three."""
        lifetimes = fed(world(2, mean_s=lambda k: 1500.0 if k % 2 else 150.0))
        names = list(lifetimes.features.idle_since)
        survival = lifetimes.survival(names, lifetimes.features.now)
        k = EDGES_S.index(300.0)
        long = [s[k] for name, s in zip(names, survival, strict=True) if name.startswith("r1")]
        short = [s[k] for name, s in zip(names, survival, strict=True) if name.startswith("r0")]
        assert np.mean(long) > np.mean(short) + 0.15

    @given(seed=st.integers(0, 3), gap=st.floats(1.0, 1e5))
    def test_survival_falls_and_stays_a_probability(self, seed, gap):
        lifetimes = Lifetimes(SurvivalEstimator())
        lifetimes.update({"a1": BEGAN, f"b{seed}": BEGAN - gap}, BEGAN + 60.0)
        survival = lifetimes.survival(["a1", f"b{seed}"], BEGAN + 60.0)
        assert (survival[:, 0] == 1.0).all()
        assert (np.diff(survival, axis=1) <= 0).all()
        assert (survival >= 0).all()
        assert (expected(survival) > 0).all()

    def test_gaps_that_began_together_are_told_one_thing(self):
        lifetimes = Lifetimes(SurvivalEstimator())
        lifetimes.update({"a1": BEGAN, "a2": BEGAN, "b1": BEGAN - 500.0}, BEGAN + 60.0)
        forecasts = lifetimes.forecast(BEGAN + 60.0)
        assert forecasts["a1"][1] is forecasts["a2"][1]
        assert forecasts["b1"][1] is not forecasts["a1"][1]

    def test_uses_nothing_of_what_comes_later(self):
        """The same past, two futures: what is foretold at the fork is the same."""
        past = list(world(5, hours=2))
        one, other = fed(past), fed(past)
        now = past[-1][0]
        names = sorted(past[-1][1])
        before = one.survival(names, BEGAN + now)
        assert other.survival(names, BEGAN + now) == pytest.approx(before)
        one.update({}, BEGAN + now + 60.0)  # all end at once
        other.update(past[-1][1], BEGAN + now + 60.0)  # or none does
        after = other.survival(names, BEGAN + now + 60.0)
        assert after != pytest.approx(before)  # it has learned of the last minute

    def test_a_clock_set_back_is_survived(self):
        lifetimes = fed(world(6, hours=1))
        lifetimes.update({"a1": BEGAN - 1e6}, BEGAN - 1e6)
        assert set(lifetimes.forecast(BEGAN - 1e6)) == {"a1"}

    def test_goes_on_after_a_restart(self):
        lifetimes = fed(world(7, hours=2))
        state = json.loads(json.dumps(lifetimes.to_dict()))
        again = Lifetimes.from_dict(state, lifetimes.lengths)
        since, now = dict(lifetimes.features.idle_since), lifetimes.features.now
        again.update(since, now)
        names = sorted(since)
        # What moved in the last hour is not kept, what was learned is.
        assert again.model.weights == pytest.approx(lifetimes.model.weights, rel=1e-5)
        assert again.model.seen == pytest.approx(lifetimes.model.seen)
        assert again.model.trust == pytest.approx(lifetimes.model.trust, abs=2e-3)
        assert again.survival(names, now).shape == lifetimes.survival(names, now).shape

    @pytest.mark.parametrize("change", [{"format": 0}, {"weights": [[1.0]]}, {"moment": None}])
    def test_a_damaged_file_is_refused_with_a_sentence(self, change):
        state = {**Lifetimes().to_dict(), **change}
        with pytest.raises(ValueError, match="delete them to start again"):
            Lifetimes.from_dict(state, SurvivalEstimator())


class TestMoment:
    def test_tells_the_gaps_that_ended_with_their_length(self):
        features = GapFeatures()
        features.update({"a1": 0.0, "a2": 50.0}, 100.0)
        assert features.update({"a2": 50.0}, 200.0) == {"a1": 150.0}
        assert features.update({"a2": 210.0}, 220.0) == {"a2": 160.0}  # another gap of the node

    def test_numbers_count_what_began_together(self):
        features = GapFeatures()
        features.update({"a1": 0.0, "a2": 0.0, "b1": 50.0}, 100.0)
        rows = features.of(["a1", "b1"], 100.0)
        assert rows.shape == (2, len(NAMES))
        assert rows[:, NAMES.index("began together")].tolist() == [math.log(2), 0.0]
        assert rows[0, NAMES.index("age")] == pytest.approx(math.log1p(100 / 60))
        assert np.isfinite(rows).all()

    @pytest.mark.parametrize(
        ("node", "group"), [("a01n17", "a01n"), ("nid00123", "nid"), ("gpu", "gpu")]
    )
    def test_a_group_is_the_name_without_its_last_number(self, node, group):
        assert group_of(node) == group
