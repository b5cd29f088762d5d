"""What a waiting job is said to wait for."""

import pytest

from malletrain.daemon.job_views import short_of


@pytest.mark.parametrize(
    ("needed", "held", "coming", "said"),
    [
        (1, 0, 0, "needs 1 node, none is held"),
        (1, 0, 6, "needs 1 node, none is held, 6 warm up"),
        (4, 2, 1, "needs 4 nodes at least, 2 are held, 1 warms up"),
        (2, 1, 0, "needs 2 nodes at least, 1 is held"),
    ],
)
def test_what_a_job_lacks_is_said_in_numbers(needed, held, coming, said):
    assert short_of(needed, held, coming) == said
