"""A maximum, a spread or the speed of a mean wind is not read as the wind (CF Conventions, 7.3)."""

from __future__ import annotations

import numpy as np
import pytest
from windsr import WindsrError
from windsr.datasets import Options, from_dataset

from tests.jobscripts.windsr.test_other_models import SPEED, made

OPTIONS = Options(needs_terrain=False)


def speeds(file):
    return from_dataset(file, "it", OPTIONS).wind


def components(file, methods):
    wind = file.wind_speed
    for name, part in (("uas", 0.6), ("vas", 0.8)):
        attributes = {"units": "m s-1", "cell_methods": methods}
        file[name] = (part * wind).assign_attrs(attributes)
    return file.drop_vars("wind_speed")


@pytest.mark.parametrize(
    ("methods", "statistic"),
    [
        ("time: maximum", "maximum"),
        ("area: mean time: maximum (interval: 1 hour)", "maximum"),
        ("realization: standard_deviation", "standard deviation"),
        ("time: mean within days time: minimum over days", "minimum"),
        ("time: Maximum", "maximum"),
        ("time: max", "max"),
    ],
)
@pytest.mark.parametrize("wind", ["wind_speed", "sfcWindmax", "uas"])
def test_a_statistic_is_no_wind(methods, statistic, wind):
    file = made()
    if wind == "uas":
        file = components(file, methods)
    else:
        file.wind_speed.attrs |= {"standard_name": "wind_speed", "cell_methods": methods}
        file = file.rename({"wind_speed": wind})
    with pytest.raises(WindsrError, match=rf"it: {wind} is a {statistic} \(cell_methods"):
        speeds(file)


@pytest.mark.parametrize(
    "methods",
    [
        "time: point",
        "time: Point",
        "area: mean",
        "area: time: mean",
        "median",
        "time: average",
        "area: mean time: instantaneous",
        "area: mean_where_land time: point",
        "time: mean (comment: instantaneous (sampled) values: maximum)",
    ],
)
def test_a_mean_of_the_speed_is_one(methods):
    file = made()
    file.wind_speed.attrs["cell_methods"] = methods
    np.testing.assert_allclose(speeds(file), SPEED, rtol=1e-6)


@pytest.mark.parametrize(
    ("methods", "over"),
    [
        ("time: mean", "time"),
        ("area: time: mean", "time"),
        ("area: mean time: mean (interval: 6 hours)", "time"),
        ("realization: mean", "realization"),
        ("realization: time: mean", "realization, time"),
        ("time: average", "time"),
        ("Time: Mean", "Time"),
    ],
)
def test_of_the_speed_of_a_mean_wind_a_note_says_that_it_is_less(caplog, methods, over):
    """Such as the daily means of CMIP, which often are all that there is."""
    np.testing.assert_allclose(speeds(components(made(), methods)), SPEED, rtol=1e-6)
    (note,) = caplog.messages
    assert note.startswith(f"note: it: uas is a mean over {over} (cell_methods")
    assert "less than the mean of the speed" in note


@pytest.mark.parametrize(
    "methods",
    [
        "time: point",
        "time: Point",
        "area: mean time: point",
        "area: mean time: instantaneous",
        "y: x: mean",
        "",
    ],
)
def test_components_at_moments_are_the_wind(caplog, methods):
    np.testing.assert_allclose(speeds(components(made(), methods)), SPEED, rtol=1e-6)
    assert not caplog.messages


def test_a_statistic_beside_the_wind_hides_it_not():
    """As CMIP has the highest wind of a day beside components at moments."""
    file = made()
    highest = 2 * file.wind_speed
    attributes = {"standard_name": "wind_speed", "units": "m s-1", "cell_methods": "time: maximum"}
    file = components(file, "time: point")
    file["sfcWindmax"] = highest.assign_attrs(attributes)
    np.testing.assert_allclose(speeds(file), SPEED, rtol=1e-6)
