"""A busy machine for tests of the page's look: forty-two jobs in all states on forty nodes, as a
daemon would send them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from malletrain.core.step_times import SHARES
from malletrain.protocol.views import (
    CurvePointView,
    JobDetail,
    JobView,
    LogView,
    NodeForecastView,
    NodeView,
    ProfileView,
    RateView,
    RescaleView,
    SeriesView,
    StatusView,
    UsageView,
)
from tests.malletrain.cli.fake_daemon import FakeDaemon
from tests.malletrain.web.looks import event, job, node

JOBS, RUNNING, QUEUED = 42, 24, 8
NODES = [f"gpu-rack2-{number:03}" for number in range(1, 41)]
NAMES = (
    *("resnet50-imagenet", "wind", "protein-embedding-large-batch", "unet", "a"),
    *("tiny llm warmup", "diffusion_downscaling_of_the_whole_archive", "lr=0.003,wd=0.1"),
)
REASONS = {
    "queued": "it needs 8 nodes at least, 3 are free for it; its turn is after 4 other jobs",
    "suspended": "it has 1 of the 2 nodes that it needs at least; it goes on when there are more",
    "profiling": "step 2 of 4: on 8 nodes until its throughput is steady",
    "failed": "ended with status 1 on gpu-rack2-007 in each of 3 tries: see malletrain logs",
    "cancelled": "cancelled by ann",
}
PERIOD_S = 900.0
"""How long ago the oldest running job started, seconds."""

LINKS = {"TensorBoard": "http://login1.example.org:6006/", "Trap": "javascript:window.pwned = 1"}
"""Links of each job. No daemon would send the second one."""


def jobs(now: float) -> list[JobView]:
    """Jobs with numbers from 1, the running ones first; each running one has one to three nodes."""
    views: list[JobView] = []
    placed = 0
    for number in range(1, JOBS + 1):
        state = _state(number)
        size = 1 + number % 3 if state in ("running", "profiling") else 0
        size = min(size, len(NODES) - placed)
        nodes = tuple(NODES[placed : placed + size])
        placed += size
        ended = now - 60.0 * number if state in ("completed", "failed", "cancelled") else None
        started = None if state == "queued" else now - PERIOD_S - 90.0 * number
        views.append(
            job(
                number,
                state,
                "ann" if number % 3 else "a-user-with-a-long-name",
                name=NAMES[number % len(NAMES)],
                reason=REASONS.get(state, ""),
                nodes=nodes,
                min_nodes=2,
                max_nodes=16,
                rate=1234.5 * size,
                samples=9.1e6 + number,
                rescales=number,
                submitted=now - 7200.0 - number,
                started=started,
                ended=ended,
                metrics={"loss": 0.123456, "accuracy": 0.98} if number % 2 else {},
                mode="restart",
                step_shares={part: 1 / len(SHARES) for part in SHARES} if size else {},
            )
        )
    return views


def _state(number: int) -> str:
    if number <= RUNNING:
        return "profiling" if number == 5 else "running"
    if number <= RUNNING + QUEUED:
        return "suspended" if number % 3 == 0 else "queued"
    return ("completed", "failed", "cancelled")[number % 3]


def nodes(views: list[JobView]) -> list[NodeView]:
    """The nodes of these jobs, and others in each of the other states."""
    of_jobs = [node(name, on=view.id) for view in views for name in view.nodes]
    others = ("idle", "leasing", "free", "leaving", "sick", "slow")
    rest = NODES[len(of_jobs) :] or NODES[-len(others) :]
    more = [node(f"login{k}", state) for k, state in enumerate(others)]
    return [*of_jobs, *more, *(node(name, "free") for name in rest if len(of_jobs) < len(NODES))]


def detail(views: list[JobView], number: int, now: float) -> JobDetail:
    """Return the details of a job: a scaling curve, and a rescale each minute."""
    view = views[number - 1]
    rescales = tuple(
        RescaleView(
            k + 1,
            ("up", "down", "loss", "same")[k % 4],
            1 + k % 3,
            1 + (k + 1) % 3,
            now - 60.0 * (14 - k),
            0.4 + k,
            {"leave": 0.1, "rendezvous": 0.25 * k, "state": 0.5, "first step": 0.3},
        )
        for k in range(14)
    )
    curve = tuple(
        CurvePointView(k, 1e5 * k**0.8, 4e3, k in (1, 4, 8), 1e5 * k**0.8) for k in range(1, 17)
    )
    return JobDetail(
        view,
        {
            "script": "/home/ann/projects/downscaling/train.py",
            "args": ["--lr", "0.003"],
            "links": LINKS,
        },
        (RateView(2, 1.7e5, 1e3, 1e6, 60.0),),
        rescales if view.nodes else (),
        ("Its snapshots are 3.1 GB on each node.",),
        "Traceback (most recent call last):\n  …" if view.state == "failed" else "",
        ProfileView("measured", "", points=curve),
    )


def forecast(now: float) -> list[NodeForecastView]:
    """A day of five minutes each, and the next one."""
    past = tuple((now - 300.0 * k, 20.0 + 15 * math.sin(k / 40)) for k in range(288, 0, -1))
    ahead = tuple(
        (now + 300.0 * k, 10.0, 20.0 + 15 * math.sin(k / 40), 38.0) for k in range(1, 289)
    )
    return [NodeForecastView("gpu", 21.0, 300.0, past, ahead, 168.0)]


def usage() -> list[UsageView]:
    """Return the usage of two users. The power of their nodes is unknown, and none of the nodes is
    a slot.
    """
    return [
        UsageView("2026-11", user, "gpu", 4711.2, 3900.0, 0.08, 0.5, 12.3, 0.0, 9.1e9)
        for user in ("ann", "a-user-with-a-long-name")
    ]


def answers(now: float) -> dict[str, Any]:
    """Operation → what the daemon answers."""
    views = jobs(now)
    series = [
        SeriesView(
            name,
            tuple(scale * math.exp(-k / 20) for k in range(60)),
            tuple(now - 10.0 * (60 - k) for k in range(60)),
            tuple(100.0 * k for k in range(60)),
            tuple(2 for _ in range(60)),
            tuple(range(60)),
            60,
        )
        for name, scale in (("loss", 2.3), ("grad_norm", 123456.0), ("tiny", 1e-5))
    ]

    def status(_: Any) -> StatusView:
        now = time.time()
        counts: dict[str, int] = {}
        for view in views:
            counts[view.state] = counts.get(view.state, 0) + 1
        return StatusView(
            *("1.0", 1, "boot", now - 86400.0, now, "slurm", 3, 43, 40),
            *(counts, 9.1e9, 5.5e4, 123, 45, now - 0.7, ""),
        )

    return {
        "status": status,
        "jobs": lambda _: views,
        "nodes": lambda _: nodes(views),
        "events": lambda p: [each for each in _events(views, now) if each.seq > p["since"]],
        "usage": lambda _: usage(),
        "forecast": lambda _: forecast(now),
        "metrics": lambda _: series,
        "job": lambda p: detail(views, int(p["job"].removeprefix("j")), now),
        "logs": lambda _: LogView("epoch 1: loss 2.3\n", "1", False, ("rank0",), True),
    }


def _events(views: list[JobView], now: float) -> list[Any]:
    """Nodes that come one after the other, jobs that start on them, and preemptions."""
    made: list[Any] = []
    at = now - PERIOD_S
    for number, view in enumerate(view for view in views if view.nodes):
        begin = at + 20.0 * number
        for name in view.nodes:
            made.append(event(len(made) + 1, "node-joined", begin - 10.0, at=name))
        made.append(event(len(made) + 1, "job-started", begin, view.id, nodes=list(view.nodes)))
        if number % 4 == 0:
            kind = "node-leaving" if number % 8 else "node-vanished"
            made.append(event(len(made) + 1, kind, begin + 100.0, at=view.nodes[0]))
    return sorted(made, key=lambda each: each.seq)


@contextlib.contextmanager
def crowded_daemon(state: Path) -> Iterator[None]:
    """A substitute of a daemon with all this, in this state directory."""
    state.mkdir(parents=True, mode=0o700)
    fake = FakeDaemon(state, answers(time.time()))
    try:
        yield
    finally:
        fake.stop()
