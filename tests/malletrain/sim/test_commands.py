"""``malletrain simulate`` and ``malletrain assess`` from the command line."""

from __future__ import annotations

import json

import pytest

from malletrain.cli import main
from scavenger.trace import files, synthesis
from tests.command_runner import CliRunner
from tests.malletrain.sim.conftest import shared, trace_of

pytestmark = pytest.mark.slow

KEYS = {
    "samples",
    "ideal_samples",
    "fraction_of_ideal",
    "equivalent_nodes",
    "harvested_fraction",
    "rescale_loss",
    "preemption_loss",
    "start_loss",
    "rescales",
    "preemptions",
    "jobs_completed",
    "mean_job_hours",
    "p95_decision_ms",
    "wall_s",
}

SWF = "; MaxNodes: 8\n" + "\n".join(
    f"{k} {600 * k} 0 {900 + 100 * (k % 5)} {1 + k % 4} -1 -1 {1 + k % 4} -1 -1 1 1 1 -1 -1 -1 "
    "-1 -1"
    for k in range(60)
)


@pytest.fixture
def week(tmp_path):
    path = tmp_path / "week.csv.gz"
    files.write(synthesis.synthesise(synthesis.SUMMIT, 40, 6 * 3600.0, seed=1, mean_idle=8.0), path)
    return path


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.mark.parametrize("workload", ["hpo", "nas"])
def test_json_has_what_is_promised(week, workload):
    done = run(
        "simulate", "--trace", week, "--workload", workload, "--jobs", 30, "--max-jobs", 4, "--json"
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert set(data) >= KEYS
    assert 0 < data["fraction_of_ideal"] <= 1


@pytest.mark.parametrize(
    ("policy", "t_fwd", "costs", "warned"),
    [
        ("malletrain", 10, "real", True),
        ("profiled", 18, "real", True),
        ("malletrain", 19, "real", False),
        ("malletrain", 10, "freetrain", False),
        ("freetrain", 10, "real", False),
        ("equal", 10, "real", False),
    ],
)
def test_a_forward_looking_time_below_the_start_cost_is_warned_of(
    week, policy, t_fwd, costs, warned
):
    done = run(
        "simulate",
        "--trace",
        week,
        "--jobs",
        3,
        "--hours",
        0.2,
        "--policy",
        policy,
        "--t-fwd",
        t_fwd,
        "--costs",
        costs,
        "--json",
    )
    assert done.exit_code == 0, done.output
    assert ("no start pays for itself" in done.stderr) is warned
    assert json.loads(done.stdout)["policy"] == policy


def test_the_same_seed_gives_the_same_and_another_another(week):
    def samples(seed):
        return json.loads(
            run(
                "simulate", "--trace", week, "--nodes", 20, "--jobs", 30, "--seed", seed, "--json"
            ).stdout
        )["samples"]

    assert samples(1) == samples(1) != samples(2)


def test_a_table_for_people(week):
    done = run(
        "simulate",
        "--trace",
        week,
        "--jobs",
        5,
        "--policy",
        "equal",
        "--costs",
        "freetrain",
        "--hours",
        2,
    )
    assert done.exit_code == 0, done.output
    assert "the upper bound" in done.stdout
    assert "2.0 h" in done.stdout


def test_a_real_log_gives_the_jobs(week, tmp_path):
    log = tmp_path / "log.swf"
    log.write_text(SWF)
    data = json.loads(
        run("simulate", "--trace", week, "--jobs", log, "--hours", 4, "--json").stdout
    )
    assert data["jobs"] == sum(600 * k < 4 * 3600 for k in range(60))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--trace", "none.csv"], "There is no such file"),
        (["--nodes", "41"], "Cannot draw 41 nodes"),
        (["--curves", "none.csv"], "There is no such file"),
        (
            ["--workload", "none.csv"],
            "--workload none.csv is no workload and no file; give hpo, nas, or the path",
        ),
        (["--node-list", "none.txt"], "The node list cannot be read: No such file or directory."),
        (["--node-list", "latin"], "The node list is not text in UTF-8."),
        (["--jobs", "none.swf"], "There is no such file"),
        (["--jobs", "0"], "0 jobs cannot be simulated"),
        (["--starvation", "0"], "cannot starve"),
        (["--curves", "single"], "single point"),
        (["--curves", "nan"], "finite number"),
    ],
)
def test_refusals_are_one_sentence(week, tmp_path, args, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes(b"n\xe9\n")
    (tmp_path / "single").write_text("model,nodes,samples_per_s\nx,1,5\n")
    (tmp_path / "nan").write_text("model,nodes,samples_per_s\nx,1,5\nx,2,nan\n")
    done = run("simulate", *([] if args[0] == "--trace" else ["--trace", week]), *args)
    assert done.exit_code == 1
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_times_that_go_back_and_traces_without_events_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("time_s,node,event\n10,a,idle\n5,b,idle\n")
    assert "Time goes back" in run("simulate", "--trace", path).stderr
    path.write_text("time_s,node,event\n")
    assert "no event" in run("simulate", "--trace", path).stderr
    path.write_text("time_s,node,event\n0,a,idle\n")
    for command in ("simulate", "assess"):
        assert "The trace lasts no time" in run(command, "--trace", path).stderr
    files.write(trace_of({"a": [(0, 5)], "b": []}, 10.0), path)
    assert run("simulate", "--trace", path, "--jobs", 2).exit_code == 0


class TestAssess:
    def test_a_log_becomes_a_report(self, tmp_path):
        log, report = tmp_path / "log.swf", tmp_path / "report.html"
        log.write_text(SWF)
        done = run("assess", "--swf", log, "--jobs", 20, "--output", report)
        assert done.exit_code == 0, done.output
        assert report.read_text().startswith("<!doctype html>")
        assert "Assumed: The log does not say which nodes jobs used" in done.stdout

    def test_json_and_slurms_accounting(self, tmp_path):
        log, report = tmp_path / "log.txt", tmp_path / "report.html"
        rows = ["JobID|Submit|Start|End|State|NNodes|NodeList"]
        for k in range(20):
            hour = f"2024-01-01T{k:02d}"
            rows.append(
                f"{k}|{hour}:00:00|{hour}:10:00|{hour}:50:00|COMPLETED|2|n[{1 + k % 3}-{2 + k % 3}]"
            )
        log.write_text("\n".join(rows) + "\n")
        done = run(
            "assess", "--sacct", log, "--nodes", 6, "--jobs", 20, "--output", report, "--json"
        )
        assert done.exit_code == 0, done.output
        data = json.loads(done.stdout)
        assert data["gaps"]["nodes"] == 6
        assert any("2 nodes that no job of the log used" in line for line in data["assumptions"])

    def test_a_machine_that_was_never_idle_yields_nothing(self, tmp_path):
        log, report = tmp_path / "log.txt", tmp_path / "report.html"
        rows = ["JobID,Submit,Start,End,State,NNodes,NodeList"]
        for k in range(48):
            start, end = (f"2024-01-{1 + h // 24:02d}T{h % 24:02d}:00:00" for h in (k, k + 1))
            rows.append(f"{k},{start},{start},{end},COMPLETED,3,n[1-2],m7")
        log.write_text("\n".join(rows) + "\n")
        days = ["--from", "2024-01-01", "--to", "2024-01-03"]
        for more, lasts in (([], 46), (days, 48)):
            done = run("assess", "--sacct", log, "--output", report, *more)
            assert done.exit_code == 0, done.output
            assert "None of 3 nodes was idle at any time" in done.stdout
            assert "nothing to harvest" in report.read_text()
            done = run("assess", "--sacct", log, "--output", report, "--json", *more)
            gaps = json.loads(done.stdout)["gaps"]
            assert (gaps["idle_node_hours"], round(gaps["hours"])) == (0.0, lasts)

    def test_jobs_last_unless_their_number_is_given_and_else_it_is_said(self, tmp_path):
        log, report = tmp_path / "log.swf", tmp_path / "report.html"
        log.write_text(SWF)
        done = run("assess", "--swf", log, "--output", report)
        assert done.exit_code == 0, done.output
        assert "ran out" not in done.stdout
        done = run("assess", "--swf", log, "--output", report, "--samples", 100, "--jobs", 1)
        assert "The 1 job ran out after" in done.stdout.splitlines()[2]

    @pytest.mark.parametrize(
        ("args", "code", "says"),
        [
            (["--swf", "log", "--from", "soon"], 1, "'soon' is no time"),
            (["--trace", "log", "--to", "3 d"], 2, "a trace names its nodes and is whole"),
            ([], 2, "Give one of --sacct, --pbs-logs, --swf, --trace"),
            (["--swf", "a", "--trace", "b"], 2, "Give one of"),
            (["--swf", "none"], 1, "There is no such file"),
            (["--pbs-logs", "."], 1, "named by day"),
            (["--swf", "log", "--output", "no/where.html"], 1, "The report cannot be written"),
        ],
    )
    def test_refusals(self, tmp_path, monkeypatch, args, code, says):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "log").write_text(SWF)
        done = run("assess", "--jobs", 3, *args)
        assert done.exit_code == code
        assert says in done.stderr

    def test_a_public_log(self, tmp_path):
        report = tmp_path / "kth.html"
        path = shared("hpc_jobs/KTH-SP2-1996.swf.gz")
        done = run(
            "assess",
            "--swf",
            path,
            "--max-jobs",
            3,
            "--hours",
            24,
            "--jobs",
            50,
            "--output",
            report,
            "--json",
        )
        assert done.exit_code == 0, done.output
        data = json.loads(done.stdout)
        assert data["gaps"]["nodes"] == 100
        assert 25 < data["gaps"]["idle_mean"] < 35
        assert data["cases"][0]["harvested_fraction"] > 0.5
