"""The configuration of a Slurm, which changes rarely: version, partitions, preemption, backfill
cycle, clock. Parses ``scontrol`` and ``sdiag``.

Text in, a :class:`SlurmSite` out; :func:`ask_site` runs the commands. :mod:`scavenger.slurm.check`
decides whether the configuration is suitable for MalleTrain.

Slurm prints times by the clock of its controller: ends of leases, beginnings of reservations,
expected starts. If the controller is a minute ahead and nobody converts them, a lease leaves for a
maintenance a minute late, and a preempted lease does not seem to leave. Slurm itself works at such
a difference: Munge accepts credentials for five minutes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scavenger.batch.commands import CommandError, Commands, require_complete
from scavenger.batch.poll_result import Finding
from scavenger.hostlist import HostlistError, expand
from scavenger.interface import SchedulerError
from scavenger.slurm.parse import SlurmJob, SlurmJobTable, SlurmReservation, read_duration

BF_INTERVAL_S = 30.0
"""Default of bf_interval (slurm.conf, SchedulerParameters)."""
KILL_WAIT_S = 30.0
UNKILLABLE_STEP_S = 60.0
NO_LIMIT = 65534
"""PrologEpilogTimeout that is not set, as ``scontrol show config`` prints it."""
MAX_ARRAY_SIZE = 1001
DEFAULT_QOS = "normal"
_TOPO = (("ExclusiveTopo", "YES"), ("Exclusive", "TOPO"))
_WHOLE = (
    ("OverSubscribe", "EXCLUSIVE"),
    ("ExclusiveUser", "YES"),
    ("Exclusive", "NODE"),
    ("Exclusive", "USER"),
    *_TOPO,
)
"""Settings of a partition whose jobs keep others off their nodes, as ``scontrol show partition``
prints them (slurm.conf(5), PARTITION CONFIGURATION). Slurm 26.05 has ``Exclusive`` in place of the
others.
"""
_FIELD = re.compile(r"(\S+?)=(\S*)")
_SETTING = re.compile(r"^(\w+(?:\[\d+\])?)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_FEDERATION = re.compile(r"^Federation:\s*(\S+)", re.MULTILINE)
_LAST_CYCLE = re.compile(
    r"Backfilling stats.*?Last cycle:\s*(\d+).*?Mean cycle:\s*(\d+)", re.DOTALL
)
MIN_DIFFERENCE_S = 2.0
"""Smaller differences are not converted, because sdiag prints whole seconds."""
MAX_ANSWER_S = 2.0
"""Maximum time that sdiag may take to answer, seconds. A slower answer says too little."""


@dataclass(frozen=True)
class Partition:
    """One partition."""

    name: str
    """Name of the partition."""
    up: bool
    """Whether it accepts jobs."""
    tier: int
    """PriorityTier."""
    preempt_mode: str
    """Empty: that of the whole Slurm."""
    grace_s: float
    """GraceTime, seconds."""
    max_time_s: float | None
    """None: no limit."""
    nodes: frozenset[str] = frozenset()
    """Names of its nodes."""
    qos: str = ""
    """The QOS that the partition assigns to its jobs; empty: none."""
    max_memory_mb: int | None = None
    """MaxMemPerNode, MB; None: no limit."""
    exclusive_topo: str = ""
    """The setting that gives its jobs whole blocks of the topology: ``ExclusiveTopo=YES`` since
    24.11, ``Exclusive=TOPO`` since 26.05; empty: none does.
    """
    is_default: bool = False
    """Whether jobs that name no partition run here."""
    whole_nodes: str = ""
    """The setting with which a job keeps others off its nodes, such as ``OverSubscribe=EXCLUSIVE``
    (all other jobs) or ``ExclusiveUser=YES`` (those of other users); empty: jobs share nodes.
    """


@dataclass(frozen=True)
class LeaseAssociation:
    """What the association of the leases sets for their jobs. Values that it inherits from parent
    accounts are included.
    """

    account: str = ""
    """Account of the leases; empty: not known."""
    qos: str = ""
    """QOS of jobs that name none; empty: not known."""
    max_wall: Mapping[str, float | None] = field(default_factory=dict)
    """Partition → MaxWall of the association for it, seconds, None: no limit. The empty name: all
    partitions that have no association of their own.
    """

    def max_wall_in(self, partition: str) -> float | None:
        """Return MaxWall for jobs of the partition, seconds; None if there is no limit."""
        return self.max_wall.get(partition, self.max_wall.get(""))


@dataclass(frozen=True)
class SlurmSite:
    """The configuration of a Slurm."""

    version: tuple[int, int]
    """Such as (23, 11)."""
    preempt_type: str
    """Such as ``partition_prio``."""
    preempt_mode: str
    """PreemptMode, such as ``CANCEL``."""
    user_signal: bool
    """Whether preemption sends the job's own signal to its batch script."""
    backfill_cycle_s: float | None
    """Bf_interval plus the duration of a cycle; None: no backfill scheduler."""
    kill_wait_s: float
    """Time from SIGTERM to SIGKILL when a job ends."""
    hidden: frozenset[str] = frozenset()
    """What PrivateData hides from users."""
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    """Name → partition."""
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The settings of ``scontrol show config``."""
    max_wall: Mapping[str, float] = field(default_factory=dict)
    """QOS → its MaxWall, seconds."""
    association: LeaseAssociation = field(default_factory=LeaseAssociation)
    """Association of the leases."""
    federation: str = ""
    """Federation to which the cluster belongs; empty: none."""
    clock_ahead_s: float = 0.0
    """By how much the controller's clock is ahead of this host's, seconds; negative: behind."""

    @property
    def display_name(self) -> str:
        """Its release and its cluster, for sentences."""
        release = ".".join(f"{part:02d}" for part in self.version)
        return f"{release} (cluster {self.settings.get('ClusterName', '?')})"

    @property
    def max_preempted_priority(self) -> int | None:
        """Priority above which Slurm preempts no job; None: no limit (slurm.conf(5),
        PreemptParameters).
        """
        text = _options(self.settings.get("PreemptParameters", "")).get("min_exempt_priority", "")
        return int(text) if text.isdecimal() else None

    @property
    def cluster(self) -> str:
        """Its name if it belongs to a federation, so that jobs have to name it; otherwise empty."""
        return self.settings.get("ClusterName", "") if self.federation else ""

    @property
    def has_slurmdbd(self) -> bool:
        """Whether sacctmgr has a database to ask."""
        return "slurmdbd" in self.settings.get("AccountingStorageType", "")

    @property
    def array_size(self) -> int:
        """Maximum number of tasks of a job array."""
        return int(_number(self.settings.get("MaxArraySize"), MAX_ARRAY_SIZE))

    @property
    def complete_wait_s(self) -> float:
        """Time in which Slurm starts no job while another is completing, seconds (slurm.conf(5),
        CompleteWait).
        """
        return _number(self.settings.get("CompleteWait"), 0.0)

    @property
    def unkillable_step_s(self) -> float:
        """Time after SIGKILL after which Slurm drains a node whose processes have not ended,
        seconds.
        """
        return _number(self.settings.get("UnkillableStepTimeout"), UNKILLABLE_STEP_S)

    @property
    def program_limit_s(self) -> float | None:
        """Time limit of each program of :meth:`programs`, seconds; None: no limit."""
        limit_s = _number(self.settings.get("PrologEpilogTimeout"), NO_LIMIT)
        return limit_s if limit_s < NO_LIMIT else None

    def programs(self, kind: str) -> list[str]:
        """Return the settings of a kind (``Prolog``, ``Epilog``) that name programs: those of
        slurmd, and those of slurmctld. Since 24.05 they are numbered: ``Epilog[0]``.
        """
        return [
            name
            for name in (kind, f"{kind}Slurmctld")
            if any(
                value not in ("", "(null)")
                for setting, value in self.settings.items()
                if setting.partition("[")[0] == name
            )
        ]

    def partitions_of_leases(self, named: Collection[str]) -> list[Partition]:
        """Return the partitions in which leases run: the named ones, or the default one."""
        if named:
            return [self.partitions[name] for name in named if name in self.partitions]
        return [partition for partition in self.partitions.values() if partition.is_default]

    def why_whole_nodes(self, named: Collection[str], node: str = "") -> str:
        """Return why the lease of a slot would keep other jobs off its whole node; empty if it
        would not.

        Args:
            named: partitions that are named for leases; empty: the default one. One such partition
                is enough, because Slurm chooses among them.
            node: the node; empty: any.
        """
        if why := self.why_all_nodes_are_whole:
            return why
        for partition in self.partitions_of_leases(named):
            if partition.whole_nodes and (not node or node in partition.nodes):
                name, setting = partition.name, partition.whole_nodes
                return f"jobs of partition {name} have whole nodes ({setting})"
        return ""

    @property
    def why_all_nodes_are_whole(self) -> str:
        """Why all jobs of this Slurm have whole nodes; empty if they do not."""
        select = self.settings.get("SelectType", "")
        # select/cray_aries is a layer on linear unless these parameters name another plugin.
        parameters = self.settings.get("SelectTypeParameters", "").upper()
        layered = "cray" in select and "OTHER_CONS_" in parameters
        if select and not layered and not select.endswith(("cons_tres", "cons_res")):
            return f"Slurm allocates whole nodes (SelectType={select})"
        return ""

    def preempt_mode_of(self, partition: str) -> str:
        """Return what happens to a preempted job of the partition: OFF, CANCEL, REQUEUE,
        SUSPEND, …
        """
        configured = self.partitions.get(partition)
        mode = (
            configured.preempt_mode
            if configured is not None and configured.preempt_mode
            else self.preempt_mode
        )
        action = mode.rpartition(",")[2]
        return "OFF" if action.upper() == "PRIORITY" else action

    def preempts_by_priority(self, partition: str) -> bool:
        """Return whether jobs of the partition preempt only jobs whose priority is not higher than
        theirs (slurm.conf(5), PreemptMode=PRIORITY, since Slurm 25.05).
        """
        configured = self.partitions.get(partition)
        own = configured.preempt_mode if configured is not None else ""
        return any("PRIORITY" in mode.upper().split(",") for mode in (own, self.preempt_mode))

    def grace_of(self, partition: str) -> float:
        """Return the seconds between the first signal and SIGKILL for a preempted job of the
        partition.
        """
        configured = self.partitions.get(partition)
        return (
            configured.grace_s
            if configured is not None and configured.grace_s > 0
            else self.kill_wait_s
        )


def ask_site(
    commands: Commands, clock: Callable[[], float] = time.time, ahead_before_s: float = 0.0
) -> SlurmSite:
    """Read the configuration of a running Slurm. Raises SchedulerError.

    Args:
        commands: runs the commands.
        clock: returns epoch seconds.
        ahead_before_s: the previous difference of the clocks, seconds.
    """
    config = commands.ask(["scontrol", "show", "config"])
    partitions = commands.ask(["scontrol", "--all", "-o", "show", "partition"])
    asked_at = clock()
    try:
        statistics = commands.ask(["sdiag"])
    except CommandError:  # some sites restrict sdiag; bf_interval is then used alone
        statistics = ""
    ahead_s = settled(clock_ahead_s(statistics, asked_at, clock()), ahead_before_s)
    site = replace(read_site(config, partitions, statistics), clock_ahead_s=ahead_s)
    if not site.has_slurmdbd:
        return site  # a federation needs slurmdbd
    try:
        federation = _FEDERATION.search(commands.ask(["scontrol", "show", "federation"]))
    except CommandError:
        return site
    return replace(site, federation=federation[1] if federation else "")


def read_site(config: str, partitions: str, statistics: str = "") -> SlurmSite:
    """Parse the output of ``scontrol show config``, ``scontrol show partition -o`` and ``sdiag``.
    Raises SchedulerError.

    Args:
        config: output of ``scontrol show config``.
        partitions: output of ``scontrol show partition -o``.
        statistics: output of ``sdiag``; empty if the site restricts it.
    """
    settings = dict(_SETTING.findall(config))
    version = re.match(r"(\d+)\.(\d+)", settings.get("SLURM_VERSION", ""))
    if version is None:
        raise SchedulerError(
            "The answer of scontrol show config cannot be understood: it names no SLURM_VERSION."
        )
    require_complete(config, "scontrol show config")
    options = _options(settings.get("SchedulerParameters", ""))
    cycle_s: float | None = None
    if (
        settings.get("SchedulerType", "").endswith("backfill")
        and options.get("bf_interval") != "-1"
    ):
        cycle_s = _number(options.get("bf_interval"), BF_INTERVAL_S) + _cycle_time(statistics)
    return SlurmSite(
        version=(int(version[1]), int(version[2])),
        preempt_type=settings.get("PreemptType", "")
        .removeprefix("preempt/")
        .replace("(null)", "none"),
        preempt_mode=settings.get("PreemptMode", "OFF"),
        user_signal="preempt_send_user_signal" in _options(settings.get("SlurmctldParameters", "")),
        backfill_cycle_s=cycle_s,
        kill_wait_s=_number(settings.get("KillWait", ""), KILL_WAIT_S),
        hidden=frozenset(settings.get("PrivateData", "none").split(",")) - {"none", "(null)", ""},
        partitions={
            p.name: p
            for p in (
                _partition(line)
                for line in require_complete(partitions, "scontrol show partition").splitlines()
                if line.startswith("PartitionName=")
            )
        },
        settings=settings,
    )


def _partition(line: str) -> Partition:
    fields = dict(_FIELD.findall(line))
    mode = fields.get("PreemptMode", "")
    try:
        nodes = frozenset(
            () if fields.get("Nodes", "") in ("", "(null)") else expand(fields["Nodes"])
        )
    except HostlistError as error:
        raise SchedulerError(
            f"The answer of scontrol show partition cannot be understood: {error}"
        ) from None
    return Partition(
        fields["PartitionName"],
        fields.get("State", "") == "UP",
        int(_number(fields.get("PriorityTier"), 1.0)),
        mode,
        _number(fields.get("GraceTime"), 0.0),
        read_duration(fields.get("MaxTime", "UNLIMITED")),
        nodes,
        fields.get("QoS", "N/A").replace("N/A", "").replace("(null)", ""),
        int(memory) if (memory := fields.get("MaxMemPerNode", "")).isdecimal() else None,
        _first_of(_TOPO, fields),
        fields.get("Default") == "YES",
        _first_of(_WHOLE, fields),
    )


def _first_of(settings: Sequence[tuple[str, str]], fields: Mapping[str, str]) -> str:
    """Return the first of ``settings`` that the partition has, as ``NAME=VALUE``; empty: none."""
    return next((f"{name}={value}" for name, value in settings if fields.get(name) == value), "")


def _options(text: str) -> dict[str, str]:
    """Return ``a=1,b`` as a dictionary."""
    return {
        name: value
        for name, _, value in (part.strip().partition("=") for part in text.split(","))
        if name
    }


def _number(text: str | None, otherwise: float) -> float:
    match = re.match(r"\d+(?:\.\d+)?", text or "")
    return float(match[0]) if match else otherwise


def _cycle_time(statistics: str) -> float:
    """Return the duration of a backfill cycle, seconds: the maximum of the last one and the mean
    (sdiag prints microseconds).
    """
    match = _LAST_CYCLE.search(statistics)
    return max(int(match[1]), int(match[2])) / 1e6 if match else 0.0


_PRINTED_AT = re.compile(r"^sdiag output at .*\((\d+)\)\s*$", re.MULTILINE)


def clock_ahead_s(statistics: str, asked_at: float, answered_at: float) -> float | None:
    """Return by how many seconds the controller's clock is ahead of this host's, negative if it is
    behind; None if the answer does not say.

    Args:
        statistics: output of ``sdiag``.
        asked_at: time before sdiag was called, epoch seconds.
        answered_at: time after it.
    """
    match = _PRINTED_AT.search(statistics)
    if match is None or not 0 <= answered_at - asked_at <= MAX_ANSWER_S:
        return None
    return int(match[1]) + 0.5 - (asked_at + answered_at) / 2


def settled(measured_s: float | None, before_s: float) -> float:
    """Return the difference to convert with. The previous one is kept if the new one is not known,
    or differs by less than can be measured, so that times do not jump.

    Args:
        measured_s: result of :func:`clock_ahead_s`.
        before_s: the previous difference, seconds.
    """
    if measured_s is None or abs(measured_s - before_s) < MIN_DIFFERENCE_S:
        return before_s
    return measured_s if abs(measured_s) >= MIN_DIFFERENCE_S else 0.0


def on_this_clock(
    jobs: SlurmJobTable, reservations: Sequence[SlurmReservation], ahead_s: float
) -> tuple[SlurmJobTable, list[SlurmReservation]]:
    """Return jobs and reservations with all times on the clock of this host. ``ahead_s``: by how
    much the controller's is ahead, seconds.
    """

    def converted(job: SlurmJob) -> SlurmJob:
        times = {name: getattr(job, name) for name in ("submitted", "start", "end")}
        return job._replace(**{name: t - ahead_s for name, t in times.items() if t is not None})

    return (
        SlurmJobTable(*([converted(job) for job in table] for table in jobs)),
        [r._replace(start=r.start - ahead_s, end=r.end - ahead_s) for r in reservations],
    )


def clock_findings(ahead_s: float) -> Iterator[Finding]:
    """Yield (works, sentence) about the clocks if they differ. ``ahead_s``: as in
    :func:`on_this_clock`.
    """
    if ahead_s:
        yield (
            None,
            f"The clock of Slurm's controller is {abs(ahead_s):.0f} s "
            f"{'ahead of' if ahead_s > 0 else 'behind'} that of this host. Slurm's times are "
            "converted. Set both clocks by NTP: if they differ by 5 min, Munge lets no command "
            "through.",
        )
