"""An xarray Dataset of any model as :class:`windsr.fields.Fields`: which variable is the wind,
which the terrain, at which height, on which grid.

Variables are found by common names, then by CF standard names. What is not understood is refused
with a sentence that says what was looked for. It opens no data file but a terrain's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.fields import LENGTH_UNITS, SPEED_UNITS, Fields, to_si
from windsr.grids import covered, local_metres, regrid
from windsr.places import LATITUDES, LONGITUDES, Places, brought_to, places_of


@dataclass(frozen=True)
class Options:
    """What the user may say about a file.

    Args:
        spacing: m of the model's grid; needed where the file's own grid is curved or scattered,
            else the file's.
        height: m above ground of the wind, in names such as ``windspeed_100m``.
        units: of wind where the file says none.
        terrain: a NetCDF file with the terrain at the same points, in any order and perhaps of a
            larger area.
    """

    spacing: float | None = None
    height: int = 10
    units: str | None = None
    terrain: Path | None = None


SPEEDS = ("wind_speed", "ws10", "si10", "wspd10", "windspeed_10m", "wind_speed_10m", "sfcWind",
          "ff10m", "wind_speed_at_10m", "10si")  # fmt: skip
COMPONENTS = (
    ("u10", "v10"),
    ("U10", "V10"),
    ("uas", "vas"),
    ("10u", "10v"),
    ("u10m", "v10m"),
    ("x_wind_10m", "y_wind_10m"),
    ("x_wind", "y_wind"),
    ("eastward_wind", "northward_wind"),
)
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
HEIGHTS = ("height", "heightaboveground", "height_above_ground", "altitude", "level", "lev", "z")
"""What a dimension of heights is called, perhaps with a number after it."""
EASTWARD = ("x", "lon", "longitude", "west_east", "grid_longitude", "projection_x_coordinate", "ni")


def _first(dataset: Any, names: tuple[str, ...]) -> Any:
    return next((dataset[name] for name in names if name in dataset), None)


def _by_standard(dataset: Any, name: str) -> Any:
    """The one variable with this CF standard name, or None."""
    matches = [v for v in dataset.data_vars.values() if v.attrs.get("standard_name") == name]
    return matches[0] if len(matches) == 1 else None


def terrain_of(dataset: Any) -> Any:
    """The terrain [y, x] of a dataset, or None. Of one by time or level, the first."""
    terrain = _first(dataset, TERRAINS)
    for name in TERRAIN_STANDARDS:
        terrain = _by_standard(dataset, name) if terrain is None else terrain
    if terrain is None or terrain.ndim <= 2:
        return terrain
    return terrain.isel(dict.fromkeys(terrain.dims[:-2], 0), drop=True)


def from_dataset(dataset: Any, name: str, options: Options) -> Fields:
    """An xarray Dataset as fields; what NetCDF and GRIB2 have in common.

    Raises:
        WindsrError: when it has no wind or no terrain under a known name, or needs ``--spacing``.
    """
    wind, units = _speed_of(dataset, name, options)
    terrain = terrain_of(dataset)
    if options.terrain is not None:
        terrain = _terrain_file(options.terrain, dataset, wind)
    elif terrain is not None:
        terrain = _own_terrain(terrain, dataset, wind, name)
    if terrain is None:
        raise WindsrError(
            f"{name} has no terrain (looked for {', '.join(TERRAINS)}); give a file that has "
            "with --terrain-file."
        )
    wind, terrain = _northward_first(wind, terrain, name)
    speed = to_si(wind.to_numpy(), units, SPEED_UNITS, f"{name}: {wind.name or 'wind'}")
    speed = speed.reshape(-1, *speed.shape[-2:])  # runs, members and hours alike become fields
    heights = to_si(
        terrain.squeeze().to_numpy(),
        terrain.attrs.get("units", "m"),
        TERRAIN_UNITS,
        f"{name}: terrain",
    )
    if heights.shape != speed.shape[-2:]:
        raise WindsrError(
            f"{name}: wind is on a grid of {speed.shape[-2:]} points, the terrain on "
            f"{heights.shape}."
        )
    times = _times_of(dataset, wind, len(speed), name)
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
        if options.spacing is None or np.isclose(
            options.spacing, abs(np.diff(x).mean()), rtol=0.01
        ):
            return _upright(speed, heights, times, y, x, name)
        points = np.meshgrid(y, x, indexing="ij")
        return regridded(*points, speed, heights, times, options, name)
    lat, lon = (
        _first(dataset, LATITUDES),
        _first(dataset, LONGITUDES),
    )
    if lat is None or lon is None:
        raise WindsrError(
            f"{name}: neither y and x in m nor latitudes and longitudes; where the points are "
            "cannot be known."
        )
    places = [np.asarray(c.squeeze().to_numpy(), dtype=np.float64) for c in (lat, lon)]
    if places[0].ndim == 1:
        places = list(np.meshgrid(*places, indexing="ij"))
    return regridded(*local_metres(*places), speed, heights, times, options, name)


def _speed_of(dataset: Any, name: str, options: Options) -> tuple[Any, str | None]:
    speed = _first(dataset, (f"windspeed_{options.height}m", *SPEEDS))
    speed = _by_standard(dataset, SPEED_STANDARD) if speed is None else speed
    if speed is not None:
        units = options.units or speed.attrs.get("units")
        return _at_height(speed, name, options), units
    pairs = [(_first(dataset, (u,)), _first(dataset, (v,))) for u, v in COMPONENTS]
    pairs += [(_by_standard(dataset, u), _by_standard(dataset, v)) for u, v in COMPONENT_STANDARDS]
    for u, v in pairs:
        if u is None or v is None:
            continue
        both = {options.units or c.attrs.get("units") for c in (u, v)}
        if len(both) > 1:
            raise WindsrError(
                f"{name}: {u.name} and {v.name} are in different units "
                f"({', '.join(map(str, both))})."
            )
        if u.sizes != v.sizes:
            raise WindsrError(
                f"{name}: {u.name} is of {dict(u.sizes)}, {v.name} of {dict(v.sizes)}; bring both "
                "to the same points first."
            )
        u, v = (_at_height(c, name, options) for c in (u, v))
        return np.hypot(u, v).rename(f"{u.name}, {v.name}"), both.pop()
    components = ", ".join("+".join(pair) for pair in COMPONENTS)
    raise WindsrError(
        f"{name} has no wind speed (looked for {', '.join(SPEEDS)}, and the standard name "
        f"{SPEED_STANDARD}) and no components ({components})."
    )


def _at_height(wind: Any, name: str, options: Options) -> Any:
    """One height of a variable that has several. Raises WindsrError when none is the wanted one."""
    for dim in wind.dims[:-2]:
        if str(dim).lower().rstrip("0123456789_") not in HEIGHTS:
            continue
        if wind.sizes[dim] == 1:
            wind = wind.isel({dim: 0}, drop=True)
            continue
        there = wind[dim].to_numpy() if dim in wind.coords else np.array([])
        same = np.flatnonzero(np.isclose(there, options.height)) if there.size else there
        if len(same) != 1:
            levels = ", ".join(f"{h:g}" for h in there[:12]) or "without values"
            raise WindsrError(
                f"{name}: {wind.name} is on {wind.sizes[dim]} levels ({dim}: {levels}), none of "
                f"them at {options.height} m; say which with --height."
            )
        wind = wind.isel({dim: int(same[0])}, drop=True)
    return wind


def _northward_first(wind: Any, terrain: Any, name: str) -> tuple[Any, Any]:
    """Wind [..., y, x] and terrain [y, x], in whichever order the file has their dimensions. Raises
    WindsrError when both are not on one grid.
    """
    terrain = terrain.squeeze()
    if terrain.ndim == 2 and set(terrain.dims) <= set(wind.dims):
        rows, columns = terrain.dims
        eastward = str(rows).lower() in EASTWARD
        if rows in terrain.coords:
            eastward = terrain[rows].attrs.get("axis", "X" if eastward else "Y") == "X"
        order = (columns, rows) if eastward else (rows, columns)
        return wind.transpose(..., *order), terrain.transpose(*order)
    if wind.ndim < 2 or terrain.ndim != 2:
        raise WindsrError(
            f"{name}: wind has the dimensions {', '.join(map(str, wind.dims))}, the terrain "
            f"{', '.join(map(str, terrain.dims))}; a grid of rows and columns is needed."
        )
    return wind, terrain


def _times_of(dataset: Any, wind: Any, count: int, name: str) -> NDArray[np.datetime64]:
    coordinate = _first(dataset, ("valid_time", "time", "Times", "XTIME"))
    if coordinate is None or not np.issubdtype(coordinate.dtype, np.datetime64):
        raise WindsrError(
            f"{name} says no time of its fields (valid_time, time); days cannot be told apart."
        )
    own = [dim for dim in wind.dims[:-2] if dim in coordinate.dims]
    times = (
        coordinate.transpose(*own).broadcast_like(
            wind.isel(dict.fromkeys(wind.dims[-2:], 0), drop=True)
        )
        if own
        else coordinate
    )
    flat = times.to_numpy().astype("datetime64[s]").ravel()
    if len(flat) not in (1, count):
        raise WindsrError(f"{name}: {len(flat)} times for {count} fields.")
    return np.asarray(np.broadcast_to(flat, (count,)))


def _terrain_file(path: Path, dataset: Any, wind: Any) -> Any:
    """The terrain in a file of its own, at the points of the wind. Raises WindsrError."""
    import xarray

    if not path.is_file():
        raise WindsrError(f"There is no terrain file {path}.")
    with xarray.open_dataset(path) as ground:
        terrain = terrain_of(ground.load())
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
    """The terrain of the wind's own file, at the points of the wind, where it has dimensions of its
    own that say where they are. Raises WindsrError.
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
    """With y and x rising, whichever way the file has them, and without a rim of missing values,
    as models' grids have it that were turned into another projection. A hole in the middle stays,
    and is refused.
    """
    if len(y) > 1 and y[0] > y[-1]:
        speed, heights, y = speed[:, ::-1], heights[::-1], y[::-1]
    if len(x) > 1 and x[0] > x[-1]:
        speed, heights, x = speed[:, :, ::-1], heights[:, ::-1], x[::-1]
    good = np.isfinite(heights) & np.isfinite(speed).all(axis=0)
    if good.any() and not good.all():
        rows, columns = covered(good)
        if good[rows, columns].all() and good[rows, columns].size >= good.size / 2:
            speed, heights = speed[:, rows, columns], heights[rows, columns]
            y, x = y[rows], x[columns]
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
