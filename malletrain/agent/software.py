"""A job's software environment on a node: modules, a conda or virtual environment, a container.
Pure.

Decides the order in which its parts are entered, which paths of the node a container sees, and
which variables are passed into it. Starts nothing. The scripts below are constant. Names from a job
are arguments of a script, and never part of it.

    modules (host) → conda | venv (host) | container → the job's setup → Python
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from malletrain.protocol.failures import UNFIT
from malletrain.protocol.messages import JobSpec, SoftwareEnvironment

HOST_ONLY = (
    *("PATH", "MANPATH", "LD_*", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV*", "CONDA_*", "_CE_*"),
    *("MODULE*", "LOADEDMODULES", "_LMFILES_*", "LMOD_*", "__LMOD*", "_ModuleTable*"),
    *("BASH_*", "ENV", "SHELL", "TMPDIR", "TMP", "TEMP", "XDG_*", "PWD", "OLDPWD", "_"),
)
"""Globs of variables that are meaningful only on the host. They are not passed into a container,
unless the job sets them itself (``--env``).
"""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SAY = "say() { printf 'malletrain: %s\\n' \"$*\" >&2; exit UNFIT; }\n".replace("UNFIT", str(UNFIT))
# Lmod and Tcl modules define a shell function in a script that login shells read. The shell of a
# batch job has the function only if it was exported, or if BASH_ENV names that script.
_ENTER = (
    _SAY
    + r"""
mt_source() { . "$1"; }
mt_count=$1 mt_conda=$2 mt_conda_exe=$3 mt_venv=$4
shift 4
mt_modules=("${@:1:mt_count}")
shift "$mt_count"
mt_command=("$@")
if [ "$mt_count" -gt 0 ]; then
    for mt_file in "$MODULESHOME/init/bash" "$LMOD_PKG/init/bash" /etc/profile.d/modules.sh \
        /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /usr/share/lmod/lmod/init/bash \
        /usr/share/modules/init/bash /usr/share/Modules/init/bash /etc/profile; do
        type module >/dev/null 2>&1 && break
        [ -r "$mt_file" ] && mt_source "$mt_file"
    done
    type module >/dev/null 2>&1 ||
        say "This node has no 'module' command, so '${mt_modules[0]}' cannot be loaded: no" \
            "script that defines it is in \$MODULESHOME/init, \$LMOD_PKG/init or /etc/profile.d."
    for mt_module in "${mt_modules[@]}"; do
        module load "$mt_module" ||
            say "The module '$mt_module' cannot be loaded on this node ('module load' failed; the" \
                "launcher's log has its words). Give --module once for each module, as" \
                "'module avail' spells it."
    done
fi
if [ -n "$mt_conda" ]; then
    for mt_exe in "$(type -P conda)" "$CONDA_EXE" "$mt_conda_exe"; do
        [ "$(type -t conda)" = function ] && break
        [ -x "$mt_exe" ] && mt_hook=$("$mt_exe" shell.bash hook) && eval "$mt_hook"
    done
    [ "$(type -t conda)" = function ] ||
        say "This node has no conda, so the environment '$mt_conda' cannot be activated: none is" \
            "on PATH, in CONDA_EXE or where it was submitted. Load it with --module, or give" \
            "--env CONDA_EXE=PATH."
    conda activate "$mt_conda" ||
        say "The conda environment '$mt_conda' cannot be activated on this node;" \
            "'conda env list' lists what there is."
    [ -x "$CONDA_PREFIX/bin/python" ] ||
        say "The conda environment '$mt_conda' has no Python; install one:" \
            "conda install -n '$mt_conda' python."
fi
if [ -n "$mt_venv" ]; then
    [ -x "$mt_venv/bin/python" ] ||
        say "There is no virtual environment $mt_venv on this node ($mt_venv/bin/python is" \
            "missing); put it on a file system that the nodes share."
    export VIRTUAL_ENV="$mt_venv" PATH="$mt_venv/bin:$PATH"
    unset PYTHONHOME
fi
type -P "${mt_command[0]}" >/dev/null ||
    say "There is no program '${mt_command[0]}' on this node, or in what --module loads."
exec "${mt_command[@]}"
"""
)
_INSIDE = (
    _SAY
    + r"""
image=$1 venv=$3 plain=$4
cd -- "$2" 2>/dev/null ||
    say "The directory $2 is not in the container of $image; bind it: --container-bind $2."
if [ -n "$venv" ]; then
    [ -x "$venv/bin/python" ] ||
        say "There is no virtual environment $venv in the container of $image" \
            "($venv/bin/python is missing, or its base Python is); bind it: --container-bind $venv."
    export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
fi
shift 4
[ -n "$plain" ] || exec "$@"
python=$(command -v python || command -v python3) ||
    say "The container image $image has no Python: neither python nor python3 is on its PATH."
exec "$python" "$@"
"""
)
_WRITE_VARIABLES = '{\n%s\n} && exec env -0 > "$1"'
_TASK_SETUP = '{\n%s\n} && exec "$@"'
_SETUP = '{\n%s\n} && exec "$(command -v python || command -v python3)" "$@"'

_OWNER_SETUP = '{\n%s\n} >&2 && exec "$@"'


def describe_environment(spec: JobSpec) -> str:
    """Return a description of the job's environment, the subject of a sentence."""
    software = spec.software or SoftwareEnvironment()
    in_image = f" in the container image {software.container}" if software.container else ""
    if software.venv:
        return f"The virtual environment {software.venv}{in_image}"
    if software.container:
        return f"The container image {software.container}"
    if software.conda:
        return f"The conda environment {software.conda}"
    return "The Python that the setup leaves" if spec.setup else f"The Python {spec.python}"


