"""What the demo plans: work that fits the trace, a configuration that is valid, jobs that can be
submitted.
"""

import pytest

from malletrain.config.model import parse_config
from malletrain.demo import plan
from malletrain.demo.main import CALM, HELD_S, LATE, DemoOptions, cut_trace, example_script
from malletrain.submission.spec import parse_nodes
from scavenger.trace.trace import Trace, TraceError

pytestmark = pytest.mark.slow


def options(tmp_path, **changes):
    base = {
        "nodes": 6,
        "trace": None,
        "duration_s": 105.0,
        "seed": 0,
        "chaos": False,
        "plain": True,
        "as_json": True,
        "output": tmp_path,
    }
    return DemoOptions(**{**base, **changes})


def test_the_configuration_is_valid(tmp_path):
    directory = tmp_path / 'a "quoted" \\ folder'
    config = parse_config(plan.config_text(directory / "state", directory / "cluster", 4711, 6))
    assert config.state_dir == directory / "state"
    assert config.cluster_dir == directory / "cluster"
    assert config.daemon.listen.endswith(":4711")
    assert config.scheduler.local.grace == plan.GRACE_S


def test_work_is_divided():
    assert sum(job.share for job in plan.JOBS) == pytest.approx(1.0)
    work = 200.0
    samples = sum(job.epochs(work) for job in plan.JOBS) * plan.TRAINING_SAMPLES
    assert samples / plan.SAMPLES_PER_S == pytest.approx(work, rel=0.1)


def test_little_work_still_trains():
    assert all(job.epochs(0.0) >= 4 for job in plan.JOBS)


@pytest.mark.parametrize("machine", [2, 3, 6, 64])
def test_jobs_fit_the_machine(machine):
    for job in plan.JOBS:
        low, high = parse_nodes(job.nodes(machine))
        assert 1 <= low <= high <= machine


def test_a_slow_machine_gets_less_work():
    shares = [plan.share(s) for s in (0.0, 2.5, 5.0, 8.0, 100.0)]
    assert shares == sorted(shares, reverse=True)
    assert 0.2 < shares[-1] < shares[1] <= 0.75


def test_offered_node_seconds():
    assert plan.offered_node_seconds([(0.0, 2), (10.0, 5), (20.0, 0)], 15.0) == 20 + 25
    assert plan.offered_node_seconds([], 15.0) == 0


def test_after_the_calm_a_trace_is_what_it_was():
    trace = Trace.validated(
        [0.0, 0.0, 3.0, 5.0], [0, 2, 0, 1], [True, True, False, True], ["a", "b", "c"], 9.0
    )
    later = plan.with_calm_start(trace, 20.0)
    assert (later.names, later.duration_s) == (trace.names, 29.0)
    assert later.idle_at(0.0).all()
    assert later.idle_at(19.9).all()
    for t in (0.0, 2.9, 3.0, 5.0, 9.0):
        assert later.idle_at(20.0 + t).tolist() == trace.idle_at(t).tolist()
    assert plan.with_calm_start(trace, 0.0) is trace


@pytest.mark.parametrize("seed", range(4))
def test_the_trace_begins_calmly_and_takes_enough_nodes(tmp_path, seed, any_seed):
    cut = cut_trace(options(tmp_path, seed=any_seed(seed)))
    assert cut.names == tuple(f"n{k}" for k in range(1, 7))
    assert cut.duration_s == pytest.approx((1 - CALM) * 105.0 + HELD_S)
    assert cut.idle_at(0.0).all()
    assert cut.idle_at(0.99 * HELD_S).all()
    taken = (~cut.idle & (cut.time < LATE * cut.duration_s)).sum()
    assert taken >= 5


def test_the_same_seed_is_the_same_trace(tmp_path):
    first, again, other = (cut_trace(options(tmp_path, seed=s)) for s in (1, 1, 2))
    assert first.time.tolist() == again.time.tolist()
    assert first.time.tolist() != other.time.tolist()


def test_a_real_trace_is_cut_and_renamed(tmp_path):
    path = tmp_path / "t.csv"
    rows = "".join(
        f"{300 * k + 30 * n},node{n},{'idle' if k % 2 == 0 else 'busy'}\n"
        for k in range(20)
        for n in range(4)
    )
    path.write_text("time_s,node,event\n" + rows)
    cut = cut_trace(options(tmp_path, nodes=3, trace=path))
    assert cut.names == ("n1", "n2", "n3")
    assert cut.duration_s <= 105.0 + 1e-9


def test_a_bad_trace_is_refused_with_its_lines(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("time_s,node,event\n5,a,idle\n3,a,busy\n")
    with pytest.raises(TraceError, match="line 3"):
        cut_trace(options(tmp_path, trace=path))


def test_the_example_ships():
    assert "malletrain" in example_script().read_text()


@pytest.mark.parametrize(
    ("nodes", "duration"),
    [
        (2, 30.0),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((3, 200.0), (24, 60.0))),
    ],
)
def test_any_size_has_a_trace(tmp_path, nodes, duration):
    cut = cut_trace(options(tmp_path, nodes=nodes, duration_s=duration))
    assert len(cut.names) == nodes
    assert cut.duration_s == pytest.approx((1 - CALM) * duration + HELD_S)
    assert cut.idle_count()[1].max() > 0
