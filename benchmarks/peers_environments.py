"""Virtual environments for the frameworks with which benchmarks compare MalleTrain.

Each is created once below a cache folder, with the framework's packages from the package index.
torch is that of the running interpreter, so that all contenders train with the same one and no
other build is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

PACKAGES: dict[str, tuple[str, ...]] = {
    "torchft": ("torchft-nightly==2026.10.26",),
    "ray": ("ray[train]==2.60.0",),
    "ray-torchft": ("ray[train]==2.60.0", "torchft-nightly==2026.10.26"),
    "tune": ("ray[tune]==2.60.0",),
    "hyperqueue": ("hyperqueue==0.27.0",),
    "submitit": ("submitit==1.5.4",),
}
"""Packages of each framework, with versions."""
TIMEOUT_S = 900.0


class NotInstalled(RuntimeError):
    """A framework is not available here; the message says why."""


def cache() -> Path:
    """Return the folder of the environments: below XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "malletrain" / "benchmarks"


def python_of(name: str, folder: Path) -> Path:
    """Return the interpreter of this framework's environment, which is created if necessary. Raises
    NotInstalled.
    """
    root, python = folder / name, folder / name / "bin" / "python"
    torch = version("torch")
    requirements = json.dumps([PACKAGES[name], torch, sys.version, sys.prefix])
    made = root / "made"
    if made.exists() and made.read_text() == requirements:
        return python
    root.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(root)], name)
    constraints = root / "constraints.txt"
    constraints.write_text(f"torch=={torch}\n")
    here = sysconfig.get_path("purelib")
    shared = Path(sysconfig.get_path("purelib", vars={"base": str(root)})) / "shared.pth"
    # site.addsitedir instead of the bare path, so that the .pth files of the running environment
    # also apply
    shared.write_text(f"import site; site.addsitedir({here!r})\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--constraint", str(constraints), *PACKAGES[name]], name)
    made.write_text(requirements)
    return python


def _run(argv: list[str], name: str) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{name} was not installed: {error}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        words = (
            errors[-1] if errors else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        )
        raise NotInstalled(f"{name} was not installed: {words}")
