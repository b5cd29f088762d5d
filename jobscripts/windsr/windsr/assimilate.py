"""Sparse observations brought into a fine field: how far each reaches, a soft mask, the composite,
and innovations spread. Pure functions.

Around an observation the field is drawn to the observed value within an impact radius. The radius
grows pixel by pixel as long as terrain and wind inside it vary little (standard deviations below T1
and T2): in a plain a station speaks for far, on a ridge for itself. The mask of one observation is
a Gaussian of its radius, cut off there; the composite is x = m ⊙ observed + (1 − m) ⊙ model.

WindSR's composite is of the interpolated coarse field, and the model sees it as its condition
(:func:`conditioned`; Ma et al. 2025, eq. 6.4). The same composite of a finished field
(:func:`assimilate`) flattens what the model made around a station. :func:`spread_innovations`
spreads what a station finds wrong instead of what it measured.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.fields import FASTEST

SMALLEST, LARGEST = 1, 6
"""Pixels; the second is the published cap, a default."""
T1_M, T2_MS = 30.0, 0.5
"""Default thresholds: standard deviation of terrain (m) and of wind (m/s) inside the radius."""
SIGMAS = 2.0
"""The radius in standard deviations of the Gaussian: at the rim the mask has fallen to exp(−2) =
0.135.
"""


@dataclass(frozen=True)
class WindObservation:
    """A measured wind speed, m/s, at a pixel of the fine grid."""

    row: int
    column: int
    value: float


@dataclass(frozen=True)
class Thresholds:
    """T1 (m of terrain), T2 (m/s of wind), and the pixels that no radius exceeds; None: the
    field's diagonal.
    """

    terrain: float = T1_M
    wind: float = T2_MS
    largest: int | None = LARGEST


def _disk(
    shape: tuple[int, ...], row: int, column: int, radius: float
) -> tuple[tuple[slice, slice], NDArray[np.float64]]:
    """(slices, squared distance in pixels inside them) of the square around a pixel that holds a
    disk of ``radius``.
    """
    reach = int(np.floor(radius))
    rows = slice(max(row - reach, 0), min(row + reach + 1, shape[0]))
    columns = slice(max(column - reach, 0), min(column + reach + 1, shape[1]))
    dy = np.arange(rows.start, rows.stop) - row
    dx = np.arange(columns.start, columns.stop) - column
    return (rows, columns), (dy[:, None] ** 2 + dx[None] ** 2).astype(np.float64)


def impact_radius(
    terrain: NDArray[np.floating],
    wind: NDArray[np.floating],
    row: int,
    column: int,
    thresholds: Thresholds | None = None,
) -> int:
    """Pixels, 1 or more, around (row, column): Algorithm 1 of WindSR. From a radius of 1 on, as
    long as both standard deviations inside are below T1 and T2, the radius grows by 1; so it ends
    one pixel beyond the last disk that was even, or at the cap.

    Args:
        terrain: [H, W] m; ``wind``: [H, W] m/s, the first guess, as the truth is not known.
    """
    thresholds = thresholds or Thresholds()
    rows, columns = terrain.shape
    largest = thresholds.largest or int(np.ceil(np.hypot(rows, columns)))
    radius = SMALLEST
    while radius < largest:
        where, distance = _disk(terrain.shape, row, column, radius)
        inside = distance <= radius**2
        if (
            terrain[where][inside].std() >= thresholds.terrain
            or wind[where][inside].std() >= thresholds.wind
        ):
            break
        radius += 1
    return radius


def soft_mask(
    shape: tuple[int, int], observations: Sequence[WindObservation], radii: Sequence[float]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(mask 0..1, observed values m/s), both ``shape``.

    The mask is the largest of the observations' Gaussians exp(−d²/2σ²) with σ = radius/2, 0 beyond
    the radius, 1 at the station. Where several reach, the value is their mean with weights m/(1 −
    m), so that each station keeps its own (Shepard 1968).

    Raises:
        WindsrError: for a pixel outside, a value that cannot be, or a radius below 0.
    """
    return _blended(shape, observations, radii, [o.value for o in observations])


