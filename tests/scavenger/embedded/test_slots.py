"""Slots of the embedded cluster: leases on parts of virtual nodes, beside the main jobs of a trace
with amounts.
"""

import json

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.embedded.hosts import Division
from scavenger.interface import LeaseState
from scavenger.trace.amounts import HEADER
from tests.scavenger.embedded.leases import PY, lease_of, record_of, take, wait_clean
from tests.waiting import NEVER_S, until

pytestmark = pytest.mark.slow

GPU = SlotKind("gpu", {"gpu": 1, "cpus": 2, "memory_mb": 1000})
DIVISION = Division({"gpu": 4, "cpus": 8, "memory_mb": 8000}, (GPU,))
ENVIRONMENT = (
    "MALLETRAIN_NODE",
    "MALLETRAIN_NODE_CLASS",
    "MALLETRAIN_SLOT",
    "CUDA_VISIBLE_DEVICES",
)
SHOW = f"import os; print(*(os.environ[k] for k in {ENVIRONMENT!r}))"


def idle(scavenger):
    return sorted(gap.node for gap in scavenger.poll().gaps)


def test_a_node_is_leased_slot_by_slot(cluster):
    scavenger = cluster(2, division=DIVISION).scavenger()
    assert idle(scavenger) == [f"n{host}/gpu.{k}" for host in (1, 2) for k in range(4)]
    assert {(gap.node_class, gap.group) for gap in scavenger.poll().gaps} == {
        ("gpu", "n1"),
        ("gpu", "n2"),
    }
    assert take(scavenger, "a", "n2/gpu.0").state is LeaseState.RUNNING
    assert take(scavenger, "b", "n2/gpu.3", (PY, "-S", "-c", SHOW)).node == "n2/gpu.3"
    wait_clean(scavenger, "b")
    output = scavenger.layout.lease_directory("b") / "output.log"
    assert output.read_text() == "n2/gpu.3 gpu gpu.3 5\n"
    assert idle(scavenger) == [f"n1/gpu.{k}" for k in range(4)] + [f"n2/gpu.{k}" for k in (1, 2, 3)]
    explained = {e.node: e.rules[0][2] for e in scavenger.poll().explanations}
    assert explained["n2/gpu.0"] == "MalleTrain holds the slot with lease a"
    assert explained["n2/gpu.1"] == (
        "its host is mixed, with 3 of 4 gpu, 6 of 8 cpus, 7000 of 8000 MiB idle"
    )
    refused = take(scavenger, "c", "n2/gpu.0")
    assert refused.reason == "Node n2/gpu.0 is leased, not idle."


def test_a_main_job_takes_back_one_slot(cluster, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{HEADER}\n0,n1,idle,3\n0,n1,busy,1\n1,n1,busy,1\n2,n1,busy,1\n3,n1,idle,3\n")
    embedded = cluster(1, division=DIVISION, trace=trace, at_end="hold", hold=True, grace_s=NEVER_S)
    scavenger = embedded.scavenger()
    until(lambda: idle(scavenger) == ["n1/gpu.0", "n1/gpu.1", "n1/gpu.2"], "the start")
    take(scavenger, "a", "n1/gpu.1")
    take(scavenger, "b", "n1/gpu.0")
    embedded.go_on()
    # The first main job takes the idle slot, the second one the newest lease.
    wait_clean(scavenger, "b")
    assert record_of(scavenger, "b")["reason"] == "preempted with notice"
    until(lambda: len(idle(scavenger)) == 3, "the main jobs have ended")
    assert lease_of(scavenger, "a").state is LeaseState.RUNNING
    assert scavenger.totals()["preemptions_with_notice"] == 1
    assert json.loads(scavenger.layout.state.read_text())["nodes"]["n1/gpu.1"]["lease"] == "a"


def test_without_slots_a_partly_used_node_is_not_idle(cluster, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{HEADER}\n0,n1,idle,3\n0,n1,busy,1\n0,n2,idle,4\n9,n2,busy,1\n")
    scavenger = cluster(2, trace=trace, hold=True).scavenger()
    until(lambda: idle(scavenger) == ["n2"], "the start")
