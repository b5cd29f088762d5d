"""A gate as an administrator sets it up, in a test's folder, with imitated commands behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scavenger.batch.settings import BatchSettings
from scavenger.batch.submission import LeaseSpec
from scavenger.gate.rules import GateRules, read_rules
from scavenger.pbs.job import PbsLeaseOptions
from scavenger.slurm.job import SlurmLeaseOptions
from tests.scavenger.batch.fake_tools import FakeTools

ROOT = Path(__file__).parents[3]
AGENT = ("/opt/malletrain/bin/python", "-m", "malletrain.agent")
TEMPLATES = {kind: (ROOT / f"jobscripts/{kind}/lease.sh").read_text() for kind in ("slurm", "pbs")}
OPTIONS = {
    "slurm": ["--exclusive", "--mem=0", "--partition=preemptable", "--comment=a b"],
    "pbs": ["-S /opt/shell.sh", "-l place=pack:exclhost", "-q scavenge"],
}
SLURM = SlurmLeaseOptions(partition="preemptable", options=("--comment=a b",))
PBS = PbsLeaseOptions(queue="scavenge", shell="/opt/shell.sh")
NAMES = {
    "slurm": ("sbatch", "scancel", "scontrol", "squeue"),
    "pbs": ("qsub", "qdel", "qsig", "qstat"),
}


def settings(kind: str = "slurm", shape: str = "single", **more) -> BatchSettings:
    lease = SLURM if kind == "slurm" else PBS
    return BatchSettings("0a1b2c3d", TEMPLATES[kind], lease, shape=shape, user="malletrain", **more)


def lease_spec(lease: str = "l7", node: str = "n7", **env: str) -> LeaseSpec:
    """A lease as the daemon asks for it."""
    variables = {
        "MALLETRAIN_LEASE_KEY": "a'b\"c$(id)\r\n;;",
        "MALLETRAIN_LEASE": lease,
        "MALLETRAIN_NODE": node,
        "MALLETRAIN_GRACE_S": "30",
        **env,
    }
    argv = (*AGENT, "--endpoint", "tcp://head:7443", "--server-key", "k'(&", "--lease", lease)
    name = f"malletrain-0a1b2c3d-{lease}"
    return LeaseSpec(name, node, argv, variables, 3600.0, 30.0, None, True, lease, "ann")


class GateWorld:
    """The gate of one kind of scheduler, whose rules the test's own user may write."""

    def __init__(self, root: Path, kind: str = "slurm", **more: object) -> None:
        self.root, self.kind = root, kind
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.tools = FakeTools(root / "bin", NAMES[kind])
        (root / "bin").chmod(0o755)
        self.script = root / "lease.sh"
        self.script.write_text(TEMPLATES[kind])
        self.script.chmod(0o644)
        self.path = root / "malletrain-lease.conf"
        self.write(**more)

    def write(self, **more: object) -> None:
        """The rules anew, with ``more`` in place of what they say."""
        values = {
            "kind": self.kind,
            "agent": list(AGENT),
            "script": str(self.script),
            "options": OPTIONS[self.kind],
            "least_uid": 0,
            **more,
        }
        commands = {name: str(self.tools.root / name) for name in NAMES[self.kind]}
        tables = {"commands": commands, "environment": {"SLURM_CONF": "/etc/slurm.conf"}}
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        for name, table in tables.items():
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
        self.path.write_text("\n".join(lines) + "\n")
        self.path.chmod(0o644)

    def rules(self) -> GateRules:
        """Return the rules as the gate reads them."""
        return read_rules(self.path, os.getuid())

    def run(self, *words: str, script: bytes = b"", **env: str) -> subprocess.CompletedProcess:
        """Run the gate as a process of its own, as sudo starts it."""
        return subprocess.run(
            [sys.executable, "-I", "-c", PROGRAM, str(self.path), *words],
            input=script,
            capture_output=True,
            env={"PATH": "/usr/bin:/bin", **env},
            cwd="/",
        )

    def prefix(self) -> Sequence[str]:
        """Return the value of submit_as at a site, without sudo."""
        return ("env", "OWNER={owner}", sys.executable, "-I", "-c", PROGRAM, str(self.path))


PROGRAM = (
    f"import os, pathlib, sys; sys.path.insert(0, {str(ROOT)!r})\n"
    "from scavenger.gate.main import main\n"
    "sys.exit(main(sys.argv[2:], pathlib.Path(sys.argv[1]), os.getuid()))\n"
)
"""What site-configs/malletrain-lease.py does, with other rules, from the tree of this test."""
