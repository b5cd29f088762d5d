"""A real Slurm for tests: munged, slurmctld and any number of slurmd on loopback, everything below
one directory, removed without trace.

No systemd, no root needed, any number side by side. Daemons are children of this process and die
with it.

It is the Slurm on PATH, or the one below the prefix that the environment variable
MALLETRAIN_TEST_SLURM names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests import waiting
from tests.last_words import tail
from tests.ports import free_ports
from tests.waiting import PATIENCE_S

PREFIX = "MALLETRAIN_TEST_SLURM"
"""Environment variable with the prefix of the Slurm to test, such as ``/opt/slurm-25.05``."""
PROGRAMS = ("slurmctld", "slurmd", "munged", "sinfo", "squeue", "sbatch", "scancel", "scontrol")
NOT_OF_SLURM = ("munged", "mariadbd")
"""Programs of the system, used with every release of Slurm."""
NO_CGROUPS = (24, 5)
"""Release from which slurmd has to be told that there are no cgroups for it (``CgroupPlugin`` of
cgroup.conf(5)); earlier ones do not know the word.
"""

CONF = """
ClusterName=test{port}
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/run/munge.socket,cred_expire={cred_expire}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldDebug=info
SlurmdDebug=info
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
{storage}
JobCompType=jobcomp/none
ReturnToService=2
SlurmctldParameters={controller}
SlurmdParameters=config_overrides
SelectType={select}
SchedulerType=sched/backfill
SchedulerParameters={scheduler}
PriorityType=priority/basic
PreemptType={preempt}
PreemptMode={preempt_mode}
KillWait={kill_wait}
MinJobAge={min_job_age}
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout}
MessageTimeout={message_timeout}
TreeWidth=50
{extra}
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=2000 Feature=test {node} State=UNKNOWN
PartitionName=batch       Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=1 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=preemptable Nodes=ALL Default=NO  MaxTime=INFINITE DefaultTime=1 State=UP PriorityTier=1  {lease_mode} GraceTime={grace}
{partitions}
"""  # noqa: E501


def missing() -> str:
    """Why there can be no Slurm here; empty when there can."""
    return absence("Slurm", PROGRAMS)


def absence(what: str, programs: Sequence[str]) -> str:
    """A sentence about the programs of ``what`` that are missing; empty if none is."""
    prefix = tested_prefix()
    absent = [
        name
        for name in programs
        # No program of another release beside those below the prefix.
        if (path := which(name)) is None
        or (prefix and name not in NOT_OF_SLURM and Path(path).parents[1] != Path(prefix))
    ]
    if not absent:
        return ""
    names = ", ".join(absent)
    if prefix:
        return f"{what} is not installed below {prefix}, which {PREFIX} names: no {names}"
    return f"{what} is not installed (no {names}); run tests/slurm/install.sh as root"


def search_path(path: str | None = None) -> str:
    """A PATH on which the programs of the Slurm to test are found first, then those of ``path``
    (default: this process's PATH).
    """
    tested = [f"{prefix}/bin", f"{prefix}/sbin"] if (prefix := tested_prefix()) else []
    otherwise = os.environ.get("PATH", "") if path is None else path
    return ":".join([*tested, otherwise, "/usr/sbin", "/sbin"])


def tested_prefix() -> str:
    """The prefix of the Slurm to test; empty: the Slurm on PATH."""
    prefix = os.environ.get(PREFIX, "")
    return os.path.abspath(prefix) if prefix else ""


def which(program: str) -> str | None:
    """The path of a program of Slurm's, or of one that its tests need."""
    return shutil.which(program, path=search_path())


@functools.lru_cache
def release_of(slurmctld: str) -> tuple[int, int]:
    """The release of this slurmctld, such as (25, 5)."""
    printed = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, check=True).stdout
    match = re.match(r"slurm(?:-wlm)? (\d+)\.(\d+)", printed)
    assert match is not None, f"{slurmctld} -V printed: {printed}"
    return int(match[1]), int(match[2])


