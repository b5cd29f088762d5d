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
            JOB, *words, "--step-delay", "0.2", nodes=(1, 2), name="windsr", profile=False
        )
        embedded.until(lambda: len(embedded.job(training).nodes) == 2, "it trains on 2 nodes")
        embedded.until_samples(training, 8 * 3)
        steady = embedded.script("steady.py", STEADY)
        other = embedded.submit(
            steady, nodes=(1, 1), weight=50.0, env={"SECONDS": "1"}, profile=False
        )
        embedded.until_state(other, "completed", "failed")
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
