"""A busy afternoon for the pictures: forty jobs with names long and short, counts of seven digits,
a machine of sixteen nodes that is taken and given back.
"""

import msgspec
from rich.console import Group

from malletrain.protocol.views import (
    CurvePointView,
    InterruptionView,
    ProfileView,
    RankTimesView,
    RateView,
    StepTimesView,
)
from malletrain.protocol.views import RescaleView as Rescale
from malletrain.render import job_detail, tables
from malletrain.render.live import Screen
from tests.malletrain.cli.fake_daemon import detail, event_view, job_view, node_view, status_view

NOW = 1_790_000_000.0
RUNNING, SUSPENDED, ENDED = range(28, 38), (38,), range(1, 10)
NAMES = (
    "resnet50-imagenet-lr0.1-wd0.0001-seed{}",
    "bert{}",
    "a-name-of-sixty-characters-is-nearly-the-longest-allowed-{}",
    "gnn.sweep_{}",
)
KEPT = "needs 4 nodes at least, 2 are held"
"""Why a job waits."""


def job(k):
    """Job number ``k`` of forty: nine ended, ten running, one suspended, the others queued."""
    name = NAMES[k % len(NAMES)].format(k)
    common = {
        "id": f"j{k}",
        "name": name,
        "owner": "ada" if k % 3 else "charles-babbage",
        "submitted": NOW - 90_000 + k,
    }
    if k in ENDED:
        state = ("completed", "completed", "failed", "cancelled")[k % 4]
        reason = "Rank 1 was killed by signal 9." if state == "failed" else ""
        return job_view(
            **common,
            state=state,
            reason=reason,
            nodes=(),
            rate=0.0,
            samples=287_400.0 * k,
            rescales=k,
            ended=NOW - 3600 * k,
            metrics={},
        )
    if k in RUNNING:
        n = 1 + k % 2
        metrics = {"loss": 0.00003 * k, "perplexity": 10_690.0 + k}
        return job_view(
            **common,
            nodes=tuple(f"n{2 * k + i}" for i in range(n)),
            max_nodes=16,
            rate=287.4 * k,
            samples=1_287_400.0 + 200_000 * k,
            rescales=k,
            metrics=metrics,
        )
    waits = KEPT if k in SUSPENDED else "others are served first"
    return job_view(
        **common,
        state="suspended" if k in SUSPENDED else "queued",
        reason=waits,
        nodes=(),
        rate=0.0,
        samples=9_999_999.0 if k in SUSPENDED else 0.0,
        rescales=0,
        min_nodes=4,
        max_nodes=128,
        started=None,
        metrics={},
    )


def jobs():
    """Return all forty jobs, in order of submission."""
    return [job(k) for k in range(1, 41)]


def status():
    """The daemon above them."""
    return status_view(
        started=NOW - 200_000,
        now=NOW,
        scheduler="slurm",
        nodes_idle=3,
        nodes_leased=16,
        nodes_training=15,
        samples=98_765_432.0,
        rate=12_345.6,
        rescales=1234,
        preemptions=567,
        pid=1_234_567,
    )


def nodes():
    """Fifteen nodes of the ten running jobs, one without a job, one leaving, three idle."""
    views = [
        node_view(node, "job", j.id, lease=f"l{k}", since=NOW - 1000 * k, horizon_s=120.0 * k)
        for k, (j, node) in enumerate((j, node) for j in jobs() for node in j.nodes)
    ]
    views[3] = msgspec.structs.replace(views[3], state="leaving", gone_in_s=27.0)
    views.append(node_view("n99", "free", "", lease="l123456", since=NOW - 5, horizon_s=None))
    views += [node_view(f"gpu-rack7-{k}", "idle", "", lease="", since=NOW - 30) for k in range(3)]
    return views


def explained():
    """Nodes with the rules they passed or failed."""
    long = "It is reserved for 'maintenance-window-of-the-cooling' from 2026-10-01 08:00 on."
    rules = (("state", True, "It is idle."), ("reservation", False, long))
    return [msgspec.structs.replace(n, rules=rules) for n in nodes()[-3:]]


def events():
    """Events as they are, with sentences long and short."""
    templates = (
        ("job-started", "Started on 2 nodes: n[64-65]."),
        ("rescale-finished", "Grew from 1 to 2 nodes; the pause was 3.25 s."),
        ("node-leaving", "The main scheduler wants the node back within 30 s; its job moves off."),
        (
            "drain-without-snapshot",
            "The workers were asked for a snapshot at a step boundary and "
            "saved none within 60 s; the job goes on from the older one of 14:03:59.",
        ),
        ("workers-failed", "Rank 1 was killed by signal 9; often the node ran out of memory."),
    )
    return [
        event_view(
            k,
            templates[k % 5][0],
            time=NOW - 100 + k,
            sentence=templates[k % 5][1],
            job=f"j{28 + k % 10}",
            node=f"n{56 + k}" if k % 2 else "",
        )
        for k in range(12)
    ]


