"""The command line from training to pictures on the smallest preset, and its refusals in
sentences.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from windsr import cli, output


def run(*words: object) -> None:
    threads = torch.get_num_threads()
    try:
        cli.main([str(word) for word in words])
    finally:
        torch.set_num_threads(threads)


SMALL = ("--synthetic-size", "32", "--synthetic-days", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a model of SRCNN, samples of the held-out day, and observations for them."""
    folder = tmp_path_factory.mktemp("cli")
    run("train", folder / "run", "--preset", "tiny", "--method", "srcnn", "--steps", 4, *SMALL)
    run(
        "sample",
        folder / "drawn",
        "--model",
        folder / "run" / "model.safetensors",
        "--members",
        1,
        *SMALL,
    )
    drawn = output.read(folder / "drawn" / "samples.nc")
    lines = [f"{drawn.times[0]},{drawn.y[5]},{drawn.x[k]},{drawn.truth[0, 5, k]}" for k in (3, 20)]
    (folder / "stations.csv").write_text("\n".join(["time,y,x,wind_speed", *lines]) + "\n")
    return folder


def test_sample_covers_the_held_out_day(trained):
    drawn = output.read(trained / "drawn" / "samples.nc")
    assert drawn.members.shape == (8, 1, 32, 32)
    assert len(np.unique(drawn.times.astype("datetime64[D]"))) == 1
    assert np.isfinite(drawn.members).all()


@pytest.mark.parametrize("radius", ["dynamic", "4"])
def test_assimilate_draws_the_field_to_the_stations(trained, radius, capsys):
    result = trained / f"with-{radius}.nc"
    run(
        "assimilate",
        trained / "drawn" / "samples.nc",
        trained / "stations.csv",
        result,
        "--radius",
        radius,
    )
    assert "brought 2 observations into 8 fields" in capsys.readouterr().out
    before, after = output.read(trained / "drawn" / "samples.nc"), output.read(result)
    np.testing.assert_allclose(
        after.members[0, 0, 5, [3, 20]], before.truth[0, 5, [3, 20]], atol=1e-4
    )
    np.testing.assert_array_equal(after.members[1:], before.members[1:])
    assert after.mask.max() == 1


def test_innovations_can_be_spread_and_the_cap_be_lifted(trained, capsys):
    result = trained / "spread.nc"
    words = ("--how", "innovations", "--largest", "0", "--t1", "1e6", "--t2", "1e6")
    run("assimilate", trained / "drawn/samples.nc", trained / "stations.csv", result, *words)
    assert "mean radius 46.00 pixels" in capsys.readouterr().out  # the diagonal of 32 × 32
    before, after = output.read(trained / "drawn" / "samples.nc"), output.read(result)
    np.testing.assert_allclose(
        after.members[0, 0, 5, [3, 20]], before.truth[0, 5, [3, 20]], atol=1e-4
    )


def test_observations_go_into_what_the_model_sees(trained, capsys):
    model, stations = trained / "run" / "model.safetensors", trained / "stations.csv"
    words = ("--model", model, "--members", 1, "--observations", stations, "--radius", 3, *SMALL)
    run("sample", trained / "observed", *words)
    assert "brought 2 observations into the input of the model" in capsys.readouterr().out
    before = output.read(trained / "drawn" / "samples.nc")
    after = output.read(trained / "observed" / "samples.nc")
    assert after.mask[0].max() == 1
    assert not after.mask[1:].any()
    np.testing.assert_allclose(after.members[1:], before.members[1:], atol=1e-4)
    changed = np.abs(after.members[0, 0] - before.members[0, 0])
    assert changed[2:9, 0:7].mean() > 10 * changed[20:, 26:].mean()


def test_evaluate_prints_and_writes_all_scores(trained, capsys):
    run("evaluate", trained / "drawn" / "samples.nc", "--json", trained / "scores.json")
    text = capsys.readouterr().out
    assert "bicubic" in text
    assert "drawn" in text
    evaluation = json.loads((trained / "scores.json").read_text())
    assert set(evaluation["scores"]) == {"bicubic", "drawn"}
    drawn = output.read(trained / "drawn" / "samples.nc")
    assert evaluation["scores"]["drawn"]["mae"] == pytest.approx(
        float(np.abs(drawn.mean - drawn.truth).mean()), rel=1e-4
    )
    assert evaluation["cdfs"]
    assert {"spread_skill", "ranks", "fine_power", "tails"} <= set(evaluation["scores"]["drawn"])
    assert "sp/skill" in text


