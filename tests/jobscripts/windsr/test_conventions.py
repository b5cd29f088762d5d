"""Data sets of other shapes, hemispheres, axis orders and units, made by public conventions (CF;
WMO's GRIB2), whose wind and terrain are linear functions of latitude and longitude: a reader that
turns, shifts or scales anything gives another answer. Two of them are trained on and sampled.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xarray
from windsr import WindsrError, output
from windsr.fields import Fields
from windsr.grids import EARTH_RADIUS_M
from windsr.places import unrotated
from windsr.readers import Options, from_dataset, read

from tests.jobscripts.windsr.test_cli import run
from tests.selection import every_change

KNOT = 1852 / 3600
FOOT = 0.3048
GRAVITY = 9.80665


class Linear:
    """Wind (m/s) and terrain (m) that are linear in latitude and longitude around a middle."""

    def __init__(self, lat: float, lon: float) -> None:
        self.lat, self.lon = lat, lon

    def wind(self, lat, lon, day: int = 0):
        return 12.0 + day + 3.0 * (lat - self.lat) - 1.5 * self._east(lon)

    def terrain(self, lat, lon):
        return 400.0 - 100.0 * (lat - self.lat) + 60.0 * self._east(lon)

    def _east(self, lon):
        return (lon - self.lon + 180.0) % 360.0 - 180.0

    def of(self, fields: Fields) -> tuple[np.ndarray, np.ndarray]:
        """Both at the points of fields, by their metres from the middle on the plane (the inverse
        of the stereographic projection; Snyder 1987, p. 159).
        """
        y, x = np.meshgrid(fields.y, fields.x, indexing="ij")
        far, middle = np.hypot(y, x), np.radians(self.lat)
        angle = 2 * np.arctan(far / 2 / EARTH_RADIUS_M)
        up = np.where(far > 0, y / np.where(far > 0, far, 1), 0.0)
        sine = np.cos(angle) * np.sin(middle) + up * np.sin(angle) * np.cos(middle)
        across = x * np.sin(angle)
        along = far * np.cos(middle) * np.cos(angle) - y * np.sin(middle) * np.sin(angle)
        lat, lon = np.degrees(np.arcsin(sine)), self.lon + np.degrees(np.arctan2(across, along))
        return self.wind(lat, lon), self.terrain(lat, lon)

    def check(self, fields: Fields, days: int = 2) -> None:
        wind, terrain = self.of(fields)
        assert len(fields.wind) == days
        for day in range(days):
            np.testing.assert_allclose(fields.wind[day], wind + day, atol=0.03)
        np.testing.assert_allclose(fields.terrain, terrain, atol=1.5)


# -- CF NetCDF --

NEW_ZEALAND = Linear(-41.5, 180.0)
"""The grid lies on both sides of 180° east."""
LATITUDES = -41.5 + 0.02 * np.arange(17.5, -18.0, -1.0)
LONGITUDES = (180.0 + 0.025 * np.arange(-23.5, 24.0) + 180.0) % 360.0 - 180.0
DAYS = np.array(["2021-03-04T12", "2021-03-05T12"], dtype="datetime64[ns]")


def new_zealand(folder, order=("lon", "time", "lat")):
    """Components in knots, from north to south, longitudes first; heights in feet in a file of
    their own, from south to north.
    """
    lat, lon = np.meshgrid(LATITUDES, LONGITUDES, indexing="ij")
    speed = np.stack([NEW_ZEALAND.wind(lat, lon, day) for day in range(2)]) / KNOT
    axes = {
        "time": DAYS,
        "lat": ("lat", LATITUDES, {"units": "degrees_north", "axis": "Y"}),
        "lon": ("lon", LONGITUDES, {"units": "degrees_east", "axis": "X"}),
        "height": ((), 32.80839895, {"units": "ft", "standard_name": "height"}),
    }
    parts = {
        name: (("time", "lat", "lon"), part * speed, {"standard_name": standard, "units": "kt"})
        for name, standard, part in (
            ("a", "eastward_wind", -0.6),
            ("b", "northward_wind", 0.8),
        )
    }
    xarray.Dataset(parts, axes).transpose(*order).to_netcdf(folder / "wind.nc")
    ground = {"units": "ft", "standard_name": "surface_altitude"}
    height = NEW_ZEALAND.terrain(lat, lon) / FOOT
    xarray.Dataset({"h": (("lat", "lon"), height, ground)}, {"lat": axes["lat"], "lon": axes["lon"]}
                   ).isel(lat=slice(None, None, -1)).to_netcdf(folder / "ground.nc")  # fmt: skip
    return folder / "wind.nc", folder / "ground.nc"


@pytest.mark.parametrize("order", list(itertools.permutations(("time", "lat", "lon"))))
def test_latitudes_may_fall_and_axes_be_in_any_order(tmp_path, order):
    wind, ground = new_zealand(tmp_path, order)
    fields = read(wind, Options(spacing=2000.0, terrain=ground))
    NEW_ZEALAND.check(fields)
    assert fields.wind.shape[1:] == (39, 49)
    without = read(wind, Options(spacing=2000.0, needs_terrain=False))
    np.testing.assert_array_equal(without.wind, fields.wind)
    assert not without.has_terrain
    assert not without.terrain.any()


POLE_NORTH, POLE_EAST = 39.25, -162.0
"""COSMO's rotated pole over Europe."""
ROTATED_NORTH, ROTATED_EAST = 0.05 * np.arange(-12, 13.0), 0.05 * np.arange(-15, 16.0)
ALPS = Linear(*(float(each[0, 0]) for each in unrotated(
    np.zeros((1, 1)), np.zeros((1, 1)), np.radians(POLE_NORTH), POLE_EAST)))  # fmt: skip


