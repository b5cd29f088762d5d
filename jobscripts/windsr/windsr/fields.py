"""A wind field: speed in m/s on a regular grid with the terrain below it, checked when it is
created.

Decides which units are understood, which values are possible, and how days are separated.
:mod:`windsr.readers` reads files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError

MAX_SPEED_MS = 120.0
"""Maximum wind speed, m/s. The highest measured wind at 10 m is 113 m/s (Barrow Island 1996, WMO
archive of extremes).
"""
MIN_HEIGHT_M, MAX_HEIGHT_M = -500.0, 9000.0
"""Range of land heights, m, wider than that of the Earth."""

SPEED_UNITS = {
    "m s-1": 1.0,
    "m/s": 1.0,
    "m s**-1": 1.0,
    "m s^-1": 1.0,
    "ms-1": 1.0,
    "meter second-1": 1.0,
    "metre second-1": 1.0,
    "meters/second": 1.0,
    "km/h": 1 / 3.6,
    "km h-1": 1 / 3.6,
    "kt": 1852 / 3600,
    "knot": 1852 / 3600,
    "knots": 1852 / 3600,
    "mph": 0.44704,
    "mi/h": 0.44704,
}
LENGTH_UNITS = {
    "m": 1.0,
    "meter": 1.0,
    "meters": 1.0,
    "metre": 1.0,
    "metres": 1.0,
    "gpm": 1.0,
    "km": 1000.0,
    "ft": 0.3048,
    "feet": 0.3048,
}


def to_si(
    values: NDArray[np.floating], units: str | None, table: dict[str, float], what: str
) -> NDArray[np.float32]:
    """Return ``values`` in m/s (``SPEED_UNITS``) or m (``LENGTH_UNITS``) as float32. Raises
    WindsrError if the units are missing or unknown.
    """
    if not units:
        raise WindsrError(
            f"{what} has no units; say which with --units (one of: {', '.join(table)})."
        )
    factor = table.get(units.strip().lower())
    if factor is None:
        raise WindsrError(
            f"{what} is in {units!r}, which is not understood; known are {', '.join(table)}."
            + (" Say which it is with --units." if table is SPEED_UNITS else "")
        )
    return (np.asarray(values, dtype=np.float64) * factor).astype(np.float32)


def same_speed(units: str | None, others: str | None) -> bool:
    """Whether two units of wind are one, perhaps by two names."""
    if units is None or others is None:
        return units == others
    factors = [SPEED_UNITS.get(each.strip().lower()) for each in (units, others)]
    return units == others or (factors[0] is not None and factors[0] == factors[1])


def units_of(stated: str | None, option: str | None, what: str) -> str | None:
    """The units of a wind: those of the file if they are known, else the user's, else those of the
    file; None where nobody says them. Raises WindsrError where known ones differ.
    """
    if stated is None or stated.strip().lower() not in SPEED_UNITS:
        return option or stated
    if option and not same_speed(stated, option):
        raise WindsrError(
            f"{what} is in {stated!r} by its file and in {option!r} by --units, which is for files "
            "that say none, or say it in other words than windsr knows."
        )
    return stated


@dataclass(frozen=True)
class Fields:
    """Wind speed over terrain.

    Args:
        wind: [time, y, x] float32, m/s, at ``height``.
        terrain: [y, x] float32, m above sea level.
        times: [time] datetime64[s], UTC.
        y, x: [y], [x] float64, m; ascending in equal steps, the same in both directions.
        source: origin of the fields, for the history of output files.
        located: whether y and x are the file's own, so that they can be compared with those of
            another file of the same projection. If not, their origin is arbitrary.
        height: height of the wind above ground, m.
        has_terrain: whether ``terrain`` is known; if not, it is 0 everywhere.

    Raises:
        WindsrError: shapes do not fit, values are impossible, or the grid is not regular.
    """

    wind: NDArray[np.float32]
    terrain: NDArray[np.float32]
    times: NDArray[np.datetime64]
    y: NDArray[np.floating]
    x: NDArray[np.floating]
    source: str
    located: bool = False
    height: float = 10.0
    has_terrain: bool = True

    def __post_init__(self) -> None:
        t, rows, columns = self.wind.shape if self.wind.ndim == 3 else (0, 0, 0)
        if self.wind.ndim != 3 or self.terrain.shape != (rows, columns) or len(self.times) != t:
            raise WindsrError(
                f"{self.source}: wind {self.wind.shape}, terrain {self.terrain.shape} and "
                f"{len(self.times)} times do not fit each other."
            )
        if (len(self.y), len(self.x)) != (rows, columns):
            raise WindsrError(
                f"{self.source}: {len(self.y)} × {len(self.x)} coordinates for a grid of {rows} "
                f"× {columns}."
            )
        for name, values, low, high, unit in (
            ("Wind", self.wind, 0, MAX_SPEED_MS, "m/s"),
            ("Terrain", self.terrain, MIN_HEIGHT_M, MAX_HEIGHT_M, "m"),
        ):
            if not np.isfinite(values).all():
                missing = int((~np.isfinite(values)).sum())
                raise WindsrError(
                    f"{self.source}: {name.lower()} has {missing} missing values; fill or cut "
                    "them first."
                )
            if values.size and (values.min() < low or values.max() > high):
                raise WindsrError(
                    f"{self.source}: {name.lower()} from {values.min():.4g} to "
                    f"{values.max():.4g} {unit} cannot be right (possible: "
                    f"{low:g} to {high:g}); are its units what the file says?"
                )
        for name, axis in (("y", self.y), ("x", self.x)):
            steps = np.diff(axis)
            if len(steps) and (steps.min() <= 0 or np.ptp(steps) > 0.02 * abs(steps.mean())):
                raise WindsrError(
                    f"{self.source}: {name} is not rising in equal steps; regrid first (--spacing)."
                )

        both = [float(np.diff(axis).mean()) for axis in (self.y, self.x) if len(axis) > 1]
        if len(both) == 2 and not np.isclose(both[0], both[1], rtol=0.01):
            raise WindsrError(
                f"{self.source}: points are {both[0]:g} m apart in y and {both[1]:g} m in x; "
                "regrid first (--spacing)."
            )

    @property
    def spacing(self) -> float:
        """Distance between grid points, m."""
        return float(np.diff(self.x).mean()) if len(self.x) > 1 else float("nan")

    @property
    def days(self) -> NDArray[np.datetime64]:
        """Day (UTC) of each field, [time]."""
        return self.times.astype("datetime64[D]")

    def at(self, which: Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]) -> Fields:
        """Return the fields of these times only."""
        return replace(self, wind=self.wind[which], times=self.times[which])


def split_by_day(fields: Fields, test_days: Sequence[str] | None = None) -> tuple[Fields, Fields]:
    """Return (train, test), split by whole days, because fields of one day are similar. By default
    the last quarter of the days is for the test.

    Raises:
        WindsrError: a day does not exist, or one of the parts is empty.
    """
    days = np.unique(fields.days)
    if not len(days):
        raise WindsrError(f"{fields.source} has no field.")
    if test_days:
        try:
            dates = np.array([np.datetime64(day, "D") for day in test_days])
        except ValueError as error:
            raise WindsrError(f"--test-day takes dates like 2017-06-05: {error}") from None
        absent = [str(day) for day in dates if day not in days]
        if absent:
            raise WindsrError(
                f"{fields.source} has no field of {', '.join(absent)}; its days are "
                f"{', '.join(map(str, days))}."
            )
    else:
        dates = days[len(days) - max(1, len(days) // 4) :]
    in_test = np.isin(fields.days, dates)
    if in_test.all():
        raise WindsrError(
            f"{fields.source} has {len(days)} day(s), all held out for the test; none is left "
            "to train on. To make all of them fine with a trained model: sample --part all."
        )
    return fields.at(~in_test), fields.at(in_test)
