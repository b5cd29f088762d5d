"""Checks whether main jobs wait longer for leases than ``malletrain check`` predicts, on a real
Slurm.

    python -m benchmarks.noharm --bound [--nodes 8] [--minutes 2] [--load 0.6]
        [--cases plain cluster partition qos heterogeneous] [--json]

Each case is a Slurm on which a malleable job of stubs takes all available nodes, and the same trace
of main jobs, which never wait for each other (benchmarks/main_jobs.py). Reported are the limit that
``check`` prints for that Slurm, how long the main jobs waited from submission to their first
command, how many waited longer than the limit, and the waits of the same trace without MalleTrain.

* ``plain``: leases can be preempted at once;
* ``cluster``, ``partition``, ``qos``: PreemptExemptTime of the cluster, of the QOS of the leases'
  partition, and of the leases' own QOS (the last two with slurmdbd and MariaDB);
* ``heterogeneous``: main jobs of several nodes have two components.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import main_jobs
from benchmarks.main_jobs import MainJob
from benchmarks.noharm_account import summary
from benchmarks.slurm_site import SCHEDULER, nodes_leased, running_daemon, submit_stubs
from tests.slurm.accounting import AccountedCluster
from tests.slurm.cluster import SlurmCluster

EXEMPT_S = 20
"""PreemptExemptTime in the cases that have one, seconds."""
GRACE_S = 10
KILL_WAIT_S = 2
BOUND = re.compile(
    r"A job (?:may wait|waits) (\d+) s for a lease(?:.*A heterogeneous job waits up to (\d+) s)?"
)
"""Pattern of the sentences of ``check``: the limit of a job, and that of a heterogeneous one."""


@dataclass(frozen=True)
class Case:
    """One kind of Slurm and of main jobs."""

    options: dict[str, object]
    """Options of the cluster, as in tests/slurm/cluster.py."""
    lines: str = ""
    """Lines of [scheduler.slurm]."""
    prepare: tuple[str, ...] = ()
    """Arguments of sacctmgr that create the QOS; empty: no accounting."""
    heterogeneous: bool = False
    """Whether main jobs of several nodes have two components."""


def _qos(name: str) -> tuple[str, ...]:
    return (
        f"add qos {name} preemptexempttime=00:00:{EXEMPT_S}",
        f"modify account root set qos=normal,{name}",
    )


CASES = {
    "plain": Case({}),
    "cluster": Case({"extra": f"PreemptExemptTime=00:00:{EXEMPT_S}\n"}),
    "partition": Case({"lease_mode": "PreemptMode=CANCEL QOS=part"}, prepare=_qos("part")),
    "qos": Case({}, 'qos = "low"\n', _qos("low")),
    "heterogeneous": Case({}, heterogeneous=True),
}


def workload(nodes: int, minutes: float, load: float, seed: int, case: Case) -> list[MainJob]:
    """Return the main jobs of a case; they never wait for each other."""
    jobs = main_jobs.workload(nodes, 60 * minutes, load, seed)
    if not case.heterogeneous:
        return jobs
    return [replace(j, parts=(1, j.nodes - 1)) if j.nodes > 1 else j for j in jobs]


def waits(
    slurm: SlurmCluster, jobs: Sequence[MainJob], folder: Path, minutes: float
) -> list[float]:
    """Play a trace. Return how long each job waited, seconds."""
    _, records = main_jobs.replay(slurm, jobs, folder, 60 * minutes)
    return [record.started - record.submitted for record in records if record.started is not None]


def told_bound_s(slurm: SlurmCluster, config: Path, heterogeneous: bool) -> float:
    """Return the longest wait that ``malletrain check`` predicts, seconds.

    Args:
        slurm: the Slurm.
        config: the configuration of the daemon.
        heterogeneous: whether to return the limit of heterogeneous jobs.

    Raises:
        RuntimeError: it predicts none.
    """
    argv = [sys.executable, "-m", "malletrain", "check", "--config", str(config)]
    done = subprocess.run(argv, env=slurm.environment, capture_output=True, text=True, check=False)
    if (match := BOUND.search(" ".join(done.stdout.split()))) is None:
        raise RuntimeError(f"check predicts no longest wait: {done.stdout}{done.stderr}")
    return float(match[2] if heterogeneous else match[1])


def compared(bound_s: float, without: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Return the figures of a case.

    Args:
        bound_s: the longest wait that ``check`` predicts, seconds.
        without: waits of the main jobs without MalleTrain, seconds.
        beside: waits of the same jobs beside it, in the same order, seconds.
    """
    added = [max(0.0, b - a) for a, b in zip(without, beside, strict=True)]
    return {
        "bound_s": bound_s,
        "main_jobs": len(beside),
        "wait_without": summary(without),
        "wait": summary(beside),
        "added": summary(added),
        "over_bound": sum(each > bound_s for each in added),
    }


def measure(
    name: str, nodes: int, minutes: float, load: float, seed: int, config: str
) -> dict[str, Any]:
    """Return the figures of one case. ``config``: the configuration of the daemon."""
    case = CASES[name]
    jobs = workload(nodes, minutes, load, seed, case)
    root = Path(tempfile.mkdtemp(prefix="mt-noharm-", dir="/tmp"))
    root.chmod(0o755)
    options = {
        "scheduler": SCHEDULER,
        "grace": GRACE_S,
        "kill_wait": KILL_WAIT_S,
        "min_job_age": 60,
    }
    kind = {"prepare": case.prepare} if case.prepare else {}
    make = AccountedCluster if case.prepare else SlurmCluster
    try:
        with make(root / "slurm", nodes, **options, **kind, **case.options) as slurm:
            without = waits(slurm, jobs, root / "without", minutes)
            slurm.until(lambda: slurm.states().count("idle") == nodes, "all nodes are idle again")
            text = config.replace("[gaps]", f"{case.lines}[gaps]")
            with running_daemon(root, slurm, text) as state:
                bound_s = told_bound_s(slurm, root / "site.toml", case.heterogeneous)
                submit_stubs(root, state, ("one", "two"), nodes)
                slurm.until(lambda: nodes_leased(state) == nodes, "MalleTrain holds the machine")
                beside = waits(slurm, jobs, root / "beside", minutes)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {"case": name, "nodes": nodes, "minutes": minutes, "seed": seed} | compared(
        bound_s, without, beside
    )


def rows(
    cases: Sequence[str], nodes: int, minutes: float, load: float, seed: int, config: str
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each case."""
    for name in cases:
        yield measure(name, nodes, minutes, load, seed, config)


def show(row: dict[str, Any]) -> None:
    """Print the figures of one case."""
    print(
        f"\n{row['case']}: {row['main_jobs']} main jobs on {row['nodes']} nodes, "
        f"{row['minutes']:g} min, seed {row['seed']}"
    )
    for key, name in (
        ("wait_without", "wait without MalleTrain"),
        ("wait", "wait beside it"),
        ("added", "added, job by job"),
    ):
        if each := row[key]:
            print(
                f"{name:26} median {each['median_s']:6.2f} s, p90 {each['p90_s']:6.2f} s, "
                f"max {each['max_s']:6.2f} s"
            )
    print(
        f"check predicts {row['bound_s']:g} s at most; {row['over_bound']} jobs waited longer",
        flush=True,
    )
