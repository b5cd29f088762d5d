"""A batch of requests on a whole site, of which a node, the daemon and the process that dispatches
are killed: each line has one answer, and it is the undisturbed one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest
from llmserve.batch_store import BatchFolder
from llmserve.cli import main
from llmserve.engines import PROFILES
from llmserve.simulated_model import detokenize, digest_of, generate, tokenize

from tests.integration.embedded import Site, site

LINES = 150
ENGINE = Path(__file__).parents[1] / "jobscripts" / "llm" / "engine_with_gate.py"


def tokens(number: int) -> int:
    return 40 + 30 * (number % 5)


def answer(number: int, created: int) -> dict:
    """The undisturbed line of request ``number``, but for its names."""
    ids, _ = generate(digest_of(tokenize(f"Prompt {number}")), tokens(number))
    prompt = len(tokenize(f"Prompt {number}"))
    choice = {"index": 0, "finish_reason": "length", "logprobs": None, "text": detokenize(ids)}
    return {
        "custom_id": f"c{number}",
        "created": created,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            "total_tokens": prompt + len(ids),
        },
    }


def read(path: Path) -> list[dict]:
    lines = []
    for line in map(json.loads, path.read_text().splitlines()):
        body = line["response"]["body"]
        shown = {name: body[name] for name in ("created", "choices", "usage")}
        lines.append({"custom_id": line["custom_id"], **shown})
    return lines


def dispatcher(s: Site, folder: BatchFolder, job: str) -> psutil.Process:
    """The process that dispatches."""
    node = folder.status()["dispatcher"]
    with s.client() as client:
        [address] = [m.address for m in client.members(job).members if m.node == node]
    port = int(address.rpartition(":")[2])
    for process in s.workers(folder.path / "member.py"):
        if any(c.laddr.port == port for c in process.net_connections() if c.status == "LISTEN"):
            return process
    raise AssertionError(f"nobody listens at {address}")


@pytest.mark.slow
def test_a_batch_outlives_a_node_the_daemon_and_its_dispatcher(tmp_path, monkeypatch, capsys):
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with requests.open("w") as file:
        for number in range(LINES):
            body = {"model": "sim", "prompt": f"Prompt {number}", "max_tokens": tokens(number)}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")
    folder, gate = BatchFolder(output), tmp_path / "gate"
    with site(tmp_path / "site", nodes=3) as s:
        monkeypatch.setenv("MALLETRAIN_STATE_DIR", str(s.state))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        words = ["batch", "--model", "sim", "--tokenizer", "simulated", "--nodes", "1:3"]
        engine = ["{python}", str(ENGINE), str(gate), *PROFILES["simulated"][3:]]
        command = [*words, "--slots", "16", str(requests), str(output), "--", *engine]
        assert main(command) == 0
        job = folder.manifest().job
        assert main(command) == 1
        assert f"Job {job} already works on" in capsys.readouterr().err

        def answered() -> int:
            return folder.status().get("answered", 0)

        def ready() -> set[str]:
            replicas = folder.status().get("replicas", ())
            return {r["name"] for r in replicas if r["state"] == "ready"}

        s.until(lambda: answered() > 20 and len(ready()) == 3, "three nodes answer")
        process = dispatcher(s, folder, job)
        other = next(name for name in ready() if name != folder.status()["dispatcher"])
        s.agents()[other].kill()
        s.kill_daemon()
        process.kill()
        s.start_daemon()
        s.until(lambda: folder.newest_epoch().number >= 2, "another process dispatches")
        gate.touch()
        s.until_state(job, "completed")
        assert main(["status", str(output)]) == 0
        assert f"{LINES} of {LINES} answered, complete" in capsys.readouterr().out
        assert main(command) == 0
        assert "out.jsonl is complete" in capsys.readouterr().out
    created = folder.manifest().created
    assert read(output) == [answer(number, created) for number in range(LINES)]
    assert not folder.errors.exists()
