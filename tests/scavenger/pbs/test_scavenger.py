"""The scavenger of PBS against an imitated one: what it makes of a poll, and what it does when
commands hang, fail or print garbage.
"""

import time

import pytest

from scavenger.batch.commands import CommandPolicy
from scavenger.batch.rules import GapRules
from scavenger.interface import LeaseState, SchedulerError
from scavenger.pbs.job import PbsLeaseOptions
from tests.scavenger.pbs.fake_pbs import PATIENT, QUEUES
from tests.scavenger.pbs.pbs_world import names, request, running, why, worlds
from tests.waiting import NEVER_S, PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path):
    with worlds(tmp_path) as make:
        yield make


def test_a_poll_is_two_commands(world):
    made = world(hosts=2)
    one = made.scavenger()
    one.poll()
    before = len(made.tools.calls())
    one.poll()
    assert [line.split()[0] for line in made.tools.calls()[before:]] == ["qstat", "pbsnodes"]


def test_a_node_is_a_gap_after_its_turn(world):
    made = world(hosts=2)
    one = made.scavenger(idle_for_s=None)
    assert names(one.poll()) == []
    made.later += 5.5  # one scheduler_iteration
    assert names(one.poll()) == ["n1", "n2"]
    main = made.pbs.submit("sleep 600", "-l", "walltime=00:10:00")
    made.pbs.until(lambda: made.pbs.jobs()[main]["state"] == "R", "the main job runs")
    polled = one.poll()
    assert names(polled) == ["n2"]
    assert "job-exclusive" in why(polled, "n1")["idle"]


def test_while_pbs_takes_leases_back_no_other_is_asked_for(world):
    made = world(hosts=2, queues=PATIENT)
    one = made.scavenger(hold_s=NEVER_S)
    one.take([request(1, "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")])
    running(made, one, "l1")
    made.pbs.submit("exit 0", "-l", "walltime=00:01:00", hosts=2)

    def leaving():
        return next((x for x in one.poll().leases if x.id == "l1" and x.gone_at is not None), None)

    lease = made.pbs.until(leaving, "the lease is leaving")
    assert (lease.state, lease.reason) == (LeaseState.RUNNING, "preempted")
    polled = one.poll()
    assert polled.gaps == ()
    assert "took leases back" in why(polled, "n2")["hold"]
    assert one.poll_again_s(one.read_state(), 0.01) == 2.0, "it may soon be over"
    [refused] = one.take([request(2)])
    assert "took leases back" in refused.reason
    made.later += 2 * NEVER_S
    made.pbs.edit(lambda state: state["jobs"][lease.scheduler_id].update(sigkill=True))
    made.pbs.until(
        lambda: "n2" in names(one.poll()) or made.pbs.jobs("F"), "it is over at some time"
    )


def test_nothing_is_taken_while_pbs_starts_no_jobs(world):
    made = world(hosts=1)
    made.pbs.edit(lambda state: state["server"].update(scheduling="False"))
    assert "scheduling of its server is False" in why(made.scavenger().poll(), "n1")["hold"]
    made.pbs.edit(
        lambda state: (
            state["server"].update(scheduling="True"),
            state["queues"]["preemptable"].update(started="False"),
        )
    )
    assert "queue preemptable is stopped" in why(made.scavenger().poll(), "n1")["hold"]
    polled = made.scavenger(lease=PbsLeaseOptions(queue="lost")).poll()
    assert "no queue lost" in why(polled, "n1")["hold"]
    assert polled.poll_again_s >= 5.0, "that may last, and is no reason to ask more often"


def test_reserved_planned_and_broken_nodes_are_left_alone(world):
    made = world(hosts=6)
    now = time.time()

    def change(state):
        state["resv"] = {
            "M1.pbs0": {"start": now - 9, "end": now + 900},
            "R2.pbs0": {"start": now + 80, "end": now + 900},
            "R3.pbs0": {"start": now + 7200, "end": now + 9000},
        }
        for i, name in enumerate(("M1.pbs0", "R2.pbs0", "R3.pbs0"), 1):
            state["nodes"][f"pbs0[{i}]"]["resv"].append(name)
        state["nodes"]["pbs0[4]"].update(state="offline", comment="bad dimm")
        state["nodes"]["pbs0[5]"].update(state="state-unknown,down")

    made.pbs.edit(change)
    one = made.scavenger()
    polled = one.poll()
    assert names(polled) == ["n3", "n6"]
    assert {gap.node: gap.horizon_s for gap in polled.gaps}["n3"] <= 7200
    assert "maintenance reservation M1.pbs0" in why(polled, "n1")["reservation"]
    assert "begins in" in why(polled, "n2")["reservation"]
    assert "it is offline (bad dimm)" in why(polled, "n4")["usable"]
    one.poll()
    assert len(made.tools.calls("pbs_rstat")) == 1, "reservations are asked for rarely"
    one.take([request(3)])
    [job] = made.pbs.leases().values()
    assert job["walltime"] <= 7170, "it ends before the reservation begins"


