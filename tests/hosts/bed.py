"""Several hosts on this machine for tests: each has network, mounts, processes, name and IPC of its
own, and a real Slurm runs on them.

A "switch" is one more network namespace with a bridge; nothing of the bed is in the machine's own.
Every host has a private copy of /etc, /tmp, /var/spool and /var/log; everything else is shared, as
by NFS. The head runs slurmctld, the nodes n1, n2, … a slurmd each, all of them munged. Where users
are asked for, all hosts know them, and only the head knows sudo's rule.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.last_words import tail
from tests.slurm import guests
from tests.slurm.cluster import PREFIX, tested_prefix, which
from tests.slurm.cluster import missing as no_slurm
from tests.waiting import PATIENCE_S, until

NET, MASK = "10.77.0", 16
HEAD = f"{NET}.1"
FRONT = "10.77.1.1"
"""A second address of the head, of which Slurm knows nothing."""
FAST = "10.78.0"
"""The second network, ib0, of which neither Slurm nor /etc/hosts knows."""
FIRST_USER = 64101
"""The number of the first of the users."""
INIT = Path(__file__).with_name("init.py")
NAMESPACES = ("--mount", "--uts", "--pid", "--net", "--ipc")

CONF = """
ClusterName=hosts
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=2
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=300
MessageTimeout=10
{nodes}
NodeName=DEFAULT CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN
{named}
PartitionName=batch       Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=1 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=preemptable Nodes=ALL Default=NO  MaxTime=INFINITE DefaultTime=1 State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime={grace}
"""  # noqa: E501


def missing() -> str:
    """Why there can be no such hosts here; empty when there can."""
    if tested_prefix():
        return f"the hosts of the tests have the system's Slurm; unset {PREFIX}"
    if reason := no_slurm():
        return reason
    absent = [name for name in ("unshare", "nsenter", "setpriv", "ip", "tc") if which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if Path(sys.executable).is_relative_to("/tmp"):
        return "this Python is in /tmp, of which each host has its own; put the checkout elsewhere"
    probe = "mount -t tmpfs tmpfs /run && ip link add name b type bridge"
    argv = ["unshare", *NAMESPACES, "--fork", "sh", "-c", probe]
    tried = subprocess.run(argv, capture_output=True, text=True)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host of the bed. ``pid``: of its process 1, as this machine knows it."""

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self.folder, self.name, self.address = folder, name, address
        self.fast = f"{FAST}.{address.rpartition('.')[2]}"
        """Its address on ib0."""
        self._unshare: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def boot(self, hosts: str, files: dict[str, str | bytes], view: str) -> None:
        """Start it; ``hosts``: its /etc/hosts, ``files``: further files below /etc, ``view``: a
        script that mounts more.
        """
        for name in ("tmp", "spool", "log"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "tmp").chmod(0o1777)
        (self.folder / "view.sh").write_text(view)
        etc = self.folder / "etc"
        shutil.copytree("/etc", etc, symlinks=True)
        (etc / "hosts").unlink(missing_ok=True)
        (etc / "hosts").write_text(hosts)
        (etc / "hostname").write_text(f"{self.name}\n")
        # Names are those of /etc/hosts alone: nothing of the bed asks a name server.
        (etc / "resolv.conf").unlink(missing_ok=True)
        (etc / "resolv.conf").write_text("")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        for path, content in files.items():
            (etc / path).parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.encode()
            (etc / path).write_bytes(data)
        (etc / "munge").mkdir(exist_ok=True)
        for path in (etc / "munge", etc / "munge" / "munge.key"):
            os.chown(path, 0, 0)
            path.chmod(0o700 if path.is_dir() else 0o400)
        self._unshare = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES),
                *("--fork", "--kill-child", sys.executable, str(INIT)),
                *(str(self.folder), self.name),
            ]
        )
        until((self.folder / "up").exists, f"{self.name} is up", details=self.log_ends)
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.pid = int(children.read_text())

    def inside(self, *argv: str) -> list[str]:
        """The command that runs ``argv`` on this host."""
        names = ["--mount", "--uts", "--pid", "--net", "--ipc"]
        return ["nsenter", f"--target={self.pid}", *names, "--wd=/", "--", *argv]

    def run(self, *argv: str) -> str:
        """Return the output of a command on this host. If it fails, its output is shown."""
        made = subprocess.run(
            self.inside(*argv), capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert not made.returncode, f"{self.name}: {argv}: {made.stderr or made.stdout}"
        return made.stdout

    def start(self, *argv: str, log: str, environment: dict[str, str] | None = None) -> None:
        """Start a command in the background; what it says is in /var/log of the host."""
        with (self.folder / "log" / log).open("ab") as file:
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.inside(*argv)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def processes(self, word: str) -> list[int]:
        """Return the user id of every process with ``word`` in its command."""
        lines = self.run("ps", "-ww", "-eo", "uid,args").splitlines()[1:]
        pairs = (line.split(maxsplit=1) for line in lines)
        return [int(uid) for uid, args in pairs if word in args]

    def traffic(self, interface: str) -> int:
        """Bytes that this host has sent and received by an interface."""
        [link] = json.loads(self.run("ip", "-json", "-statistics", "link", "show", interface))
        return sum(int(link["stats64"][way]["bytes"]) for way in ("rx", "tx"))

    def log(self, name: str) -> str:
        """Return the whole text of one of its logs."""
        return (self.folder / "log" / name).read_text(errors="replace")

    def log_ends(self) -> str:
        """The ends of all its logs."""
        ends = [
            f"--- {self.name}: {path.name}\n{tail(path)}"
            for path in sorted((self.folder / "log").glob("*.log"))
        ]
        return "\n".join(ends)

    def power_off(self) -> None:
        """Every process of the host ends at once."""
        if self._unshare is not None and self._unshare.poll() is None:
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
            self._unshare.kill()
            self._unshare.wait(PATIENCE_S)


class Bed:
    """A head and ``nodes`` hosts below ``root``, which is not in /tmp. ``head_hosts``: how the
    head's /etc/hosts names the head itself; ``node_hosts``: that of a node the node, with its name
    as {name}; ``users``: names of users in the group "users", with homes that all hosts see;
    ``grace``: seconds that a lease has when it is preempted; ``named``: nodes are in /etc/hosts.
    """

    def __init__(
        self,
        root: Path,
        nodes: int = 3,
        head_hosts: str = f"{HEAD} head",
        node_hosts: str = "",
        users: Sequence[str] = (),
        grace: int = 6,
        named: bool = True,
    ) -> None:
        self.root, self.users, self.grace, self.named = root, users, grace, named
        self.node_hosts = node_hosts
        self.head_hosts = head_hosts
        self.head = Host(root / "head", "head", HEAD)
        self.nodes = [Host(root / f"n{i}", f"n{i}", f"{NET}.{10 + i}") for i in range(1, nodes + 1)]
        self._switch: subprocess.Popen[bytes] | None = None

    @property
    def hosts(self) -> list[Host]:
        """Return all hosts, the head first."""
        return [self.head, *self.nodes]

    def start(self) -> Bed:
        """Boot all hosts, connect them, and wait until every node is idle."""
        for number, name in enumerate(self.users):
            self.home(name).mkdir(parents=True, mode=0o700)
            os.chown(self.home(name), FIRST_USER + number, -1)
        self._switch = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        )
        own = os.readlink("/proc/self/ns/net")
        switch = Path(f"/proc/{self._switch.pid}/ns/net")
        until(lambda: os.readlink(switch) != own, "the switch has a network of its own")
        for bridge in ("br0", "br1"):
            self.on_switch("ip", "link", "add", "name", bridge, "type", "bridge")
            self.on_switch("ip", "link", "set", bridge, "up")
        listed = self.nodes if self.named else []
        names = "".join(f"{node.address} {node.name}\n" for node in listed)
        named = [f"NodeName={n.name} NodeAddr={n.address}" for n in self.nodes]
        conf = CONF.format(head=HEAD, nodes="", named="\n".join(named), grace=self.grace)
        key = os.urandom(128)
        for host in self.hosts:
            itself = self.head_hosts if host is self.head else f"{HEAD} head"
            own = "" if host is self.head else self.node_hosts.format(name=host.name)
            host.boot(
                f"127.0.0.1 localhost\n{own}\n{itself}\n{names}",
                {"slurm/slurm.conf": conf, "munge/munge.key": key},
                guests.opened() if self.users else "",
            )
            for number, name in enumerate(self.users):
                who = ("--uid", str(FIRST_USER + number), "--gid", "users", name)
                host.run("useradd", "--no-create-home", "--home-dir", str(self.home(name)), *who)
            self._connect(host)
            host.run("mkdir", "-p", "/run/munge", "/var/spool/slurmctld", "/var/spool/slurmd")
            host.start(
                *("munged", "--foreground", "--force", "--socket=/run/munge/munge.socket.2"),
                *("--log-file=/var/log/munged.log", "--seed-file=/run/munge/seed"),
                *("--pid-file=/run/munge/munged.pid", "--key-file=/etc/munge/munge.key"),
                log="munged.out.log",
            )
            until(lambda: self._can_munge(host), f"munged on {host.name}", details=host.log_ends)  # noqa: B023
        self.head.run("ip", "addr", "add", f"{FRONT}/{MASK}", "dev", "eth0")
        self.begin(self.head, "-c")
        for node in self.nodes:
            self.begin(node)
        until(
            lambda: self.states() == ["idle"] * len(self.nodes),
            "all nodes are idle",
            details=lambda: "\n".join(host.log_ends() for host in self.hosts),
        )
        return self

    def begin(self, host: Host, *options: str) -> None:
        """Start Slurm's daemon of this host."""
        program = self._daemon(host)
        host.start(str(which(program)), "-D", *options, log=f"{program}.log")

    def kill(self, host: Host) -> None:
        """Kill Slurm's daemon of this host; its jobs' own processes stay."""
        program = self._daemon(host)
        host.run("sh", "-c", f"kill -9 $(cat /run/{program}.pid)")

    def _daemon(self, host: Host) -> str:
        return "slurmctld" if host is self.head else "slurmd"

    def home(self, user: str) -> Path:
        """The home of one of the users, the same on every host."""
        return self.root / "home" / user

    def _connect(self, host: Host) -> None:
        wires = (
            (f"p-{host.name}", "br0", "eth0", host.address),
            (f"q-{host.name}", "br1", "ib0", host.fast),
        )
        for port, bridge, interface, address in wires:
            self.on_switch(
                *("ip", "link", "add", "name", port, "type", "veth"),
                *("peer", "name", interface, "netns", str(host.pid)),
            )
            self.on_switch("ip", "link", "set", port, "master", bridge, "up")
            host.run("ip", "addr", "add", f"{address}/{MASK}", "dev", interface)
            host.run("ip", "link", "set", interface, "up")

    def _can_munge(self, host: Host) -> bool:
        return subprocess.run(host.inside("munge", "-n"), capture_output=True).returncode == 0

    def on_switch(self, *argv: str) -> None:
        """Run a command in the network of the switch."""
        assert self._switch is not None
        subprocess.run(["nsenter", f"--target={self._switch.pid}", "--net", *argv], check=True)

    def link(self, host: Host, *, up: bool) -> None:
        """Plug the host's cable in, or pull it out, on the side of the switch."""
        self.on_switch("ip", "link", "set", f"p-{host.name}", "up" if up else "down")

    def throttle(self, host: Host, mbit: float) -> None:
        """Limit the host's link to ``mbit`` Mbit/s each way."""
        shape = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", "32kb", "latency", "100ms")
        host.run("tc", "qdisc", "replace", "dev", "eth0", *shape)
        self.on_switch("tc", "qdisc", "replace", "dev", f"p-{host.name}", *shape)

    def drop(self, host: Host, address: str) -> None:
        """Drop packets of ``host`` to this address, as a firewall does."""
        nobody = "02:00:00:00:00:99"
        interface = "ib0" if address.startswith(f"{FAST}.") else "eth0"
        host.run(*("ip", "neigh", "replace", address, "lladdr", nobody), *("dev", interface))

    def refuse(self, host: Host, address: str) -> None:
        """``host`` refuses connections from this address with an answer, as firewalld does."""
        chain = "{ type filter hook input priority 0; }"
        rule = f"ip saddr {address} tcp flags & (syn | ack) == syn"
        for line in (
            "add table inet bed",
            f"add chain inet bed entry {chain}",
            f"add rule inet bed entry {rule} reject with icmp type admin-prohibited",
        ):
            host.run("nft", line)

    def states(self) -> list[str]:
        """The state of every node in sinfo."""
        argv = self.head.inside("sinfo", "-h", "-N", "-p", "batch", "-o", "%T")
        made = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
        return made.stdout.split()

    def jobs(self, *options: str) -> Sequence[str]:
        """Names of the jobs that Slurm has."""
        return self.head.run("squeue", "-h", "-a", "-o", "%j %N %T", *options).splitlines()

    def stop(self) -> None:
        """Power everything off."""
        for host in reversed(self.hosts):
            host.power_off()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait(PATIENCE_S)
