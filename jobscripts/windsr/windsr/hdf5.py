"""Reads HDF5 files, WRF output and NREL's WIND Toolkit, as :class:`windsr.fields.Fields`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.datasets import Options, regridded
from windsr.fields import LENGTH_UNITS, SPEED_UNITS, Fields, to_si
from windsr.grids import local_metres


def wrf_or_wtk(path: Path, options: Options) -> Fields:
    import h5py

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
    """Read wrfout: U10, V10 [Time, y, x], HGT, XLAT, XLONG, Times; DX is the grid's spacing (WRF
    User's Guide, "WRF output fields").
    """
    has_terrain = options.needs_terrain
    required = ("HGT", "Times") if has_terrain else ("Times",)
    missing = [key for key in required if key not in file]
    if missing:
        raise WindsrError(f"{name} lacks {', '.join(missing)}, which WRF output has.")
    speed = to_si(
        np.hypot(file["U10"][:], file["V10"][:]),
        options.units or _units(file["U10"]),
        SPEED_UNITS,
        f"{name}: U10, V10",
    )
    heights: NDArray[np.float32] = np.zeros(speed.shape[-2:], np.float32)
    if has_terrain:
        heights = to_si(file["HGT"][0], _units(file["HGT"]), LENGTH_UNITS, f"{name}: HGT")
    times = _stamps(file["Times"][:])
    dx = float(np.ravel(file.attrs["DX"])[0]) if "DX" in file.attrs else None
    if dx is not None and options.spacing in (None, dx):
        rows, columns = heights.shape
        y, x = np.arange(rows) * dx, np.arange(columns) * dx
        return Fields(speed, heights, times, y, x, name, has_terrain=has_terrain)
    y, x = local_metres(file["XLAT"][0].astype(np.float64), file["XLONG"][0].astype(np.float64))
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
    raw = stored[:].astype(np.float64) / float(stored.attrs.get("scale_factor", 1.0))
    speed = to_si(raw, options.units or _units(stored), SPEED_UNITS, f"{name}: {stored.name}")
    meta = file["meta"][:]
    y, x = local_metres(meta["latitude"].astype(np.float64), meta["longitude"].astype(np.float64))
    heights = (
        meta["elevation"].astype(np.float32) if has_terrain else np.zeros(len(meta), np.float32)
    )
    times = _stamps(file["time_index"][:])
    fields = regridded(y, x, speed, heights, times, options, name)
    return replace(fields, has_terrain=has_terrain)
