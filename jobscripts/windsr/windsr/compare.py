"""Files of samples beside each other: scores and distributions against the truth in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from windsr import WindsrError, output
from windsr.evaluate import cdfs, scores
from windsr.grids import bicubic


def named(samples: Sequence[Path]) -> dict[str, Any]:
    """Results by name: that of the file, or of its folder where the file is samples.nc."""
    return {
        (path.parent.name if path.name == "samples.nc" else path.stem): output.read(path)
        for path in samples
    }


def _with_truth(samples: Sequence[Path]) -> dict[str, Any]:
    found = named(samples)
    if len(found) < len(samples):
        raise WindsrError(
            "Two of the files have the same name; rename one, so that they can be told apart."
        )
    unknown = [name for name, result in found.items() if result.truth is None]
    if unknown:
        raise WindsrError(
            f"{', '.join(unknown)} holds no truth to compare with: it was made from coarse fields."
        )
    return found


def interpolated(result: Any) -> Any:
    """What bicubic interpolation makes of the coarse fields of a result."""
    factor = len(result.y) // result.low.shape[1]
    return bicubic(torch.from_numpy(result.low[:, None]), factor).clamp_min(0).numpy()


def table_of(samples: Sequence[Path]) -> dict[str, Any]:
    """Scores and distributions of files of samples, with bicubic interpolation beside them. Raises
    WindsrError where one has no truth.
    """
    found = _with_truth(samples)
    first = next(iter(found.values()))
    peak = float(first.truth.max())
    table = {"bicubic": scores(first.truth, interpolated(first), peak)}
    table |= {name: scores(result.truth, result.members, peak) for name, result in found.items()}
    # A member, not the mean: the mean of an ensemble is smoother than any wind.
    curves = {"truth": first.truth, "bicubic": interpolated(first)[:, 0]}
    curves |= {
        name: r.members[:, 0] for name, r in found.items() if r.members.shape[0] == len(first.truth)
    }
    return {"peak": peak, "scores": table, "cdfs": cdfs(curves, first.terrain)}
