"""Which samples an epoch draws: known answers of ranks and weights, and the expected number of
draws, which makes the corrected mean unbiased.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from malletrain.training.epoch_plan import order
from malletrain.training.importance import (
    FIRST_SMOOTHING,
    LEVELS,
    Importance,
    epoch_draws,
    levels_of,
)


def levels(*values):
    return torch.tensor(values, dtype=torch.uint8)


def of_levels(values, batch=128):
    return Importance(levels(*values), levels(*values), batch)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.1, 0.5, 0.3], [1, 15, 8]),
        ([5.0, 4.0, 3.0, 2.0, 1.0], [15, 12, 8, 4, 1]),  # 14 · 3 / 4 = 10.5, to even: 10
        ([7.0, 7.0], [8, 8]),
        ([1.0, 2.0, 2.0, 3.0], [1, 8, 8, 15]),  # both have rank 1.5 of 3
        ([4.0], [8]),
        ([-1.0, 0.0], [1, 15]),
    ],
)
def test_the_level_of_a_loss_is_its_rank_in_the_batch(losses, expected):
    assert levels_of(torch.tensor(losses).double()).tolist() == pytest.approx(expected, abs=1)
    low, high = expected.index(min(expected)), expected.index(max(expected))
    result = levels_of(torch.tensor(losses).double()).tolist()
    assert (result[low], result[high]) == (min(expected), max(expected))


def test_weights_are_logarithms_of_ranks():
    importance = of_levels([1, 8, 15, 0], batch=3)  # ranks 0, 1, 2 of 3
    weights = importance.weights().double()
    assert (weights / 2**20).tolist() == pytest.approx(
        [math.log(10), math.log(11), math.log(12), 0.0], abs=1e-6
    )
    wide = of_levels([1, 15], batch=128).weights().double()
    assert (wide[1] / wide[0]).item() == pytest.approx(math.log(137) / math.log(10), abs=1e-6)


def test_the_term_of_all_weights_follows_the_mean_loss():
    importance = Importance.unseen(4, 4)
    smoothing = []
    for mean in (2.0, 1.0, 1.5):
        half = torch.tensor([mean - 0.5, mean + 0.5])
        importance = importance.trained(torch.tensor([0, 1]), half).next_epoch()
        smoothing.append(importance.smoothing)
    first = FIRST_SMOOTHING * 2.0
    assert smoothing == pytest.approx([first, first * math.exp(-0.5), first])
    assert importance.last_loss == 1.5
    again = importance.next_epoch()  # an epoch without losses
    assert (again.smoothing, again.last_loss) == (importance.smoothing, 1.5)
    raised = of_levels([1, 15], batch=3)
    raised = Importance(raised.levels, raised.newest, 3, smoothing=0.5)
    assert (raised.weights() / 2**20).tolist() == pytest.approx(
        [math.log(10) + 0.5, math.log(12) + 0.5], abs=1e-6
    )


def test_scores_count_from_the_next_epoch_on():
    importance = Importance.unseen(4, 3)
    after = importance.trained(torch.tensor([3, 1, 2]), torch.tensor([0.3, 0.1, 0.2]))
    assert after.levels.tolist() == [0, 0, 0, 0]
    assert after.next_epoch().levels.tolist() == [0, 1, 8, 15]
    assert (after.loss_sum, after.loss_count) == (pytest.approx(0.6), 3)


def test_a_loss_that_is_not_finite_changes_no_score():
    importance = of_levels([1, 8, 15])
    after = importance.trained(torch.arange(3), torch.tensor([math.nan, 2.0, math.inf]))
    assert after.newest.tolist() == [1, 8, 15]  # one loss alone has the middle level
    assert (after.loss_sum, after.loss_count) == (2.0, 1)
    assert importance.trained(torch.tensor([0]), torch.tensor([math.nan])) is importance


def test_the_first_epoch_draws_each_sample_once_in_the_order_of_an_elastic_sampler():
    draws = epoch_draws(Importance.unseen(50, 8), 3, 0, 10)
    assert draws.samples.tolist() == order(50, 3, 0).tolist()
    assert draws.expected.tolist() == [1.0] * 50


def test_samples_without_a_score_are_drawn_for_certain():
    importance = of_levels([0, 15, 0, *[1] * 37])
    for epoch in range(20):
        draws = epoch_draws(importance, 1, epoch, 10)
        counts = torch.bincount(draws.samples, minlength=40)
        assert counts[0] == counts[2] == 1
        assert draws.expected[[0, 2]].tolist() == [1.0, 1.0]


@given(
    st.lists(st.integers(0, LEVELS), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(0, 2**40),
    st.integers(0, 1000),
)
def test_draws_are_as_many_as_samples_and_as_often_as_expected(values, revisit, seed, epoch):
    importance = of_levels(values)
    draws = epoch_draws(importance, seed, epoch, revisit)
    again = epoch_draws(of_levels(values), seed, epoch, revisit)
    assert torch.equal(draws.samples, again.samples)
    count = len(values)
    counts = torch.bincount(draws.samples, minlength=count)
    assert len(counts) == count
    assert counts.sum() == count
    assert draws.expected.sum().item() == pytest.approx(count)
    assert (draws.expected > 0).all()
    # A part of the samples is drawn once for certain, and the others go by weight: as often as
    # their share says, rounded up or down.
    weights = importance.weights().double()
    if weights.sum() > 0 and revisit == 1:
        assert counts.tolist() == [1] * count
    for sample in range(count):
        if not values[sample]:
            assert counts[sample] == 1
        elif revisit > 1:
            most = count * (weights[sample] / weights.sum()).item()
            assert counts[sample] <= math.ceil(most + 1e-9) + 1


@given(
    st.lists(st.integers(1, LEVELS), min_size=1, max_size=40),
    st.integers(1, 7),
    st.integers(0, 1000),
    st.integers(0, 50),
)
def test_each_sample_is_drawn_at_least_once_in_some_epochs(values, revisit, seed, first):
    importance = of_levels(values)
    epochs = [epoch_draws(importance, seed, first + n, revisit).samples for n in range(revisit)]
    assert len(torch.cat(epochs).unique()) == len(values)


@pytest.mark.parametrize(("revisit", "unseen"), [(4, 0), (3, 2), (6, 1)])
def test_the_corrected_mean_has_the_mean_of_all_samples(revisit, unseen):
    """The number of draws of a sample varies by less than one: part of it is drawn with
    probability 1 / revisit, the rest is rounded at random. So the deviation of a mean over as many
    seeds is known.
    """
    count, seeds = 12, 3000
    importance = of_levels([*[0] * unseen, *[1, 15, 4, 9, 15, 1, 2, 3, 8, 13, 7, 15][unseen:]])
    values = torch.arange(1.0, count + 1).double() ** 2
    totals = torch.zeros(count).double()
    estimate = 0.0
    for seed in range(seeds):
        draws = epoch_draws(importance, seed, seed % revisit, revisit)
        totals += torch.bincount(draws.samples, minlength=count)
        estimate += (values / draws.expected)[draws.samples].mean().item() / seeds
    expected = draws.expected
    deviation = math.sqrt(2 * 0.25 / seeds)
    assert (totals / seeds).tolist() == pytest.approx(expected.tolist(), abs=5 * deviation)
    bound = (values / expected).sum().item() / count * deviation
    assert estimate == pytest.approx(values.mean().item(), abs=5 * bound)
    uncorrected = (values * expected).mean().item()
    assert abs(uncorrected - values.mean().item()) > 0.5, "the test would see a missing weight"


def test_the_state_is_a_byte_for_each_sample():
    importance = Importance.unseen(1000, 64)
    for epoch in range(3):
        draws = epoch_draws(importance, 5, epoch, 10).samples[:640]
        for batch in draws.split(64):
            importance = importance.trained(batch, torch.sin(batch.float()) + 1)
        importance = importance.next_epoch()
    importance = importance.trained(torch.arange(64), torch.arange(64.0))
    state = importance.state()
    assert (state["levels"].numel(), state["levels"].element_size()) == (1000, 1)
    other = Importance.of_state(state)
    assert torch.equal(other.levels, importance.levels)
    assert torch.equal(other.newest, importance.newest)
    numbers = ("batch", "smoothing", "last_loss", "loss_sum", "loss_count")
    assert [getattr(other, n) for n in numbers] == [getattr(importance, n) for n in numbers]
