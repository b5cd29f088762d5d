"""The configuration of the main scheduler: one table for each kind.

Decides which keys exist and what a valid value is, as the other modules of :mod:`malletrain.config`
do. Kinds of slots, which all of them may have: :mod:`malletrain.config.slots`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import (
    CountOrOff,
    Duration,
    MaybeDuration,
    MaybeLocation,
    Section,
    Size,
    Words,
    key,
    section,
)
from malletrain.config.slots import SLOTS, PlainSlots, SlotSection, check_distinct
from malletrain.config.validation import either, table_of


class SchedulerTable(Section):
    """Base of the tables of one kind of main scheduler."""

    @property
    def slot_sections(self) -> list[SlotSection]:
        """The kinds of slots; empty: leases are whole nodes."""
        sections: list[SlotSection] = getattr(self, "slots", [])
        return sections


class LocalScheduler(SchedulerTable):
    """The embedded cluster: virtual nodes on this machine, and a trace of which of them are idle
    when.
    """

    nodes: int = key(6, ge=1, le=4096, description="Number of virtual nodes.")
    directory: MaybeLocation = key(
        None,
        description="Directory of the virtual nodes' files; not given: the folder cluster in "
        "state_dir.",
    )
    trace: MaybeLocation = key(
        None,
        description="Trace (CSV, also .gz) of which nodes are idle when; not given: all nodes "
        "are always idle.",
    )
    speedup: float = key(
        1.0,
        gt=0,
        le=100_000,
        allow_inf_nan=False,
        description="Seconds of the trace that pass in one second.",
    )
    grace: Duration = key(
        "5 s",
        description="Time between the notice of a preemption (SIGTERM) and its end (SIGKILL).",
    )
    notice_fraction: float = key(
        1.0,
        ge=0,
        le=1,
        description="Fraction of preemptions that are announced; the others kill the node at once.",
    )
    seed: int = key(
        0,
        ge=0,
        description="Random seed that chooses the nodes of the trace that are used and the "
        "preemptions without notice.",
    )
    autostart: bool = key(
        True,
        description="Start the embedded cluster together with the daemon if it does not run.",
    )
    node_gpus: int = key(
        0,
        ge=0,
        le=64,
        description="GPUs of a virtual node, for slots; numbered from 0 through all virtual nodes, "
        "whether this machine has them or not.",
    )
    node_cpus: int = key(8, ge=1, le=4096, description="Processors of a virtual node, for slots.")
    node_memory: Size = key("16 GiB", description="Memory of a virtual node, for slots.")
    slots: PlainSlots = Field(default_factory=list, description=SLOTS)


class BatchScheduler(SchedulerTable):
    """Base of the tables of batch schedulers: the keys that do not depend on the scheduler."""

    mode: Literal["preemptable", "backfill"] = key(
        "preemptable",
        description="preemptable: the main scheduler preempts leases for other jobs. backfill: "
        "it does not, and leases end before their node is wanted.",
    )
    time_limit: Duration = key(
        "12 h", gt=0, description="Maximum time limit of a lease; Slurm counts whole minutes."
    )
    lease_time: MaybeDuration = key(
        None,
        gt=0,
        description="Usual duration of leases; their nodes are leased again when they end, "
        "unless the main scheduler has a use for them. Each lease lasts at least "
        "three quarters of this time; the durations differ so that leases do not end "
        "together. Not given: time_limit. If PBS grants a reservation only on nodes "
        "whose jobs end before it, choose a short time.",
    )
    time_min: Duration = key(
        "5 min",
        description="Minimum useful duration of a lease, for which the main scheduler may find a "
        "hole before another job (sbatch --time-min, qsub -l min_walltime=…).",
    )
    spare: Duration = key(
        "30 s",
        description="A lease ends this long before a reservation or a planned job needs its "
        "node. A scheduler that is slow or does not answer is asked again after at "
        "most half of this time.",
    )
    grace: MaybeDuration = key(
        None,
        description="Time between the signal of a preemption and SIGKILL; not given: as the main "
        "scheduler is configured (GraceTime, else KillWait in Slurm; kill_delay of "
        "the queue in PBS, by default 10 s).",
    )
    min_lease: Duration = key(
        "0 s",
        description="Minimum duration of a lease that the site wants: gaps expected to be "
        "shorter are not leased, and a lease is not given back earlier while its "
        "user has work for it.",
    )
    max_leases_per_user: CountOrOff = key(
        "off",
        ge=0,
        description="Maximum number of simultaneous leases of one user, so that a limit of the "
        "main scheduler on the user's jobs leaves room for other jobs; off: only the "
        "main scheduler's own limit.",
    )
    start_within: Duration = key(
        "60 s",
        gt=0,
        description="A lease that has not started within this time after its submission is "
        "withdrawn.",
    )
    submit_rate: float = key(
        1.0,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="Average number of submissions per second. Submissions "
        "above it wait for the next poll; cancellations never wait.",
    )
    submit_burst: int = key(
        10, ge=1, le=10_000, description="Maximum number of submissions at one moment."
    )
    request_rate: float = key(
        2.0,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="Average number of requests per second to the main scheduler's controller "
        "(bursts of up to 30), polls included; compare the limit of Slurm's "
        "rl_enable for a user. Above it, polls that events ask for are postponed, "
        "and fewer leases are requested, at least one in two seconds; the poll at "
        "each poll_interval is always made.",
    )
    lease_shape: Literal["single", "array", "block"] = key(
        "single",
        description="How leases that are requested together become jobs of the main scheduler. "
        "single: a job of one node for each. With Slurm only, array: one job array "
        "with a task for each; block: one job of several nodes, which gives its "
        "nodes back one by one, and which a preemption takes as a whole.",
    )
    lease_nodes: int = key(
        16, ge=2, le=64, description="Maximum number of leases in one array or block."
    )
    max_leases: CountOrOff = key(
        "off",
        ge=0,
        description="Maximum number of simultaneous leases; off: only the main scheduler's own "
        "limit.",
    )
    script: MaybeLocation = key(
        None,
        description="Batch script of the leases: a copy of lease.sh in jobscripts/slurm or "
        "jobscripts/pbs with the additions that the site's nodes need; not given: "
        "that file.",
    )
    submit_as: Words = key(
        [],
        description="Command put before sbatch and scancel, or qsub and qdel, to run them as a "
        'lease\'s owner, such as ["sudo", "-n", "-u", "{owner}", "--", '
        '"/usr/local/sbin/malletrain-lease"]; empty: all leases are this user\'s.',
    )
    keep_output: bool = key(
        True,
        description="Keep the output of the newest leases, in the folder leases in state_dir; "
        "output of other users' leases is kept in .local/state/malletrain/leases of "
        "their homes.",
    )
    command_timeout: Duration = key(
        "20 s",
        gt=0,
        description="A command of the main scheduler that takes longer is stopped and counts as "
        "failed.",
    )
    command_tries: int = key(
        2,
        ge=1,
        le=10,
        description="Number of attempts for a command that changes nothing, before the poll fails.",
    )

    @field_validator("submit_as")
    @classmethod
    def _submit_as(cls, value: Words) -> Words:
        if value and not any("{owner}" in word for word in value):
            sentence = (
                'one of the words must hold {owner}, such as ["sudo", "-n", "-u", "{owner}", "--"]'
            )
            raise PydanticCustomError("owner", sentence, {"owner": "{owner}"})
        return value


RESERVED_SBATCH_OPTIONS = {
    ("--array", "-a"): "a lease is one job; see lease_shape",
    ("--clusters", "-M"): "leases are looked for in the daemon's own cluster only, so each cluster "
    "needs a daemon of its own",
    ("--dependency", "-d"): "a lease starts at once or not at all",
    ("--hold", "-H"): "a lease starts at once or not at all",
    ("--job-name", "-J"): "a lease is known by its name",
    ("--requeue",): "a lease that has left does not begin again",
    ("--test-only",): "no lease would be submitted",
    ("--wait", "-W"): "sbatch would return only when the lease has ended",
    ("--wrap",): "a lease has a script of its own",
}
"""Names of an option of sbatch that would make leases unknown or useless → why."""


def reserved_sbatch_option(option: str) -> tuple[str, str] | None:
    """Return the name of a reserved option and why it is reserved; None if it is not.

    Args:
        option: the option as it is given to sbatch, with its value.
    """
    name = option.partition("=")[0] if option.startswith("--") else option[:2]
    for names, why in RESERVED_SBATCH_OPTIONS.items():
        # getopt_long(3) takes any beginning of a long name that no other one has.
        begins = len(name) > 4 and name.startswith("--") and names[0].startswith(name)
        if name in names or begins:
            return names[0], why
    return None


class SlurmLease(Section):
    """Options of a lease's Slurm job."""

    partition: str = key(
        "",
        description="Partition of the leases; empty: Slurm's default one (then qos should be set).",
    )
    qos: str = key("", description="QOS of the leases; empty: the account's default.")
    account: str = key(
        "", description="Account that the leases are charged to; empty: the user's default."
    )
    constraint: str = key(
        "",
        description="Features that Slurm must find on the node of a lease (sbatch "
        "--constraint); empty: none.",
    )
    exclusive: bool = key(
        True,
        description="Request whole nodes with all their memory. If false, specify in gres and "
        "options what a lease needs.",
    )
    gres: str = key(
        "",
        description='Generic resources of a lease (sbatch --gres), such as "gpu:4"; empty: those '
        "that come with the node.",
    )
    options: Words = key(
        [],
        description="Further options of sbatch for the leases, each one text, such as "
        '"--licenses=scratch". Those with which leases would be unknown or useless, such as '
        "--clusters or --array, are refused.",
    )
    nice: int = key(
        0,
        ge=-10_000,
        le=2_147_483_645,
        description="Priority adjustment that puts leases behind other jobs (sbatch --nice); 0: "
        "option not used.",
    )
    launch: Literal["auto", "batch", "step"] = key(
        "auto",
        description="Start the agent as the batch script or as a job step (srun); auto: as a "
        "step if Slurm's configuration lacks preempt_send_user_signal, because then "
        "a batch script gets the preemption signal too late.",
    )
    leave_at_limits: bool = key(
        False,
        description="End leases if a job of the same user or account waits because of a limit "
        "that they count against (reasons Assoc… and QOS… of squeue), and request "
        "none while it waits: Slurm preempts jobs to free nodes, but never because "
        "of a limit.",
    )

    @field_validator("options")
    @classmethod
    def _options(cls, value: Words) -> Words:
        for option in value:
            if not option.startswith("-"):
                raise PydanticCustomError(
                    "option",
                    '"{value}" is no option; write each one as one text, such as '
                    '"--licenses=scratch"',
                    {"value": option},
                )
            if (reserved := reserved_sbatch_option(option)) is not None:
                name, why = reserved
                raise PydanticCustomError(
                    "option",
                    "{name} cannot be an option of leases: {why}",
                    {"name": name, "why": why},
                )
        return value


