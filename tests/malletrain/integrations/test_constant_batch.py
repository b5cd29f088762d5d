"""The micro-batches of all ranks: together each global batch of the plan once, at any number of
ranks, and weights that make their means the mean over it.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malletrain.integrations.constant_batch import ConstantBatch
from tests.draws import cases


def ranks(monkeypatch, world, most, *arguments, **options):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE", str(most))
    batches = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        batches.append(ConstantBatch(*arguments, **options))
    return batches


def steps(batches):
    """The micro-batches of each step of one rank."""
    micro_batches, items = [], iter(batches)
    for step in range(batches.steps_per_epoch):
        micro_batches.append(list(itertools.islice(items, batches.batch(step)[1])))
    assert next(items, None) is None
    return micro_batches


@st.composite
def plans(draw):
    most = draw(st.integers(1, 6))
    return (
        most,
        draw(st.integers(1, most)),
        draw(st.integers(most, 80)),
        draw(st.integers(1, 12)),
        draw(st.one_of(st.none(), st.integers(most, 50))),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )


@settings(deadline=None, max_examples=cases(300))
@given(plans())
def test_every_rank_count_makes_the_same_steps_of_the_same_samples(plan):
    most, world, samples, per_device, size, accumulate, shuffle = plan
    with pytest.MonkeyPatch.context() as monkeypatch:
        arguments = (samples, per_device, size, accumulate, 5, shuffle)
        (alone,) = ranks(monkeypatch, 1, most, *arguments)
        several = ranks(monkeypatch, world, most, *arguments)
    expected = [sorted(itertools.chain(*micro)) for micro in steps(alone)]
    by_rank = [steps(one) for one in several]
    seen = [
        sorted(itertools.chain(*(micro for rank in by_rank for micro in rank[step])))
        for step in range(len(expected))
    ]
    assert seen == expected
    assert sorted(itertools.chain(*seen)) == list(range(samples))
    for one, mine in zip(several, by_rank, strict=True):
        assert len(one) == sum(map(len, mine)), "the library counts these"
        assert all(len(step) == one.accumulate for step in mine[:-1])
        assert 1 <= len(mine[-1]) <= one.accumulate
        assert all(micro for step in mine for micro in step)
        full = [micro for step in mine[:-1] for micro in step]
        assert all(len(micro) <= per_device + 1 for micro in full)
        one.resumed = (0, len(mine) - 1)
        assert list(one) == list(one) == mine[-1], "begun at a step, however often it is asked"
        one.epoch = 1
        assert len(list(one)) == len(one), "and the next epoch at its beginning"
    for step in range(len(expected)):
        mean = sum(
            one.weight(step, number) * sum(micro) / len(micro) / len(mine[step]) / world
            for one, mine in zip(several, by_rank, strict=True)
            for number, micro in enumerate(mine[step])
        )
        assert mean == pytest.approx(sum(expected[step]) / len(expected[step]))


def test_the_default_is_what_the_arguments_make_at_the_largest_number_of_ranks(monkeypatch):
    for world, micro_batches in ((1, 6), (2, 3), (3, 2)):
        batches = ranks(monkeypatch, world, 3, 480, 8, None, 2)
        assert {one.plan.global_batch_size for one in batches} == {48}
        assert {one.accumulate for one in batches} == {micro_batches}


def test_a_batch_smaller_than_the_ranks_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="global batch of 2 samples cannot be shared by the 3"):
        ranks(monkeypatch, 1, 3, 480, 8, 2)
