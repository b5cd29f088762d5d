"""The packages that are released: the source package has everything, the wheel is made from it,
and MalleTrain works where nothing but the wheel is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import malletrain
from malletrain.shipped import names
from tests.bare import build, files_of, plain_variables

VERSION = malletrain.__version__
NOT_RELEASED = {".gitignore"}


def run(installed: Path, tmp_path: Path, *command: str, timeout: float = 300) -> str:
    """What an installed command prints, away from the source tree."""
    done = subprocess.run(
        [str(installed / "bin" / command[0]), *command[1:]],
        cwd=tmp_path,
        env=plain_variables(tmp_path),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_source_package_has_every_file_of_the_tree(sdist):
    before = set((sdist / "before.txt").read_text().splitlines())
    workloads = {
        name
        for name in before
        if name.startswith(("malletrain/shipped/jobscripts/infinicache", "jobscripts/windsr/build"))
    }
    assert len(before) > 500
    assert before - workloads - NOT_RELEASED <= files_of(sdist)


def test_the_wheel_has_what_the_product_needs_and_no_package_of_examples(wheel):
    archive = zipfile.ZipFile(wheel)
    inside = set(archive.namelist())
    assert archive.getinfo("malletrain/launch/slurm_commands/srun").external_attr >> 16 & 0o111
    assert {f"malletrain/shipped/{name}" for name in names()} <= inside
    assert "malletrain/shipped/site-configs/malletrain.service" in inside
    assert "malletrain/store/migrations/versions/v0001_first.py" in inside
    assert {
        f"{room}/py.typed" for room in ("malletrain", "scavenger", "jpa", "allocator")
    } <= inside
    tops = {name.split("/")[0] for name in inside}
    assert tops == {
        *("malletrain", "scavenger", "jpa", "allocator"),
        f"malletrain-{VERSION}.dist-info",
    }


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("federated", "fedcase"),
        ("infinicache", "infinicache"),
        ("llm", "llmserve"),
        ("nas", "nas"),
        ("windsr", "windsr"),
    ],
)
def test_an_example_workload_is_a_distribution_of_its_own(tree, tmp_path, folder, name):
    source = tmp_path / "source"  # a build leaves files in it, which are none of the tree
    shutil.copytree(tree / "jobscripts" / folder, source)
    build("wheel", source, tmp_path)
    (made,) = tmp_path.glob("*.whl")
    tops = {entry.split("/")[0] for entry in zipfile.ZipFile(made).namelist()}
    assert tops == {name, made.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


def test_every_file_that_ships_is_text_of_the_wheel_and_of_the_tree(wheel, tree):
    with zipfile.ZipFile(wheel) as archive:
        for name in names():
            assert archive.read(f"malletrain/shipped/{name}") == (tree / name).read_bytes()


def test_the_installed_product_finds_its_files(installed, tmp_path):
    assert run(installed, tmp_path, "malletrain", "shipped").split() == names()
    code = (
        "import malletrain, importlib.util as u; "
        "from malletrain.daemon.site.backends import template; "
        "print(malletrain.__file__, u.find_spec('jobscripts'), "
        "*('MALLETRAIN-LEASE' in template(None, kind) for kind in ('slurm', 'pbs')))"
    )
    home, *rest = run(installed, tmp_path, "python", "-c", code).split()
    assert home.startswith(str(installed))
    assert rest == ["None", "True", "True"]


def test_check_works_where_the_wheel_is_installed(installed, tmp_path):
    shipped = run(installed, tmp_path, "malletrain", "shipped", "site-configs/embedded.toml")
    site = tmp_path / "site.toml"
    # Another test may have a daemon at the port of its metrics.
    site.write_text(Path(shipped.strip()).read_text().replace('"127.0.0.1:9464"', '""'))
    output = run(installed, tmp_path, "malletrain", "check", "--config", str(site))
    assert "is valid" in output


PATIENT_DEMO = """
import sys
from malletrain.demo import main, plan, stage
def patient(*arguments, text=plan.config_text):
    config = text(*arguments)
    for key in ("agent_timeout", "adopt_wait", "drain_timeout", "join_timeout"):
        (line,) = [line for line in config.splitlines() if line.startswith(key + " = ")]
        config = config.replace(line, f'{key} = "60 s"')
    return config
def watch(watcher, stage, start, deadline, options, watch=main._watch):
    return watch(watcher, stage, start, start + 1500.0, options)
plan.config_text, main._watch, stage.LIFETIME_S = patient, watch, 3600.0
stage.DemoStage.loading_s = lambda self: 4.0
from malletrain.cli import main as command_line
command_line(["demo", *sys.argv[1:]], prog_name="malletrain")
"""
"""The demo with limits that no busy machine reaches, and without the trial of how long PyTorch
takes to load.
"""


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_demo_works_where_the_wheel_is_installed(installed, tmp_path):
    short = ["--duration", "30", "--nodes", "2", "--plain"]
    output = run(installed, tmp_path, "python", "-c", PATIENT_DEMO, *short, timeout=1700)
    assert "completed" in output
    assert (tmp_path / "demo-output" / "timeline.png").stat().st_size > 10_000
