"""What the tests of the packages and of the docs begin with: a copy of the source tree, and
virtual environments in which MalleTrain is not installed.

Such an environment sees the packages that the running one has, without MalleTrain's own, so that
installing there needs neither a network nor a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", "site", "demo-output"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache"),
)
OURS = ("malletrain", "infinicache", "windsr", "__editable__", "__pycache__")
"""What the names of MalleTrain's own entries in a folder of packages begin with."""


def source_tree(target: Path) -> Path:
    """A copy of the source tree as a clone of it would be."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=LEFT_OUT)
    return target


def link_packages(target: Path) -> Path:
    """A folder of links to the packages of the running environment, without MalleTrain's own."""
    target.mkdir(parents=True)
    for entry in _packages():
        link = target / entry.name
        if not (entry.name.startswith(OURS) or entry.suffix == ".pth" or link.is_symlink()):
            link.symlink_to(entry)
    return target


def _packages() -> Iterator[Path]:
    """Entries of the running environment's folders of packages, those found first first."""
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages") and folder.is_dir():
            yield from folder.iterdir()


def share(environment: Path, packages: Path) -> None:
    """Let the virtual ``environment`` see the linked ``packages``."""
    (folder,) = environment.glob("lib/python*/site-packages")
    (folder / "shared.pth").write_text(f"{packages}\n")


def bare_environment(target: Path, packages: Path) -> Path:
    """A virtual environment of the linked ``packages``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    share(target, packages)
    return target


def plain_variables(home: Path, *path: Path) -> dict[str, str]:
    """The environment variables of a person who has just logged in."""
    return {
        "HOME": str(home),
        "PATH": ":".join([*map(str, path), os.defpath.strip(":"), "/usr/local/bin"]),
        "LANG": "C.UTF-8",
        "USER": os.environ.get("USER", "root"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
