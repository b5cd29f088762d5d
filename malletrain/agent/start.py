"""Starts the launcher of a job from the daemon's assignment.

Looks up what only the node knows: the container runtime, the GPUs, the location of the agent's own
packages. :mod:`malletrain.agent.software`, :mod:`malletrain.agent.containers` and
:mod:`malletrain.agent.launch` decide what follows.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from malletrain.agent.containers import (
    RUNTIMES,
    ContainerRuntime,
    Containment,
    container_command,
    runtime_environment,
)
from malletrain.agent.fork_servers import Launched, NodeForkServers
from malletrain.agent.launch import (
    JobPlace,
    LauncherEntry,
    job_environment,
    launch_arguments,
    launcher_words,
    supervised_command,
)
from malletrain.agent.process import JobProcess
from malletrain.agent.software import (
    binds,
    described,
    entered,
    handed_in,
    inside,
    missing_mount_points,
    python_command,
)
from malletrain.launch import entry
from malletrain.memory.folder import bound
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.launcher_channel import LaunchOrder, write_order
from malletrain.protocol.messages import Assign, JobSpec, SoftwareEnvironment

COMPILED = ("msgspec", "zmq")
"""What the launcher needs besides torch; an image of the agent's Python may borrow the agent's."""
_RC = 'exec "$@"\n'


class UnfitNode(ValueError):
    """The job's software cannot be entered on this node; the text is a sentence."""


def start_launcher(
    assign: Assign,
    place: JobPlace,
    servers: NodeForkServers,
    flags: str,
    log_dir: Path,
    log: Path,
) -> Launched:
    """Start the launcher of a job.

    Args:
        assign: what the daemon wants.
        place: where it runs.
        servers: of which one may be warm for it.
        flags: file of the drains that are asked for.
        log_dir: where each worker's output goes.
        log: where the launcher's own goes.

    Raises:
        UnfitNode: the job's software cannot be entered here.
        OSError: its files cannot be made, or the process not started.
        ValueError: a zero byte in an argument.
    """
    reached(FaultPoint.AGENT_LAUNCHES)
    spec = assign.spec
    order = LaunchOrder(
        job=assign.job,
        spec=spec,
        endpoint=place.launcher_endpoint,
        host=place.host,
        log_dir=str(log_dir),
        stop_grace_s=assign.stop_grace_s,
        join_timeout_s=assign.join_timeout_s,
    )
    order_file = place.directory / "order.json"
    write_order(order_file, order)
    memory_bytes = bound(assign.memory_share) if spec.mode == "restart" else 0
    environment = job_environment(
        *(place, order),
        flags=flags,
        key=assign.key,
        memory_bytes=memory_bytes,
        hand_over_bytes=int(assign.hand_over_bytes),
    )

    def cold() -> JobProcess:
        command, outside = launcher_command(spec, order_file, place, environment)
        argv = supervised_command(command, os.getpid(), spec.workdir, log, place.memory)
        return JobProcess(argv, outside)

    launched = servers.launch(spec, launcher_words(order_file), environment, log, cold)
    reached(FaultPoint.AGENT_LAUNCHED)
    return launched


