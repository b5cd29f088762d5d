"""Reads GRIB2 of HRRR, AROME and similar models: instantaneous wind at one height above ground, and
the height of the surface. Needs cfgrib (``pip install windsr[grib]``).

Each variable is opened separately, because those of one file seldom fit into one dataset: gusts and
rain are of other steps than wind, and terrain is often of the first step only.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from windsr import WindsrError
from windsr.datasets import Options, from_dataset
from windsr.fields import Fields

log = logging.getLogger("windsr")
TERRAINS = ("orog", "z", "h", "gh")
"""Names in ecCodes of the height or geopotential of the surface."""


def read_grib(path: Path, options: Options) -> Fields:
    """Read one file as fields. Raises WindsrError."""
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
    except TypeError as error:
        if "not supported between instances" not in str(error):
            raise
        raise WindsrError(
            f"{path} has messages with a number of a member of an ensemble and others without, as "
            "of a control run; give a file for each (grib_copy)."
        ) from error


def _fields(path: Path, options: Options) -> Fields:
    import xarray

    height = options.height
    _require_plain_messages(path, height)
    above = {"typeOfLevel": "heightAboveGround", "level": height, "stepType": "instant"}
    variable_of = {}
    for names in ((f"{height}u", f"{height}v"), ("u", "v"), (f"{height}si",), ("ws",)):
        variables = [_variable(path, {**above, "shortName": name}) for name in names]
        if all(one is not None for one in variables):
            variable_of = dict(
                zip(
                    (f"u{height}", f"v{height}") if len(names) == 2 else (f"si{height}",),
                    variables,
                    strict=True,
                )
            )
            break
    if not variable_of:
        raise WindsrError(
            f"{path} has no wind at {height} m above ground (neither u and v nor speed, as it is "
            "at one moment); say which height with --height."
        )
    for name in TERRAINS if options.needs_terrain and options.terrain is None else ():
        terrain = _variable(path, {"typeOfLevel": "surface", "shortName": name})
        if terrain is not None:
            first = terrain.isel(dict.fromkeys(terrain.dims[:-2], 0), drop=True)
            variable_of["orog"] = _on_own_grid(first, next(iter(variable_of.values())))
            break
    return from_dataset(xarray.Dataset(variable_of), str(path), options)


DERIVED = ("derivedForecast", "probabilityType", "percentileValue")
"""Keys of products that are made of the members of an ensemble."""
MEANS = ("0", "1", "6")
"""Values of derivedForecast that are means of members (WMO's code table 4.7)."""


def _require_values(what: str, name: str, height: int, stated: dict[str, str]) -> str:
    """Raise WindsrError for a wind that is no value of one member, and no mean. Return a sentence
    about a component that is a mean; else nothing.

    Args:
        what: the file and the variable, for messages.
        name: short name of the variable.
        height: height of the wind, m.
        stated: values of those keys in :data:`DERIVED` that the message has.
    """
    is_component = name in (f"{height}u", f"{height}v", "u", "v")
    if not stated or not (is_component or name in (f"{height}si", "ws")):
        return ""
    if set(stated) == {"derivedForecast"} and stated["derivedForecast"] in MEANS:
        if not is_component:
            return ""
        return (
            f"{what} is a mean over the members of an ensemble, and the speed of a mean wind is "
            "less than the mean of the speed."
        )
    keys = ", ".join(f"{key} {value}" for key, value in stated.items())
    raise WindsrError(
        f"{what} is a statistic of an ensemble ({keys}; WMO's code tables 4.7 and 4.9), and no "
        "wind. Give the members, or their mean wind speed."
    )


def _require_plain_messages(path: Path, height: int) -> None:
    """Raise WindsrError for a wind that is a statistic, and for a field whose messages are on
    several grids, or say two things of one moment. cfgrib does not tell them apart, puts all on the
    grid of the first, and takes the first of the others.
    """
    import eccodes

    grids: dict[str, set[str]] = {}
    contents: dict[tuple[str, ...], str] = {}
    note = ""
    with path.open("rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:

            def of(key: str, handle: int = handle) -> str:
                return str(eccodes.codes_get(handle, key, ktype=str))

            try:
                at = (of("typeOfLevel"), of("level"), of("stepType"))
                if at != ("heightAboveGround", str(height), "instant"):
                    continue
                name = of("shortName")
                stated = {k: of(k) for k in DERIVED if eccodes.codes_is_defined(handle, k)}
                sentence = _require_values(f"{path}: {name}", name, height, stated)
                note = note or sentence
                grids.setdefault(name, set()).add(of("md5GridSection"))
                member = of("number") if eccodes.codes_is_defined(handle, "number") else ""
                moment = (name, of("dataDate"), of("dataTime"), of("stepRange"), member)
                sections = (5, 6, 7) if of("edition") == "2" else (3, 4)
                keys = [f"md5Section{section}" for section in sections]
                content = "".join(of(k) for k in keys if eccodes.codes_is_defined(handle, k))
            finally:
                eccodes.codes_release(handle)
            if contents.setdefault(moment, content) != content:
                raise WindsrError(
                    f"{path} has {name} of {moment[1]} {moment[2]}, step {moment[3]}, twice with "
                    "other values; leave one out first (grib_copy)."
                )
    if note:
        log.warning("note: %s", note)
    for name, several in grids.items():
        if len(several) > 1:
            raise WindsrError(
                f"{path} has {name} on {len(several)} grids, or in {len(several)} orders of "
                "points; give a file for each."
            )


def _variable(path: Path, keys: dict[str, Any]) -> Any:
    """Return the messages with these keys as a variable; None if there are none."""
    import xarray

    how = {
        "filter_by_keys": keys,
        "indexpath": "",
        "errors": "raise",
        "read_keys": ["alternativeRowScanning"],
    }
    with xarray.open_dataset(
        path, engine="cfgrib", backend_kwargs=how, decode_timedelta=True
    ) as dataset:
        variables = list(dataset.load().data_vars.values())
    if len(variables) != 1:
        return None
    (variable,) = variables
    scanned_by_columns = variable.attrs.get("GRIB_jPointsAreConsecutive")
    if scanned_by_columns and variable.attrs.get("GRIB_alternativeRowScanning"):
        raise WindsrError(
            f"{path}: {variable.name} is scanned column by column and every other column backwards "
            "(WMO's flag table 3.4), which ecCodes does not decode; turn it first with "
            "'grib_set -s swapScanningAlternativeRows=1'."
        )
    return _in_order_of_coordinates(variable.drop_vars("heightAboveGround", errors="ignore"))


def _in_order_of_coordinates(variable: Any) -> Any:
    """Return a variable with the values in the order of its latitudes and longitudes.

    cfgrib returns the values of a regular grid in the order of the message. It ignores the scanning
    mode, by which points may be consecutive along columns, or run from east to west (WMO's flag
    table 3.4), while its longitudes always ascend. Curved grids contain the place of each point.
    """
    if not {"latitude", "longitude"} <= set(variable.dims):
        return variable
    variable = variable.transpose(..., "latitude", "longitude")
    values = variable.to_numpy()
    if variable.attrs.get("GRIB_jPointsAreConsecutive"):
        rows, columns = values.shape[-2:]
        values = values.reshape(*values.shape[:-2], columns, rows).swapaxes(-1, -2)
    if variable.attrs.get("GRIB_iScansNegatively"):
        values = values[..., ::-1]
    return variable.copy(data=values)


def _on_own_grid(terrain: Any, wind: Any) -> Any:
    """Return the terrain with its own places if their order differs from that of the wind, so that
    both are matched by place.
    """
    places = ("latitude", "longitude")
    others = [c for c in terrain.coords if c not in (*terrain.dims, *places)]
    terrain = terrain.drop_vars(others)
    if all(
        terrain[name].shape == wind[name].shape
        and np.array_equal(terrain[name].to_numpy(), wind[name].to_numpy())
        for name in places
    ):
        return terrain.drop_vars([name for name in places if name not in terrain.dims])
    return terrain.rename({n: f"terrain_{n}" for n in dict.fromkeys((*terrain.dims, *places))})
