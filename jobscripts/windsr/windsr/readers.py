"""Reads files of wind fields, each kind with its own reader, as :class:`windsr.fields.Fields`.

A reader reports which variables and units it found. Wind is at 10 m by default. Kinds: NetCDF (CF,
any model), WRF output and NREL's WIND Toolkit (both HDF5), HRRR and AROME (GRIB2, needs cfgrib).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from windsr import WindsrError
from windsr.datasets import Options, from_dataset
from windsr.fields import Fields
from windsr.grib import read_grib
from windsr.hdf5 import wrf_or_wtk
from windsr.stored import only_valid

__all__ = ["READERS", "Options", "from_dataset", "read"]


def read(path: Path, options: Options | None = None) -> Fields:
    """Read one file by its suffix: .nc .nc4 .cdf, .h5 .hdf5 (and wrfout_*), .grib2 .grb2 .grib.
    Raises WindsrError.
    """
    options = options or Options()
    if path.is_dir():
        raise WindsrError(
            f"{path} is a folder, and windsr reads files ({', '.join(READERS)}). Write a Zarr "
            "store as NetCDF first (xarray's open_zarr and to_netcdf)."
        )
    if not path.is_file():
        raise WindsrError(f"There is no file {path}.")
    reader = wrf_or_wtk if path.name.startswith("wrfout") else READERS.get(path.suffix.lower())
    if reader is None:
        raise WindsrError(
            f"{path} is of no known kind; known are {', '.join(READERS)} and wrfout_*."
        )
    try:
        return reader(path, options)
    except WindsrError:
        raise
    except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
        # What a library says of a file that is none of its kinds, often in many lines.
        why = " ".join(str(error).split())
        if "installed IO backends" in why:
            why = "it is no NetCDF file, or a damaged one."
        elif "unable to decode time" in why:
            why = (
                "its times are of another calendar than the standard one, or in units such as "
                "months; write them as hours since a date first (xarray's convert_calendar)."
            )
        raise WindsrError(f"{path} cannot be read: {why}") from error


def _netcdf(path: Path, options: Options) -> Fields:
    import xarray

    with xarray.open_dataset(path, decode_timedelta=False) as dataset:
        return from_dataset(only_valid(dataset.load(), str(path)), str(path), options)


READERS: dict[str, Callable[[Path, Options], Fields]] = {
    ".nc": _netcdf,
    ".nc4": _netcdf,
    ".cdf": _netcdf,
    ".h5": wrf_or_wtk,
    ".hdf5": wrf_or_wtk,
    ".grib2": read_grib,
    ".grb2": read_grib,
    ".grib": read_grib,
}