class SlurmScheduler(BatchScheduler, SlurmLease):
    """Slurm, 20.11 or later. Leases are one-node jobs; `malletrain check` tests these keys against
    the running Slurm.
    """

    api: Literal["auto", "commands", "pyslurm"] = key(
        "auto",
        description="Ask Slurm through its commands or through pyslurm; auto: pyslurm where it "
        "is of Slurm's version and can read Slurm, else the commands.",
    )
    slots: list[SlotSection] = Field(default_factory=list, description=SLOTS)

    @field_validator("slots")
    @classmethod
    def _check_slots(cls, value: list[SlotSection], info: ValidationInfo) -> list[SlotSection]:
        if check_distinct(value) and info.data.get("lease_shape") != "single":
            raise PydanticCustomError(
                "slots",
                'slots need lease_shape = "single"; remove lease_shape. Those of a host share one '
                "job if their kind has whole_host = true",
            )
        return value


class PbsLease(Section):
    """Options of a lease's PBS job."""

    queue: str = key(
        "",
        description="Queue of the leases, below those of the main jobs; empty: the server's "
        "default one.",
    )
    account: str = key(
        "",
        description="Account that the leases are charged to (qsub -A); empty: the user's default.",
    )
    project: str = key("", description="Project of the leases (qsub -P); empty: PBS's default.")
    resources: Words = key(
        ["ncpus", "ngpus", "mem"],
        description="Resources that a lease requests in full, as much as its node has; resources "
        "that the node does not have are omitted.",
    )
    select: str = key(
        "",
        description="Further resources of a lease's chunk (qsub -l select=1:…), such as "
        '"system=polaris"; empty: none.',
    )
    place: str = key(
        "pack:exclhost",
        description="Placement of a lease on its node (qsub -l place=…); keep whole hosts unless "
        "there is a reason.",
    )
    options: Words = key(
        [],
        description="Additional arguments of qsub for the leases, each option and each value as "
        'one text, such as ["-l", "filesystems=home"].',
    )
    shell: str = key(
        "",
        description="Program that PBS starts for a lease (qsub -S) and that becomes the lease's "
        "script, under this path on the nodes; empty: shell.sh in jobscripts/pbs, where MalleTrain "
        "is installed.",
    )
    rerunnable: Literal["auto", "yes", "no"] = key(
        "auto",
        description="Whether leases are rerunnable (qsub -r); auto: only if requeuing is the "
        "only way in which PBS preempts, because it cannot requeue a job that is not "
        "rerunnable.",
    )


