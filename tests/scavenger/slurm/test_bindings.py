"""The path through pyslurm, against objects shaped as those of pyslurm 25.11.2 are: pyslurm itself
builds only beside its own Slurm. ``tests/slurm/test_pyslurm.py`` compares both on a real one.
"""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from scavenger.batch.calls import SILENT
from scavenger.batch.commands import CommandPolicy, Commands, NoAnswerError
from scavenger.interface import SchedulerError
from scavenger.slurm.bindings import PyslurmSource, load_module, node_group, read
from scavenger.slurm.due_jobs import tasks_at_once
from scavenger.slurm.source import TRIAL_EVERY_S, SlurmCommandSource, SourceChoice, source_for
from tests.scavenger.slurm.slurm_world import CONFIG, World
from tests.waiting import PATIENCE_S

PYSLURM = """
import ctypes
from types import SimpleNamespace as Thing
from tests.scavenger.slurm.test_bindings import filled
__version__ = "24.11.0"

class Jobs:
    @staticmethod
    def load():
        # As Cython calls libslurm: Python's lock is held meanwhile.
        ctypes.PyDLL(None).usleep(SILENT)
        return filled(Thing()).Jobs.load()

Nodes, Partitions, Reservations = (getattr(filled(Thing()), name)
                                   for name in ("Nodes", "Partitions", "Reservations"))
"""


def collection(*objects):
    """A mapping by name, as pyslurm's collections are."""
    return {getattr(o, "name", None) or o.id: o for o in objects}


def node(name, state, partitions=("batch",), features=(), reason=None, gres=None, tres=None):
    return SimpleNamespace(
        name=name,
        state=state,
        partitions=list(partitions),
        active_features=list(features),
        reason=reason,
        configured_gres=gres or {},
        allocated_tres=tres or {},
    )


def job(number, state, name, **fields):
    names = (
        "submit_time",
        "start_time",
        "end_time",
        "allocated_nodes",
        "required_nodes",
        "scheduled_nodes",
        "batch_host",
        "array_id",
        "array_task_id",
        "array_tasks_waiting",
        "array_tasks_parallel",
        "heterogeneous_id",
        "heterogeneous_offset",
    )
    empty = {**dict.fromkeys(names), "partition": "batch", "num_nodes": 2}
    return SimpleNamespace(
        id=number,
        state=state,
        name=name,
        user_name="me",
        state_reason="None",
        account="phys",
        **{**empty, **fields},
    )


