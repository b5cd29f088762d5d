"""GRIB2 as ecCodes writes it, laid out as HRRR's and AROME's files are."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from windsr import WindsrError
from windsr.readers import Options, read

LAMBERT = {
    "gridType": "lambert",
    "Nx": 20,
    "Ny": 16,
    "latitudeOfFirstGridPointInDegrees": 35.0,
    "longitudeOfFirstGridPointInDegrees": 262.5,
    "LoVInDegrees": 262.5,
    "DxInMetres": 3000.0,
    "DyInMetres": 3000.0,
    "Latin1InDegrees": 38.5,
    "Latin2InDegrees": 38.5,
    "LaDInDegrees": 38.5,
    "jScansPositively": 1,
}
DEGREES = {
    "gridType": "regular_ll",
    "Ni": 20,
    "Nj": 16,
    "latitudeOfFirstGridPointInDegrees": 45.0,
    "longitudeOfFirstGridPointInDegrees": 1.0,
    "latitudeOfLastGridPointInDegrees": 45.0 - 15 * 0.025,
    "longitudeOfLastGridPointInDegrees": 1.0 + 19 * 0.025,
    "iDirectionIncrementInDegrees": 0.025,
    "jDirectionIncrementInDegrees": 0.025,
    "jScansPositively": 0,
}
"""From north to south."""
ROWS, COLUMNS = np.mgrid[:16.0, :20.0]
U, V, SPEED, GUST, OROGRAPHY, GEOPOTENTIAL, RAIN = (
    (2, 2), (2, 3), (2, 1), (2, 22), (3, 5), (3, 4), (1, 8)
)  # fmt: skip
"""Category and number of WMO's table 4.2."""


def message(file, what, values, grid, *, date=20170602, step=0, height=None, over=False):
    """One field; ``height`` in m above ground, None: the surface; ``over``: of the hour before."""
    import eccodes

    handle = eccodes.codes_grib_new_from_samples("GRIB2")
    keys = {"productDefinitionTemplateNumber": 8} if over else {}
    keys |= {"shapeOfTheEarth": 6, **grid, "dataDate": date, "dataTime": 300}
    keys |= {"parameterCategory": what[0], "parameterNumber": what[1]}
    keys["typeOfFirstFixedSurface"] = 1 if height is None else 103
    if height is not None:
        keys |= {"scaleFactorOfFirstFixedSurface": 0, "scaledValueOfFirstFixedSurface": height}
    if over:
        keys |= {"typeOfStatisticalProcessing": 2, "stepRange": f"{step - 1}-{step}"}
    else:
        keys["step"] = step
    for key, value in (keys | {"bitsPerValue": 16}).items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set_values(handle, np.broadcast_to(values, ROWS.shape).astype(float).ravel())
    eccodes.codes_write(handle, file)
    eccodes.codes_release(handle)


@pytest.mark.thorough
def test_a_file_like_hrrrs(tmp_path):
    with open(tmp_path / "hrrr.grib2", "wb") as file:
        for date in (20170602, 20170603):
            message(file, GUST, 20, LAMBERT, date=date, step=1)
            message(file, OROGRAPHY, 100 + 10 * COLUMNS, LAMBERT, date=date, step=1)
            message(file, SPEED, 25, LAMBERT, date=date, step=1, height=10, over=True)
            message(file, U, 30, LAMBERT, date=date, step=1, height=80)
            message(file, V, 40, LAMBERT, date=date, step=1, height=80)
            message(file, U, 0.3 * ROWS, LAMBERT, date=date, step=1, height=10)
            message(file, V, 0.4 * ROWS, LAMBERT, date=date, step=1, height=10)
    fields = read(tmp_path / "hrrr.grib2", Options(spacing=3000.0))
    assert [str(t)[:13] for t in fields.times] == ["2017-06-02T04", "2017-06-03T04"]
    middle = fields.wind[:, 2:-2, 2:-2]  # the model's own grid, turned by less than half a degree
    np.testing.assert_allclose(np.diff(middle, axis=1), 0.5, atol=0.03)
    np.testing.assert_allclose(np.diff(fields.terrain[2:-2, 2:-2], axis=1), 10.0, atol=0.5)
    higher = read(tmp_path / "hrrr.grib2", Options(spacing=3000.0, height=80))
    np.testing.assert_allclose(higher.wind, 50.0, rtol=1e-3)
    with pytest.raises(WindsrError, match="no wind at 100 m"):
        read(tmp_path / "hrrr.grib2", Options(spacing=3000.0, height=100))
    with pytest.raises(WindsrError, match="--spacing"):
        read(tmp_path / "hrrr.grib2")


