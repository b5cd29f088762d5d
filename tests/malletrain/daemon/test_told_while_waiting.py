"""What waiting jobs are told once a job of another size has run: by the daemon, over its database,
as by the simulator.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from malletrain.config.model import parse_config
from malletrain.core.commands import KeepScalingModel
from malletrain.core.controller import Controller
from malletrain.core.events import JobCompleted, JobSubmitted, RescaleCostMeasured
from malletrain.daemon.site.settings import controller_settings
from malletrain.protocol import messages
from malletrain.sim.model_jobs import CostModel, Reports, SimRun
from malletrain.sim.workloads import SimJob
from malletrain.store.records import JobRow, ProfileRow
from malletrain.store.store import Store
from malletrain.waits import time_limit
from tests.malletrain.daemon.engines import make_engine
from tests.malletrain.daemon.test_curves import MEASURED
from tests.waiting import PATIENCE_S

LEARNED = replace(MEASURED, result="measured")
SIZES = {"j1": 1e6, "j2": 1.2e6, "j3": 1e9, "j4": None, "j5": 4e6}
"""j1 is the one that ran; j3 is far from it, and of j4 nobody said anything."""


class Told:
    """An engine over the database in ``folder``, and what it feeds its controller."""

    def __init__(self, folder):
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text("print(1)\n")
        self.store = Store.open(f"sqlite:///{folder}/m.db")
        self.config = parse_config(
            f'[daemon]\nstate_dir = "{folder}/state"\n[scheduler]\nkind = "local"\n'
            "[jobs]\nmax_running = 4\n"
        )

    def submit(self, job, parameters, **more):
        """Store a job; return its row and its specification."""
        job_spec = messages.JobSpec(
            job, "ada", str(self.script), "/", "python", (f"--layers={job}",), min_nodes=1,
            max_nodes=4, goal="throughput", parameters=parameters, **more,
        )  # fmt: skip
        row = JobRow(job, job, "ada", msgspec.json.encode(job_spec).decode(), "queued")
        return self.store.add_job(row), job_spec

    def has_run(self, job):
        """Its profile is over, and its workers said how large its model is."""
        learned = LEARNED.to_dict()
        size = SIZES.get(job, 3.8e6)
        self.store.put_profile(ProfileRow(job, f"key {job}", "default", learned, parameters=size))

    def run(self, do):
        """``do(engine)`` within a loop, on an engine that has taken in hand what is stored."""

        async def live():
            engine = make_engine(self.config, self.store)
            engine.state.controller.hold(engine.state.clock.now() + 3600.0)
            engine.jobs.restore()
            try:
                return await do(engine)
            finally:
                engine.close()

        return asyncio.run(live())


def prior(engine, job):
    """What the job believes of others, once nothing more is due."""
    return engine.state.controller.jobs[job].scaling.curve.current.prior


async def delivery(engine):
    """Wait until the waiting jobs have their new priors."""
    async with time_limit(PATIENCE_S):
        while engine.state.curves.news:
            await asyncio.sleep(0.001)
            if engine.transactions.failed.done():
                engine.transactions.failed.result()


@pytest.fixture
def world(tmp_path):
    """j1, which has run, and four jobs that wait."""
    world = Told(tmp_path)
    for job, parameters in SIZES.items():
        world.submit(job, parameters)
    world.has_run("j1")
    yield world
    world.store.close()


def learns(engine, job="j1"):
    """A job that has run learns something more, so that its curve is kept."""
    engine.transactions.feed(RescaleCostMeasured(job, "up", 3.0))


def test_a_waiting_job_is_told_what_a_similar_one_showed_while_it_waited(world):
    async def day(engine):
        assert prior(engine, "j2") is None
        learns(engine)
        assert prior(engine, "j2") is None, "in a step of its own"
        await delivery(engine)
        priors = {job: prior(engine, job) for job in SIZES}
        assert 300 < priors["j2"].points[-1][1] < 340
        assert "job j1" in priors["j2"].source
        assert [job for job, each in priors.items() if each] == ["j2"], (
            "j3 is far, j4 said nothing, j5 is not among the first four"
        )
        assert not engine.state.controller.jobs["j2"].scaling.profiled
        assert world.store.profile("j2").learned, "stored"
        engine.transactions.feed(JobCompleted("j1"))
        await delivery(engine)
        assert prior(engine, "j5") is not None, "now it is"

    world.run(day)


def test_who_waits_when_the_daemon_starts_again_is_told_too(world):
    async def killed(engine):
        learns(engine)

    async def again(engine):
        return prior(engine, "j2"), prior(engine, "j5")

    world.run(killed)
    assert not world.store.profile("j2").learned, "the daemon ended before it told it"
    prior_of_j2, prior_of_j5 = world.run(again)
    assert prior_of_j2 is not None
    assert prior_of_j5 is not None
    assert world.run(again) == (prior_of_j2, prior_of_j5)


def test_after_a_restart_curves_that_come_later_are_told(world):
    async def nothing(engine):
        pass

    async def day(engine):
        learns(engine)
        await delivery(engine)
        return prior(engine, "j2")

    world.run(nothing)
    assert world.run(day) is not None


def test_what_is_told_is_not_replaced_and_a_given_curve_stays(world):
    world.submit("j6", 1.3e6, curve={"1": 5.0, "4": 6.0})
    world.submit("j7", 3.8e6)
    world.has_run("j7")

    async def day(engine):
        engine.transactions.feed(JobCompleted("j3"))
        engine.transactions.feed(JobCompleted("j4"))
        learns(engine)
        await delivery(engine)
        first = prior(engine, "j2"), prior(engine, "j5")
        learns(engine, "j7")
        await delivery(engine)
        assert (prior(engine, "j2"), prior(engine, "j5")) == first
        assert engine.state.controller.jobs["j6"].curve.at(4) == 6.0
        assert prior(engine, "j6") is None

    world.run(day)


def test_the_simulator_tells_the_same(world):
    """The same jobs and the same stored curve give each job the same prior."""

    async def day(engine):
        priors = []
        for happens in (learns, lambda engine: engine.transactions.feed(JobCompleted("j1"))):
            happens(engine)
            await delivery(engine)
            priors.append({job: prior(engine, job) for job in SIZES})
        return priors

    jobs = {
        job: SimJob(job, 1, 4, 1e6, MEASURED.bid_curve(range(1, 5), 0.0), None, parameters=size)
        for job, size in SIZES.items()
    }
    runs = {name: SimRun(job, job.rates(), CostModel()) for name, job in jobs.items()}
    reports, controller = Reports(0, sized=True), Controller(controller_settings(world.config))
    for job in jobs.values():
        controller.handle(JobSubmitted(job.name, 1, 4), 0.0)
    priors = []
    for event in (RescaleCostMeasured("j1", "up", 3.0), JobCompleted("j1")):
        controller.handle(event, 1.0)
        if isinstance(event, RescaleCostMeasured):
            reports.keep(jobs["j1"], KeepScalingModel("j1", LEARNED))
        else:
            reports.news = True
        for news_event in reports.for_waiting(controller, runs):
            controller.handle(news_event, 1.0)
        priors.append({job: controller.jobs[job].scaling.curve.current.prior for job in SIZES})
    assert world.run(day) == priors
    assert [sum(each is not None for each in prior_of.values()) for prior_of in priors] == [1, 2]
