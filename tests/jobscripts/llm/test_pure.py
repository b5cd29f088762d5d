"""What decides knows no clock and does no I/O, and uses only the public parts of MalleTrain."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobscripts.imports import imports

PACKAGE = Path(__file__).parents[3] / "jobscripts" / "llm" / "llmserve"
GATEWAY = {
    "admission.py",
    "app.py",
    "batch_api.py",
    "batch_runner.py",
    "check.py",
    "commands.py",
    "database.py",
    "metrics.py",
    "models.py",
    "overview.py",
    "page.py",
    "page_link.py",
    "request_log.py",
    "responses.py",
    "scaling.py",
    "server.py",
}
"""Of the folder of the same name: run on the real clock, or use what does."""
SHELLS = {
    *GATEWAY,
    "answers.py",
    "batch_command.py",
    "batch_leader.py",
    "batch_member.py",
    "batch_store.py",
    "cli.py",
    "engine_check.py",
    "engine_process.py",
    "front.py",
    "job_options.py",
    "live_dispatcher.py",
    "live_engine.py",
    "live_replica.py",
    "measuring.py",
    "replica_client.py",
    "replay.py",
    "replica_process.py",
    "service_members.py",
    "simulated_server.py",
}
"""Run on the real clock."""
READERS = {"batch_input.py", "configuration.py", "keys.py", "model_tokenizer.py", "traces.py"}
"""Read files."""
FORBIDDEN = {
    "aiohttp",
    "asyncio",
    "os",
    "select",
    "socket",
    "subprocess",
    "threading",
    "time",
    "uvicorn",
}
PUBLIC = {
    "malletrain",
    "malletrain.cli.for_argparse",
    "malletrain.membership",
    "malletrain.waits",
}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_a_module_imports_what_it_may(path):
    modules = imports(path)
    if path.name not in SHELLS | READERS:
        assert {name.partition(".")[0] for name in modules} & FORBIDDEN == set()
        assert {name.rpartition(".")[2] + ".py" for name in modules} & SHELLS == set()
    assert {name for name in modules if name.startswith("malletrain")} <= PUBLIC
