"""Profiles that nobody disturbs, of random jobs on random machines: once up, then only down, and
the truth is found.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import HealthCheck, example, given, settings

from malletrain.core.events import JobState, JobSubmitted
from tests.draws import cases
from tests.malletrain.core.profiled_world import ProfiledWorld


def law(serial: float, latency: float):
    """Samples/s by nodes: a serial share, and what each further node costs."""
    return lambda k: 100.0 / (serial + (1 - serial) / k + latency * (k - 1))


@dataclass(frozen=True)
class ProfiledJob:
    """One job of the random day; ``pause``: half a minute goes by after it was submitted."""

    low: int
    high: int
    sizes: tuple[int, ...] | None
    serial: float = 0.05
    latency: float = 0.0
    pause: bool = False


@st.composite
def profiled_jobs(draw, largest):
    low = draw(st.integers(1, min(3, largest)))
    high = draw(st.integers(low + 1, largest)) if largest > low else largest
    sizes = draw(st.sampled_from([None, None, (1, 2, 4, 8)]))
    if sizes is not None and sum(low <= k <= high for k in sizes) < 2:
        sizes = None
    latency = draw(st.sampled_from([0.0, 0.0, 0.02]))
    return ProfiledJob(low, high, sizes, draw(st.floats(0.0, 0.5)), latency, draw(st.booleans()))


@st.composite
def days(draw):
    """The number of nodes, whether there is a job that may become a donor, and the jobs."""
    nodes, companion = draw(st.integers(3, 10)), draw(st.booleans())
    jobs = st.lists(profiled_jobs(nodes - 1 if companion else nodes), min_size=1, max_size=3)
    return nodes, companion, draw(jobs)


@given(day=days())
@example(day=(4, False, [ProfiledJob(1, 2, None, pause=True), ProfiledJob(3, 4, None)]))
@settings(max_examples=cases(30), deadline=None, suppress_health_check=list(HealthCheck))
def test_an_undisturbed_profile_goes_up_once_and_then_down(day):
    """The example: two idle nodes are released in the pause, and are gaps for the second job."""
    nodes, companion, jobs = day
    w = ProfiledWorld(nodes)
    if companion:
        w.do(JobSubmitted("donor", 1, nodes))
    w.join()
    w.run(10)
    spec_of = {}
    for k, job in enumerate(jobs):
        name, rate = f"j{k}", law(job.serial, job.latency)
        spec_of[name] = (job.low, job.high, job.sizes, rate)
        w.rates[name] = rate
        w.do(JobSubmitted(name, job.low, job.high, sizes=job.sizes, profile=job.low < job.high))
        if job.pause:
            w.run(30)
    for name, (low, high, sizes, rate) in spec_of.items():
        if low == high:
            continue
        w.until_profiled(name)
        profile = w.of("profile-finished", name)[0].data
        visited = profile["visited"]
        assert profile["scale_ups"] <= 1, "one scale-up a profile"
        assert visited == sorted(set(visited), reverse=True), (
            "from the largest down, each size once"
        )
        assert all(low <= k <= high and (sizes is None or k in sizes) for k in visited)
        curve = w.controller.jobs[name].scaling.curve
        for k in visited:
            assert abs(curve.estimate(k)[0] / rate(k) - 1) < 0.05
    for donation in w.of("nodes-donated"):
        record = w.controller.jobs[donation.job]
        assert donation.data["nodes"] >= max(1, record.submitted.min_nodes)
    profiles = [a for a in w.announcements if a.kind in ("profile-started", "profile-finished")]
    names = [a.job for a in profiles]
    assert all(names[k] == names[k + 1] for k in range(0, len(names) - 1, 2)), (
        "one profile at a time"
    )
    w.run(120)
    assert not any(record.state is JobState.PROFILING for record in w.controller.jobs.values())
