"""A model of what is around a sweep's engine: a daemon whose jobs train as told, an engine that is
killed at any point, and a book that outlives both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import optuna

from malletrain.protocol.messages import JobSpec
from malletrain.sweep.engine import Engine, JobRefused, JobsAway, TooManyJobs, TrialJob
from malletrain.sweep.ledger import Ledger
from malletrain.sweep.spec import parse_sweep

STEPS = 9
TEXT = """
[sweep]
metric = "loss"
trials = {trials}
at_once = {at_once}
{more}
[job]
script = "train.py"
args = ["--snapshot", "s/{{trial}}.pt"]
nodes = "1:4"
[space]
x = {{ low = 0.0, high = 1.0 }}
[sampler]
kind = "random"
seed = 3
[pruner]
kind = "{pruner}"
max_steps = 9
"""


class Killed(BaseException):
    """The engine's process is gone."""


def described(trials=6, at_once=3, pruner="asha", more="", text=TEXT):
    words = text.format(trials=trials, at_once=at_once, pruner=pruner, more=more)
    return parse_sweep(words, "sweep.toml", Path("/"), "s")


def loss(x: float, step: int) -> float:
    """A trial's learning curve: the end depends on x alone."""
    return x + 1.0 / (1 + step)


class WorldJob:
    def __init__(self, name: str, spec: JobSpec) -> None:
        self.id = name
        self.spec = spec
        self.x = float(spec.args[spec.args.index("--x") + 1])
        self.state = "running"
        self.step = 0
        self.weights = [spec.weight]
        self.why = ""
        self.reported: list[tuple[int, float]] = []
        self.value = lambda step: loss(self.x, step)
        """Returns the value that the job reports at a step."""
        self.lingers = False
        """Whether the job ends one turn after the report of its last step."""

    def train(self) -> None:
        if self.state == "running" and self.step == STEPS:
            self.state = "completed"
        elif self.state == "running":
            self.step += 1
            self.reported.append((self.step, self.value(self.step)))
            if self.step == STEPS and not self.lingers:
                self.state = "completed"

    def back_to(self, step: int) -> None:
        """Lose a node: the job continues from its snapshot and reports some values again."""
        self.step = min(step, self.step)


class WorldJobs:
    """The daemon. ``away_at``: the number of the call that it does not answer; ``after``: though it
    carries it out.
    """

    def __init__(self) -> None:
        self.name = "d1"
        self.jobs: dict[str, WorldJob] = {}
        self.submissions = 0
        self.calls = 0
        self.away_at = 0
        self.after = False
        self.refuses = ""
        self.quota = 1000
        """Maximum number of jobs that have not ended."""
        self.lingers = False
        self.waits = 0
        self.under_way_at_ends: list[int] = []
        """How many other jobs had not ended when one did."""
        self.metrics: dict[str, Callable[[float], float]] = {}
        """Metrics beside the loss, of x."""
        self.named: list[str] = []
        """Names of the metrics that a job says it has reported."""

    def _called(self, act):
        self.calls += 1
        if self.calls != self.away_at:
            return act()
        if self.after:
            act()
        raise JobsAway("The daemon is away.")

    def daemon(self):
        return self.name

    def submit(self, spec):
        def act():
            if self.refuses:
                raise JobRefused(self.refuses)
            self.submissions += 1
            for job in self.jobs.values():
                if job.spec.key == spec.key:
                    return job.id
            if sum(job.state == "running" for job in self.jobs.values()) >= self.quota:
                raise TooManyJobs(f"You have {self.quota} jobs.")
            name = f"j{len(self.jobs) + 1}"
            self.jobs[name] = WorldJob(name, spec)
            self.jobs[name].lingers = self.lingers
            return name

        return self._called(act)

    def states(self, ids):
        return self._called(
            lambda: {i: TrialJob(i, self.jobs[i].state if i in self.jobs else "lost") for i in ids}
        )

    def points(self, job, metric, since):
        return self._called(lambda: [p for p in self.jobs[job].reported if p[0] > since])

    def last(self, job, metric):
        reported, x = self.jobs[job].reported, self.jobs[job].x
        if metric in self.metrics:
            return self._called(lambda: self.metrics[metric](x))
        return self._called(lambda: reported[-1][1] if reported else None)

    def names(self, job):
        return self._called(lambda: self.named)

    def node_seconds(self, job):
        return self._called(lambda: 10.0 * self.jobs[job].step if job in self.jobs else 0.0)

    def weigh(self, job, weight):
        return self._called(lambda: self.jobs[job].weights.append(weight))

    def cancel(self, job, why):
        def act():
            if self.jobs[job].state == "running":
                self.jobs[job].why = why
                self.jobs[job].state = "cancelled"
                self._ended()

        return self._called(act)

    def _ended(self):
        self.under_way_at_ends.append(sum(j.state == "running" for j in self.jobs.values()))

    def wait(self, ids, within_s):
        """Something happens at once, to jobs that the engine waits for."""
        self.waits += 1
        assert set(ids) == {j.id for j in self.jobs.values() if j.state == "running"}
        self.train()

    def train(self):
        for job in self.jobs.values():
            running = job.state == "running"
            job.train()
            if running and job.state != "running":
                self._ended()