@pytest.fixture
def module():
    return filled(ModuleType("pyslurm"))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A pyslurm that can be imported; return commands that find it."""

    def make(silent=0, timeout_s=PATIENCE_S):
        (tmp_path / "pyslurm.py").write_text(PYSLURM.replace("SILENT", str(silent)))
        monkeypatch.syspath_prepend(tmp_path)
        folders = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
        return Commands(CommandPolicy(timeout_s, 1), {**os.environ, "PYTHONPATH": folders})

    return make


def filled(made):
    made.__version__ = "24.11.0"
    nodes = [
        node("n1", "IDLE", ("batch", "low"), ("a100",), gres={"gpu:a100": 4, "nvme": 1}),
        node("n2", "IDLE+PLANNED"),
        node("n3", "ALLOCATED+DRAIN", reason="fan"),
    ]
    jobs = [
        job(1, "PENDING", "big", start_time=500, scheduled_nodes="n[1-2]"),
        job(2, "RUNNING", "malletrain-t-l1", allocated_nodes="n3", start_time=100, end_time=900),
        job(3, "RUNNING", "other", allocated_nodes="n4"),
        job(4, "PENDING", "malletrain-t-l5-6", array_id=4, array_tasks_waiting="1-2"),
        job(5, "RUNNING", "malletrain-t-l2-4", array_id=4, array_task_id=None, batch_host="n5"),
        job(6, "EXPEDITING", "requeued", start_time=400, scheduled_nodes="n1"),
    ]
    reservation = SimpleNamespace(
        name="m", start_time=100, end_time=200, nodes="n1", flags=["MAINTENANCE"]
    )
    licences = SimpleNamespace(name="l", start_time=100, end_time=200, nodes=None, flags=[])
    partitions = [
        SimpleNamespace(name="batch", state="UP"),
        SimpleNamespace(name="low", state="DOWN"),
    ]
    made.Nodes = SimpleNamespace(load=lambda: collection(*nodes))
    made.Jobs = SimpleNamespace(load=lambda: collection(*jobs))
    made.Partitions = SimpleNamespace(load=lambda: collection(*partitions))
    made.Reservations = SimpleNamespace(load=lambda: collection(reservation, licences))
    return made


def test_the_same_tables_as_from_the_commands(module):
    nodes, jobs, reservations = read(module, "malletrain-t-")
    assert {name: group.base for name, group in nodes.nodes.items()} == {
        "n1": "idle",
        "n2": "planned",
        "n3": "draining",
    }
    assert nodes.partitions == {"n1": ["batch"], "n2": ["batch"], "n3": ["batch"]}
    assert nodes.nodes["n1"].features == ("a100",)
    assert nodes.nodes["n1"].gres == "gpu:a100:4,nvme:1"
    assert [(j.id, j.planned_on, j.start) for j in jobs.pending] == [
        ("1", "n[1-2]", 500.0),
        ("6", "n1", 400.0),
    ]
    assert [(j.id, j.node_list, j.end) for j in jobs.ours][:1] == [("2", "n3", 900.0)]
    assert [(j.id, j.batch_host) for j in jobs.ours] == [
        ("2", ""),
        ("4_[1-2]", ""),
        ("4_0", "n5"),
    ]
    assert [(r.name, r.nodes, r.maintenance) for r in reservations] == [("m", "n1", True)]


@pytest.mark.parametrize(
    ("state", "base", "marks"),
    [
        ("IDLE", "idle", ""),
        ("ALLOCATED", "allocated", ""),
        ("MIXED+PLANNED", "mixed", "-"),
        ("IDLE+DRAIN", "drained", ""),
        ("IDLE+COMPLETING+DRAIN", "draining", ""),
        ("MIXED+DRAIN+POWER_DOWN", "draining", "!"),
        ("IDLE+NOT_RESPONDING", "idle", "*"),
        ("IDLE+CLOUD+POWERED_DOWN", "idle", "~"),
        ("IDLE+POWERING_DOWN", "idle", "%"),
        ("ALLOCATED+POWERING_UP+NOT_RESPONDING", "allocated", "#"),
        ("ALLOCATED+COMPLETING", "allocated", "+"),
        ("MIXED+COMPLETING", "completing", ""),
        ("IDLE+MAINTENANCE+RESERVED", "maint", ""),
        ("IDLE+MAINTENANCE+NOT_RESPONDING", "maint", "*"),
        ("DOWN+MAINTENANCE+RESERVED", "down", "$"),
        ("MIXED+MAINTENANCE+PLANNED", "mixed", "$"),
        ("IDLE+RESERVED+PLANNED", "reserved", ""),
        ("DOWN+NOT_RESPONDING", "down", "*"),
        ("IDLE+BLOCKED", "blocked", ""),
        ("MIXED+BLOCKED", "mixed", ""),
        ("IDLE+EXTERNAL", "external", ""),
        ("IDLE+REBOOT_ISSUED", "reboot", "^"),
        ("IDLE+REBOOT_REQUESTED", "reboot", ""),
        ("MIXED+REBOOT_REQUESTED", "mixed", "@"),
        ("IDLE+FAIL", "fail", ""),
        ("ALLOCATED+FAIL+NOT_RESPONDING", "failing", "*"),
        ("UNKNOWN+NOT_RESPONDING", "unknown", "*"),
        ("IDLE+INVALID_REG+DRAIN", "inval", ""),
    ],
)
def test_states_with_flags(state, base, marks):
    """As node_state_string of Slurm 25.11 has them, and ``external``, which it lacks."""
    group = node_group(state, (), "", "")
    assert (group.state, group.base, group.marks) == (base + marks, base, marks)


def test_a_node_is_in_use_as_far_as_slurm_has_allocated_anything_of_it(module):
    """A suspended job keeps memory and GPUs and has no processors; pyslurm has it idle."""
    module.Nodes.load = lambda: collection(
        node("n1", "IDLE+PLANNED", tres={"mem": "300M"}), node("n2", "IDLE")
    )
    table, _, _ = read(module, "malletrain-t-")
    assert {name: group.state for name, group in table.nodes.items()} == {
        "n1": "mixed-",
        "n2": "idle",
    }


def test_a_reservation_with_a_flag_that_pyslurm_does_not_know(module):
    """pyslurm 25.11 has no name for REPLACE_DOWN: the attribute raises."""

    class Reservation:
        name, nodes, start_time, end_time = "r", "n1", 100, 200

        @property
        def flags(self):
            raise ValueError("invalid value 1073741824")

    module.Reservations.load = lambda: collection(Reservation())
    _, _, table = read(module, "malletrain-t-")
    assert [(r.name, r.start, r.end, r.maintenance) for r in table] == [("r", 100.0, 200.0, False)]


def test_ids_are_those_of_squeue(module):
    """So that the components of a heterogeneous job are one job, and the limit of an array counts
    (pyslurm's array_tasks_waiting lacks it).
    """
    jobs = [
        job(7, "PENDING", "first", heterogeneous_id=7, heterogeneous_offset=0),
        job(8, "PENDING", "second", heterogeneous_id=7, heterogeneous_offset=1),
        job(9, "PENDING", "many", array_id=9, array_tasks_waiting="0-9", array_tasks_parallel=2),
    ]
    module.Jobs.load = lambda: collection(*jobs)
    _, table, _ = read(module, "malletrain-t-")
    assert [j.id for j in table.pending] == ["7+0", "7+1", "9_[0-9%2]"]
    assert tasks_at_once(table.pending[2].id) == 2


def test_suspended_jobs_of_others(module):
    jobs = [job(7, "SUSPENDED", "main", allocated_nodes="n1")]
    module.Jobs.load = lambda: collection(*jobs)
    _, table, _ = read(module, "malletrain-t-")
    assert [(j.id, j.node_list) for j in table.suspended] == [("7", "n1")]


def test_an_error_of_pyslurm_is_a_sentence(module):
    def refuse():
        raise RuntimeError("Unable to contact slurm controller")

    module.Nodes.load = refuse
    with pytest.raises(SchedulerError, match=r"pyslurm.Nodes.load\(\) failed: Unable to contact"):
        read(module, "x")


def test_it_is_asked_in_a_process_of_its_own(module, installed):
    source = source_for("auto", installed(), (24, 11))
    assert isinstance(source, PyslurmSource)
    assert source.read("malletrain-t-") == read(module, "malletrain-t-")
    assert "pyslurm" not in sys.modules


def test_a_controller_without_an_answer_holds_up_nobody(installed):
    """Its call holds Python's lock for an hour: in a thread of this process nothing would run."""
    commands = installed(silent=3_600_000_000, timeout_s=5.0)
    with pytest.raises(NoAnswerError, match="gave no answer within 5 s"):
        PyslurmSource(commands, (24, 11)).read("x")
    assert commands.calls.counts() == {("scavenger.slurm.ask_pyslurm", SILENT): 1}


def test_only_a_pyslurm_of_slurms_version_is_taken(module, monkeypatch, installed):
    commands = installed()
    assert isinstance(source_for("commands", commands, (24, 11)), SlurmCommandSource)
    assert isinstance(source_for("auto", commands, (23, 11)), SlurmCommandSource)
    with pytest.raises(SchedulerError, match=r"not of Slurm's version 23\.11.*set api"):
        source_for("pyslurm", commands, (23, 11))
    monkeypatch.setitem(sys.modules, "pyslurm", module)
    assert load_module((24, 11)) == (module, "")


@pytest.mark.parametrize(
    ("breaks", "words", "timeout_s"),
    [
        (
            "raise ImportError('libslurm.so.42: cannot open shared object')",
            "libslurm.so.42",
            PATIENCE_S,
        ),
        ("import os; os.abort()", "pyslurm", PATIENCE_S),
        (
            "import ctypes; ctypes.PyDLL(None).usleep(3_600_000_000)",
            "gave no answer within 5 s",
            5.0,
        ),
        ("Jobs.load = lambda: 1 / 0", "pyslurm.Jobs.load() failed", PATIENCE_S),
        ("__version__ = '23.11.0'", "is not of Slurm's version 24.11", PATIENCE_S),
    ],
)
def test_whatever_is_wrong_with_pyslurm_the_commands_are_taken_and_say_why(
    breaks, words, timeout_s, installed, tmp_path
):
    commands = installed(timeout_s=timeout_s)
    with open(tmp_path / "pyslurm.py", "a") as file:
        file.write(f"\n{breaks}\n")
    source = source_for("auto", commands, (24, 11))
    assert isinstance(source, SlurmCommandSource)
    assert words in source.reason


def test_check_says_why_pyslurm_is_not_used(installed, tmp_path):
    installed()
    slurm = World(tmp_path)
    scavenger = slurm.scavenger(api="auto")
    (works, sentence), *_ = scavenger.check()
    assert works
    assert "asked through commands, because pyslurm" in sentence


def test_another_source_is_chosen_when_slurm_is_upgraded(monkeypatch, tmp_path):
    slurm, versions = World(tmp_path), []
    monkeypatch.setattr(
        "scavenger.slurm.source.source_for",
        lambda api, commands, version: versions.append(version) or SlurmCommandSource(commands),
    )
    scavenger = slurm.scavenger(api="auto")
    scavenger.check()
    scavenger.check()
    assert versions == [(22, 5)]
    slurm.file("config", CONFIG.replace("22.05.8", "24.11.0"))
    slurm.now += scavenger.site_every_s
    scavenger.check()
    assert versions == [(22, 5), (24, 11)]


def test_a_pyslurm_that_failed_is_tried_again_and_its_failure_is_logged_once(
    installed, tmp_path, caplog
):
    caplog.set_level("INFO", "scavenger")
    path = tmp_path / "pyslurm.py"
    choice, now = SourceChoice("auto", installed(), lambda: now), 1000.0
    works = path.read_text()
    path.write_text(f"{works}\nJobs.load = lambda: 1 / 0\n")
    assert choice.source((24, 11)).reason
    now += TRIAL_EVERY_S
    assert choice.source((24, 11)).reason
    (record,) = caplog.records
    assert "pyslurm.Jobs.load() failed" in record.getMessage()
    path.write_text(works)
    now += TRIAL_EVERY_S - 1.0
    assert choice.source((24, 11)).name == "commands"
    now += 1.0
    assert choice.source((24, 11)).name == "pyslurm"
    path.unlink()
    now += TRIAL_EVERY_S
    assert choice.source((24, 11)).name == "pyslurm"


def test_without_pyslurm_the_commands_are_taken(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    module, why = load_module((24, 11))
    assert module is None
    assert "cannot be imported" in why
    monkeypatch.delitem(sys.modules, "pyslurm")
    assert isinstance(source_for("auto", Commands(), (24, 11)), SlurmCommandSource)
