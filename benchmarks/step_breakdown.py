"""Where a step's time goes: whether the right cause of a delay is named, and what measuring costs.

    python -m benchmarks.step_breakdown [--runs 100] [--seed 1] [--json FILE]
    python -m benchmarks.step_breakdown --overhead [--step-ms 10] [--json FILE]

**Causes.** On the embedded cluster, jobs of two real processes train a small network with
DistributedDataParallel over gloo; it has a BatchNorm, whose buffers are exchanged too. In each, one
thing is slow, chosen by the seed with its strength:

* ``loader``: the data set sleeps in each sample, on all ranks;
* ``one-loader``: it does so on one rank;
* ``rank``: one rank sleeps in its forward pass;
* ``disk``: ``fsync`` sleeps, and with it each snapshot, of which there is one after each step;
* ``link``: each exchange of gradients completes late, on all ranks.

After ``--steps`` steps the cause that ``malletrain show`` names is compared with the injected one.

**Cost.** One process makes steps of ``--step-ms`` (10 ms) that have a DataLoader, a backward pass
with an exchange and an update, in alternating blocks with and without the measurement. The cost is
the difference of the medians, and the processor time of the measured parts alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from malletrain.core.step_times import Bottleneck
from tests.integration.embedded import Site, site

PARTS = """
import os, sys, threading, time
import torch
import torch.distributed as dist
import malletrain

cause, delay_s, victim = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
if cause == "disk":
    fsync = os.fsync
    os.fsync = lambda fd: (time.sleep(delay_s), fsync(fd))[1]


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        if cause == "loader" or (cause == "one-loader" and rank == victim):
            time.sleep(delay_s / 4)
        return torch.full((16,), float(index % 7))


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1)
        )

    def forward(self, batch):
        time.sleep(0.01 + (delay_s if cause == "rank" and rank == victim else 0.0))
        return self.layers(batch)


model = Network()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
"""Common part of the scripts of both modes."""
SCRIPT = (
    PARTS
    + """
def late(state, bucket):
    tensor, future = bucket.buffer(), torch.futures.Future()
    work = dist.all_reduce(tensor, async_op=True)
    def arrive():
        work.wait()
        time.sleep(delay_s)
        future.set_result(tensor)
    threading.Thread(target=arrive).start()
    return future


dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(model)
if cause == "link":
    net.register_comm_hook(None, late)
sampler = malletrain.ElasticSampler(4096, global_batch_size=4 * dist.get_world_size())
loader = torch.utils.data.DataLoader(Samples(), batch_sampler=sampler)
every_s = 0.0 if cause == "disk" else 3600.0
path = os.environ["MALLETRAIN_JOB"] + ".pt"
snapshot = malletrain.Snapshot(path, every_s=every_s, model=model, sampler=sampler)
snapshot.restore()
for epoch in sampler.epochs(1000):
    for batch in loader:
        optimizer.zero_grad()
        net(batch).mean().backward()
        optimizer.step()
        sampler.advance()
        malletrain.report(len(batch))
        snapshot.step()
"""
)
LIVE_SCRIPT = (
    PARTS
    + """
from malletrain import elastic
sampler = malletrain.ElasticSampler(4096, global_batch_size=8)
loader = torch.utils.data.DataLoader(Samples(), batch_sampler=sampler)
run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler)
net = run.ddp(model)
rank = run.rank
for epoch in sampler.epochs(1000):
    for batch in run.batches(loader):
        rank = run.rank
        with run.step():
            optimizer.zero_grad()
            net(batch).mean().backward()
            optimizer.step()
"""
)
NAMED = {
    "loader": (Bottleneck.DATA,),
    "one-loader": (Bottleneck.DATA_OF_ONE_RANK,),
    "rank": (Bottleneck.SLOW_RANK,),
    "disk": (Bottleneck.SNAPSHOT,),
    "link": (Bottleneck.TRANSFER, Bottleneck.MOSTLY_TRANSFER),
}
"""Injected cause → the causes that are right."""


@dataclass(frozen=True)
class Injection:
    """One slow component."""

    cause: str
    """A key of :data:`NAMED`."""
    delay_s: float
    """Its delay each time, seconds."""
    victim: int
    """The rank, for ``rank`` and ``one-loader``."""


@dataclass(frozen=True)
class Named:
    """The reported cause of one run."""

    injection: Injection
    named: str
    """Name of the reported cause."""
    right: bool
    shares: dict[str, float]
    seconds: float
    """Time from the submission to the answer, seconds."""
    advice: str = ""


def drawn(number: random.Random, cause: str | None = None) -> Injection:
    """Return an injection: its cause and strength are random."""
    cause = cause or number.choice(sorted(NAMED))
    low, high = (0.1, 0.3) if cause == "disk" else (0.02, 0.08)
    return Injection(cause, round(number.uniform(low, high), 4), number.randrange(2))


