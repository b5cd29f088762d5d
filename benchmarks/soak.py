"""Many random changes of a live job's nodes on the embedded cluster: checks that the job does not
hang or fail, loses no sample, and that its states stay equal.

    python -m benchmarks.soak [--changes 500] [--nodes 4] [--seed 0] [--minutes 20] [--json]

At random moments: a job of higher value takes nodes (a planned shrink) or ends (a planned growth),
a node is preempted with notice, agents and workers are killed (SIGKILL), one or several at once,
all but one, and again while the job still rescales. Lost nodes return as new gaps by themselves, so
that the job grows again. A change is a round in which the job trained. The records of every worker
after every step are examined at the end (benchmarks/soak_account.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import end_in_order
from benchmarks.rescale_modes import Live
from benchmarks.soak_account import examine, records
from malletrain.client import Connection
from malletrain.protocol import messages
from tests.last_words import tail

SCRIPT = Path(__file__).with_name("train_soak.py")
HANG_S = 180.0
"""Time without a step that counts as a hang, seconds. If all nodes are killed at once, their
processes start again with all imports.
"""
START_S = 180.0
"""The same for the first step, with nothing in caches."""
SERVICE = """
from malletrain import membership
group = membership.join("nowhere:1")
for change in group.changes():
    if change.kind == "leaving" and change.member == group.me:
        group.report_drained()
"""
"""Takes nodes without using them: a job that needs no torch."""


class Soak(Live):
    """The site and its one training."""

    script = SCRIPT
    # if all its workers are killed at once, the failure looks like one of the script
    jobs = "max_tries = 10000"
    # a node whose workers are killed while they join is not to blame either
    allocation = 'rejected_for = "5 s"'

    def __init__(self, root: Path, nodes: int, arguments: list[str]) -> None:
        super().__init__(root, nodes, arguments)
        (root / "blocker.py").write_text(SERVICE)

    def shrink(self, by: int) -> None:
        argv = ("blocker", "", str(self.root / "blocker.py"), str(self.root), sys.executable)
        spec = messages.JobSpec(
            *argv,
            min_nodes=by,
            max_nodes=by,
            weight=1e6,
            mode="service",
            profile=False,
            curve={str(by): 1.0},
        )
        with Connection.of(self.state) as client:
            self.blockers.append(client.submit(spec).id)

    def state_of_job(self) -> str:
        with Connection.of(self.state) as client:
            return str(client.job(self.job).job.state)

    def agents(self) -> list[psutil.Process]:
        """Return the agents of all nodes."""
        return self._below(lambda p: "malletrain.agent" in p.cmdline(), recursive=False)

    def workers(self) -> list[psutil.Process]:
        """Return the training's processes: forks of the fork server, named after the script."""
        return self._below(
            lambda p: p.name() == SCRIPT.name[:15] and p.status() != psutil.STATUS_ZOMBIE,
            recursive=True,
        )

    def _below(
        self, matches: Callable[[psutil.Process], bool], recursive: bool
    ) -> list[psutil.Process]:
        processes = []
        for process in psutil.Process(self.cluster.pid).children(recursive=recursive):
            with contextlib.suppress(psutil.Error):
                if matches(process):
                    processes.append(process)
        return processes


