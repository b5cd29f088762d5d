import json

from scavenger.batch.gap_memory import GapMemory


def test_gaps_keep_their_begin_while_they_last(tmp_path):
    memory = GapMemory(None, prior_mean_s=600.0)
    memory.update(["a", "b"], 100.0)
    memory.update(["b", "c"], 110.0)
    assert memory.since == {"b": 100.0, "c": 110.0}
    assert memory.watch.estimator.observed == 1
    assert 0 < memory.horizon("b", 110.0) < 10_000


def test_a_restart_goes_on_where_it_was(tmp_path):
    path = tmp_path / "gaps.json"
    first = GapMemory(path)
    first.update(["a", "b"], 1000.0)
    first.update(["a"], 1070.0)
    second = GapMemory(path)
    second.update(["a"], 1200.0)
    assert second.since == {"a": 1000.0}
    assert second.watch.estimator.observed == first.watch.estimator.observed == 1
    assert not list(tmp_path.glob(".*")), "no temporary file is left"


def test_after_a_long_time_open_gaps_are_new_ones(tmp_path):
    path = tmp_path / "gaps.json"
    GapMemory(path).update(["a"], 1000.0)
    late = GapMemory(path)
    late.update(["a"], 9000.0)
    assert late.since == {"a": 9000.0}


def test_a_damaged_or_unwritable_file_costs_knowledge_and_nothing_else(tmp_path):
    path = tmp_path / "gaps.json"
    for text in (
        "{",
        "[]",
        '{"open": 3}',
        json.dumps({"time": 1, "open": {}, "lengths": {"format": 99}}),
    ):
        path.write_text(text)
        memory = GapMemory(path)
        memory.update(["a"], 50.0)
        assert memory.since == {"a": 50.0}
    for folder in ("missing", "x" * 300):  # the second cannot even be looked for
        GapMemory(tmp_path / folder / "gaps.json").update(["a"], 100.0)


def test_the_file_is_written_once_a_minute(tmp_path):
    path = tmp_path / "gaps.json"
    memory = GapMemory(path)
    for now in (1000.0, 1030.0, 1059.0):
        memory.update(["a"], now)
    assert json.loads(path.read_text())["time"] == 1000.0
    memory.update(["a"], 1060.0)
    assert json.loads(path.read_text())["time"] == 1060.0


def test_forecasts_are_those_of_the_gaps_that_are_open():
    memory = GapMemory(None, prior_mean_s=600.0)
    memory.update(["a", "b"], 100.0)
    memory.update(["b", "c"], 110.0)
    forecasts = memory.forecasts(110.0)
    assert {node: f.cohort for node, f in forecasts.items()} == {"b": 100.0, "c": 110.0}
    assert forecasts["b"].horizon_s == memory.horizon("b", 110.0)
