"""What a worker and its fork server import. The environment of a job, such as a container, may have
torch and no package of the agent, and forks share what their fork server has imported.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

AGENTS = ("zmq", "sqlalchemy", "click", "pydantic")
"""Packages that the training side imports in functions only, or never."""


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("malletrain.training.report", (*AGENTS, "msgspec", "torch")),
        ("malletrain.training.sampler", (*AGENTS, "msgspec", "torch")),
        ("malletrain.training.functions", (*AGENTS, "msgspec", "torch")),
        # One process: both import torch.
        ("malletrain.training.adaptive_batch, malletrain.training.stream", (*AGENTS, "msgspec")),
        ("malletrain.training.snapshot", (*AGENTS, "torch")),
        ("malletrain.elastic.run", AGENTS),
        ("malletrain.membership", (*AGENTS, "msgspec", "torch")),
        (
            "malletrain.launch.fork_server",
            (*AGENTS, "msgspec", "torch", "malletrain.training.report"),
        ),
    ],
)
def test_a_module_of_workers_imports_only_what_their_environment_has(modules, absent):
    program = f"import sys, {modules}; print(*sorted({set(absent)!r} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.stdout.split(), run.stderr) == ([], "")
