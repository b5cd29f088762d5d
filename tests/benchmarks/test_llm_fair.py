"""The benchmark of fair scheduling: short forms of its cases, and gaps with known sums."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from benchmarks import llm_fair, llm_gaps
from benchmarks import llm_fair_cases as cases
from scavenger.horizon import SurvivalEstimator
from scavenger.trace.trace import Trace

SMALL = cases.Engine(capacity=cases.Capacity(slots=8, kv_tokens=8_192))


def test_two_users_under_each_policy():
    rows = cases.two_users(SMALL, 120.0)
    assert rows["fcfs"]["ratio"] == pytest.approx(2.0, abs=0.1)
    for name in ("vtc", "fairserve"):
        assert rows[name]["ratio"] == pytest.approx(1.0, abs=0.05)
        assert rows[name]["widest"] <= cases.published_bound(SMALL, 256)
    assert rows["fcfs"]["widest"] > rows["vtc"]["widest"]


def test_fairserve_gives_an_application_what_it_needs():
    rows = cases.two_applications(SMALL, 200.0, longer=True)
    assert rows["fairserve"]["ratio"] == pytest.approx(2.0, abs=0.15)
    assert rows["vtc"]["ratio"] == pytest.approx(1.0, abs=0.1)
    rows = cases.two_applications(SMALL, 200.0, longer=False)
    assert rows["fairserve"]["ratio"] == pytest.approx(2.0, abs=0.1)
    assert rows["fairserve"]["tokens_per_s"] >= 0.98 * rows["vtc"]["tokens_per_s"]


def test_no_interaction_is_cut_and_who_floods_waits():
    rows = cases.interactions(SMALL, 60.0, seed=1)
    assert rows["fairserve"]["cut"] == 0
    assert rows["fairserve"]["ttft_p99_s"] < rows["fcfs"]["ttft_p99_s"]
    assert rows["rpm"]["cut"] > 0
    assert rows["rpm"]["refused"] > rows["fairserve"]["refused"]


def test_streams_survive_losses():
    engine = cases.Engine(capacity=SMALL.capacity, replicas=3)
    rows = cases.losses(engine, streams=24)
    for row in rows.values():
        assert (row["failed"], row["different"]) == (0, 0)
        assert row["disturbed"] > 0
    sudden, announced = rows["no notice"], rows["notice of 5 s"]
    assert sudden["stall_p50_s"] >= cases.DETECTION_S
    assert announced["stall_p99_s"] < cases.DETECTION_S
    assert announced["repeated"] <= 0.02  # ids of half characters


def test_one_replica_ends_at_a_time_and_is_replaced():
    engine = cases.Engine(replicas=2)
    nodes = list(cases.losing_nodes(engine, 50.0, 20.0, 5.0, None))
    assert [(node.start, node.end) for node in nodes] == [
        (0.0, 20.0),
        (20.0, float("inf")),
        (0.0, 40.0),
        (40.0, float("inf")),
    ]
    assert [node.load_s for node in nodes] == [0.0, 5.0, 0.0, 5.0]


def test_quantiles_of_known_values():
    values = [float(number) for number in range(101)]
    assert cases.quantile(values, 0.99) == pytest.approx(99.0)
    assert cases.quantile(values, 0.5) == pytest.approx(50.0)
    assert cases.quantile([3.0], 0.99) == 3.0
    assert cases.quantile([], 0.5) == float("inf")


def test_the_extremes_of_service_give_the_widest_interval():
    service = cases.ServiceOverTime(since=1.0)
    for time, user, amount in (
        *((0.0, "a", 99.0), (1.0, "a", 5.0), (2.0, "b", 12.0), (3.0, "a", 4.0)),
    ):
        service.observe(time, user, amount)
    assert service.total == {"a": 9.0, "b": 12.0}
    assert service.widest == 12.0  # from +5 to −7


def test_gaps_with_known_sums():
    table = SurvivalEstimator()
    lengths = np.array([50.0, 100.0, 850.0])
    account = llm_gaps.account(lengths, table, load_s=60.0, lease_s=10.0, worth=2.0)
    assert account.allowed == pytest.approx((40 + 790) / 1000)
    assert account.useful == pytest.approx((30 + 780) / 1000)
    assert account.of_allowed == pytest.approx(810 / 830)


def test_a_start_cost_keeps_models_from_gaps_in_which_they_cannot_load():
    table = SurvivalEstimator(half_life=None, prior_weight=1e-9)
    for _ in range(1_000):
        table.observe(100.0)
    assert llm_gaps.age_of_replicas(table, load_s=600.0, worth=2.0) > 120.0  # no gap is so old
    assert llm_gaps.age_of_replicas(table, load_s=1.0, worth=2.0) == 0.0
    account = llm_gaps.account(np.full(10, 100.0), table, 600.0, 10.0, 2.0)
    assert (account.useful, account.serving_on) == (0.0, 0.0)
    assert account.training_on == pytest.approx(0.72)


def test_a_life_table_ends_where_its_time_does():
    trace = Trace.from_gaps(
        [0, 0, 1], [10.0, 200.0, 50.0], [20.0, 300.0, 150.0], ["a", "b"], duration_s=400.0
    )
    table = llm_gaps.life_table(trace, 100.0)
    assert table.observed == 2
    assert llm_gaps.lengths(trace, 0.0, 100.0).tolist() == [10.0, 100.0]


def test_a_trace_is_named_in_its_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "trace.csv"
    lines = [f"{number / 10},{number % 3},30,20" for number in range(60)]
    path.write_text("arrival_s,client_id,prompt_tokens,output_tokens\n" + "\n".join(lines))
    arguments = ["llm_fair", "--items", "traces", "--trace", str(path), "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    llm_fair.main()
    measures = json.loads(capsys.readouterr().out)["measures"]
    ratios = [m for m in measures if m["target"]]
    assert {m["item"] for m in measures} == {"trace.csv"}
    assert [m["measure"] for m in ratios] == [
        "vtc: tokens/s / fcfs's",
        "fairserve: tokens/s / fcfs's",
    ]


def test_a_broken_trace_is_a_sentence(tmp_path, monkeypatch):
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n")
    monkeypatch.setattr(sys, "argv", ["llm_fair", "--items", "traces", "--trace", str(path)])
    with pytest.raises(SystemExit, match="has the columns a, b"):
        llm_fair.main()
