"""What counts as a value by the attributes of a file: packing, fill values, valid ranges."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from windsr import WindsrError
from windsr.datasets import Options
from windsr.readers import read
from windsr.stored import decoded, valid_range

from tests.jobscripts.windsr.test_other_models import GROUND, SPEED, made

PACKED = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 3.0, "_FillValue": -32768}


def written(folder, speed, attributes, encoding=None, ground=GROUND, of_ground=None):
    file = made(speed, ground=ground)
    file.wind_speed.attrs.update(attributes)
    file.terrain.attrs.update(of_ground or {})
    file.to_netcdf(folder / "wind.nc", engine="h5netcdf", encoding={"wind_speed": encoding or {}})
    return folder / "wind.nc"


def outside(value):
    speed = SPEED.copy()
    speed[0, 5, 6] = value
    return speed


@pytest.mark.parametrize(
    ("attributes", "encoding"),
    [
        ({"valid_range": np.array([0.0, 60.0])}, None),
        ({"valid_max": 60.0}, None),
        ({"valid_max": 60.0}, PACKED),
        ({"valid_range": np.array([-300, 5700], "i2")}, PACKED),
        ({"valid_max": np.int16(5700)}, PACKED),
    ],
)
def test_a_value_beyond_the_valid_range_is_none(tmp_path, attributes, encoding):
    path = written(tmp_path, outside(99.0), attributes, encoding)
    with pytest.raises(WindsrError, match="wind has 1 missing values"):
        read(path)
    path = written(tmp_path, SPEED, attributes, encoding)
    np.testing.assert_allclose(read(path).wind, SPEED, atol=0.01)


@pytest.mark.filterwarnings("ignore:saving variable wind_speed")  # it has no missing values
@pytest.mark.parametrize(("rows", "changes", "noted"), [
    (2, {}, True),
    (2, {"dtype": ">i2"}, True),
    (0, {}, False),
    (2, {"add_offset": 16.999}, False),
    (2, {"_FillValue": -32768}, False),
])  # fmt: skip
def test_values_that_may_never_have_been_written_are_noted(tmp_path, caplog, rows, changes, noted):
    """Packed, what NetCDF writes in their place is 0.617 m/s, and xarray takes it for that."""
    speed = SPEED.copy()
    speed[0, :rows] = 17 - 32767 * 0.0005
    how = {"dtype": "int16", "scale_factor": 0.0005, "add_offset": 17.0} | changes
    fields = read(written(tmp_path, speed, {}, how))
    np.testing.assert_allclose(fields.wind, speed, atol=0.001)
    text = f"{rows * speed.shape[2]} values of wind_speed are -32767 as they are stored"
    assert (text in caplog.text) == noted
    assert ("nothing was written" in caplog.text) == noted


@pytest.mark.filterwarnings("ignore:saving variable wind_speed")  # it has no missing values
def test_invalid_values_are_not_noted_as_values(tmp_path, caplog):
    """They are missing, and what is cut off counts as nothing."""
    speed = SPEED.copy()
    speed[0, :2] = 17 - 32767 * 0.0005
    how = {"dtype": "int16", "scale_factor": 0.0005, "add_offset": 17.0}
    range_ = {"valid_min": np.int16(-32000)}
    assert read(written(tmp_path, speed, range_, how)).wind.shape[1] == SPEED.shape[1] - 2
    assert not caplog.messages


@pytest.mark.filterwarnings("ignore:saving variable terrain")  # it has no missing values
def test_the_least_of_values_packed_by_their_range_is_not_noted(tmp_path, caplog):
    """As ncpdq packs them: the least is -32767, the greatest 32767. Here the former is the sea."""
    ground = GROUND.copy()
    ground[:3] = 0.0
    scale, middle = ground.max() / 65534, ground.max() / 2
    file = made(ground=ground)
    how = {"dtype": "int16", "scale_factor": scale, "add_offset": middle}
    file.to_netcdf(tmp_path / "wind.nc", engine="h5netcdf", encoding={"terrain": how})
    assert (read(tmp_path / "wind.nc").terrain[:3] < 0.1).all()
    assert not caplog.messages


def test_heights_beyond_their_valid_range_are_none(tmp_path):
    ground = GROUND.copy()
    ground[5, 6] = -99.0
    limits = {"valid_min": -50.0}
    with pytest.raises(WindsrError, match="terrain has 1 missing values"):
        read(written(tmp_path, SPEED, {}, ground=ground, of_ground=limits))


def test_the_range_is_of_stored_numbers_if_it_has_their_type():
    limits = {"valid_range": np.array([100, 200], "i2")}
    assert valid_range(limits, PACKED) == pytest.approx((4.0, 5.0), abs=1e-3)
    limits = {"valid_min": np.float32(1.5), "valid_max": 2.5}
    assert valid_range(limits, PACKED) == pytest.approx((1.5, 2.5), abs=1e-3)
    assert valid_range({"valid_range": np.array([100, 200], "i2")}) == pytest.approx(
        (100, 200), abs=1e-3
    )
    assert valid_range({}) == (-np.inf, np.inf)


def test_stored_numbers_are_decoded():
    stored = np.array([[-32768, 0, 150], [7, 400, -1]], "i2")
    attributes = {
        "_FillValue": np.int16(-32768),
        "missing_value": np.array([7], "i2"),
        "scale_factor": 0.1,
        "add_offset": 2.0,
        "valid_max": np.int16(300),
    }
    values = decoded(stored, attributes)
    np.testing.assert_allclose(values, [[np.nan, 2.0, 17.0], [np.nan, np.nan, 1.9]])
    np.testing.assert_array_equal(decoded(stored, {}), stored)


def test_floats_of_which_nothing_is_said_are_not_copied():
    stored = np.ones((2, 3), "f4")
    assert decoded(stored, {"units": "m s-1"}) is stored
    assert decoded(stored.astype("u2"), {}).dtype == np.float64


def wrf(folder, u, v, attributes, *, ground=None, dy=1000.0):
    path = folder / "wrfout_d01"
    with h5py.File(path, "w") as file:
        file.attrs.update(DX=np.float32(1000.0), DY=np.float32(dy))
        for name, values in (("U10", u), ("V10", v)):
            file[name] = values
            file[name].attrs.update(units="m s-1", **attributes)
        file["HGT"] = np.stack([GROUND, GROUND if ground is None else ground]).astype("f4")
        file["HGT"].attrs["units"] = "m"
        days = (list(f"2017-06-0{day}_00:00:00") for day in (2, 3))
        file["Times"] = np.array(list(days), dtype="S1")
    return path


def test_wrf_output_may_be_packed(tmp_path):
    u, v = (np.round(100 * part * SPEED).astype("i2") for part in (0.6, -0.8))
    fields = read(wrf(tmp_path, u, v, {"scale_factor": 0.01}))
    np.testing.assert_allclose(fields.wind, SPEED, atol=0.01)


def test_fill_values_of_wrf_output_are_none(tmp_path):
    u, v = (part * SPEED for part in (0.6, -0.8))
    u[0, 5, 6] = v[0, 5, 6] = -70.0
    with pytest.raises(WindsrError, match="wind has 1 missing values"):
        read(wrf(tmp_path, u, v, {"_FillValue": -70.0}))


def test_a_nest_of_wrf_that_moves_is_refused(tmp_path):
    path = wrf(tmp_path, SPEED, 0 * SPEED, {}, ground=GROUND + 50.0)
    with pytest.raises(WindsrError, match="HGT changes by up to 50 from field to field"):
        read(path)
    assert read(path, Options(needs_terrain=False)).wind.shape == SPEED.shape


def test_the_two_spacings_of_wrf_output_are_those_of_its_axes(tmp_path):
    with pytest.raises(WindsrError, match="3000 m apart in y and 1000 m in x"):
        read(wrf(tmp_path, SPEED, 0 * SPEED, {}, dy=3000.0))


def test_a_terrain_file_is_not_passed_over(tmp_path):
    for path in (wrf(tmp_path, SPEED, 0 * SPEED, {}), toolkit(tmp_path)):
        with pytest.raises(WindsrError, match="--terrain-file is for NetCDF and GRIB2"):
            read(path, Options(spacing=2000.0, terrain=tmp_path / "terrain.nc"))


def toolkit(folder, value=725, times=(b"2012-01-01 00:00:00+00:00",), **attributes):
    lat, lon = np.meshgrid(40 + 0.02 * np.arange(9), -105 + 0.025 * np.arange(9), indexing="ij")
    meta = np.zeros(81, dtype=[("latitude", "f4"), ("longitude", "f4"), ("elevation", "f4")])
    meta["latitude"], meta["longitude"], meta["elevation"] = lat.ravel(), lon.ravel(), 1600
    with h5py.File(folder / "wtk.h5", "w") as file:
        stored = np.full((len(times), 81), 725, np.uint16)
        stored[0, 40] = value
        file["windspeed_10m"] = stored
        file["windspeed_10m"].attrs.update(scale_factor=100.0, units="m s-1", **attributes)
        file["meta"], file["time_index"] = meta, np.array(times)
    return folder / "wtk.h5"


def test_fill_values_of_the_wind_toolkit_are_none(tmp_path):
    path = toolkit(tmp_path, 6000, _FillValue=np.uint16(6000))
    with pytest.raises(WindsrError, match="lie in a hole of the field"):
        read(path, Options(spacing=2000.0))
    with pytest.raises(WindsrError, match="windspeed_10m is stored with an offset"):
        read(toolkit(tmp_path, adder=1.5), Options(spacing=2000.0))


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2012-01-01 00:00:00", "2012-01-01T00:00:00"),
        ("2012-01-01 00:00:00+00:00", "2012-01-01T00:00:00"),
        ("2012-01-01 00:00:00-06:00", "2012-01-01T06:00:00"),
        ("2012-01-01T03:00:00+0530", "2011-12-31T21:30:00"),
    ],
)
def test_times_of_the_wind_toolkit_are_in_utc(tmp_path, text, utc):
    path = toolkit(tmp_path, times=(text.encode(),))
    assert str(read(path, Options(spacing=2000.0)).times[0]) == utc
