"""Profiles that nobody disturbs, of random jobs on random machines: once up, then only down, and
the truth is found.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from malletrain.core.events import JobState, JobSubmitted
from tests.malletrain.core.profiled_world import ProfiledWorld


def law(serial: float, latency: float):
    """Samples/s by nodes: a serial share, and what each further node costs."""
    return lambda k: 100.0 / (serial + (1 - serial) / k + latency * (k - 1))


@st.composite
def jobs(draw, largest):
    low = draw(st.integers(1, min(3, largest)))
    high = draw(st.integers(low + 1, largest)) if largest > low else largest
    sizes = draw(st.sampled_from([None, None, (1, 2, 4, 8)]))
    if sizes is not None and sum(low <= k <= high for k in sizes) < 2:
        sizes = None
    return low, high, sizes, law(draw(st.floats(0.0, 0.5)), draw(st.sampled_from([0.0, 0.0, 0.02])))


@given(data=st.data(), nodes=st.integers(3, 10), companion=st.booleans(), count=st.integers(1, 3))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_an_undisturbed_profile_goes_up_once_and_then_down(data, nodes, companion, count):
    w = ProfiledWorld(nodes)
    if companion:  # may have to give nodes
        w.do(JobSubmitted("donor", 1, nodes))
    w.join()
    w.run(10)
    made = {}
    for k in range(count):
        name = f"j{k}"
        made[name] = data.draw(jobs(nodes if not companion else nodes - 1), name)
        low, high, sizes, rate = made[name]
        w.rates[name] = rate
        w.do(JobSubmitted(name, low, high, sizes=sizes, profile=low < high))
        if data.draw(st.booleans(), "a pause"):
            w.run(30)
    for name, (low, high, sizes, rate) in made.items():
        if low == high:
            continue
        w.until_profiled(name)
        told = w.of("profile-finished", name)[0].data
        visited = told["visited"]
        assert told["scale_ups"] <= 1, "one scale-up a profile"
        assert visited == sorted(set(visited), reverse=True), (
            "from the largest down, each size once"
        )
        assert all(low <= k <= high and (sizes is None or k in sizes) for k in visited)
        curve = w.controller.jobs[name].learned.curve
        for k in visited:
            assert abs(curve.estimate(k)[0] / rate(k) - 1) < 0.05
    for told in w.of("nodes-donated"):
        record = w.controller.jobs[told.job]
        assert told.data["nodes"] >= max(1, record.submitted.min_nodes)
    profiles = [a for a in w.said if a.kind in ("profile-started", "profile-finished")]
    names = [a.job for a in profiles]
    assert all(names[k] == names[k + 1] for k in range(0, len(names) - 1, 2)), (
        "one profile at a time"
    )
    w.run(120)
    assert not any(record.state is JobState.PROFILING for record in w.controller.jobs.values())
