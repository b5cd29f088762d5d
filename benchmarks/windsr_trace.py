"""Runs one training as a job of MalleTrain on the embedded cluster while its nodes come and go, and
returns what happened.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from malletrain.client import Connection
from malletrain.protocol import messages
from scavenger.embedded.cluster_process import start_cluster
from scavenger.trace import files, replay, synthesis, trace

SPEEDUP = 5.0
"""Speed-up of the trace: a median gap of 475 s on Summit lasts 95 s here."""
SHORTEST_GAP_S = 20.0
IDLE_SHARE = 0.6
GRACE_S = 20.0
PATIENCE_S = 3600.0
PRELOAD = "diffusers.models.unets.unet_2d,diffusers.schedulers,xarray,h5netcdf"
"""Modules of a worker besides torch, which are imported once per node and not at every start."""


def _trace_for(nodes: int, seconds: float, source: Path | None) -> trace.Trace:
    names = [f"n{k + 1}" for k in range(nodes)]
    if source is not None:
        return replay.fit(files.read(source), names, speedup=SPEEDUP, duration_s=seconds)
    model = synthesis.MachineModel(
        IDLE_SHARE, synthesis.lognormal(475.0, 1192.0, SHORTEST_GAP_S * SPEEDUP)
    )
    return synthesis.synthesise(model, names, seconds * SPEEDUP, 3).sped_up(SPEEDUP)


def _config(folder: Path, nodes: int) -> Path:
    path = folder / "site.toml"
    path.write_text(
        f'[daemon]\nstate_dir = "{folder / "state"}"\nmetrics_listen = ""\n'
        '[scheduler]\nkind = "local"\npoll_interval = "0.5 s"\n[scheduler.local]\nnodes = '
        f"{nodes}\nautostart = false\n"
        f'grace = "{GRACE_S:g} s"\n[jobs]\nwarmup_timeout = "300 s"\nmax_tries = 5\n'
        '[allocation]\ndebounce = "1 s"\nmin_interval = "0 s"\n[profiling]\nenabled = false\n'
    )
    return path


def train_on_trace(
    folder: Path,
    script: Path,
    arguments: list[str],
    nodes: int,
    seconds: float,
    live: bool,
    source: Path | None,
) -> dict[str, Any]:
    """Submit ``script`` with ``arguments`` for 1 to ``nodes`` nodes, and wait until it is
    completed. The trace is repeated after ``seconds``. Return rescales, preempted nodes (``lost``),
    the job's tries, and seconds by number of nodes.

    Raises:
        RuntimeError: the job fails, or takes longer than an hour; the message has its last output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replayed = folder / "trace.csv"
    files.write(_trace_for(nodes, seconds, source), replayed)
    state = folder / "state"
    cluster = start_cluster(
        state / "cluster",
        nodes,
        trace=replayed,
        trace_end_s=seconds,
        at_end="repeat",
        grace_s=GRACE_S,
        notice_fraction=0.7,
        lifetime_s=PATIENCE_S + 60,
    )
    with (folder / "daemon.log").open("ab") as log:
        argv = [
            sys.executable,
            "-m",
            "malletrain",
            "daemon",
            "--config",
            str(_config(folder, nodes)),
        ]
        daemon = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        return _watched(state, folder, script, arguments, nodes, live)
    finally:
        daemon.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(60)
        daemon.kill()
        cluster.stop()


def _watched(
    state: Path, folder: Path, script: Path, arguments: list[str], nodes: int, live: bool
) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    spec = messages.JobSpec(
        "windsr",
        "",
        str(script),
        str(folder),
        sys.executable,
        tuple(arguments),
        min_nodes=1,
        max_nodes=nodes,
        mode="live" if live else "restart",
        profile=False,
        env={"MALLETRAIN_PRELOAD": PRELOAD},
    )
    job = ""
    node_seconds: Counter[int] = Counter()
    while time.monotonic() < deadline:
        time.sleep(1.0)
        with contextlib.suppress(RuntimeError), Connection.of(state) as client:
            job = job or client.submit(spec).id
            view = client.job(job).job
            node_seconds[len(view.nodes)] += 1
            if view.state in ("completed", "failed", "cancelled"):
                events = Counter(e.kind for e in client.events(limit=1000))
                rounds = [
                    len(e.data["members"])
                    for e in client.events(limit=1000, job=job)
                    if e.kind == "round-formed"
                ]
                if view.state != "completed":
                    raise RuntimeError(
                        f"The job {view.state}: {client.job(job).failure} See "
                        f"{folder / 'daemon.log'} and {state / 'logs'}."
                    )
                lost = sum(
                    count
                    for kind, count in events.items()
                    if kind in ("node-leaving", "node-vanished")
                )
                return {
                    "rescales": max(0, len(rounds) - 1),
                    "sizes": rounds,
                    "lost": lost,
                    "tries": view.tries,
                    "seconds_by_nodes": dict(sorted(node_seconds.items())),
                    "events": dict(events),
                }
    raise RuntimeError(
        f"The job was not completed within {PATIENCE_S:g} s; see {folder / 'daemon.log'}."
    )
