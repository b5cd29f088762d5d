"""Brings sparse observations into a fine field: the radius of each, a soft mask, the composite, and
spread innovations. Pure functions.

Within an impact radius around an observation the field is drawn to the observed value. The radius
grows pixel by pixel as long as terrain and wind inside it vary little (standard deviations below T1
and T2): a station in a plain has a large radius, one on a ridge a small one. The mask of one
observation is a Gaussian of its radius, cut off there. The composite is x = m ⊙ observed + (1 − m)
⊙ model.

WindSR composes the interpolated coarse field, which is then the condition of the model
(:func:`conditioned`; Ma et al. 2025, eq. 6.4). :func:`assimilate` composes a finished field, which
flattens the model's detail around a station. :func:`spread_innovations` spreads the differences
between stations and model instead of the measured values.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.fields import MAX_SPEED_MS, SPEED_UNITS

MIN_RADIUS, MAX_RADIUS = 1, 6
"""Minimum radius and default of the maximum (the published one), pixels."""
T1_M, T2_MS = 30.0, 0.5
"""Default thresholds: standard deviation of terrain (m) and of wind (m/s) inside the radius."""
log = logging.getLogger("windsr")
SIGMAS_PER_RADIUS = 2.0
"""The radius in standard deviations of the Gaussian: at the rim the mask is exp(−2) = 0.135."""


@dataclass(frozen=True)
class WindObservation:
    """A measured wind speed, m/s, at a pixel of the fine grid."""

    row: int
    column: int
    value: float


@dataclass(frozen=True)
class Thresholds:
    """Limits of the dynamic radius: T1 (m of terrain), T2 (m/s of wind), and the maximum radius in
    pixels; None: the field's diagonal.
    """

    terrain: float = T1_M
    wind: float = T2_MS
    largest: int | None = MAX_RADIUS


def _disk(
    shape: tuple[int, ...], row: int, column: int, radius: float
) -> tuple[tuple[slice, slice], NDArray[np.float64]]:
    """Return (slices, squared distances in pixels inside them) of the square around a pixel that
    contains a disk of ``radius``.
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
    """Return the impact radius around (row, column), 1 pixel or more: Algorithm 1 of WindSR.

    The radius starts at 1 and grows by 1 as long as both standard deviations inside are below T1
    and T2. So it ends one pixel beyond the last disk below the thresholds, or at the maximum.

    Args:
        terrain: [H, W] m.
        wind: [H, W] m/s, the first guess, because the truth is not known.
        row, column: pixel of the station.
        thresholds: limits of the radius; None: the defaults.
    """
    thresholds = thresholds or Thresholds()
    rows, columns = terrain.shape
    largest = thresholds.largest or int(np.ceil(np.hypot(rows, columns)))
    radius = MIN_RADIUS
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
    """Return (mask 0..1, observed values m/s), both of shape ``shape``.

    The mask is the largest of the observations' Gaussians exp(−d²/2σ²) with σ = radius/2: 1 at the
    station, 0 beyond the radius. Where several observations overlap, the value is their mean with
    weights m/(1 − m), so that it equals the observed value at each station (Shepard 1968).

    Args:
        shape: (H, W) of the field.
        observations: the observations.
        radii: radius of each, pixels.

    Raises:
        WindsrError: a pixel is outside of the field, a value is impossible, or a radius is
            negative.
    """
    return _blended(shape, observations, radii, [o.value for o in observations])


