import re
import socket
import urllib.request
from pathlib import Path

import pytest

from malletrain.config.model import parse_config
from malletrain.daemon.site.metrics import (
    JOB_STATES,
    MAX_SHOWN_JOBS,
    Metrics,
    MetricsError,
    count_costs,
)
from tests.waiting import PATIENCE_S


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"malletrain_{name}", labels)


def test_gauges_show_what_was_said_last():
    metrics = Metrics()
    metrics.nodes(training=4, free=1, leaving=2)
    metrics.nodes(training=3, free=0, leaving=0)
    metrics.jobs({"running": 2, "queued": 5})
    metrics.jobs({"running": 1})
    metrics.polled(1e9, idle_nodes=7)
    assert [value(metrics, "leased_nodes", use=use) for use in ("training", "free", "leaving")] == [
        3,
        0,
        0,
    ]
    assert [value(metrics, "jobs", state=state) for state in JOB_STATES] == [0, 0, 1, 0, 0, 0, 0]
    assert value(metrics, "idle_nodes") == 7
    assert value(metrics, "last_poll_timestamp_seconds") == 1e9


def test_shares_of_a_step_are_those_of_current_jobs_with_gauges():
    metrics = Metrics()
    metrics.job("j1", 10.0, 2, 100.0)
    metrics.step_shares({"j1": {"data": 0.4, "computing": 0.6}, "j2": {"computing": 1.0}})
    assert value(metrics, "job_step_share", job="j1", part="data") == 0.4
    assert value(metrics, "job_step_share", job="j2", part="computing") is None
    metrics.step_shares({"j1": {"computing": 1.0}})
    assert value(metrics, "job_step_share", job="j1", part="data") is None
    assert value(metrics, "job_step_share", job="j1", part="computing") == 1.0
    metrics.job_ended("j1", "completed")
    assert value(metrics, "job_step_share", job="j1", part="computing") is None


def test_the_caller_learns_which_jobs_are_shown():
    metrics = Metrics()
    shown = [metrics.job(f"j{number}", 1.0, 1, 1.0) for number in range(MAX_SHOWN_JOBS + 1)]
    assert shown == [True] * MAX_SHOWN_JOBS + [False]
    assert metrics.job("j0", 2.0, 1, 1.0)


def test_counters_count():
    metrics = Metrics()
    metrics.samples(10)
    metrics.samples(0)
    metrics.samples(5)
    metrics.preemption(notice=True)
    metrics.lease_requested(3)
    metrics.lease_ended("preempted")
    metrics.invalid_message("agent")
    metrics.poll_failed()
    metrics.node_seconds("training", 2.5)
    assert value(metrics, "samples_total") == 15
    assert value(metrics, "preemptions_total", notice="yes") == 1
    assert value(metrics, "preemptions_total", notice="no") == 0
    assert value(metrics, "leases_requested_total") == 3
    assert value(metrics, "leases_ended_total", reason="preempted") == 1
    assert value(metrics, "invalid_messages_total", sender="agent") == 1
    assert value(metrics, "poll_failures_total") == 1
    assert value(metrics, "node_seconds_total", use="training") == 2.5


def test_histograms():
    metrics = Metrics()
    metrics.rescale("up", 4.0)
    metrics.rescale("up", None)
    metrics.plan(0.02, gap=0.001)
    metrics.loop_lag(-0.5)
    assert value(metrics, "rescales_total", kind="up") == 2
    assert value(metrics, "rescale_seconds_count", kind="up") == 1
    assert value(metrics, "rescale_seconds_bucket", kind="up", le="5.0") == 1
    assert value(metrics, "rescale_seconds_bucket", kind="up", le="3.0") == 0
    assert value(metrics, "plan_seconds_count") == 1
    assert value(metrics, "plan_gap") == 0.001
    assert value(metrics, "event_loop_lag_seconds_sum") == 0


def test_jobs_that_ended_are_shown_no_more():
    metrics = Metrics()
    metrics.job("j1", rate=120.0, nodes=4, samples=1e6)
    metrics.job("j2", rate=60.0, nodes=2, samples=1e3)
    assert value(metrics, "job_samples_per_second", job="j1") == 120.0
    metrics.job_ended("j1", "completed")
    metrics.job_ended("j3", "cancelled")  # it never ran
    assert value(metrics, "jobs_ended_total", state="completed") == 1
    assert value(metrics, "jobs_ended_total", state="cancelled") == 1
    assert value(metrics, "job_samples_per_second", job="j1") is None
    assert value(metrics, "job_nodes", job="j2") == 2


