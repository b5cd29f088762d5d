"""What a value of the next nodes means for the values of a service."""

import pytest

from malletrain.core.node_values import with_next_nodes


@pytest.mark.parametrize(
    ("values", "present", "each", "count", "expected"),
    [
        (None, 0, 5.0, 1, {1: 5.0}),
        ({"1": 0.0}, 0, 5.0, 4, {4: 20.0}),  # it had none and asks for four
        ({"2": 20.0, "8": 50.0}, 0, 5.0, 1, {1: 5.0}),
        ({"2": 20.0, "8": 50.0}, 2, 7.0, 3, {2: 20.0, 5: 41.0}),
        ({"2": 20.0, "8": 50.0}, 5, 7.0, 1, {2: 20.0, 5: 35.0, 6: 42.0}),  # interpolated at 5
        ({"2": 20.0}, 4, 7.0, 1, {2: 20.0, 4: 20.0, 5: 27.0}),  # constant beyond the last
        ({"2": 20.0, "8": 50.0}, 5, 0.0, 1, {2: 20.0, 5: 35.0, 6: 35.0}),  # no more
    ],
)
def test_the_present_nodes_keep_their_value(values, present, each, count, expected):
    assert with_next_nodes(values, present, each, count) == expected