def _blended(
    shape: tuple[int, int],
    observations: Sequence[WindObservation],
    radii: Sequence[float],
    station_values: Sequence[float],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the mask, and the mean of ``station_values`` (one per observation) over the
    observations that reach each pixel.
    """
    mask, weights, sums = (np.zeros(shape) for _ in range(3))
    for observation, radius, value in zip(observations, radii, station_values, strict=True):
        _check(observation, shape)
        if radius < 0:
            raise WindsrError(f"An impact radius of {radius:g} pixels cannot be; give 0 or more.")
        where, distance = _disk(shape, observation.row, observation.column, radius)
        own = np.where(
            distance <= radius**2,
            np.exp(-0.5 * distance * (SIGMAS_PER_RADIUS / max(radius, 1.0)) ** 2),
            0.0,
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
    if not 0 <= observation.value <= MAX_SPEED_MS:
        raise WindsrError(
            f"An observed wind of {observation.value:g} m/s cannot be (possible: 0 to "
            f"{MAX_SPEED_MS:g}); are the units m/s?"
        )


def composite(
    model: NDArray[np.floating], mask: NDArray[np.floating], observed: NDArray[np.floating]
) -> NDArray[np.floating]:
    """Return m ⊙ observed + (1 − m) ⊙ model. ``model``: [..., H, W]; the others: [H, W]."""
    return mask * observed + (1 - mask) * model


def radii_of(
    guess: NDArray[np.floating],
    terrain: NDArray[np.floating],
    observations: Sequence[WindObservation],
    radius: float | None,
    thresholds: Thresholds | None,
) -> list[float]:
    """Return the radius of each observation, pixels: ``radius``, or the dynamic one in the field
    ``guess`` [H, W] if that is None.
    """
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
    """Bring observations into one field. Return (composite, mask, radii).

    Args:
        model: [members, H, W] or [H, W] m/s; the radii are computed from the members' mean.
        terrain: [H, W] m.
        observations: the observations of this field.
        radius: radius of all observations, pixels; None: the dynamic one.
        thresholds: limits of the dynamic radius; None: the defaults.
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
    """Spread the differences between observations and one field around the stations: x = model + m
    ⊙ innovation, as in successive corrections (Cressman 1959).

    The model's own detail stays, and no wind becomes negative. Each member has its own innovations.
    For arguments and result see :func:`assimilate`.
    """
    guess = model.mean(axis=0) if model.ndim == 3 else model
    radii = radii_of(guess, terrain, observations, radius, thresholds)
    mask = np.zeros(terrain.shape, np.float32)
    members = []
    for field in model if model.ndim == 3 else model[None]:
        for o in observations:
            _check(o, terrain.shape)
        wrong = [o.value - float(field[o.row, o.column]) for o in observations]
        mask, innovation = _blended(terrain.shape, observations, radii, wrong)
        members.append(np.maximum(field + mask * innovation, 0.0))
    result = np.stack(members) if model.ndim == 3 else members[0]
    return result, mask, radii


def conditioned(
    interpolated: NDArray[np.floating],
    terrain: NDArray[np.floating],
    observations: Mapping[int, Sequence[WindObservation]],
    radius: float | None = None,
    thresholds: Thresholds | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32], list[float]]:
    """Return what a model gets in place of the interpolated coarse fields: (composites, masks,
    radii of all observations).

    Args:
        interpolated: [n, H, W] m/s.
        terrain: [H, W] m.
        observations: number of the field → its observations.
        radius, thresholds: see :func:`assimilate`.
    """
    composites = interpolated.astype(np.float32)
    masks = np.zeros_like(composites)
    radii: list[float] = []
    for field, group in observations.items():
        composites[field], masks[field], own = assimilate(
            interpolated[field], terrain, group, radius, thresholds
        )
        radii += own
    return composites, masks, radii


def read_observations(
    path: Path, times: NDArray[np.datetime64], y: NDArray[np.floating], x: NDArray[np.floating]
) -> dict[int, list[WindObservation]]:
    """Read a table of observations with columns ``time`` (ISO, UTC), ``y``, ``x`` (m, of the fine
    grid) and ``wind_speed`` (m/s, or what a column ``units`` says). Return number of the field →
    observations.

    Raises:
        WindsrError: the table cannot be read, or a line has a time or place outside of the fields;
            the message names it.
    """
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WindsrError(f"The observations {path} cannot be read: {error}") from error
    by_field: dict[int, list[WindObservation]] = {}
    step = abs(float(np.diff(x).mean()))
    places = set[tuple[float, float]]()
    for number, line in enumerate(lines, start=2):
        try:
            when, north, east, value = (
                np.datetime64(line["time"], "s"),
                float(line["y"]),
                float(line["x"]),
                float(line["wind_speed"]) * _speed_factor(line.get("units") or "m/s", path),
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
        places.add((north, east))
        for field in fields.tolist():
            by_field.setdefault(field, []).append(WindObservation(row, column, value))
    if step > 360 and any(each != (0, 0) and _may_be_degrees(*each) for each in places):
        log.warning(
            "note: %s: y and x are metres of the grid, and some look like latitudes and "
            "longitudes: these stations lie within 360 m of the grid's origin.",
            path,
        )
    return by_field


def _may_be_degrees(y: float, x: float) -> bool:
    return abs(y) <= 90 and abs(x) <= 360


@lru_cache(maxsize=64)  # one note for each
def _speed_factor(units: str, path: Path) -> float:
    """Return what a speed in these units is multiplied with for m/s."""
    factor = SPEED_UNITS.get(units.strip().lower())
    if factor is None:
        log.warning(
            "note: %s: the units %r are not known and taken for m/s; known are %s.",
            *(path, units, ", ".join(SPEED_UNITS)),
        )
    return 1.0 if factor is None else factor
