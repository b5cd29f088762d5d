"""What a worker and its fork server import. The environment of a job, such as a container, may have
torch and no package of the agent, and forks share what their fork server has imported.
"""

from __future__ import annotations

import os
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


_READ_VARIABLES = """
import os, sys
read = set()
class Environment(os._Environ):
    def __getitem__(self, name):
        read.add(name)
        return super().__getitem__(name)
os.environ.__class__ = Environment
from importlib import import_module
from malletrain.launch import fork_server, restart
for name in fork_server.PRELOADED:
    import_module(name)
print(*sorted(name for name in read if name.startswith("MALLETRAIN_")))
"""


def test_modules_that_forks_take_over_read_no_variable_when_they_are_imported():
    """Except those of malletrain/__init__.py, which a fork executes again, and of fault_points.py,
    which reads it again. The environment of a fork is another one.
    """
    # modules of torch copy all variables that are set
    variables = {name: os.environ[name] for name in os.environ if "MALLETRAIN" not in name}
    command = [sys.executable, "-c", _READ_VARIABLES]
    run = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert (run.stdout, run.stderr) == ("MALLETRAIN_FAULTS MALLETRAIN_SOCKET\n", "")
