"""Starts the launcher of a job from the daemon's assignment, in the job's software environment.

:func:`start_launcher` looks up what only the node knows: the container runtime, the GPUs, the
location of the agent's own packages. :mod:`malletrain.agent.software` decides which paths a
container sees and which variables are passed into it, and the command line of the container
runtime; :mod:`malletrain.agent.launch` the command and the environment of the launcher.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from malletrain.agent.fork_servers import Launched, NodeForkServers
from malletrain.agent.launch import (
    JobPlace,
    LauncherEntry,
    job_environment,
    launch_arguments,
    launcher_arguments,
    supervised_command,
)
from malletrain.agent.process import JobProcess
from malletrain.agent.software import (
    RUNTIMES,
    ContainerRuntime,
    ContainerSpec,
    binds,
    command_in_container,
    container_command,
    describe_environment,
    enter_command,
    missing_mount_points,
    owner_command,
    passed_variables,
    python_command,
    runtime_environment,
    task_environment_command,
    task_prefix_in_container,
)
from malletrain.launch import entry
from malletrain.launch.task_process import TASK_VARIABLES
from malletrain.memory.folder import bound
from malletrain.protocol import env
from malletrain.protocol.commands import Terminal
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.gpus import count_gpus
from malletrain.protocol.launcher_channel import LaunchOrder, TaskSetting, write_order
from malletrain.protocol.messages import Assign, JobSpec, SoftwareEnvironment

FARM_NICENESS = 5
"""Added to the niceness of a farm's launcher and tasks. They may use all processors of the node,
and the agent, and on an embedded cluster the daemon, come first.
"""

_OF_LAUNCHER = (env.AGENT, env.FLAGS, env.SOCKET, env.JOB_KEY, env.MAX_WORLD_SIZE)
"""Variables of the launcher that the tasks of a farm do not need."""
_COMMAND_SCRIPT = 'exec "$@"\n'


class UnusableSoftware(ValueError):
    """The job's software environment cannot be used on this node. The message is a sentence for the
    owner.
    """


def start_launcher(
    assign: Assign,
    place: JobPlace,
    fork_servers: NodeForkServers,
    drain_file: str,
    log_dir: Path,
    launcher_log: Path,
) -> Launched:
    """Start the launcher of a job.

    Args:
        assign: assignment from the daemon.
        place: host, directory and sockets of the job on this node.
        fork_servers: fork servers of the node; one may already serve this job.
        drain_file: file in which drains are requested.
        log_dir: directory of the workers' logs.
        launcher_log: log file of the launcher.

    Raises:
        UnusableSoftware: the job's software environment cannot be used on this node.
        OSError: a file cannot be created or the process cannot be started.
        ValueError: an argument contains a NUL byte.
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
    memory_bytes = bound(assign.memory_share, place.memory_bytes) if spec.mode == "restart" else 0
    environment = job_environment(
        place,
        order,
        flags=drain_file,
        key=assign.key,
        memory_bytes=memory_bytes,
        hand_over_bytes=int(assign.hand_over_bytes),
        max_processes=assign.max_processes,
    )
    if spec.farm is not None:
        setting = task_setting(spec, place, environment)
        order = msgspec.structs.replace(order, tasks=setting)
    write_order(order_file, order)

    def start_cold() -> JobProcess:
        command, launcher_environment = launcher_command(spec, order_file, place, environment)
        niceness = FARM_NICENESS if spec.mode == "farm" else 0
        argv = supervised_command(
            command, os.getpid(), spec.workdir, launcher_log, place.memory, niceness
        )
        return JobProcess(argv, launcher_environment)

    arguments = launcher_arguments(order_file)
    launched = fork_servers.launch(spec, arguments, environment, launcher_log, start_cold)
    reached(FaultPoint.AGENT_LAUNCHED)
    return launched