def _blended(
    shape: tuple[int, int],
    observations: Sequence[WindObservation],
    radii: Sequence[float],
    say: Sequence[float],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The mask, and at each pixel the mean of what the stations that reach it ``say``."""
    mask, weights, sums = (np.zeros(shape) for _ in range(3))
    for observation, radius, value in zip(observations, radii, say, strict=True):
        _check(observation, shape)
        if radius < 0:
            raise WindsrError(f"An impact radius of {radius:g} pixels cannot be; give 0 or more.")
        where, distance = _disk(shape, observation.row, observation.column, radius)
        own = np.where(
            distance <= radius**2, np.exp(-0.5 * distance * (SIGMAS / max(radius, 1.0)) ** 2), 0.0
        )
        share = own / (1 - own + 1e-9)
        mask[where] = np.maximum(mask[where], own)
        weights[where] += share
        sums[where] += share * value
    values = np.divide(sums, weights, out=np.zeros(shape), where=weights > 0)
    return mask.astype(np.float32), values.astype(np.float32)


def _check(observation: WindObservation, shape: tuple[int, ...]) -> None:
    if not (0 <= observation.row < shape[0] and 0 <= observation.column < shape[1]):
        raise WindsrError(
            f"An observation at pixel ({observation.row}, {observation.column}) is outside "
            f"of {shape[0]} × {shape[1]}."
        )
    if not 0 <= observation.value <= FASTEST:
        raise WindsrError(
            f"An observed wind of {observation.value:g} m/s cannot be (possible: 0 to "
            f"{FASTEST:g}); are the units m/s?"
        )


def composite(
    model: NDArray[np.floating], mask: NDArray[np.floating], observed: NDArray[np.floating]
) -> NDArray[np.floating]:
    """m ⊙ observed + (1 − m) ⊙ model; ``model`` [..., H, W], the others [H, W]."""
    return mask * observed + (1 - mask) * model


def radii_of(
    guess: NDArray[np.floating],
    terrain: NDArray[np.floating],
    observations: Sequence[WindObservation],
    radius: float | None,
    thresholds: Thresholds | None,
) -> list[float]:
    """Pixels for each observation: ``radius``, or, None, the dynamic one in ``guess`` [H, W]."""
    return [
        float(
            radius
            if radius is not None
            else impact_radius(terrain, guess, o.row, o.column, thresholds)
        )
        for o in observations
    ]


def assimilate(
    model: NDArray[np.floating],
    terrain: NDArray[np.floating],
    observations: Sequence[WindObservation],
    radius: float | None = None,
    thresholds: Thresholds | None = None,
) -> tuple[NDArray[np.floating], NDArray[np.float32], list[float]]:
    """One field with its observations: (composite, mask, radii).

    Args:
        model: [members, H, W] or [H, W] m/s; the radii come from the members' mean.
        radius: pixels, the same for all; None for the dynamic one.
    """
    guess = model.mean(axis=0) if model.ndim == 3 else model
    radii = radii_of(guess, terrain, observations, radius, thresholds)
    mask, observed = soft_mask(terrain.shape, observations, radii)
    return composite(model, mask, observed), mask, radii


def spread_innovations(
    model: NDArray[np.floating],
    terrain: NDArray[np.floating],
    observations: Sequence[WindObservation],
    radius: float | None = None,
    thresholds: Thresholds | None = None,
) -> tuple[NDArray[np.floating], NDArray[np.float32], list[float]]:
    """One field with what its observations find wrong spread around them: x = model + m ⊙
    innovation, as successive corrections do (Cressman 1959). The model's own detail stays; nothing
    becomes negative. Arguments and result as :func:`assimilate`; each member has its own
    innovations.
    """
    guess = model.mean(axis=0) if model.ndim == 3 else model
    radii = radii_of(guess, terrain, observations, radius, thresholds)
    mask = np.zeros(terrain.shape, np.float32)
    made = []
    for field in model if model.ndim == 3 else model[None]:
        for o in observations:
            _check(o, terrain.shape)
        wrong = [o.value - float(field[o.row, o.column]) for o in observations]
        mask, innovation = _blended(terrain.shape, observations, radii, wrong)
        made.append(np.maximum(field + mask * innovation, 0.0))
    result = np.stack(made) if model.ndim == 3 else made[0]
    return result, mask, radii


def conditioned(
    interpolated: NDArray[np.floating],
    terrain: NDArray[np.floating],
    observations: Mapping[int, Sequence[WindObservation]],
    radius: float | None = None,
    thresholds: Thresholds | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32], list[float]]:
    """What a model sees instead of the interpolated coarse fields [n, H, W]: their composites with
    the observations of each field, by number. (composites, masks, radii of all).
    """
    made = interpolated.astype(np.float32)
    masks = np.zeros_like(made)
    radii: list[float] = []
    for field, group in observations.items():
        made[field], masks[field], own = assimilate(
            interpolated[field], terrain, group, radius, thresholds
        )
        radii += own
    return made, masks, radii


def read_observations(
    path: Path, times: NDArray[np.datetime64], y: NDArray[np.floating], x: NDArray[np.floating]
) -> dict[int, list[WindObservation]]:
    """Observations by number of the field, from a table with columns ``time`` (ISO, UTC), ``y``,
    ``x`` (m, of the fine grid) and ``wind_speed`` (m/s).

    Raises:
        WindsrError: when the table cannot be read, or a line is at no time or place of the fields;
            the message says which.
    """
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WindsrError(f"The observations {path} cannot be read: {error}") from error
    by_field: dict[int, list[WindObservation]] = {}
    step = abs(float(np.diff(x).mean()))
    for number, line in enumerate(lines, start=2):
        try:
            when, north, east, value = (
                np.datetime64(line["time"], "s"),
                float(line["y"]),
                float(line["x"]),
                float(line["wind_speed"]),
            )
        except (KeyError, TypeError, ValueError):
            raise WindsrError(
                f"{path}, line {number}: columns time, y, x, wind_speed are needed; it says {line}."
            ) from None
        fields = np.flatnonzero(times == when)
        if not len(fields):
            raise WindsrError(
                f"{path}, line {number}: there is no field at {when}; they are from "
                f"{times.min()} to {times.max()}."
            )
        row, column = int(np.abs(y - north).argmin()), int(np.abs(x - east).argmin())
        reach = step / 2 + 1e-6
        if not (abs(y[row] - north) <= reach and abs(x[column] - east) <= reach):  # NaN, too
            raise WindsrError(
                f"{path}, line {number}: ({north:g}, {east:g}) m is outside of the grid."
            )
        for field in fields.tolist():
            by_field.setdefault(field, []).append(WindObservation(row, column, value))
    return by_field