def test_the_middle_of_the_rotated_grid_is_where_geometry_says():
    """The rotated equator is a quarter of a circle from the pole."""
    assert (ALPS.lat, ALPS.lon) == pytest.approx((50.75, 18.0))
    lat, lon = unrotated(np.radians([[90.0]]), np.zeros((1, 1)), np.radians(POLE_NORTH), POLE_EAST)
    assert (lat[0, 0], lon[0, 0]) == pytest.approx((POLE_NORTH, POLE_EAST))


@pytest.mark.parametrize("with_degrees", [True, False])
@pytest.mark.parametrize("turn", [0.0, 25.0])
def test_a_rotated_pole(tmp_path, with_degrees, turn):
    """With latitudes and longitudes of each point, and with the pole alone; ``turn``: the
    longitude of the true north pole in the rotated grid.
    """
    grid = np.meshgrid(np.radians(ROTATED_NORTH), np.radians(ROTATED_EAST), indexing="ij")
    lat, lon = unrotated(*grid, np.radians(POLE_NORTH), POLE_EAST)
    mapping = {"grid_mapping": "pole"}
    file = xarray.Dataset(
        {
            "wind_speed": (
                ("time", "rlon", "rlat"),
                np.stack([3.6 * ALPS.wind(lat, lon, day).T for day in range(2)]),
                {"units": "km h-1", **mapping},
            ),
            "HSURF": (("rlat", "rlon"), ALPS.terrain(lat, lon), {"units": "m", **mapping}),
            "pole": ((), 0, {
                "grid_mapping_name": "rotated_latitude_longitude",
                "grid_north_pole_latitude": POLE_NORTH,
                "grid_north_pole_longitude": POLE_EAST,
                "north_pole_grid_longitude": turn,
            }),
        },
        {
            "time": DAYS,
            "rlat": ("rlat", ROTATED_NORTH,
                     {"units": "degrees", "standard_name": "grid_latitude"}),
            "rlon": ("rlon", ROTATED_EAST + turn,
                     {"units": "degrees", "standard_name": "grid_longitude"}),
        },
    )  # fmt: skip
    if with_degrees:
        file = file.assign_coords(
            lat=(("rlat", "rlon"), lat, {"units": "degrees_north"}),
            lon=(("rlat", "rlon"), lon, {"units": "degrees_east"}),
        )
    file.to_netcdf(tmp_path / "wind.nc")
    fields = read(tmp_path / "wind.nc", Options(spacing=6000.0))
    _check_around_its_middle(ALPS, fields, lat, lon)