class PbsScheduler(BatchScheduler, PbsLease):
    """OpenPBS or PBS Professional, 18.1 or later. Leases are one-host jobs; `malletrain check`
    tests these keys against the running PBS.
    """

    api: Literal["auto", "commands", "bindings"] = key(
        "auto",
        description="Ask PBS through its commands or through its Python bindings (pbs_ifl); "
        "auto: the bindings where they can be imported.",
    )
    slots: PlainSlots = Field(default_factory=list, description=SLOTS)


class SchedulerSection(Section):
    """The main scheduler of the machine. The table with the name of `kind` holds the keys of that
    kind."""

    kind: str = key(description="Kind of the main scheduler.")
    poll_interval: Duration = key(
        "5 s",
        gt=0,
        description="How often the main scheduler is asked for idle nodes and for leases; less "
        "often if its backfill cycle is long.",
    )
    local: LocalScheduler = section(LocalScheduler)
    slurm: SlurmScheduler = section(SlurmScheduler)
    pbs: PbsScheduler = section(PbsScheduler)

    @property
    def table(self) -> SchedulerTable:
        """The table of the kind that is used."""
        table: SchedulerTable = getattr(self, self.kind)
        return table

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str) -> str:
        if value not in scheduler_kinds():
            raise PydanticCustomError(
                "kind",
                'this version knows no scheduler "{value}"; accepted is {kinds}',
                {"value": value, "kinds": either(scheduler_kinds())},
            )
        return value


def scheduler_kinds() -> tuple[str, ...]:
    """Return the kinds of scheduler that this version supports: the fields of SchedulerSection
    that hold a SchedulerTable.
    """
    return tuple(
        name
        for name, field in SchedulerSection.model_fields.items()
        if table_of(field.annotation) is not None
    )
