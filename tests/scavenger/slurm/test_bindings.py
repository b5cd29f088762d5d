"""The path through pyslurm, against objects shaped as its documentation says: pyslurm itself builds
only beside its own Slurm.
"""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from scavenger.batch.commands import Commands
from scavenger.interface import SchedulerError
from scavenger.slurm.bindings import PyslurmSource, load_module, node_group
from scavenger.slurm.source import SlurmCommandSource, source_for
from tests.waiting import PATIENCE_S


def collection(*objects):
    """A mapping by name, as pyslurm's collections are."""
    return {getattr(o, "name", None) or o.id: o for o in objects}


def node(name, state, partitions=("batch",), features=(), reason=None):
    return SimpleNamespace(
        name=name,
        state=state,
        partitions=list(partitions),
        active_features=list(features),
        reason=reason,
    )


def job(number, state, name, **fields):
    names = (
        "submit_time",
        "start_time",
        "end_time",
        "allocated_nodes",
        "required_nodes",
        "scheduled_nodes",
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
    made = ModuleType("pyslurm")
    made.__version__ = "24.11.0"
    nodes = [
        node("n1", "IDLE", ("batch", "low"), ("a100",)),
        node("n2", "IDLE+PLANNED"),
        node("n3", "ALLOCATED+DRAIN", reason="fan"),
    ]
    jobs = [
        job(1, "PENDING", "big", start_time=500, scheduled_nodes="n[1-2]"),
        job(2, "RUNNING", "malletrain-t-l1", allocated_nodes="n3", start_time=100, end_time=900),
        job(3, "RUNNING", "other", allocated_nodes="n4"),
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
    nodes, jobs, reservations = PyslurmSource(module).read("malletrain-t-")
    assert {name: group.base for name, group in nodes.nodes.items()} == {
        "n1": "idle",
        "n2": "planned",
        "n3": "draining",
    }
    assert nodes.partitions == {"n1": ["batch"], "n2": ["batch"], "n3": ["batch"]}
    assert nodes.nodes["n1"].features == ("a100",)
    assert [(j.id, j.planned_on, j.start) for j in jobs.pending] == [("1", "n[1-2]", 500.0)]
    assert [(j.id, j.node_list, j.end) for j in jobs.ours] == [("2", "n3", 900.0)]
    assert [(r.name, r.nodes, r.maintenance) for r in reservations] == [("m", "n1", True)]


@pytest.mark.parametrize(
    ("state", "base", "marks"),
    [
        ("IDLE", "idle", ""),
        ("ALLOCATED", "allocated", ""),
        ("MIXED+PLANNED", "mixed", ""),
        ("IDLE+DRAIN", "drained", ""),
        ("MIXED+DRAIN", "draining", ""),
        ("IDLE+NOT_RESPONDING", "idle*", "*"),
        ("IDLE+CLOUD+POWERED_DOWN", "powered_down", ""),
        ("IDLE+MAINTENANCE+RESERVED", "maint", ""),
        ("DOWN+NOT_RESPONDING", "down*", "*"),
    ],
)
def test_states_with_flags(state, base, marks):
    group = node_group(state, (), "")
    assert (group.state, group.marks) == (base, marks)


def test_an_error_of_pyslurm_is_a_sentence(module):
    def refuse():
        raise RuntimeError("Unable to contact slurm controller")

    module.Nodes.load = refuse
    with pytest.raises(SchedulerError, match=r"pyslurm.Nodes.load\(\) failed: Unable to contact"):
        PyslurmSource(module).read("x")


def test_a_call_that_hangs_is_given_up_and_not_piled_up(module):
    release = threading.Event()
    module.Jobs.load = lambda: release.wait(PATIENCE_S) and {}
    source = PyslurmSource(module, timeout_s=0.05)
    with pytest.raises(SchedulerError, match=r"no answer within 0\.05 s"):
        source.read("x")
    with pytest.raises(SchedulerError, match="still gives pyslurm no answer"):
        source.read("x")
    release.set()


def test_only_a_pyslurm_of_slurms_version_is_taken(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyslurm", module)
    assert load_module((24, 11)) == (module, "")
    assert isinstance(source_for("auto", Commands(), (24, 11)), PyslurmSource)
    assert isinstance(source_for("commands", Commands(), (24, 11)), SlurmCommandSource)
    found, why = load_module((23, 11))
    assert found is None
    assert "24.11.0 is not of Slurm's version 23.11" in why
    assert isinstance(source_for("auto", Commands(), (23, 11)), SlurmCommandSource)
    with pytest.raises(SchedulerError, match=r"install the one for this Slurm, or set api"):
        source_for("pyslurm", Commands(), (23, 11))


def test_without_pyslurm_the_commands_are_taken(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    found, why = load_module((24, 11))
    assert found is None
    assert "cannot be imported" in why
    assert isinstance(source_for("auto", Commands(), (24, 11)), SlurmCommandSource)