def launcher_command(
    spec: JobSpec, order_file: Path, place: JobPlace, environment: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return (command, environment) of a job's launcher.

    Args:
        spec: specification of the job.
        order_file: file of the launcher's order.
        place: host, directory and sockets of the job on this node.
        environment: the job's environment without a container.

    Raises:
        UnusableSoftware: the container cannot be started on this node.
        OSError: a file cannot be created.
    """
    if spec.mode == "farm":  # its tasks have the job's environment; the launcher has the agent's
        arguments = launch_arguments(
            spec, order_file, LauncherEntry(entry.__file__, "The agent's Python")
        )
        inherited = {k: v for k, v in place.environment.items() if k.startswith("PYTHON")}
        return [sys.executable, *arguments], {**environment, **inherited}
    software = spec.software or SoftwareEnvironment()
    description = describe_environment(spec)
    if not software.container:
        arguments = launch_arguments(spec, order_file, LauncherEntry(entry.__file__, description))
        return enter_command(spec.software, python_command(spec, arguments)), environment
    packages = _package_binds(place.directory)
    target = packages[0][1]
    launcher_entry = LauncherEntry(
        f"{target}/launch/entry.py", description, os.path.dirname(target)
    )
    arguments = launch_arguments(spec, order_file, launcher_entry)
    command = command_in_container(spec, python_command(spec, arguments))
    container = _container_spec(spec, software, place, _with_user(environment), packages)
    return _in_container(software, container, environment, command)


def command_of_owner(
    assign: Assign,
    place: JobPlace,
    drain_file: str,
    command: Sequence[str],
    terminal: Terminal | None,
) -> tuple[list[str], dict[str, str]]:
    """Return (command, environment) of a command that the job's owner runs on this node: the
    job's software environment and variables, without those by which a worker reports.

    Args:
        assign: assignment of the job.
        place: host, directory and sockets of the job on this node.
        drain_file: file in which drains are requested.
        command: the command.
        terminal: the owner's terminal; None if there is none.

    Raises:
        UnusableSoftware: the container cannot be started on this node.
        OSError: a file cannot be created.
    """
    spec = assign.spec
    software = spec.software or SoftwareEnvironment()
    order = LaunchOrder(
        job=assign.job,
        spec=spec,
        endpoint=place.launcher_endpoint,
        host=place.host,
        log_dir="",
        stop_grace_s=assign.stop_grace_s,
        join_timeout_s=assign.join_timeout_s,
    )
    environment = job_environment(place, order, flags=drain_file, key=assign.key)
    for name in (env.SOCKET, env.FLAGS, env.AGENT):
        environment.pop(name, None)
    if terminal is not None:
        environment["TERM"] = terminal.kind or "dumb"
    plain = owner_command(spec, command)
    if not software.container:
        return enter_command(spec.software, plain), environment
    container = replace(
        _container_spec(spec, software, place, _with_user(environment), []),
        stdin=True,
        terminal=terminal is not None,
    )
    inside = command_in_container(spec, plain, needs_python=False)
    return _in_container(software, container, environment, inside)


def _with_user(environment: Mapping[str, str]) -> dict[str, str]:
    return {**_user_variables(), **environment}


def _in_container(
    software: SoftwareEnvironment,
    container: ContainerSpec,
    environment: dict[str, str],
    command: Sequence[str],
) -> tuple[list[str], dict[str, str]]:
    """Return (command, environment) that runs a command in a container on this node."""
    runtime = _runtime(software, environment)
    environment = _with_user(environment)
    _check_binds(runtime, container)
    if runtime.needs_mount_points:
        _make_mount_points(container)
    Path(container.command_script).write_text(_COMMAND_SCRIPT)
    argv = enter_command(software, container_command(runtime, container, command))
    return argv, runtime_environment(runtime, container, environment)


def task_setting(spec: JobSpec, place: JobPlace, environment: dict[str, str]) -> TaskSetting:
    """Return how the tasks of a farm are started in the job's software environment.

    Args:
        spec: specification of the farm.
        place: host, directory and sockets of the job on this node.
        environment: the job's environment.

    Raises:
        UnusableSoftware: the container cannot be started on this node.
        OSError: a file cannot be created.
    """
    environment = {n: v for n, v in environment.items() if n not in _OF_LAUNCHER}
    variables_file = str(place.directory / "variables")
    enter = tuple(task_environment_command(spec, variables_file))
    devices = _devices(place.environment)
    software = spec.software or SoftwareEnvironment()
    if not software.container:
        return TaskSetting(environment, enter, variables_file, devices=devices)
    runtime = _runtime(software, environment)
    environment = {**_user_variables(), **environment}
    own = (*spec.env, *TASK_VARIABLES)
    container = _container_spec(
        spec, software, place, {**environment, **dict.fromkeys(TASK_VARIABLES, "")}, [], own
    )
    _check_binds(runtime, container)
    if runtime.needs_mount_points:
        _make_mount_points(container)
    Path(container.command_script).write_text(_COMMAND_SCRIPT)
    return TaskSetting(
        runtime_environment(runtime, container, environment),
        enter,
        variables_file,
        tuple(container_command(runtime, container, task_prefix_in_container(spec))),
        runtime.variable_prefix,
        devices,
    )


def _devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of the lease, as CUDA_VISIBLE_DEVICES names them."""
    count = count_gpus(environment)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(index) for index in range(count))
    return tuple(part.strip() for part in visible.split(",") if part.strip())[:count]


