"""The table of container runtimes: how each runs one command in an image. Pure.

Decides the words of the command line. :mod:`malletrain.agent.software` decides what is bound and
which variables are passed. Each row names the manual of its runtime. Values of variables are never
on a command line, which all users of a node can read: they are passed by name, or by the
environment of the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATH_INSIDE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where an image that does not say otherwise has its programs."""


@dataclass(frozen=True)
class Containment:
    """One container, as every runtime is told of it in its own words."""

    image: str
    """A file, a directory, or the name that the runtime knows it by."""
    workdir: str
    """Where the command starts."""
    binds: tuple[tuple[str, str], ...]
    """(path outside, path inside), each before what is bound below it."""
    variables: tuple[str, ...]
    """Names of the variables that are handed in."""
    host_only: tuple[str, ...] = ()
    """Globs of variables that mean something outside only."""
    options: tuple[str, ...] = ()
    """The site's own words."""
    command_script: str = ""
    """A script that runs what it is given, in place of the image's (enroot)."""
    image_environment: bool = False
    """The image says which variables it wants (Charliecloud: /ch/environment)."""
    nvidia: bool = False
    """The node has NVIDIA GPUs."""
    amd: bool = False
    """The node has AMD GPUs."""
    root: bool = False
    """The user is root."""


@dataclass(frozen=True)
class ContainerRuntime:
    """One row of the table. Each tuple of words may name a field of :class:`Containment` in
    braces.
    """

    manual: str
    """Where its command line is described."""
    head: tuple[str, ...]
    """The program and what is always said."""
    bind: tuple[str, ...]
    """One bind: {source}, {target}."""
    image: tuple[str, ...]
    """The image, with what ends the options."""
    variable: tuple[str, ...] = ()
    """One variable handed in: {name}."""
    prefix: str = ""
    """A variable of the runtime's own with this before its name is handed in."""
    host_only: tuple[str, ...] = ()
    """One glob of variables kept out: {glob}; for runtimes that hand in everything."""
    path: tuple[str, ...] = ()
    """Sets PATH where the host's is kept out."""
    image_environment: tuple[str, ...] = ()
    """Has the variables of the image set."""
    nvidia: tuple[str, ...] = ()
    """Brings NVIDIA GPUs and their driver's libraries in."""
    amd: tuple[str, ...] = ()
    """The same for AMD."""
    rootless: tuple[str, ...] = ()
    """Said unless the user is root."""
    forbids: str = ":"
    """Characters that no bound path may have."""
    needs_mount_points: bool = False
    """It binds only to what is in the image."""

    @property
    def program(self) -> str:
        """What has to be on the node's PATH."""
        return self.head[0]


_SINGULARITY = ContainerRuntime(
    manual="https://docs.sylabs.io/guides/latest/user-guide/cli/singularity_exec.html",
    head=("singularity", "exec", "--cleanenv", "--pwd", "{workdir}"),
    bind=("--bind", "{source}:{target}"),
    prefix="SINGULARITYENV_",
    nvidia=("--nv",),
    amd=("--rocm",),
    image=("{image}",),
    forbids=":,",
)

RUNTIMES: dict[str, ContainerRuntime] = {
    "apptainer": ContainerRuntime(
        manual="https://apptainer.org/docs/user/latest/cli/apptainer_exec.html",
        head=("apptainer", "exec", "--cleanenv", "--pwd", "{workdir}"),
        bind=("--bind", "{source}:{target}"),
        prefix="APPTAINERENV_",
        nvidia=("--nv",),
        amd=("--rocm",),
        image=("{image}",),
        forbids=":,",
    ),
    "singularity": _SINGULARITY,
    "podman-hpc": ContainerRuntime(
        manual="https://docs.nersc.gov/development/containers/podman-hpc/overview/",
        # The host's processes: whoever is left over must be seen by the agent, and worker's ids be
        # unlike those of the round before. The host's /dev/shm and network, as without.
        head=(
            *("podman-hpc", "run", "--rm", "--pid=host", "--network=host", "--ipc=host"),
            *("--security-opt=label=disable", "--entrypoint=", "--workdir={workdir}"),
        ),
        bind=("--volume={source}:{target}",),
        variable=("--env={name}",),
        nvidia=("--gpu",),
        rootless=("--userns=keep-id",),
        image=("{image}",),
    ),
    "charliecloud": ContainerRuntime(
        manual="https://hpc.github.io/charliecloud/ch-run.html",
        head=("ch-run", "--cd={workdir}"),
        bind=("--bind={source}:{target}",),
        host_only=("--unset-env={glob}",),
        path=(f"--set-env=PATH={PATH_INSIDE}",),
        image_environment=("--set-env",),
        image=("{image}", "--"),
        needs_mount_points=True,
    ),
    "enroot": ContainerRuntime(
        manual="https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md",
        head=("enroot", "start", "--rc", "{command_script}"),
        bind=("--mount", "{source}:{target}:none:x-create=auto,rbind"),
        variable=("--env", "{name}"),
        nvidia=(
            *("--env", "NVIDIA_VISIBLE_DEVICES=all"),
            *("--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ),
        image=("{image}",),
        forbids=": \t",
    ),
    "podman": ContainerRuntime(
        manual="https://docs.podman.io/en/latest/markdown/podman-run.1.html",
        head=(
            *("podman", "run", "--rm", "--pid=host", "--network=host", "--ipc=host"),
            *("--security-opt=label=disable", "--entrypoint=", "--workdir={workdir}"),
        ),
        bind=("--volume={source}:{target}",),
        variable=("--env={name}",),
        nvidia=("--device=nvidia.com/gpu=all",),
        amd=("--device=/dev/kfd", "--device=/dev/dri"),
        rootless=("--userns=keep-id",),
        image=("{image}",),
    ),
}
"""By name, in the order in which one is looked for on a node."""


def container_command(
    runtime: ContainerRuntime, c: Containment, command: Sequence[str]
) -> list[str]:
    """The command line that runs ``command`` in the container."""
    fields = {"workdir": c.workdir, "image": c.image, "command_script": c.command_script}

    def words(template: tuple[str, ...], **more: str) -> list[str]:
        return [word.format(**fields, **more) for word in template]

    made = words(runtime.head)
    if not c.root:
        made += words(runtime.rootless)
    if c.nvidia:
        made += words(runtime.nvidia)
    if c.amd:
        made += words(runtime.amd)
    for glob in c.host_only:
        made += words(runtime.host_only, glob=glob)
    if "PATH" in c.host_only:
        made += words(runtime.path)
    if c.image_environment:
        made += words(runtime.image_environment)
    for name in c.variables:
        made += words(runtime.variable, name=name)
    for source, target in c.binds:
        made += words(runtime.bind, source=source, target=target)
    return [*made, *c.options, *words(runtime.image), *command]


def runtime_environment(
    runtime: ContainerRuntime, c: Containment, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the runtime's own process: ``environment``, and in it what it is to hand
    in.
    """
    made = dict(environment)
    if runtime.prefix:
        made.update({runtime.prefix + n: environment[n] for n in c.variables if n != "HOME"})
    return made