def python_command(spec: JobSpec, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs the job's Python with ``arguments``, after the job's setup if
    there is one. For a container the command does not contain the Python itself;
    :func:`command_in_container` finds it.
    """
    software = spec.software or SoftwareEnvironment()
    if spec.setup:
        return ["bash", "-c", _SETUP % spec.setup, "bash", *arguments]
    if software.container:
        return [*arguments]
    return ["python" if software.venv or software.conda else spec.python, *arguments]


def owner_command(spec: JobSpec, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` of the job's owner after the job's setup. What the
    setup prints goes to standard error.
    """
    if not spec.setup:
        return [*command]
    return ["bash", "-c", _OWNER_SETUP % spec.setup, "bash", *command]


def command_in_container(
    spec: JobSpec, command: Sequence[str], needs_python: bool = True
) -> list[str]:
    """Return the command that runs ``command`` in the container. ``needs_python``: whether
    ``command`` consists of arguments for the Python in the container, unless the job has a setup.
    """
    software = spec.software or SoftwareEnvironment()
    plain = "python" if needs_python and not spec.setup else ""
    values = [software.container or "", spec.workdir, software.venv, plain]
    return ["/bin/sh", "-c", _INSIDE, "sh", *values, *command]


def enter_command(software: SoftwareEnvironment | None, command: Sequence[str]) -> list[str]:
    """Return the command that enters the job's environment on the host (modules, conda, a virtual
    environment), and then runs ``command``.
    """
    if software is None:
        return [*command]
    venv = "" if software.container else software.venv
    if not (software.modules or software.conda or venv):
        return [*command]
    values = [str(len(software.modules)), software.conda, software.conda_exe, venv]
    return ["bash", "-c", _ENTER, "malletrain", *values, *software.modules, *command]


def task_environment_command(spec: JobSpec, variables_file: str) -> list[str]:
    """Return the command that enters the environment of a farm's tasks on the host, and write its
    variables to a file as ``env -0`` does; empty if the tasks need none. Tasks in a container run
    their setup there.
    """
    software = spec.software or SoftwareEnvironment()
    setup = "" if software.container else spec.setup
    write = ["bash", "-c", _WRITE_VARIABLES % (setup or ":"), "bash", variables_file]
    command = enter_command(spec.software, write)
    return command if setup or command != write else []


def task_prefix_in_container(spec: JobSpec) -> list[str]:
    """Return the words before the command of a farm's task in its container: they enter the
    working directory and the virtual environment, and run the setup.
    """
    software = spec.software or SoftwareEnvironment()
    setup = ["bash", "-c", _TASK_SETUP % spec.setup, "bash"] if spec.setup else []
    values = [software.container or "", spec.workdir, software.venv, ""]
    return ["/bin/sh", "-c", _INSIDE, "sh", *values, *setup]


def binds(
    paths: Iterable[str], *, apart: Iterable[tuple[str, str]] = ()
) -> tuple[tuple[str, str], ...]:
    """Return the binds of a container as (path on the host, path in the container): parents first,
    without duplicates.

    Args:
        paths: absolute ``SRC`` or ``SRC:DST``. For each DST the first counts. A path is left
            out if it has the same path on host and in the container, as the innermost bind above it
            has.
        apart: binds to separate directories, which come after all others.
    """
    mounts: dict[str, str] = {}
    for text in paths:
        source, _, target = text.partition(":")
        mounts.setdefault(os.path.normpath(target or source), os.path.normpath(source))
    selected: list[tuple[str, str]] = []
    for target in sorted(mounts, key=lambda path: (path.count("/"), path)):
        source = mounts[target]
        above = [(outer, place) for outer, place in selected if _is_below(target, place)]
        outer, place = max(above, key=lambda bind: bind[1].count("/"), default=("", "/"))
        if source != target or outer != place:
            selected.append((source, target))
    return (*selected, *apart)


def passed_variables(
    environment: Mapping[str, str], own: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names of the variables that are passed into a container, globs of those that are
    not).

    Args:
        environment: environment of the launcher on the host.
        own: names of variables that the job sets itself. They are always passed.
    """
    own = frozenset(own)
    globs = tuple(g for g in HOST_ONLY if not any(fnmatchcase(name, g) for name in own))
    names = sorted(
        name
        for name in environment
        if _NAME.fullmatch(name)
        and (name in own or not any(fnmatchcase(name, glob) for glob in HOST_ONLY))
    )
    return tuple(names), globs


def missing_mount_points(
    targets: Iterable[str], present: Iterable[str] = ("/dev", "/proc", "/sys", "/tmp")
) -> list[str]:
    """Return the targets that must exist in the image: those that are not below another target,
    or below a path that the runtime always binds.

    Args:
        targets: the bind targets.
        present: paths that the runtime always binds.
    """
    missing: list[str] = []
    for target in targets:
        if not any(_is_below(target, path) for path in (*present, *missing)):
            missing.append(target)
    return missing


def _is_below(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(ancestor.rstrip("/") + "/")
