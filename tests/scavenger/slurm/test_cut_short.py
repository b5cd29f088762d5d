"""Answers of Slurm's commands that stop anywhere, although the command ends well (a script in the
command's place, say): an error, or the whole truth. None ends a lease.
"""

from __future__ import annotations

import pytest

from scavenger.batch.commands import CommandResult, Commands
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.settings import BatchSettings
from scavenger.hostlist import HostlistError
from scavenger.interface import LeaseState, SchedulerError
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.parse import read_jobs, read_nodes, read_reservations, read_steps
from scavenger.slurm.scavenger import SlurmScavenger
from scavenger.slurm.site import read_site
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import PREFIX, TEMPLATE

RUN = LeaseState.RUNNING
NODES = world.nodes({"idle": "n[1-2,7]", "allocated": "n[3-4]", "drained": "n5"})
OTHERS = world.job("PENDING", 2, "a|b", planned="n[1-2]", start=500, reason="Resources")
OURS = "".join(
    world.job("RUNNING", number, f"{PREFIX}l{lease}", nodes=node, start=100, end=900_000)
    for number, lease, node in ((7, 1, "n3"), (8, 12, "n4"))
)
RESERVATIONS = (
    "ReservationName=maint StartTime=1000 EndTime=2000 Nodes=n[1-2] Flags=MAINT,SPEC_NODES\n"
    "ReservationName=class StartTime=1500 EndTime=1600 Nodes=n3 Flags= Users=a b\n"
)


def of_lines(text, read):
    """Every cut that is not at the end of a line is refused; the others are lines that are
    whole.
    """
    for at in range(1, len(text)):
        if text[at - 1] == "\n":
            read(text[:at])
        else:
            with pytest.raises(SchedulerError, match="cannot be understood"):
                read(text[:at])


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (NODES, lambda text: read_nodes(text, "MARK")),
        (OTHERS + OURS, lambda text: read_jobs(text, "MARK", PREFIX)),
        (RESERVATIONS, read_reservations),
        ("12.0|n1\n12.1|n[2-13]\n12.batch|n1\n", read_steps),
        (world.PARTITIONS, lambda text: read_site(world.CONFIG, text)),
    ],
    ids=["sinfo", "squeue", "scontrol show reservation", "squeue -s", "scontrol show partition"],
)
def test_a_line_that_was_cut_is_no_line(text, read):
    of_lines(text, read)


def test_a_configuration_that_was_cut_in_a_line_is_none():
    text = world.CONFIG.lstrip()
    for at in range(1, len(text)):
        if text[at - 1] != "\n":
            with pytest.raises(SchedulerError):
                read_site(text[:at], world.PARTITIONS)


def test_a_damaged_list_of_nodes_is_the_schedulers_error():
    """It was none, and came through where steps and arrays are read: the daemon began anew."""
    assert issubclass(HostlistError, SchedulerError)
    with pytest.raises(SchedulerError, match="no list of nodes"):
        read_steps("12.0|n[1-\n")


class ScriptedCommands(Commands):
    """Answers from its attributes and runs nothing. ``cut``: how many characters of squeue's answer
    it gives; a query for certain jobs gets all of it.
    """

    def __init__(self):
        super().__init__(sleep=lambda seconds: None)
        self.queue = ""
        self.nodes = NODES
        self.cut = None
        self.asked_of = []
        self.invalid = False

    def run(self, argv, **_):
        text = {"squeue": self.queue, "sinfo": self.nodes, "sdiag": ""}.get(argv[0])
        if text is None:
            texts = {"config": world.CONFIG, "partition": world.PARTITIONS}
            text = texts.get(argv[2], "No reservations in the system\n")
        status, complaint = 0, ""
        if "-j" in argv:
            ids = argv[argv.index("-j") + 1].split(",")
            self.asked_of += ids
            lines = text.splitlines(keepends=True)
            text = "".join(line for line in lines if set(line.split("|")[2:3]) <= {*ids})
            if self.invalid and not text:
                status, complaint = 1, "slurm_load_jobs error: Invalid job id specified\n"
        elif argv[0] == "squeue" and self.cut is not None:
            text = text[: self.cut]
        mark = next((word.partition("|")[0] for word in argv if "|%" in word), "")
        return CommandResult(tuple(argv), status, text.replace("MARK", mark), complaint, 0.0)


