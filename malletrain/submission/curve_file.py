"""The file of ``malletrain submit --curve``: a job's throughput by scale as its owner states it, in
CSV or JSON.
"""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

from malletrain.protocol.bounds import MAX_NODES
from malletrain.submission.error import SpecError

CURVE_HELP = 'CSV with the header "nodes,samples_per_s", or JSON such as {"1": 120.0, "2": 230.5}'


def read_curve(path: Path) -> dict[str, float]:
    """Returns the scaling curve in a file (CSV or JSON): nodes as text → samples/s, sorted by
    nodes. Raises SpecError."""
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise SpecError(f"The scaling curve {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SpecError(
            f"The scaling curve {path} is not a text file; accepted is {CURVE_HELP}."
        ) from None
    points = _from_json(text, path) if text.lstrip()[:1] in ("{", "[") else _from_csv(text, path)
    if not points:
        raise SpecError(f"{path}: The scaling curve has no points; accepted is {CURVE_HELP}.")
    rates: dict[int, float] = {}
    for where, nodes, rate in points:
        if not nodes.is_integer() or not 1 <= nodes <= MAX_NODES:
            raise SpecError(
                f"{where}: {nodes:g} is not a number of nodes; sizes are whole numbers from 1 "
                f"to {MAX_NODES:,}."
            )
        if not math.isfinite(rate) or rate < 0:
            raise SpecError(
                f"{where}: {rate:g} is not a throughput; it is a number of samples/s, 0 or more."
            )
        if int(nodes) in rates:
            raise SpecError(f"{where}: {nodes:g} nodes are named twice; name each size once.")
        rates[int(nodes)] = rate
    return {str(nodes): rates[nodes] for nodes in sorted(rates)}


def _from_csv(text: str, path: Path) -> list[tuple[str, float, float]]:
    try:
        rows = [
            (n, row)
            for n, row in enumerate(csv.reader(io.StringIO(text)), start=1)
            if row and not row[0].startswith("#")
        ]
    except csv.Error as error:
        raise SpecError(
            f"{path}: This is not valid CSV ({error}); accepted is {CURVE_HELP}."
        ) from None
    if rows and [c.strip().lower() for c in rows[0][1]] == ["nodes", "samples_per_s"]:
        rows = rows[1:]
    elif rows:
        raise SpecError(
            f'{path}: The first line is "{",".join(rows[0][1])[:60]}"; accepted is {CURVE_HELP}.'
        )
    points = []
    for line, row in rows:
        try:
            nodes, rate = row
            points.append((f"{path} line {line}", float(nodes), float(rate)))
        except ValueError:
            raise SpecError(
                f'{path} line {line}: "{",".join(row)[:60]}" is not two numbers; accepted is '
                f"{CURVE_HELP}."
            ) from None
    return points


def _from_json(text: str, path: Path) -> list[tuple[str, float, float]]:
    try:
        pairs = json.loads(text, object_pairs_hook=list)  # keeps sizes that are named twice
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{path}: This is not valid JSON ({error}); accepted is {CURVE_HELP}."
        ) from None
    points = []
    for pair in pairs:
        try:
            nodes, rate = pair
            if isinstance(nodes, bool) or isinstance(rate, bool):
                raise ValueError
            points.append((str(path), float(nodes), float(rate)))
        except (TypeError, ValueError, OverflowError):  # OverflowError: an integer above 1e308
            raise SpecError(
                f"{path}: {json.dumps(pair)[:60]} is not a pair of numbers; accepted is "
                f"{CURVE_HELP}."
            ) from None
    return points
