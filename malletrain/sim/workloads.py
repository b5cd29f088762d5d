"""Workloads: the model jobs that a simulation runs.

Decides what a job of a simulation is and how a list of jobs comes about: drawn at random from
scaling curves (``hpo``), read from a file, or random cells (:mod:`malletrain.sim.nas`). Arrivals
and sizes of a real log come from :mod:`malletrain.sim.joblogs`.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from allocator import CurveError, Goal, ScalingCurve

HPO_SAMPLES = 1.3e8
"""Work of one job of a hyperparameter search: a hundred epochs of ImageNet, as in the published
replay.
"""


Given = Literal["exact", "other", "linear", "none"]
"""How well owners know the curves of their jobs."""


class WorkloadError(ValueError):
    """A workload, log or option of the simulator that makes no sense; the message says where and
    why.
    """


@dataclass(frozen=True)
class SimJob:
    """One model job.

    ``samples``: its work. ``curve``: how fast it really is, samples/s by nodes; between points
    linear, and a job never runs on more nodes than ``max_nodes``. ``told``: the curve its owner
    states, None when the owner states none. ``submit_s``: seconds from the start. ``model``: jobs
    of one model have one curve, unless ``parameters`` and ``flops`` (of training one sample) tell
    their models apart. ``batch``: samples a step and node.

    Raises:
        WorkloadError: on limits, work or times that make no sense, and when ``max_nodes`` lies
            beyond the curve: what nobody measured is not simulated.
    """

    name: str
    min_nodes: int
    max_nodes: int
    samples: float
    curve: ScalingCurve
    told: ScalingCurve | None = None
    submit_s: float = 0.0
    weight: float = 1.0
    goal: Goal = Goal.THROUGHPUT
    sizes: tuple[int, ...] | None = None
    model: str = ""
    parameters: float | None = None
    flops: float | None = None
    batch: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise WorkloadError(
                f"Job {self.name} asks for {self.min_nodes}:{self.max_nodes} nodes; give 1 <= "
                "min <= max."
            )
        if not (math.isfinite(self.samples) and self.samples > 0):
            raise WorkloadError(
                f"Job {self.name} has {self.samples} samples to process; give a number above 0."
            )
        if not (math.isfinite(self.submit_s) and self.submit_s >= 0):
            raise WorkloadError(
                f"Job {self.name} is submitted at {self.submit_s} s; give seconds from the "
                "start, 0 or more."
            )
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise WorkloadError(
                f"Job {self.name} has weight {self.weight}; give a finite number, 0 or more."
            )
        if not self.curve.covers(self.max_nodes):
            raise WorkloadError(
                f"Job {self.name} may use {self.max_nodes} nodes but its curve ends at "
                f"{self.curve.largest}; "
                "the simulator does not extrapolate: lower the maximum or extend the curve."
            )
        if self.sizes is not None and not any(
            self.min_nodes <= k <= self.max_nodes for k in self.sizes
        ):
            raise WorkloadError(
                f"Job {self.name} accepts no size within {self.min_nodes}:{self.max_nodes} nodes."
            )

    def rates(self) -> list[float]:
        """Throughput at 0, 1, … ``max_nodes`` nodes, samples/s."""
        return [0.0, *self.curve.rates(np.arange(1, self.max_nodes + 1)).tolist()]


def hpo(
    curves: Mapping[str, ScalingCurve],
    count: int,
    seed: int = 0,
    *,
    samples: float = HPO_SAMPLES,
    max_nodes: int | None = None,
) -> list[SimJob]:
    """A hyperparameter search: ``count`` jobs, each of one of ``curves`` (model → curve) drawn at
    random, all submitted at the start.

    ``max_nodes``: largest size of a job, where its curve reaches so far; default the end of its
    curve. Raises WorkloadError without curves or jobs, and when no curve reaches ``max_nodes``: the
    simulator does not extrapolate.
    """
    if not curves:
        raise WorkloadError("There is no scaling curve to draw jobs from.")
    longest = max(curve.largest for curve in curves.values())
    if max_nodes is not None and max_nodes > longest:
        raise WorkloadError(
            f"Jobs of {max_nodes} nodes are asked for but no scaling curve goes beyond "
            f"{longest}; the simulator does not extrapolate."
        )
    if count < 1:
        raise WorkloadError(f"A workload of {count} jobs cannot be simulated; give 1 or more.")
    names = sorted(curves)
    drawn = np.random.default_rng(seed).integers(len(names), size=count).tolist()
    width = len(str(count))
    jobs = []
    for number, k in enumerate(drawn, start=1):
        curve = curves[names[k]]
        most = curve.largest if max_nodes is None else min(max_nodes, curve.largest)
        jobs.append(
            SimJob(
                f"{names[k]}-{number:0{width}d}",
                1,
                most,
                samples,
                curve,
                told=curve,
                model=names[k],
            )
        )
    return jobs


def arriving(jobs: Sequence[SimJob], log: Iterable[tuple[float, int, float]]) -> list[SimJob]:
    """The same models, with arrivals, sizes and lengths of a real log: (submission, nodes, run
    time) of each of its jobs, in seconds.

    A job may grow to as many nodes as its model of a batch job had, and has the work that it would
    have done on them in that time. Where its curve ends before, it may grow to that end and has
    work for as many node-seconds. One job of the log is used for each of ``jobs``.
    """
    found = []
    for job, (submit_s, nodes, run_s) in zip(jobs, log, strict=False):
        most = min(nodes, job.max_nodes)
        work = job.curve.at(most) * run_s * nodes / most
        found.append(
            replace(
                job,
                submit_s=submit_s,
                max_nodes=most,
                min_nodes=min(job.min_nodes, most),
                samples=work,
            )
        )
    return found


def given(jobs: Sequence[SimJob], how: Given, seed: int = 0) -> list[SimJob]:
    """The same jobs, with owners that state their curves ``exact``, as that of an ``other`` model
    of the workload (drawn at random), as ``linear`` in the throughput of one node, or not at all
    (``none``). Raises WorkloadError when there is no other model.
    """
    rng = np.random.default_rng((seed, 1))  # not the numbers that drew the jobs
    different = sorted({job.curve.points for job in jobs})
    if how == "other" and len(different) < 2:
        raise WorkloadError(
            "There is only one model in the workload, so that no owner can state the curve of "
            "another."
        )
    found = []
    for job in jobs:
        told: ScalingCurve | None = job.curve
        if how == "none":
            told = None
        elif how == "linear":
            one = job.curve.at(1)
            told = ScalingCurve.of({1: one, job.curve.largest: one * job.curve.largest})
        elif how == "other":
            k = int(rng.integers(len(different) - 1))
            told = ScalingCurve(different[k] if different[k] != job.curve.points else different[-1])
        found.append(replace(job, told=told))
    return found


def read_curves(path: str | Path) -> dict[str, ScalingCurve]:
    """Scaling curves, model → curve, from a CSV with the header ``model,nodes,samples_per_s``.

    Raises WorkloadError with the line of the problem: not a number, NaN, negative, a size given
    twice, a single point.
    """
    points: dict[str, dict[int, float]] = {}
    for line, row in _rows(path, ("model", "nodes", "samples_per_s")):
        where = f"{path}, line {line}"
        model = row["model"].strip()
        nodes, rate = (
            _whole(row["nodes"], where, "nodes"),
            _number(row["samples_per_s"], where, "samples_per_s"),
        )
        if not model:
            raise WorkloadError(f"{where}: The model has no name.")
        if nodes in points.setdefault(model, {}):
            raise WorkloadError(f"{where}: Model {model} has {nodes} nodes twice.")
        points[model][nodes] = rate
    if not points:
        raise WorkloadError(f"{path}: There is a header but no curve below it.")
    curves = {}
    for model, pairs in points.items():
        curves[model] = _curve(pairs.items(), f"{path}: Model {model}")
    return curves


def read_workload(
    path: str | Path, curves: Mapping[str, ScalingCurve] | None = None
) -> list[SimJob]:
    """Jobs from a file: CSV with a header, or JSON (a list of objects), with the fields of
    :class:`SimJob`.

    ``name``, ``samples`` and either ``model`` (a name in ``curves``) or ``curve`` are needed;
    ``min_nodes`` (1), ``max_nodes`` (the end of the curve), ``submit_s`` (0), ``weight`` (1),
    ``goal``, ``sizes``, ``told`` may be left out. A curve is an object such as ``{"1": 100, "2":
    190}`` in JSON and ``1:100 2:190`` in CSV, sizes a list or ``1 2 4``. Without ``told`` the owner
    states the true curve; with ``none``, no curve.

    Raises WorkloadError with the line or entry of the problem.
    """
    text = read_text(path)
    if text.lstrip()[:1] in ("[", "{"):
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            raise WorkloadError(
                f"{path}, line {error.lineno}: This is not JSON: {error.msg}."
            ) from None
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise WorkloadError(f"{path}: A workload in JSON is a list of objects, one a job.")
        found = [(f"{path}, entry {k}", e) for k, e in enumerate(entries, start=1)]
    else:
        found = [
            (f"{path}, line {line}", {k: v for k, v in row.items() if v.strip()})
            for line, row in _rows(path, ("name", "samples"))
        ]
    if not found:
        raise WorkloadError(f"{path}: The workload has no job.")
    jobs, seen = [], set()
    for where, entry in found:
        job = _job(entry, where, curves or {})
        if job.name in seen:
            raise WorkloadError(f"{where}: There are two jobs named {job.name}.")
        seen.add(job.name)
        jobs.append(job)
    return jobs


_FIELDS = (
    "name",
    "samples",
    "model",
    "curve",
    "told",
    "min_nodes",
    "max_nodes",
    "submit_s",
    "weight",
    "goal",
    "sizes",
)


def _job(entry: Mapping[str, Any], where: str, curves: Mapping[str, ScalingCurve]) -> SimJob:
    unknown = sorted(set(entry) - set(_FIELDS))
    if unknown:
        raise WorkloadError(
            f"{where}: A job has no field {', '.join(unknown)}; known are {', '.join(_FIELDS)}."
        )
    for needed in ("name", "samples"):
        if needed not in entry:
            raise WorkloadError(f"{where}: The job has no {needed}.")
    name, model = str(entry["name"]).strip(), str(entry.get("model", "")).strip()
    if "curve" in entry:
        curve = _curve(_pairs(entry["curve"], where), f"{where}: Job {name}")
    elif model in curves:
        curve = curves[model]
    else:
        known = f"; known are {', '.join(sorted(curves))}" if curves else "; give a file of curves"
        raise WorkloadError(
            f"{where}: Job {name} has no curve, and its model '{model}' is not known{known}."
        )
    told: ScalingCurve | None = curve
    if "told" in entry:
        told = (
            None
            if str(entry["told"]).strip() == "none"
            else _curve(_pairs(entry["told"], where), f"{where}: Job {name} (told)")
        )
    sizes = entry.get("sizes")
    if isinstance(sizes, str):
        sizes = sizes.split()
    goal = str(entry.get("goal", Goal.THROUGHPUT.value)).strip()
    if goal not in {g.value for g in Goal}:
        raise WorkloadError(
            f"{where}: The goal of job {name} is '{goal}'; known are "
            f"{', '.join(g.value for g in Goal)}."
        )
    try:
        return SimJob(
            name,
            _whole(entry.get("min_nodes", 1), where, "min_nodes"),
            _whole(entry.get("max_nodes", curve.largest), where, "max_nodes"),
            _number(entry["samples"], where, "samples"),
            curve,
            told,
            _number(entry.get("submit_s", 0.0), where, "submit_s"),
            _number(entry.get("weight", 1.0), where, "weight"),
            Goal(goal),
            None if sizes is None else tuple(_whole(k, where, "sizes") for k in sizes),
            model,
        )
    except WorkloadError as error:
        raise WorkloadError(
            str(error) if str(error).startswith(where) else f"{where}: {error}"
        ) from None


def _pairs(value: Any, where: str) -> list[tuple[int, float]]:
    if isinstance(value, str):
        words = [word.split(":") for word in value.split()]
        if not all(len(word) == 2 for word in words):
            raise WorkloadError(
                f"{where}: A curve is written as '1:100 2:190' (nodes:samples/s); got "
                f"'{value[:60]}'."
            )
        items: Iterable[Sequence[Any]] = words
    elif isinstance(value, Mapping):
        items = list(value.items())
    else:
        raise WorkloadError(
            f'{where}: A curve is an object such as {{"1": 100, "2": 190}}; got {value!r}.'
        )
    return [
        (_whole(nodes, where, "nodes"), _number(rate, where, "samples/s")) for nodes, rate in items
    ]


def _curve(points: Iterable[tuple[int, float]], where: str) -> ScalingCurve:
    pairs = list(points)
    if len(pairs) == 1:
        raise WorkloadError(
            f"{where} has a scaling curve of a single point; give two sizes at least, or it "
            "says nothing about scaling."
        )
    try:
        return ScalingCurve.of(pairs)
    except CurveError as error:
        raise WorkloadError(f"{where}: {error}") from None


def read_text(path: str | Path) -> str:
    """The text of a file, gzip or not. Raises WorkloadError when there is none."""
    try:
        raw = Path(path).read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except FileNotFoundError:
        raise WorkloadError(f"{path}: There is no such file.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise WorkloadError(f"{path}: The gzip file is damaged ({error}).") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: This is not a text file.") from None
    except OSError as error:
        raise WorkloadError(
            f"{path}: The file cannot be read: {error.strerror or error}."
        ) from None


def _rows(path: str | Path, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line, row) of a CSV whose header has at least the columns ``needed``."""
    reader = csv.DictReader(read_text(path).splitlines())
    header = [name.strip() for name in reader.fieldnames or ()]
    missing = [name for name in needed if name not in header]
    if missing:
        raise WorkloadError(
            f"{path}: The header must have the columns {', '.join(needed)}; it has no "
            f"{', '.join(missing)}."
        )
    reader.fieldnames = header
    rows = []
    for row in reader:
        if None in row or None in row.values():
            raise WorkloadError(
                f"{path}, line {reader.line_num}: The row does not have the {len(header)} "
                "columns of the header."
            )
        rows.append((reader.line_num, row))
    return rows


def _whole(value: Any, where: str, what: str) -> int:
    try:
        if isinstance(value, bool) or float(value) != int(float(value)):
            raise ValueError
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        raise WorkloadError(f"{where}: {what} must be a whole number; got '{value}'.") from None


def _number(value: Any, where: str, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise WorkloadError(f"{where}: {what} must be a number; got '{value}'.") from None
    if not math.isfinite(number) or number < 0:
        raise WorkloadError(f"{where}: {what} must be a finite number, 0 or more; got {value}.")
    return number