class Progress:
    """The records of the workers so far, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0
        self.generations: set[int] = set()
        self._read: dict[Path, int] = {}

    def look(self) -> None:
        """Read new lines."""
        for path in self.folder.glob("steps-*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in data[:whole].splitlines():
                with contextlib.suppress(ValueError):
                    self.generations.add(json.loads(line)["generation"])
                    self.steps += 1


STRIKES = {
    "worker": 12,
    "several workers": 4,
    "all but one": 1,
    "all": 0.2,
    "agent": 1.5,
    "several": 1,
    "notice": 1.5,
    "shrink or grow": 1.5,
}
"""Name → function and relative frequency of each fault. A worker returns in tenths of a second, an
agent in seconds.
"""
FEWEST = 2
"""Minimum number of workers for most faults: a job without workers occurs often enough."""


def strike(soak: Soak, dice: random.Random) -> str:
    """Inject one random fault. Return its name."""
    kind = dice.choices(list(STRIKES), list(STRIKES.values()))[0]
    agents, workers = soak.agents(), soak.workers()
    if kind == "shrink or grow":
        if soak.blockers:
            soak.grow(0)
            return "grow"
        soak.shrink(dice.randint(1, max(1, soak.nodes - 2)))
        return "shrink"
    victims: list[tuple[psutil.Process, int]] = []
    if len(workers) < FEWEST and dice.random() < 0.5:
        return "spared"
    if kind == "worker" and workers:
        victims = [(dice.choice(workers), signal.SIGKILL)]
    elif kind in ("notice", "agent") and agents:
        victims = [(dice.choice(agents), signal.SIGTERM if kind == "notice" else signal.SIGKILL)]
    elif kind in ("several", "several workers"):
        pool = [*agents, *workers] if kind == "several" else workers
        victims = [
            (p, signal.SIGKILL) for p in dice.sample(pool, min(dice.randint(2, 3), len(pool)))
        ]
    elif kind == "all but one":
        victims = [(p, signal.SIGKILL) for p in dice.sample(workers, max(0, len(workers) - 1))]
    elif kind == "all":
        victims = [(p, signal.SIGKILL) for p in workers]
    for process, number in victims:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
    return kind


class SoakError(RuntimeError):
    """The job hung or ended."""


def drive(
    soak: Soak,
    folder: Path,
    changes: int,
    seed: int,
    limit_s: float,
    every_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Inject faults until the job has trained in ``changes`` rounds, then let it end. Raises
    SoakError.
    """
    dice, struck, progress = random.Random(seed), Counter[str](), Progress(folder)
    began = moved = time.monotonic()
    at, longest, next_strike, since = 0, 0.0, 0.0, 0
    while len(progress.generations) < changes and time.monotonic() - began < limit_s:
        time.sleep(0.05)
        progress.look()
        now = time.monotonic()
        if progress.steps != at:
            longest = max(longest, now - moved if at else 0.0)
            at, moved = progress.steps, now
        if now - moved > (HANG_S if at else START_S):
            for worker in soak.workers():
                worker.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            raise SoakError(
                f"No step for {HANG_S:g} s after {len(progress.generations)} changes; the job "
                f"is {soak.state_of_job()}."
            )
        # The job gets time to train again, except for some faults that come while it still
        if not at or now < next_strike or since == at:
            continue
        kind = strike(soak, dice)
        struck[kind] += 1
        # Now and then the next fault comes while the job still rescales.
        hasty = dice.random() < 0.2
        struck["during a rescale"] += hasty
        since = 0 if hasty else at
        next_strike = now + (dice.uniform(0.0, 0.3) if hasty else dice.uniform(0.5, 1.5) * every_s)
        state = soak.state_of_job()
        if state in ("failed", "completed", "cancelled"):
            raise SoakError(f"The job is {state} after {len(progress.generations)} changes.")
        say(f"{len(progress.generations)} changes, {now - began:.0f} s, last: {kind}")
    if soak.blockers:
        soak.grow(0)
    target, moved = progress.steps + 20, time.monotonic()
    while progress.steps < target:
        if time.monotonic() - moved > HANG_S:
            raise SoakError(
                f"No step for {HANG_S:g} s at the end; the job is {soak.state_of_job()}."
            )
        time.sleep(0.05)
        at = progress.steps
        progress.look()
        moved = time.monotonic() if progress.steps != at else moved
    (folder / "stop").touch()
    deadline = time.monotonic() + HANG_S
    while (state := soak.state_of_job()) not in ("completed", "failed"):
        if time.monotonic() > deadline:
            raise SoakError(f"The job does not end; it is {state}.")
        time.sleep(0.1)
    if state != "completed":
        raise SoakError(f"The job is {state} in the end.")
    return {
        "seconds": round(time.monotonic() - began),
        "longest_silence_s": round(longest, 2),
        "strikes": dict(struck),
    }


def run(
    root: Path,
    changes: int,
    nodes: int = 4,
    seed: int = 0,
    limit_s: float = 1200.0,
    every_s: float = 1.5,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run one soak in ``root``. Return its settings, and the findings in the records of the
    workers. Raises SoakError.
    """
    folder = root / "work"
    folder.mkdir()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(SCRIPT.parents[1]), before))
    )  # for the workers
    soak = Soak(root, nodes, [str(folder)])
    try:
        soak.start()
        done = drive(soak, folder, changes, seed, limit_s, every_s, say)
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
        soak.stop()
    return {**done, **examine(records(folder))}


def last_words(root: Path) -> str:
    """Return the ends of the logs of the daemon and the workers."""
    logs = sorted((root / "state" / "logs").rglob("*.log"), key=lambda path: path.stat().st_mtime)[
        -12:
    ]
    stacks = [path for path in (root / "work").glob("stack-*") if path.stat().st_size]
    parts = [f"--- {path}\n{tail(path)}" for path in (*logs, *stacks, root / "daemon.log")]
    return "\n".join(parts)


def main() -> int:
    """Run, and print one line and, with --json, one object. Exit code 1 if a guarantee was
    broken.
    """
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changes", type=int, default=500)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--every-s", type=float, default=1.5, help="seconds between strikes, on average"
    )
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.keep:
            args.keep.mkdir(parents=True)
        root = args.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mt-soak-"))
        )
        try:
            row = run(
                root,
                args.changes,
                args.nodes,
                args.seed,
                args.minutes * 60,
                args.every_s,
                lambda text: print(f"\r{text}  ", end="", file=sys.stderr, flush=True),
            )
        except SoakError as error:
            print(f"\n{last_words(root)}\n{error}", file=sys.stderr)
            return 1
    print(file=sys.stderr)
    row["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(row) if args.json else row)
    return 1 if row["broken"] or row["rounds_trained"] < args.changes else 0


if __name__ == "__main__":
    sys.exit(main())
