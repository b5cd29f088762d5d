"""The tables of :mod:`benchmarks.windsr` as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.windsr_setting import ROWS


def spread(values: Sequence[float], digits: int) -> str:
    """Return ``mean ± standard deviation``."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return "-"
    mean = statistics.fmean(numbers)
    return (
        f"{mean:.{digits}f}"
        if len(numbers) < 2
        else f"{mean:.{digits}f} ± {statistics.stdev(numbers):.{digits}f}"
    )


def _table(head: Sequence[str], lines: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]


def methods_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of every method without and with restored block means; for those with random
    members, one member and the means of more.
    """
    head = ["method", "members", "RMSE free, m/s", "RMSE", "MAE", "PSNR, dB", "SSIM", "CRPS, m/s"]
    lines = []
    for name in ROWS:
        own = [row for row in rows if row["row"] == name]
        for members in own[0]["constrained"] if own else ():
            free = [row["free"][members] for row in own]
            exact = [row["constrained"][members] for row in own]
            cells = [spread([f["rmse"] for f in free], 3)]
            cells += [
                spread([e.get(key, math.nan) for e in exact], digits)
                for key, digits in (("rmse", 3), ("mae", 3), ("psnr", 2), ("ssim", 3), ("crps", 3))
            ]
            lines.append([name, members, *cells])
    return _table(head, lines)


def ensembles_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of spread, ranks, power and tails, with restored block means."""
    head = ["method", "members", "spread/skill", "outermost ranks, times their due"]
    head += ["fine power, mean", "fine power, member", "tail 1 %, m/s", "99 %", "99.9 %"]
    lines = []
    for name in ROWS:
        own = [row for row in rows if row["row"] == name]
        if not own:
            continue
        members = max(own[0]["constrained"], key=int)
        exact = [row["constrained"][members] for row in own]
        outer = [(e["ranks"][0] + e["ranks"][-1]) / 2 * len(e["ranks"]) for e in exact]
        lines.append(
            [
                name,
                members,
                spread([e["spread_skill"] for e in exact], 2),
                spread(outer, 1) if int(members) > 1 else "-",
                spread([e["fine_power"] for e in exact], 2),
                spread([e["fine_power_member"] for e in exact], 2),
                *(spread([e["tails"][q] for e in exact], 2) for q in exact[0]["tails"]),
            ]
        )
    return _table(head, lines)


def observations_table(observed: list[dict[str, Any]]) -> list[str]:
    """Return the table of RMSE by method, way and radius: the mean over the days, whose own spread
    is far larger than the differences, and the mean gain over no observations.
    """
    if not observed or not observed[0]["rows"]:
        return []
    first = next(iter(observed[0]["rows"]))
    labels = list(observed[0]["rows"][first]["condition"])
    head = ["method", "way", "none", *labels]
    lines = []
    for name in observed[0]["rows"]:
        none = statistics.fmean(o["rows"][name]["none"]["none"]["rmse"] for o in observed)
        for way in observed[0]["rows"][name]:
            own = [o["rows"][name][way] for o in observed]
            if way == "none":
                continue
            cells = [
                f"{statistics.fmean(o[label]['rmse'] for o in own):.3f}" if label in own[0] else "-"
                for label in labels
            ]
            if way == "score-based":
                cells[0] = f"{statistics.fmean(o['none']['rmse'] for o in own):.3f} (no radius)"
            lines.append([name, way, f"{none:.3f}", *cells])
    table = _table(head, lines)
    for label in ("dynamic, at most 6", "dynamic"):
        used = [
            f"{o['day']}: {o['rows'][first]['paste'][label]['mean_radius']:.1f} pixels on "
            f"average, T1 {o['thresholds'][f'paste, {label}'][0]:g} m, "
            f"T2 {o['thresholds'][f'paste, {label}'][1]:g} m/s"
            for o in observed
        ]
        table.append(f"{label}: " + "; ".join(used))
    return table


def trace_table(rows: list[dict[str, Any]], traced: list[dict[str, Any]]) -> list[str]:
    """Return the table of the training on nodes that come and go, beside the undisturbed one."""
    if not traced:
        return []
    head = ["training", "RMSE of 32 members, m/s", "CRPS", "rescales", "preempted"]
    lines = []
    for row in traced:
        same = [r for r in rows if (r["row"], r["day"], r["seed"]) == ("windsr", row["day"], 0)]
        for name, one in [*(("undisturbed", r) for r in same), (f"trace, {row['mode']}", row)]:
            exact = one["constrained"][max(one["constrained"], key=int)]
            cells = [f"{exact['rmse']:.5f}", f"{exact['crps']:.5f}"]
            lines.append([name, *cells, str(row.get("rescales", 0)) if one is row else "0",
                          str(row.get("lost", 0)) if one is row else "0"])  # fmt: skip
    return _table(head, lines)


def costs_line(rows: list[dict[str, Any]]) -> str:
    """Return the table of the costs of training and drawing, CPU seconds on one thread."""
    sentences = []
    for name in ROWS:
        own = [row for row in rows if row["row"] == name and "train_cpu_s" in row]
        if own:
            sentences.append(
                f"{name} {spread([r['train_cpu_s'] for r in own], 0)} to train, "
                f"{spread([r['sample_cpu_s'] / r['fields'] for r in own], 1)} a field drawn"
            )
    return "CPU s: " + "; ".join(sentences) if sentences else ""


def tables(
    rows: list[dict[str, Any]], observed: list[dict[str, Any]], traced: list[dict[str, Any]]
) -> str:
    """Return all tables as text in Markdown."""
    parts = methods_table(rows) + ensembles_table(rows) if rows else []
    return "\n".join(
        [*parts, *observations_table(observed), "", *trace_table(rows, traced), costs_line(rows)]
    )
