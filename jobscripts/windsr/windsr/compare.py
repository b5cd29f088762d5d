"""Compares files of samples: scores and distributions against the truth in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windsr import WindsrError, output
from windsr.evaluate import cdfs, scores
from windsr.grids import bicubic
from windsr.verification import ensemble_scores


def named(samples: Sequence[Path]) -> dict[str, Any]:
    """Results by name: that of the file, or of its folder where the file is samples.nc. Raises
    WindsrError where two have one name.
    """
    names = [path.parent.name if path.name == "samples.nc" else path.stem for path in samples]
    if len(set(names)) < len(names):
        raise WindsrError(
            "Two of the files have the same name; rename one, so that they can be told apart."
        )
    return {name: output.read(path) for name, path in zip(names, samples, strict=True)}


def _with_truth(samples: Sequence[Path]) -> dict[str, Any]:
    results = named(samples)
    unknown = [name for name, result in results.items() if result.truth is None]
    if unknown:
        raise WindsrError(
            f"{', '.join(unknown)} holds no truth to compare with: it was made from coarse fields."
        )
    first = next(iter(results.values()))
    for name, result in results.items():
        same = result.truth.shape == first.truth.shape and np.array_equal(result.truth, first.truth)
        if not same or not np.array_equal(result.times, first.times):
            raise WindsrError(
                f"{name} has other fields than {next(iter(results))}; only what was made of the "
                "same fields can be compared."
            )
    return results


def interpolated(result: Any) -> Any:
    """Return the bicubic interpolation of the coarse fields of a result."""
    factor = len(result.y) // result.low.shape[1]
    return bicubic(torch.from_numpy(result.low[:, None]), factor).clamp_min(0).numpy()


def _scored(result: Any, members: Any, peak: float) -> dict[str, Any]:
    factor = len(result.y) // result.low.shape[1]
    spacing = float(np.diff(result.x).mean())
    return {
        **scores(result.truth, members, peak),
        **ensemble_scores(result.truth, members, spacing, factor),
    }


def table_of(samples: Sequence[Path]) -> dict[str, Any]:
    """Return scores and distributions of files of samples and of bicubic interpolation. Raises
    WindsrError if a file has no truth.
    """
    results = _with_truth(samples)
    first = next(iter(results.values()))
    peak = float(first.truth.max())
    table = {"bicubic": _scored(first, interpolated(first), peak)}
    table |= {name: _scored(result, result.members, peak) for name, result in results.items()}
    # one member, not the mean: the mean of an ensemble is smoother than any wind
    curves = {"truth": first.truth, "bicubic": interpolated(first)[:, 0]}
    curves |= {name: result.members[:, 0] for name, result in results.items()}
    return {
        "peak": peak,
        "scores": table,
        "cdfs": cdfs(curves, first.terrain if first.has_terrain else None),
    }


def lines_of(table: dict[str, Any]) -> list[str]:
    """Return the scores of a table as lines of text. ``spread/skill`` and ``fine`` (power of one
    member at wavelengths below the resolution of the coarse grid) are 1 if the members are as
    variable as the truth.
    """
    head = ("PSNR dB", "SSIM", "MAE", "RMSE", "bias", "CRPS", "spread", "sp/skill", "fine")
    keys = ("ssim", "mae", "rmse", "bias", "crps", "spread", "spread_skill", "fine_power_member")
    lines = [f"{'':24}{head[0]:>9}" + "".join(f"{word:>9}" for word in head[1:])]
    for name, row in table["scores"].items():
        numbers = [row.get(key, float("nan")) for key in keys]
        cells = ("-" if number != number else f"{number:.3f}" for number in numbers)
        lines.append(f"{name[-24:]:24}{row['psnr']:>9.2f}" + "".join(f"{s:>9}" for s in cells))
    return lines
