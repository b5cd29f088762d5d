"""Farms on the embedded site: submission, counting, and faults."""

from __future__ import annotations

from collections import Counter
from typing import Any

from malletrain.client import operations
from malletrain.protocol import messages
from malletrain.protocol.farm import FarmSpec
from tests.integration.embedded import Site

APPEND = "echo {index} >> ran"
"""Appends its number when it has done its work."""


def submit(
    site: Site, command: str, rows: list[list[str]], nodes: str = "1:3", **fields: Any
) -> str:
    """Submit a farm of a shell command and its tasks. Return the job's id."""
    job = empty(site, command, len(rows), nodes, **fields)
    for first in range(0, len(rows), 5000):
        add(site, job, first, rows[first : first + 5000])
    return job


def empty(site: Site, command: str, total: int, nodes: str = "1:3", **fields: Any) -> str:
    """Submit a farm whose tasks have not been added."""
    low, high = map(int, nodes.split(":"))
    setup = fields.pop("setup", None)
    words = fields.pop("words", ("sh", "-c", command))
    farm = FarmSpec(words, ("x",), total, "logs/{index}.log", **{"cpus": 1, **fields})
    spec = messages.JobSpec(
        "farm",
        "",
        "/bin/sh",
        str(site.work),
        "python",
        min_nodes=low,
        max_nodes=high,
        mode="farm",
        farm=farm,
        profile=False,
        setup=setup,
    )
    with site.client() as client:
        return client.submit(spec).id


def add(site: Site, job: str, first: int, rows: list[list[str]]) -> int:
    with site.client() as client:
        return client.do(operations.add_tasks(job, first, rows))


def tasks(site: Site, job: str, **which: Any) -> Any:
    with site.client() as client:
        return client.do(operations.tasks(job, **which))


def runs(site: Site, name: str = "ran") -> Counter[int]:
    """Task → how often it has run to its end."""
    path = site.work / name
    return Counter(map(int, path.read_text().split())) if path.exists() else Counter()


def numbered(count: int) -> list[list[str]]:
    return [[str(k)] for k in range(count)]
