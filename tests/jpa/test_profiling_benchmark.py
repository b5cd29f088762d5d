"""The benchmark of profiling methods runs, prints its rows, and is repeatable."""

import json
import random
from importlib.util import find_spec

import pytest

from benchmarks import profiling
from benchmarks.profiling_methods import METHODS

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="pip install malletrain[demo]")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_a_straight_curve(name):
    truth = profiling.Truth("linear", "test", 6, lambda k: 100.0 * k)
    method = METHODS[name](6, random.Random(0))
    result = profiling.run_profile(truth, method, random.Random(0), profiling.Setting())
    assert result.error < 0.1
    assert 1 <= result.visits <= 8
    assert result.visits == result.scale_ups + result.scale_downs
    assert 0 < result.lost_share < 1
    if name.startswith("inverse"):
        assert result.scale_ups == 1
    if name == "incremental":
        assert result.scale_downs == 0
    assert profiling.regret([truth], [method], 6) == pytest.approx(0, abs=1e-9)


def test_an_exact_belief_has_no_regret_and_a_wrong_one_has():
    laws = [
        profiling.Truth("flat", "t", 8, lambda k: 100.0),
        profiling.Truth("straight", "t", 8, lambda k: 100.0 * k),
    ]

    class Belief:
        def __init__(self, law):
            self.believes = law

    assert profiling.regret(laws, [Belief(t.law) for t in laws], 8) == 0
    assert profiling.regret(laws, [Belief(laws[1].law), Belief(laws[0].law)], 8) > 0.5


def test_the_command_prints_a_table_and_writes_the_same_figures_twice(tmp_path, capsys):
    curves = tmp_path / "curves.csv"
    curves.write_text("model,nodes,samples_per_s\nm,1,10\nm,2,19\nm,4,36\n")
    reports = []
    for run in range(2):
        target = tmp_path / f"{run}.json"
        profiling.main(
            [
                "--seeds",
                "1",
                "--methods",
                "inverse",
                "random",
                "--curves",
                str(curves),
                "--json",
                str(target),
            ]
        )
        reports.append(json.loads(target.read_text()))
    assert reports[0] == reports[1]
    assert set(reports[0]["families"]) == {"analytic, 1-6", "analytic, 1-16", "curves, 1-4"}
    assert "inverse" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["model,nodes\nm,1\n", "model,nodes,samples_per_s\nm,one,5\n"])
def test_a_table_that_cannot_be_read_is_refused_in_a_sentence(tmp_path, content):
    bad = tmp_path / "bad.csv"
    bad.write_text(content)
    with pytest.raises(SystemExit, match="cannot be read"):
        profiling.measured(bad)
