"""Converts the daemon's events and job details to rounds and assignments, which the account adds
up. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from malletrain.demo.account import AssignmentSpan, RoundSpan
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobDetail
from malletrain.render.timeline import ThroughputSeries

GAVE = (EventKind.JOB_STARTED, EventKind.JOB_RESCALED)
TOOK = (
    EventKind.JOB_SUSPENDED,
    EventKind.JOB_COMPLETED,
    EventKind.JOB_FAILED,
    EventKind.JOB_CANCELLED,
)
LOST = EventKind.NODE_LOST
FORMED = EventKind.ROUND_FORMED
LATE_S = 1.0


def assignments_of(
    events: Iterable[EventView], end: float, names: Mapping[str, str]
) -> list[AssignmentSpan]:
    """Returns which job had which node by the plan, until ``end``. ``names``: job id → name."""
    since: dict[str, dict[str, float]] = {}
    spans: list[AssignmentSpan] = []

    def change(job: str, nodes: set[str], moment: float) -> None:
        now = since.setdefault(job, {})
        for node in now.keys() - nodes:
            spans.append(AssignmentSpan(node, names.get(job, job), (now.pop(node), moment)))
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
    return spans


def throughput(
    job: str,
    counts: Sequence[tuple[float, float]],
    unknown: Sequence[tuple[float, float]] = (),
    window_s: float = 2.0,
) -> ThroughputSeries:
    """Returns the samples/s of one job from (time, samples) observations: from each observation on,
    the slope to the next one, over at least ``window_s`` seconds. Observations within ``unknown``
    (begin, end) are ignored, because a restarted daemon does not know the newest samples yet.
    """
    looks: list[tuple[float, float]] = []
    for moment, samples in counts:
        if not any(begin <= moment <= end for begin, end in unknown):
            looks.append((moment, max(samples, looks[-1][1] if looks else 0.0)))
    rates, start = [], 0
    for k in range(len(looks) - 1):
        moment, samples = looks[k + 1]
        while start < k and looks[start][0] < moment - window_s:
            start += 1
        elapsed = moment - looks[start][0]
        rates.append((samples - looks[start][1]) / elapsed if elapsed > 0 else 0.0)
    return ThroughputSeries(
        job, tuple(moment for moment, _ in looks), (*rates, 0.0) if looks else ()
    )


def rounds_of(
    events: Sequence[EventView],
    details: Sequence[JobDetail],
    counts: Mapping[str, Sequence[tuple[float, float]]],
    end: float,
) -> list[RoundSpan]:
    """Returns every round that processed samples, with its first and last sample.

    The first sample of a round is the end of its rescale; the last sample of the previous round is
    ``cost_s`` earlier. The last round of a job lasts until the job stops, or until ``end``. A round
    whose first sample came while the daemon was down has no measured rescale: it begins when
    ``counts`` (job name → (time, samples) observations) first shows more samples than before.
    """
    formed: dict[str, list[tuple[float, int, tuple[str, ...]]]] = {}
    stops: dict[str, list[float]] = {}
    for e in events:
        if e.kind == FORMED:
            formed.setdefault(e.job, []).append(
                (e.time, int(e.data["generation"]), tuple(e.data["members"]))
            )
        elif e.kind in TOOK:
            stops.setdefault(e.job, []).append(e.time)
    spans = []
    for detail in details:
        job, name = detail.job.id, detail.job.name
        measured = {
            s.generation: (s.ended, s.cost_s or 0.0) for s in detail.rescales if s.ended is not None
        }
        mine = formed.get(job, [])
        begun: list[tuple[float, float, int, tuple[str, ...]]] = []
        formings = [moment for moment, _, _ in mine]
        for k, (moment, generation, members) in enumerate(mine):
            limit = mine[k + 1][0] if k + 1 < len(mine) else end
            if generation in measured:
                begun.append((*measured[generation], generation, members))
            elif (seen := _grew(counts.get(name, ()), moment, limit)) is not None:
                begun.append((seen, seen - moment, generation, members))
        for k, (first, _, generation, members) in enumerate(begun):
            # When a new round is formed, the previous one is over in any case.
            limits = [t for t in (*stops.get(job, ()), *formings) if t > first] + [end]
            if k + 1 < len(begun):
                limits.append(begun[k + 1][0] - begun[k + 1][1])
            spans.append(RoundSpan(name, generation, members, first, max(first, min(limits))))
    return spans


def _grew(counts: Sequence[tuple[float, float]], since: float, until: float) -> float | None:
    """Returns the time of the first observation with more samples than shortly after ``since``,
    because the last samples of the previous round arrive late.
    """
    before = max((samples for moment, samples in counts if moment <= since + LATE_S), default=0.0)
    return next(
        (moment for moment, samples in counts if since < moment < until and samples > before), None
    )
