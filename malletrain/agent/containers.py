"""The command lines of container runtimes: a table of how each runs one command in an image. Pure.

:func:`container_command` decides the arguments. Each row of :data:`RUNTIMES` names the manual of
its runtime. A command line never contains the values of variables, because all users of a node can
read it. Variables are passed by name, or in the environment of the runtime
(:func:`runtime_environment`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONTAINER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH in the container if the image does not set one."""


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