STEPS_OF_16 = StepTimesView(
    0.24, {"data": 0.41, "computing": 0.44, "others": 0.11, "transfer": 0.04}, "Not shown."
)
STEPS_OF_3 = StepTimesView(
    0.21,
    {"data": 0.18, "computing": 0.7, "others": 0.07, "transfer": 0.04, "snapshot": 0.01},
    "18 % of a step waits for data. Give the loader more workers (num_workers, or submit with "
    "--loader-workers auto), or keep the data in the memory of the nodes (malletrain.DataCache).",
    (
        RankTimesView(0, "n64", 0.21, 0.0378, 0.0231, 0.0021, 0.147),
        RankTimesView(1, "n65", 0.21, 0.0378, 0.0084, None, 0.1638),
        RankTimesView(2, "n66", 0.21, 0.0378, 0.042, None, 0.1302),
    ),
)


def whole():
    """One job with everything that ``show`` tells."""
    phases = {
        "detect": 0.12,
        "warm": 4.5,
        "drain": 1.25,
        "rendezvous": 0.5,
        "start": 0.75,
        "import": 6.02,
        "build": 1.1,
        "state": 2.2,
        "first": 0.3,
    }
    points = tuple(
        CurvePointView(k, 287.4 * k**0.9, 12.0, k in (1, 4, 16), 280.0 * k**0.9)
        for k in (1, 2, 4, 8, 16)
    )
    return detail(
        job=job(32),
        spec={
            "script": "/home/ada/projects/vision/train.py",
            "args": ["--lr", "0.1", "--data", "/scratch/imagenet"],
            "workdir": "/home/ada/projects/vision",
            "python": "/home/ada/venv/bin/python",
            "setup": "module load cuda",
            "nproc_per_node": 4,
        },
        rates=(
            RateView(nodes=1, rate=285.0, spread=3.0, samples=1_287_400.0, seconds=4517.0),
            RateView(
                nodes=3, rate=770.0, spread=9.0, samples=287_400.0, seconds=373.0, steps=STEPS_OF_3
            ),
            RateView(
                nodes=16,
                rate=3480.0,
                spread=20.0,
                samples=9_999_999.0,
                seconds=2873.0,
                steps=STEPS_OF_16,
            ),
        ),
        steps=STEPS_OF_3,
        rescales=(
            Rescale(
                generation=1,
                kind="start",
                from_nodes=0,
                to_nodes=1,
                began=NOW - 9000,
                cost_s=12.5,
                phases=phases,
            ),
            Rescale(
                generation=2,
                kind="up",
                from_nodes=1,
                to_nodes=16,
                began=NOW - 8000,
                cost_s=3.25,
                phases=phases,
            ),
            Rescale(
                generation=3, kind="loss", from_nodes=16, to_nodes=3, began=NOW - 300, cost_s=None
            ),
        ),
        failure="Rank 1 was killed by signal 9; often the node ran out of memory.",
        profile=ProfileView(
            "measured",
            "Every size wanted has been visited.",
            "default",
            2.0,
            1.0,
            12.0,
            points,
            (InterruptionView(NOW - 500, "j9", 4, 2),),
        ),
    )


def top(width, height=24):
    """The live screen after a few looks."""
    screen = Screen()
    for step in range(1, 31):
        polled = [msgspec.structs.replace(j, rate=j.rate * step / 30) for j in jobs()]
        screen.update(status(), polled, nodes(), events() if step == 1 else ())
    return screen.render(width, height, keys=True)


PICTURES = {
    "status": lambda width: Group(tables.headline(status()), "", tables.jobs(jobs(), NOW)),
    "show": lambda width: job_detail.job(whole()),
    "nodes": lambda width: tables.nodes(nodes(), NOW, names={j.id: j.name for j in jobs()}),
    "nodes-explain": lambda width: tables.nodes(explained(), NOW, explain=True),
    "events": lambda width: Group(
        *(tables.EventLine(e, {j.id: j.name for j in jobs()}) for e in events())
    ),
    "top": top,
}
"""Recorded outputs: name → function of the number of columns, which returns the printed object."""
