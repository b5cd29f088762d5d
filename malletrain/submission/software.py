"""Converts options of ``malletrain submit`` to a job's software environment.

Decides which environments can be combined and makes paths absolute. The node checks whether it has
them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from malletrain.protocol.messages import SoftwareEnvironment
from malletrain.submission.error import SpecError

IMAGE_FILES = frozenset((".sif", ".sqsh", ".sqfs", ".squashfs", ".img"))
"""Suffixes of images that are files."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class SoftwareOptions:
    """The options of ``malletrain submit`` for a job's software environment."""

    module: Sequence[str] = ()
    conda: str | None = None
    venv: str | None = None
    container: str | None = None
    no_container: bool = False
    container_runtime: str | None = None
    container_bind: Sequence[str] = ()


def software_of(options: SoftwareOptions) -> SoftwareEnvironment | None:
    """Return the environment that these options request; None if they request none.

    Raises:
        SpecError: the options exclude each other, or have invalid values.
    """
    if options.conda and options.venv:
        raise SpecError("--conda and --venv each choose the Python of the job; give one of them.")
    if options.conda and options.container:
        raise SpecError(
            "--conda activates an environment of the node, which a container does not see; leave "
            "--conda out, or use an image that has the environment."
        )
    if options.container and options.no_container:
        raise SpecError("--container and --no-container exclude each other; give one of them.")
    if (options.container_runtime or options.container_bind) and options.no_container:
        raise SpecError("--no-container leaves nothing to run or to bind; give one of them.")
    container = _image(options.container) if options.container is not None else None
    if options.no_container:
        container = ""
    conda = _conda(options.conda) if options.conda is not None else ""
    environment = SoftwareEnvironment(
        # Lists, because Python 3.10 makes an empty tuple of a generator another object than (),
        # which then counts as no default and is sent.
        modules=tuple([_checked_text(name, "--module", "cuda/12.4") for name in options.module]),
        conda=conda,
        conda_exe=(os.environ.get("CONDA_EXE") or shutil.which("conda") or "") if conda else "",
        venv=_venv(options.venv, bool(container)) if options.venv is not None else "",
        container=container,
        runtime=options.container_runtime or "auto",
        binds=tuple([_bind(text) for text in options.container_bind]),
    )
    return None if environment == SoftwareEnvironment() else environment


def _checked_text(text: str, option: str, example: str) -> str:
    if not text.strip() or text.startswith("-") or _CONTROL.search(text):
        raise SpecError(f'{option}: "{text}" is no name; give one such as {example}.')
    return text


def _conda(text: str) -> str:
    """Return the name, or the absolute path, of a conda environment."""
    name = _checked_text(text, "--conda", "myenv, or the path of an environment")
    return _absolute(name) if os.sep in name else name


def _venv(text: str, contained: bool) -> str:
    """Return the absolute directory. With a container it may exist only there: not checked."""
    path = _absolute(_checked_text(text, "--venv", "~/venvs/train"))
    if not contained and not os.access(os.path.join(path, "bin", "python"), os.X_OK):
        raise SpecError(
            f"There is no virtual environment {path}: it has no bin/python. Make one: python3 -m "
            f"venv {path}"
        )
    return path


def _image(text: str) -> str:
    """Return the absolute path of a file or directory, or the name of an image in a registry or a
    store."""
    name = _checked_text(text, "--container", "~/images/pytorch.sif or docker://pytorch/pytorch")
    path = _absolute(name)
    if os.path.exists(path):
        return path
    if name.startswith((".", "~", "/")) or Path(name).suffix.lower() in IMAGE_FILES:
        raise SpecError(f"There is no container image {path}; give a file, a directory or a name.")
    return name


def _bind(text: str) -> str:
    """Return ``SRC[:DST]`` with SRC made absolute."""
    source, colon, target = text.partition(":")
    if not source or (colon and not os.path.isabs(target)) or ":" in target:
        raise SpecError(
            f'--container-bind: "{text}" is not SRC or SRC:DST with DST absolute, such as '
            "/scratch/data:/data."
        )
    path = _absolute(_checked_text(source, "--container-bind", "/scratch/data:/data"))
    return f"{path}:{target}" if colon else path


def _absolute(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))
