"""Creates the history of a daemon, and submits jobs as users do, for :mod:`benchmarks.load`."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from msgspec.structs import replace

from benchmarks.load_site import Site, add_jobs
from malletrain.client import Connection
from malletrain.daemon.jobs.repository import decode_spec
from malletrain.store.store import Store


def fill(state: Path, jobs: int, events: int) -> None:
    """Create a database with many ended jobs and many events."""
    [template] = add_jobs(state, 1, (1, 4))
    with sqlite3.connect(state / "malletrain.db") as base:
        base.execute("PRAGMA synchronous=OFF")
        columns = [c[1] for c in base.execute("PRAGMA table_info(jobs)")]
        other = {
            "id": "'j' || (number + n)",
            "number": "number + n",
            "state": "'completed'",
            "started": "submitted",
            "ended": "submitted",
        }
        numbers = (
            "WITH RECURSIVE t(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM t WHERE n < {last})"
        )
        chosen = ", ".join(other.get(name, name) for name in columns)
        base.execute(
            f"INSERT INTO jobs ({', '.join(columns)}) {numbers.format(first=1, last=jobs)} "
            f"SELECT {chosen} FROM jobs, t WHERE id = '{template}'"
        )
        base.execute(f"UPDATE jobs SET state = 'cancelled', ended = 1 WHERE id = '{template}'")
        base.execute(f"UPDATE meta SET value = '{jobs + 1}' WHERE key = 'last_job'")
        base.execute(
            "INSERT INTO events (time, kind, job, node, lease, generation, data) "
            f"{numbers.format(first=1, last=events)} SELECT 1.6e9 + n, CASE n % 5 WHEN 0 THEN "
            "'job-rescaled' WHEN 1 THEN 'round-formed' WHEN 2 THEN 'rescale-finished' WHEN 3 THEN "
            f"'node-joined' ELSE 'goal-standing' END, 'j' || (1 + n * {jobs} / {events}), 'n' || "
            "(n % 10000), '', NULL, '{\"sentence\":\"Something happened to the job on nodes.\"}'"
            " FROM t"
        )


def submit_more(site: Site, count: int) -> None:
    """Submit jobs as users do."""
    with Store.open(f"sqlite:///{site.state / 'malletrain.db'}") as store:
        newest = store.list_jobs(newest=1)
    script = site.root / "train.py"
    script.touch()
    spec = replace(decode_spec(newest[0].spec), script=str(script), workdir=str(site.root))
    with Connection.of(site.state) as client:
        for _ in range(count):
            client.submit(spec)
