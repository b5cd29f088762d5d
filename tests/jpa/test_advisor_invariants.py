"""The advisor's invariants, under random disturbances of the jobs and their nodes."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from jpa import (
    AdvisorConfig,
    MeasureConfig,
    ProfileFinished,
    ProfileWaiting,
)
from tests.draws import cases
from tests.jpa.models import Job, fixed_global_batch
from tests.jpa.world import Member, World

DISTURBANCES = st.lists(
    st.tuples(
        st.floats(0, 120),
        st.sampled_from(("preempt", "end", "free", "want", "silence")),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=8,
)
LIMITS = st.tuples(st.integers(1, 4), st.integers(0, 6))


@settings(max_examples=cases(40), deadline=None)
@given(
    st.lists(LIMITS, min_size=1, max_size=4),
    st.integers(0, 12),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    DISTURBANCES,
)
# At its second attempt it is measured at a size above those of the first, at which it stood.
@example([(1, 2), (1, 2), (1, 2)], 0, [0, 0, 2, 0], [(18.0, "preempt", 2, 1)])
def test_the_invariants_hold_whatever_happens(limits, free, spare, disturbances):
    """World itself checks on every move: one job at a time, donors above their minimum, no node
    taken that is not there.
    """
    members = {}
    for i, ((low, span), more) in enumerate(zip(limits, spare, strict=False)):
        nodes = 0 if more == 0 else min(low + span, low + more - 1)
        members[f"j{i}"] = Member(Job(fixed_global_batch(0.02 * i), seed=i), low, low + span, nodes)
    config = AdvisorConfig(max_profile_s=200.0, measure=MeasureConfig(max_seconds=20.0))
    world = World(free, members, config)
    for name in members:
        world.want(name)
    disturbed = False
    for delay, what, who, count in disturbances:
        world.run(delay)
        name = f"j{who}"
        if what == "free":
            world.free += count
            world.tell(world.view())
        elif name in world.members:
            disturbed = disturbed or what in ("preempt", "silence", "end")
            if what == "preempt" and world.members[name].nodes > 0:
                world.preempt(name, min(count, world.members[name].nodes))
            elif what == "end":
                world.end(name)
            elif what == "want":
                world.want(name)
            elif what == "silence":
                world.members[name].reports = False
    world.free += 40
    world.tell(world.view())
    world.run(4000)
    assert world.advisor.profiling is None
    assert world.advisor.waiting == ()
    for done in world.of(ProfileFinished):
        assert done.seconds <= config.max_attempts * (config.max_profile_s + 2)
        if not disturbed:
            assert done.scale_ups <= 1
        again = any("lost nodes" in a.reason for a in world.of(ProfileWaiting) if a.job == done.job)
        assert all(a > b for a, b in pairwise(done.visited)) or again