def test_expected_starts_are_respected_or_used(world):
    made = world(hosts=2, queues={**QUEUES, "expressq": {"Priority": 100}})
    made.pbs.edit(lambda state: state.update(strict_ordering=True))
    first = made.pbs.submit("sleep 600", "-l", "walltime=00:30:00")
    made.pbs.until(lambda: made.pbs.jobs()[first]["state"] == "R", "the first job runs")
    second = made.pbs.submit("sleep 600", "-l", "walltime=00:30:00", hosts=2)
    made.pbs.until(
        lambda: "estimated" in made.pbs.jobs()[second], "the second is expected to start later"
    )
    careful = made.scavenger()
    polled = careful.poll()
    assert names(polled) == []
    made.later = 1800.0
    assert "planned" in why(careful.poll(), "n2"), "it may start at any moment"
    made.later += 5 + 2 * 1200 + 1
    made.pbs.edit(lambda state: state["sched"].update(attr_update_period=60))
    assert "planned" in why(made.scavenger().poll(), "n2"), "PBS may not say that it still plans it"
    made.pbs.edit(lambda state: state["sched"].pop("attr_update_period"))
    assert names(careful.poll()) == ["n2"], "PBS planned anew since, and shows what it gave up"
    made.later = 0.0
    beginning = "held for a waiting job, which is expected to start in "
    minutes = why(polled, "n2")["planned"].partition(beginning)[2].partition(" min")[0]
    assert 20 <= int(minutes) <= 30
    one = made.scavenger(backfill=True, time_min_s=300.0, spare_s=60.0)
    assert names(one.poll()) == ["n2"]
    one.take([request(2)])
    [job] = made.pbs.leases().values()
    assert 1600 < job["walltime"] <= 1740
    assert "min_walltime=00:05:00" in job["args"]
    assert not [word for word in job["args"] if word.startswith("walltime")]


def test_hosts_of_several_vnodes_are_one_node(world):
    hosts = {
        f"h{i}": {f"h{i}": {"ncpus": 0}, f"h{i}[0]": {"ncpus": 4}, f"h{i}[1]": {"ncpus": 4}}
        for i in (1, 2)
    }
    made = world(hosts=hosts)
    made.pbs.edit(lambda state: state["nodes"]["h2[1]"].update(state="offline"))
    polled = made.scavenger().poll()
    assert polled.total_nodes == 2
    assert names(polled) == ["h1"]
    assert "offline" in why(polled, "h2")["usable"]


def test_nodes_of_other_queues_are_left_alone(world):
    queues = {
        **QUEUES,
        "preemptable": {**QUEUES["preemptable"], "default_chunk": {"Qlist": "pre", "ncpus": 1}},
    }
    hosts = {
        f"n{i}": {f"n{i}": {"ncpus": 2, "Qlist": q}}
        for i, q in enumerate(("debug", "debug,pre"), 1)
    }
    made = world(hosts=hosts, queues=queues)
    polled = made.scavenger().poll()
    assert names(polled) == ["n2"]
    assert "not in preemptable" in why(polled, "n1")["partition"]


def test_features_and_classes_come_from_resources(world):
    hosts = {
        f"n{i}": {f"n{i}": {"ncpus": 2, "gpu_type": kind, "nvlink": "True"}}
        for i, kind in enumerate(("a100", "v100"), 1)
    }
    made = world(hosts=hosts)
    one = made.scavenger(
        rules=GapRules(features=frozenset({"nvlink"})),
        node_classes=("gpu_type=a100", "gpu_type=v100"),
    )
    assert {gap.node: gap.node_class for gap in one.poll().gaps} == {
        "n1": "gpu_type=a100",
        "n2": "gpu_type=v100",
    }
    one = made.scavenger(rules=GapRules(features=frozenset({"gpu_type=v100"})))
    assert names(one.poll()) == ["n2"]


def test_what_users_wrote_does_not_spoil_a_poll(world):
    made = world(hosts=1)
    variables = {"A": "RAW:005", "B": "RAW:inf", "C": 'RAW:\\"say \\\\"hi\\\\"\\"', "D": "RAW:.5"}
    number = made.pbs.submit("sleep 600", "-l", "walltime=00:10:00")
    made.pbs.edit(lambda state: state["jobs"][number].update(variables=variables, name="RAW:0042"))
    made.pbs.until(lambda: made.pbs.jobs()[number]["state"] == "R", "the job runs")
    polled = made.scavenger().poll()
    assert polled.total_nodes == 1
    assert polled.gaps == ()


@pytest.mark.parametrize("tool", ["qstat", "pbsnodes", "pbs_rstat"])
@pytest.mark.parametrize("trouble", ["fails", "hangs", "prints garbage"])
def test_a_failed_poll_changes_nothing(world, tool, trouble):
    made = world(hosts=2)
    one = made.scavenger()
    one.poll()
    now = time.time()
    if tool == "pbs_rstat":
        made.pbs.edit(
            lambda s: (
                s["resv"].update({"R9.pbs0": {"start": now + 7200, "end": now + 9000}}),
                s["nodes"]["pbs0[1]"]["resv"].append("R9.pbs0"),
            )
        )
    if trouble == "fails":
        made.tools.fails(
            tool, "Connection refused\nqstat: cannot connect to server pbs0 (errno=15010)"
        )
    elif trouble == "hangs":
        made.tools.hangs(tool)
        one.commands.policy = CommandPolicy(0.7, 1, 0.0)
    else:
        made.tools.answers(tool, "<html>504</html>")
    with pytest.raises(SchedulerError) as error:
        one.poll()
    assert len(str(error.value)) > 20
    with pytest.raises(SchedulerError):
        one.take([request(1)])
    assert made.tools.calls("qsub") == []
    made.pbs.works(tool)
    one.commands.policy = CommandPolicy(PATIENCE_S, 1, 0.0)
    one.settings.__dict__["idle_for_s"] = 5.0
    made.later += 5.5
    assert len(one.poll().gaps) == 2, "the nodes are as long idle as they were"
