"""The configuration of the main scheduler: one table for each kind.

Decides which keys exist and what a valid value is, as :mod:`malletrain.config` does for the rest.
"""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import (
    Duration,
    MaybeDuration,
    MaybeLocation,
    Section,
    Words,
    key,
    section,
)
from malletrain.config.validation import either, table_of


class SchedulerTable(Section):
    """Base of the tables of one kind of main scheduler."""


class LocalScheduler(SchedulerTable):
    """The embedded cluster: virtual nodes on this machine, and a trace that says which of them are
    idle.
    """

    nodes: int = key(6, ge=1, le=4096, description="Number of virtual nodes.")
    directory: MaybeLocation = key(
        None,
        description="Where the virtual nodes keep their files; not given: the folder cluster in "
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
        description="How many seconds of the trace pass in one second.",
    )
    grace: Duration = key(
        "5 s",
        description="Time between the notice of a preemption (SIGTERM) and its end (SIGKILL).",
    )
    notice_fraction: float = key(
        1.0,
        ge=0,
        le=1,
        description="Share of preemptions that are announced; the others kill the node at once.",
    )
    seed: int = key(
        0,
        ge=0,
        description="Chooses the nodes of the trace that are used and the preemptions without "
        "notice.",
    )
    autostart: bool = key(
        True,
        description="Start the embedded cluster together with the daemon when it does not run.",
    )