@pytest.mark.parametrize("absent", ["grid_north_pole_latitude", "grid_north_pole_longitude"])
def test_a_rotated_pole_without_a_place_is_refused_in_a_sentence(absent):
    mapping = {
        "grid_mapping_name": "rotated_latitude_longitude",
        "grid_north_pole_latitude": POLE_NORTH,
        "grid_north_pole_longitude": POLE_EAST,
    }
    del mapping[absent]
    attributes = {"units": "m/s", "grid_mapping": "pole"}
    axes = {
        name: (name, values, {"units": "degrees", "standard_name": standard})
        for name, values, standard in (
            ("rlat", ROTATED_NORTH, "grid_latitude"),
            ("rlon", ROTATED_EAST, "grid_longitude"),
        )
    }
    file = xarray.Dataset(
        {
            "wind_speed": (("time", "rlat", "rlon"), np.ones((2, 25, 31)), attributes),
            "pole": ((), 0, mapping),
        },
        {"time": DAYS, **axes},
    )
    with pytest.raises(WindsrError, match=f"grid of a rotated pole, and pole lacks {absent}, so"):
        from_dataset(file, "it", Options(spacing=6000.0, needs_terrain=False))


def _check_around_its_middle(linear: Linear, fields: Fields, lat, lon) -> None:
    """As ``check``, for a grid whose mean is beside its middle."""
    moved = Linear(float(lat.mean()), float(lon.mean()))
    fields_wind, fields_terrain = moved.of(fields)
    more_wind = linear.wind(moved.lat, moved.lon) - 12.0
    more_terrain = linear.terrain(moved.lat, moved.lon) - 400.0
    for day in range(2):
        np.testing.assert_allclose(fields.wind[day], fields_wind + more_wind + day, atol=0.03)
    np.testing.assert_allclose(fields.terrain, fields_terrain + more_terrain, atol=1.5)


# -- GRIB2 --

TASMANIA = Linear(-42.0, 146.5)
ROWS, COLUMNS = 36, 44
GRID_NORTH = -42.0 + 0.025 * (np.arange(ROWS) - (ROWS - 1) / 2)
GRID_EAST = 146.5 + 0.03 * (np.arange(COLUMNS) - (COLUMNS - 1) / 2)
Scan = tuple[int, int, int, int]
"""WMO's flag table 3.4: iScansNegatively, jScansPositively, jPointsAreConsecutive,
alternativeRowScanning.
"""
SCANS = [scan for scan in itertools.product((0, 1), repeat=4) if scan[2:] != (1, 1)]


def message(file, keys, values, north, east, scan: Scan) -> None:
    """Write values [south to north, west to east] in an order of points."""
    import eccodes

    west, up, by_column, alternating = scan
    lat, lon = north if up else north[::-1], east[::-1] if west else east
    ordered = values if up else values[::-1]
    ordered = ordered[:, ::-1] if west else ordered
    ordered = (ordered.T if by_column else ordered).copy()
    if alternating:
        ordered[1::2] = ordered[1::2, ::-1].copy()
    handle = eccodes.codes_grib_new_from_samples("GRIB2")
    keys = {
        "gridType": "regular_ll",
        "shapeOfTheEarth": 6,
        "Ni": len(east),
        "Nj": len(north),
        "latitudeOfFirstGridPointInDegrees": lat[0],
        "latitudeOfLastGridPointInDegrees": lat[-1],
        "longitudeOfFirstGridPointInDegrees": lon[0] % 360.0,
        "longitudeOfLastGridPointInDegrees": lon[-1] % 360.0,
        "iDirectionIncrementInDegrees": abs(east[1] - east[0]),
        "jDirectionIncrementInDegrees": abs(north[1] - north[0]),
        "iScansNegatively": west,
        "jScansPositively": up,
        "jPointsAreConsecutive": by_column,
        "alternativeRowScanning": alternating,
        "dataTime": 1200,
        "bitsPerValue": 20,
    } | keys
    for key, value in keys.items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set_values(handle, ordered.ravel())
    eccodes.codes_write(handle, file)
    eccodes.codes_release(handle)


AT_10_M = {
    "typeOfFirstFixedSurface": 103,
    "scaleFactorOfFirstFixedSurface": 0,
    "scaledValueOfFirstFixedSurface": 10,
    "parameterCategory": 2,
}
GEOPOTENTIAL = {"typeOfFirstFixedSurface": 1, "parameterCategory": 3, "parameterNumber": 4}
ROTATED = {
    "gridType": "rotated_ll",
    "latitudeOfSouthernPoleInDegrees": -POLE_NORTH,
    "longitudeOfSouthernPoleInDegrees": POLE_EAST + 180.0,
    "angleOfRotationInDegrees": 0,
}


