"""When the fields of a file are valid: its times, or those at which forecasts began and how long
after it their fields are.

Pure: it opens no file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError

TIMES = ("valid_time", "time", "Times", "XTIME")
LEADS = ("step", "lead_time", "leadtime", "lead", "forecast_period", "forecast_hour")
LEAD_UNITS = {
    unit: seconds
    for units, seconds in (
        (("s", "sec", "secs", "second", "seconds"), 1.0),
        (("min", "mins", "minute", "minutes"), 60.0),
        (("h", "hr", "hrs", "hour", "hours"), 3600.0),
        (("d", "day", "days"), 86400.0),
    )
    for unit in units
}
"""Units of a time span, in seconds."""


def times_of(dataset: Any, wind: Any, count: int, name: str) -> NDArray[np.datetime64]:
    """[count] when the fields of a wind are valid, UTC.

    Args:
        dataset: an xarray Dataset.
        wind: [..., y, x], one of its variables.
        count: number of its fields.
        name: of the file, for messages.

    Raises:
        WindsrError: the file does not say it, or not of every field.
    """
    coordinate = next((dataset[each] for each in TIMES if each in dataset), None)
    if coordinate is not None and coordinate.dtype.kind == "O":
        raise WindsrError(
            f"{name}: the times of {coordinate.name} are of a calendar that days of the year are "
            "not counted by (noleap, 360_day, …); write them in the standard one first (xarray's "
            "convert_calendar)."
        )
    if coordinate is None or not np.issubdtype(coordinate.dtype, np.datetime64):
        raise WindsrError(
            f"{name} says no time of its fields (valid_time, time); days cannot be told apart."
        )
    coordinate = _valid(dataset, wind, coordinate, name)
    own = [dim for dim in wind.dims[:-2] if dim in coordinate.dims]
    times = (
        coordinate.transpose(*own).broadcast_like(
            wind.isel(dict.fromkeys(wind.dims[-2:], 0), drop=True)
        )
        if own
        else coordinate
    )
    # To the nearest second: hours that are stored as parts of days are less by a rounding.
    rounded = times.to_numpy().astype("datetime64[ms]") + np.timedelta64(500, "ms")
    flat = rounded.astype("datetime64[s]").ravel()
    if len(flat) not in (1, count):
        raise WindsrError(f"{name}: {len(flat)} times for {count} fields.")
    if np.isnat(flat).any():
        raise WindsrError(
            f"{name}: {int(np.isnat(flat).sum())} fields have no time ({coordinate.name}); leave "
            "them out first."
        )
    return np.asarray(np.broadcast_to(flat, (count,)))


def _valid(dataset: Any, wind: Any, coordinate: Any, name: str) -> Any:
    """When fields are valid, of a coordinate that may say when their forecasts began."""
    began = coordinate.attrs.get("standard_name") == "forecast_reference_time"
    if coordinate.name == "valid_time":
        return coordinate
    leads = [
        c
        for c in (*dataset.coords.values(), *dataset.data_vars.values())
        if (str(c.name) in LEADS or c.attrs.get("standard_name") == "forecast_period")
        and set(c.dims) <= set(wind.dims[:-2])
    ]
    for lead in leads:
        if began or not set(lead.dims) <= set(coordinate.dims):
            return coordinate + _spans(lead, name)
    if began:
        raise WindsrError(
            f"{name}: {coordinate.name} says when forecasts began, and nothing how long after it "
            f"fields are valid ({', '.join(LEADS)})."
        )
    unknown = [dim for dim in wind.dims[:-2] if str(dim) in LEADS and dim not in coordinate.dims]
    if unknown:
        raise WindsrError(
            f"{name}: {unknown[0]} has no values, so that it is not known how long after the "
            f"beginning of a forecast ({coordinate.name}) its fields are valid."
        )
    return coordinate


def _spans(lead: Any, name: str) -> Any:
    """A coordinate of time spans. Raises WindsrError for unknown units."""
    if lead.dtype.kind == "m":
        return lead
    units = str(lead.attrs.get("units", "")).strip().lower()
    if units not in LEAD_UNITS:
        raise WindsrError(
            f"{name}: {lead.name} is in {units or 'no units'}; known are "
            f"{', '.join(dict.fromkeys(LEAD_UNITS))}."
        )
    seconds = np.round(lead.astype(np.float64) * LEAD_UNITS[units])
    return seconds.astype("timedelta64[s]").astype("timedelta64[ns]")
