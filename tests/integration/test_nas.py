"""Cells are searched on a whole site: the sweep that is shipped, small, on images that can be told
apart.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from nas.codes import decode
from nas.train import arguments, train

from malletrain.sweep.ledger import JOB, Ledger, open_storage
from tests.bare import ROOT
from tests.integration.embedded import site
from tests.jobscripts.nas.test_train import quarters

SMALL = ["--train", "200", "--validation", "100", "--batch-size", "20", "--epochs", "3"]


@pytest.mark.thorough
def test_evolution_finds_its_cells_and_each_is_worth_what_it_is_worth_alone(tmp_path, monkeypatch):
    with site(tmp_path, nodes=2) as made:
        for name in ("job.py", "nas"):
            source = ROOT / "jobscripts" / "nas" / name
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, made.work / name)
        quarters(made.work)
        shipped = (ROOT / "jobscripts" / "nas" / "evolution.toml").read_text("utf-8")
        for old, new in (
            ("trials = 60", "trials = 5"),
            ("at_once = 6", 'at_once = 2\nevery = "500 ms"'),
            ('"fashion_mnist"', f'"{made.work}"'),
            ('"--epochs", "9"', ", ".join(f'"{word}"' for word in SMALL)),
            ('nodes = "1:4"', 'nodes = "1"\nprofile = "off"'),
            ("max_steps = 9", "max_steps = 3"),
            ("population = 20, tournament = 5", "population = 2, tournament = 2"),
        ):
            assert old in shipped, old
            shipped = shipped.replace(old, new)
        file = made.script("evolution.toml", shipped)
        argv = [sys.executable, "-m", "malletrain", "sweep", "run", str(file)]
        with (tmp_path / "engine.log").open("wb") as log:
            done = subprocess.run(
                [*argv, "--state-dir", str(made.state)], stdout=log, stderr=log, check=False
            )
        assert done.returncode == 0, (tmp_path / "engine.log").read_text() + made.daemon_log()
        with open_storage(f"sqlite:///{made.state}/sweeps.db") as storage:
            ledger = Ledger.open(storage, "evolution")
            trials, best = ledger.trials(), ledger.best()[0]
        with made.client() as client:
            jobs = {job.id: job for job in client.jobs()}
            specs = [client.job(job).spec for job in jobs]
        assert len(trials) == len(jobs) == 5
        assert len({spec["sweep"] for spec in specs}) == 1
        assert {t.state.name for t in trials} <= {"COMPLETE", "PRUNED"}
        assert len({(t.params["edges"], t.params["ops"]) for t in trials}) == 5
        for trial in trials:
            assert decode(trial.params["edges"], trial.params["ops"]).pruned()
            assert jobs[trial.user_attrs[JOB]].state in ("completed", "cancelled")
        monkeypatch.delenv("RANK", raising=False)
        cell = ["--edges", str(best.params["edges"]), "--ops", str(best.params["ops"])]
        alone = train(arguments([*SMALL, *cell, "--data", str(made.work)]))
        assert best.value == alone
