"""GRIB2 of HRRR, AROME and alike: instantaneous wind at one height above ground, and the surface's
height. Needs cfgrib (``pip install windsr[grib]``).

Each variable is opened by itself. Those of one file seldom fit into one dataset: gusts and rain are
of other steps than wind, terrain often of the first step alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windsr import WindsrError
from windsr.datasets import Options, from_dataset
from windsr.fields import Fields

TERRAINS = ("orog", "z", "h", "gh")
"""What ecCodes calls the surface's height or geopotential."""


def read_grib(path: Path, options: Options) -> Fields:
    """One file as fields. Raises WindsrError."""
    try:
        import cfgrib  # noqa: F401
        import eccodes
    except ImportError:
        raise WindsrError(
            f"{path} is GRIB2, which needs cfgrib: pip install 'windsr[grib]'."
        ) from None
    try:
        return _fields(path, options)
    except (EOFError, eccodes.CodesInternalError) as error:
        raise WindsrError(f"{path} is no GRIB file, or a damaged one: {error}") from error


def _fields(path: Path, options: Options) -> Fields:
    import xarray

    height = options.height
    above = {"typeOfLevel": "heightAboveGround", "level": height, "stepType": "instant"}
    made = {}
    for names in ((f"{height}u", f"{height}v"), ("u", "v"), (f"{height}si",), ("ws",)):
        variables = [_variable(path, {**above, "shortName": name}) for name in names]
        if all(one is not None for one in variables):
            made = dict(
                zip(("u10", "v10") if len(names) == 2 else ("si10",), variables, strict=True)
            )
            break
    if not made:
        raise WindsrError(
            f"{path} has no wind at {height} m above ground (neither u and v nor speed, as it is "
            "at one moment); say which height with --height."
        )
    for name in TERRAINS:
        terrain = _variable(path, {"typeOfLevel": "surface", "shortName": name})
        if terrain is not None:
            first = terrain.isel(dict.fromkeys(terrain.dims[:-2], 0), drop=True)
            made["orog"] = first.drop_vars([c for c in first.coords if c not in first.dims])
            break
    return from_dataset(xarray.Dataset(made), str(path), options)


def _variable(path: Path, keys: dict[str, Any]) -> Any:
    """The messages with these keys as a variable, or None where there are none."""
    import xarray

    how = {"filter_by_keys": keys, "indexpath": "", "errors": "raise"}
    with xarray.open_dataset(
        path, engine="cfgrib", backend_kwargs=how, decode_timedelta=True
    ) as dataset:
        variables = list(dataset.load().data_vars.values())
    return (
        variables[0].drop_vars("heightAboveGround", errors="ignore")
        if len(variables) == 1
        else None
    )
