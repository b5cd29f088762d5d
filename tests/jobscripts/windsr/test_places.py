"""Heights, winds and coarse fields belong together by their coordinates."""

import dataclasses

import numpy as np
import pytest
import xarray
from windsr import WindsrError, queue, readers
from windsr.datasets import Options, from_dataset
from windsr.grids import EARTH_RADIUS_M
from windsr.places import brought_to, degrees_of, places_of

from tests.jobscripts.windsr.test_other_models import GROUND, SPEED, made

KM = 1000.0
ROWS, COLUMNS = GROUND.shape


def wind_file(folder, **changes):
    """Winds without heights, south to north."""
    path = folder / "wind.nc"
    made().drop_vars("terrain").assign_coords(**changes).to_netcdf(path)
    return path


def terrain_file(folder, ground, name="terrain.nc", **coords):
    path = folder / name
    file = made()
    y, x = file.y, file.x
    array = xarray.DataArray(
        ground,
        {
            "y": ("y", coords.get("y", y.to_numpy()), y.attrs),
            "x": ("x", coords.get("x", x.to_numpy()), x.attrs),
        },
        ("y", "x"),
        attrs={"units": "m"},
    )
    array.to_dataset(name="orography").to_netcdf(path)
    return path


def heights(wind, terrain):
    return readers.read(wind, Options(terrain=terrain)).terrain


@pytest.mark.parametrize("turned", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_a_terrain_in_another_order_is_the_right_way_up(tmp_path, turned):
    y, x = made().y.to_numpy(), made().x.to_numpy()
    rows, columns = turned
    file = terrain_file(tmp_path, GROUND[::rows, ::columns], y=y[::rows], x=x[::columns])
    np.testing.assert_array_equal(heights(wind_file(tmp_path), file), GROUND)
    across = xarray.open_dataset(file).transpose("x", "y")
    across.to_netcdf(tmp_path / "across.nc")
    np.testing.assert_array_equal(heights(wind_file(tmp_path), tmp_path / "across.nc"), GROUND)


def test_a_terrain_of_a_larger_area_is_cut(tmp_path):
    y, x = made().y.to_numpy(), made().x.to_numpy()
    step = y[1] - y[0]
    rows = np.arange(-3, ROWS + 2) * step + y[0]
    columns = np.arange(-1, COLUMNS + 4) * step + x[0]
    ground = np.full((len(rows), len(columns)), 999.0)
    ground[3 : 3 + ROWS, 1 : 1 + COLUMNS] = GROUND
    file = terrain_file(tmp_path, ground, y=rows, x=columns)
    np.testing.assert_array_equal(heights(wind_file(tmp_path), file), GROUND)


@pytest.mark.parametrize("axis", ["y", "x"])
@pytest.mark.parametrize("shift", [0.4, 1, 100])
def test_a_terrain_elsewhere_is_refused(tmp_path, axis, shift):
    values = made()[axis].to_numpy()
    step = values[1] - values[0]
    file = terrain_file(tmp_path, GROUND, **{axis: values + shift * step})
    with pytest.raises(WindsrError, match=r"other points than the wind: up to .* km from"):
        heights(wind_file(tmp_path), file)


@pytest.mark.parametrize("times", [3, 20])
def test_a_finer_terrain_is_not_taken_point_by_point(tmp_path, times):
    """As a model of the ground at 100 m below winds at 2 km: each would get the height of one of
    many points.
    """
    y, x = (made()[axis].to_numpy() for axis in ("y", "x"))
    step = (y[1] - y[0]) / times
    steps = 0.5 + np.arange(-times, times * max(len(y), len(x)) + 1)
    rows, columns = (each[0] + step * steps for each in (y, x))
    file = terrain_file(tmp_path, np.ones((len(rows), len(columns))), y=rows, x=columns)
    with pytest.raises(WindsrError, match=r"a point every .* km, and the wind one .* Average it"):
        heights(wind_file(tmp_path), file)


@pytest.mark.parametrize("times", [2, 3, 20])
def test_a_wind_at_some_points_of_its_terrain_has_their_heights(tmp_path, caplog, times):
    """As if every second point of a model's wind was taken, and its terrain left as it is."""
    y, x = (made()[axis].to_numpy() for axis in ("y", "x"))
    step = (y[1] - y[0]) / times
    rows, columns = (each[0] + step * np.arange(times * len(each)) for each in (y, x))
    ground = np.full((len(rows), len(columns)), 999.0)
    ground[::times, ::times] = GROUND
    file = terrain_file(tmp_path, ground, y=rows, x=columns)
    np.testing.assert_array_equal(heights(wind_file(tmp_path), file), GROUND)
    (note,) = caplog.messages
    assert "a point every" in note
    assert "average the terrain" in note


@pytest.mark.parametrize("spacing", [250.0, 800.0, 2000.0])
def test_a_grid_is_not_finer_because_its_degrees_are_rounded(spacing, caplog):
    """Several of its points have the same latitude or longitude to 0.01 degrees."""
    steps = spacing * np.arange(40)
    metres = np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1)
    lat, lon = 45 + metres[..., 0] / 111_200, 5 + metres[..., 1] / 78_600
    values = np.arange(metres[..., 0].size).reshape(lat.shape)

    def places(decimals):
        north, east = np.radians(lat.round(decimals)), np.radians(lon.round(decimals))
        vector = (np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north))
        return {"projected": metres, "geographic": EARTH_RADIUS_M * np.stack(vector, axis=-1)}

    np.testing.assert_array_equal(brought_to(places(6), places(2), values, "it"), values)
    assert not caplog.messages


