"""Uses beside the usual one: one day, no terrain, wind at another height, more nodes than patches,
any number of steps, one component.
"""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import xarray
from windsr import WindsrError, checkpoint, cli, output, pictures, train
from windsr.datasets import Options, from_dataset
from windsr.fields import split_by_day
from windsr.readers import read

from tests.jobscripts.windsr.test_cli import run
from tests.jobscripts.windsr.test_other_models import GROUND, SPEED, made

TINY = ("--method", "srcnn", "--preset", "tiny")


def file_of(path, days=2, height=None, terrain=True):
    """Two fields a day of 16 × 20 points."""
    hours = np.arange("2021-03-04", "2021-03-09", 12, dtype="datetime64[h]")[: 2 * days]
    rng = np.random.default_rng(4)
    axes = {
        "time": hours.astype("datetime64[ns]"),
        "y": ("y", np.arange(16) * 2000.0, {"units": "m"}),
        "x": ("x", np.arange(20) * 2000.0, {"units": "m"}),
    }
    if height is not None:
        axes["height"] = ((), float(height), {"units": "m"})
    wind = rng.uniform(2, 9, (len(hours), 16, 20))
    file = xarray.Dataset({"wind_speed": (("time", "y", "x"), wind, {"units": "m s-1"})}, axes)
    if terrain:
        file["terrain"] = (("y", "x"), rng.uniform(0, 500, (16, 20)), {"units": "m"})
    file.to_netcdf(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that was trained on wind at 10 m over terrain."""
    folder = tmp_path_factory.mktemp("uses")
    run("train", folder / "run", *TINY, "--steps", 2, "--data", file_of(folder / "wind.nc"))
    return folder / "run" / "model.safetensors"


def refusal(*words):
    with pytest.raises(SystemExit) as ended:
        run(*words)
    return str(ended.value.code)


def test_one_day_can_be_made_fine(tmp_path, model):
    data = file_of(tmp_path / "day.nc", days=1)
    output_text = refusal("sample", tmp_path / "test", "--model", model, "--data", data)
    assert "1 day(s), all held out for the test" in output_text
    assert "sample --part all" in output_text
    run("sample", tmp_path / "all", "--model", model, "--data", data, "--part", "all",
        "--members", 1)  # fmt: skip
    drawn = output.read(tmp_path / "all" / "samples.nc")
    truth = xarray.open_dataset(data).wind_speed
    np.testing.assert_allclose(drawn.truth, truth, rtol=1e-6)


def test_all_days_stay_in_their_order(tmp_path, model):
    data = file_of(tmp_path / "days.nc", days=4)
    run("sample", tmp_path / "all", "--model", model, "--data", data, "--part", "all",
        "--members", 1, "--test-day", "2021-03-05")  # fmt: skip
    drawn = output.read(tmp_path / "all" / "samples.nc")
    file = xarray.open_dataset(data)
    assert (drawn.times == file.time.to_numpy()).all()
    np.testing.assert_allclose(drawn.truth, file.wind_speed, rtol=1e-6)


def test_times_may_have_gaps_and_no_order_and_come_twice(tmp_path, model):
    """Each field is made fine on its own, and an observation is for each field of its time."""
    in_order = xarray.open_dataset(file_of(tmp_path / "days.nc", days=4)).load()
    others = in_order.isel(time=[6, 0, 0, 3])
    others.to_netcdf(tmp_path / "others.nc")
    when = str(in_order.time.to_numpy()[0])[:19]
    table = tmp_path / "stations.csv"
    table.write_text(f"time,y,x,wind_speed\n{when},8000,8000,20\n")
    drawn = {}
    for name in ("days", "others"):
        run("sample", tmp_path / name, "--model", model, "--data", tmp_path / f"{name}.nc",
            "--part", "all", "--members", 1)  # fmt: skip
        result = tmp_path / f"{name}-observed.nc"
        run("assimilate", tmp_path / name / "samples.nc", table, result)
        drawn[name] = output.read(result)
    assert (drawn["others"].times == others.time.to_numpy()).all()
    for name in ("members", "truth", "mask"):
        expected = getattr(drawn["days"], name)[[6, 0, 0, 3]]
        np.testing.assert_allclose(getattr(drawn["others"], name), expected, atol=1e-5)
    assert [bool(mask.any()) for mask in drawn["others"].mask] == [False, True, True, False]


def test_wind_at_50_m_is_not_called_wind_at_10_m(tmp_path, model, capsys):
    data = file_of(tmp_path / "wind.nc", height=50)
    output_text = refusal("sample", tmp_path / "ten", "--model", model, "--data", data)
    assert (
        "wind_speed is on 50 m (height), none of them at 10 m; say which with --height"
        in output_text
    )
    words = ("--model", model, "--data", data, "--height", 50, "--members", 1)
    run("sample", tmp_path / "fifty", *words)
    output_text = capsys.readouterr().out
    assert "trained on wind at 10 m, and these fields are at 50 m" in output_text
    with xarray.open_dataset(tmp_path / "fifty" / "samples.nc") as file:
        assert float(file.height) == 50.0
        assert file.wind_speed.attrs["long_name"] == "50 m wind speed, super-resolved"
    assert output.read(tmp_path / "fifty" / "samples.nc").height == 50.0


def test_pictures_say_the_height(tmp_path, monkeypatch):
    entry = {"at": [0.0, 1.0], "share": 1.0, "truth": [0.0, 1.0]}
    figures = []
    monkeypatch.setattr(pictures, "_done", lambda figure, path: figures.append(figure) or path)
    pictures.distributions(tmp_path / "cdf.png", {"hills": entry}, 50.0)
    assert figures[0].axes[0].get_xlabel() == "50 m wind, m/s"
    fields = output.SampledFields(
        np.ones((1, 1, 8, 8), np.float32), np.zeros((8, 8), np.float32),
        np.array(["2021-03-04"], "datetime64[s]"), np.arange(8.0), np.arange(8.0),
        np.ones((1, 2, 2), np.float32), height=50.0, has_terrain=False,
    )  # fmt: skip
    pictures.fields(tmp_path / "fields.png", fields, 0)
    assert figures[1].get_suptitle().startswith("Wind at 50 m, 2021-03-04")
    assert "terrain" not in [axes.get_title() for axes in figures[1].axes]


@pytest.mark.parametrize(
    ("names", "height", "speed"),
    [
        ({"u10": 3, "v10": 4, "u50": 6, "v50": 8}, 10, 5.0),
        ({"u10": 3, "v10": 4, "u50": 6, "v50": 8}, 50, 10.0),
        ({"ws10": 5, "wind_speed_100m": 7}, 100, 7.0),
    ],
)
def test_names_that_say_a_height_mean_it(names, height, speed):
    variables = {n: (("time", "y", "x"), SPEED * 0 + v, {"units": "m/s"}) for n, v in names.items()}
    file = made().drop_vars("wind_speed").assign(variables)
    fields = from_dataset(file, "it", Options(height=height))
    assert (fields.wind == speed).all()
    assert fields.height == height


def test_a_file_of_another_height_says_which_it_has():
    file = made().drop_vars("wind_speed")
    file = file.assign(ws10=(("time", "y", "x"), SPEED, {"units": "m/s"}))
    with pytest.raises(WindsrError, match=r"no wind at 50 m, but ws10; say which with --height"):
        from_dataset(file, "it", Options(height=50))


@pytest.mark.parametrize("with_standard_names", [True, False])
@pytest.mark.parametrize(
    ("names", "height"),
    [
        (("ws50",), 10),
        (("WS50",), 10),
        (("ws10",), 50),
        (("sfcWind",), 50),
        (("u50", "v50"), 10),
        (("u10", "v10"), 50),
        (("uas", "vas"), 50),
    ],
)
def test_a_name_that_says_another_height_is_refused(names, height, with_standard_names):
    standards = ("eastward_wind", "northward_wind") if len(names) == 2 else ("wind_speed",)
    file = made().drop_vars("wind_speed")
    for name, standard in zip(names, standards, strict=True):
        attributes = {"units": "m/s"} | ({"standard_name": standard} if with_standard_names else {})
        file = file.assign({name: (("time", "y", "x"), SPEED, attributes)})
    words = f"no wind at {height} m, but {', '.join(names)}; say which with --height"
    with pytest.raises(WindsrError, match=words):
        from_dataset(file, "it", Options(height=height))
    own_height = 60 - height
    assert from_dataset(file, "it", Options(height=own_height)).height == own_height


def test_a_component_of_another_height_is_none_of_the_two():
    file = made().drop_vars("wind_speed")
    for name, standard in (("a", "eastward_wind"), ("v50", "northward_wind")):
        attributes = {"units": "m/s", "standard_name": standard}
        file = file.assign({name: (("time", "y", "x"), SPEED, attributes)})
    with pytest.raises(WindsrError, match="it has a and no northward_wind"):
        from_dataset(file, "it", Options())


LEVELS = [
    ("level", [10.0], {"units": "hPa"}, "'hPa'"),
    ("plev", [85000.0], {"units": "Pa"}, "'Pa'"),
    ("plev", [85000.0, 70000.0, 50000.0], {"units": "Pa"}, "'Pa'"),
    ("plev_2", [10.0], {}, "no units"),
    ("pressure", [10.0], {}, "no units"),
    ("pressure_level", [850, 700, 500], {"units": "hPa"}, "'hPa'"),
    ("isobaric1", [10.0], {"units": "mb"}, "'mb'"),
    ("isobaricInhPa", [850.0], {"units": "hPa", "standard_name": "air_pressure"}, "'hPa'"),
    ("hybrid", [1.0], {"units": "1"}, "'1'"),
    ("model_level", [10], {}, "no units"),
    ("level", [10], {}, "no units"),
    ("height", [10.0], {"units": "1"}, "'1'"),
    ("k", [10.0], {"axis": "Z"}, "no units"),
    ("k", [10.0], {"positive": "down"}, "no units"),
    ("k", [10.0], {"standard_name": "air_pressure", "units": "hPa"}, "'hPa'"),
    ("k", [10.0], {"standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"}, "no units"),
]


@pytest.mark.parametrize("names", [("wind_speed",), ("u", "v")])
@pytest.mark.parametrize(("axis", "levels", "attributes", "words"), LEVELS)
def test_levels_of_pressure_or_of_a_model_are_no_heights(names, axis, levels, attributes, words):
    speed = (("time", axis, "y", "x"), np.stack([SPEED] * len(levels), 1), {"units": "m/s"})
    file = made().drop_vars("wind_speed").assign(dict.fromkeys(names, speed))
    file = file.assign_coords({axis: (axis, levels, attributes)})
    with pytest.raises(WindsrError, match=f"the levels of {axis} (are in|have) {words}"):
        from_dataset(file, "it", Options())
    if len(levels) == 1:
        with pytest.raises(WindsrError, match=f"the levels of {axis} (are in|have) {words}"):
            from_dataset(file.squeeze(axis), "it", Options())


def test_a_coordinate_along_a_dimension_without_values_says_its_levels():
    file = made(np.stack([SPEED] * 2, 1), ("time", "k", "y", "x"))
    pressure = file.assign_coords(p=("k", [850.0, 10.0], {"units": "hPa", "positive": "down"}))
    with pytest.raises(WindsrError, match="the levels of p are in 'hPa'"):
        from_dataset(pressure, "it", Options())
    heights = file.assign_coords(agl=("k", [50.0, 10.0], {"units": "m", "axis": "Z"}))
    heights.wind_speed[:, 0] += 9.0
    np.testing.assert_array_equal(from_dataset(heights, "it", Options()).wind, SPEED)


def test_other_coordinates_of_levels_without_values_do_not_hide_them():
    file = made(np.stack([SPEED] * 2, 1), ("time", "height", "y", "x"))
    labelled = file.assign_coords(label=("height", ["10 m", "50 m"]))
    with pytest.raises(WindsrError, match=r"on 2 levels \(height: without values\)"):
        from_dataset(labelled, "it", Options())


def test_a_height_along_times_or_the_grid_is_no_dimension_of_levels():
    count, metres = len(SPEED), {"units": "m"}
    grid = made().assign_coords(height=("x", np.arange(SPEED.shape[-1]) * 7.0, metres))
    np.testing.assert_array_equal(from_dataset(grid, "it", Options()).wind, SPEED)
    steady = made().assign_coords(height=("time", [10.0] * count, metres))
    np.testing.assert_array_equal(from_dataset(steady, "it", Options()).wind, SPEED)
    moved = made().assign_coords(height=("time", [10.0] * (count - 1) + [100.0], metres))
    with pytest.raises(WindsrError, match=r"on 100 m \(height\), none of them at 10 m"):
        from_dataset(moved, "it", Options())


@pytest.mark.parametrize("count", [1, 3])
def test_levels_without_values_are_no_heights(count):
    file = made(np.stack([SPEED] * count, 1), ("time", "plev", "y", "x"))
    with pytest.raises(WindsrError, match=rf"on {count} levels \(plev: without values\)"):
        from_dataset(file, "it", Options())


@pytest.mark.parametrize(
    ("here", "absent"), [("u10", "v10"), ("v10", "u10"), ("northward_wind", "eastward_wind")]
)
def test_one_component_says_which_is_missing(here, absent):
    file = made().drop_vars("wind_speed")
    file = file.assign({here: (("time", "y", "x"), SPEED, {"units": "m/s"})})
    with pytest.raises(WindsrError, match=f"it has {here} and no {absent}: the speed of the wind"):
        from_dataset(file, "it", Options())


def test_more_nodes_than_patches_are_no_error(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE", "16")
    data = file_of(tmp_path / "wind.nc")
    run("sample", tmp_path / "drawn", "--model", model, "--data", data, "--members", 1,
        "--overlap", 0)  # fmt: skip
    output_text = capsys.readouterr().out
    assert "sampling 4 patches on 1 worker(s)" in output_text
    assert "the job may have 16 nodes and has 4 patches" in output_text
    assert len(list((tmp_path / "drawn" / "patches").iterdir())) == 4
    assert np.isfinite(output.read(tmp_path / "drawn" / "samples.nc").members).all()


def test_without_terrain_none_is_asked_for(tmp_path, model, capsys):
    data = file_of(tmp_path / "bare.nc", terrain=False)
    output_text = refusal("train", tmp_path / "with", *TINY, "--steps", 1, "--data", data)
    assert "no terrain" in output_text
    assert "--no-terrain" in output_text
    run("train", tmp_path / "bare", *TINY, "--no-terrain", "--steps", 1, "--data", data)
    bare = tmp_path / "bare" / "model.safetensors"
    run("sample", tmp_path / "drawn", "--model", bare, "--data", data, "--members", 1)
    with xarray.open_dataset(tmp_path / "drawn" / "samples.nc") as file:
        assert "terrain" not in file
    run("evaluate", tmp_path / "drawn" / "samples.nc", "--json", tmp_path / "scores.json")
    assert list(json.loads((tmp_path / "scores.json").read_text())["cdfs"]) == ["all places"]
    run("plot", tmp_path / "drawn" / "samples.nc", "--out", tmp_path / "pictures")
    assert "no terrain" in refusal("sample", tmp_path / "x", "--model", model, "--data", data)


@pytest.mark.parametrize(
    ("steps", "logged"), [(1, [1]), (50, [50]), (120, [50, 100, 120]), (127, [50, 100, 127])]
)
def test_every_step_count_is_trained_exactly_in_one_pass(tmp_path, monkeypatch, steps, logged):
    data, passes = file_of(tmp_path / "wind.nc"), []
    loader = train.DataLoader

    class CountedLoader(loader):
        def __iter__(self):
            passes.append(len(self.batch_sampler))
            return super().__iter__()

    monkeypatch.setattr(train, "DataLoader", CountedLoader)
    run("train", tmp_path / "run", *TINY, "--batch", 1, "--steps", steps, "--data", data)
    _, facts = checkpoint.load(tmp_path / "run" / "model.safetensors")
    assert (facts["steps"], facts["samples"]) == (steps, steps)
    assert passes == [steps]
    lines = (tmp_path / "run" / train.LOG).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == logged


def test_the_help_says_what_no_terrain_does(capsys):
    cli.cli.main(["train", "--help"], standalone_mode=False)
    assert "no terrain is needed" in " ".join(capsys.readouterr().out.split())


def test_a_grid_with_two_spacings_is_refused_or_regridded():
    file = made().assign_coords(x=("x", np.arange(12) * 3000.0, {"units": "m"}))
    with pytest.raises(WindsrError, match="2000 m apart in y and 3000 m in x; regrid first"):
        from_dataset(file, "it", Options())
    for spacing in (2000.0, 3000.0):
        fields = from_dataset(file, "it", Options(spacing=spacing))
        assert np.diff(fields.y).mean() == np.diff(fields.x).mean() == spacing


def test_a_geopotential_without_units_is_not_taken_for_a_height():
    file = made().rename(terrain="z")
    file.z.attrs.clear()
    with pytest.raises(WindsrError, match="the terrain z has no units"):
        from_dataset(file, "it", Options())


def test_a_file_without_fields_says_so():
    fields = from_dataset(made().isel(time=slice(0, 0)), "it", Options())
    with pytest.raises(WindsrError, match="it has no field"):
        split_by_day(fields)


NOT_NEEDED = {
    "fitting": {"terrain": (("y", "x"), GROUND, {"units": "m"})},
    "elsewhere": {"terrain": (("row", "column"), GROUND)},
    "geopotential or height": {"z": (("y", "x"), GROUND)},
    "missing values": {"orog": (("y", "x"), GROUND * np.nan, {"units": "m"})},
    "unknown units": {"HGT": (("y", "x"), GROUND, {"units": "furlongs"})},
    "impossible": {"terrain": (("y", "x"), GROUND + 1e6, {"units": "m"})},
}


@pytest.mark.parametrize("terrain", NOT_NEEDED.values(), ids=NOT_NEEDED)
def test_a_terrain_that_is_not_needed_is_not_read(terrain):
    file = made().drop_vars("terrain").assign(terrain)
    fields = from_dataset(file, "it", Options(needs_terrain=False))
    np.testing.assert_array_equal(fields.wind, SPEED.astype(np.float32))
    assert not fields.has_terrain
    assert not fields.terrain.any()


@pytest.mark.parametrize("units", [b"m", b"furlongs", None])
def test_a_terrain_of_wrf_that_is_not_needed_is_not_read(tmp_path, units):
    path = tmp_path / "wrfout_d01"
    with h5py.File(path, "w") as file:
        file.attrs["DX"] = np.array([1000.0], np.float32)
        for name, value in (("U10", 3.0), ("V10", 4.0), ("HGT", np.nan)):
            file[name] = np.full((1, 4, 4), value, np.float32)
            file[name].attrs["units"] = b"m s-1"
        file["Times"] = np.array([list("2017-06-02_00:00:00")], dtype="S1")
        del file["HGT"].attrs["units"]
        if units is not None:
            file["HGT"].attrs["units"] = units
    fields = read(path, Options(needs_terrain=False))
    assert (fields.wind == 5.0).all()
    assert (fields.has_terrain, fields.terrain.any()) == (False, False)


def test_elevations_of_sites_that_are_not_needed_are_not_read(tmp_path):
    lat, lon = np.meshgrid(40 + 0.02 * np.arange(9), -105 + 0.025 * np.arange(9), indexing="ij")
    meta = np.zeros(81, dtype=[("latitude", "f4"), ("longitude", "f4"), ("elevation", "f4")])
    meta["latitude"], meta["longitude"], meta["elevation"] = lat.ravel(), lon.ravel(), np.nan
    with h5py.File(tmp_path / "wtk.h5", "w") as file:
        file["windspeed_10m"] = np.full((1, 81), 7, np.uint16)
        file["windspeed_10m"].attrs["units"] = "m s-1"
        file["meta"] = meta
        file["time_index"] = np.array([b"2012-01-01 00:00:00"])
    fields = read(tmp_path / "wtk.h5", Options(spacing=2000.0, needs_terrain=False))
    assert (fields.has_terrain, fields.terrain.any()) == (False, False)
    np.testing.assert_allclose(fields.wind, 7.0, rtol=1e-5)


def test_a_model_of_another_spacing_is_named(tmp_path, model, capsys):
    """A coarse cell of the training covered 8 km; here it covers 24 km."""
    with xarray.open_dataset(file_of(tmp_path / "near.nc", days=1)) as file:
        wide = file.assign_coords(**{c: (c, 3 * file[c].data, {"units": "m"}) for c in ("y", "x")})
        wide.to_netcdf(tmp_path / "wide.nc")
    words = ("--model", model, "--members", 1, "--part", "all", "--data")
    run("sample", tmp_path / "same", *words, tmp_path / "near.nc")
    assert "trained on points" not in capsys.readouterr().out
    run("sample", tmp_path / "other", *words, tmp_path / "wide.nc")
    note = "trained on points every 2000 m, and these fields have one every 6000 m"
    assert note in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "trained_days"),
    [
        (("--test-day", "2021-03-04"), None),
        ((), "1 of these 1 days (2021-03-06)"),
        (("--part", "all"), "2 of these 3 days (2021-03-05, 2021-03-06)"),
        (("--part", "train"), None),
    ],
)
def test_days_of_the_training_are_no_test(tmp_path, capsys, words, trained_days):
    """The last quarter of the days is sampled by default; another day was held out."""
    data = file_of(tmp_path / "wind.nc", days=3)
    model = tmp_path / "run" / "model.safetensors"
    run("train", tmp_path / "run", *TINY, "--steps", 1, "--data", data,
        "--test-day", "2021-03-04")  # fmt: skip
    run("sample", tmp_path / "drawn", "--model", model, "--members", 1, "--data", data, *words)
    output_text = capsys.readouterr().out
    assert ("scores of these are no test" in output_text) == (trained_days is not None)
    assert trained_days is None or f"trained on {trained_days}" in output_text


def test_coarse_fields_need_no_terrain(tmp_path, model):
    data = file_of(tmp_path / "fine.nc", days=1)
    with xarray.open_dataset(data) as file:
        means = file[["wind_speed"]].coarsen(y=4, x=4).mean()
        for variable, units in (("wind_speed", "m s-1"), ("y", "m"), ("x", "m")):
            means[variable].attrs["units"] = units
        means.to_netcdf(tmp_path / "coarse.nc")
        file.drop_vars("terrain").to_netcdf(tmp_path / "bare.nc")
        file[["terrain"]].to_netcdf(tmp_path / "ground.nc")
    own = ("--data", data)
    apart = ("--data", tmp_path / "bare.nc", "--terrain-file", tmp_path / "ground.nc")
    drawn = []
    for name, words in (("own", own), ("apart", apart)):
        run("sample", tmp_path / name, "--model", model, "--members", 1, "--part", "all",
            "--coarse", tmp_path / "coarse.nc", *words)  # fmt: skip
        drawn.append(output.read(tmp_path / name / "samples.nc"))
    np.testing.assert_allclose(drawn[0].low, means.wind_speed, rtol=1e-5)
    np.testing.assert_array_equal(drawn[0].members, drawn[1].members)
    np.testing.assert_array_equal(drawn[0].terrain, drawn[1].terrain)
