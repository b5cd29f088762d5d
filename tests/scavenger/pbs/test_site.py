"""What answers to the names of PBS's commands."""

import math

import pytest

from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.interface import SchedulerError
from scavenger.pbs.parse import RawNode
from scavenger.pbs.site import ask_site, read_site
from tests.scavenger.batch.fake_tools import FakeTools
from tests.waiting import PATIENCE_S

REFUSES = 'echo "qstat: invalid option -- F" >&2; echo "usage: qstat [-f [-1]] [-x]" >&2; exit 2;;'


@pytest.fixture
def answer(tmp_path):
    """The error for a qstat that does not know -F and prints this for --version."""

    def failure(version: str) -> str:
        tools = FakeTools(tmp_path / "bin", ("qstat", "qmgr"))
        tools.runs("qstat", f'case "$*" in *--version*) {version} exit 0;; *) {REFUSES} esac')
        commands = Commands(CommandPolicy(PATIENCE_S, 1, 0.0), tools.environment)
        with pytest.raises(SchedulerError) as error:
            ask_site(commands)
        return str(error.value)

    return failure


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ('echo "Version: 6.1.2"; echo "Commit: 661e0925";', "6.1.2"),
        ('echo "version: 2.5.13" >&2;', "2.5.13"),
    ],
)
def test_torque_is_named_and_what_it_lacks(answer, version, named):
    sentence = answer(version)
    assert sentence.startswith(f"This is Torque {named}, which MalleTrain does not support: ")
    assert "18.1" in sentence


@pytest.mark.parametrize("version", ['echo "pbs_version = 23.06.06";', ":;"])
def test_another_failure_is_told_in_its_own_words(answer, version):
    sentence = answer(version)
    assert "Torque" not in sentence
    assert "invalid option" in sentence


SERVER = '{"timestamp": 1, "Server": {"s": {"pbs_version": "23.06.06"}}}'
QUEUES = """{"timestamp": 1, "Queue": {
"workq": {"queue_type": "Execution", "Priority": 150},
"low": {"queue_type": "Execution", "Priority": 10},
"gpuq": {"queue_type": "Execution", "Priority": 150, "partition": "P1"},
"gpulow": {"queue_type": "Execution", "Priority": 10, "partition": "P1"},
"route": {"queue_type": "Route", "route_destinations": "low,again"},
"again": {"queue_type": "Route", "route_destinations": "gpulow"},
"away": {"queue_type": "Route", "route_destinations": "low@other"}}}
"""
SCHEDULERS = """#
# Create and define scheduler multi
#
create sched multi
set sched multi partition = P1
set sched multi preempt_order = R
set sched multi scheduler_iteration = 60
create sched default
set sched default preempt_order = D
set sched default partition = None
"""


@pytest.mark.parametrize(
    ("queue", "order", "above"), [("low", "D", ["workq"]), ("gpulow", "R", ["gpuq"])]
)
def test_of_several_schedulers_the_one_of_the_queue_counts(queue, order, above):
    """In either order of qmgr's answer; jobs of another partition never meet the leases."""
    head, _, tail = SCHEDULERS.partition("create sched default")
    for printed in (SCHEDULERS, f"create sched default{tail}{head}"):
        site = read_site(SERVER, QUEUES, printed, queue)
        assert site.preempt_order == order
        assert site.above(queue) == above


def test_vnodes_of_a_partition_take_jobs_of_its_queues_only():
    queues_of = read_site(SERVER, QUEUES).queues_of()
    assert set(queues_of(RawNode(partition="P1"))) == {"gpuq", "gpulow"}
    assert set(queues_of(RawNode())) == {"workq", "low"}
    assert queues_of(RawNode(partition="P2")) == ()


def test_where_a_job_can_be_that_a_queue_routes():
    site = read_site(SERVER, QUEUES)
    assert site.reached_from("route") == {"route", "low", "again", "gpulow"}
    assert site.reached_from("low") == {"low"}
    assert site.reached_from("away") == site.reached_from("") == frozenset()


@pytest.mark.parametrize(
    ("targets", "sched", "preempts"),
    [
        ("NONE", "", False),
        ("queue=other", "", False),
        ("queue=other,queue=low", "", True),
        ("Queue=low", "", True),
        ("Resource_List.kind=x", "", True),
        ("NONE", "set sched preempt_targets_enable = False\n", True),
    ],
)
def test_the_jobs_that_a_queue_preempts(targets, sched, preempts):
    """PBS takes no other job's node for a job (openpbs, job_info.cpp, find_jobs_to_preempt)."""
    of_queue = QUEUES.replace(
        '"Priority": 150},',
        f'"Priority": 150, "resources_default": {{"preempt_targets": "{targets}"}}}},',
        1,
    )
    site = read_site(SERVER, of_queue, sched, "low")
    assert site.preempts(site.queues["workq"], "low") is preempts
    of_server = SERVER.replace(
        "}}}", f', "resources_default": {{"preempt_targets": "{targets}"}}}}}}}}'
    )
    site = read_site(of_server, QUEUES, sched, "low")
    assert site.preempts(site.queues["workq"], "low") is preempts


@pytest.mark.parametrize(
    ("prio", "priority", "ranks"),
    [
        ("", 150, True),
        ("express_queue, normal_jobs", 150, True),
        ("express_queue,normal_jobs,fairshare", 150, True),
        ("express_queue", 150, True),
        ("express_queue+fairshare, normal_jobs", 150, False),
        ("normal_jobs", 150, False),
        ("normal_jobs, express_queue", 1000, False),
        ("normal_jobs, express_queue", 1001, True),
        ("normal_jobs, fairshare, express_queue", 1001, None),
        ("normal_jobs, fairshare", 1023, None),
        ("normal_jobs, server_softlimits+queue_softlimits", 150, None),
        ("normal_jobs, express_queue+fairshare", 150, False),
        ("server_softlimits, normal_jobs", 150, False),
    ],
)
def test_whether_jobs_of_express_queues_rank_above_normal_ones(prio, priority, ranks):
    sched = f'set sched preempt_prio = "{prio}"\n' if prio else ""
    assert read_site(SERVER, QUEUES, sched, "low").ranks_above_normal(priority) is ranks


def test_the_order_of_a_scheduler_that_does_not_print_it_is_not_known():
    """PBS before 20.0 has it in sched_config."""
    site = read_site(SERVER, QUEUES, "set sched scheduler_iteration = 5\n", "low")
    assert (site.preempt_order, site.preempt_known) == ("SCR", False)
    assert read_site(SERVER, QUEUES, "set sched preempt_order = R\n", "low").preempt_known


@pytest.mark.parametrize(
    ("sched", "seconds"),
    [
        ("", math.inf),  # qmgr is refused
        ("set sched preempt_order = D\n", 600 + 2 * 1200),
        (
            "set sched scheduler_iteration = 5\nset sched sched_cycle_length = 00:10:00\n"
            "set sched attr_update_period = 0\n",
            5 + 2 * 600,
        ),
        ("set sched attr_update_period = 900\n", math.inf),
    ],
)
def test_how_long_a_forecast_of_a_start_stands(sched, seconds):
    assert read_site(SERVER, QUEUES, sched, "low").estimates_every_s == seconds
