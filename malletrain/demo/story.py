"""From what the daemon tells (events, job details) to rounds and holdings, which the account adds up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from malletrain.demo.account import Held, Round
from malletrain.timeline import Series
from malletrain.views import EventView, JobDetail

GAVE = ("job-started", "job-rescaled")
TOOK = ("job-suspended", "job-completed", "job-failed", "job-cancelled")
LOST = "node-lost"
FORMED = "round-formed"


def held_of(events: Iterable[EventView], end: float, names: Mapping[str, str]) -> list[Held]:
    """Which job had which node by the plan, until ``end``. ``names``: job id → name."""
    since: dict[str, dict[str, float]] = {}
    made: list[Held] = []

    def change(job: str, nodes: set[str], moment: float) -> None:
        now = since.setdefault(job, {})
        for node in now.keys() - nodes:
            made.append(Held(node, names.get(job, job), (now.pop(node), moment)))
        for node in nodes - now.keys():
            now[node] = moment

    for e in events:
        if e.kind in GAVE:
            change(e.job, set(e.data.get("nodes", ())), e.time)
        elif e.kind in TOOK:
            change(e.job, set(), e.time)
        elif e.kind == LOST:
            for job, nodes in since.items():
                if e.node in nodes:
                    change(job, nodes.keys() - {e.node}, e.time)
    for job in list(since):
        change(job, set(), end)
    return made


def throughput(job: str, counts: Sequence[tuple[float, float]], window_s: float = 2.0) -> Series:
    """Samples/s of one job from its (time, samples) looked at now and then: the slope over the last ``window_s`` seconds.

    A look that found fewer samples than the one before (a round's tail was lost without notice) counts as none processed.
    """
    times, rates = [], []
    start = 0
    for k, (moment, samples) in enumerate(counts):
        while start < k - 1 and counts[start + 1][0] <= moment - window_s:
            start += 1
        elapsed = moment - counts[start][0]
        times.append(moment)
        rates.append(max(0.0, samples - counts[start][1]) / elapsed if elapsed > 0 else 0.0)
    return Series(job, tuple(times), tuple(rates))


def rounds_of(events: Iterable[EventView], details: Sequence[JobDetail], end: float) -> list[Round]:
    """Every round that processed samples, with its first and last sample.

    The first sample of a round is the end of its rescale; the last sample of the round before it lies ``cost_s`` earlier. The last round
    of a job goes on until the job's end, or until ``end``.
    """
    members: dict[tuple[str, int], tuple[str, ...]] = {}
    stops: dict[str, list[float]] = {}
    for e in events:
        if e.kind == FORMED:
            members[e.job, int(e.data["generation"])] = tuple(e.data["members"])
        elif e.kind in TOOK:
            stops.setdefault(e.job, []).append(e.time)
    made = []
    for detail in details:
        done = [(s.generation, s.ended, s.cost_s) for s in detail.rescales if s.ended is not None]
        done.sort()
        for k, (generation, first, _) in enumerate(done):
            after = done[k + 1] if k + 1 < len(done) else None
            limits = [t for t in stops.get(detail.job.id, ()) if t > first] + [end]
            if after is not None:
                limits.append(after[1] - (after[2] or 0.0))
            last = max(first, min(limits))
            made.append(Round(detail.job.name, generation, members.get((detail.job.id, generation), ()), first, last))
    return made