@pytest.mark.parametrize("others_first", [True, False])
def test_a_file_like_aromes_whose_variables_are_of_different_steps(tmp_path, others_first):
    with open(tmp_path / "arome.grib2", "wb") as file:

        def others():
            message(file, GUST, 20, DEGREES, step=1, height=10, over=True)
            message(file, RAIN, 1, DEGREES, step=1, over=True)

        if others_first:
            others()
        for step in range(3):
            message(file, U, 3 + step, DEGREES, step=step, height=10)
            message(file, V, 4, DEGREES, step=step, height=10)
        message(file, GEOPOTENTIAL, 9.80665 * (500 - 10 * ROWS), DEGREES)
        if not others_first:
            others()
    fields = read(tmp_path / "arome.grib2", Options(spacing=2500.0))
    assert [str(t)[11:13] for t in fields.times] == ["03", "04", "05"]
    for field, u in zip(fields.wind, (3, 4, 5), strict=True):
        np.testing.assert_allclose(field, np.hypot(u, 4), rtol=1e-3)
    rise = np.diff(fields.terrain, axis=0) * 0.025 * 111_200 / 2500  # m from row to row
    np.testing.assert_allclose(rise, 10.0, atol=0.3)
    assert fields.terrain.max() <= 501, "the north, which comes first in the file, is highest"


def test_wind_speed_without_terrain_is_refused_for_the_terrain(tmp_path):
    with open(tmp_path / "speed.grib2", "wb") as file:
        message(file, SPEED, 7, DEGREES, height=10)
    with pytest.raises(WindsrError, match="no terrain"):
        read(tmp_path / "speed.grib2", Options(spacing=2500.0))


@pytest.mark.parametrize("moved", [0.0, 0.5])
def test_messages_on_another_grid_are_not_put_on_the_first(tmp_path, moved):
    first = DEGREES["latitudeOfFirstGridPointInDegrees"] - moved
    last = DEGREES["latitudeOfLastGridPointInDegrees"] - moved
    other = DEGREES | {
        "latitudeOfFirstGridPointInDegrees": first,
        "latitudeOfLastGridPointInDegrees": last,
    }
    with open(tmp_path / "two.grib2", "wb") as file:
        for date, grid in ((20170602, DEGREES), (20170603, other)):
            message(file, SPEED, 7, grid, date=date, height=10)
        message(file, GEOPOTENTIAL, 9.80665 * 500, DEGREES)
    options = Options(spacing=2500.0)
    if not moved:
        assert len(read(tmp_path / "two.grib2", options).times) == 2
        return
    with pytest.raises(WindsrError, match="has 10si on 2 grids, or in 2 orders of points"):
        read(tmp_path / "two.grib2", options)


@pytest.mark.parametrize(("second", "refused"), [(7.0, False), (9.0, True)])
def test_a_field_that_is_there_twice_is_there_once(tmp_path, second, refused):
    with open(tmp_path / "twice.grib2", "wb") as file:
        for speed in (7.0, second):
            message(file, SPEED, speed + 0.01 * ROWS, DEGREES, height=10)
        message(file, GEOPOTENTIAL, 9.80665 * 500, DEGREES)
    if not refused:
        assert len(read(tmp_path / "twice.grib2", Options(spacing=2500.0)).times) == 1
        return
    with pytest.raises(WindsrError, match="has 10si of 20170602 0300, step 0, twice"):
        read(tmp_path / "twice.grib2", Options(spacing=2500.0))


DERIVED = {"productDefinitionTemplateNumber": 2, "numberOfForecastsInEnsemble": 30}
PERCENTILE = {"productDefinitionTemplateNumber": 6, "percentileValue": 90}


@pytest.mark.parametrize(
    ("what", "product", "words"),
    [
        ((U, V), {**DERIVED, "derivedForecast": 4}, r"10u is a statistic .*derivedForecast 4"),
        ((SPEED,), {**DERIVED, "derivedForecast": 2}, "10si is a statistic of an ensemble"),
        ((SPEED,), PERCENTILE, r"10si is a statistic .*percentileValue 90"),
        ((U, V), {**DERIVED, "derivedForecast": 0}, None),
        ((SPEED,), {**DERIVED, "derivedForecast": 0}, None),
    ],
)
def test_a_statistic_of_an_ensemble_is_no_wind(tmp_path, caplog, what, product, words):
    """As the files of means and spreads beside the members' of a centre's ensemble."""
    with open(tmp_path / "all.grib2", "wb") as file:
        for each in what:
            message(file, each, 3 + 0.01 * ROWS, {**product, **DEGREES}, height=10)
        message(file, GEOPOTENTIAL, 9.80665 * 500, DEGREES)
    if words is None:
        assert read(tmp_path / "all.grib2", Options(spacing=2500.0)).wind.min() >= 3.0 - 1e-3
        notes = [text for text in caplog.messages if text.startswith("note:")]
        assert len(notes) == (what == (U, V)), "the speed of a mean wind is less than the mean"
        assert all("10u is a mean over the members" in note for note in notes)
        return
    with pytest.raises(WindsrError, match=words):
        read(tmp_path / "all.grib2", Options(spacing=2500.0))