def release() -> tuple[int, int]:
    """The release of the Slurm to test, such as (25, 5)."""
    path = which("slurmctld")
    assert path is not None, missing()
    return release_of(path)


class SlurmCluster:
    """One Slurm below ``root`` (which must be short: sockets lie in it). Node names n1, n2, …;
    options are those of CONF; ``gres``: the text of gres.conf; ``inside``: the command put before
    everything.
    """

    def __init__(
        self, root: Path, nodes: int = 8, inside: Sequence[str] = (), **options: object
    ) -> None:
        self.root = root
        self.inside = list(inside)
        self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
        self.conf = root / "slurm.conf"
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.conf),
            "PATH": search_path(),
        }
        self.options = {
            "controller": "preempt_send_user_signal",
            "select": "select/linear",
            "scheduler": "bf_interval=1,bf_resolution=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0",  # noqa: E501
            "preempt": "preempt/partition_prio",
            "preempt_mode": "REQUEUE",
            "lease_mode": "PreemptMode=CANCEL",
            "kill_wait": 2,
            "cred_expire": 30,
            "min_job_age": 300,
            "slurmd_timeout": 120,
            "message_timeout": 30,
            "grace": 6,
            "storage": "AccountingStorageType=accounting_storage/none",
            "extra": "",
            "node": "",
            "cpus": 2,
            "gres": "",
            "partitions": "",
            **options,
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: socket.socket | None = None

    # --- life ---

    def start(self) -> SlurmCluster:
        """Start everything and wait until all nodes are idle."""
        for name in ("state", "spool", "run", "log"):
            (self.root / name).mkdir(parents=True, mode=0o755)
        base, self.ports = free_ports(len(self.nodes) + 2)
        self.cluster_name, self.spare_port = f"test{base}", base + len(self.nodes) + 1
        self.options["storage"] = str(self.options["storage"]).format(
            root=self.root, port=self.spare_port
        )
        self.conf.write_text(
            CONF.format(
                root=self.root,
                port=base,
                first=base + 1,
                last=base + len(self.nodes),
                nodes=len(self.nodes),
                user=pwd.getpwuid(os.geteuid()).pw_name,
                **self.options,
            )
        )
        if release() >= NO_CGROUPS:
            (self.root / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        if self.options["gres"]:
            (self.root / "gres.conf").write_text(str(self.options["gres"]))
        key = self.root / "run" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        run = self.root / "run"
        self._spawn(
            "munged",
            "--foreground",
            "--force",
            f"--socket={run}/munge.socket",
            f"--key-file={key}",
            f"--pid-file={run}/munged.pid",
            f"--log-file={self.root}/log/munged.log",
            f"--seed-file={run}/munged.seed",
        )
        self.until(lambda: (run / "munge.socket").exists(), "munged listens")
        self.start_controller(fresh=True)
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.states().count("idle") == len(self.nodes), "all nodes are idle")
        return self

    def start_controller(self, fresh: bool = False) -> None:
        self._spawn("slurmctld", "-D", *(["-c"] if fresh else []))

    def start_node(self, node: str) -> None:
        (self.root / "spool" / node).mkdir(exist_ok=True)
        self._spawn("slurmd", "-D", "-N", node, key=node)

    def end(self, key: str, number: int = signal.SIGTERM) -> None:
        """End one daemon: ``slurmctld``, ``munged`` or that of a node, by the node's name."""
        process = self.processes.pop(key)
        process.send_signal(number)
        process.wait(PATIENCE_S)

    def stop(self) -> list[str]:
        """End everything; return the commands of what had to be killed after all daemons were
        gone.
        """
        if "slurmctld" in self.processes:
            with contextlib.suppress(subprocess.SubprocessError):
                ids = self.run("squeue", "-h", "-o", "%A").split()
                if ids:
                    self.run("scancel", *ids)
                self.until(
                    lambda: not self.run("squeue", "-h").strip(),
                    "all jobs have ended",
                )
        # A step of Slurm's says that it is over before it ends.
        end = time.monotonic() + PATIENCE_S
        while (leftovers := self._leftovers()) and time.monotonic() < end:
            time.sleep(0.05)
        for key in [k for k in self.processes if k not in ("munged", "slurmctld")]:
            self.processes[key].terminate()
        for key in list(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.end(key)
        for process in self.jobs_processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.root, ignore_errors=True)
        if self.ports is not None:
            self.ports.close()
        return leftovers

    def _leftovers(self) -> list[str]:
        """The commands of processes of jobs that still run."""
        commands = []
        for process in self.jobs_processes():
            with contextlib.suppress(psutil.Error):
                commands.append(" ".join(process.cmdline())[:200])
        return commands

    def __enter__(self) -> SlurmCluster:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _spawn(self, program: str, *args: str, key: str = "") -> None:
        path = which(program)
        assert path is not None, missing()
        with open(self.root / "log" / f"{key or program}.log", "ab") as log:
            # A daemon must not outlive a test run that is killed.
            argv = [*_DIE_WITH_PARENT, *self.inside, path, *args]
            self.processes[key or program] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.root,
                start_new_session=True,
            )

    # --- asking ---

    def run(self, *argv: str, env_time: str = "standard") -> str:
        """Run one of Slurm's commands; return what it printed, raises CalledProcessError."""
        environment = {**self.environment, "SLURM_TIME_FORMAT": env_time}
        made = subprocess.run(argv, env=environment, capture_output=True, text=True, cwd=self.root)
        if made.returncode:
            raise subprocess.CalledProcessError(made.returncode, argv, made.stdout, made.stderr)
        return str(made.stdout)

    def submit(self, command: str, *options: str, partition: str = "batch") -> str:
        """A job of the main scheduler that runs one command; return its id. No shell stays as its
        parent: Slurm does not find a child that the shell forks while the job is ended.
        """
        return self.run(
            "sbatch",
            "--parsable",
            f"--partition={partition}",
            "--output=/dev/null",
            *options,
            "--wrap",
            f"exec {command}",
        ).strip()

    def states(self) -> list[str]:
        """The state of every node in sinfo."""
        try:
            lines = self.run("sinfo", "-h", "-N", "-p", "batch", "-o", "%N %T").splitlines()
        except subprocess.SubprocessError:
            return []
        state_of = dict(line.split() for line in lines)
        return [state_of.get(node, "unknown") for node in self.nodes]

    def jobs(self, *options: str) -> dict[str, tuple[str, str, str]]:
        """Job id → (state, nodes, name) of everything Slurm remembers."""
        lines = self.run(
            "squeue", "-h", "-a", "-t", "all", "-o", "%A|%T|%N|%j", *options
        ).splitlines()
        return {
            job: (state, nodes, name)
            for job, state, nodes, name in (line.split("|", 3) for line in lines)
        }

    def leases(self) -> dict[str, tuple[str, str, str]]:
        """As :meth:`jobs`, the pending and running leases only."""
        return {
            job: (state, nodes, name)
            for job, (state, nodes, name) in self.jobs().items()
            if name.startswith("malletrain-")
            and state in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")
        }

    def jobs_processes(self) -> list[psutil.Process]:
        """Every process of a job of this Slurm (not its daemons)."""
        ours = {p.pid for p in self.processes.values()} | {os.getpid()}
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid in ours or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                environment = process.environ()
                of_job = (
                    environment.get("SLURM_CONF", "").startswith(str(self.root))
                    and {"SLURM_JOB_ID", "MALLETRAIN_JOB"} & environment.keys()
                )
                if of_job or (
                    process.name().startswith("slurmstepd")
                    and process.cwd().startswith(str(self.root))
                ):
                    processes.append(process)
        return processes

    def until(self, condition, what: str):
        """Wait until ``condition()`` is true; fails with the controller's log."""

        def alive_and():
            for key, process in self.processes.items():
                assert process.poll() is None, f"{key} has ended.\n{self.log(key)}"
            return condition()

        return waiting.until(alive_and, what, 0.05, lambda: self.log("slurmctld"))

    def log(self, key: str) -> str:
        """The last lines of a daemon's log."""
        return tail(self.root / "log" / f"{key}.log")


_DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
