"""The order of the new ranks: known answers, and the best of all orders where all can be tried."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from malletrain.elastic.sharded.assignment import StatePart, best_order, overlap

ROWS = ((1200, 1),)
"""A state of 1200 bytes that all numbers of ranks below divide."""


def moved(holdings, order):
    """The part of the state that the new ranks lack."""
    total = sum(rows * row_bytes for rows, row_bytes in holdings[0].rows)
    size = len(order)
    stays = sum(overlap(one, order[i], size) for i, one in enumerate(holdings) if one is not None)
    return 1 - stays / total


def holders(old, new, leaves=()):
    parts = [StatePart(part, old, ROWS) for part in range(old) if part not in leaves]
    return [*parts[:new], *[None] * (new - len(parts))]


def test_4_to_6_ranks_moves_a_third_instead_of_three_quarters():
    holdings = holders(4, 6)
    assert round(moved(holdings, range(6)), 3) == 0.75
    assert round(moved(holdings, best_order(holdings)), 3) == 0.333


def test_nothing_moves_where_nothing_changes():
    holdings = holders(5, 5)
    assert best_order(holdings) == [0, 1, 2, 3, 4]
    swapped = [holdings[0], *reversed(holdings[1:])]
    assert best_order(swapped) == [0, 4, 3, 2, 1]


def test_doubling_and_halving():
    holdings = holders(4, 8)
    assert best_order(holdings)[:4] in (
        [0, a, b, c] for a in (2, 3) for b in (4, 5) for c in (6, 7)
    )
    assert moved(holdings, best_order(holdings)) == 0.5
    survivors = holders(8, 4, leaves=(1, 3, 5, 7))
    assert best_order(survivors) == [0, 1, 2, 3]
    assert moved(survivors, best_order(survivors)) == 0.5


def test_without_rank_0_somebody_else_begins():
    survivors = holders(4, 3, leaves=(0,))
    assert best_order(survivors)[0] == 0
    assert sorted(best_order(survivors)) == [0, 1, 2]


@given(st.data())
def test_no_order_moves_less(data):
    old, new = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 6))
    rows = tuple(
        data.draw(
            st.dictionaries(st.integers(1, 20), st.integers(1, 9), min_size=1, max_size=3)
        ).items()
    )
    parts = data.draw(st.permutations(range(old)))[:new]
    holdings = [StatePart(part, old, rows) for part in parts]
    holdings = data.draw(st.permutations([*holdings, *[None] * (new - len(holdings))]))
    order = best_order(holdings)
    assert order[0] == 0
    assert sorted(order) == list(range(new))

    def unmoved(order):
        return sum(overlap(one, order[i], new) for i, one in enumerate(holdings) if one is not None)

    assert unmoved(order) == max(unmoved((0, *rest)) for rest in permutations(range(1, new)))


def test_64_ranks_are_assigned_in_the_time_of_a_step():
    holdings = [StatePart(part, 64, ROWS) for part in range(64)]
    assert best_order(holdings) == list(range(64))
