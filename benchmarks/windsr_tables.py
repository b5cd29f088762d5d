"""The tables of :mod:`benchmarks.windsr` as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.windsr_setting import ROWS

PAPER_PSNR = {
    ("srcnn", False): 27.34,
    ("esrgan", False): 28.16,
    ("windsr", False): 31.69,
    ("windsr", True): 32.83,
}


def spread(values: Sequence[float], digits: int) -> str:
    """``mean ± standard deviation`` over the seeds."""
    mean = statistics.fmean(values)
    return (
        f"{mean:.{digits}f}"
        if len(values) < 2
        else f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"
    )


def tables(
    rows: list[dict[str, Any]], observed: list[dict[str, Any]], traced: list[dict[str, Any]]
) -> str:
    """All three tables as text in Markdown."""
    lines = [
        "| method | PSNR, dB | SSIM | RMSE, m/s | CRPS, m/s | PSNR of one member | paper's PSNR |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, terrain in ROWS:
        own = [row for row in rows if (row["method"], row["terrain"]) == (method, terrain)]
        if not own:
            continue
        single = [row.get("psnr_member") for row in own]
        cells = [
            spread([row[key] for row in own], digits)
            for key, digits in (("psnr", 2), ("ssim", 3), ("rmse", 3), ("crps", 3))
        ]
        cells.append(
            spread([float(v) for v in single if v is not None], 2)
            if single[0] is not None
            else "same"
        )
        cells.append(str(PAPER_PSNR.get((method, terrain), "-")))
        lines.append(f"| {method}{', terrain' if terrain else ''} | " + " | ".join(cells) + " |")
    if observed:
        lines += [
            "",
            "| radius, pixels | MAE, m/s | RMSE, m/s | MAE near stations | RMSE near stations | "
            "mean radius |",
        ]
        lines.append("|---|---|---|---|---|---|")
        for name in observed[0]["rows"]:
            own = [result["rows"][name] for result in observed]
            cells = [
                spread([o[key] for o in own], 4) for key in ("mae", "rmse", "mae_near", "rmse_near")
            ]
            cells.append(
                spread([o["mean_radius"] for o in own], 2) if "mean_radius" in own[0] else "-"
            )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append(
            "\nT1, T2 by seed: " + ", ".join(f"{o['t1']:g} m, {o['t2']:g} m/s" for o in observed)
        )
    if traced:
        seeds = [row for row in rows if (row["method"], row["terrain"]) == ("windsr", True)]
        lines += [
            "",
            "| training | PSNR, dB | SSIM | RMSE, m/s | rescales | preempted |",
            "|---|---|---|---|---|---|",
        ]
        for row in seeds:
            lines.append(
                f"| undisturbed, seed {row['seed']} | {row['psnr']:.3f} | {row['ssim']:.4f} | "
                f"{row['rmse']:.4f} | 0 | 0 |"
            )
        for row in traced:
            name = f"on the trace, {row['mode']}, seed 0"
            lines.append(
                f"| {name} | {row['psnr']:.3f} | {row['ssim']:.4f} | {row['rmse']:.4f} | "
                f"{row['rescales']} | {row['lost']} |"
            )
    return "\n".join(lines)