def launcher_command(
    spec: JobSpec, order_file: Path, place: JobPlace, environment: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of the launcher of a job; ``environment`` is the job's own outside of
    a container.

    Raises:
        UnfitNode: the container cannot be started here.
        OSError: its files cannot be made.
    """
    software = spec.software or SoftwareEnvironment()
    if not software.container:
        arguments = launch_arguments(
            spec, order_file, LauncherEntry(entry.__file__, described(spec))
        )
        return entered(spec.software, python_command(spec, arguments)), environment
    runtime = _runtime(software, environment)
    packages = _packages(place.directory)
    target = packages[0][1]
    begin = LauncherEntry(f"{target}/launch/entry.py", described(spec), os.path.dirname(target))
    command = inside(spec, python_command(spec, launch_arguments(spec, order_file, begin)))
    environment = {**_who(), **environment}
    containment = _containment(spec, software, place, environment, packages)
    _check(runtime, containment)
    if runtime.needs_mount_points:
        _make_mount_points(containment)
    Path(containment.command_script).write_text(_RC)
    made = container_command(runtime, containment, command)
    return entered(software, made), runtime_environment(runtime, containment, environment)


def _runtime(software: SoftwareEnvironment, environment: dict[str, str]) -> ContainerRuntime:
    path = environment.get("PATH")
    if software.runtime != "auto":
        container_runtime = RUNTIMES.get(software.runtime)
        if container_runtime is None:
            raise UnfitNode(
                f"The container runtime '{software.runtime}' is not known; known are "
                f"{', '.join(RUNTIMES)}."
            )
        if not software.modules and shutil.which(container_runtime.program, path=path) is None:
            raise UnfitNode(
                f"This node has no {container_runtime.program}, which is to run the container "
                f"image {software.container}; is it in a module (--module)?"
            )
        return container_runtime
    for runtime in RUNTIMES.values():
        if shutil.which(runtime.program, path=path) is not None:
            return runtime
    raise UnfitNode(
        f"This node has no container runtime for {software.container}: none of "
        f"{', '.join(row.program for row in RUNTIMES.values())} is on its PATH. Where a module "
        "brings one, name both: --module NAME --container-runtime NAME."
    )


def _who() -> dict[str, str]:
    """What runtimes ask of the environment, where a lease does not say it."""
    try:
        name, home = pwd.getpwuid(os.geteuid()).pw_name, pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return {"USER": str(os.geteuid())}
    return {"USER": name, "LOGNAME": name, "HOME": home}


def _packages(directory: Path) -> list[tuple[str, str]]:
    """(path outside, path inside) of malletrain first, then of what it needs that is compiled.
    Directories to bind them to are made.
    """
    own = Path(entry.__file__).parents[1]
    binds = [(str(own), str(directory / "lib" / own.name))]
    versioned = directory / entry.library_name(sys.version_info)
    for name in COMPILED:
        origin = find_spec(name)
        for path in (origin.submodule_search_locations or ()) if origin else ():
            binds.append((path, str(versioned / name)))
            bundled = Path(path).with_name(f"py{name}.libs")  # shared libraries of a wheel
            if bundled.is_dir():
                binds.append((str(bundled), str(versioned / bundled.name)))
    for _, target in binds:
        os.makedirs(target, exist_ok=True)
    return binds


def _containment(
    spec: JobSpec,
    software: SoftwareEnvironment,
    place: JobPlace,
    environment: dict[str, str],
    packages: list[tuple[str, str]],
) -> Containment:
    home = environment.get("HOME", "")
    variables = [
        *software.binds,
        spec.workdir,
        os.path.dirname(os.path.join(spec.workdir, spec.script)),
        *([home] if os.path.isdir(home) and home != "/" else []),
        str(place.directory),
        *([str(place.memory)] if place.memory is not None else []),
        os.path.dirname(place.worker_socket),
    ]
    names, globs = handed_in(environment, spec.env)
    image = software.container or ""
    return Containment(
        image=image,
        workdir=spec.workdir,
        binds=binds(variables, apart=packages),
        variables=names,
        host_only=globs,
        options=software.options,
        command_script=str(place.directory / "rc"),
        image_environment=os.path.isfile(os.path.join(image, "ch", "environment")),
        nvidia=os.path.exists("/dev/nvidiactl"),
        amd=os.path.exists("/dev/kfd"),
        root=os.geteuid() == 0,
    )


def _check(runtime: ContainerRuntime, containment: Containment) -> None:
    for source, target in containment.binds:
        if bad := [c for c in runtime.forbids if c in source or c in target]:
            raise UnfitNode(
                f"{source} cannot be bound into a container: {runtime.program} takes no path with "
                f"{bad[0]!r} in it."
            )
        if not os.path.exists(source):
            raise UnfitNode(
                f"{source} is to be bound into the container of {containment.image}, but this "
                "node has no such file or directory."
            )


def _make_mount_points(containment: Containment) -> None:
    """Make the places to bind to in an image that is a directory. An archive has to have them, and
    the runtime says which it lacks.
    """
    image = Path(containment.image)
    if not image.is_dir():
        return
    sources = {target: source for source, target in containment.binds}
    for target in missing_mount_points(sources):
        inner = image / target.lstrip("/")
        if inner.exists():
            continue
        why = "a symbolic link there leads out of the image"
        try:
            if inner.resolve().is_relative_to(image.resolve()):
                place = inner if os.path.isdir(sources[target]) else inner.parent
                place.mkdir(parents=True, exist_ok=True)
                if place != inner:
                    inner.touch()
                continue
        except OSError as error:
            why = str(error.strerror)
        raise UnfitNode(
            f"The container image {image} has no {target} to bind the node's to, and it cannot be "
            f"made ({why}); make it when you make the image."
        )
