"""A person's session in Python against a whole site: submit, follow, wait, metrics over time."""

from __future__ import annotations

import asyncio
import doctest
import re
from itertools import pairwise
from pathlib import Path

import msgspec

from malletrain import AsyncClient, Client
from malletrain.client import operations
from tests.integration.embedded import site

PAGE = Path(__file__).parents[2] / "docs" / "python.md"

MEASURED = """
import os, sys, time, malletrain
print("begins on", os.environ["WORLD_SIZE"], flush=True)
for step in range(int(sys.argv[1])):
    malletrain.report(8)
    malletrain.metric("loss", 1.0 / (1 + step), step=step)
malletrain.metric("accuracy", 0.5)
print("done", flush=True)
while os.path.exists(sys.argv[2]):
    time.sleep(0.02)
"""
"""Reports 8 samples and a loss for each step, faster than anybody listens."""


def known_answers(made):
    """Metrics of a job are kept over time, with samples and scale."""
    steps = 700
    with Client(made.state) as client:
        (made.work / "hold").touch()
        script = made.script("measured.py", MEASURED)
        job = client.submit(
            script,
            [steps, made.work / "hold"],
            name="curve",
            nodes=1,
            workdir=made.work,
            env={"MALLETRAIN_PRELOAD": "0"},
        )
        lines = job.logs(follow=True)
        assert [next(lines), next(lines)] == ["begins on 1", "done"]
        made.until(lambda: "accuracy" in job.metrics(), "the last metric has come")
        (made.work / "hold").unlink()
        assert job.wait(timeout=600) == "completed"
        assert list(lines) == []
        metrics = job.metrics()
        loss = metrics["loss"]
        assert (loss[0].step, loss[0].value, loss[-1].step) == (0, 1.0, steps - 1)
        assert len(loss) <= 500
        for point in loss:
            assert point.value == 1.0 / (1 + point.step)
            assert point.samples == 8 * (1 + point.step)
            assert point.nodes == 1
        assert all(a.time <= b.time for a, b in pairwise(loss))
        assert [p.value for p in metrics["accuracy"]] == [0.5]
        assert job.view.metrics == {"loss": 1.0 / steps, "accuracy": 0.5}
        assert job.metrics("accuracy").frame()["samples"].tolist() == [8.0 * steps]
        # They are there after the daemon was killed, too, and for the twin.
        made.kill_daemon()
        made.start_daemon()
        assert client.job("curve").metrics()["loss"] == loss

        async def at_once():
            async with AsyncClient(made.state) as twin:
                same = await twin.job("curve")
                return await asyncio.gather(same.wait(), same.metrics("loss"), twin.nodes())

        state, again, _ = asyncio.run(at_once())
        assert (state, again["loss"]) == ("completed", loss)
        assert client.job("curve").cancel() is False


def without_torch(spec, submit=operations.submit):
    """The scripts of the page need no interpreter that has imported torch, as in Site.submit."""
    return submit(msgspec.structs.replace(spec, env={**spec.env, "MALLETRAIN_PRELOAD": "0"}))


def test_the_session_of_the_page_and_known_answers(tmp_path, monkeypatch):
    """docs/python.md, line by line, in a folder with its script."""
    page = PAGE.read_text()
    (script,) = re.findall(r'```python title="train\.py"\n(.*?)```', page, re.DOTALL)
    sessions = re.findall(r"```pycon\n(.*?)```", page, re.DOTALL)
    # One node: a job that grew would begin anew, and say what it says twice.
    with site(tmp_path, nodes=1) as made:
        made.script("train.py", script)
        monkeypatch.chdir(made.work)
        monkeypatch.setenv("MALLETRAIN_STATE_DIR", str(made.state))
        monkeypatch.setattr(operations, "submit", without_torch)
        test = doctest.DocTestParser().get_doctest("\n".join(sessions), {}, PAGE.name, None, 0)
        assert len(test.examples) > 15
        report: list[str] = []
        result = doctest.DocTestRunner().run(test, out=report.append, clear_globs=False)
        test.globs["client"].close()
        assert result.failed == 0, "".join(report)
        known_answers(made)