def test_a_terrain_that_says_nothing_of_its_place_is_refused(tmp_path):
    file = xarray.Dataset({"orography": (("y", "x"), GROUND, {"units": "m"})})
    file.to_netcdf(tmp_path / "bare.nc")
    with pytest.raises(WindsrError, match="does not say where its points are"):
        heights(wind_file(tmp_path), tmp_path / "bare.nc")


LAT, LON = -40 - 0.1 * np.arange(ROWS), 355 + 0.1 * np.arange(COLUMNS)


def degrees(name, values, lat, lon, dims=("lat", "lon")):
    return xarray.Dataset(
        {name: (("time", *dims) if values.ndim == 3 else dims, values, {})},
        {
            "lat": ("lat", lat, {"units": "degrees_north"}),
            "lon": ("lon", lon, {"units": "degrees_east"}),
            **({"time": made().time} if values.ndim == 3 else {}),
        },
    )


@pytest.mark.parametrize("lon", [LON, LON - 360, LON % 360])
def test_degrees_may_count_from_elsewhere_and_in_any_order(tmp_path, lon):
    """Southern hemisphere, descending latitudes, across the meridian of Greenwich."""
    speed = made().wind_speed.to_numpy()
    winds = degrees("wind_speed", speed, LAT, LON)
    winds.wind_speed.attrs["units"] = "m s-1"
    winds.to_netcdf(tmp_path / "wind.nc")
    degrees("orography", GROUND[::-1], LAT[::-1], lon).to_netcdf(tmp_path / "terrain.nc")
    options = Options(spacing=9000.0, terrain=tmp_path / "terrain.nc")
    own = winds.assign(orography=(("lat", "lon"), GROUND))
    own.to_netcdf(tmp_path / "own.nc")
    expected = readers.read(tmp_path / "own.nc", Options(spacing=9000.0))
    fields = readers.read(tmp_path / "wind.nc", options)
    np.testing.assert_array_equal(fields.terrain, expected.terrain)
    np.testing.assert_array_equal(fields.wind, expected.wind)


def test_a_rotated_pole_is_compared_by_its_true_latitudes(tmp_path):
    rlat, rlon = np.meshgrid(0.1 * np.arange(ROWS), 0.1 * np.arange(COLUMNS), indexing="ij")
    lat, lon = 45 + rlat + 0.02 * rlon, 5 + rlon - 0.03 * rlat

    def file(name, values, lat, lon, dims):
        coords = {"lat": (dims[-2:], lat, {"units": "degrees_north"})}
        coords["lon"] = (dims[-2:], lon, {"units": "degrees_east"})
        for dim, count in zip(dims[-2:], lat.shape, strict=True):
            coords[dim] = (dim, 0.1 * np.arange(count), {"units": "degrees"})
        return xarray.Dataset({name: (dims, values)}, coords)

    winds = file(
        "wind_speed", made().wind_speed.to_numpy(), lat, lon, ("time", "rlat", "rlon")
    ).assign_coords(time=made().time)
    turned = file("orography", GROUND[::-1], lat[::-1], lon[::-1], ("rlat", "rlon"))
    values = brought_to(
        places_of(winds, winds.wind_speed),
        places_of(turned, turned.orography),
        turned.orography.to_numpy(),
        "it",
    )
    np.testing.assert_array_equal(values, GROUND)


def test_a_terrain_in_the_same_file_with_dimensions_of_its_own(tmp_path):
    y, x = made().y, made().x
    file = made().drop_vars("terrain")
    file["orography"] = (("y2", "x2"), GROUND[::-1], {"units": "m"})
    file = file.assign_coords(
        y2=("y2", y.to_numpy()[::-1], y.attrs), x2=("x2", x.to_numpy(), x.attrs)
    )
    file.to_netcdf(tmp_path / "file.nc")
    np.testing.assert_array_equal(readers.read(tmp_path / "file.nc").terrain, GROUND)