def grib(path, linear, lat, lon, axes, scans, grid=None):
    """Components of two days and a geopotential; ``scans``: of the wind and of the terrain."""
    with path.open("wb") as file:
        for day in range(2):
            for number, part in ((2, 0.6), (3, -0.8)):
                keys = {**(grid or {}), **AT_10_M, "parameterNumber": number}
                keys["dataDate"] = 20210304 + day
                message(file, keys, part * linear.wind(lat, lon, day), *axes, scans[0])
        keys = {**(grid or {}), **GEOPOTENTIAL, "dataDate": 20210304}
        message(file, keys, GRAVITY * linear.terrain(lat, lon), *axes, scans[1])
    return path


def tasmania(folder, scans=((1, 0, 1, 0), (0, 1, 0, 1))):
    lat, lon = np.meshgrid(GRID_NORTH, GRID_EAST, indexing="ij")
    return grib(folder / "wind.grib2", TASMANIA, lat, lon, (GRID_NORTH, GRID_EAST), scans)


@pytest.mark.parametrize("scan", SCANS)
def test_grib_in_each_order_of_points(tmp_path, scan):
    file = tasmania(tmp_path, (scan, (0, 1, 0, 0)))
    TASMANIA.check(read(file, Options(spacing=3000.0)))


@pytest.mark.parametrize("scan", [(0, 0, 1, 1), (1, 1, 1, 1)])
def test_an_order_that_eccodes_does_not_decode_is_refused(tmp_path, scan):
    file = tasmania(tmp_path, (scan, scan))
    with pytest.raises(WindsrError, match="column by column and every other column backwards"):
        read(file, Options(spacing=3000.0))


ORDERS = [
    (scan, ground)
    for scan in ((0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 0))
    for ground in ((0, 0, 0, 0), (1, 1, 0, 0))
]


@pytest.mark.parametrize(("scan", "ground"), every_change(ORDERS, ORDERS[-1]))
def test_a_rotated_grib_whose_terrain_is_in_another_order(tmp_path, scan, ground):
    grid = np.meshgrid(np.radians(ROTATED_NORTH), np.radians(ROTATED_EAST), indexing="ij")
    lat, lon = unrotated(*grid, np.radians(POLE_NORTH), POLE_EAST)
    axes = (ROTATED_NORTH, ROTATED_EAST)
    file = grib(tmp_path / "wind.grib2", ALPS, lat, lon, axes, (scan, ground), ROTATED)
    fields = read(file, Options(spacing=6000.0))
    _check_around_its_middle(ALPS, fields, lat, lon)


# -- trained and sampled --


@pytest.mark.slow
@pytest.mark.parametrize("data", ["netcdf", "grib"])
def test_training_and_sampling_keep_what_is_where(tmp_path, data):
    """Coarse values are means of blocks, and fields linear, so that the coarse input and the block
    means of what is made are known at each place.
    """
    if data == "netcdf":
        linear, (wind, ground) = NEW_ZEALAND, new_zealand(tmp_path)
        files = ("--data", wind, "--terrain-file", ground, "--spacing", 2000)
    else:
        linear, files = TASMANIA, ("--data", tasmania(tmp_path), "--spacing", 2500)
    model = tmp_path / "run" / "model.safetensors"
    tiny = ("--preset", "tiny", "--steps", 3)
    run("train", tmp_path / "run", "--method", "unet", *tiny, *files)
    run("sample", tmp_path / "drawn", "--model", model, "--part", "all", "--members", 1, *files)
    drawn = output.read(tmp_path / "drawn" / "samples.nc")
    assert drawn.times.astype("datetime64[D]").astype(str).tolist() == ["2021-03-04", "2021-03-05"]
    fields = Fields(drawn.truth, drawn.terrain, drawn.times, drawn.y, drawn.x, "drawn")
    linear.check(fields)
    rows, columns = (4 * each for each in drawn.low.shape[1:])
    assert (rows, columns) == drawn.truth.shape[1:]
    blocks = linear.of(fields)[0].reshape(rows // 4, 4, columns // 4, 4).mean(axis=(1, 3))
    for day in range(2):
        np.testing.assert_allclose(drawn.low[day], blocks + day, atol=0.03)
        made = drawn.members[day, 0].reshape(rows // 4, 4, columns // 4, 4).mean(axis=(1, 3))
        np.testing.assert_allclose(made, drawn.low[day], atol=1e-3)
