"""Grids: block means, bicubic interpolation, regridding of scattered or curved grids, and tiles
that cover a field. Pure functions on arrays; positions in metres, tiles in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from windsr import WindsrError

EARTH_RADIUS_M = 6_371_229.0
STRETCH = 0.1
"""Share by which distances on the plane of :func:`local_metres` may be too long: 3,900 km from its
middle.
"""


def block_mean(field: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the mean of each block, which is the value of a coarse model's cell: [n, c, H, W] →
    [n, c, H/factor, W/factor].
    """
    return functional.avg_pool2d(field, factor)


def bicubic(low: torch.Tensor, factor: int) -> torch.Tensor:
    """Interpolate: [n, c, h, w] → [n, c, h·factor, w·factor]. Values are those of the centres of
    cells (align_corners false); the kernel is torch's (Keys 1981, a = −0.75).
    """
    return functional.interpolate(low, scale_factor=factor, mode="bicubic", align_corners=False)


def widen(low: torch.Tensor, factor: int) -> torch.Tensor:
    """Repeat each value over its block: [n, c, h, w] → [n, c, h·factor, w·factor]."""
    return low.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)


BACK_PROJECTIONS = 3
"""Number of rounds of interpolating the remaining differences of block means. A fourth changes the
test days' RMSE by less than 0.0002 m/s.
"""


def restore_block_means(fine: torch.Tensor, low: torch.Tensor, factor: int) -> torch.Tensor:
    """Return ``fine`` changed so that its block means are ``low`` and no value is negative: the
    hard constraint of Harder et al. 2023 (JMLR 24, 290).

    The difference is first interpolated (iterative back-projection, Irani and Peleg 1991), which
    leaves no edges between blocks. The rest is then corrected exactly by a constant for each block.
    A block in which that would make a wind negative is multiplied by a factor instead.

    Args:
        fine: [n, c, H, W].
        low: [n, c, h, w], not negative.
    """
    corrected = fine
    for _ in range(BACK_PROJECTIONS):
        corrected = corrected + bicubic(low - block_mean(corrected, factor), factor)
    corrected = corrected + widen(low - block_mean(corrected, factor), factor)
    positive = corrected.clamp_min(0.0)
    mean = block_mean(positive, factor)
    ratio = torch.where(mean > 0, low / mean.clamp_min(1e-12), torch.ones_like(low))
    below = -functional.max_pool2d(-corrected, factor) < 0
    scaled = torch.where(
        widen(mean > 0, factor), positive * widen(ratio, factor), widen(low, factor)
    )
    return torch.where(widen(below, factor), scaled, corrected)


def interpolate(low: torch.Tensor, factor: int, constrained: bool) -> torch.Tensor:
    """Interpolate [n, c, h, w] m/s to [n, c, H, W] m/s: bicubic; if ``constrained``, with restored
    block means.
    """
    upsampled = bicubic(low, factor)
    return restore_block_means(upsampled, low, factor) if constrained else upsampled


