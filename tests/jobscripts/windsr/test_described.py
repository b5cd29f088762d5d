"""What the descriptions of variables say of a wind and of a terrain."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import xarray
from windsr import WindsrError
from windsr.described import check_terrain
from windsr.readers import Options, from_dataset


def fields(attributes, height=10, terrain=5.0, names=("wind_speed",)):
    """Read a wind with these attributes."""
    axis = np.arange(4) * 1000.0
    coordinates = {
        "time": np.array(["2017-06-02T15:00"], "datetime64[ns]"),
        "y": ("y", axis, {"units": "m"}),
        "x": ("x", axis, {"units": "m"}),
    }
    wind = (("time", "y", "x"), np.full((1, 4, 4), 7.0), {"units": "m s-1", **attributes})
    variables = dict.fromkeys(names, wind)
    variables["orog"] = (("y", "x"), np.full((4, 4), terrain), {"units": "m"})
    return from_dataset(xarray.Dataset(variables, coordinates), "f.nc", Options(height=height))


def test_a_wind_of_gusts_is_refused_by_its_standard_name():
    match = r"f.nc: wind_speed is a wind of gusts \(standard_name 'wind_speed_of_gust'\)"
    with pytest.raises(WindsrError, match=match):
        fields({"standard_name": "wind_speed_of_gust"})


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ("Maximum 10 metre wind gust since previous post-processing", True),
        ("Wind Gusts", True),
        ("10 m wind (without gusts)", False),
        ("Mean wind speed in August 2017", False),
    ],
)
def test_a_description_that_speaks_of_gusts_is_noted(caplog, text, noted):
    """A text says too little to refuse a wind: "August" has a gust in it."""
    caplog.set_level(logging.WARNING)
    assert fields({"standard_name": "wind_speed", "long_name": text}).height == 10
    assert [record.getMessage() for record in caplog.records] == [
        f"note: f.nc: wind_speed may be a wind of gusts (long_name {text!r}); the wind at moments, "
        "or its mean, is needed."
    ] * noted


@pytest.mark.parametrize(
    ("text", "height", "noted"),
    [
        ("wind speed at 100 m", 10, True),
        ("wind speed at 100m", 10, True),
        ("100 metre wind speed", 10, True),
        ("80-m wind", 10, True),
        ("wind speed at 100 m", 100, False),
        ("10 metre wind speed", 10, False),
        ("10 m wind (without gusts)", 10, False),
        ("wind speed in 0.1 m/s", 10, False),
        ("wind speed, 5 m s-1 bins", 10, False),
        ("10 min mean wind", 10, False),
        ("wind at 10 m and 100 m", 10, False),
        ("wind, 25 m resolution", 10, False),
        ("wind speed", 10, False),
    ],
)
def test_another_height_in_a_description_is_noted(caplog, text, height, noted):
    caplog.set_level(logging.WARNING)
    assert fields({"long_name": text}, height=height).height == height
    assert [record.getMessage() for record in caplog.records] == [
        f"note: f.nc: wind_speed is taken to be at {height} m, and its long_name is {text!r}; say "
        "its height with --height."
    ] * noted


def test_the_height_of_components_is_noted(caplog):
    fields({"long_name": "wind at 100 m"}, names=("u", "v"))
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("terrain", "noted"), [(-28.0, False), (-80.0, True), (0.0, False)])
def test_a_terrain_that_may_be_the_floor_of_a_sea_is_noted(caplog, terrain, noted):
    fields({}, terrain=terrain)
    assert ["floor of a sea" in record.getMessage() for record in caplog.records] == [True] * noted


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("heights", [[], [np.nan, np.nan], [np.nan, 5.0]])
def test_a_terrain_without_heights_is_not_noted(caplog, heights):
    check_terrain(np.array(heights), "f.nc")
    assert not caplog.records
