"""A job's software environment on a node: modules, a conda or virtual environment, a container.
Pure.

Decides the order in which its parts are entered, which paths of the node a container sees, and
which variables are passed into it. Starts nothing. The scripts below are constant. Names from a job
are arguments of a script, and never part of it.

    modules (host) → conda | venv (host) | container → the job's setup → Python

:func:`container_command` decides the arguments of a container runtime. Each row of
:data:`RUNTIMES` names the manual of its runtime. A command line never contains the values of
variables, because all users of a node can read it. Variables are passed by name, or in the
environment of the runtime (:func:`runtime_environment`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from malletrain.launch.entry import umask_of
from malletrain.launch.task_limits import SUFFIX
from malletrain.protocol.env import UMASK
from malletrain.protocol.failures import UNFIT
from malletrain.protocol.messages import JobSpec, SoftwareEnvironment

CONTAINER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH in the container if the image does not set one."""
_WRITE_VARIABLES = (
    '{\n%s\n} && { { umask; ulimit -S -a; } > "$1' + SUFFIX + '" || :; } && exec env -0 > "$1"'
)
_TASK_SETUP = '{\n%s\n} && exec "$@"'
_SETUP = '{\n%s\n} && exec "$(command -v python || command -v python3)" "$@"'
_OWNER_SETUP = '{\n%s\n} >&2 && exec "$@"'


@dataclass(frozen=True)
class ContainerSpec:
    """Parameters of one container, independent of the runtime."""

    image: str
    """A file, a directory, or the name by which the runtime knows the image."""
    workdir: str
    """Working directory of the command."""
    binds: tuple[tuple[str, str], ...]
    """(path on the host, path in the container), each before the paths that are bound below it."""
    variables: tuple[str, ...]
    """Names of the variables that are passed into the container."""
    unset_variables: tuple[str, ...] = ()
    """Globs of variables that are meaningful only on the host."""
    options: tuple[str, ...] = ()
    """Additional options from the site's configuration."""
    command_script: str = ""
    """A script that runs its arguments. It replaces the image's rc script (enroot)."""
    image_environment: bool = False
    """Whether the image defines environment variables (Charliecloud: /ch/environment)."""
    nvidia: bool = False
    """Whether the node has NVIDIA GPUs."""
    amd: bool = False
    """Whether the node has AMD GPUs."""
    root: bool = False
    """Whether the user is root."""
    stdin: bool = False
    """Whether the command has a standard input."""
    terminal: bool = False
    """Whether that is a terminal."""


@dataclass(frozen=True)
class ContainerRuntime:
    """One row of the table. Each tuple holds command-line arguments, which can contain a field of
    :class:`ContainerSpec` in braces.
    """

    manual_url: str
    """Manual of the command line."""
    command: tuple[str, ...]
    """The program and the arguments that are always passed."""
    bind: tuple[str, ...]
    """Binds {source} to {target}."""
    image: tuple[str, ...]
    """The image, after the argument that ends the options, if any."""
    variable: tuple[str, ...] = ()
    """Passes one variable: {name}."""
    variable_prefix: str = ""
    """The runtime passes the variables of its environment whose names start with this prefix."""
    unset_variables: tuple[str, ...] = ()
    """Removes the variables that match {glob}. For runtimes that pass all variables."""
    set_path: tuple[str, ...] = ()
    """Sets PATH if the host's PATH is removed."""
    image_environment: tuple[str, ...] = ()
    """Sets the variables that the image defines."""
    nvidia: tuple[str, ...] = ()
    """Adds NVIDIA GPUs and the libraries of their driver."""
    amd: tuple[str, ...] = ()
    """Adds AMD GPUs."""
    non_root: tuple[str, ...] = ()
    """Passed unless the user is root."""
    stdin: tuple[str, ...] = ()
    """Connects the standard input. For runtimes that do not by default."""
    terminal: tuple[str, ...] = ()
    """Connects a terminal. For runtimes that do not by default."""
    forbidden_characters: str = ":"
    """Characters that a bound path must not contain."""
    needs_mount_points: bool = False
    """Whether bind targets must exist in the image."""

    @property
    def program(self) -> str:
        """Name of the executable, which must be on the node's PATH."""
        return self.command[0]


_SINGULARITY = ContainerRuntime(
    manual_url="https://docs.sylabs.io/guides/latest/user-guide/cli/singularity_exec.html",
    command=("singularity", "exec", "--cleanenv", "--pwd", "{workdir}"),
    bind=("--bind", "{source}:{target}"),
    variable_prefix="SINGULARITYENV_",
    nvidia=("--nv",),
    amd=("--rocm",),
    image=("{image}",),
    forbidden_characters=":,",
)

