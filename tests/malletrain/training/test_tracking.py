"""The ids of a job's W&B runs, with a W&B that opens none. The real one is in
``tests/malletrain/integrations/test_tracking.py``.
"""

import importlib
import os
import sys

import pytest

from malletrain.training import tracking

WANDB = """
import os
run = None

def init(project=None, id=None, reinit=None):
    global run
    if run is None or reinit:
        run = id or os.environ.get("WANDB_RUN_ID")
    return run

def finish():
    global run
    run = None
"""


@pytest.fixture
def job(monkeypatch, tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "MALLETRAIN_LIVE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    # set_wandb_run() sets it: restored after the test
    monkeypatch.setenv("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "1")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("MALLETRAIN_JOB", "j1")
    monkeypatch.setenv("MALLETRAIN_JOB_KEY", "ab" * 16)
    yield monkeypatch
    sys.modules.pop("wandb", None)
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        os.environ.pop(name, None)


@pytest.mark.parametrize("imported", ["before", "after"])
def test_several_runs_of_a_script_stay_several(job, imported):
    if imported == "before":
        importlib.import_module("wandb")
    tracking.set_wandb_run()
    wandb = importlib.import_module("wandb")
    own = tracking.run_id()
    assert wandb.init(project="folds") == own
    assert wandb.init() == own, "the open run"
    wandb.finish()
    assert wandb.init(id="mine") == "mine"
    wandb.finish()
    assert wandb.init(project="folds") == f"{own}-2"
    assert wandb.init(project="folds", reinit="create_new") == f"{own}-3"


def test_in_live_mode_every_process_opens_the_same_run(job):
    job.setenv("MALLETRAIN_LIVE", "/socket")
    tracking.set_wandb_run()
    wandb = importlib.import_module("wandb")
    for _ in range(2):
        assert wandb.init() == tracking.run_id()
        wandb.finish()
