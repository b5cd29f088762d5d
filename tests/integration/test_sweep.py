"""A sweep on a whole site: everything that can die does, and the sweep ends as it should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from malletrain.cli import main
from malletrain.sweep.ledger import Ledger, open_storage
from tests.command_runner import CliRunner
from tests.integration.embedded import gone, site

TRAIN = """
import json, os, sys, time, malletrain
from malletrain.training.owner import own_path, this_run
x, trial = float(sys.argv[sys.argv.index("--x") + 1]), sys.argv[1]
step, state = 0, f"state-{trial}"
if os.path.exists(state):
    step = int(open(state).read())
with open(f"begun-{trial}", "a") as file:
    file.write(f"{step}\\n")
while step < 9:
    while not os.path.exists(f"go-{step}"):
        time.sleep(0.02)
    step += 1
    malletrain.report(8)
    malletrain.metric("loss", x + 1 / (1 + step), step=step)
    with open(state + ".new", "w") as file:
        file.write(str(step))
    os.replace(state + ".new", state)
snapshot = own_path(this_run())
os.makedirs(os.path.dirname(snapshot), exist_ok=True)
open(snapshot, "w").close()
"""
"""Takes each step when it is told to, and goes on from where it was."""

SWEEP = """
[sweep]
metric = "loss"
trials = 2
at_once = 2
every = "200 ms"
[job]
script = "train.py"
args = ["{trial}"]
nodes = "1"
env = { MALLETRAIN_PRELOAD = "0" }
profile = "off"
[space]
x = { low = 0.0, high = 1.0 }
[sampler]
kind = "random"
seed = 3
[pruner]
kind = "asha"
"""


@pytest.mark.parametrize(
    "agents", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["", "agents too"]
)
def test_a_sweep_whose_engine_and_daemon_are_killed(tmp_path, agents):
    with (
        site(tmp_path, nodes=2) as made,
        open_storage(f"sqlite:///{made.state}/sweeps.db") as book,
    ):
        made.script("train.py", TRAIN)
        file = made.script("s.toml", SWEEP)

        def engine(*words: str) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-m", "malletrain", "sweep", *words]
            with (tmp_path / "engine.log").open("ab") as log:
                return subprocess.Popen(
                    [*argv, "--state-dir", str(made.state)], stdout=log, stderr=log
                )

        def trials():
            return Ledger.open(book, "s").trials()

        def heard(step: int) -> bool:
            return any((t.last_step or 0) >= step for t in trials())

        def go(*steps: int) -> None:
            for step in steps:
                (made.work / f"go-{step}").touch()

        attending = engine("run", str(file))
        made.until(lambda: len(made.workers(made.work / "train.py")) == 2, "two trials train")
        go(0, 1)
        made.until(lambda: heard(2), "the engine hears of two steps")
        attending.kill()
        attending.wait()
        go(2)
        made.kill_daemon()
        made.start_daemon()
        attending = engine("resume", "s")
        made.until(lambda: heard(3), "another engine hears of a third")
        if agents:
            victim = next(iter(made.agents().values()))
            theirs = [w for w in made.workers(made.work / "train.py") if victim in w.parents()]
            victim.send_signal(signal.SIGKILL)
            # What a worker does without its agent nobody hears of, and this one would not do it
            # again.
            made.until(lambda: all(gone(w) for w in theirs), "its workers have ended")
            go(3, 4)
            made.until(lambda: heard(5), "a trial goes on though its agent was killed")
            made.kill_daemon()
            made.start_daemon()
        go(*range(3, 9))
        assert attending.wait() == 0, (tmp_path / "engine.log").read_text()

        outcomes = trials()
        assert len(outcomes) == 2
        assert {t.state.name for t in outcomes} <= {"COMPLETE", "PRUNED"}
        for trial in outcomes:
            x = trial.params["x"]
            assert all(v == x + 1 / (1 + s) for s, v in trial.intermediate_values.items())
            begun = [int(n) for n in (made.work / f"begun-{trial.number}").read_text().split()]
            assert begun.count(0) == 1, f"trial {trial.number} began anew: {begun}"
        with made.client() as client:
            jobs = client.jobs()
        assert sorted(j.name for j in jobs) == [f"s-{n}" for n in range(2)]
        assert {j.state for j in jobs} <= {"completed", "cancelled"}
        best = min((t for t in outcomes if t.state.name == "COMPLETE"), key=lambda t: t.value)
        result = CliRunner().invoke(
            main, ["sweep", "best", "s", "--json", "--state-dir", made.state]
        )
        answer = json.loads(result.output)
        assert answer["trials"][0]["trial"] == best.number
        snapshot_jobs = {
            name.split("-")[0] for name in os.listdir(made.work / "malletrain-snapshots")
        }
        assert snapshot_jobs == {best.user_attrs["malletrain:job"]}
        assert answer["snapshot"].split("/")[-2].split("-")[0] in snapshot_jobs
