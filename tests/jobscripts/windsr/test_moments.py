"""When fields are valid: times of forecasts, their lead times, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import xarray
from windsr import WindsrError
from windsr.datasets import Options, from_dataset
from windsr.readers import read

from tests.jobscripts.windsr.test_other_models import SPEED, TIMES, made

REFERENCE = {"standard_name": "forecast_reference_time"}
VALID = ["2017-06-02T21", "2017-06-03T21", "2017-06-03T09", "2017-06-04T09"]


def forecasts(dim="step", lead=None, time=None):
    """Two forecasts of 2 June 15 UTC and of 3 June 3 UTC, 6 and 30 hours ahead."""
    file = made(np.stack([SPEED, SPEED + 1], 1), ("time", dim, "y", "x"))
    return file.assign_coords(
        time=("time", TIMES, time or {}), **({} if lead is None else {dim: (dim, *lead)})
    )


@pytest.mark.parametrize("time", [{}, REFERENCE])
@pytest.mark.parametrize(
    ("dim", "lead"),
    [
        ("step", (np.array([6, 30], "timedelta64[h]").astype("timedelta64[ns]"),)),
        ("lead_time", ([6.0, 30.0], {"units": "hours"})),
        ("forecast_period", ([360, 1800], {"units": "minutes"})),
        ("ahead", ([0.25, 1.25], {"units": "days", "standard_name": "forecast_period"})),
    ],
)
def test_a_forecast_is_valid_its_lead_time_after_it_began(tmp_path, dim, lead, time):
    forecasts(dim, lead, time).to_netcdf(tmp_path / "wind.nc")
    fields = read(tmp_path / "wind.nc")
    assert [str(each)[:13] for each in fields.times] == VALID
    assert (fields.wind[1] == SPEED[0] + 1).all()
    assert [str(day)[-2:] for day in fields.days] == ["02", "03", "03", "04"]


def test_a_valid_time_needs_no_lead_time():
    lead = ([6, 30], {"units": "hours", "standard_name": "forecast_period"})
    beside = made().assign_coords(forecast_period=("time", *lead))
    assert (from_dataset(beside, "it", Options()).times == TIMES).all()
    own = forecasts("step", (np.array([6, 30], "timedelta64[h]"),))
    own = own.assign_coords(valid_time=(("time", "step"), np.array(VALID, "M8[ns]").reshape(2, 2)))
    assert [str(t)[:13] for t in from_dataset(own, "it", Options()).times] == VALID


@pytest.mark.parametrize("stored", [np.float64, np.float32])
def test_times_are_whole_seconds(tmp_path, stored):
    """Five hours as a part of a day are 4:59:59.999 in single precision."""
    days = np.array([5 / 24, 1 + 1 / 3]).astype(stored)
    attributes = {"units": "days since 2017-06-02"}
    made().assign_coords(time=("time", days, attributes)).to_netcdf(tmp_path / "wind.nc")
    times = read(tmp_path / "wind.nc").times
    assert [str(each) for each in times] == ["2017-06-02T05:00:00", "2017-06-03T08:00:00"]


def test_one_lead_time_of_all_forecasts():
    file = made().assign_coords(
        time=("time", TIMES, REFERENCE), forecast_period=((), 6, {"units": "h"})
    )
    times = from_dataset(file, "it", Options()).times
    assert (times == TIMES + np.timedelta64(6, "h")).all()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (made().assign_coords(time=("time", TIMES, REFERENCE)), "nothing how long after it"),
        (forecasts("step", ([6, 30], {})), "step is in no units"),
        (forecasts("step"), "step has no values"),
        (
            made().assign_coords(time=np.array([TIMES[0], "NaT"], "M8[ns]")),
            r"1 fields have no time \(time\)",
        ),
    ],
)
def test_times_that_are_not_known_are_refused(file, words):
    with pytest.raises(WindsrError, match=words):
        from_dataset(file, "it", Options())


@pytest.mark.parametrize("spacing", [None, 1900.0])
def test_hours_that_are_missing_are_named(spacing):
    """Two runs of a forecast with different lead times leave two of four fields empty."""
    file = forecasts("step", (np.array([6, 30], "timedelta64[h]"),))
    speed = file.wind_speed.to_numpy().copy()
    speed[0, 1] = speed[1, 0] = np.nan
    file = file.assign(wind_speed=(file.wind_speed.dims, speed, {"units": "m s-1"}))
    with pytest.raises(WindsrError, match="it: 2 of 4 fields have no value, as where runs"):
        from_dataset(file, "it", Options(spacing=spacing))


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_another_calendar_is_refused_in_a_sentence(tmp_path, calendar):
    units = {"units": "days since 2017-01-01", "calendar": calendar}
    file = made().assign_coords(time=("time", [100.0, 130.5], units))
    file.to_netcdf(tmp_path / "wind.nc")
    with pytest.raises(WindsrError, match="cannot be read: its times are of another calendar"):
        read(tmp_path / "wind.nc")
    file = made().assign_coords(time=xarray.Variable("time", np.array([1, "b"], dtype=object)))
    with pytest.raises(WindsrError, match="are of a calendar that days of the year are not"):
        from_dataset(file, "it", Options())