def test_plot_draws_what_can_be_drawn(trained, capsys):
    run("plot", trained / "drawn" / "samples.nc", "--out", trained / "pictures")
    names = sorted(p.name for p in (trained / "pictures").iterdir())
    assert names == ["bias.png", "cdf.png", "fields-drawn.png"]
    assert all((trained / "pictures" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_synthetic_fields_can_be_written_and_trained_on(tmp_path, capsys):
    run("synthetic", tmp_path / "fields.nc", "--size", 32, "--days", 2, "--hours", 1)
    run(
        "train",
        tmp_path / "run",
        "--preset",
        "tiny",
        "--method",
        "srcnn",
        "--steps",
        1,
        "--data",
        tmp_path / "fields.nc",
    )
    assert "wrote" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("train", "{t}/x", "--preset", "tiny", "--data", "{t}/none.nc"), "There is no file"),
        (
            ("train", "{t}/x", "--preset", "tiny", "--test-day", "1999-01-01", *SMALL),
            "no field of 1999-01-01",
        ),
        (
            ("train", "{t}/x", "--preset", "tiny", "--test-day", "monday", *SMALL),
            "dates like 2017-06-05",
        ),
        (("train", "{t}/x", "--preset", "cpu", *SMALL), "patches of 96 × 96"),
        (
            ("train", "{t}/scores.json/x", "--preset", "tiny", "--method", "srcnn", *SMALL),
            "Not a directory",
        ),
        (("sample", "{t}/y", "--model", "{t}/none", *SMALL), "There is no model"),
        (
            ("sample", "{t}/drawn", "--model", "{t}/run/model.safetensors", "--seed", "9", *SMALL),
            "another sampling",
        ),
        (
            ("sample", "{t}/z", "--model", "{t}/run/model.safetensors", "--overlap", "5", *SMALL),
            "multiple of 4",
        ),
        (("assimilate", "{t}/drawn/samples.nc", "{t}/none.csv", "{t}/o.nc"), "cannot be read"),
        (
            (
                "assimilate",
                "{t}/drawn/samples.nc",
                "{t}/stations.csv",
                "{t}/o.nc",
                "--radius",
                "far",
            ),
            "takes 'dynamic' or a number",
        ),
        (
            (
                "assimilate",
                "{t}/drawn/samples.nc",
                "{t}/stations.csv",
                "{t}/o.nc",
                "--radius",
                "-1",
            ),
            "from 0 to 1000",
        ),
        (("evaluate", "{t}/stations.csv"), "not a file that 'windsr sample' wrote"),
        (
            ("plot", "{t}/drawn/samples.nc", "--out", "{t}/p", "--field", "99"),
            "--field 99 is none of them",
        ),
        (("synthetic", "{t}/none/fields.nc"), "cannot be written"),
    ],
)
def test_refusals_are_sentences(trained, words, sentence, capsys):
    (trained / "scores.json").touch()
    with pytest.raises(SystemExit) as ended:
        run(*(word.format(t=trained) for word in words))
    assert ended.value.code != 0
    text = str(ended.value.code) + capsys.readouterr().err
    assert sentence in text
    assert "Traceback" not in text


def test_only_what_was_made_of_the_same_fields_is_compared(trained, tmp_path, capsys):
    """The fields of another seed are as many and as large."""
    words = ("--model", trained / "run" / "model.safetensors", "--members", 1, *SMALL)
    run("sample", tmp_path / "other", *words, "--data-seed", 5)
    ours, other = trained / "drawn" / "samples.nc", tmp_path / "other" / "samples.nc"
    for command in (("evaluate",), ("plot", "--out", tmp_path / "pictures")):
        with pytest.raises(SystemExit) as ended:
            run(*command, ours, other)
        assert "other has other fields than drawn; only what was made of" in str(ended.value.code)
    (tmp_path / "drawn.nc").write_bytes(ours.read_bytes())
    with pytest.raises(SystemExit) as ended:
        run("plot", ours, tmp_path / "drawn.nc", "--out", tmp_path / "pictures")
    assert "Two of the files have the same name" in str(ended.value.code)
