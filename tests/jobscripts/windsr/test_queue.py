"""The sampling queue: each patch has one result, whichever worker is killed, and the whole is what
one undisturbed worker makes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xarray
from windsr import WindsrError, output, queue
from windsr.methods import Draw

from tests.jobscripts.windsr import scripts
from tests.jobscripts.windsr.scripts import results
from tests.malletrain.elastic.conductor import conducted
from tests.waiting import until


def stored(folder: Path) -> Counter:
    return Counter(line for path in folder.glob("stored-*") for line in path.read_text().split())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    inputs = queue.from_fine(scripts.small(), 4)
    queue.sample(
        queue.Sampling(folder, Draw(), overlap=8),
        inputs,
        scripts.untrained("srcnn"),
        "untrained",
        lambda text: None,
    )
    return folder


@pytest.mark.thorough
def test_nodes_join_and_are_killed_and_every_patch_is_made_once(tmp_path, undisturbed):
    total = len(results(undisturbed))
    gates = total // 4, total // 2
    with conducted(tmp_path, scripts.sampling, str(tmp_path), gates, {"patch_delay": 0.05}) as c:
        members = c.start(2)
        c.round(members)
        c.until(lambda: len(results(tmp_path)) >= 8, "some patches are done")
        members = c.lose(members[0])  # rank 0, in the middle of whatever it did
        c.round(members, wait=False)
        (tmp_path / f"go-{gates[0]}").touch()
        c.run()
        c.until(lambda: len(results(tmp_path)) >= total // 3, "a third is done")
        c.lose(*members)  # nobody is left
        assert len(results(tmp_path)) < total
        (tmp_path / f"go-{gates[1]}").touch()
        others = c.start(2)
        c.round(others)
        c.finish()
    assert results(tmp_path) == results(undisturbed)
    once = stored(tmp_path)
    assert set(once.values()) == {1}, "no result was made twice"
    # A process killed between its result and its note of it may have left up to its share of one
    # step unnoted.
    assert total - 2 * 2 * 2 <= len(once) <= total
    mine, theirs = (output.read(folder / queue.RESULT) for folder in (tmp_path, undisturbed))
    np.testing.assert_allclose(mine.members, theirs.members, atol=1e-4)
    np.testing.assert_array_equal(mine.truth, theirs.truth)


def test_results_that_were_lost_are_made_again(tmp_path, undisturbed):
    folder = tmp_path / "copy"
    os.system(f"cp -r {undisturbed} {folder}")
    before = output.read(folder / queue.RESULT)
    (folder / queue.PATCHES / results(folder)[3]).unlink()
    (folder / queue.RESULT).unlink()
    lines: list[str] = []
    inputs = queue.from_fine(scripts.small(), 4)
    queue.sample(
        queue.Sampling(folder, Draw(), overlap=8),
        inputs,
        scripts.untrained("srcnn"),
        "untrained",
        lines.append,
    )
    assert any("1 patches were lost" in text for text in lines)
    np.testing.assert_allclose(
        output.read(folder / queue.RESULT).members, before.members, atol=1e-5
    )


def test_two_that_make_the_same_patch_leave_one_result(tmp_path):
    inputs = queue.from_fine(scripts.small(), 4)
    both = [
        queue.PatchQueue(
            queue.Sampling(tmp_path, Draw(), overlap=8), inputs, scripts.untrained("srcnn"), "m"
        )
        for _ in range(2)
    ]
    assert both[0].keep(0, np.zeros((1, 16, 16), np.float32))
    assert not both[1].keep(0, np.ones((1, 16, 16), np.float32))
    assert np.load(both[0].file(0)).max() == 0
    assert both[1].make([0]) == 0


def test_a_folder_that_says_no_height_is_for_that_of_the_inputs(tmp_path):
    """As with models: what does not say its height has that of the inputs."""
    inputs = dataclasses.replace(queue.from_fine(scripts.small(), 4), height=50.0)
    work = queue.Sampling(tmp_path, Draw(), overlap=8)
    facts = queue.PatchQueue(work, inputs, scripts.untrained("srcnn"), "m").facts
    assert facts.pop("height") == 50.0
    (tmp_path / queue.FACTS).write_text(json.dumps(facts))
    queue.PatchQueue(work, inputs, scripts.untrained("srcnn"), "m")
    (tmp_path / queue.FACTS).write_text(json.dumps({**facts, "height": 10.0}))
    with pytest.raises(WindsrError, match=r"another sampling \(other height\)"):
        queue.PatchQueue(work, inputs, scripts.untrained("srcnn"), "m")


def test_patches_of_a_member_begin_with_one_noise(tmp_path):
    inputs = queue.from_fine(scripts.small(), 4)
    work = queue.PatchQueue(
        queue.Sampling(tmp_path, Draw(members=2), overlap=8),
        inputs,
        scripts.untrained("srcnn"),
        "m",
    )
    noise = work.noise(0)
    assert noise.shape == (2, 40, 40)
    again = queue.PatchQueue(
        queue.Sampling(tmp_path, Draw(members=2), overlap=8),
        inputs,
        scripts.untrained("srcnn"),
        "m",
    ).noise(0)
    np.testing.assert_array_equal(noise, again)
    assert abs(float(np.corrcoef(noise[0].ravel(), work.noise(1)[0].ravel())[0, 1])) < 0.1
    assert abs(float(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1])) < 0.1


def test_a_folder_of_another_sampling_is_refused(tmp_path):
    inputs = queue.from_fine(scripts.small(), 4)
    queue.PatchQueue(queue.Sampling(tmp_path, Draw()), inputs, scripts.untrained("srcnn"), "m")
    with pytest.raises(WindsrError, match=r"another sampling \(other draw"):
        queue.PatchQueue(
            queue.Sampling(tmp_path, Draw(members=2)), inputs, scripts.untrained("srcnn"), "m"
        )


@pytest.mark.parametrize("change", ["weights", "scales"])
def test_patches_of_a_model_that_was_trained_again_are_refused(tmp_path, change):
    """It has the same path."""
    inputs, model = queue.from_fine(scripts.small(), 4), scripts.untrained("srcnn")
    queue.PatchQueue(queue.Sampling(tmp_path, Draw()), inputs, model, "m")
    queue.PatchQueue(queue.Sampling(tmp_path, Draw()), inputs, scripts.untrained("srcnn"), "m")
    if change == "weights":
        weight = next(model.nets["net"].parameters())
        weight.data += 1e-3
    else:
        model.scales = dataclasses.replace(model.scales, wind_std=2 * model.scales.wind_std)
    with pytest.raises(WindsrError, match=r"another sampling \(other weights\)"):
        queue.PatchQueue(queue.Sampling(tmp_path, Draw()), inputs, model, "m")


@pytest.mark.parametrize("absent", ["height", "weights"])
def test_what_an_earlier_version_did_not_record_is_the_same(tmp_path, absent):
    inputs, model = queue.from_fine(scripts.small(), 4), scripts.untrained("srcnn")
    facts = queue.PatchQueue(queue.Sampling(tmp_path, Draw()), inputs, model, "m").facts
    del facts[absent]
    (tmp_path / queue.FACTS).write_text(json.dumps(facts))
    queue.PatchQueue(queue.Sampling(tmp_path, Draw()), inputs, model, "m")


def test_the_critic_of_a_gan_is_no_part_of_the_model(tmp_path):
    """A file of a model has none, so that it is another one in each process."""
    inputs, model = queue.from_fine(scripts.small(), 4), scripts.untrained("esrgan")
    queue.PatchQueue(queue.Sampling(tmp_path, Draw()), inputs, model, "m")
    next(model.nets["critic"].parameters()).data += 1.0
    queue.PatchQueue(queue.Sampling(tmp_path, Draw()), inputs, model, "m")


def test_the_result_is_cf_and_comes_back(undisturbed):
    with xarray.open_dataset(undisturbed / queue.RESULT, engine="h5netcdf") as dataset:
        assert dataset.attrs["Conventions"] == "CF-1.11"
        assert dataset["wind_speed"].attrs["standard_name"] == "wind_speed"
        assert dataset["wind_speed"].attrs["units"] == "m s-1"
        assert dataset["wind_speed"].dims == ("time", "realization", "y", "x")
        assert float(dataset["height"]) == 10
        assert dataset["terrain"].attrs["standard_name"] == "surface_altitude"
        assert str(dataset["time"].to_numpy()[0])[:10] == "2017-06-01"
        low, x_low, x = (
            dataset["wind_speed_low"],
            dataset["x_low"].to_numpy(),
            dataset["x"].to_numpy(),
        )
        assert low.shape[1:] == (10, 10)
        assert x_low[0] == x[:4].mean()
    fields = output.read(undisturbed / queue.RESULT)
    np.testing.assert_allclose(
        fields.low,
        fields.truth.reshape(len(fields.times), 10, 4, 10, 4).mean(axis=(2, 4)),
        rtol=1e-5,
    )


def test_coarse_fields_must_fit_the_fine_terrain():
    import dataclasses

    fine = scripts.small()
    inputs = queue.from_fine(fine, 4)
    axis = np.arange(10) * 4 * fine.spacing
    coarse = dataclasses.replace(
        fine, wind=inputs.low, terrain=np.zeros((10, 10), np.float32), y=axis, x=axis
    )
    assert queue.from_coarse(coarse, fine, 4).truth is None
    with pytest.raises(WindsrError, match="8 times fewer and wider"):
        queue.from_coarse(coarse, fine, 8)


WRITER = """
import sys
import numpy as np
from pathlib import Path
from tests.jobscripts.windsr import scripts
from windsr import queue
from windsr.methods import Draw

work = queue.PatchQueue(
    queue.Sampling(Path(sys.argv[1]), Draw(), overlap=8),
    queue.from_fine(scripts.small(), 4),
    scripts.untrained("srcnn"),
    "m",
)
for number in range(100_000):
    work.items = [work.items[0]] * (number + 1)
    work.keep(number, np.full((1, 16, 16), number, np.float32))
"""


def test_a_killed_writer_leaves_no_half_result(tmp_path):
    """SIGKILL at any moment of a write: what is under the final name is whole."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], env=environment) as writer:
        until(lambda: len(results(tmp_path)) >= 20 or writer.poll() is not None, "it writes")
        writer.kill()
    assert writer.returncode == -signal.SIGKILL
    for name in results(tmp_path):
        assert (np.load(tmp_path / queue.PATCHES / name) == int(name[:7])).all()