def test_no_more_jobs_are_named_than_prometheus_likes():
    metrics = Metrics()
    many = {f"j{k}": float(k) for k in range(3 * MAX_SHOWN_JOBS)}
    for job in many:
        metrics.job(job, rate=1.0, nodes=1, samples=1.0)
    metrics.memory({job: int(much) for job, much in many.items()})
    metrics.goals({}, many, many)
    for family in metrics.registry.collect():
        assert sum("job" in sample.labels for sample in family.samples) <= MAX_SHOWN_JOBS
    assert value(metrics, "job_deadline_slack_seconds", job="j0") == 0.0  # the least slack
    assert value(metrics, "snapshot_memory_bytes", job=f"j{3 * MAX_SHOWN_JOBS - 1}") is not None
    metrics.job_ended("j7", "failed")
    metrics.job("late", rate=2.0, nodes=1, samples=1.0)
    assert value(metrics, "job_samples_per_second", job="late") == 2.0


def test_each_node_held_is_named_once_and_no_longer_than_it_is_held():
    metrics = Metrics()
    metrics.leased_nodes([("n1", "a100", "free"), ("n2", "a100", "training")])
    metrics.leased_nodes([("n1", "a100", "training")])
    labels = [
        sample.labels
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "malletrain_leased_node"
    ]
    assert labels == [{"node": "n1", "node_class": "a100", "use": "training"}]
    metrics.restricted(True, 2, 0)
    assert value(metrics, "leasing_paused") == 1
    assert value(metrics, "restrained_nodes", how="drained") == 2


def test_two_daemons_in_one_process_do_not_share_numbers():
    one, two = Metrics(), Metrics()
    one.poll_failed()
    assert value(two, "poll_failures_total") == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_served_over_http_until_stopped(host):
    metrics = Metrics()
    metrics.started("0.1.0")
    try:
        port = metrics.serve(f"{host}:0")
    except MetricsError:
        if host == "[::1]":
            pytest.skip("this machine has no IPv6 loopback")
        raise
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert 'malletrain_info{version="0.1.0"} 1.0' in text
    assert 'malletrain_jobs{state="suspended"} 0.0' in text
    metrics.stop()
    metrics.stop()
    with socket.socket(socket.AF_INET6 if host == "[::1]" else socket.AF_INET) as probe:
        assert probe.connect_ex((host.strip("[]"), port)) != 0


def test_a_port_in_use_is_told():
    first = Metrics()
    port = first.serve("127.0.0.1:0")
    try:
        with pytest.raises(
            MetricsError, match=f"cannot be served at 127.0.0.1:{port}: Address already in use"
        ):
            Metrics().serve(f"127.0.0.1:{port}")
    finally:
        first.stop()


def test_what_the_scheduler_was_asked_is_counted_on_and_never_twice():
    metrics = Metrics()
    metrics.scheduler_calls({("squeue", "ok"): 3})
    metrics.scheduler_calls({("squeue", "ok"): 5, ("sbatch", "busy"): 1})
    metrics.scheduler_calls({("squeue", "ok"): 5, ("sbatch", "busy"): 1})
    metrics.scheduler_backoff("busy", 20.0)
    metrics.energy("a100", 800.0)
    assert value(metrics, "scheduler_calls_total", command="squeue", outcome="ok") == 5
    assert value(metrics, "scheduler_calls_total", command="sbatch", outcome="busy") == 1
    assert value(metrics, "scheduler_backoff_seconds", cause="busy") == 20
    assert value(metrics, "scheduler_backoff_seconds", cause="refused") == 0
    assert value(metrics, "energy_joules_total", node_class="a100") == 800


SLOTS = """
[scheduler]
kind = "local"
[[scheduler.local.slots]]
name = "gpu"
gpus = 2
memory = "1 GiB"
[accounting]
charge_factor = 2
watts = ["default 100 300"]
"""


def test_slots_cost_what_their_kind_costs():
    metrics, config = Metrics(), parse_config(SLOTS)
    leased = {("gpu", True): 3, ("gpu", False): 1, ("default", True): 1, ("default", False): 2}
    count_costs(metrics, config, {"gpu": 0.25}, leased, 10.0)
    assert value(metrics, "charged_node_seconds_total", node_class="gpu") == 4 * 2 * 0.25 * 10
    assert value(metrics, "charged_node_seconds_total", node_class="default") == 3 * 2 * 10
    assert value(metrics, "gpu_seconds_total", node_class="gpu") == 4 * 2 * 10
    assert value(metrics, "energy_joules_total", node_class="default") == (300 + 2 * 100) * 10


def test_the_documentation_names_every_metric():
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \| (gauge|counter|histogram) ", text, re.MULTILINE))
    served = {
        (
            family.name.removeprefix("malletrain_") + "_total" * (family.type == "counter"),
            family.type,
        )
        for family in Metrics().registry.collect()
    }
    assert named == served
