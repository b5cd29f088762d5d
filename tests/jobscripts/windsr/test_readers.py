"""Every reader on a small file made here; units, days, and what is refused."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray
from windsr import WindsrError
from windsr.fields import SPEED_UNITS, Fields, split_by_day, to_si
from windsr.readers import Options, from_dataset, read

TIMES = np.array(["2017-06-02T15", "2017-06-03T03", "2017-06-03T15"], dtype="datetime64[ns]")
REAL = (
    Path(__file__).parents[4]
    / "shared"
    / "data"
    / "wind_mogreps_uk"
    / "mogreps_uk_wind10m_2km_200x200.nc"
)


def dataset(units="m s-1", y=None, **variables):
    wind = np.arange(3 * 4 * 5.0).reshape(3, 4, 5) % 20
    made = xarray.Dataset(
        {
            "wind_speed": (("time", "y", "x"), wind, {"units": units} if units else {}),
            "terrain": (("y", "x"), np.full((4, 5), 7.0), {"units": "m"}),
        },
        coords={
            "time": TIMES,
            "y": ("y", np.arange(4) * 2000.0 if y is None else y, {"units": "m"}),
            "x": ("x", np.arange(5) * 2000.0, {"units": "m"}),
        },
    )
    return made.assign(variables)


def written(tmp_path, made, name="wind.nc"):
    made.to_netcdf(tmp_path / name, engine="h5netcdf")
    return tmp_path / name


def test_netcdf(tmp_path):
    fields = read(written(tmp_path, dataset()))
    assert fields.wind.shape == (3, 4, 5)
    assert fields.spacing == 2000.0
    assert [str(d) for d in fields.days] == ["2017-06-02", "2017-06-03", "2017-06-03"]
    assert fields.wind[0, 1, 2] == 7.0


def test_netcdf_from_north_to_south_is_turned(tmp_path):
    fields = read(written(tmp_path, dataset(y=np.arange(4)[::-1] * 2000.0)))
    assert np.diff(fields.y).min() > 0
    assert fields.wind[0, 0, 0] == 15.0


def test_components_and_kilometres(tmp_path):
    made = dataset().drop_vars("wind_speed")
    made = made.assign(
        u10=(("time", "y", "x"), np.full((3, 4, 5), 3.0), {"units": "m/s"}),
        v10=(("time", "y", "x"), np.full((3, 4, 5), -4.0), {"units": "m/s"}),
    )
    made = made.assign_coords(
        y=("y", np.arange(4) * 2.0, {"units": "km"}), x=("x", np.arange(5) * 2.0, {"units": "km"})
    )
    fields = read(written(tmp_path, made))
    assert (fields.wind == 5.0).all()
    assert fields.spacing == 2000.0


def test_members_and_times_become_fields(tmp_path):
    made = dataset().expand_dims(member=2).transpose("time", "member", "y", "x")
    fields = from_dataset(
        made.assign(terrain=made.terrain.isel(member=0, drop=True)), "it", Options()
    )
    assert fields.wind.shape == (6, 4, 5)
    assert [str(d)[-2:] for d in fields.days] == ["02", "02", "03", "03", "03", "03"]


def test_a_curved_grid_as_hrrr_has_it_needs_a_spacing():
    lat, lon = np.meshgrid(40 + 0.03 * np.arange(12), 255 + 0.04 * np.arange(12), indexing="ij")
    made = xarray.Dataset(
        {
            "u10": (("y", "x"), np.full((12, 12), 6.0), {"units": "m s**-1"}),
            "v10": (("y", "x"), np.full((12, 12), 8.0), {"units": "m s**-1"}),
            "orog": (("y", "x"), 1000 + 10 * np.arange(144.0).reshape(12, 12), {"units": "gpm"}),
        },
        coords={
            "latitude": (("y", "x"), lat),
            "longitude": (("y", "x"), lon),
            "valid_time": TIMES[0],
        },
    )
    with pytest.raises(WindsrError, match="--spacing"):
        from_dataset(made, "it", Options())
    fields = from_dataset(made, "it", Options(spacing=3000.0))
    assert fields.wind.shape[0] == 1
    np.testing.assert_allclose(fields.wind, 10.0, rtol=1e-6)
    assert fields.spacing == 3000.0
    assert fields.terrain.std() > 0


def test_wrf_output(tmp_path):
    path = tmp_path / "wrfout_d01_2017-06-02"
    with h5py.File(path, "w") as file:
        file.attrs["DX"] = np.array([1000.0], np.float32)
        for name, value in (("U10", 3.0), ("V10", 4.0)):
            file[name] = np.full((2, 4, 4), value, np.float32)
            file[name].attrs["units"] = b"m s-1"
        file["HGT"] = np.full((2, 4, 4), 120.0, np.float32)
        file["HGT"].attrs["units"] = b"m"
        file["Times"] = np.array(
            [list("2017-06-02_00:00:00"), list("2017-06-03_00:00:00")], dtype="S1"
        )
    fields = read(path)
    assert (fields.wind == 5.0).all()
    assert fields.spacing == 1000.0
    assert [str(d) for d in fields.days] == ["2017-06-02", "2017-06-03"]


def test_wind_toolkit(tmp_path):
    path = tmp_path / "wtk.h5"
    lat, lon = np.meshgrid(40 + 0.02 * np.arange(9), -105 + 0.025 * np.arange(9), indexing="ij")
    meta = np.zeros(81, dtype=[("latitude", "f4"), ("longitude", "f4"), ("elevation", "f4")])
    meta["latitude"], meta["longitude"], meta["elevation"] = lat.ravel(), lon.ravel(), 1600
    with h5py.File(path, "w") as file:
        file["windspeed_10m"] = np.full((2, 81), 725, np.uint16)
        file["windspeed_10m"].attrs.update(scale_factor=100.0, units="m s-1")
        file["meta"] = meta
        file["time_index"] = np.array([b"2012-01-01 00:00:00+00:00", b"2012-01-01 01:00:00+00:00"])
    fields = read(path, Options(spacing=2000.0))
    np.testing.assert_allclose(fields.wind, 7.25, rtol=1e-5)
    np.testing.assert_allclose(fields.terrain, 1600)
    assert str(fields.times[1]) == "2012-01-01T01:00:00"
    with pytest.raises(WindsrError, match="windspeed_80m"):
        read(path, Options(spacing=2000.0, height=80))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (dataset(units=None), "no units"),
        (dataset(units="furlongs"), "not understood"),
        (dataset(units="km").drop_vars("terrain"), "no terrain"),
        (dataset().drop_vars("wind_speed"), "no wind speed"),
        (dataset().drop_vars("time"), "no time"),
        (dataset(y=np.array([0, 2000.0, 4000, 9000])), "equal steps"),
        (dataset(terrain=(("y", "x"), np.full((4, 5), 1e6), {"units": "m"})), "cannot be right"),
        (
            dataset(wind_speed=(("time", "y", "x"), np.full((3, 4, 5), np.nan), {"units": "m/s"})),
            "60 missing values",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path, made, words):
    with pytest.raises(WindsrError, match=words):
        read(written(tmp_path, made))


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "a.nc").write_bytes(b"nothing")
    (tmp_path / "a.txt").write_bytes(b"nothing")
    (tmp_path / "a.zarr").mkdir()
    for name, words in (
        ("a.nc", "cannot be read|did not recognize"),
        ("a.txt", "no known kind"),
        ("b.nc", "There is no file"),
        ("a.zarr", "is a folder, .* Write a Zarr store as NetCDF first"),
    ):
        with pytest.raises(WindsrError, match=words):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("units", "factor"), [("m s-1", 1), ("Knots", 0.514444), ("km/h", 1 / 3.6), ("mph", 0.44704)]
)
def test_units(units, factor):
    np.testing.assert_allclose(
        to_si(np.array([10.0]), units, SPEED_UNITS, "it"), [10 * factor], rtol=1e-5
    )


@pytest.mark.parametrize(("option", "refused"), [("m/s", False), ("knots", True), (None, False)])
def test_units_of_the_file_count(tmp_path, option, refused):
    path = written(tmp_path, dataset())
    if refused:
        with pytest.raises(WindsrError, match="is in 'm s-1' by its file and in 'knots' by --unit"):
            read(path, Options(units=option))
    else:
        assert read(path, Options(units=option)).wind[0, 1, 2] == 7.0
    bare = written(tmp_path, dataset(units=None), "bare.nc")
    assert read(bare, Options(units="knots")).wind[0, 1, 2] == pytest.approx(7 * 1852 / 3600)


@pytest.mark.parametrize("stated", ["m/sec", "meters per second", "m.s-1", "1"])
def test_the_option_names_units_that_the_file_says_in_unknown_words(tmp_path, stated):
    path = written(tmp_path, dataset(units=stated))
    assert read(path, Options(units="m/s")).wind[0, 1, 2] == 7.0
    with pytest.raises(WindsrError, match=r"not understood.* Say which it is with --units"):
        read(path)


@pytest.mark.parametrize(("units", "refused"), [("m/s", False), ("kt", True)])
def test_two_names_of_one_unit_are_one(units, refused):
    part = (("time", "y", "x"), np.full((3, 4, 5), 3.0))
    made = dataset().drop_vars("wind_speed")
    made = made.assign(u10=(*part, {"units": "m s-1"}), v10=(*part, {"units": units}))
    if refused:
        with pytest.raises(WindsrError, match=r"in different units \(m s-1, kt\)"):
            from_dataset(made, "it", Options())
    else:
        np.testing.assert_allclose(from_dataset(made, "it", Options()).wind, np.hypot(3, 3))


def field(times):
    return Fields(
        np.ones((len(times), 2, 2), np.float32),
        np.zeros((2, 2), np.float32),
        np.array(times, "datetime64[s]"),
        np.arange(2.0),
        np.arange(2.0),
        "it",
    )


def test_days_are_never_split():
    train, test = split_by_day(
        field([f"2020-01-{d:02d}T{h:02d}" for d in range(1, 9) for h in (0, 12)])
    )
    assert (len(train.times), len(test.times)) == (12, 4)
    assert not set(train.days) & set(test.days)
    train, test = split_by_day(train, ["2020-01-02"])
    assert [str(d) for d in test.days] == ["2020-01-02"] * 2
    with pytest.raises(WindsrError, match="no field of 2021-01-01"):
        split_by_day(train, ["2021-01-01"])
    with pytest.raises(WindsrError, match="none is left"):
        split_by_day(field(["2020-01-01"]))


@pytest.mark.skipif(not REAL.exists(), reason="the wind data are not beside the project")
def test_the_real_fields():
    fields = read(REAL)
    assert fields.wind.shape == (51, 200, 200)
    assert fields.spacing == 2000.0
    train, test = split_by_day(fields)
    assert (len(train.times), len(test.times)) == (39, 12)
