"""Files as other models' archives have them: names, units, heights, order of dimensions, rims
without values; and what is refused about them.
"""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import xarray
from windsr import WindsrError, whole
from windsr.datasets import Options, from_dataset
from windsr.readers import read

TIMES = np.array(["2017-06-02T15", "2017-06-03T03"], dtype="datetime64[ns]")
AXES = {
    "time": TIMES,
    "y": ("y", np.arange(10) * 2000.0, {"units": "m"}),
    "x": ("x", np.arange(12) * 2000.0, {"units": "m"}),
}
SPEED = 4 + np.arange(2 * 10 * 12.0).reshape(2, 10, 12) % 7
GROUND = np.arange(120.0).reshape(10, 12)


def made(speed=SPEED, dims=("time", "y", "x"), ground=GROUND, **more):
    return xarray.Dataset(
        {
            "wind_speed": (dims, speed, {"units": "m s-1"}),
            "terrain": (("y", "x"), ground, {"units": "m"}),
        },
        coords=AXES,
    ).assign(more)


def test_ukv_is_found_by_standard_names():
    u = (("time", "y", "x"), np.full((2, 10, 12), 3.0))
    file = xarray.Dataset(
        {
            "a": (*u, {"standard_name": "x_wind", "units": "m s-1"}),
            "b": (u[0], u[1] + 1, {"standard_name": "y_wind", "units": "m s-1"}),
            "c": (("y", "x"), GROUND, {"standard_name": "surface_altitude", "units": "m"}),
        },
        coords=AXES,
    )
    fields = from_dataset(file, "it", Options())
    assert (fields.wind == 5.0).all()
    np.testing.assert_array_equal(fields.terrain, GROUND)


def test_arome_has_geopotential_degrees_and_a_rim_without_values():
    lat, lon = 45 + 0.025 * np.arange(30), 5 + 0.025 * np.arange(30)
    u = np.full((2, 30, 30), 6.0)
    u[:, :3], u[:, :, -4:] = np.nan, np.nan
    file = xarray.Dataset(
        {
            "u10": (("time", "latitude", "longitude"), u, {"units": "m s**-1"}),
            "v10": (("time", "latitude", "longitude"), u * 8 / 6, {"units": "m s**-1"}),
            "z": (("latitude", "longitude"), np.full((30, 30), 980.665), {"units": "m**2 s**-2"}),
        },
        coords={"time": TIMES, "latitude": lat, "longitude": lon},
    )
    fields = from_dataset(file, "it", Options(spacing=2500.0))
    np.testing.assert_allclose(fields.terrain, 100.0, rtol=1e-5)
    np.testing.assert_allclose(fields.wind, 10.0, rtol=1e-5)
    # 27 × 26 points have values: 72.3 × 49.1 km, of 80.6 × 57.0 km with the rim.
    assert fields.wind.shape[1:] == (29, 20)


def test_one_of_several_heights_is_taken_and_none_guessed():
    levels = np.stack([SPEED, SPEED + 3], axis=1)
    file = made(levels, ("time", "height", "y", "x")).assign_coords(height=[10.0, 100.0])
    for height, more in ((10, 0), (100, 3)):
        fields = from_dataset(file, "it", Options(height=height))
        np.testing.assert_allclose(fields.wind, SPEED + more)
    with pytest.raises(WindsrError, match=r"on 2 levels \(height: 10, 100\), none of them at 80 m"):
        from_dataset(file, "it", Options(height=80))
    with pytest.raises(WindsrError, match="without values"):
        from_dataset(file.drop_vars("height"), "it", Options())


@pytest.mark.parametrize("dims", [("y", "x", "time"), ("x", "time", "y"), ("time", "x", "y")])
def test_dimensions_come_in_any_order(dims):
    file = made()
    turned = file.assign(wind_speed=file.wind_speed.transpose(*dims))
    fields = from_dataset(turned, "it", Options())
    np.testing.assert_array_equal(fields.wind, SPEED.astype(np.float32))
    across = turned.assign(terrain=file.terrain.transpose("x", "y"))
    fields = from_dataset(across, "it", Options())
    np.testing.assert_array_equal(fields.wind, SPEED.astype(np.float32))
    np.testing.assert_array_equal(fields.terrain, GROUND.astype(np.float32))


def test_a_rim_without_values_is_cut():
    speed = SPEED.copy()
    speed[:, :2], speed[1, :, -1] = np.nan, np.nan
    fields = from_dataset(made(speed), "it", Options())
    assert fields.wind.shape == (2, 8, 11)
    assert fields.y[0] == 4000.0
    assert whole.cut(fields, 4).wind.shape == (2, 8, 8)


@pytest.mark.parametrize("spacing", [None, 1900.0])
@pytest.mark.parametrize(("row", "column"), [(5, 6), (1, 1), (8, 6), (2, 10)])
def test_a_hole_is_refused_wherever_it_is(row, column, spacing):
    """Half of the field could be cut off around it."""
    speed = SPEED.copy()
    speed[:, row, column] = np.nan
    words = "2 missing values" if spacing is None else "1 points inside have missing values"
    with pytest.raises(WindsrError, match=words):
        from_dataset(made(speed), "it", Options(spacing=spacing))


def test_terrain_by_time_is_the_first():
    file = made().drop_vars("terrain")
    ground = (("time", "y", "x"), np.stack([GROUND, GROUND]), {"units": "m"})
    fields = from_dataset(file.assign(orog=ground), "it", Options())
    np.testing.assert_array_equal(fields.terrain, GROUND)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            made(SPEED[:, 0], ("time", "x")),
            "a grid of rows and columns is needed|wind is on a grid",
        ),
        (made().drop_vars(("terrain", "x", "y")), "no terrain"),
        (made().drop_vars(("x", "y")), "where the points are cannot be known"),
        (
            made(u10=(("time", "y", "x"), SPEED), v10=(("time", "y", "xs"), SPEED)).drop_vars(
                "wind_speed"
            ),
            "bring both to the same points first",
        ),
    ],
)
def test_what_is_not_understood_is_refused_in_a_sentence(file, words):
    with pytest.raises(WindsrError, match=words):
        from_dataset(file, "it", Options())


@pytest.mark.parametrize(
    ("columns", "shape", "words"),
    [
        (("latitude", "longitude"), (2, 4), "'meta' lacks elevation"),
        (("latitude", "longitude", "elevation"), (2, 2, 2), "has times and sites"),
    ],
)
def test_a_wind_toolkit_file_of_another_form_is_refused_in_a_sentence(
    tmp_path, columns, shape, words
):
    with h5py.File(tmp_path / "wtk.h5", "w") as file:
        file["windspeed_10m"] = np.zeros(shape, np.uint16)
        file["meta"] = np.zeros(4, dtype=[(name, "f4") for name in columns])
        file["time_index"] = np.array([b"2012-01-01 00:00:00"] * 2)
    with pytest.raises(WindsrError, match=words):
        read(tmp_path / "wtk.h5", Options(spacing=2000.0))