class BatchScheduler(SchedulerTable):
    """Base of the tables of batch schedulers: how leases are asked for, whichever it is."""

    mode: Literal["preemptable", "backfill"] = key(
        "preemptable",
        description="Leases that the main scheduler preempts for other jobs; or, where it does "
        "not, leases that end before their node is "
        "wanted.",
    )
    time_limit: Duration = key(
        "12 h", gt=0, description="Longest time limit of a lease; in Slurm whole minutes count."
    )
    lease_time: MaybeDuration = key(
        None,
        gt=0,
        description="How long leases usually last; their nodes are leased again when they end, "
        "unless the main scheduler has a use for them. Each lease lasts three quarters of that or "
        "more, so that they do not end together. Not given: time_limit. A reservation that PBS "
        "grants only on nodes whose jobs end before it needs it short.",
    )
    time_min: Duration = key(
        "5 min",
        description="Shortest lease that is of use, for which the main scheduler may find a "
        "hole before another job (sbatch --time-min, "
        "qsub -l min_walltime=…).",
    )
    spare: Duration = key(
        "30 s",
        description="A lease ends this long before its node is wanted by a reservation or a "
        "planned job. A scheduler that is slow or silent is asked again after half of it at the "
        "latest.",
    )
    grace: MaybeDuration = key(
        None,
        description="Time between the signal of a preemption and SIGKILL; not given: what the "
        "main scheduler says (GraceTime, else "
        "KillWait of Slurm's configuration; kill_delay of PBS's queue, by default 10 s).",
    )
    min_lease: Duration = key(
        "0 s",
        description="Shortest lease that the site wants: gaps expected to be shorter are not "
        "leased, and a lease is not given back before while its user has work for it.",
    )
    max_leases_per_user: int = key(
        0,
        ge=0,
        description="Leases of one user at the same time at most, so that a limit of the main "
        "scheduler on the user's jobs leaves room for other jobs; 0: no limit but its own.",
    )
    start_within: Duration = key(
        "60 s",
        gt=0,
        description="A lease that has not started this long after it was asked for is withdrawn.",
    )
    submit_rate: float = key(
        1.0,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="Submissions and cancels per second in the long run. A submission is put off "
        "until the next poll, a cancel never.",
    )
    submit_burst: int = key(10, ge=1, le=10_000, description="Submissions at one moment at most.")
    request_rate: float = key(
        2.0,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="Requests to the main scheduler's controller per second in the long run (30 at "
        "one moment), polls included: what Slurm's rl_enable allows a user. Polls that events ask "
        "for are put off, and fewer leases asked for; a poll each poll_interval is always made.",
    )
    lease_shape: Literal["single", "array", "block"] = key(
        "single",
        description="How leases that are asked for together become jobs: each a job of one node; "
        "or, with Slurm only, one job array with a task for each, or one job of several nodes, "
        "which gives them back one by one, and which a preemption takes as a whole.",
    )
    lease_nodes: int = key(16, ge=2, le=64, description="Leases in one array or block at most.")
    max_leases: int = key(
        0,
        ge=0,
        description="Leases at the same time at most; 0: no limit but the main scheduler's own.",
    )
    script: MaybeLocation = key(
        None,
        description="Batch script of the leases, a copy of lease.sh in jobscripts/slurm or "
        "jobscripts/pbs with what the site's nodes need; "
        "not given: that one.",
    )
    submit_as: Words = key(
        [],
        description="Command put before sbatch and scancel, or qsub and qdel, to run them as a "
        "lease's owner, such as "
        '["sudo", "-n", "-u", "{owner}", "--"]; empty: all leases are this user\'s.',
    )
    keep_output: bool = key(
        True,
        description="Keep what the newest leases print, in the folder leases in state_dir; what "
        "leases of other users print, in .local/state/malletrain/leases of their homes.",
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
        description="How often a command that changes nothing is tried before the poll fails.",
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


class SlurmLease(Section):
    """What a lease asks of Slurm."""

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
        description="Take whole nodes with all their memory. If false, say in gres and options "
        "what a lease needs.",
    )
    gres: str = key(
        "",
        description='Generic resources of a lease (sbatch --gres), such as "gpu:4"; empty: '
        "those that come with the node.",
    )
    options: Words = key(
        [],
        description="Further options of sbatch for the leases, each one text, such as "
        '"--licenses=scratch".',
    )
    nice: int = key(
        0,
        ge=-10_000,
        le=2_147_483_645,
        description="Put leases behind other jobs (sbatch --nice); 0: not asked for.",
    )
    launch: Literal["auto", "batch", "step"] = key(
        "auto",
        description="Start the agent as the batch script or as a job step (srun); auto: as a "
        "step where Slurm's configuration lacks "
        "preempt_send_user_signal, because a batch script then hears of its preemption too late.",
    )
    leave_at_limits: bool = key(
        False,
        description="Leases leave for a job of the same user or account that waits because a limit "
        "is reached against which they count (reasons Assoc… and QOS… of squeue), and none is "
        "asked for meanwhile: Slurm preempts for nodes, and never for a limit.",
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
        return value


class SlurmScheduler(BatchScheduler, SlurmLease):
    """Slurm, 20.11 or later. Leases are one-node jobs; `malletrain check` tests these keys against
    the running Slurm.
    """

    api: Literal["auto", "commands", "pyslurm"] = key(
        "auto",
        description="Ask Slurm through its commands or through pyslurm; auto: pyslurm where it "
        "can be imported and is of Slurm's version.",
    )


class PbsLease(Section):
    """What a lease asks of PBS."""

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
        description="Resources that a lease asks for in full, as much as its node has of them; "
        "what a node does not have is left out.",
    )
    select: str = key(
        "",
        description="Further resources of a lease's chunk (qsub -l select=1:…), such as "
        '"system=polaris"; empty: none.',
    )
    place: str = key(
        "pack:exclhost",
        description="How a lease has its node (qsub -l place=…); whole hosts unless there is a "
        "reason.",
    )
    options: Words = key(
        [],
        description="Further words of qsub for the leases, options and their values one text "
        'each, such as ["-l", "filesystems=home"].',
    )
    shell: str = key(
        "",
        description="Program that PBS starts for a lease (qsub -S) and that becomes the lease's "
        "script, under this path on the nodes; empty: shell.sh in jobscripts/pbs, where MalleTrain "
        "is installed.",
    )
    rerunnable: Literal["auto", "yes", "no"] = key(
        "auto",
        description="Whether leases are rerunnable (qsub -r); auto: only where PBS preempts in "
        "no other way than requeuing, which it "
        "cannot do to a job that is not.",
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


class SchedulerSection(Section):
    """The main scheduler of the machine. The table named like `kind` holds what that kind needs."""

    kind: str = key(description="Kind of the main scheduler.")
    poll_interval: Duration = key(
        "5 s",
        gt=0,
        description="How often the main scheduler is asked for idle nodes and for leases; less "
        "often where its backfill cycle is long.",
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
    """The kinds of scheduler this version supports: the fields of SchedulerSection that hold a
    SchedulerTable.
    """
    return tuple(
        name
        for name, field in SchedulerSection.model_fields.items()
        if table_of(field.annotation) is not None
    )
