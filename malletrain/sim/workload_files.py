"""Reads files of curves and of workloads.

Decides the format of these files and how errors in them are reported.
:mod:`malletrain.sim.workloads` defines jobs.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allocator import CurveError, Goal, ScalingCurve
from malletrain.sim.text_files import read_text
from malletrain.sim.workloads import SimJob, WorkloadError


def read_curves(path: str | Path) -> dict[str, ScalingCurve]:
    """Read scaling curves, model → curve, from a CSV with the header ``model,nodes,samples_per_s``.

    Raises:
        WorkloadError: a value is no number, NaN or negative, a size occurs twice, or a curve has a
            single point; the message names the line.
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
    """Read jobs from a file: CSV with a header, or JSON (a list of objects), with the fields of
    :class:`SimJob`.

    ``name``, ``samples`` and either ``model`` (a name in ``curves``) or ``curve`` are required;
    ``min_nodes`` (1), ``max_nodes`` (the end of the curve), ``submit_s`` (0), ``weight`` (1),
    ``goal``, ``sizes``, ``stated_curve``, ``deadline_s``, ``budget_nh``, ``user``, ``parameters``,
    ``flops``, ``kind`` (of slots) are optional. A curve is an object such as
    ``{"1": 100, "2": 190}`` in JSON and ``1:100 2:190`` in CSV, sizes a list or ``1 2 4``. Without
    ``stated_curve`` the owner states the true curve; with ``none``, no curve.

    Raises:
        WorkloadError: the file is not valid; the message names the line or entry.
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
        rows = [(f"{path}, entry {k}", e) for k, e in enumerate(entries, start=1)]
    else:
        rows = [
            (f"{path}, line {line}", {k: v for k, v in row.items() if v.strip()})
            for line, row in _rows(path, ("name", "samples"))
        ]
    if not rows:
        raise WorkloadError(f"{path}: The workload has no job.")
    jobs, names = [], set()
    for where, entry in rows:
        job = _job(entry, where, curves or {})
        if job.name in names:
            raise WorkloadError(f"{where}: There are two jobs named {job.name}.")
        names.add(job.name)
        jobs.append(job)
    return jobs


_FIELDS = (
    "name",
    "samples",
    "model",
    "curve",
    "stated_curve",
    "min_nodes",
    "max_nodes",
    "submit_s",
    "weight",
    "goal",
    "sizes",
    "deadline_s",
    "budget_nh",
    "user",
    "parameters",
    "flops",
    "kind",
)


def _job(entry: Mapping[str, Any], where: str, curves: Mapping[str, ScalingCurve]) -> SimJob:
    unknown = sorted(set(entry) - set(_FIELDS))
    if unknown:
        raise WorkloadError(
            f"{where}: A job has no field {', '.join(unknown)}. Its fields: {', '.join(_FIELDS)}."
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
        hint = f"; known are {', '.join(sorted(curves))}" if curves else "; give a file of curves"
        raise WorkloadError(
            f"{where}: Job {name} has no curve, and its model '{model}' is not known{hint}."
        )
    stated_curve: ScalingCurve | None = curve
    if "stated_curve" in entry:
        stated_curve = (
            None
            if str(entry["stated_curve"]).strip() == "none"
            else _curve(_pairs(entry["stated_curve"], where), f"{where}: Job {name} (stated_curve)")
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
            stated_curve,
            _number(entry.get("submit_s", 0.0), where, "submit_s"),
            _number(entry.get("weight", 1.0), where, "weight"),
            Goal(goal),
            None if sizes is None else tuple(_whole(k, where, "sizes") for k in sizes),
            model,
            deadline_s=_optional_number(entry, where, "deadline_s"),
            budget_nh=_optional_number(entry, where, "budget_nh"),
            user=str(entry.get("user", "")).strip(),
            parameters=_optional_number(entry, where, "parameters"),
            flops=_optional_number(entry, where, "flops"),
            node_class=str(entry.get("kind", "")).strip(),
        )
    except WorkloadError as error:
        raise WorkloadError(
            str(error) if str(error).startswith(where) else f"{where}: {error}"
        ) from None


def _optional_number(entry: Mapping[str, Any], where: str, key: str) -> float | None:
    return _number(entry[key], where, key) if key in entry else None


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
            f"{where} has a scaling curve of a single point, which says nothing about scaling; "
            "give two sizes at least."
        )
    try:
        return ScalingCurve.of(pairs)
    except CurveError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _rows(path: str | Path, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Return (line, row) of a CSV whose header has at least the columns ``needed``."""
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


def _whole(value: Any, where: str, key: str) -> int:
    try:
        if isinstance(value, bool) or float(value) != int(float(value)):
            raise ValueError
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        raise WorkloadError(f"{where}: {key} must be a whole number; got '{value}'.") from None


def _number(value: Any, where: str, key: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise WorkloadError(f"{where}: {key} must be a number; got '{value}'.") from None
    if not math.isfinite(number) or number < 0:
        raise WorkloadError(f"{where}: {key} must be a finite number, 0 or more; got {value}.")
    return number
