"""A user maps a command over a list, looks at its tasks, and tries the failed ones again: the
command line against real processes.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.integration.embedded import Site
from tests.integration.forked_commands import run_command
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def call(site: Site, *words: object, code: int = 0, input: str = "") -> str:
    """The standard output of a command in the site's working directory."""
    environment = {"MALLETRAIN_STATE_DIR": str(site.state), "COLUMNS": "160"}
    done = run_command([str(word) for word in words], site.work, environment, input)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.check
def test_a_table_of_runs(shared):
    rows = "".join(f"{k},{k / 10}\n" for k in range(30))
    shared.script("runs.csv", "seed,lr\n" + rows)
    submitted = call(
        *(shared, "map", "--tasks", "runs.csv", "--nodes", "1:3", "--cpus", 1, "--name", "study"),
        *("--output", "out/{seed}.txt", "--log", "logs/{index}.log", "--retries", 1, "--wait"),
        *("--", "sh", "-c", "echo of $MALLETRAIN_TASK; echo {lr} > {output}; test {seed} != 7"),
        code=1,
    )
    job = re.search(r"as job (j\d+) with 30 tasks", submitted)[1]
    assert f"Job {job} (study) failed: 1 of 30 tasks failed" in submitted
    assert sorted(os.listdir(shared.work / "out")) == sorted(
        f"{k}.txt" for k in range(30) if k != 7
    )
    assert (shared.work / "out" / "3.txt").read_text() == "0.3\n"

    shown = call(shared, "tasks", "study", "--failed")
    assert "29 done, 1 failed of 30 tasks." in shown
    assert re.search(r"^ +7  seed=7 lr=0.7  failed +1 +2  ", shown, re.MULTILINE)
    view = json.loads(call(shared, "tasks", "study", "--json", "--limit", 5))
    assert (view["counts"]["done"], len(view["tasks"])) == (29, 5)
    assert call(shared, "logs", "study", "--task", 7) == "of 7\n"
    assert call(shared, "logs", job, "--task", 3) == "of 3\n"
    call(shared, "logs", job, "--task", 30, code=1)
    call(shared, "logs", job, code=1)
    call(shared, "logs", job, "-f", code=1)
    (shared.work / "logs" / "7.log").unlink()
    assert call(shared, "logs", job, "--task", 7) == "of 7\n"
    details = call(shared, "show", "study")
    assert "Tasks: 29 done, 1 failed of 30 tasks." in details
    assert "1:3 wanted, 1 core a task" in details
    call(shared, "tasks", "study", "--follow", code=1)

    [header, *table] = csv.reader(io.StringIO(call(shared, "tasks", "study", "--csv", "-")))
    assert header[:3] == ["index", "seed", "lr"]
    assert [row[1] for row in table] == [str(k) for k in range(30)]
    states = {row[header.index("state")] for row in table}
    assert states == {"done", "failed"}
    assert all(float(row[header.index("seconds")]) >= 0 for row in table)

    call(shared, "tasks", "study", "--failed", "--csv", "failed.csv")
    call(
        *(shared, "map", "--tasks", "failed.csv", "--cpus", 1, "--name", "again"),
        *("--output", "out/{seed}.txt", "--wait", "--"),
        *("sh", "-c", "echo {index} {lr} > {output}"),
    )
    assert (shared.work / "out" / "7.txt").read_text() == "7 0.7\n"


def test_an_array_script_runs_unchanged(shared):
    shared.script(
        "array.sbatch",
        "#!/bin/bash\n#SBATCH --array=3-9:3\n#SBATCH --cpus-per-task=1\n#SBATCH -o %x_%a.out\n"
        "echo $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT from $SLURM_ARRAY_TASK_MIN to "
        "$SLURM_ARRAY_TASK_MAX by $SLURM_ARRAY_TASK_STEP $1\n"
        # its own directory, the folder of the submission, and srun, as such scripts use them
        'own=scratch-$SLURM_JOB_ID\nmkdir "$own" && touch "$own/mine" || exit 1\n'
        'cd "$SLURM_SUBMIT_DIR" && srun -n 1 -c "$SLURM_CPUS_PER_TASK" ls "$own"\n'
        'rm -r "$own"\n',
    )
    call(shared, "map", "--wait", "--", "array.sbatch", "now")
    for index in (3, 6, 9):
        text = (shared.work / f"array_{index}.out").read_text()
        assert text == f"{index} of 3 from 3 to 9 by 3 now\nmine\n"


def test_failed_tasks_of_a_running_farm_are_tried_again(shared):
    command = "test -e {} || {{ test {} = go && sleep 1000; exit 1; }}"
    call(
        *(shared, "map", "--cpus", 1, "--nodes", "1:2", "--name", "two", "--", "sh", "-c", command),
        input="ready\ngo\n",
    )
    shared.until(lambda: "1 failed" in call(shared, "tasks", "two", "--limit", 0), "one task fails")
    assert call(shared, "retry", "two", code=2) == ""
    shared.script("ready", "")
    assert call(shared, "retry", "two", "--failed") == "1 task is tried again.\n"
    shared.until(lambda: "1 done" in call(shared, "tasks", "two", "--limit", 0), "it succeeds")
    call(shared, "cancel", "two")
    assert "1 cancelled" in call(shared, "tasks", "two")


def test_the_log_of_a_running_task_is_followed(shared):
    call(
        *(shared, "map", "--array", 1, "--cpus", 1, "--name", "one", "--", "sh", "-c"),
        "echo begun; while ! test -e go; do sleep 0.1; done; echo ended",
    )
    shared.until(lambda: call(shared, "logs", "one", "--task", 0) == "begun\n", "it runs")
    argv = [sys.executable, "-m", "malletrain", "logs", "one", "--task", "0", "-f"]
    environment = {**os.environ, "MALLETRAIN_STATE_DIR": str(shared.state)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as follower:
        assert follower.stdout.readline() == "begun\n"
        shared.script("go", "")
        assert follower.stdout.read() == "ended\n"
        assert follower.wait(PATIENCE_S) == 0


def test_map_waits_over_a_restart_of_the_daemon(shared):
    argv = [
        *(sys.executable, "-m", "malletrain", "map", "--cpus", "1", "--nodes", "1:3"),
        *("--name", "late", "--wait", "--", "sh", "-c", "echo {} >> ran"),
    ]
    environment = {**os.environ, "MALLETRAIN_STATE_DIR": str(shared.state)}
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, text=True, env=environment, cwd=shared.work
    ) as mapper:
        mapper.stdin.write("".join(f"{k}\n" for k in range(40)))
        mapper.stdin.close()
        shared.until(lambda: any(job.name == "late" for job in _jobs(shared)), "it is submitted")
        shared.kill_daemon(signal.SIGKILL)
        shared.start_daemon()
        assert mapper.wait(PATIENCE_S) == 0
    assert sorted(map(int, (shared.work / "ran").read_text().split())) == list(range(40))


def _jobs(site: Site) -> list:
    with site.client() as client:
        return client.jobs()