RUNTIMES: dict[str, ContainerRuntime] = {
    "apptainer": ContainerRuntime(
        manual_url="https://apptainer.org/docs/user/latest/cli/apptainer_exec.html",
        command=("apptainer", "exec", "--cleanenv", "--pwd", "{workdir}"),
        bind=("--bind", "{source}:{target}"),
        variable_prefix="APPTAINERENV_",
        nvidia=("--nv",),
        amd=("--rocm",),
        image=("{image}",),
        forbidden_characters=":,",
    ),
    "singularity": _SINGULARITY,
    "podman-hpc": ContainerRuntime(
        manual_url="https://docs.nersc.gov/development/containers/podman-hpc/overview/",
        # --pid=host: the agent must see leftover processes, and workers of two rounds must not have
        # the same process ids. --ipc=host and --network=host: as without a container.
        command=(
            *("podman-hpc", "run", "--rm", "--pid=host", "--network=host", "--ipc=host"),
            *("--security-opt=label=disable", "--entrypoint=", "--workdir={workdir}"),
        ),
        bind=("--volume={source}:{target}",),
        variable=("--env={name}",),
        nvidia=("--gpu",),
        non_root=("--userns=keep-id",),
        stdin=("--interactive",),
        terminal=("--tty",),
        image=("{image}",),
    ),
    "charliecloud": ContainerRuntime(
        manual_url="https://hpc.github.io/charliecloud/ch-run.html",
        command=("ch-run", "--cd={workdir}"),
        bind=("--bind={source}:{target}",),
        unset_variables=("--unset-env={glob}",),
        set_path=(f"--set-env=PATH={CONTAINER_PATH}",),
        image_environment=("--set-env",),
        image=("{image}", "--"),
        needs_mount_points=True,
    ),
    "enroot": ContainerRuntime(
        manual_url="https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md",
        command=("enroot", "start", "--rc", "{command_script}"),
        bind=("--mount", "{source}:{target}:none:x-create=auto,rbind"),
        variable=("--env", "{name}"),
        nvidia=(
            *("--env", "NVIDIA_VISIBLE_DEVICES=all"),
            *("--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ),
        image=("{image}",),
        forbidden_characters=": \t",
    ),
    "podman": ContainerRuntime(
        manual_url="https://docs.podman.io/en/latest/markdown/podman-run.1.html",
        command=(
            *("podman", "run", "--rm", "--pid=host", "--network=host", "--ipc=host"),
            *("--security-opt=label=disable", "--entrypoint=", "--workdir={workdir}"),
        ),
        bind=("--volume={source}:{target}",),
        variable=("--env={name}",),
        nvidia=("--device=nvidia.com/gpu=all",),
        amd=("--device=/dev/kfd", "--device=/dev/dri"),
        non_root=("--userns=keep-id",),
        stdin=("--interactive",),
        terminal=("--tty",),
        image=("{image}",),
    ),
}
"""Runtimes by name, in the order in which the agent looks for them on a node."""


def container_command(
    runtime: ContainerRuntime, container: ContainerSpec, command: Sequence[str]
) -> list[str]:
    """Return the command line that runs a command in a container.

    Args:
        runtime: the container runtime.
        container: the container.
        command: the command.
    """
    fields = {
        "workdir": container.workdir,
        "image": container.image,
        "command_script": container.command_script,
    }

    def formatted(template: tuple[str, ...], **more: str) -> list[str]:
        return [argument.format(**fields, **more) for argument in template]

    argv = formatted(runtime.command)
    if not container.root:
        argv += formatted(runtime.non_root)
    if container.stdin:
        argv += formatted(runtime.stdin)
    if container.terminal:
        argv += formatted(runtime.terminal)
    if container.nvidia:
        argv += formatted(runtime.nvidia)
    if container.amd:
        argv += formatted(runtime.amd)
    for glob in container.unset_variables:
        argv += formatted(runtime.unset_variables, glob=glob)
    if "PATH" in container.unset_variables:
        argv += formatted(runtime.set_path)
    if container.image_environment:
        argv += formatted(runtime.image_environment)
    for name in container.variables:
        argv += formatted(runtime.variable, name=name)
    for source, target in container.binds:
        argv += formatted(runtime.bind, source=source, target=target)
    return [*argv, *container.options, *formatted(runtime.image), *command]


def runtime_environment(
    runtime: ContainerRuntime, container: ContainerSpec, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the runtime's process: ``environment``, and the prefixed variables
    that the runtime passes into the container. Variables that each task of a farm has of its own
    are not part of it.

    Args:
        runtime: the container runtime.
        container: the container.
        environment: environment of the job.
    """
    result = dict(environment)
    prefix = runtime.variable_prefix
    if prefix:
        names = [n for n in container.variables if n != "HOME" and n in environment]
        result.update({prefix + n: environment[n] for n in names})
    return result


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
        return ["bash", "-c", _SETUP % _setup_with_umask(spec), "bash", *arguments]
    if software.container:
        return [*arguments]
    return ["python" if software.venv or software.conda else spec.python, *arguments]


def _setup_with_umask(spec: JobSpec) -> str:
    """Return the job's setup, after the job's umask: a ``umask`` in the setup has the last word.
    :mod:`malletrain.launch.entry` sets only one that was not set here.
    """
    mask = umask_of(spec.env)
    own = "" if mask < 0 else f"umask {mask:04o}\nunset {UMASK}\n"
    return f"{own}{spec.setup}"


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
    variables to a file as ``env -0`` does, and beside it its umask and limits; empty if the tasks
    need none. Tasks in a container run their setup there.
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
