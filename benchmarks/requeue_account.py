"""Computes the results of benchmarks/requeue.py from the records of trainings and main jobs. Runs
nothing, and knows no contender.

Samples are numbered in the order in which a training takes them. A step at a position that the
training had already passed shows that it went back: the steps from there on were discarded.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.main_jobs import MainRecord
from malletrain.demo.account import Intervals, both, length, normal, without

LONG_GAP_S = 60.0
RESOLUTION_S = 0.1
"""Resolution of the time at which a step was interrupted, seconds."""


@dataclass(frozen=True)
class Record:
    """One step of a training on one node, complete or not. Times in epoch seconds."""

    training: int
    node: str
    began: float
    ended: float
    position: int
    """Number of samples of the training before the step."""
    total: int
    """Number of samples of the step over all nodes; 0: it was interrupted or aborted."""


@dataclass
class Step:
    """The records of one step, one for each node that finished it."""

    records: list[Record] = field(default_factory=list)

    def has_room_for(self, record: Record) -> bool:
        """Whether the record belongs to this step. The nodes of a step wait for each other, so that
        all have begun it before one has ended it.
        """
        first = self.records[0]
        return (record.position, record.total) == (first.position, first.total) and (
            record.began < first.ended
        )


@dataclass(frozen=True)
class Account:
    """The results of a contender."""

    samples: int
    """Samples trained on, each counted once for each training."""
    furthest: int
    """Samples of the training that came furthest."""
    idle_node_s: float
    """Node-seconds without a main job."""
    trained_share: float | None
    """Share of them in steps that counted. None: there are none."""
    long_idle_node_s: float
    """Node-seconds of gaps longer than LONG_GAP_S."""
    long_trained_share: float | None
    thrown_away_samples: int
    """Samples of steps that were finished, and repeated later."""
    thrown_away_node_s: float
    """Node-seconds of these steps, and of steps that were interrupted or aborted."""
    downtime_s: float
    """Time in which a training was in no counted step, mean over the trainings."""
    releases: int
    """Number of times that a main job left a node."""
    releases_used: int
    """Number of them after which a step began before the next main job."""
    first_step_median_s: float | None
    """Times from a release to the beginning of the first step on the node, seconds."""
    first_step_p90_s: float | None
    main_jobs: int
    """Number of main jobs that arrived before the end."""
    main_wait_mean_s: float
    """Waits from a main job's submission to its first command, or to the end if that came first,
    seconds.
    """
    main_wait_max_s: float


def records_of(folder: Path) -> list[Record]:
    """Return the records with files in ``folder``. The end of an interrupted step is the last
    change of its file.
    """
    records = []
    for path in folder.iterdir():
        text, changed = path.read_text(), path.stat().st_mtime
        lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        if not lines:
            continue
        training, node, last = int(lines[0][0]), lines[0][1], float(lines[0][2])
        for began, ended, position, total in lines[1:]:
            span = (float(began), float(ended))
            records.append(Record(training, node, *span, int(position), int(total)))
            last = float(ended)
        if changed > last + RESOLUTION_S:
            records.append(Record(training, node, last, changed, 0, 0))
    return records


def outcome(records: Iterable[Record]) -> tuple[list[Step], list[Step]]:
    """Return the counted steps of one training, and the discarded ones."""
    counted: list[Step] = []
    thrown_away: list[Step] = []
    for record in sorted((r for r in records if r.total), key=lambda record: record.ended):
        if counted and counted[-1].has_room_for(record):
            counted[-1].records.append(record)
            continue
        while counted and counted[-1].records[0].position >= record.position:
            thrown_away.append(counted.pop())
        counted.append(Step([record]))
    return counted, thrown_away


def gaps_of(
    main: Sequence[MainRecord], nodes: Iterable[str], begin: float, end: float
) -> dict[str, Intervals]:
    """Return node → times without a main job."""
    used: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in main:
        if record.started is not None:
            until = end if record.ended is None else min(record.ended, end)
            for node in record.nodes:
                used[node].append((max(begin, record.started), until))
    return {node: without(((begin, end),), normal(used[node])) for node in nodes}


def waits_of(main: Sequence[MainRecord], end: float) -> list[float]:
    """Return how long each main job submitted before ``end`` waited, seconds."""
    return [
        min(end, end if record.started is None else record.started) - record.submitted
        for record in main
        if record.submitted < end
    ]


def account(
    records: Sequence[Record],
    main: Sequence[MainRecord],
    *,
    begin: float,
    end: float,
    nodes: Sequence[str],
    trainings: int,
) -> Account:
    """Return the results of a contender.

    Args:
        records: all records of its trainings. Those that ended after ``end`` do not count.
        main: the main jobs.
        begin: time of the submission of the trainings, epoch seconds.
        end: time at which the contender was stopped.
        nodes: names of the nodes.
        trainings: number of trainings.
    """
    of_training: dict[int, list[Record]] = defaultdict(list)
    thrown_away_s = 0.0
    for record in records:
        if record.ended > end:
            continue
        of_training[record.training].append(record)
        if not record.total:
            thrown_away_s += record.ended - record.began
    samples_of: dict[int, int] = {}
    thrown_away_samples, downtime_s = 0, (trainings - len(of_training)) * (end - begin)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for training, its_records in of_training.items():
        counted, repeated = outcome(its_records)
        samples_of[training] = sum(step.records[0].total for step in counted)
        thrown_away_samples += sum(step.records[0].total for step in repeated)
        thrown_away_s += sum(r.ended - r.began for step in repeated for r in step.records)
        its_spans = []
        for record in (r for step in counted for r in step.records):
            spans[record.node].append((record.began, record.ended))
            its_spans.append((record.began, record.ended))
        downtime_s += (end - begin) - length(normal(its_spans))
    gaps = gaps_of(main, nodes, begin, end)
    trained = {node: normal(pieces) for node, pieces in spans.items()}
    long_gaps = {
        node: tuple(gap for gap in its_gaps if gap[1] - gap[0] > LONG_GAP_S)
        for node, its_gaps in gaps.items()
    }
    delays = _first_steps(gaps, trained, begin)
    used = sorted(delay for delay in delays if delay is not None)
    waits = waits_of(main, end)
    return Account(
        samples=sum(samples_of.values()),
        furthest=max(samples_of.values(), default=0),
        idle_node_s=sum(map(length, gaps.values())),
        trained_share=_share(gaps, trained),
        long_idle_node_s=sum(map(length, long_gaps.values())),
        long_trained_share=_share(long_gaps, trained),
        thrown_away_samples=thrown_away_samples,
        thrown_away_node_s=thrown_away_s,
        downtime_s=downtime_s / trainings,
        releases=len(delays),
        releases_used=len(used),
        first_step_median_s=statistics.median(used) if used else None,
        first_step_p90_s=used[int(0.9 * (len(used) - 1))] if used else None,
        main_jobs=len(waits),
        main_wait_mean_s=statistics.fmean(waits) if waits else 0.0,
        main_wait_max_s=max(waits, default=0.0),
    )


def added_wait(beside: Sequence[float], alone: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the longest wait that a contender added to the main jobs, job by job.
    Jobs at the end of only one run do not count.

    Args:
        beside: waits of the main jobs beside the contender, in the order of their arrival, seconds.
        alone: waits of the same jobs without a contender.
    """
    added = [b - a for b, a in zip(beside, alone, strict=False)]
    return (statistics.fmean(added), max(added)) if added else (0.0, 0.0)


def _share(gaps: Mapping[str, Intervals], trained: Mapping[str, Intervals]) -> float | None:
    offered_s = sum(map(length, gaps.values()))
    used_s = sum(length(both(its_gaps, trained.get(node, ()))) for node, its_gaps in gaps.items())
    return used_s / offered_s if offered_s else None


def _first_steps(
    gaps: Mapping[str, Intervals], trained: Mapping[str, Intervals], begin: float
) -> list[float | None]:
    """Return for each release of a node the time until a step began there; None: none began before
    the next main job.
    """
    return [
        next((s - start for s, _ in trained.get(node, ()) if start <= s < end), None)
        for node, its_gaps in gaps.items()
        for start, end in its_gaps
        if start > begin
    ]