def run(embedded: Site, injection: Injection, steps: int, *, live: bool = False) -> Named:
    """Run one job with a slow component.

    Args:
        embedded: a site with two nodes.
        injection: the slow component.
        steps: number of steps after which the cause is read.
        live: whether the job is one of live mode, with a slow loader or rank.
    """
    began = time.monotonic()
    name, text = ("slow_live.py", LIVE_SCRIPT) if live else ("slow_part.py", SCRIPT)
    script, mode = embedded.script(name, text), "live" if live else "restart"
    arguments = (injection.cause, str(injection.delay_s), str(injection.victim))
    job = embedded.submit(script, *arguments, nodes=(2, 2), profile=False, mode=mode)
    embedded.until(
        lambda: (now := embedded.job(job)).samples >= 8.0 * steps or now.state == "failed",
        f"{job} has made {steps} steps",
    )
    assert not embedded.show(job).failure, embedded.show(job).failure
    embedded.until(
        lambda: len(getattr(embedded.show(job).steps, "ranks", ())) == 2, "both ranks are measured"
    )
    shown = embedded.show(job).steps
    assert shown is not None
    took = time.monotonic() - began
    with embedded.client() as client:
        client.cancel(job)
    embedded.until_state(job, "cancelled", "failed", "completed")
    right = Bottleneck(shown.cause) in NAMED[injection.cause]
    if injection.cause in ("rank", "one-loader"):
        right = right and f"rank {injection.victim} on" in shown.advice
    return Named(injection, shown.cause, right, dict(shown.shares), took, shown.advice)


def causes(o: argparse.Namespace) -> list[Named]:
    """Return the results of ``--runs`` jobs."""
    number, results = random.Random(o.seed), []
    with tempfile.TemporaryDirectory() as folder, site(Path(folder) / "site", nodes=2) as made:
        for _ in range(o.runs):
            result = run(made, drawn(number), o.steps)
            results.append(result)
            shares = ", ".join(f"{part} {share:.2f}" for part, share in result.shares.items())
            mark = "right" if result.right else "WRONG"
            print(
                f"{result.injection.cause:10} {result.injection.delay_s:.3f} s  {mark}  "
                f"{result.named:16}  {result.seconds:5.1f} s  {shares}",
                flush=True,
            )
    print(f"{sum(r.right for r in results)} of {len(results)} right, seed {o.seed}")
    return results


@dataclass(frozen=True)
class Cost:
    """The cost of measuring."""

    step_ms: float
    """Median step without it, milliseconds."""
    measured_ms: float
    """Median step with it, milliseconds."""
    parts_us: float
    """Processor time of the measurement alone in a step, microseconds: the median of steps without
    work.
    """
    share: float
    """``parts_us`` as a share of the step."""


def overhead(o: argparse.Namespace) -> Cost:
    """Return the cost of measuring in a process with one peer, which is always ready."""
    import torch
    import torch.distributed as dist

    from malletrain.training import step_hooks, step_times

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    size = dist.get_world_size
    dist.get_world_size = lambda *args: 2  # as if there were a peer whose part is done at once
    step_hooks.install()
    weight = torch.ones(64, 64, requires_grad=True)
    rows = torch.ones(64, 64)
    loader = torch.utils.data.DataLoader(range(10**9), batch_size=1)
    batches = iter(loader)

    def step(work_s: float) -> None:
        next(batches)
        end = time.perf_counter() + work_s
        while time.perf_counter() < end:
            pass
        (rows @ weight).sum().backward()
        gradient = weight.grad
        assert gradient is not None
        dist.all_reduce(gradient)
        clock = step_times.current()
        if clock is not None:
            clock.read()

    def block(
        work_s: float, measured: bool, count: int, clock: Callable[[], float] = time.perf_counter
    ) -> list[float]:
        with _clock(measured):
            durations = []
            for _ in range(count):
                began = clock()
                step(work_s)
                durations.append(clock() - began)
        return durations

    work_s = max(0.0, o.step_ms / 1e3 - statistics.median(block(0.0, False, 200)))
    times: dict[bool, list[float]] = {False: [], True: []}
    alone: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(o.blocks):
        for measured in (False, True):
            times[measured] += block(work_s, measured, 20)
            alone[measured] += block(0.0, measured, 200, time.thread_time)
    dist.get_world_size = size
    dist.destroy_process_group()
    plain, with_it = (statistics.median(times[measured]) for measured in (False, True))
    parts_s = statistics.median(alone[True]) - statistics.median(alone[False])
    cost = Cost(1e3 * plain, 1e3 * with_it, 1e6 * parts_s, parts_s / plain)
    print("step ms  measured ms  parts us  share")
    print(f"{cost.step_ms:7.3f}  {cost.measured_ms:11.3f}  {cost.parts_us:8.1f}  {cost.share:.3%}")
    return cost


@contextlib.contextmanager
def _clock(measured: bool) -> Iterator[None]:
    from malletrain.training import step_times

    if measured:
        step_times.start()
    try:
        yield
    finally:
        step_times.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--steps", type=int, default=100, help="steps of a job")
    parser.add_argument("--overhead", action="store_true", help="what measuring costs")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    o = parser.parse_args(arguments)
    results = [overhead(o)] if o.overhead else causes(o)
    if o.json:
        load = os.getloadavg()[0]
        rows = [asdict(each) for each in results]
        text = json.dumps({"load": load, "seed": o.seed, "results": rows}, indent=1)
        o.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