def test_coarse_fields_elsewhere_are_refused(tmp_path):
    made().to_netcdf(tmp_path / "fine.nc")
    fine = readers.read(tmp_path / "fine.nc")
    coarse = dataclasses.replace(
        fine,
        wind=fine.wind[:, ::2, ::2],
        terrain=fine.terrain[::2, ::2],
        y=fine.y.reshape(-1, 2).mean(axis=1),
        x=fine.x.reshape(-1, 2).mean(axis=1),
    )
    assert queue.from_coarse(coarse, fine, 2).low.shape == (2, ROWS // 2, COLUMNS // 2)
    for axis in ("y", "x"):
        shifted = dataclasses.replace(coarse, **{axis: getattr(coarse, axis) + 250 * KM})
        with pytest.raises(WindsrError, match=f"up to 250 km in {axis}"):
            queue.from_coarse(shifted, fine, 2)


@pytest.mark.parametrize("moved", [0.0, 0.018, 5.0])
def test_metres_from_two_corners_are_not_the_same_place(tmp_path, moved):
    """y and x count from the corner of each file; latitudes and longitudes say where that is."""

    def file(north):
        lat, lon = np.meshgrid(
            50 + north + 0.018 * np.arange(ROWS), 10 + 0.028 * np.arange(COLUMNS), indexing="ij"
        )
        return made().assign_coords(
            lat=(("y", "x"), lat, {"units": "degrees_north"}),
            lon=(("y", "x"), lon, {"units": "degrees_east"}),
        )

    file(0.0).drop_vars("terrain").to_netcdf(tmp_path / "wind.nc")
    file(moved).drop_vars("wind_speed").to_netcdf(tmp_path / "terrain.nc")
    if not moved:
        np.testing.assert_array_equal(
            heights(tmp_path / "wind.nc", tmp_path / "terrain.nc"), GROUND
        )
        return
    with pytest.raises(WindsrError, match="other points than the wind"):
        heights(tmp_path / "wind.nc", tmp_path / "terrain.nc")


@pytest.mark.parametrize("moved_rows", [0, 1])
@pytest.mark.parametrize("decimals", [2, 6])
def test_latitudes_and_longitudes_may_be_rounded(tmp_path, moved_rows, decimals):
    """Both files have y and x of one projected grid. If their degrees lie a row apart, y counts
    from the corner of each file.
    """
    rows, columns = np.meshgrid(np.arange(ROWS), np.arange(COLUMNS), indexing="ij")

    def file(rows, decimals):
        lat = 50.0013 + 0.0179 * rows + 0.0011 * columns
        lon = 10.0027 + 0.0277 * columns - 0.0009 * rows
        return made().assign_coords(
            lat=(("y", "x"), lat.round(decimals), {"units": "degrees_north"}),
            lon=(("y", "x"), lon.round(decimals), {"units": "degrees_east"}),
        )

    file(rows, 6).drop_vars("terrain").to_netcdf(tmp_path / "wind.nc")
    ground = file(rows + moved_rows, decimals).drop_vars("wind_speed").isel(y=slice(None, None, -1))
    ground.to_netcdf(tmp_path / "terrain.nc")
    if not moved_rows:
        np.testing.assert_array_equal(
            heights(tmp_path / "wind.nc", tmp_path / "terrain.nc"), GROUND
        )
        return
    with pytest.raises(WindsrError, match="other points than the wind"):
        heights(tmp_path / "wind.nc", tmp_path / "terrain.nc")


X_FIRST = {
    "standard names": ("a", "b", "projection_x_coordinate", "projection_y_coordinate"),
    "axes": ("a", "b", None, None),
    "names": ("easting", "northing", None, None),
    "names of files": ("xc", "yc", None, None),
}


@pytest.mark.parametrize("needs_terrain", [True, False])
@pytest.mark.parametrize("case", X_FIRST)
def test_columns_may_come_first(case, needs_terrain):
    east, north, *standards = X_FIRST[case]
    file = made().transpose("time", "x", "y").rename(x=east, y=north)
    for dim, standard, axis in zip((east, north), standards, "XY", strict=True):
        if standard is not None:
            file[dim].attrs["standard_name"] = standard
        if case == "axes":
            file[dim].attrs["axis"] = axis
    fields = from_dataset(file, "it", Options(needs_terrain=needs_terrain))
    np.testing.assert_array_equal(fields.wind, made().wind_speed)
    if needs_terrain:
        np.testing.assert_array_equal(fields.terrain, GROUND)


@pytest.mark.parametrize("units", ["m2 s-2", "m"])
def test_what_lies_on_levels_of_pressure_is_no_terrain(units):
    """The geopotential of 1,000 and 850 hPa is a possible height of the ground."""
    file = made().drop_vars("terrain")
    z = np.stack([np.full(GROUND.shape, 100.0), np.full(GROUND.shape, 1400.0)])
    levels = {"plev": ("plev", [1000.0, 850.0], {"units": "hPa"})}
    attributes = {"units": units, "standard_name": "geopotential"}
    both = file.assign(z=(("plev", "y", "x"), z, attributes)).assign_coords(levels)
    height = (("y", "x"), GROUND, {"units": "m", "standard_name": "surface_altitude"})
    for each in (both, both.isel(plev=[0])):
        with pytest.raises(WindsrError, match="it has no terrain"):
            from_dataset(each, "it", Options())
        np.testing.assert_array_equal(
            from_dataset(each.assign(h=height), "it", Options()).terrain, GROUND
        )


def test_a_file_of_one_level_of_pressure_is_no_terrain_file(tmp_path):
    z = made().rename(terrain="z").drop_vars("wind_speed").isel(time=0)
    z = z.assign_coords(plev=((), 1000.0, {"units": "hPa"}))
    z.to_netcdf(tmp_path / "z.nc")
    with pytest.raises(WindsrError, match=r"z\.nc has no terrain"):
        heights(wind_file(tmp_path), tmp_path / "z.nc")


@pytest.mark.parametrize("dims", [("time", "y", "x"), ("y", "x", "time"), ("x", "time", "y")])
def test_a_terrain_by_time_is_the_same_at_each(dims):
    file = made().drop_vars("terrain")

    def orog(second):
        both = np.stack([GROUND, second])
        array = xarray.DataArray(both, dims=("time", "y", "x"), attrs={"units": "m"})
        return file.assign(orog=array.transpose(*dims))

    steady = orog(GROUND + 0.1)
    np.testing.assert_array_equal(from_dataset(steady, "it", Options()).terrain, GROUND)
    with pytest.raises(WindsrError, match="the terrain orog changes by up to 50 from field to"):
        from_dataset(orog(GROUND + 50), "it", Options())


def test_a_coordinate_called_as_a_terrain_is_none():
    file = made().rename(terrain="h").assign_coords(z=("z", [10.0]))
    file.h.attrs["standard_name"] = "surface_altitude"
    np.testing.assert_array_equal(from_dataset(file, "it", Options()).terrain, GROUND)


@pytest.mark.parametrize("name", ["surface_altitude", "orog", "HSURF", "h"])
def test_a_terrain_may_be_a_coordinate_of_the_wind(tmp_path, name):
    file = made().rename(terrain=name).set_coords(name)
    if name == "h":
        file.h.attrs["standard_name"] = "surface_altitude"
    np.testing.assert_array_equal(from_dataset(file, "it", Options()).terrain, GROUND)
    file.to_netcdf(tmp_path / "ground.nc")
    np.testing.assert_array_equal(heights(wind_file(tmp_path), tmp_path / "ground.nc"), GROUND)


def test_fields_that_are_cut_say_so():
    speed = SPEED.copy()
    speed[:, :2] = np.nan
    fields = from_dataset(made(speed), "it", Options())
    assert fields.source == "it, cut to the 8 × 12 points with values"


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("units", ["radian", "radians", "rad"])
def test_latitudes_and_longitudes_may_be_in_radians(dims, units):
    """Taken for degrees they would be 57 times nearer to each other."""
    north, east = np.meshgrid(50 + np.arange(ROWS) / 50, 5 + np.arange(COLUMNS) / 30, indexing="ij")
    places = {"lat": ("y", north[:, 0]), "lon": ("x", east[0])}
    if dims == 2:
        places = {"lat": (("y", "x"), north), "lon": (("y", "x"), east)}
    file = made().assign_coords(
        {name: (dim, np.radians(each), {"units": units}) for name, (dim, each) in places.items()}
    )
    lat, lon = degrees_of(file, file.wind_speed)
    np.testing.assert_allclose(lat, north)
    np.testing.assert_allclose(lon, east)


@pytest.mark.parametrize("first", [(50.0, 5.0), (0.0, 25.0), (5.0, 0.0)])
def test_degrees_are_no_radians_though_their_units_say_so(first, caplog):
    """As if a file's values were converted, and its attributes were not. Near the equator, or
    Greenwich, those of one direction alone could be radians.
    """
    north, east = first[0] + np.arange(ROWS) / 50, first[1] + np.arange(COLUMNS) / 30
    units = {"units": "radian"}
    file = made().assign_coords(lat=("y", north, units), lon=("x", east, units))
    lat, lon = degrees_of(file, file.wind_speed)
    np.testing.assert_array_equal(lat[:, 0], north)
    np.testing.assert_array_equal(lon[0], east)
    assert "are taken to be in degrees" in caplog.text
