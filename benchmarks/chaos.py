"""Random faults over jobs of every kind on the embedded cluster: is a job lost, or run twice, does
a lease leak, is a process left, is a sample counted twice or never?

    python -m benchmarks.chaos [--faults 1000] [--jobs 30] [--nodes 4] [--seed N] [--minutes 300]
    [--kinds restart,live,sharded,service] [--hasty 0.2] [--keep FOLDER] [--json]

The faults: SIGKILL and SIGSTOP of daemon, agent, supervisor, fork server, launcher and worker;
connections to the daemon cut, delayed and half-open; preemption with notice and (a killed agent)
without; the main scheduler does not answer; the disk is full. A daemon that ended is started again,
as a service manager does it. ``--running`` jobs are in plans at a time; each is told to end when it
has had its part of the faults, and the next one begins. After a fault, recovered is when the daemon
answers and every job that ran has made progress again; one in five (``--hasty``) comes before that.

Exit status 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import end_in_order
from benchmarks.chaos_jobs import KINDS, ChaosJob, script
from benchmarks.chaos_site import ChaosSite, Faults
from malletrain.client import ClientError
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import JobView

HANG_S = 400.0
"""Seconds without recovery that count as a job lost."""
HASTY = 0.2
"""Part of the faults that come before the one before is recovered from, unless said otherwise."""
OVER = ("completed", "failed", "cancelled")


class ChaosError(RuntimeError):
    """A promise was broken at once: a job hangs, or has ended by itself."""


class Chaos:
    """One run."""

    def __init__(
        self, site: ChaosSite, dice: random.Random, kinds: Sequence[str], count: int, hasty: float
    ) -> None:
        self.site, self.faults, self._hasty = site, Faults(site, dice), hasty
        self._dice = dice
        self.struck: Counter[str] = Counter()
        self.recovered_s: list[float] = []
        self.jobs = [self._submit(number, kinds[number % len(kinds)]) for number in range(count)]

    def _submit(self, number: int, kind: str) -> ChaosJob:
        folder = self.site.work / f"{number}-{kind}"
        folder.mkdir()
        path = folder / "job.py"
        path.write_text(script(kind))
        spec = JobSpec(
            *(f"{kind}{number}", "", str(path), str(folder), sys.executable),
            max_nodes=2,
            nproc_per_node=1,
            profile=False,
            mode={"restart": "restart", "service": "service"}.get(kind, "live"),
            curve={"1": 1.0, "2": 1.1} if kind == "service" else None,
        )
        with self.site.client() as client:
            return ChaosJob(client.submit(spec).id, kind, folder)

    # --- looking ---

    def views(self) -> dict[str, JobView] | None:
        """All jobs; None while the daemon does not answer."""
        self.site.look_after_daemon()
        with contextlib.suppress(ClientError, OSError, ValueError), self.site.client() as client:
            return {view.id: view for view in client.jobs(ended=1000)}
        return None

    def wait(self, since: dict[str, float], hasty_s: float | None) -> None:
        """Wait until each of these jobs has more samples than it had, or for ``hasty_s``."""
        began = time.monotonic()
        lasting = True
        while True:
            lasting = self.faults.look()
            if hasty_s is not None and time.monotonic() - began > hasty_s:
                return
            views = self.views()
            if views is not None:
                self._none_ended_badly(views)
                late = [job for job, at in since.items() if not self._progressed(views[job], at)]
                if not late and not lasting:
                    self.recovered_s.append(time.monotonic() - began)
                    return
                if time.monotonic() - began > HANG_S:
                    states = {job: (views[job].state, views[job].reason) for job in late}
                    raise ChaosError(f"Not recovered from within {HANG_S:g} s: {states}.")
            elif time.monotonic() - began > HANG_S:
                raise ChaosError(f"The daemon has not answered for {HANG_S:g} s.")
            time.sleep(0.1)

    def _none_ended_badly(self, views: dict[str, JobView]) -> None:
        lost = [job for job in self.jobs if job.id not in views]
        if lost or len(views) != len(self.jobs):
            raise ChaosError(f"{len(views)} jobs are known of {len(self.jobs)}; not {lost}.")
        for view in views.values():
            if view.state in ("failed", "cancelled"):
                raise ChaosError(f"Job {view.name} is {view.state}: {view.reason}")

    def _progressed(self, view: JobView, samples: float) -> bool:
        """Whether a job goes on: it is over, or has done more than these samples; a service, that
        it is there.
        """
        if view.state in OVER:
            return True
        service = any(job.id == view.id and job.kind == "service" for job in self.jobs)
        return view.state == "running" and bool(view.nodes) and (service or view.samples > samples)

    # --- doing ---

    def run(self, faults: int, limit_s: float, say: Callable[[str], None]) -> None:
        """Strike so often, and have all jobs end."""
        begun, each, ended = time.monotonic(), max(1.0, faults / len(self.jobs)), 0
        self.wait({}, None)
        while sum(self.struck.values()) < faults and time.monotonic() - begun < limit_s:
            views = self.views()
            if views is None:
                self.wait({}, None)
                continue
            at = {v.id: v.samples for v in views.values() if v.state == "running" and v.nodes}
            if not at:
                self.wait_for_work()
                continue
            kind = self.faults.strike()
            if not kind:
                continue
            self.struck[kind] += 1
            hasty = self._dice.random() < self._hasty
            self.wait(at, self._dice.uniform(0.0, 1.0) if hasty else None)
            count = sum(self.struck.values())
            if count >= each * (ended + 1) and ended < len(self.jobs) - 1:
                running = [job for job in self.jobs if views[job.id].state not in OVER]
                unended = [job for job in running if not (job.folder / "enough").exists()]
                if unended:
                    unended[0].end()
                    ended += 1
            say(f"{count} faults, {time.monotonic() - begun:.0f} s, last: {kind}")
        self.faults.end()

    def wait_for_work(self) -> None:
        """Until some job runs."""
        began = time.monotonic()
        while time.monotonic() - began < HANG_S:
            self.faults.look()
            views = self.views() or {}
            if any(v.state == "running" and v.nodes for v in views.values()):
                return
            time.sleep(0.1)
        raise ChaosError(f"No job runs for {HANG_S:g} s.")

    def finish(self, patience_s: float, say: Callable[[str], None]) -> dict[str, Any]:
        """Let all jobs end in peace, and count."""
        for job in self.jobs:
            job.end()
        quiet, before = time.monotonic(), -1
        while True:
            views = self.views() or {}
            over = sum(v.state in OVER for v in views.values())
            if over == len(self.jobs):
                break
            if over != before:
                before, quiet = over, time.monotonic()
                say(f"{over} of {len(self.jobs)} jobs are over")
            if time.monotonic() - quiet > patience_s:
                break
            time.sleep(0.2)
        states = Counter(views[job.id].state for job in self.jobs)
        done = [job for job in self.jobs if views[job.id].state == "completed"]
        accounts = [job.account() for job in done]
        return {
            "jobs": len(self.jobs),
            "jobs_lost": len(self.jobs) - len(done),
            "jobs_known": len(views),
            "states": dict(states),
            "samples": sum(a["samples"] for a in accounts),
            "samples_twice": sum(a["twice"] for a in accounts),
            "samples_never": sum(a["never"] for a in accounts),
            "steps_done_again": sum(a["replayed"] for a in accounts),
            "leases_leaked": self._leaked(patience_s),
        }

    def _leaked(self, patience_s: float) -> int:
        """Leases that are still held when nobody has use for them."""
        began = time.monotonic()
        while time.monotonic() - began < patience_s:
            self.site.look_after_daemon()
            with contextlib.suppress(ClientError, OSError):
                if not self.site.held() and not self.site.known():
                    return 0
            time.sleep(0.2)
        return len(self.site.held())


def quantile(values: Sequence[float], q: float) -> float:
    """Of some values; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def run(
    root: Path,
    faults: int,
    jobs: int,
    nodes: int,
    running: int,
    seed: int,
    kinds: Sequence[str],
    limit_s: float,
    say: Callable[[str], None] = lambda text: None,
    hasty: float = HASTY,
) -> dict[str, Any]:
    """One run below ``root``: what was done, and what came of it. Raises ChaosError."""
    site = ChaosSite(root, nodes, running)
    left = 0
    begun = time.monotonic()
    try:
        site.start_daemon()
        chaos = Chaos(site, random.Random(seed), kinds, jobs, hasty)
        try:
            chaos.run(faults, limit_s, say)
        finally:
            chaos.faults.end()
        struck_s = time.monotonic() - begun
        found = chaos.finish(HANG_S, say)
    finally:
        try:
            site.close()
        except AssertionError as error:
            print(error, file=sys.stderr)
            left = 1
    times = chaos.recovered_s
    return {
        "seed": seed,
        "faults": sum(chaos.struck.values()),
        "seconds": round(struck_s),
        "struck": dict(chaos.struck.most_common()),
        "daemon_started": site.starts + 1,
        **found,
        "processes_left": left,
        "recovered": len(times),
        "recovered_median_s": round(statistics.median(times), 1) if times else 0.0,
        "recovered_p99_s": round(quantile(times, 0.99), 1),
        "recovered_worst_s": round(max(times, default=0.0), 1),
    }


BROKEN = (*("jobs_lost", "leases_leaked", "processes_left", "samples_twice", "samples_never"),)


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--running", type=int, default=3)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--hasty", type=float, default=HASTY)
    parser.add_argument("--minutes", type=float, default=300.0)
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.keep and args.keep.exists():
        parser.error(f"--keep works in a new folder, and {args.keep} is there; name another one.")
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        if args.keep:
            args.keep.mkdir(parents=True, mode=0o700)
        root = args.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mt-chaos-"))
        )
        try:
            row = run(
                *(root, args.faults, args.jobs, args.nodes, args.running, seed),
                args.kinds.split(","),
                args.minutes * 60,
                lambda text: print(text, file=sys.stderr, flush=True),
                args.hasty,
            )
        except ChaosError as error:
            words = (root / "daemon.log").read_text(errors="replace").splitlines()[-60:]
            print("\n".join(words), file=sys.stderr)
            print(f"seed {seed}: {error}", file=sys.stderr)
            return 1
    row["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(row) if args.json else row)
    return 1 if any(row[name] for name in BROKEN) else 0


if __name__ == "__main__":
    sys.exit(main())
