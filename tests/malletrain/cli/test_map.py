"""``malletrain map``: where tasks come from, what is refused, and what the daemon is sent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.malletrain.cli.fake_daemon import Refuse, detail, job_view


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def farm_of(daemon):
    """The specification and the tasks that the daemon gets."""
    specs, rows = [], []

    def submit(params):
        specs.append(params["spec"])
        return {"job": job_view(id="j1", name=params["spec"]["name"], state="queued")}

    def add_tasks(params):
        assert params["first"] == len(rows)
        rows.extend(params["rows"])
        return {"present": len(rows)}

    daemon.answers.update(
        submit=submit,
        add_tasks=add_tasks,
        job=lambda params: detail(job=job_view(id="j1", name=specs[0]["name"], state="queued")),
    )
    return specs, rows


def test_rows_of_a_table(run, daemon, here):
    specs, rows = farm_of(daemon)
    (here / "runs.csv").write_text("lr,seed\n0.1,1\n0.2,2\n")
    done = run(
        *("map", "--tasks", "runs.csv", "--nodes", "1:4", "--cpus", 2, "--memory", "1 GB"),
        *(
            "--time",
            "30 min",
            "--drain",
            "20 s",
            "--retries",
            1,
            "--output",
            "out/{seed}.txt",
            "--name",
            "study",
        ),
        *("--", "sh", "-c", "echo {lr} > {output}"),
    )
    assert done.exit_code == 0, done.stderr
    assert done.stdout == (
        "Submitted study as job j1 with 2 tasks. Follow it with: malletrain tasks j1 --follow\n"
    )
    assert rows == [["0.1", "1"], ["0.2", "2"]]
    spec, farm = specs[0], specs[0]["farm"]
    assert (spec["mode"], spec["max_nodes"]) == ("farm", 4)
    assert (farm["columns"], farm["total"]) == (["lr", "seed"], 2)
    assert farm["command"][1:] == ["-c", "echo {lr} > {output}"]
    assert os.path.isabs(farm["command"][0])
    assert (farm["cpus"], farm["memory_bytes"], farm["time_s"]) == (2, 10**9, 1800)
    assert farm["drain_s"] == 20
    assert (farm["retries"], farm["output"]) == (1, "out/{seed}.txt")
    assert farm["log"].startswith("malletrain-logs/study-")
    assert farm["log"].endswith("/{index}.log")


def test_files_lines_and_indices(run, daemon, here):
    for name in ("a10.nc", "a2.nc"):
        (here / name).touch()
    specs, rows = farm_of(daemon)
    assert run("map", "--each", "*.nc", "--", "cat", "{}").exit_code == 0
    assert (specs[-1]["farm"]["columns"], rows) == (["path"], [["a2.nc"], ["a10.nc"]])
    specs, rows = farm_of(daemon)
    assert run("map", "--each", "a10.nc", "a2.nc", "--", "cat", "{path}").exit_code == 0
    assert rows == [["a2.nc"], ["a10.nc"]]
    specs, rows = farm_of(daemon)
    assert run("map", "--", "cat", "{}", input="x\ny z\n").exit_code == 0
    assert rows == [["x"], ["y z"]]
    specs, rows = farm_of(daemon)
    assert run("map", "--tasks", "-", "--", "cat", "{a}", input='{"a": 1}\n').exit_code == 0
    assert rows == [["1"]]
    specs, rows = farm_of(daemon)
    done = run("map", "--array", "2-8:3%2", "--array-env", "--", "true")
    assert done.stderr == ""
    assert rows == [["2"], ["5"], ["8"]]
    assert (specs[-1]["farm"]["array_env"], specs[-1]["farm"]["array_range"]) == (True, [2, 8, 3])
    assert specs[-1]["farm"]["max_running"] == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--array", "1-9"), None),
        (("--array", "1-9%0"), None),  # as for sbatch: no limit
        (("--array", "1-9%4", "--max-running", "3"), 3),
        (("--array", "1-9", "--max-running", "5"), 5),
        (("run.sh",), 10),
    ],
)
def test_at_most_so_many_tasks_run_at_a_time(run, daemon, here, words, expected):
    (here / "run.sh").write_text("#!/bin/bash\n#SBATCH --array=1-100%10\necho\n")
    specs, _ = farm_of(daemon)
    command = ("--", *words) if words == ("run.sh",) else (*words, "--", "echo", "{}")
    done = run("map", *command)
    assert done.exit_code == 0, done.stderr
    assert "left out" not in done.stderr
    assert specs[0]["farm"].get("max_running") == expected


def test_slots_of_a_farm_and_gpus_of_a_task(run, daemon, here):
    """``--gpus`` is of a task here, and stands beside each option for the size of the farm."""
    specs, _ = farm_of(daemon)
    (here / "work.py").write_text("#!/usr/bin/env python\n#MALLETRAIN --nodes 1:9 --gpus 1\n")
    words = ("--array", "1-3", "--slots", "1:4", "--kind", "gpu", "--", "./work.py", "{index}")
    done = run("map", *words)
    assert done.exit_code == 0, done.stderr
    assert (specs[0]["counts"], specs[0]["max_nodes"]) == ("slots", 4)
    assert specs[0]["farm"]["gpus"] == 1
    refused = run("map", "--array", "1", "--slots", "1", "--nodes", "1", "--", "echo", "{index}")
    assert "--nodes and --slots each give the size" in refused.stderr


def test_a_negative_number_of_running_tasks_is_refused(run, daemon):
    done = run("map", "--array", "1-9", "--max-running", "-1", "--", "echo", "{}")
    assert done.exit_code == 2
    assert "max" in done.stderr
    assert daemon.seen == []


def test_names_are_those_of_this_directory(run, daemon, here):
    """Tasks run in --workdir; files and scripts are looked for here. Braces in paths are no
    columns.
    """
    place = here / "{place}"
    place.mkdir()
    (place / "a.nc").touch()
    script = place / "run.sh"
    script.write_text("#!/bin/sh\n")
    specs, rows = farm_of(daemon)
    done = run("map", "--each", place / "*.nc", "--workdir", "/", "--", "cat", "{}")
    assert (done.exit_code, rows) == (0, [[str(place / "a.nc")]])
    os.chdir(place)
    specs, rows = farm_of(daemon)
    assert run("map", "--each", "a.nc", "--workdir", "/", "--", "run.sh", "{}").exit_code == 0
    assert rows == [[str(place / "a.nc")]]
    assert specs[0]["farm"]["command"] == ["/bin/sh", str(here / "{{place}}" / "run.sh"), "{}"]
    script.chmod(0o755)
    specs, rows = farm_of(daemon)
    assert run("map", "--each", "a.nc", "--", "./run.sh", "{}").exit_code == 0
    assert specs[0]["farm"]["command"] == [str(here / "{{place}}" / "run.sh"), "{}"]
    assert (specs[0]["script"], specs[0]["name"]) == (str(script), "run")


def test_a_batch_script_runs_unchanged(run, daemon, here):
    specs, rows = farm_of(daemon)
    script = here / "array.sbatch"
    script.write_text(
        "#!/bin/bash -l\n#SBATCH --array=1-3 -c 2 --time=10 -p gpu\n"
        "#SBATCH -o log/%A_%a.out\necho\n"
    )
    done = run("map", "--nodes", "1:2", "--cpus", 4, "--", "array.sbatch", "x")
    assert done.exit_code == 0, done.stderr
    assert "left out: --partition=gpu." in done.stderr
    farm = specs[0]["farm"]
    assert farm["command"][-3:] == ["-l", str(script), "x"]
    assert os.path.basename(farm["command"][0]) == "bash"
    assert (farm["cpus"], farm["time_s"], farm["array_env"]) == (4, 600, True)
    assert re.fullmatch(r"log/array-[0-9-]{15}-\w{4}_\{index\}\.out", farm["log"])
    assert (specs[0]["name"], rows) == ("array", [["1"], ["2"], ["3"]])


def test_options_of_map_at_the_head_of_a_script(run, daemon, here):
    specs, rows = farm_of(daemon)
    (here / "run.sh").write_text(
        "#!/bin/bash\n#MALLETRAIN --nodes 2:7 --retries 3 --env A=1\n#MALLETRAIN --array 5,6\n"
        "#SBATCH --array=1-3 -c 2 --time=10\n#MALLETRAIN --cpus 3\necho\n"
    )
    done = run("map", "--retries", 1, "--env", "B=2", "--", "run.sh")
    assert done.exit_code == 0, done.stderr
    farm = specs[0]["farm"]
    assert (specs[0]["min_nodes"], specs[0]["max_nodes"]) == (2, 7)
    assert (farm["cpus"], farm["time_s"], farm["retries"]) == (3, 600, 1)
    assert {"A": "1", "B": "2"}.items() <= dict(specs[0]["env"]).items()
    assert rows == [["5"], ["6"]]


def test_the_command_line_says_where_the_tasks_are(run, daemon, here):
    _, rows = farm_of(daemon)
    (here / "run.sh").write_text("#!/bin/bash\n#MALLETRAIN --array 5,6\necho\n")
    (here / "a.txt").write_text("")
    done = run("map", "--each", "a.txt", "--", "run.sh")
    assert done.exit_code == 0, done.stderr
    assert rows == [["a.txt"]]


def test_a_line_that_is_no_option_of_map_is_refused(run, daemon, here):
    (here / "run.sh").write_text("#!/bin/bash\n#MALLETRAIN --live\necho\n")
    done = run("map", "--array", "1-2", "--", "run.sh")
    assert done.exit_code != 0
    assert re.search("run.sh line 2: No such option:? '?--live", done.stderr)


def test_a_dry_run_asks_no_daemon(run, daemon, here):
    done = run(
        *("map", "--array", "1-5", "--output", "r/{index}", "--dry-run", "--"),
        *("sh", "-c", "echo '{index}' {{x}} >{output}"),
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("""sh -c 'echo '"'"'1'"'"' {x} >r/1'""")
    assert lines[3] == "5 tasks, 2 more than these."
    assert daemon.seen == []
    done = run("map", "--array", "7", "--dry-run", "--json", "--", "/bin/true", "{index}")
    assert json.loads(done.stdout) == {"tasks": 1, "commands": ["/bin/true 7"]}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--array", "1-3", "echo"], "The command of a task stands after --"),
        (["--array", "1-3", "--"], "There is no command after --"),
        (["--array", "1-3", "--", "echo", "{lr}"], "{lr} in '{lr}' is no column of the tasks"),
        (["--array", "1-3", "--each", "*", "--", "echo"], "use one of them"),
        (["x", "--array", "1-3", "--", "echo"], "x stands before --"),
        (["--tasks", "none.csv", "--", "echo"], "none.csv cannot be read: No such file"),
        (["--tasks", "empty.csv", "--", "echo"], "empty.csv is empty"),
        (["--array", "1-3", "--", "./none"], "There is no program"),
        (["--array", "1-3", "--", "./empty.csv"], "is not executable"),
        (["--array", "1-3", "--log", "x.log", "--", "echo"], "all tasks would write to x.log"),
        (["--array", "1-3", "--", "echo", "{output}"], "give its name with --output"),
        (["--array", "1-3", "--time", "5", "--", "echo"], "--time: \"5\" has no unit"),
        (["--array", "1-3", "--drain", "5", "--", "echo"], "--drain: \"5\" has no unit"),
        (["--array", "1-3", "--memory", "5", "--", "echo"], "--memory: \"5\" has no unit"),
        (["--array", "1-3", "--cpus", "-1", "--", "echo"], "--cpus is -1"),
        (["--array", "1-3", "--nodes", "0", "--", "echo"], "asks for 0 nodes"),
    ],
)  # fmt: skip
def test_what_is_refused(run, daemon, here, words, sentence):
    (here / "empty.csv").touch()
    done = run("map", *words)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert daemon.seen == []


def test_warnings(run, daemon, here):
    farm_of(daemon)
    done = run("map", "--array", "1-3", "--", "no-such-program", "{index}")
    assert "no-such-program is not found on this host" in done.stderr
    farm_of(daemon)
    done = run("map", "--array", "1-3", "--module", "tool", "--", "no-such-program", "x")
    assert "not found" not in done.stderr
    assert "all tasks run the same one" in done.stderr


def test_a_farm_whose_tasks_are_refused_is_cancelled(run, daemon, here):
    farm_of(daemon)
    cancelled = []

    def refuse(params):
        raise Refuse("The farm takes no more tasks.")

    def cancel(params):
        cancelled.append(params["jobs"])
        return {"results": [{"job": "j1", "ok": True, "sentence": "Cancelled."}]}

    daemon.answers.update(add_tasks=refuse, cancel=cancel)
    done = run("map", "--array", "1-3", "--", "echo", "{index}")
    assert done.exit_code == 1
    assert "The farm takes no more tasks." in done.stderr
    assert cancelled == [["j1"]]


def test_a_daemon_that_goes_away_after_the_last_task_has_the_farm(run, daemon, here):
    farm_of(daemon)

    def away(params):
        raise Refuse("The daemon stops.", "unreachable")

    daemon.answers.update(job=away)
    done = run("map", "--array", "1-3", "--name", "late", "--", "echo", "{index}")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "Submitted late as job j1 with 3 tasks." in done.stdout


def test_ctrl_c_while_tasks_are_added_cancels_the_farm(run, daemon, here, monkeypatch):
    farm_of(daemon)
    cancelled = []

    def cancel(params):
        cancelled.append(params["jobs"])
        return {"results": [{"job": "j1", "ok": True, "sentence": "Cancelled."}]}

    def interrupted(*args):
        raise KeyboardInterrupt

    daemon.answers.update(cancel=cancel)
    monkeypatch.setattr("malletrain.client.connection.upload", interrupted)
    done = run("map", "--array", "1-3", "--", "echo", "{index}")
    assert done.exit_code == 130
    assert "not all of its tasks were added" in done.stderr
    assert cancelled == [["j1"]]


def test_a_standard_input_that_is_closed_has_no_tasks(here):
    """As cron jobs and `ssh -n` in some shells have it."""
    argv = [sys.executable, "-m", "malletrain", "map", "--cpus", "1", "--", "true", "{}"]
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *argv], capture_output=True, text=True)
    assert done.returncode == 2
    assert "There are no tasks: give --tasks FILE" in done.stderr
