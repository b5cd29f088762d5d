"""What a job's Python says of an environment in which a launcher cannot run."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import malletrain
from malletrain.launch import entry
from malletrain.protocol import env


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python with nothing installed."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return str(place / "bin" / "python")


@pytest.fixture
def library(tmp_path):
    """The agent's packages, as they are bound into a container."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "malletrain").symlink_to(Path(entry.__file__).parents[1])
    return tmp_path / "lib"


def borrowed(library):
    compiled = library.with_name(entry.library_name(sys.version_info))
    compiled.mkdir()
    for name in ("msgspec", "zmq"):
        place = Path(find_spec(name).submodule_search_locations[0])
        (compiled / name).symlink_to(place)
        if (bundled := place.with_name(f"py{name}.libs")).is_dir():
            (compiled / bundled.name).symlink_to(bundled)


def outcome(python, kind, library="", cwd=None, **environment):
    command = [python, entry.__file__, kind, "The Python X", str(library), "--launch", "/no/order"]
    around = {**os.environ, **environment}
    around.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, env=around, cwd=cwd)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip()


def test_without_malletrain(bare):
    assert outcome(bare, "restart") == (
        78,
        f"malletrain: The Python X has no malletrain; install it there: {bare} -m pip install "
        "--find-links WHEELS malletrain (or submit with the Python that has it).",
    )


def test_with_packages_for_another_python(bare, library):
    code, sentence = outcome(bare, "service", library)
    assert code == 78
    assert "has no msgspec and pyzmq (the agent's are for another Python than 3." in sentence


def test_a_package_that_only_python_310_needs_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(entry, "find_spec", lambda name: None if name == "async_timeout" else name)
    monkeypatch.setattr(entry.sys, "version_info", (3, 10, 12))
    sentence = entry.lacking("restart", "The Python X", str(tmp_path / "lib"))
    others = [entry.lacking(kind, "The Python X", "") for kind in ("service", "torchrun", "farm")]
    monkeypatch.undo()
    assert sentence == (
        "The Python X has no async-timeout (the agent's are for another Python than 3.10.12); "
        "install it there: pip install msgspec pyzmq async-timeout."
    )
    assert others == [""] * 3, "they import no module that needs it"
    assert entry.needed_packages((3, 11)) == {"msgspec": "msgspec", "zmq": "pyzmq"}


def test_without_torch_only_a_service_runs(bare, library):
    borrowed(library)
    code, sentence = outcome(bare, "restart", library)
    assert code == 78
    assert "malletrain: The Python X has no torch (Python 3." in sentence
    assert outcome(bare, "service", library)[1].startswith(
        "malletrain launcher: the order cannot be"
    )


def test_a_package_that_cannot_be_loaded_is_told(bare, library):
    borrowed(library)
    (library / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open')\n")
    assert outcome(bare, "restart", library) == (
        78,
        "malletrain: The Python X cannot start a launcher: libcudart.so.12: cannot open.",
    )


def test_a_file_of_the_job_takes_no_modules_place(library, bare, tmp_path):
    borrowed(library)
    for name in ("json.py", "argparse.py", "live.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong file')\n")
    code, sentence = outcome(bare, "service", library, cwd=tmp_path)
    assert (code, "wrong file" in sentence) == (2, False)


def test_a_python_that_is_too_old_is_told(monkeypatch):
    monkeypatch.setattr(entry, "MIN_PYTHON", (3, 99))
    assert "malletrain needs 3.99 or newer." in entry.lacking("service", "The image", "")


def test_another_version_of_malletrain_is_told_and_tried(bare, library, tmp_path):
    borrowed(library)
    other = tmp_path / "other" / "malletrain"
    shutil.copytree(Path(entry.__file__).parents[1], other, ignore=shutil.ignore_patterns("_*_"))
    init = other / "__init__.py"
    init.write_text(init.read_text().replace(f'"{malletrain.__version__}"', '"0.0.1"'))
    code, sentences = outcome(bare, "service", other.parent)
    compiled = other.parent.with_name(entry.library_name(sys.version_info))
    assert compiled.is_dir()
    first, second = sentences.splitlines()
    assert f"this environment has malletrain 0.0.1, the agent {malletrain.__version__}" in first
    assert second.startswith("malletrain launcher: the order cannot be read")
    assert code == 2


@pytest.mark.parametrize(
    ("value", "mask"), [("0027", 0o027), ("777", 0o077), ("", -1), ("9", -1), (None, -1)]
)
def test_the_umask_of_a_job(value, mask):
    assert entry.umask_of({} if value is None else {env.UMASK: value}) == mask
