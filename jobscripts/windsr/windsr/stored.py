"""Which stored numbers are values, and of what size, by the attributes that CF and NetCDF give them
(CF Conventions, 2.5.1 and 8.1): packing, fill values, and the range of valid values, which xarray
leaves to its user.

Pure: it opens no file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILL_VALUES = ("_FillValue", "missing_value")
"""Attributes that name numbers that are no values."""
_CODING = {*FILL_VALUES, "scale_factor", "add_offset", "valid_min", "valid_max", "valid_range"}


def decoded(stored: NDArray[Any], attributes: Mapping[str, Any]) -> NDArray[Any]:
    """The values of stored numbers, NaN where there is none: float64, or the stored array itself
    if it is one of floats of which no attribute says anything.

    Args:
        stored: as they are in the file.
        attributes: those of the variable.
    """
    if stored.dtype.kind == "f" and not _CODING & attributes.keys():
        return stored
    values: NDArray[np.float64] = np.asarray(stored, dtype=np.float64)
    absent = np.zeros(values.shape, dtype=np.bool_)
    for key in FILL_VALUES:
        for fill in np.ravel(attributes.get(key, ())):
            absent |= np.asarray(stored) == np.asarray(fill).astype(np.asarray(stored).dtype)
    scale, offset = _packing(attributes)
    encoding = {"scale_factor": scale, "add_offset": offset, "dtype": np.asarray(stored).dtype}
    values = np.where(absent, np.nan, values * scale + offset)
    low, high = valid_range(attributes, encoding)
    return np.where((values < low) | (values > high), np.nan, values)


def _packing(attributes: Mapping[str, Any]) -> tuple[float, float]:
    scale, offset = (
        float(np.ravel(attributes.get(key, default))[0])
        for key, default in (("scale_factor", 1.0), ("add_offset", 0.0))
    )
    return scale, offset


def valid_range(
    attributes: Mapping[str, Any], encoding: Mapping[str, Any] | None = None
) -> tuple[float, float]:
    """The least and the greatest valid value of a variable; infinite where it names none.

    The range is of the numbers as they are stored if it is of their type, else of the values
    (NetCDF User's Guide, Attribute Conventions).

    Args:
        attributes: ``valid_min``, ``valid_max`` or ``valid_range``.
        encoding: how values are stored: ``dtype``, ``scale_factor`` and ``add_offset``.
    """
    how = encoding or {}
    low, high = -np.inf, np.inf
    scale, offset = _packing(how)
    is_packed = (scale, offset) != (1.0, 0.0)

    def value_of(stated: Any) -> float:
        stored_as = np.dtype(how.get("dtype", np.float64))
        if is_packed and np.asarray(stated).dtype.kind == stored_as.kind:
            return float(stated) * scale + offset
        return float(stated)

    both = np.ravel(attributes.get("valid_range", ()))
    if len(both) == 2:
        low, high = sorted(map(value_of, both))
    if "valid_min" in attributes:
        low = max(low, value_of(np.ravel(attributes["valid_min"])[0]))
    if "valid_max" in attributes:
        high = min(high, value_of(np.ravel(attributes["valid_max"])[0]))
    # Rounding of a bound leaves out no value that lies on it.
    room = 1e-6 * max(1.0, *(abs(bound) for bound in (low, high) if np.isfinite(bound)), 1.0)
    return low - room, high + room


UNWRITTEN = {np.dtype(np.int16): -32767, np.dtype(np.int32): -2147483647}
"""What NetCDF writes where nothing was written, if the file names no fill value (``NC_FILL_SHORT``,
``NC_FILL_INT``). Packed, it may be a plausible wind.
"""
UNWRITTEN_SHARE = 0.001
"""Share of such values that is noted: of packed values a few may be the same number."""
log = logging.getLogger("windsr")


def _note_unwritten(variable: Any, values: NDArray[np.floating], file: str) -> None:
    """Note if a packed variable has many values that may never have been written. ``values``: its
    valid ones, NaN elsewhere.
    """
    how = variable.encoding
    fill = UNWRITTEN.get(np.dtype(how.get("dtype", np.float64)).newbyteorder("="))
    scale, offset = _packing(how)
    is_named = any(key in how or key in variable.attrs for key in FILL_VALUES)
    if fill is None or is_named or (scale, offset) == (1.0, 0.0):
        return
    value, opposite = (each * scale + offset for each in (fill, -fill))
    if (np.abs(values - opposite) < abs(scale) / 2).any():
        return  # packed by their range, as ncpdq does: it is the least (or the greatest) of them
    count = int((np.abs(values - value) < abs(scale) / 2).sum())
    if count > UNWRITTEN_SHARE * values.size:
        log.warning(
            "note: %s: %d values of %s are %d as they are stored, which NetCDF writes where "
            "nothing was written. The file names no fill value, so that they count as %.3g.",
            *(file, count, variable.name, fill, value),
        )


def only_valid(dataset: Any, file: str) -> Any:
    """An xarray Dataset without the values that its variables call invalid. ``file``: its name, for
    notes.
    """
    changed = {}
    for name, variable in dataset.data_vars.items():
        if variable.dtype.kind not in "fiu":
            continue
        low, high = valid_range(variable.attrs, variable.encoding)
        valid = variable
        if np.isfinite(low) or np.isfinite(high):
            valid = variable.where((variable >= low) & (variable <= high))
            changed[name] = valid.assign_attrs(variable.attrs)
        _note_unwritten(variable, valid.to_numpy(), file)
    return dataset.assign(changed)
