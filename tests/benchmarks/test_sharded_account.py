"""Layouts whose answers are known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers_account import good_time, lines_of
from benchmarks.sharded_account import (
    Tensor,
    apart,
    in_order,
    least,
    over,
    overlaps,
    shard_bytes,
)
from tests.draws import cases

LARGE = [Tensor(24_000, 4)]
WHOLE = 96_000


def test_from_4_to_6_ranks_three_quarters_move_in_order_and_a_third_at_best():
    assert in_order(LARGE, 4, 6) / WHOLE == pytest.approx(0.75)
    assert least(LARGE, 4, 6, range(4)) / WHOLE == pytest.approx(1 / 3)


def test_halving_keeps_half_and_standing_still_moves_nothing():
    assert least(LARGE, 8, 4, range(4)) / WHOLE == pytest.approx(0.75)  # they hold the first half
    assert least(LARGE, 8, 4, [0, 2, 4, 6]) / WHOLE == pytest.approx(0.5)
    assert least(LARGE, 6, 6, range(6)) == 0
    assert least(LARGE, 4, 8, []) == WHOLE


TENSORS = st.lists(st.builds(Tensor, st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4)


@settings(max_examples=15)
@given(tensors=TENSORS, old=st.integers(1, 4), new=st.integers(1, 4))
def test_the_least_is_that_of_the_best_order(tensors, old, new):
    overlap = overlaps(tensors, old, new)
    whole = sum(t.rows * t.row_bytes for t in tensors)
    places = max(old, new)
    in_place = max(
        sum(int(overlap[a, b]) for a, b in enumerate(order[:old]) if b < new)
        for order in itertools.permutations(range(places))
    )
    assert least(tensors, old, new, range(old)) == whole - in_place


@settings(max_examples=cases(25))
@given(tensors=TENSORS, world=st.integers(1, 9))
def test_the_shards_of_all_ranks_are_the_state(tensors, world):
    whole = sum(t.rows * t.row_bytes for t in tensors)
    assert sum(shard_bytes(tensors, rank, world) for rank in range(world)) == whole


def run(steps):
    """The log of one rank: (number, world, when it was done)."""
    return [
        lines_of(
            "".join(
                f"{at - 0.5} draw {number} {world} 0 {number}\n{at} done {number} {world} 0\n"
                for number, world, at in steps
            )
        )
    ]


def test_good_time_leaves_out_pauses_and_steps_done_again():
    steps = [(1, 2, 1.0), (2, 2, 2.0), (3, 2, 3.0), (4, 1, 9.0), (5, 1, 10.0), (6, 1, 11.0)]
    assert good_time(run(steps), 0.0, 11.0) == pytest.approx(6 / 11)
    again = [(1, 2, 1.0), (2, 2, 2.0), (3, 2, 3.0), (2, 1, 4.0), (3, 1, 5.0), (4, 1, 6.0)]
    assert good_time(run(again), 0.0, 6.0) == pytest.approx(4 / 6)


def test_loss_curves_are_compared_step_by_step():
    assert apart({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0, 3: 0.5}) == 0.0
    assert apart({1: 2.0, 2: 1.1}, {1: 2.0, 2: 1.0}) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no step in common"):
        apart({4: 1.0}, {1: 1.0})


def test_a_pause_beside_its_bytes():
    assert over(2.0, moved=1e9, bandwidth=1e9) == pytest.approx(2.0)
