"""Matches the values of one file to the points of another by their places.

Two files may have one grid in another order (north to south, south to north), or one may contain a
part of the other. Values are matched by their coordinates, never by their position in an array.
Opens no file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.fields import LENGTH_UNITS, to_si
from windsr.grids import EARTH_RADIUS_M

MAX_OFFSET_SHARE = 0.25
"""Maximum distance of two equal points, as a share of the grid's spacing: coordinates are often
rounded.
"""
MAX_ROUNDING_M = 1600.0
"""Maximum distance of two equal points whose latitudes and longitudes are rounded to 0.01 degrees
in both files: 0.01 degrees in each direction.
"""
MIN_SPACING_SHARE = 0.6
"""Minimum spacing of the points that are matched, as a share of that of the others: rounded places
of one grid have more, those of a grid with twice as many points less. Of several points in a cell
the nearest would be one value of many, and not that of the cell.
"""
MAX_THINNED_OFFSET_SHARE = 0.1
"""Maximum distance of points that are some of the points of a finer grid from those, as a share of
the finer grid's spacing.
"""
log = logging.getLogger("windsr")
RADIANS = ("radian", "radians", "rad")
"""Units of latitudes and longitudes, besides degrees."""
MAX_RADIANS = (np.pi / 2 + 1e-6, 2 * np.pi + 1e-6)
"""Maximum latitude and longitude in radians, with room for single precision."""
LATITUDES, LONGITUDES = ("latitude", "lat", "XLAT"), ("longitude", "lon", "XLONG")
Places = dict[str, NDArray[np.float64]]
"""The places of points. ``projected``: [rows, columns, 2] m; ``geographic``: [rows, columns, 3] m
from the Earth's centre. Unknown ones are missing.
"""


def places_of(dataset: Any, variable: Any) -> Places:
    """Return the places of the points of a variable of an xarray Dataset. Its last two dimensions
    are rows and columns.
    """
    rows, columns = variable.dims[-2:]
    places: Places = {}
    axes = [dataset[dim] if dim in dataset.coords else None for dim in (rows, columns)]
    metres = [
        to_si(axis.to_numpy(), axis.attrs["units"], LENGTH_UNITS, str(axis.name)).astype(np.float64)
        for axis in axes
        if axis is not None and axis.attrs.get("units", "").lower() in LENGTH_UNITS
    ]
    if len(metres) == 2:
        places["projected"] = np.stack(np.meshgrid(*metres, indexing="ij"), axis=-1)
    degrees = degrees_of(dataset, variable)
    if degrees is not None:
        north, east = (np.radians(each) for each in degrees)
        vector = [np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)]
        places["geographic"] = EARTH_RADIUS_M * np.stack(vector, axis=-1)
    return places


def degrees_of(
    dataset: Any, variable: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return latitudes and longitudes [rows, columns] of a variable, or None if they are not known.
    Those of a rotated pole are computed if the file has only the axes of the rotated grid (CF
    Conventions, appendix F, ``rotated_latitude_longitude``).

    Raises:
        WindsrError: the place of the rotated pole is missing.
    """
    lat = _stated(dataset, variable, "north", LATITUDES)
    lon = _stated(dataset, variable, "east", LONGITUDES)
    if lat is None or lon is None:
        return _rotated(dataset, variable)
    is_possible = all(
        not is_in_radians or not (np.abs(values) > greatest).any()
        for (values, is_in_radians), greatest in zip((lat, lon), MAX_RADIANS, strict=True)
    )
    if not is_possible:
        log.warning(
            "note: latitudes and longitudes of %s are taken to be in degrees: some are too great "
            "for radians, which are their units by the file.",
            variable.name,
        )
    north, east = (
        np.degrees(values) if is_in_radians and is_possible else values
        for values, is_in_radians in (lat, lon)
    )
    return north, east


