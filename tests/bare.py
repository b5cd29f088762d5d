"""Common parts of the tests of packages, docs and a user's first day: a copy of the source tree,
the packages built from it, and virtual environments without MalleTrain.

Such an environment sees the packages of the running one, except MalleTrain's own, so that an
installation needs no network and takes less than a minute.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from malletrain.protocol import env

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", "demo-output"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache"),
)
OURS = ("malletrain", "fedcase", "infinicache", "llmserve", "windsr", "__editable__", "__pycache__")
"""Prefixes of the names of MalleTrain's own entries in a folder of packages."""
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder that ``make`` fills. The first process of a test run that needs it makes
    it, and the others wait. If ``make`` fails, the next process tries again.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the folder of the run, in which each process has a folder of its own
    folder, made = root / name, root / f"{name}.made"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def _left_out(folder: str, names: list[str]) -> set[str]:
    pages = {"site"} if Path(folder) == ROOT else set()  # as mkdocs builds them
    return LEFT_OUT(folder, names) | pages


def source_tree(target: Path) -> Path:
    """Return a copy of the source tree, as a clone would be."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=_left_out)
    return target


def link_packages(target: Path) -> Path:
    """Make a folder of links to the packages of the running environment, without MalleTrain's
    own.
    """
    target.mkdir(parents=True)
    for entry in _packages():
        link = target / entry.name
        if not (entry.name.startswith(OURS) or entry.suffix == ".pth" or link.is_symlink()):
            link.symlink_to(entry)
    return target


def _packages() -> Iterator[Path]:
    """Return the entries of the running environment's folders of packages, in the order of the
    search path.
    """
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages") and folder.is_dir():
            yield from folder.iterdir()


def share(environment: Path, packages: Path) -> None:
    """Let a virtual environment see the linked ``packages``."""
    (folder,) = environment.glob("lib/python*/site-packages")
    (folder / "shared.pth").write_text(f"{packages}\n")


def bare_environment(target: Path, packages: Path) -> Path:
    """Make a virtual environment with the linked ``packages``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    share(target, packages)
    return target


def build(kind: str, tree: Path, target: Path) -> None:
    """Build a package of this ``kind`` ("sdist", "wheel") from ``tree``, as pip and build do."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(target)],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def files_of(folder: Path) -> set[str]:
    """Return the names of all files in ``folder``. A link to a folder counts as the files of that
    folder.
    """
    return {
        os.path.relpath(os.path.join(place, file), folder)
        for place, _, files in os.walk(folder, followlinks=True)
        for file in files
        if "__pycache__" not in place
    }


def install(wheel: Path, folder: Path) -> Path:
    """Make a virtual environment below ``folder`` with only the ``wheel`` installed."""
    environment = bare_environment(folder / "environment", link_packages(folder / "packages"))
    python = environment / "bin" / "python"
    command = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([sys.executable, *command, "--no-index", str(wheel)], check=True)
    return environment


def plain_variables(home: Path, *path: Path) -> dict[str, str]:
    """Return the environment variables of a user who has just logged in."""
    return {
        "HOME": str(home),
        "PATH": ":".join([*map(str, path), os.defpath.strip(":"), "/usr/local/bin"]),
        "LANG": "C.UTF-8",
        "USER": os.environ.get("USER", "root"),
        "PYTHONDONTWRITEBYTECODE": "1",
        env.TIMEOUT: os.environ.get(
            env.TIMEOUT, ""
        ),  # their machine is as busy as that of the tests
    }