@pytest.fixture
def slurm():
    """The commands, and a scavenger that has seen two leases run."""
    commands = ScriptedCommands()
    commands.queue = OTHERS + OURS
    lease = SlurmLeaseOptions(partition="preemptable")
    settings = BatchSettings(tag="t", template=TEMPLATE, user="me", lease=lease)
    made = SlurmScavenger(settings, commands, memory=GapMemory(), clock=lambda: 100_000.0)
    assert states(made) == {"l1": RUN, "l12": RUN}
    return commands, made


def states(made):
    return {lease.id: lease.state for lease in made.poll().leases}


@pytest.mark.parametrize("queue", [OTHERS + OURS, OURS + OTHERS], ids=["ours last", "ours first"])
def test_no_half_answer_of_squeue_ends_a_lease(slurm, queue):
    commands, made = slurm
    commands.queue = queue
    for commands.cut in range(len(queue)):
        try:
            assert states(made) == {"l1": RUN, "l12": RUN}, queue[: commands.cut]
        except SchedulerError:
            pass
    commands.cut = None
    assert states(made) == {"l1": RUN, "l12": RUN}
    assert made.ledger.given_up == {}


def test_no_half_answer_of_sinfo_ends_a_lease_or_adds_a_gap(slurm):
    commands, made = slurm
    whole = {gap.node for gap in made.poll().gaps}
    for at in range(len(NODES)):
        commands.nodes = NODES[:at]
        try:
            poll = made.poll()
        except SchedulerError:
            continue
        assert {lease.id: lease.state for lease in poll.leases} == {"l1": RUN, "l12": RUN}
        assert {gap.node for gap in poll.gaps} <= whole


@pytest.mark.parametrize("invalid", [False, True])
def test_a_lease_that_slurm_does_not_know_any_more_is_gone(slurm, invalid):
    commands, made = slurm
    commands.invalid = invalid
    commands.queue = OTHERS + OURS.partition("\n")[0] + "\n"
    assert states(made) == {"l1": RUN}
    assert commands.asked_of == ["8"]
    assert states(made) == {"l1": RUN}
    assert commands.asked_of == ["8"], "it is asked for once"


def test_a_job_that_goes_by_another_name_is_none_of_ours(slurm):
    commands, made = slurm
    commands.queue = OTHERS + OURS.replace(f"{PREFIX}l12", "renamed")
    assert states(made) == {"l1": RUN}


def test_where_slurm_does_not_say_nothing_changes(slurm, monkeypatch):
    commands, made = slurm
    usual = commands.run

    def run(argv, **more):
        result = usual(argv, **more)
        broken = CommandResult(tuple(argv), 1, "", "Unable to contact slurm controller", 0.0)
        return broken if "-j" in argv else result

    monkeypatch.setattr(commands, "run", run)
    commands.cut = 0
    with pytest.raises(SchedulerError, match="Unable to contact"):
        made.poll()
    monkeypatch.setattr(commands, "run", usual)
    commands.cut = None
    assert states(made) == {"l1": RUN, "l12": RUN}


@pytest.mark.parametrize(
    "garbage",
    [
        "squeue : erreur : Impossible de contacter le contrôleur\n",
        "<html><body>502 Bad Gateway</body></html>\n",
        '{"jobs": []}\n',
        "\x00\x01\udcff\n",
        "MARK|RUNNING|9|me|batch|1|N/A|N/A|N/A|n[1-|(null)|(null)|None|(null)|n/a|malletrain-t-l3\n",
        f"MARK|RUNNING|{'9' * 5000}_[1-]|me|b|{'9' * 5000}|1|1|{'9' * 400}|n3|||||||{PREFIX}l1\n",
    ],
)
def test_garbage_that_ends_well_changes_nothing(slurm, garbage):
    commands, made = slurm
    for name in ("queue", "nodes"):
        text = getattr(commands, name)
        setattr(commands, name, garbage)
        try:
            assert states(made) == {"l1": RUN, "l12": RUN}
        except SchedulerError:
            pass
        setattr(commands, name, text)
        assert states(made) == {"l1": RUN, "l12": RUN}
