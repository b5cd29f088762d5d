import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.forecast import SIMILAR_MOMENTS, nodes_ahead


def test_a_machine_that_repeats_itself_is_foretold_exactly():
    day = np.array([0.0, 4.0, 9.0, 4.0])
    past = np.tile(day, SIMILAR_MOMENTS)  # as many moments like each of the day as are looked at
    assert nodes_ahead(past, 9.0, 4).tolist() == [[4.0] * 3, [0.0] * 3, [4.0] * 3, [9.0] * 3]


def test_what_is_not_known_is_taken_to_stay():
    assert nodes_ahead(np.array([7.0]), 7.0, 2).tolist() == [[7.0] * 3, [7.0] * 3]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=300), st.floats(0, 1e4))
def test_it_stays_within_what_there_was(nodes, now):
    quantiles = nodes_ahead(np.array(nodes), now, 5)
    assert quantiles.shape == (5, 3)
    assert (np.diff(quantiles, axis=1) >= -1e-9).all()
    assert quantiles.min() >= min(nodes) - 1e-9
    assert quantiles.max() <= max(nodes) + 1e-9
