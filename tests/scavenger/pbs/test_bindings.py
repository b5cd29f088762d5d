"""PBS's Python bindings, imitated: linked lists as SWIG makes them, errors, and no answer."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from scavenger.batch.calls import SILENT
from scavenger.batch.commands import CommandPolicy, Commands, NoAnswerError
from scavenger.interface import SchedulerError
from scavenger.pbs import ask_pbs_ifl
from scavenger.pbs.source import (
    NODE_ATTRIBUTES,
    PROGRAM,
    BindingsSource,
    PbsCommandSource,
    source_for,
)
from tests.waiting import PATIENCE_S

IFL = """
import ctypes
from types import SimpleNamespace as Thing

class attrl:
    pass

def chain(items):
    head = None
    for item in reversed(items):
        item.next, head = head, item
    return head

def stat(what):
    return chain([Thing(name=name, attribs=chain([
        Thing(name=key.partition(".")[0], resource=key.partition(".")[2] or None, value=value)
        for key, value in values.items()])) for name, values in what.items()])

def pbs_connect(server):
    # The name of PBS's server need not be that of a host.
    assert server == ""
    # As SWIG calls libpbs: Python's lock is held meanwhile.
    ctypes.PyDLL(None).usleep({silent})
    return {connection}

def pbs_statjob(connection, id, attributes, extend):
    return stat({jobs})

def pbs_statvnode(connection, id, attributes, extend):
    return stat({nodes})

def pbs_disconnect(connection):
    pass

def pbs_statfree(status):
    pass

def get_pbs_errno():
    return {errno}
"""


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
        self.nodes, self.jobs, self.errno, self.queries, self.open, self.freed = (
            nodes,
            jobs,
            0,
            [],
            0,
            0,
        )

    def pbs_connect(self, server):
        assert server == "", "the default server"
        self.open += 1
        return -1 if self.errno else 3

    def pbs_disconnect(self, connection):
        assert connection == 3
        self.open -= 1

    def get_pbs_errno(self):
        return self.errno

    def pbs_statfree(self, status):
        self.freed += 1

    def _stat(self, what, attributes):
        names = []
        while attributes is not None:
            names.append(attributes.name)
            attributes = attributes.next
        self.queries.append(names)
        return chain(
            list(what.items()),
            lambda item: SimpleNamespace(
                name=item[0], attribs=chain(list(item[1].items()), attribute), next=None
            ),
        )

    def pbs_statjob(self, connection, id, attributes, extend):
        return self._stat(self.jobs, attributes)

    def pbs_statvnode(self, connection, id, attributes, extend):
        return self._stat(self.nodes, attributes)


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


def test_what_is_asked_and_that_nothing_is_left_open():
    module = FakeIfl(NODES, JOBS)
    reply = ask_pbs_ifl.ask(module, ["job_state"], list(NODE_ATTRIBUTES))
    assert reply["nodes"]["a[0]"]["resources_available"] == {"host": "a", "ncpus": "4"}
    assert reply["jobs"]["2.s"]["estimated"]["exec_vnode"] == "(b:ncpus=2)"
    assert module.queries == [["job_state"], list(NODE_ATTRIBUTES)], "only what is needed"
    assert (module.open, module.freed) == (0, 2)
    module.errno = 15010
    with pytest.raises(ask_pbs_ifl.NoAnswer, match="cannot be reached \\(error 15010\\)"):
        ask_pbs_ifl.ask(module, [], [])


@pytest.fixture
def installed(tmp_path):
    """A PBS whose bindings lie where its installation puts them, in no folder Python knows."""
    (tmp_path / "bin").mkdir()
    (qstat := tmp_path / "bin" / "qstat").write_text("#!/bin/sh\n")
    qstat.chmod(0o755)

    def make(nodes=NODES, jobs=JOBS, connection=3, errno=0, silent=0):
        folder = tmp_path / "lib" / "python" / "altair"
        folder.mkdir(parents=True, exist_ok=True)
        values = {"nodes": nodes, "jobs": jobs, "connection": connection, "errno": errno}
        text = IFL
        for name, value in {**values, "silent": silent}.items():
            text = text.replace(f"{{{name}}}", repr(value))
        (folder / "pbs_ifl.py").write_text(text)
        return tmp_path

    return make


def commands_of(installed, timeout_s=PATIENCE_S):
    return Commands(CommandPolicy(timeout_s, 1), {"PATH": str(installed / "bin")})


def test_the_same_values_as_from_the_commands(installed):
    source = source_for("auto", commands_of(installed()))
    assert isinstance(source, BindingsSource)
    before = list(sys.path)
    nodes, jobs = source.read("malletrain-t-")
    assert sys.path == before
    assert nodes["a[0]"].resources_available == {"host": "a", "ncpus": "4"}
    assert (nodes["b"].state, nodes["b"].comment) == ("offline", "bad dimm")
    assert [(job.id, job.start, job.planned_on) for job in jobs.pending] == [
        ("2.s", 1795198073.0, ("b",))
    ]
    [ours] = jobs.ours
    assert (ours.host, ours.runs, ours.submitted, ours.user) == ("a", 1, 1795197778.0, "me")


@pytest.mark.parametrize("server", [[], ["pbs0"]])
def test_a_daemon_of_the_version_before_gets_the_same_answer(installed, server):
    made = installed()
    argv = [*PROGRAM, str(made / "lib" / "python" / "altair"), *server]
    commands = commands_of(made)
    assert commands.ask(argv) == "", "the bindings can be used"
    answer = json.loads(commands.ask([*argv, "job_state", "state"]))
    assert set(answer["jobs"]) == set(JOBS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"connection": -1, "errno": 15010}, "cannot be reached \\(error 15010\\)"),
        ({"nodes": {}, "jobs": {}}, "names no nodes"),
        ({"jobs": {}, "errno": 15031}, "refused to answer \\(error 15031\\)"),
    ],
)
def test_errors_are_sentences(installed, options, words):
    source = source_for("bindings", commands_of(installed(**options)))
    with pytest.raises(SchedulerError, match=words):
        source.read("x")


def test_a_server_without_an_answer_holds_up_nobody(installed):
    """Its call holds Python's lock for an hour: in a thread of this process nothing would run."""
    made = installed(silent=3_600_000_000)
    commands = commands_of(made, timeout_s=2.0)
    source = BindingsSource(commands, made)
    with pytest.raises(NoAnswerError, match="gave no answer within 2 s"):
        source.read("x")
    assert commands.calls.counts() == {("ask_pbs_ifl.py", SILENT): 1}
    assert commands.calls.backoff_s() > 0


def test_bytes_that_are_no_characters(installed):
    nodes = {"a": {"comment": "bad \udcff dimm", "resources_available.host": "a"}}
    source = source_for("bindings", commands_of(installed(nodes)))
    assert source.read("x")[0]["a"].comment == "bad \ufffd dimm"


def test_which_source_is_used(installed):
    made = installed()
    assert isinstance(source_for("commands", commands_of(made)), PbsCommandSource)
    file = made / "lib" / "python" / "altair" / "pbs_ifl.py"
    file.write_text("pbs_connect = None\n")
    assert isinstance(source_for("auto", commands_of(made)), PbsCommandSource)
    with pytest.raises(
        SchedulerError, match=r"pbs_ifl lacks pbs_disconnect.*install PBS's bindings"
    ):
        source_for("bindings", commands_of(made))
    file.unlink()
    with pytest.raises(SchedulerError, match=r"pbs_ifl cannot be imported .*set api"):
        source_for("bindings", commands_of(made))
    assert isinstance(source_for("auto", commands_of(made)), PbsCommandSource)