def _rotated(dataset: Any, variable: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    mapping = dataset.get(variable.attrs.get("grid_mapping", "rotated_pole"))
    rows, columns = variable.dims[-2:]
    axes = [dataset[dim] for dim in (rows, columns) if dim in dataset.coords]
    by_name = {axis.attrs.get("standard_name"): axis for axis in axes}
    if mapping is None or set(by_name) != {"grid_latitude", "grid_longitude"}:
        return None
    if mapping.attrs.get("grid_mapping_name") != "rotated_latitude_longitude":
        return None
    pole = ("grid_north_pole_latitude", "grid_north_pole_longitude")
    absent = [name for name in pole if name not in mapping.attrs]
    if absent:
        raise WindsrError(
            f"{variable.name} is on the grid of a rotated pole, and {mapping.name} lacks "
            f"{' and '.join(absent)}, so that its places are not known."
        )
    like = variable.isel(dict.fromkeys(variable.dims[:-2], 0), drop=True)
    grid = [
        np.radians(
            by_name[name].broadcast_like(like).transpose(rows, columns).to_numpy().astype(float)
        )
        for name in ("grid_latitude", "grid_longitude")
    ]
    pole_north, pole_east = (float(mapping.attrs[name]) for name in pole)
    turn = np.radians(float(mapping.attrs.get("north_pole_grid_longitude", 0.0)))
    return unrotated(grid[0], grid[1] - turn, np.radians(pole_north), pole_east)


def unrotated(
    north: NDArray[np.float64], east: NDArray[np.float64], pole_north: float, pole_east: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return latitudes and longitudes, degrees, of points of a grid with a rotated pole.

    Args:
        north: latitudes in the rotated grid, radians.
        east: longitudes in the rotated grid, radians.
        pole_north: latitude of the rotated grid's north pole, radians.
        pole_east: its longitude, degrees.
    """
    sine = np.sin(pole_north) * np.sin(north) + np.cos(pole_north) * np.cos(north) * np.cos(east)
    across = -np.cos(north) * np.sin(east)
    along = np.cos(pole_north) * np.sin(north) - np.sin(pole_north) * np.cos(north) * np.cos(east)
    lon = pole_east + np.degrees(np.arctan2(across, along))
    return np.degrees(np.arcsin(np.clip(sine, -1.0, 1.0))), (lon + 180.0) % 360.0 - 180.0


def _stated(
    dataset: Any, variable: Any, direction: str, names: tuple[str, ...]
) -> tuple[NDArray[np.float64], bool] | None:
    """Return latitudes or longitudes of a variable as they are in the file, [rows, columns], and
    whether their units are radians; None if they are not known.
    """
    rows, columns = variable.dims[-2:]
    own = [c for c in variable.coords.values() if is_in_degrees(c.attrs, direction)]
    others = [dataset[name] for name in names if name in dataset]
    for candidate in (*own, *others):
        degrees = candidate.squeeze()
        if degrees.ndim not in (1, 2) or not set(degrees.dims) <= {rows, columns}:
            continue
        like = variable.isel(dict.fromkeys(variable.dims[:-2], 0), drop=True)
        values = np.asarray(
            degrees.broadcast_like(like).transpose(rows, columns).to_numpy(), dtype=np.float64
        )
        return values, str(candidate.attrs.get("units", "")).strip().lower() in RADIANS
    return None


def is_in_degrees(attributes: Mapping[str, Any], direction: str) -> bool:
    """Whether the coordinate with these attributes is a latitude (``north``) or longitude
    (``east``) by its units (CF Conventions, 4.1 and 4.2). Those of a rotated pole are in
    ``degrees``.
    """
    units = str(attributes.get("units", "")).lower().replace("_", "")
    return units in {f"degree{s}{word}" for s in ("", "s") for word in (direction, direction[0])}


def spacing_of(places: NDArray[np.float64]) -> float:
    """Return the distance of neighbours, m; infinity for a single point."""
    steps = [
        float(np.median(np.linalg.norm(np.diff(places, axis=axis), axis=-1)))
        for axis in (0, 1)
        if places.shape[axis] > 1
    ]
    return min(steps, default=float("inf"))


def _nearest(
    sources: NDArray[np.float64], targets: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the distance of each target from the nearest source, m, and the number of that."""
    from scipy.spatial import cKDTree

    distances, indices = cKDTree(sources.reshape(-1, sources.shape[-1])).query(
        targets.reshape(-1, targets.shape[-1])
    )
    return distances, indices


def _same_but_for_rounding(
    wind: Places, ground: Places
) -> tuple[NDArray[np.float64], NDArray[np.intp]] | None:
    """Return the distance of each point of ``wind`` from the nearest one of ``ground``, m, and the
    number of that, by their metres, if latitudes and longitudes differ by no more than their
    rounding, which has no direction; else None.
    """
    targets = wind["projected"]
    limit = MAX_OFFSET_SHARE * spacing_of(targets)
    distances, indices = _nearest(ground["projected"], targets)
    offsets = ground["geographic"].reshape(-1, 3)[indices] - wind["geographic"].reshape(-1, 3)
    is_same = (
        distances.max() <= limit
        and np.linalg.norm(offsets, axis=-1).max() <= MAX_ROUNDING_M
        and np.linalg.norm(offsets.mean(axis=0)) <= limit
    )
    return (distances, indices) if is_same else None


def brought_to(wind: Places, ground: Places, values: NDArray[Any], name: str) -> NDArray[Any]:
    """Return ``values``, which are at the places ``ground``, at the places ``wind``.

    Args:
        wind: places of the result.
        ground: places of ``values``.
        values: [rows, columns].
        name: name of the values, for messages.

    Raises:
        WindsrError: the places are not known, or differ.
    """
    # Metres of two projections, or from two corners, may be the same numbers at other places.
    kind = next((kind for kind in ("geographic", "projected") if kind in wind.keys() & ground), "")
    if not kind:
        raise WindsrError(
            f"{name} does not say where its points are as the wind does (both need y and x in m, "
            "or latitudes and longitudes), so that heights and winds cannot be brought together."
        )
    targets = wind[kind]
    distances, indices = _nearest(ground[kind], targets)
    is_same = distances.max() <= MAX_OFFSET_SHARE * spacing_of(targets)
    if not is_same and kind == "geographic" and "projected" in wind.keys() & ground:
        by_metres = _same_but_for_rounding(wind, ground)
        if by_metres is not None:
            is_same, kind, (distances, indices) = True, "projected", by_metres
    if not is_same:
        raise WindsrError(
            f"{name} has other points than the wind: up to {distances.max() / 1000:.3g} km from "
            f"the nearest one, on a grid of {spacing_of(targets) / 1000:.3g} km. Bring it to the "
            "points of the wind first (cdo remapbil, or xarray's interp_like)."
        )
    _require_no_finer(wind[kind], ground[kind], distances, indices, name)
    result: NDArray[Any] = np.asarray(values).reshape(-1)[indices].reshape(targets.shape[:2])
    return result


def _require_no_finer(
    targets: NDArray[np.float64],
    sources: NDArray[np.float64],
    distances: NDArray[np.float64],
    indices: NDArray[np.intp],
    name: str,
) -> None:
    """Raise WindsrError if the values are those of a finer grid than the wind's. The wind may have
    some of the points of that grid, as if every second one was taken: a note says so.

    Args:
        targets: places of the wind.
        sources: places of the values.
        distances: distance of each target from its source, m.
        indices: numbers of the sources of the targets.
        name: name of the values, for messages.
    """
    rows, columns = np.unravel_index(indices, sources.shape[:2])
    around = sources[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    spacing = spacing_of(around)
    if spacing >= MIN_SPACING_SHARE * spacing_of(targets):
        return
    sentence = (
        f"{name} has a point every {spacing / 1000:.3g} km, and the wind one every "
        f"{spacing_of(targets) / 1000:.3g} km."
    )
    how = "(cdo remapcon, or xarray's coarsen)"
    if distances.max() > MAX_THINNED_OFFSET_SHARE * spacing:
        raise WindsrError(f"{sentence} Average it over the cells of the wind first {how}.")
    log.warning(
        "note: %s The wind has the height of the terrain at each of its points. If it is that of "
        "cells, average the terrain over them first %s.",
        sentence,
        how,
    )
