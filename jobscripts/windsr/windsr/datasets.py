"""Converts an xarray Dataset of any model to :class:`windsr.fields.Fields`: decides which variable
is the wind and which the terrain, at which height and on which grid.

Variables are found by common names, then by CF standard names. A dataset that is not understood is
refused with a sentence that lists the expected names. Opens only the file of a separate terrain.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.cell_methods import mean_note, require_no_statistic, statistic_of
from windsr.described import check_description, check_terrain
from windsr.fields import LENGTH_UNITS, SPEED_UNITS, Fields, same_speed, to_si, units_of
from windsr.grids import covered, hole_points, local_metres, regrid, steady
from windsr.moments import TIMES, times_of
from windsr.places import (
    LATITUDES,
    LONGITUDES,
    Places,
    brought_to,
    degrees_of,
    is_in_degrees,
    places_of,
)
from windsr.stored import only_valid

log = logging.getLogger("windsr")


@dataclass(frozen=True)
class Options:
    """Information of the user about a file.

    Args:
        spacing: spacing of the model's grid, m; required if the file's own grid is curved or
            scattered, else the file's.
        height: height of the wind above ground, m.
        units: units of the wind if the file has none, or unknown ones.
        terrain: a NetCDF file with the terrain at the same points, in any order and perhaps of a
            larger area.
        needs_terrain: whether a file without terrain is refused; if not, its terrain is not read.
    """

    spacing: float | None = None
    height: int = 10
    units: str | None = None
    terrain: Path | None = None
    needs_terrain: bool = True


SPEEDS_AT = ("windspeed_{}m", "wind_speed_{}m", "ws{}", "WS{}", "si{}", "wspd{}", "ff{}m",
             "wind_speed_at_{}m", "{}si")  # fmt: skip
"""Names of the wind speed at a height in m."""
COMPONENTS_AT = (
    ("u{}", "v{}"),
    ("U{}", "V{}"),
    ("{}u", "{}v"),
    ("u{}m", "v{}m"),
    ("x_wind_{}m", "y_wind_{}m"),
)
SPEEDS_AT_10_M, COMPONENTS_AT_10_M = ("sfcWind",), (("uas", "vas"),)
"""Names of the wind speed at 10 m (CMIP)."""
SPEEDS = ("wind_speed",)
"""Names that do not contain a height."""
COMPONENTS = (("x_wind", "y_wind"), ("eastward_wind", "northward_wind"), ("u", "v"))
TERRAINS = (
    "terrain",
    "surface_altitude",
    "orog",
    "orography",
    "HSURF",
    "HGT",
    "z",
    "topography",
    "elevation",
    "surface_geopotential",
)
SPEED_STANDARD = "wind_speed"
COMPONENT_STANDARDS = (("x_wind", "y_wind"), ("eastward_wind", "northward_wind"))
TERRAIN_STANDARDS = ("surface_altitude", "surface_geopotential", "geopotential")
GRAVITY = 9.80665
"""m/s²; geopotential is terrain times this."""
TERRAIN_UNITS = LENGTH_UNITS | dict.fromkeys(
    ("m2 s-2", "m**2 s**-2", "m^2 s^-2", "m2/s2", "m2 s**-2"), 1 / GRAVITY
)
HEIGHTS = ("height", "heightaboveground", "height_above_ground", "altitude")
"""Names of coordinates of heights, perhaps with a number after it. Without units they are in m."""
LEVELS = ("level", "levels", "lev", "z", "plev", "pressure", "pressure_level", "isobaric",
          "isobaricinhpa", "isobaricinpa", "hybrid", "model_level", "model_level_number",
          "bottom_top", "sigma", "theta")  # fmt: skip
"""Names of coordinates of levels that may be heights: their units decide."""
VERTICAL_STANDARDS = re.compile(
    "height|altitude|geopotential_height|air_pressure|model_level_number|air_potential_temperature"
    "|atmosphere_.*_coordinate|height_above_.*"
)
"""CF standard names of vertical coordinates."""
EASTWARD = ("x", "lon", "longitude", "rlon", "west_east", "grid_longitude",
            "projection_x_coordinate", "ni", "i", "xc", "easting")  # fmt: skip
NORTHWARD = ("y", "lat", "latitude", "rlat", "south_north", "grid_latitude",
             "projection_y_coordinate", "nj", "j", "yc", "northing")  # fmt: skip
EASTWARD_STANDARDS = ("projection_x_coordinate", "grid_longitude", "longitude")
NORTHWARD_STANDARDS = ("projection_y_coordinate", "grid_latitude", "latitude")


def _first(dataset: Any, names: tuple[str, ...]) -> Any:
    return next((dataset[name] for name in names if name in dataset), None)


def _field_variables(dataset: Any) -> list[Any]:
    """Return the variables of a dataset that may be fields: its data, and auxiliary coordinates of
    two and more dimensions, as which some files have the terrain.
    """
    others = [c for c in dataset.coords.values() if c.ndim >= 2]
    return [*dataset.data_vars.values(), *others]


def _by_standard(dataset: Any, name: str, excluded: Sequence[str]) -> Any:
    """Return the only variable with this CF standard name, or None. ``excluded``: variables to
    ignore.
    """
    matches = [v for v in _field_variables(dataset) if v.attrs.get("standard_name") == name]
    matches = [v for v in matches if not statistic_of(v)]
    return matches[0] if len(matches) == 1 and matches[0].name not in excluded else None


def terrain_of(dataset: Any, name: str) -> Any:
    """The terrain [y, x] of a dataset, or None. What lies on levels is none: a geopotential of a
    pressure is no height of the ground. Raises WindsrError for one that changes.
    """
    fields = {each.name: each for each in _field_variables(dataset)}
    named = [fields[each] for each in TERRAINS if each in fields]
    standard = [_by_standard(dataset, each, ()) for each in TERRAIN_STANDARDS]
    candidates = [each for each in (*named, *standard) if each is not None]
    terrain = next((each for each in candidates if not _is_on_levels(each)), None)
    if terrain is None or terrain.ndim < 2:
        return terrain
    grid = [dim for dim in terrain.dims if _is_horizontal(terrain, str(dim))]
    grid = grid if len(grid) == 2 else list(terrain.dims[-2:])
    terrain = terrain.transpose(..., *grid)
    steady(terrain.to_numpy(), f"{name}: the terrain {terrain.name}")
    return terrain.isel(dict.fromkeys(terrain.dims[:-2], 0), drop=True)


def _is_on_levels(variable: Any) -> bool:
    if any(_vertical_axis(variable, dim) is not None for dim in variable.dims):
        return True
    units = [
        str(c.attrs.get("units", "m")).strip().lower()
        for c in variable.coords.values()
        if not c.dims and _is_vertical(c)
    ]
    return any(each not in LENGTH_UNITS for each in units)


def from_dataset(dataset: Any, name: str, options: Options) -> Fields:
    """Convert an xarray Dataset, of NetCDF or GRIB2, to fields.

    Args:
        dataset: the dataset.
        options: information of the user.
        name: name of the file, for messages.

    Raises:
        WindsrError: the dataset has no wind or terrain under a known name, or ``--spacing`` is
            required.
    """
    wind, units = _speed_of(dataset, name, options)
    terrain = None
    if options.needs_terrain and options.terrain is None:
        terrain = terrain_of(dataset, name)
    if options.terrain is not None:
        terrain = _terrain_file(options.terrain, dataset, wind)
    elif terrain is not None:
        terrain = _own_terrain(terrain, dataset, wind, name)
    if terrain is None and options.needs_terrain:
        raise WindsrError(
            f"{name} has no terrain (looked for {', '.join(TERRAINS)}); give a file that has "
            "with --terrain-file, or train and sample without (--no-terrain)."
        )
    if terrain is not None and not terrain.attrs.get("units"):
        of = f"{terrain.name} {terrain.attrs.get('standard_name', '')}"
        if terrain.name == "z" or "geopotential" in of:
            raise WindsrError(
                f"{name}: the terrain {terrain.name} has no units, and can be a height (m) or a "
                "geopotential (m2 s-2); give it some."
            )
    if terrain is None:
        wind = _rows_and_columns(dataset, wind, name)
    else:
        wind, terrain = _northward_first(wind, terrain, name)
    speed = to_si(wind.to_numpy(), units, SPEED_UNITS, f"{name}: {wind.name or 'wind'}")
    speed = speed.reshape(-1, *speed.shape[-2:])  # runs, members and hours all become fields
    empty = int((~np.isfinite(speed)).all(axis=(1, 2)).sum())
    if 0 < empty < len(speed):
        raise WindsrError(
            f"{name}: {empty} of {len(speed)} fields have no value, as where runs of a forecast "
            "have different hours; leave them out, or give a file for each."
        )
    heights = np.zeros(speed.shape[-2:], np.float32)
    if terrain is not None:
        heights = to_si(
            terrain.squeeze().to_numpy(),
            terrain.attrs.get("units", "m"),
            TERRAIN_UNITS,
            f"{name}: terrain",
        )
        check_terrain(heights, name)
    if heights.shape != speed.shape[-2:]:
        raise WindsrError(
            f"{name}: wind is on a grid of {speed.shape[-2:]} points, the terrain on "
            f"{heights.shape}."
        )
    fields = _located(dataset, wind, speed, heights, name, options)
    return replace(fields, height=float(options.height), has_terrain=terrain is not None)


def _located(
    dataset: Any,
    wind: Any,
    speed: NDArray[np.float32],
    heights: NDArray[np.float32],
    name: str,
    options: Options,
) -> Fields:
    """Fields at the places that the file says. Raises WindsrError where they are not known."""
    times = times_of(dataset, wind, len(speed), name)
    axes = [dataset[dim] if dim in dataset.coords else None for dim in wind.dims[-2:]]
    projected = [
        axis
        for axis in axes
        if axis is not None and axis.attrs.get("units", "").lower() in LENGTH_UNITS
    ]
    if len(projected) == 2:
        y, x = (
            to_si(
                axis.to_numpy(), axis.attrs["units"], LENGTH_UNITS, f"{name}: {axis.name}"
            ).astype(np.float64)
            for axis in projected
        )
        own = [abs(np.diff(axis).mean()) for axis in (y, x) if len(axis) > 1]
        if options.spacing is None or np.allclose(own, options.spacing, rtol=0.01):
            return _upright(speed, heights, times, y, x, name)
        points = np.meshgrid(y, x, indexing="ij")
        return regridded(*points, speed, heights, times, options, name)
    degrees = degrees_of(dataset, wind)
    if degrees is None:
        raise WindsrError(
            f"{name}: neither y and x in m nor latitudes and longitudes; where the points are "
            "cannot be known."
        )
    return regridded(*local_metres(*degrees, name), speed, heights, times, options, name)


def _speed_of(dataset: Any, name: str, options: Options) -> tuple[Any, str | None]:
    """Return the wind speed at the height of the options, and its units. Raises WindsrError."""
    height, is_10_m = options.height, options.height == 10
    stated = tuple(pattern.format(height) for pattern in SPEEDS_AT)
    stated += SPEEDS_AT_10_M if is_10_m else ()
    speed = _first(dataset, (*stated, *SPEEDS))
    others = _at_other_heights(dataset, height)
    speed = _by_standard(dataset, SPEED_STANDARD, others) if speed is None else speed
    if speed is not None:
        require_no_statistic(speed, name)
        units = units_of(speed.attrs.get("units"), options.units, f"{name}: {speed.name}")
        return _at_height(speed, name, options), units
    names = tuple((u.format(height), v.format(height)) for u, v in COMPONENTS_AT)
    names += (*(COMPONENTS_AT_10_M if is_10_m else ()), *COMPONENTS)
    pairs = [((u, v), (_first(dataset, (u,)), _first(dataset, (v,)))) for u, v in names]
    pairs += [
        ((u, v), (_by_standard(dataset, u, others), _by_standard(dataset, v, others)))
        for u, v in COMPONENT_STANDARDS
    ]
    for _, (u, v) in pairs:
        if u is None or v is None:
            continue
        for component in (u, v):
            require_no_statistic(component, name)
        notes = (mean_note(each, name, partial(_is_horizontal, each)) for each in (u, v))
        if note := next(filter(None, notes), ""):
            log.warning("note: %s", note)
        units, other = (
            units_of(c.attrs.get("units"), options.units, f"{name}: {c.name}") for c in (u, v)
        )
        if not same_speed(units, other):
            raise WindsrError(
                f"{name}: {u.name} and {v.name} are in different units ({units}, {other})."
            )
        if u.sizes != v.sizes:
            raise WindsrError(
                f"{name}: {u.name} is of {dict(u.sizes)}, {v.name} of {dict(v.sizes)}; bring both "
                "to the same points first."
            )
        u, v = (_at_height(c, name, options) for c in (u, v))
        mapping = {key: u.attrs[key] for key in ("grid_mapping",) if key in u.attrs}
        wind = np.hypot(u, v).rename(f"{u.name}, {v.name}").assign_attrs(mapping)
        return wind, units
    for both_names, components in pairs:
        present = [c for c in components if c is not None]
        if len(present) == 1:
            absent = both_names[1] if components[1] is None else both_names[0]
            raise WindsrError(
                f"{name} has {present[0].name} and no {absent}: the speed of the wind needs both."
            )
    for variable in dataset.data_vars.values():
        if variable.attrs.get("standard_name") == SPEED_STANDARD:
            require_no_statistic(variable, name)
    if others:
        raise WindsrError(
            f"{name} has no wind at {height} m, but {', '.join(others)}; say which with --height."
        )
    components_text = ", ".join("+".join(pair) for pair in names)
    raise WindsrError(
        f"{name} has no wind speed (looked for {', '.join((*stated, *SPEEDS))}, and the standard "
        f"name {SPEED_STANDARD}) and no components ({components_text})."
    )


def _at_other_heights(dataset: Any, height: int) -> list[str]:
    """Return the variables whose names mean a wind at another height than this one, m."""
    names = (*SPEEDS_AT, *itertools.chain.from_iterable(COMPONENTS_AT))
    patterns = [re.compile(name.format(r"(\d+)"), re.IGNORECASE) for name in names]
    at_10_m = (*SPEEDS_AT_10_M, *itertools.chain.from_iterable(COMPONENTS_AT_10_M))
    heights = {name: {10} for name in at_10_m}
    for variable in map(str, dataset.data_vars):
        matches = filter(None, (pattern.fullmatch(variable) for pattern in patterns))
        heights.setdefault(variable, set()).update(int(match[1]) for match in matches)
    return [str(v) for v in dataset.data_vars if heights[str(v)] and height not in heights[str(v)]]


def _at_height(wind: Any, name: str, options: Options) -> Any:
    """Return one height of a variable that has several. Raises WindsrError if the requested one is
    missing.
    """
    check_description(wind, name, options.height)
    for dim in wind.dims:
        axis = _vertical_axis(wind, dim)
        if axis is None:
            continue
        if axis.name not in wind.coords:
            if wind.sizes[dim] > 1 or not _is_height(str(dim)):
                raise _other_height(
                    wind, name, f"{wind.sizes[dim]} levels ({dim}: without values)", options
                )
            wind = wind.isel({dim: 0}, drop=True)
            continue
        levels = _metres(axis, name)
        same = np.flatnonzero(np.isclose(levels, options.height))
        if len(same) != 1:
            text = (
                f"{wind.sizes[dim]} levels ({axis.name}: "
                f"{', '.join(f'{h:g}' for h in levels[:12])})"
            )
            raise _other_height(wind, name, text, options)
        wind = wind.isel({dim: int(same[0])}, drop=True)
    for key, coordinate in wind.coords.items():
        if not _is_vertical(coordinate) or not all(_is_time(wind, dim) for dim in coordinate.dims):
            continue
        levels = np.atleast_1d(_metres(coordinate, name))
        others = levels[~np.isclose(levels, options.height)]
        if len(others):
            raise _other_height(wind, name, f"{others[0]:g} m ({key})", options)
    return wind


def _vertical_axis(wind: Any, dim: Any) -> Any:
    """Return the vertical coordinate of a dimension: the dimension's own, or another with only this
    dimension; None if the dimension is not vertical (a time, or one of the grid).
    """
    if _is_time(wind, dim) or _is_horizontal(wind, str(dim)):
        return None
    along = [c for c in wind.coords.values() if c.dims == (dim,)]
    along.sort(key=lambda coordinate: bool(coordinate.name != dim))
    axis = next((c for c in along if _is_vertical(c)), None)
    if axis is None and dim not in wind.coords and _is_vertical(wind[dim]):
        return wind[dim]
    return axis


def _is_time(wind: Any, dim: Any) -> bool:
    """Return whether a dimension is one of times or of lead times."""
    return str(dim) in TIMES or wind[dim].dtype.kind in "mM"


def _is_vertical(coordinate: Any) -> bool:
    """Return whether a coordinate is one of heights or levels, by its name or its attributes (CF
    Conventions, 4.3).
    """
    attributes = coordinate.attrs
    return bool(
        _is_height(str(coordinate.name))
        or _without_number(str(coordinate.name)) in LEVELS
        or attributes.get("axis") == "Z"
        or "positive" in attributes
        or VERTICAL_STANDARDS.fullmatch(str(attributes.get("standard_name", "")))
    )


def _is_height(name: str) -> bool:
    return _without_number(name) in HEIGHTS


def _without_number(name: str) -> str:
    return name.lower().rstrip("0123456789_")


def _other_height(wind: Any, name: str, there: str, options: Options) -> WindsrError:
    return WindsrError(
        f"{name}: {wind.name} is on {there}, none of them at {options.height} m; say which with "
        "--height."
    )


def _metres(coordinate: Any, name: str) -> NDArray[np.float64]:
    """Return the values of a coordinate of heights, m. A coordinate with the name of a height and
    without units is in m. Raises WindsrError.
    """
    units = coordinate.attrs.get("units", "m" if _is_height(str(coordinate.name)) else None)
    if units is None or str(units).strip().lower() not in LENGTH_UNITS:
        stated = "have no units" if units is None else f"are in {units!r}"
        raise WindsrError(
            f"{name}: the levels of {coordinate.name} {stated} and are not known to be in m above "
            "ground; wind at a height above ground is needed."
        )
    heights = to_si(coordinate.to_numpy(), units, LENGTH_UNITS, f"{name}: {coordinate.name}")
    return np.asarray(heights, dtype=np.float64)


def _rows_and_columns(dataset: Any, wind: Any, name: str) -> Any:
    """Return the wind [..., y, x] of a file without terrain. Raises WindsrError if it has no
    grid.
    """
    grid = [d for d in wind.dims if _is_horizontal(dataset, str(d))]
    if wind.ndim >= 2 and len(grid) != 2:
        grid = list(wind.dims[-2:])
    if wind.ndim < 2:
        raise WindsrError(
            f"{name}: wind has the dimensions {', '.join(map(str, wind.dims))}; a grid of rows and "
            "columns is needed."
        )
    rows, columns = grid
    order = (columns, rows) if _is_eastward(wind, str(rows)) else (rows, columns)
    return wind.transpose(..., *order)


def _is_horizontal(dataset: Any, dim: str) -> bool:
    """Whether a dimension is one of the two of the grid, by its axis or by the places on it."""
    return _direction(dataset, dim) != "" or dim.lower() in {
        name.lower() for name in (*LATITUDES, *LONGITUDES)
    }


def _is_eastward(variable: Any, dim: str) -> bool:
    return _direction(variable, dim) == "X"


def _direction(dataset: Any, dim: str) -> str:
    """Along which axis a dimension of the grid lies, X or Y, by what its coordinate says (CF
    Conventions, 4), else by its name; empty if neither says.
    """
    attributes = dataset[dim].attrs if dim in dataset.coords else {}
    if attributes.get("axis") in ("X", "Y"):
        return str(attributes["axis"])
    for axis, standards, word in (
        ("X", EASTWARD_STANDARDS, "east"),
        ("Y", NORTHWARD_STANDARDS, "north"),
    ):
        if attributes.get("standard_name") in standards or is_in_degrees(attributes, word):
            return axis
    return "X" if dim.lower() in EASTWARD else "Y" if dim.lower() in NORTHWARD else ""


def _northward_first(wind: Any, terrain: Any, name: str) -> tuple[Any, Any]:
    """Wind [..., y, x] and terrain [y, x], in whichever order the file has their dimensions. Raises
    WindsrError when both are not on one grid.
    """
    terrain = terrain.squeeze()
    if terrain.ndim == 2 and set(terrain.dims) <= set(wind.dims):
        rows, columns = terrain.dims
        order = (columns, rows) if _is_eastward(terrain, str(rows)) else (rows, columns)
        return wind.transpose(..., *order), terrain.transpose(*order)
    if wind.ndim < 2 or terrain.ndim != 2:
        raise WindsrError(
            f"{name}: wind has the dimensions {', '.join(map(str, wind.dims))}, the terrain "
            f"{', '.join(map(str, terrain.dims))}; a grid of rows and columns is needed."
        )
    return wind, terrain


def _terrain_file(path: Path, dataset: Any, wind: Any) -> Any:
    """Return the terrain of a separate file, at the points of the wind. Raises WindsrError."""
    import xarray

    if not path.is_file():
        raise WindsrError(f"There is no terrain file {path}.")
    with xarray.open_dataset(path) as ground:
        terrain = terrain_of(only_valid(ground.load(), str(path)), str(path))
    if terrain is None:
        raise WindsrError(f"{path} has no terrain (looked for {', '.join(TERRAINS)}).")
    terrain = terrain.squeeze()
    if terrain.ndim != 2:
        raise WindsrError(
            f"The terrain of {path} has the dimensions {', '.join(map(str, terrain.dims))}; rows "
            "and columns are needed."
        )
    return _at_wind(terrain, places_of(ground, terrain), dataset, wind, f"The terrain of {path}")


def _own_terrain(terrain: Any, dataset: Any, wind: Any, name: str) -> Any:
    """Return the terrain of the wind's own file, at the points of the wind, if it has other
    dimensions with known places. Raises WindsrError.
    """
    flat = terrain.squeeze()
    if flat.ndim != 2 or wind.ndim < 2 or set(flat.dims) <= set(wind.dims):
        return terrain
    own = places_of(dataset, flat)
    if not own.keys() & places_of(dataset, wind):
        return terrain
    return _at_wind(flat, own, dataset, wind, f"The terrain of {name}")


def _at_wind(terrain: Any, places: Places, dataset: Any, wind: Any, name: str) -> Any:
    import xarray

    if wind.ndim < 2:
        return terrain
    if set(terrain.dims) <= set(wind.dims):
        wind = wind.transpose(..., *terrain.dims)
    values = brought_to(places_of(dataset, wind), places, terrain.to_numpy(), name)
    dims = wind.dims[-2:]
    coordinates = {dim: wind[dim] for dim in dims if dim in wind.coords}
    return xarray.DataArray(values, coordinates, dims, terrain.name, terrain.attrs)


def _upright(
    speed: NDArray[np.float32],
    heights: NDArray[np.float32],
    times: NDArray[np.datetime64],
    y: NDArray[np.float64],
    x: NDArray[np.float64],
    name: str,
) -> Fields:
    """Return the fields with ascending y and x, and without a rim of missing values, as reprojected
    models have. Missing values inside remain and are refused later.
    """
    if len(y) > 1 and y[0] > y[-1]:
        speed, heights, y = speed[:, ::-1], heights[::-1], y[::-1]
    if len(x) > 1 and x[0] > x[-1]:
        speed, heights, x = speed[:, :, ::-1], heights[:, ::-1], x[::-1]
    good = np.isfinite(heights) & np.isfinite(speed).all(axis=0)
    if good.any() and not good.all() and not hole_points(good):
        rows, columns = covered(good)
        if good[rows, columns].all() and good[rows, columns].size >= good.size / 2:
            speed, heights = speed[:, rows, columns], heights[rows, columns]
            y, x = y[rows], x[columns]
            name += f", cut to the {len(y)} × {len(x)} points with values"
    return Fields(
        np.ascontiguousarray(speed), np.ascontiguousarray(heights), times, y, x, name, located=True
    )


def regridded(
    y: NDArray[np.float64],
    x: NDArray[np.float64],
    speed: NDArray[np.float32],
    heights: NDArray[np.float32],
    times: NDArray[np.datetime64],
    options: Options,
    name: str,
) -> Fields:
    if options.spacing is None:
        raise WindsrError(
            f"{name} is not on a regular grid in metres; say the model grid's spacing in m with "
            "--spacing."
        )
    good = np.isfinite(heights) & np.isfinite(speed).all(axis=0)
    if y.ndim == 2 and (holes := hole_points(good)):
        raise WindsrError(f"{name}: {holes} points inside have missing values; fill them first.")
    values = np.concatenate([heights.reshape(1, -1), speed.reshape(len(speed), -1)])
    rows, columns, regular = regrid(y.ravel(), x.ravel(), values, options.spacing)
    return Fields(
        np.ascontiguousarray(regular[1:]),
        regular[0],
        times,
        rows,
        columns,
        f"{name}, regridded to {options.spacing:g} m",
    )