def test_a_mean_hides_no_spread_beside_it(tmp_path):
    with open(tmp_path / "all.grib2", "wb") as file:
        for each, kind in ((U, 0), (V, 0), (U, 4)):
            product = {**DERIVED, **DEGREES, "derivedForecast": kind}
            message(file, each, 3 + 0.01 * ROWS, product, height=10)
    with pytest.raises(WindsrError, match="10u is a statistic of an ensemble"):
        read(tmp_path / "all.grib2", Options(spacing=2500.0))


def test_members_of_an_ensemble_become_fields(tmp_path):
    with open(tmp_path / "members.grib2", "wb") as file:
        for number in (1, 2, 3):
            member = {"productDefinitionTemplateNumber": 1, "perturbationNumber": number}
            message(file, SPEED, 2.0 * number, {**member, **DEGREES}, height=10)
        message(file, GEOPOTENTIAL, 9.80665 * 500, DEGREES)
    fields = read(tmp_path / "members.grib2", Options(spacing=2500.0))
    np.testing.assert_allclose(fields.wind.mean(axis=(1, 2)), [2.0, 4.0, 6.0], rtol=1e-3)
    assert len(set(fields.times)) == 1


def test_a_control_run_beside_members_is_refused_in_a_sentence(tmp_path):
    with open(tmp_path / "both.grib2", "wb") as file:
        message(file, SPEED, 2.0, DEGREES, height=10)
        member = {"productDefinitionTemplateNumber": 1, "perturbationNumber": 1}
        message(file, SPEED, 4.0, {**member, **DEGREES}, height=10)
        message(file, GEOPOTENTIAL, 9.80665 * 500, DEGREES)
    with pytest.raises(WindsrError, match="and others without, as of a control run; give a file"):
        read(tmp_path / "both.grib2", Options(spacing=2500.0))


def test_components_of_members_in_another_order_belong_together(tmp_path):
    with open(tmp_path / "members.grib2", "wb") as file:
        for what, number, value in ((U, 1, 3), (U, 2, 5), (V, 2, 12), (V, 1, 4)):
            member = {"productDefinitionTemplateNumber": 1, "perturbationNumber": number}
            message(file, what, float(value), {**member, **DEGREES}, height=10)
        message(file, GEOPOTENTIAL, 9.80665 * 500, DEGREES)
    fields = read(tmp_path / "members.grib2", Options(spacing=2500.0))
    np.testing.assert_allclose(fields.wind.mean(axis=(1, 2)), [5.0, 13.0], rtol=1e-3)


FIRST_EDITION = {U: (2, 33, 105, 10), V: (2, 34, 105, 10), GEOPOTENTIAL: (128, 129, 1, 0)}
"""Table, parameter, kind of level and level."""


@pytest.mark.parametrize(("second", "refused"), [(8.0, False), (9.0, True)])
def test_the_first_edition_of_grib(tmp_path, second, refused):
    """With a field that is there twice, which has no bitmap."""
    import eccodes

    places = {key: value for key, value in DEGREES.items() if key != "gridType"}
    with open(tmp_path / "first.grib", "wb") as file:
        for what, value in ((U, 6.0), (V, 8.0), (V, second), (GEOPOTENTIAL, 9806.65)):
            handle = eccodes.codes_grib_new_from_samples("GRIB1")
            names = ("table2Version", "indicatorOfParameter", "indicatorOfTypeOfLevel", "level")
            keys = dict(zip(names, FIRST_EDITION[what], strict=True)) | places
            for key, number in (keys | {"dataDate": 20170602, "dataTime": 300}).items():
                eccodes.codes_set(handle, key, number)
            eccodes.codes_set_values(handle, np.full(ROWS.size, value))
            eccodes.codes_write(handle, file)
            eccodes.codes_release(handle)
    if refused:
        with pytest.raises(WindsrError, match="has 10v of 20170602 0300, step 0, twice"):
            read(tmp_path / "first.grib", Options(spacing=2500.0))
        return
    fields = read(tmp_path / "first.grib", Options(spacing=2500.0))
    np.testing.assert_allclose(fields.wind, 10.0, rtol=1e-5)
    np.testing.assert_allclose(fields.terrain, 1000.0, rtol=1e-5)


@pytest.mark.parametrize("content", [b"", b"GRIB", b"x" * 999])
def test_what_is_no_grib_file_is_said_in_a_sentence(tmp_path, content):
    (tmp_path / "bad.grib2").write_bytes(content)
    with pytest.raises(WindsrError, match="no GRIB file, or a damaged one"):
        read(tmp_path / "bad.grib2")


def test_without_its_library_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cfgrib", None)
    (tmp_path / "hrrr.grib2").write_bytes(b"GRIB")
    with pytest.raises(WindsrError, match=r"pip install 'windsr\[grib\]'"):
        read(tmp_path / "hrrr.grib2")
