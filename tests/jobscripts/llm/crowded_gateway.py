"""A gateway with content, for tests of its page: three users, two models, a batch, an engine that
has failed and requests that wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import uvicorn
from fastapi import FastAPI
from llmserve.replica_status import ReplicaStatus
from llmserve.simulated_server import listen
from llmserve.states import ReplicaState

from tests.jobscripts.llm.gateways import SLOW, GatewaySite, site
from tests.jobscripts.llm.test_gateway_batches import begin, ended, jsonl, line
from tests.waiting import until

MARKUP = '<img src=x onerror="window.pwned=1">'
ERROR_LINES = 30
ERROR = "\n".join(
    (
        f"The engine ended (exit status 1). Its last lines: CUDA out of memory {MARKUP}",
        *(f"  File {number}" for number in range(2, ERROR_LINES + 1)),
    )
)
""":data:`ERROR_LINES` lines."""
CONFIGURATION = """
listen = "127.0.0.1:0"
metrics_for = ["operator"]
[models.simulated]
engines = {engines}
engine_slots = 8
engine_kv_tokens = 100000
max_request_tokens = 100000
tokenizer = "simulated"
[models.slow]
engines = ["unix:SLOW"]
engine_slots = 2
engine_kv_tokens = 100000
engine_model = "simulated"
tokenizer = "simulated"
[users.alice]
[users.bob]
[users.operator]
[limits]
open_requests = 3
"""
COMPLETION = {"model": "simulated", "prompt": "Hello"}


def _front_of_a_failed_engine() -> FastAPI:
    app = FastAPI()
    status = ReplicaStatus(state=str(ReplicaState.FAILED), slots=8, load_s=41.5, sentence=ERROR)

    @app.get("/replica")
    async def replica() -> dict[str, object]:
        return {name: getattr(status, name) for name in status.__struct_fields__}

    return app


@contextlib.contextmanager
def crowded_gateway(folder: Path) -> Iterator[GatewaySite]:
    """A gateway at which

    * alice has had three answers of ten tokens, and a batch of which two lines were answered with
      eight tokens each and one failed;
    * bob has had one answer of twenty tokens; two of his requests run and one waits, and one was
      refused;
    * the replica n7 of the model ``simulated`` has failed.
    """
    configuration = CONFIGURATION.replace("SLOW", str(folder / "slow"))
    with site(folder, configuration=configuration) as made:
        made.start_engine(f"unix:{folder / 'slow'}", SLOW)
        config = uvicorn.Config(
            _front_of_a_failed_engine(), log_level="warning", timeout_graceful_shutdown=0
        )
        made.serve(uvicorn.Server(config), [listen(folder / "front")])
        models = made.gateway.admission.models
        dispatcher = models["simulated"].dispatcher
        made.loop.call(lambda: dispatcher.add_replica("n7", f"unix:{folder / 'front'}"))
        for model in models.values():
            until(lambda model=model: made.loop.call(lambda: model.has_ready_replica), "ready")
        alice, bob = made.client("alice"), made.client("bob")
        for _ in range(3):
            alice.completions.create(**COMPLETION, max_tokens=10)
        lines = jsonl(line(1), line(2), line(3, max_tokens=1_000_000))
        ended(alice, begin(alice, lines).id)
        bob.completions.create(**COMPLETION, max_tokens=20)

        def wait_for_an_answer() -> None:
            with contextlib.suppress(openai.APIError):
                bob.completions.create(**{**COMPLETION, "model": "slow"})

        threads = [threading.Thread(target=wait_for_an_answer) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: made.loop.call(lambda: _counts(models["slow"])) == (1, 2), "one waits")
        with contextlib.suppress(openai.RateLimitError):
            bob.completions.create(**COMPLETION)
        until(
            lambda: made.loop.call(
                lambda: (
                    {"n7": str(ReplicaState.FAILED)}.items()
                    <= {view.name: str(view.state) for view in dispatcher.replicas()}.items()
                )
            ),
            "the replica is known to have failed",
        )
        made.loop.call(made.gateway.overviews.record)
        try:
            yield made
        finally:
            made.loop.call(made.gateway.admission.stop)
            for thread in threads:
                thread.join()


def _counts(model) -> tuple[int, int]:
    counts = model.dispatcher.counts()
    return counts.queued, counts.running
