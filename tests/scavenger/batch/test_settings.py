"""How long a lease may be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.batch.settings import BatchSettings

ENDS = st.lists(st.none() | st.floats(-1e4, 1e6), max_size=3)


def settings(**options):
    return BatchSettings("t", "", None, **options)


@pytest.mark.parametrize(
    ("options", "step_s", "within_s", "limit_s"),
    [
        ({"time_limit_s": 7200.0, "time_min_s": 300.0}, 60.0, (None,), 7200.0),
        ({"time_limit_s": 7200.0, "time_min_s": 300.0}, 60.0, (100_000.0,), 7200.0),
        (
            {"time_limit_s": 7200.0, "time_min_s": 300.0},
            60.0,
            (970.0,),
            960.0,
        ),  # Slurm counts whole minutes
        ({"time_limit_s": 7200.0, "time_min_s": 300.0}, 1.0, (970.5,), 970.0),
        ({"time_limit_s": 7200.0, "time_min_s": 300.0}, 60.0, (299.0,), None),
        ({"time_limit_s": 7200.0, "time_min_s": 300.0}, 1.0, (299.0,), None),
        ({"time_limit_s": 7200.0, "time_min_s": 300.0}, 1.0, (3600.0, None, 600.0), 600.0),
        ({}, 60.0, (59.0,), None),
        ({}, 1.0, (59.0,), None),
        ({}, 60.0, (60.0,), 60.0),
        (
            {"time_limit_s": 40.0},
            1.0,
            (None,),
            40.0,
        ),  # the site's own limit is of use, however short
        ({"time_limit_s": 40.0}, 60.0, (None,), None),
    ],
)
def test_time_limits(options, step_s, within_s, limit_s):
    assert settings(**options).limit_s("l1", step_s, *within_s) == limit_s


@given(st.floats(1.0, 1e5), st.none() | st.floats(0.0, 1e5), st.sampled_from([1.0, 60.0]), ENDS)
def test_a_lease_ends_in_time_or_is_not_asked_for(longest_s, shortest_s, step_s, within_s):
    made = settings(time_limit_s=longest_s, time_min_s=shortest_s)
    limit = made.limit_s("l1", step_s, *within_s)
    ends = [longest_s, *(s for s in within_s if s is not None)]
    if limit is None:
        assert min(ends) - step_s < min(made.min_length_s, longest_s) + 1e-3
    else:
        assert min(made.min_length_s, longest_s) <= limit <= min(ends) + 1e-3
        assert limit % step_s == 0.0


def test_leases_of_the_same_moment_do_not_end_together():
    made = settings(time_limit_s=43200.0, lease_s=7200.0)
    limits = [made.limit_s(f"l{k}", 1.0, None) for k in range(200)]
    assert 5400 <= min(limits) < 5500
    assert 7100 < max(limits) <= 7200
    assert len(set(limits)) > 180
    assert made.limit_s("l1", 1.0, None) == made.limit_s("l1", 1.0, None)
    assert made.limit_s("l1", 1.0, 600.0) == 600.0
    short = settings(time_limit_s=600.0, lease_s=7200.0)
    assert short.limit_s("l1", 1.0) <= 600.0


def test_whose_jobs_are_ours():
    assert settings(user="me").owner == "me"
    assert settings(user="me", submit_as=("sudo", "-u", "{owner}")).owner == "", (
        "anybody's, in site mode"
    )
    assert settings().prefix == "malletrain-t-"
