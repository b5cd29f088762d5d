"""Reads HDF5 files, WRF output and NREL's WIND Toolkit, as :class:`windsr.fields.Fields`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.datasets import Options, regridded
from windsr.fields import LENGTH_UNITS, SPEED_UNITS, Fields, to_si, units_of
from windsr.grids import local_metres, steady
from windsr.stored import FILL_VALUES, decoded


def wrf_or_wtk(path: Path, options: Options) -> Fields:
    import h5py

    if options.terrain is not None:
        raise WindsrError(
            f"--terrain-file is for NetCDF and GRIB2; {path} has its own terrain (HGT, or the "
            "elevation of its sites)."
        )
    with h5py.File(path) as file:
        if "U10" in file and "V10" in file:
            if options.height != 10:
                raise WindsrError(
                    f"{path} is WRF output, which has the wind at 10 m (U10, V10); --height "
                    f"{options.height} is not in it."
                )
            return _wrf(file, str(path), options)
        if f"windspeed_{options.height}m" in file:
            return replace(_wtk(file, str(path), options), height=float(options.height))
        for present, absent in (("U10", "V10"), ("V10", "U10")):
            if present in file:
                raise WindsrError(
                    f"{path} has {present} and no {absent}: the speed of the wind needs both."
                )
        datasets = ", ".join(sorted(file)[:20])
        raise WindsrError(
            f"{path}: neither WRF output (U10, V10) nor WIND Toolkit "
            f"(windspeed_{options.height}m); it holds {datasets}."
        )


def _units(dataset: Any) -> str | None:
    units = dataset.attrs.get("units")
    return units.decode() if isinstance(units, bytes) else None if units is None else str(units)


def _values(dataset: Any, at: Any = ...) -> NDArray[Any]:
    """The values of a dataset of HDF5, or of a part of it, by the attributes of CF, NaN where it
    has none.
    """
    return decoded(dataset[at], {key: dataset.attrs[key] for key in dataset.attrs})


def _steady_values(dataset: Any, what: str) -> NDArray[Any]:
    """The first [y, x] of a dataset, which is read field by field. Raises WindsrError if the others
    differ.
    """
    if dataset.ndim < 3:
        return _values(dataset)
    first = _values(dataset, 0)
    for index in range(1, len(dataset)):
        steady(np.stack([first, _values(dataset, index)]), what)
    return first


def _stamps(raw: NDArray[Any]) -> NDArray[np.datetime64]:
    texts = [
        b"".join(row).decode()
        if getattr(row, "ndim", 0)
        else row.decode()
        if isinstance(row, bytes)
        else str(row)
        for row in raw
    ]
    return np.array([_moment(text.strip().replace("_", "T").replace(" ", "T")) for text in texts])


def _moment(text: str) -> np.datetime64:
    """A time such as 2012-01-01T00:00:00-06:00, in UTC; without an offset it is in UTC already."""
    offset = re.fullmatch(r"([+-])(\d\d):?(\d\d)", text[19:])
    moment = np.datetime64(text[:19], "s")
    if offset is None:
        return moment
    ahead = np.timedelta64(60 * int(offset[2]) + int(offset[3]), "m")
    return moment - ahead if offset[1] == "+" else moment + ahead


def _wrf(file: Any, name: str, options: Options) -> Fields:
    """Read wrfout: U10, V10 [Time, y, x], HGT, XLAT, XLONG, Times; DX is the grid's spacing (WRF
    User's Guide, "WRF output fields").
    """
    has_terrain = options.needs_terrain
    required = ("HGT", "Times") if has_terrain else ("Times",)
    missing = [key for key in required if key not in file]
    if missing:
        raise WindsrError(f"{name} lacks {', '.join(missing)}, which WRF output has.")
    speed = to_si(
        np.hypot(_values(file["U10"]), _values(file["V10"])),
        units_of(_units(file["U10"]), options.units, f"{name}: U10"),
        SPEED_UNITS,
        f"{name}: U10, V10",
    )
    heights: NDArray[np.float32] = np.zeros(speed.shape[-2:], np.float32)
    if has_terrain:
        ground = _steady_values(file["HGT"], f"{name}: HGT")
        heights = to_si(ground, _units(file["HGT"]), LENGTH_UNITS, f"{name}: HGT")
    times = _stamps(file["Times"][:])
    dx, dy = (
        float(np.ravel(file.attrs[key])[0]) if key in file.attrs else None for key in ("DX", "DY")
    )
    is_square = dy is None or dy == dx
    if dx is not None and (options.spacing is None or (options.spacing == dx and is_square)):
        rows, columns = heights.shape
        y, x = np.arange(rows) * (dx if dy is None else dy), np.arange(columns) * dx
        return Fields(speed, heights, times, y, x, name, has_terrain=has_terrain)
    y, x = local_metres(file["XLAT"][0], file["XLONG"][0], name)
    fields = regridded(y, x, speed, heights, times, options, name)
    return replace(fields, has_terrain=has_terrain)


def _wtk(file: Any, name: str, options: Options) -> Fields:
    """Read the WIND Toolkit: windspeed_*m [time, site] as integers that are ``scale_factor`` times
    too large, ``time_index``, and ``meta`` with latitude, longitude and elevation of the sites.
    """
    missing = [key for key in ("meta", "time_index") if key not in file]
    if missing:
        raise WindsrError(
            f"{name} lacks {', '.join(missing)}, which files of the WIND Toolkit have."
        )
    columns = set(file["meta"].dtype.names or ())
    has_terrain = options.needs_terrain
    required = {"latitude", "longitude"} | ({"elevation"} if has_terrain else set())
    absent = required - columns
    if absent:
        raise WindsrError(
            f"{name}: its table 'meta' lacks {', '.join(sorted(absent))}; wind over unknown ground "
            "cannot be used."
        )
    stored = file[f"windspeed_{options.height}m"]
    if stored.ndim != 2:
        raise WindsrError(
            f"{name}: {stored.name} has the shape {stored.shape}; the WIND Toolkit has times and "
            "sites. Write a gridded one as NetCDF with y, x or latitude, longitude."
        )
    fills = {key: stored.attrs[key] for key in FILL_VALUES if key in stored.attrs}
    if any(np.any(stored.attrs.get(key, 0)) for key in ("add_offset", "adder")):
        raise WindsrError(
            f"{name}: {stored.name} is stored with an offset, which files of the WIND Toolkit do "
            "not have; write its values without one first."
        )
    raw = decoded(stored[:], fills) / float(stored.attrs.get("scale_factor", 1.0))
    units = units_of(_units(stored), options.units, f"{name}: {stored.name}")
    speed = to_si(raw, units, SPEED_UNITS, f"{name}: {stored.name}")
    meta = file["meta"][:]
    y, x = local_metres(meta["latitude"], meta["longitude"], name)
    heights = (
        meta["elevation"].astype(np.float32) if has_terrain else np.zeros(len(meta), np.float32)
    )
    times = _stamps(file["time_index"][:])
    fields = regridded(y, x, speed, heights, times, options, name)
    return replace(fields, has_terrain=has_terrain)
