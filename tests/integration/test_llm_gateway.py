"""The gateway of LLM requests on a whole site: no node without requests, a request that waits for
the first one, and a stream that outlives its node.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from llmserve.cli import main
from llmserve.gateway.keys import KeyFile
from llmserve.simulated_model import detokenize, digest_of, generate

from malletrain import Client
from tests.jobscripts.llm.gateways import running

SERVE = Path(__file__).parents[2] / "jobscripts" / "llm" / "serve.py"
PROMPT = [11, 12, 13]
TOKENS = 3000


def text_of(count: int) -> str:
    return detokenize(generate(digest_of(PROMPT), count)[0])


@pytest.mark.slow
def test_a_service_at_zero_nodes_answers_and_goes_back_to_zero(shared):
    configuration = shared.work / "gateway.toml"
    with Client(shared.state) as client:

        def members():
            return client.members(job).members

        job = client.submit(
            SERVE,
            ["--model", "simulated", "--engine", "simulated", "--slots", "8"],
            service=True,
            value="0",
            nodes="1:2",
            start_cost="auto",
            workdir=shared.work,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        ).id
        assert client.job(job).view.reason == "nodes are worth nothing to it now"
        configuration.write_text(
            'listen = "127.0.0.1:0"\nurl = "https://llm.example.org/"\n'
            "comment_interval_s = 0.05\n[users.alice]\n"
            f'[models.simulated]\njob = "{job}"\ntokenizer = "simulated"\n'
            "[scaling]\nidle_s = 3600\nrequests_per_node = 1\nmax_nodes = 2\ninterval_s = 0.2\n"
        )
        _, key = KeyFile(shared.work / "keys.json").add("alice")
        state = ("--state-dir", str(shared.state))
        assert main(["gateway", "--check", "--config", str(configuration), *state]) == 0
        with running(configuration, key, *state) as (_, openai):
            body = {"model": "simulated", "prompt": PROMPT, "max_tokens": TOKENS}
            stream = openai.completions.create(**body, stream=True)
            text = ""
            for chunk in stream:
                if not text:  # the first token: its node gets notice
                    answering = {member.node for member in members() if not member.loading}
                    for node in answering:
                        shared.agents()[node].send_signal(signal.SIGTERM)
                text += chunk.choices[0].text
            assert answering
            shared.until(
                lambda: (
                    client.job(job).detail().spec.get("links")
                    == {"LLM gateway": "https://llm.example.org/"}
                ),
                "the service is linked to the page of its gateway",
            )
            assert text == text_of(TOKENS)
        with running(configuration, key, *state, "--idle", "0.01") as (_, openai):
            shared.until(lambda: not members(), "nodes without requests are given back")
            shared.until_state(job, "suspended")
            answer = openai.completions.create(**{**body, "max_tokens": 10})
            assert answer.choices[0].text == text_of(10)
            shared.until(lambda: not members(), "they are given back again")
        client.cancel(job)
    shared.until_state(job, "cancelled")
