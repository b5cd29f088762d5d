"""WindSR as jobs of MalleTrain on the embedded cluster: trained in restart mode while a node is
taken, then sampled in live mode.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from windsr import checkpoint, output

from tests.integration.embedded import site
from tests.integration.test_main_job import STEADY

JOB = Path(__file__).parents[3] / "jobscripts" / "windsr" / "job.py"
CRAWLING = f"""
import sys
import time
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, {str(JOB.parent)!r})
from windsr import train  # with torch
from windsr.cli import main

steps = 0


def crawl(_):
    global steps
    steps += 1
    for _ in range(300 if steps > 5 else 0):
        if Path("go").exists():
            return
        time.sleep(0.02)


train.time = SimpleNamespace(sleep=crawl, monotonic=time.monotonic)
main()
"""
"""The job's script, whose delay is long from the sixth step of a process on, until the file ``go``
is there, so that what is done to the job finds it training. It does not stand still: a rescale
waits for the end of a step.
"""


def test_it_trains_on_changing_nodes_and_samples_on_several(tmp_path):
    with site(tmp_path, nodes=2) as embedded:
        words = (
            "train",
            "run",
            "--preset",
            "tiny",
            "--method",
            "srcnn",
            "--steps",
            "40",
            "--synthetic-size",
            "32",
            "--synthetic-days",
            "2",
        )
        training = embedded.submit(
            embedded.script("crawling.py", CRAWLING),
            *words,
            "--step-delay",
            "1",
            nodes=(1, 2),
            name="windsr",
            profile=False,
        )
        embedded.until(lambda: len(embedded.job(training).nodes) == 2, "it trains on 2 nodes")
        embedded.until_samples(training, 8 * 3)
        steady = embedded.script("steady.py", STEADY)
        other = embedded.submit(
            steady, nodes=(1, 1), weight=50.0, env={"SECONDS": "1"}, profile=False
        )
        embedded.until_state(other, "completed", "failed")
        (embedded.work / "go").touch()
        done = embedded.until_state(training, "completed", "failed")
        assert done.state == "completed", embedded.show(training).failure
        assert done.samples == pytest.approx(
            320, abs=2 * 8
        )  # a worker that is stopped may not have sent its last report
        assert done.metrics["loss"] > 0
        assert len(embedded.events("round-formed", training)) >= 2
        model = embedded.work / "run" / "model.safetensors"
        facts = checkpoint.load(model)[1]
        assert (facts["steps"], facts["samples"]) == (40, 320)
        words = (
            "sample",
            "drawn",
            "--model",
            "run/model.safetensors",
            "--members",
            "1",
            "--synthetic-size",
            "32",
            "--synthetic-days",
            "2",
        )
        sampling = embedded.submit(
            JOB, *words, nodes=(1, 2), name="sampling", profile=False, mode="live"
        )
        done = embedded.until_state(sampling, "completed", "failed")
        assert done.state == "completed", embedded.show(sampling).failure
        drawn = output.read(embedded.work / "drawn" / "samples.nc")
    assert drawn.members.shape == (8, 1, 32, 32)
    assert np.isfinite(drawn.members).all()