def _runtime(software: SoftwareEnvironment, environment: dict[str, str]) -> ContainerRuntime:
    path = environment.get("PATH")
    if software.runtime != "auto":
        container_runtime = RUNTIMES.get(software.runtime)
        if container_runtime is None:
            raise UnusableSoftware(
                f"The container runtime '{software.runtime}' is not supported; the supported "
                f"runtimes are {', '.join(RUNTIMES)}."
            )
        if not software.modules and shutil.which(container_runtime.program, path=path) is None:
            raise UnusableSoftware(
                f"This node has no {container_runtime.program}, which runs the container image "
                f"{software.container}, on its PATH. If a module provides it, add --module NAME."
            )
        return container_runtime
    for runtime in RUNTIMES.values():
        if shutil.which(runtime.program, path=path) is not None:
            return runtime
    raise UnusableSoftware(
        f"This node has no container runtime for {software.container}: none of "
        f"{', '.join(row.program for row in RUNTIMES.values())} is on its PATH. If a module "
        "provides one, add --module NAME --container-runtime NAME."
    )


def _user_variables() -> dict[str, str]:
    """Return the user variables that container runtimes read, for leases without them."""
    try:
        name, home = pwd.getpwuid(os.geteuid()).pw_name, pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return {"USER": str(os.geteuid())}
    return {"USER": name, "LOGNAME": name, "HOME": home}


def _package_binds(directory: Path) -> list[tuple[str, str]]:
    """Return (path on the host, path in the container) of malletrain, then of each package that it
    needs. Creates the bind targets.
    """
    own = Path(entry.__file__).parents[1]
    binds = [(str(own), str(directory / "lib" / own.name))]
    versioned = directory / entry.library_name(sys.version_info)
    for name in entry.needed_packages(sys.version_info):
        origin = find_spec(name)
        for path in (origin.submodule_search_locations or ()) if origin else ():
            binds.append((path, str(versioned / name)))
            bundled = Path(path).with_name(f"py{name}.libs")  # shared libraries of a wheel
            if bundled.is_dir():
                binds.append((str(bundled), str(versioned / bundled.name)))
    for _, target in binds:
        os.makedirs(target, exist_ok=True)
    return binds


def _container_spec(
    spec: JobSpec,
    software: SoftwareEnvironment,
    place: JobPlace,
    environment: dict[str, str],
    packages: list[tuple[str, str]],
    own_variables: Iterable[str] = (),
) -> ContainerSpec:
    home = environment.get("HOME", "")
    paths = [
        *software.binds,
        spec.workdir,
        # The command of a farm may be one of the image, in a directory such as /usr/bin.
        *([os.path.dirname(os.path.join(spec.workdir, spec.script))] if spec.farm is None else []),
        *([home] if os.path.isdir(home) and home != "/" else []),
        str(place.directory),
        *([str(place.memory)] if place.memory is not None else []),
        os.path.dirname(place.worker_socket),
    ]
    names, globs = passed_variables(environment, own_variables or spec.env)
    image = software.container or ""
    return ContainerSpec(
        image=image,
        workdir=spec.workdir,
        binds=binds(paths, apart=packages),
        variables=names,
        unset_variables=globs,
        options=software.options,
        command_script=str(place.directory / "rc"),
        image_environment=os.path.isfile(os.path.join(image, "ch", "environment")),
        nvidia=os.path.exists("/dev/nvidiactl"),
        amd=os.path.exists("/dev/kfd"),
        root=os.geteuid() == 0,
    )


def _check_binds(runtime: ContainerRuntime, container: ContainerSpec) -> None:
    for source, target in container.binds:
        if bad := [c for c in runtime.forbidden_characters if c in source or c in target]:
            raise UnusableSoftware(
                f"{source} cannot be bound into a container: {runtime.program} does not accept "
                f"paths that contain {bad[0]!r}."
            )
        if not os.path.exists(source):
            raise UnusableSoftware(
                f"{source} is to be bound into the container of {container.image}, but this "
                "node has no such file or directory."
            )


def _make_mount_points(container: ContainerSpec) -> None:
    """Create the missing mount points in an image that is a directory. An image file must contain
    them; the runtime reports those that are missing.
    """
    image = Path(container.image)
    if not image.is_dir():
        return
    sources = {target: source for source, target in container.binds}
    for target in missing_mount_points(sources):
        inner = image / target.lstrip("/")
        reason = "a symbolic link there leads out of the image"
        try:
            # Outside the image something may exist at the end of the link. The runtime refuses it.
            if inner.resolve().is_relative_to(image.resolve()):
                if inner.exists():
                    continue
                directory = inner if os.path.isdir(sources[target]) else inner.parent
                directory.mkdir(parents=True, exist_ok=True)
                if directory != inner:
                    inner.touch()
                continue
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            reason = str(getattr(error, "strerror", None) or "links there lead in a circle")
        raise UnusableSoftware(
            f"The container image {image} has no mount point {target}, and the agent cannot "
            f"create it ({reason}). Create it when you build the image."
        )
