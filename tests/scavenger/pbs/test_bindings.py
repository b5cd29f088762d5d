"""PBS's Python bindings, imitated: linked lists as SWIG makes them, errors, and no answer."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from scavenger.batch.commands import Commands
from scavenger.interface import SchedulerError
from scavenger.pbs.bindings import NEEDED, NODE_ATTRIBUTES, BindingsSource, load_module
from scavenger.pbs.source import PbsCommandSource, source_for
from tests.waiting import PATIENCE_S


class Attrl:
    name = resource = value = next = None


def chain(items, make):
    head = None
    for item in reversed(items):
        made = make(item)
        made.next = head
        head = made
    return head


def attribute(item):
    name, _, resource = item[0].partition(".")
    return SimpleNamespace(name=name, resource=resource or None, value=item[1], next=None)


class FakeIfl(ModuleType):
    """``nodes`` and ``jobs``: name → attributes (``name`` or ``name.resource``)."""

    attrl = Attrl

    def __init__(self, nodes, jobs):
        super().__init__("pbs_ifl")
        self.nodes, self.jobs, self.errno, self.asked, self.open, self.freed = (
            nodes,
            jobs,
            0,
            [],
            0,
            0,
        )

    def pbs_connect(self, server):
        self.open += 1
        return -1 if self.errno else 3

    def pbs_disconnect(self, connection):
        assert connection == 3
        self.open -= 1

    def get_pbs_errno(self):
        return self.errno

    def pbs_statfree(self, status):
        self.freed += 1

    def _stat(self, what, wanted):
        names = []
        while wanted is not None:
            names.append(wanted.name)
            wanted = wanted.next
        self.asked.append(names)
        return chain(
            list(what.items()),
            lambda item: SimpleNamespace(
                name=item[0], attribs=chain(list(item[1].items()), attribute), next=None
            ),
        )

    def pbs_statjob(self, connection, id, wanted, extend):
        return self._stat(self.jobs, wanted)

    def pbs_statvnode(self, connection, id, wanted, extend):
        return self._stat(self.nodes, wanted)


NODES = {
    "a[0]": {
        "state": "free",
        "resources_available.host": "a",
        "resources_available.ncpus": "4",
        "jobs": "1.s/0, 1.s/1",
    },
    "b": {
        "state": "offline",
        "comment": "bad dimm",
        "resources_available.host": "b",
        "resources_available.ncpus": "2",
    },
}
JOBS = {
    "1.s": {
        "Job_Name": "malletrain-t-l1",
        "Job_Owner": "me@h",
        "job_state": "R",
        "substate": "42",
        "ctime": "1795197778",
        "Resource_List.select": "1:host=a:ncpus=4",
        "run_count": "1",
    },
    "2.s": {
        "Job_Name": "big",
        "job_state": "Q",
        "estimated.start_time": "1795198073",
        "estimated.exec_vnode": "(b:ncpus=2)",
    },
    "3.s": {"Job_Name": "other", "job_state": "Q"},
}


def test_the_same_values_as_from_the_commands():
    module = FakeIfl(NODES, JOBS)
    nodes, jobs = BindingsSource(module).read("malletrain-t-")
    assert nodes["a[0]"].resources_available == {"host": "a", "ncpus": "4"}
    assert (nodes["b"].state, nodes["b"].comment) == ("offline", "bad dimm")
    assert [(job.id, job.start, job.planned_on) for job in jobs.pending] == [
        ("2.s", 1795198073.0, ("b",))
    ]
    [ours] = jobs.ours
    assert (ours.host, ours.runs, ours.submitted, ours.user) == ("a", 1, 1795197778.0, "me")
    assert list(NODE_ATTRIBUTES) in module.asked, "only what is needed"
    assert (module.open, module.freed) == (0, 2), "nothing is left open"


def test_errors_are_sentences():
    module = FakeIfl(NODES, JOBS)
    module.errno = 15010
    with pytest.raises(SchedulerError, match="cannot be reached \\(error 15010\\)"):
        BindingsSource(module, "s").read("x")
    module = FakeIfl({}, {})
    with pytest.raises(SchedulerError, match="names no nodes"):
        BindingsSource(module).read("x")
    module = FakeIfl(NODES, JOBS)
    del FakeIfl.pbs_statfree
    try:
        with pytest.raises(SchedulerError, match="bindings failed"):
            BindingsSource(module).read("x")
    finally:
        FakeIfl.pbs_statfree = lambda self, status: None


def test_no_answer():
    module, gate = FakeIfl(NODES, JOBS), threading.Event()
    module.pbs_connect = lambda server: gate.wait(PATIENCE_S) and 3
    source = BindingsSource(module, timeout_s=0.1)
    try:
        with pytest.raises(SchedulerError, match="gave its Python bindings no answer"):
            source.read("x")
        with pytest.raises(SchedulerError, match="still gives"):
            source.read("x")
    finally:
        gate.set()


def test_which_source_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "pbs_ifl", None)
    assert load_module()[0] is None
    assert isinstance(source_for("auto", Commands(), "s"), PbsCommandSource)
    with pytest.raises(SchedulerError, match="pbs_ifl cannot be imported"):
        source_for("bindings", Commands(), "s")
    monkeypatch.setitem(sys.modules, "pbs_ifl", ModuleType("pbs_ifl"))
    assert "lacks pbs_connect" in load_module()[1]
    monkeypatch.setitem(sys.modules, "pbs_ifl", FakeIfl({}, {}))
    assert isinstance(source_for("auto", Commands(), "s"), BindingsSource)
    assert isinstance(source_for("commands", Commands(), "s"), PbsCommandSource)


def test_bindings_that_come_with_pbs_are_found_where_it_is_installed(tmp_path, monkeypatch):
    """In no folder that Python knows; where they lie is known from the commands."""
    installed, before = tmp_path / "pbs", list(sys.path)
    (installed / "bin").mkdir(parents=True)
    (qstat := installed / "bin" / "qstat").write_text("#!/bin/sh\n")
    qstat.chmod(0o755)
    commands = Commands(environment={"PATH": str(installed / "bin")})
    folder = installed / "lib" / "python" / "altair"
    folder.mkdir(parents=True)
    (folder / "pbs_ifl.py").write_text("".join(f"{name} = None\n" for name in NEEDED))
    monkeypatch.delitem(sys.modules, "pbs_ifl", raising=False)
    found = source_for("auto", commands, "s")
    monkeypatch.delitem(sys.modules, "pbs_ifl", raising=False)
    assert isinstance(found, BindingsSource)
    assert found.module.__file__ == str(folder / "pbs_ifl.py")
    assert sys.path == before
