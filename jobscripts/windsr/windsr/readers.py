"""Files of wind fields, each kind by its own reader, all to the same :class:`windsr.fields.Fields`.

A reader says which variables it found by which names, and in which units; wind is at 10 m unless
told otherwise. Kinds: NetCDF (CF, any model), WRF output and NREL's WIND Toolkit (both HDF5), HRRR
(GRIB2, needs cfgrib). It decides nothing about training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.fields import LENGTH_UNITS, SPEED_UNITS, Fields, to_si
from windsr.grids import local_metres, regrid


@dataclass(frozen=True)
class Options:
    """What the user may say about a file.

    Args:
        spacing: m of the model's grid; needed where the file's own grid is curved or scattered,
            else the file's.
        height: m above ground of the wind, in names such as ``windspeed_100m``.
        units: of wind where the file says none.
        terrain: a NetCDF file with the terrain on the same grid, where the file itself has none.
    """

    spacing: float | None = None
    height: int = 10
    units: str | None = None
    terrain: Path | None = None


def read(path: Path, options: Options | None = None) -> Fields:
    """Read one file by its suffix: .nc .nc4 .cdf, .h5 .hdf5 (and wrfout_*), .grib2 .grb2 .grib.
    Raises WindsrError.
    """
    options = options or Options()
    if not path.is_file():
        raise WindsrError(f"There is no file {path}.")
    reader = _wrf_or_wtk if path.name.startswith("wrfout") else READERS.get(path.suffix.lower())
    if reader is None:
        raise WindsrError(
            f"{path} is of no known kind; known are {', '.join(READERS)} and wrfout_*."
        )
    try:
        return reader(path, options)
    except (OSError, KeyError) as error:
        raise WindsrError(f"{path} cannot be read: {error}") from error
    except (
        ValueError
    ) as error:  # what xarray says of a file that is none of its kinds, in many lines
        if "installed IO backends" not in str(error):
            raise
        raise WindsrError(
            f"{path} cannot be read: it is no NetCDF file, or a damaged one."
        ) from error


# --- NetCDF ---

SPEEDS = ("wind_speed", "ws10", "si10", "wspd10", "windspeed_10m", "wind_speed_10m", "sfcWind")
COMPONENTS = (("u10", "v10"), ("U10", "V10"), ("uas", "vas"), ("10u", "10v"))
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
)


def _first(dataset: Any, names: tuple[str, ...]) -> Any:
    return next((dataset[name] for name in names if name in dataset), None)


def _netcdf(path: Path, options: Options) -> Fields:
    import xarray

    with xarray.open_dataset(path, decode_timedelta=False) as dataset:
        return from_dataset(dataset.load(), str(path), options)


def from_dataset(dataset: Any, name: str, options: Options) -> Fields:
    """An xarray Dataset as fields; what NetCDF and GRIB2 have in common.

    Raises:
        WindsrError: when it has no wind or no terrain under a known name, or needs ``--spacing``.
    """
    wind, units = _speed_of(dataset, name, options)
    terrain = _first(dataset, TERRAINS)
    if options.terrain is not None:
        terrain = _terrain_file(options.terrain)
    if terrain is None:
        raise WindsrError(
            f"{name} has no terrain (looked for {', '.join(TERRAINS)}); give a file that has "
            "with --terrain."
        )
    speed = to_si(wind.to_numpy(), units, SPEED_UNITS, f"{name}: {wind.name or 'wind'}")
    speed = speed.reshape(-1, *speed.shape[-2:])  # runs, members and hours alike become fields
    heights = to_si(
        terrain.squeeze().to_numpy(),
        terrain.attrs.get("units", "m"),
        LENGTH_UNITS,
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
        return _regridded(*points, speed, heights, times, options, name)
    lat, lon = (
        _first(dataset, ("latitude", "lat", "XLAT")),
        _first(dataset, ("longitude", "lon", "XLONG")),
    )
    if lat is None or lon is None:
        raise WindsrError(
            f"{name}: neither y and x in m nor latitudes and longitudes; where the points are "
            "cannot be known."
        )
    places = [np.asarray(c.squeeze().to_numpy(), dtype=np.float64) for c in (lat, lon)]
    if places[0].ndim == 1:
        places = list(np.meshgrid(*places, indexing="ij"))
    return _regridded(*local_metres(*places), speed, heights, times, options, name)


def _speed_of(dataset: Any, name: str, options: Options) -> tuple[Any, str | None]:
    speed = _first(dataset, (f"windspeed_{options.height}m", *SPEEDS))
    if speed is not None:
        return speed, options.units or speed.attrs.get("units")
    for u, v in COMPONENTS:
        if u in dataset and v in dataset:
            both = {options.units or dataset[c].attrs.get("units") for c in (u, v)}
            if len(both) > 1:
                raise WindsrError(
                    f"{name}: {u} and {v} are in different units ({', '.join(map(str, both))})."
                )
            return np.hypot(dataset[u], dataset[v]).rename(f"{u}, {v}"), both.pop()
    pairs = ", ".join("+".join(pair) for pair in COMPONENTS)
    raise WindsrError(
        f"{name} has no wind speed (looked for {', '.join(SPEEDS)}) and no components ({pairs})."
    )


def _times_of(dataset: Any, wind: Any, count: int, name: str) -> NDArray[np.datetime64]:
    found = _first(dataset, ("valid_time", "time", "Times", "XTIME"))
    if found is None or not np.issubdtype(found.dtype, np.datetime64):
        raise WindsrError(
            f"{name} says no time of its fields (valid_time, time); days cannot be told apart."
        )
    own = [dim for dim in wind.dims[:-2] if dim in found.dims]
    times = (
        found.transpose(*own).broadcast_like(wind.isel(dict.fromkeys(wind.dims[-2:], 0), drop=True))
        if own
        else found
    )
    flat = times.to_numpy().astype("datetime64[s]").ravel()
    if len(flat) not in (1, count):
        raise WindsrError(f"{name}: {len(flat)} times for {count} fields.")
    return np.asarray(np.broadcast_to(flat, (count,)))


def _terrain_file(path: Path) -> Any:
    import xarray

    if not path.is_file():
        raise WindsrError(f"There is no terrain file {path}.")
    with xarray.open_dataset(path) as dataset:
        terrain = _first(dataset.load(), TERRAINS)
    if terrain is None:
        raise WindsrError(f"{path} has no terrain (looked for {', '.join(TERRAINS)}).")
    return terrain


def _upright(
    speed: NDArray[np.float32],
    heights: NDArray[np.float32],
    times: NDArray[np.datetime64],
    y: NDArray[np.float64],
    x: NDArray[np.float64],
    name: str,
) -> Fields:
    """With y and x rising, whichever way the file has them."""
    if len(y) > 1 and y[0] > y[-1]:
        speed, heights, y = speed[:, ::-1], heights[::-1], y[::-1]
    if len(x) > 1 and x[0] > x[-1]:
        speed, heights, x = speed[:, :, ::-1], heights[:, ::-1], x[::-1]
    return Fields(np.ascontiguousarray(speed), np.ascontiguousarray(heights), times, y, x, name)


def _regridded(
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
    rows, columns, found = regrid(y.ravel(), x.ravel(), values, options.spacing)
    return Fields(
        np.ascontiguousarray(found[1:]),
        found[0],
        times,
        rows,
        columns,
        f"{name}, regridded to {options.spacing:g} m",
    )


# --- HDF5: WRF output, WIND Toolkit ---


def _wrf_or_wtk(path: Path, options: Options) -> Fields:
    import h5py

    with h5py.File(path) as file:
        if "U10" in file and "V10" in file:
            return _wrf(file, str(path), options)
        if f"windspeed_{options.height}m" in file:
            return _wtk(file, str(path), options)
        held = ", ".join(sorted(file)[:20])
        raise WindsrError(
            f"{path}: neither WRF output (U10, V10) nor WIND Toolkit "
            f"(windspeed_{options.height}m); it holds {held}."
        )


def _units(dataset: Any) -> str | None:
    units = dataset.attrs.get("units")
    return units.decode() if isinstance(units, bytes) else None if units is None else str(units)


def _stamps(raw: NDArray[Any]) -> NDArray[np.datetime64]:
    texts = [
        b"".join(row).decode()
        if getattr(row, "ndim", 0)
        else row.decode()
        if isinstance(row, bytes)
        else str(row)
        for row in raw
    ]
    return np.array(
        [np.datetime64(t.strip().replace("_", "T").replace(" ", "T")[:19], "s") for t in texts]
    )


def _wrf(file: Any, name: str, options: Options) -> Fields:
    """wrfout: U10, V10 [Time, y, x], HGT, XLAT, XLONG, Times; DX is the grid's spacing (WRF User's
    Guide, "WRF output fields").
    """
    missing = [key for key in ("HGT", "Times") if key not in file]
    if missing:
        raise WindsrError(f"{name} lacks {', '.join(missing)}, which WRF output has.")
    speed = to_si(
        np.hypot(file["U10"][:], file["V10"][:]),
        options.units or _units(file["U10"]),
        SPEED_UNITS,
        f"{name}: U10, V10",
    )
    heights = to_si(file["HGT"][0], _units(file["HGT"]), LENGTH_UNITS, f"{name}: HGT")
    times = _stamps(file["Times"][:])
    dx = float(np.ravel(file.attrs["DX"])[0]) if "DX" in file.attrs else None
    if dx is not None and options.spacing in (None, dx):
        rows, columns = heights.shape
        return Fields(speed, heights, times, np.arange(rows) * dx, np.arange(columns) * dx, name)
    y, x = local_metres(file["XLAT"][0].astype(np.float64), file["XLONG"][0].astype(np.float64))
    return _regridded(y, x, speed, heights, times, options, name)


def _wtk(file: Any, name: str, options: Options) -> Fields:
    """WIND Toolkit: windspeed_*m [time, site] as whole numbers that are ``scale_factor`` times too
    large, ``time_index``, and ``meta`` with latitude, longitude and elevation of the sites.
    """
    missing = [key for key in ("meta", "time_index") if key not in file]
    if missing:
        raise WindsrError(
            f"{name} lacks {', '.join(missing)}, which files of the WIND Toolkit have."
        )
    stored = file[f"windspeed_{options.height}m"]
    raw = stored[:].astype(np.float64) / float(stored.attrs.get("scale_factor", 1.0))
    speed = to_si(raw, options.units or _units(stored), SPEED_UNITS, f"{name}: {stored.name}")
    meta = file["meta"][:]
    y, x = local_metres(meta["latitude"].astype(np.float64), meta["longitude"].astype(np.float64))
    return _regridded(
        y,
        x,
        speed,
        meta["elevation"].astype(np.float32),
        _stamps(file["time_index"][:]),
        options,
        name,
    )


# --- GRIB2 ---


def _grib(path: Path, options: Options) -> Fields:
    """HRRR and alike: u and v at ``height`` m above ground, surface orography. Needs cfgrib (``pip
    install windsr[grib]``).
    """
    try:
        import cfgrib  # noqa: F401
        import xarray
    except ImportError:
        raise WindsrError(
            f"{path} is GRIB2, which needs cfgrib: pip install 'windsr[grib]'."
        ) from None
    above = {"typeOfLevel": "heightAboveGround", "level": options.height}
    wind = xarray.open_dataset(
        path, engine="cfgrib", backend_kwargs={"filter_by_keys": above, "indexpath": ""}
    )
    ground = xarray.open_dataset(
        path,
        engine="cfgrib",
        backend_kwargs={"filter_by_keys": {"typeOfLevel": "surface"}, "indexpath": ""},
    )
    both = wind.load().drop_vars(["heightAboveGround"], errors="ignore")
    if (terrain := _first(ground.load(), TERRAINS)) is not None:
        both = both.assign(
            orog=terrain.drop_vars([c for c in terrain.coords if c not in both.coords])
        )
    if f"u{options.height}" in both and options.height != 10:
        both = both.rename({f"u{options.height}": "u10", f"v{options.height}": "v10"})
    return from_dataset(both, str(path), options)


READERS: dict[str, Callable[[Path, Options], Fields]] = {
    ".nc": _netcdf,
    ".nc4": _netcdf,
    ".cdf": _netcdf,
    ".h5": _wrf_or_wtk,
    ".hdf5": _wrf_or_wtk,
    ".grib2": _grib,
    ".grb2": _grib,
    ".grib": _grib,
}