def local_metres(
    lat: NDArray[np.floating], lon: NDArray[np.floating], name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(y, x) in m from the middle of the points: the stereographic projection of a sphere around
    it, which keeps angles, for any place and any count of longitudes (Snyder 1987, USGS
    Professional Paper 1395, p. 157).

    Args:
        lat: degrees.
        lon: degrees.
        name: where they are from, for messages.

    Raises:
        WindsrError: when latitudes or longitudes are missing or none, or the points are so far
            apart that distances would be wrong by more than :data:`STRETCH`.
    """
    north, east = (np.radians(np.asarray(each, dtype=np.float64)) for each in (lat, lon))
    if not (np.isfinite(north).all() and np.isfinite(east).all()):
        raise WindsrError(
            f"{name}: latitudes or longitudes are missing at some points; cut these off first."
        )
    if abs(north).max() > np.pi / 2 + 1e-6:
        raise WindsrError(
            f"{name} has latitudes of up to {np.degrees(abs(north).max()):.6g} degrees; are "
            "latitudes and longitudes interchanged, or in other units?"
        )
    vectors = np.stack(
        [np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)], axis=-1
    )
    middle = vectors.reshape(-1, 3).mean(axis=0)
    length = float(np.linalg.norm(middle))
    middle /= max(length, 1e-12)
    away = vectors @ middle
    stretch = 2.0 / (1.0 + min(1.0, float(away.min()))) - 1.0 if length > 0.1 else np.inf
    if stretch > STRETCH:
        raise WindsrError(
            f"{name}: the points are too far apart for one plane: distances on it would be wrong "
            f"by up to {100 * stretch:.0f} % (possible: {100 * STRETCH:.0f} %). Cut a smaller area."
        )
    middle_east = np.arctan2(middle[1], middle[0])
    eastward = np.array([-np.sin(middle_east), np.cos(middle_east), 0.0])
    plane = 2.0 * EARTH_RADIUS_M * vectors / (1.0 + away)[..., None]
    return plane @ np.cross(middle, eastward), plane @ eastward


def regrid(
    y: NDArray[np.floating], x: NDArray[np.floating], values: NDArray[np.floating], spacing: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float32]]:
    """Interpolate values [k, points] at scattered points to the largest regular grid within them.
    Return (y, x, [k, len(y), len(x)]).

    The interpolation is linear in triangles of the points (scipy's LinearNDInterpolator). Rows and
    columns at the rim that are not completely covered are removed.

    Raises:
        WindsrError: when no grid of at least 2×2 fits, or values are missing inside.
    """
    from scipy.interpolate import LinearNDInterpolator

    interpolate = LinearNDInterpolator(np.column_stack([y.ravel(), x.ravel()]), values.T)
    rows = np.arange(np.ceil(y.min() / spacing), np.floor(y.max() / spacing) + 1) * spacing
    columns = np.arange(np.ceil(x.min() / spacing), np.floor(x.max() / spacing) + 1) * spacing
    if len(rows) < 2 or len(columns) < 2:
        raise WindsrError(
            f"A grid of {spacing:g} m does not fit into {np.ptp(y):.0f} × {np.ptp(x):.0f} m; "
            "give a smaller --spacing."
        )
    interpolated = interpolate(*np.meshgrid(rows, columns, indexing="ij"))
    good = np.isfinite(interpolated).all(axis=-1)
    if holes := hole_points(good):
        raise WindsrError(
            f"{holes} points of the regular grid lie in a hole of the field, where values are "
            "missing; fill it or cut the field first."
        )
    row_range, column_range = covered(good)
    if not good[row_range, column_range].all() or min(good[row_range, column_range].shape) < 2:
        raise WindsrError(
            "The points cover no rectangle; the grid of this file is too scattered to regrid."
        )
    gridded = np.moveaxis(interpolated[row_range, column_range], -1, 0)
    return rows[row_range], columns[column_range], gridded.astype(np.float32)


def steady(terrain: NDArray[Any], what: str) -> NDArray[Any]:
    """The first [y, x] of a terrain by time, or by anything else. Raises WindsrError if the others
    differ.
    """
    every = terrain.reshape(-1, *terrain.shape[-2:])
    change = float(np.nanmax(abs(every - every[:1]), initial=0.0, where=np.isfinite(every)))
    if change > 1.0 + 1e-3 * float(np.nanmax(abs(every), initial=0.0, where=np.isfinite(every))):
        raise WindsrError(
            f"{what} changes by up to {change:g} from field to field; fields over one ground are "
            "needed (a nest that moves has another at each time)."
        )
    first: NDArray[Any] = every[0]
    return first


def hole_points(good: NDArray[np.bool_]) -> int:
    """The number of points that are not ``good`` and not joined to the rim by such points."""
    from scipy.ndimage import label

    numbers, _ = label(~good)
    at_rim = np.unique(np.concatenate([numbers[0], numbers[-1], numbers[:, 0], numbers[:, -1]]))
    return int((~np.isin(numbers, at_rim) & ~good).sum())


def covered(good: NDArray[np.bool_]) -> tuple[slice, slice]:
    """Return (rows, columns) of a rectangle in which all points are ``good``: remove the worst side
    until that is true, down to a single row or column.
    """
    y0, y1, x0, x1 = 0, good.shape[0], 0, good.shape[1]
    while y1 - y0 > 1 and x1 - x0 > 1 and not good[y0:y1, x0:x1].all():
        rim = {
            "top": good[y0, x0:x1].mean(), "bottom": good[y1 - 1, x0:x1].mean(),
            "left": good[y0:y1, x0].mean(), "right": good[y0:y1, x1 - 1].mean(),
        }  # fmt: skip
        worst = min(rim, key=lambda side: rim[side])
        y0, y1 = y0 + (worst == "top"), y1 - (worst == "bottom")
        x0, x1 = x0 + (worst == "left"), x1 - (worst == "right")
    return slice(y0, y1), slice(x0, x1)


@dataclass(frozen=True)
class Tile:
    """A square of a field: its first row and column, and its size, in pixels."""

    row: int
    column: int
    size: int

    @property
    def slices(self) -> tuple[slice, slice]:
        """Its (rows, columns) of the field."""
        return slice(self.row, self.row + self.size), slice(self.column, self.column + self.size)


def tiles(rows: int, columns: int, size: int, factor: int, overlap: int = 0) -> list[Tile]:
    """Return tiles that cover a field of ``rows`` × ``columns``. Each begins at a multiple of
    ``factor``, and neighbours share at least ``overlap``. An incomplete coarse cell at the far rim
    is not covered.

    Raises:
        WindsrError: a tile does not fit into the field, or the overlap into a tile.
    """
    if not 0 <= overlap < size or overlap % factor:
        raise WindsrError(
            f"An overlap of {overlap} pixels does not fit tiles of {size}: give a multiple "
            f"of {factor} below that."
        )
    if min(rows, columns) < size:
        raise WindsrError(
            f"The field has {rows} × {columns} points; the model needs {size} × {size} at least."
        )

    def starts(length: int) -> list[int]:
        last = (length - size) // factor * factor
        return sorted({*range(0, last, size - overlap), last})

    return [Tile(r, c, size) for r in starts(rows) for c in starts(columns)]


def blend_weight(
    size: int,
    overlap: int,
    halo: int = 0,
    rim: tuple[bool, bool, bool, bool] = (False, False, False, False),
) -> NDArray[np.float64]:
    """Return the weight of a tile's pixels where tiles overlap, [size, size]. It falls linearly
    towards the tile's rim.

    Args:
        size: pixels per side of a tile.
        overlap: pixels that neighbours share; more than twice the halo.
        halo: number of pixels at the tile's rim with weight 0, because the network saw too little
            around them; the neighbour has them further inside. Does not apply at the rim of the
            field.
        rim: whether each side (top, bottom, left, right) is at the rim of the field.
    """

    def edge(first: bool, last: bool) -> NDArray[np.float64]:
        rising = np.clip((np.arange(size) + 1.0 - halo) / (overlap - 2 * halo + 1), 0.0, 1.0)
        return (np.ones(size) if first else rising) * (np.ones(size) if last else rising[::-1])

    return np.outer(edge(*rim[:2]), edge(*rim[2:]))