def job_spec(ledger: Ledger, number: int, values) -> JobSpec:
    return JobSpec(
        ledger.job_name(number),
        "",
        "/train.py",
        "/",
        "python",
        ("--x", str(values["x"])),
        max_nodes=4,
        weight=ledger.sweep.job.weight,
        key=ledger.key(number),
    )


class World:
    """A sweep with its jobs; :meth:`play` plays it to its end, whatever is killed meanwhile."""

    def __init__(self, sweep=None) -> None:
        self.storage = optuna.storages.InMemoryStorage()
        self.jobs = WorldJobs()
        self.now = 0.0
        self.kill_at: set[int] = set()
        self.points = 0
        self.passed: list[str] = []
        Ledger.create(self.storage, sweep or described())
        self.engine = self.started()
        self.now = self.engine.ledger.began

    def started(self) -> Engine:
        """An engine that knows nothing but the book."""
        ledger = Ledger.open(self.storage, "s")
        ledger.ready()
        return Engine(ledger, self.jobs, job_spec, self._point)

    def _point(self, name: str) -> None:
        self.points += 1
        self.passed.append(name)
        if self.points in self.kill_at:
            raise Killed(name)

    def turn(self) -> bool:
        self.now += 1.0
        try:
            return self.engine.turn(self.now)
        except Killed:
            self.engine = self.started()
        except JobsAway:
            pass
        return False

    def play(self, turns: int = 500) -> None:
        for _ in range(turns):
            if self.turn():
                return
            self.jobs.train()
        raise AssertionError(f"not over after {turns} turns: {self.states()}")

    def trials(self):
        return Ledger.open(self.storage, "s").trials()

    def states(self):
        return [t.state.name for t in self.trials()]

    def check_ended(self, trials: int) -> None:
        """Check the invariants of a sweep that is over, after any loss of processes."""
        all_trials = self.trials()
        assert len(all_trials) == trials
        assert not [t for t in all_trials if not t.state.is_finished()], "a trial runs for ever"
        assert {t.state.name for t in all_trials} <= {"COMPLETE", "PRUNED"}, "nobody's job failed"
        bound = [
            t.user_attrs["malletrain:job"] for t in all_trials if "malletrain:job" in t.user_attrs
        ]
        assert sorted(bound) == sorted(set(bound)), "two trials have one job"
        assert len(self.jobs.jobs) == trials, "a trial began twice, or never"
        assert all(job.state != "running" for job in self.jobs.jobs.values()), "a job is forgotten"
        for trial in all_trials:
            job = self.jobs.jobs[trial.user_attrs["malletrain:job"]]
            assert trial.params["x"] == job.x
            if trial.state.name == "COMPLETE":
                assert trial.value == loss(job.x, STEPS)
                assert sorted(trial.intermediate_values) == list(range(1, STEPS + 1))
            for step, value in trial.intermediate_values.items():
                assert value == loss(job.x, step)
