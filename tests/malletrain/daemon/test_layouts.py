"""The search for the best layout of a job's nodes, as the daemon drives it: with a real store, a
clock of its own, and steps of known duration.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jpa.layout import NodeLayout
from malletrain.core.events import LayoutDue, LayoutFound
from malletrain.daemon.jobs.layout_tuner import layout_of
from malletrain.daemon.jobs.layouts import (
    NO_OTHER,
    NO_REPORTS,
    NO_SNAPSHOTS,
    OWN_BATCHES,
    Layouts,
    NodeShape,
    most_processes,
)
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import JobSpec, Progress
from malletrain.rounds.interface import RoundStage
from malletrain.store.records import JobRow, LayoutRow
from malletrain.store.store import Store

FACTS = ({"saves": True, "generation": 1}, {"global_batch": 64, "generation": 1})


class Site:
    """The searches of a daemon over ``store``, and jobs that make steps."""

    def __init__(self, store: Store, cores: int = 2, gpus: int = 0) -> None:
        self.store, self.now, self.fed, self.audited = store, 1000.0, [], []
        self.shape = NodeShape(cores, gpus, "cpu")
        self.layouts = Layouts(
            store,
            SimpleNamespace(now=lambda: self.now),
            SimpleNamespace(
                record=lambda kind, text, **data: self.audited.append((kind, text, data))
            ),
            lambda node: self.shape,
            SimpleNamespace(key_of=lambda spec, node_class: f"{spec.name} {node_class}"),
            self.fed.append,
            60.0,
        )

    def _record(self, kind: EventKind, sentence: str, **data: object) -> None:
        self.audited.append((kind, sentence, data))

    def job(self, job: str, **spec: object) -> SimpleNamespace:
        """A job that gets its first node."""
        options = {"tuned": ("processes",), "nproc_per_node": 0, "max_nodes": 2, **spec}
        row = JobRow(job, "train", "ann", "{}", "running", submitted=1.0)
        self.store.add_job(row)
        run = SimpleNamespace(
            row=row,
            spec=JobSpec("train", "ann", "train.py", "/", "python", **options),
            rounds=SimpleNamespace(
                stage=RoundStage.RUNNING,
                members=("a",),
                target=("a",),
                generation=1,
                outdate=lambda: None,
            ),
            monitor=SimpleNamespace(
                mean_pause=lambda steps: 0.01,
                first_sample=1.0,
                last_sample=1.0,
                silent_for=lambda now: 0.0,
            ),
            tuner=None,
            samples=0.0,
        )
        run.most = self.layouts.max_processes(run, "a")
        return run

    def train(self, run, rate_of, seconds: float, step_s: float = 0.25) -> None:
        """Let the job make progress for some seconds. It gets a layout as soon as it is due."""
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            run.samples += rate_of(layout_of(run.tuner.row)) * step_s
            generation = run.rounds.generation
            record = Progress("j", generation, 0, generation, run.samples, 1, 1, 1.0, self.now)
            if self.layouts.measure(run, record):
                self.layouts.follow(run)
            if self.fed and isinstance(self.fed[-1], LayoutDue):
                self.fed.append("round")
                self.layouts.prepare_round(run)
                run.rounds.generation += 1
                run.samples = 0.0

    def learned(self, run, facts=FACTS) -> None:
        for each in facts:
            self.layouts.learned(run, each)

    def ends(self) -> list[str]:
        return [text for kind, text, _ in self.audited if kind is EventKind.LAYOUT_FOUND]


@pytest.fixture
def store(tmp_path):
    with Store.open(f"sqlite:///{tmp_path}/daemon.db") as opened:
        yield opened


def by_processes(layout: NodeLayout) -> float:
    return 100.0 * layout.processes


def test_the_fastest_layout_is_found_kept_and_used_by_a_later_job(store):
    site = Site(store)
    run = site.job("j1")
    assert run.most == 2
    assert site.layouts.of_round(run).processes == 1
    site.learned(run)
    site.train(run, by_processes, 30.0)
    assert run.tuner.is_settled
    assert site.layouts.of_round(run).processes == 2
    assert LayoutFound("j1", "2 processes × 1 thread") in site.fed
    [end] = site.ends()
    assert end.startswith("The job uses each of its nodes as 2 processes × 1 thread. It is 100%")
    before = len(site.fed)
    site.train(run, by_processes, 10.0)
    assert len(site.fed) == before

    later = site.job("j2")
    assert site.layouts.of_round(later).processes == 2
    assert site.fed[-1] == LayoutFound("j2")
    assert later.tuner.row.source == "j1"
    assert site.ends()[1].endswith("Job j1, of the same kind, found it.")
    assert not site.layouts.measure(later, Progress("j", 1, 0, 1, 9.0, 1, 1, 1.0, site.now))


@pytest.mark.parametrize(
    ("row", "spec", "processes"),
    [
        ({}, {}, 2),
        ({"cores": 4}, {}, 1),  # of another node
        ({"facts": {"global_batch": 3}}, {"max_nodes": 2}, 1),  # 2 × 2 processes
        ({"facts": {"global_batch": 4}}, {"max_nodes": 2}, 2),
        ({"layout": {"processes": 2, "threads": 7, "loader_workers": 0}}, {}, 1),  # no candidate
    ],
)
def test_a_stored_layout_is_used_where_it_fits(store, row, spec, processes):
    site = Site(store)
    stored = {
        "key": "train cpu",
        "node_class": "cpu",
        "cores": 2,
        "layout": {"processes": 2, "threads": 1, "loader_workers": 0},
        "facts": {"global_batch": 64},
        "job": "j0",
        "updated": 1.0,
    }
    store.put_layout(LayoutRow(**{**stored, **row}))
    run = site.job("j1", **spec)
    assert site.layouts.of_round(run).processes == processes
    assert run.tuner.is_settled == (processes == 2)


@pytest.mark.parametrize(
    ("facts", "spec", "end", "tried"),
    [
        ((FACTS[1],), {}, NO_SNAPSHOTS, {1}),
        ((FACTS[0],), {}, OWN_BATCHES, {1}),
        ((*FACTS, {"global_batch": None}), {}, OWN_BATCHES, {1}),
        ((FACTS[0], {"global_batch": 3}), {}, "the global batch has samples (3)", {1}),
        ((FACTS[0], {"global_batch": 3}), {"max_nodes": 1}, "faster than the default", {1, 2}),
        # The smallest batch of several samplers counts.
        ((*FACTS, {"global_batch": 2}), {}, "the global batch has samples (2)", {1}),
    ],
)
def test_what_would_change_the_result_is_not_tried(store, facts, spec, end, tried):
    site = Site(store)
    run = site.job("j1", **spec)
    site.learned(run, facts)
    processes = set()

    def rate_of(layout):
        processes.add(layout.processes)
        return by_processes(layout)

    site.train(run, rate_of, 30.0)
    assert run.tuner.is_settled
    assert processes == tried
    assert end in site.ends()[0]
    is_measured = tried == {1, 2}
    assert (store.layout("train cpu") is not None) == is_measured


def test_threads_are_found_where_the_number_of_processes_stays(store):
    site = Site(store)
    run = site.job("j1", tuned=("processes", "threads"))
    site.learned(run, (FACTS[0],))
    site.train(run, lambda layout: 100.0 / layout.threads, 40.0)
    assert site.layouts.of_round(run).threads == 1
    assert site.layouts.of_round(run).processes == 1
    assert OWN_BATCHES in site.ends()[0]


def test_threads_that_nobody_has_chosen_are_left_to_the_launcher(store):
    run = Site(store).job("j1")
    assert Site(store).layouts.of_round(run).threads == 0
    fixed = Site(store).job("j2", threads=3)
    assert Site(store).layouts.of_round(fixed).threads == 3


def test_a_job_that_asks_for_nothing_has_no_search(store):
    site = Site(store)
    run = site.job("j1", tuned=())
    assert (run.most, run.tuner, site.layouts.of_round(run)) == (0, None, None)
    assert site.fed == []


def test_a_restarted_daemon_goes_on_with_the_search(store):
    site = Site(store)
    run = site.job("j1")
    site.learned(run)
    site.train(run, by_processes, 6.0)
    assert run.tuner.search.layout.processes == 2
    again = Site(store)
    tuner = again.layouts.restore("j1", run.spec)
    assert tuner.search.arms[0] == run.tuner.search.arms[0]
    assert tuner.search.layout == run.tuner.search.layout
    run.tuner, again.now = tuner, site.now
    again.train(run, by_processes, 20.0)
    assert run.tuner.is_settled
    assert again.layouts.of_round(run).processes == 2


def test_the_controller_is_asked_again_until_it_changes_the_layout(store):
    site = Site(store)
    run = site.job("j1")
    site.learned(run)
    site.train(run, by_processes, 4.0)
    site.fed.clear()
    tuner = run.tuner
    tuner.search = tuner.search.failed() if tuner.search.current else tuner.search
    while not tuner.must_change:
        site.now += 0.25
        run.samples += 25.0
        record = Progress("j", run.rounds.generation, 0, 1, run.samples, 1, 1, 1.0, site.now)
        if site.layouts.measure(run, record):
            site.layouts.follow(run)
    for _ in range(12):  # three seconds, in which nothing is done
        site.now += 0.25
        run.samples += 25.0
        record = Progress("j", run.rounds.generation, 0, 1, run.samples, 1, 1, 1.0, site.now)
        if site.layouts.measure(run, record):
            site.layouts.follow(run)
    assert site.fed.count(LayoutDue("j1")) in (3, 4)


def test_nothing_is_measured_while_the_nodes_change(store):
    site = Site(store)
    run = site.job("j1")
    site.learned(run)
    for stage, target in ((RoundStage.WARMING, ("a",)), (RoundStage.RUNNING, ("a", "b"))):
        run.rounds.stage, run.rounds.target = stage, target
        site.train(run, by_processes, 20.0)
    assert run.tuner.search.default.count == 0


def test_a_layout_in_which_the_workers_fail_gives_way(store):
    site = Site(store)
    run = site.job("j1")
    site.learned(run)
    assert not site.layouts.failed(run, "It failed.")  # the default: it counts
    site.train(run, by_processes, 6.0)
    assert site.layouts.of_round(run).processes == 2
    assert site.layouts.failed(run, "There is no memory left.")
    assert run.tuner.search.layout.processes == 1
    assert site.audited[-1][0] in (EventKind.LAYOUT_FAILED, EventKind.LAYOUT_FOUND)
    site.layouts.prepare_round(run)
    assert site.layouts.of_round(run).processes == 1
    assert not site.layouts.failed(run, "It failed.")


@pytest.mark.parametrize(("first_sample", "gives_way"), [(None, True), (5.0, False)])
def test_a_stored_layout_gives_way_if_it_never_worked(store, first_sample, gives_way):
    site = Site(store)
    site.learned(first := site.job("j1"))
    site.train(first, by_processes, 30.0)
    run = site.job("j2")
    run.monitor.first_sample = first_sample
    assert site.layouts.failed(run, "It failed.") == gives_way
    assert (run.tuner.search.layout.processes == 1) == gives_way


def test_a_script_without_reports_ends_the_search(store):
    site = Site(store)
    run = site.job("j1")
    run.monitor.last_sample = None
    assert not site.layouts.is_silent(run)
    run.monitor.silent_for = lambda now: 1000.0
    assert site.layouts.is_silent(run)
    site.layouts.give_up(run)
    assert NO_REPORTS in site.ends()[0]
    assert LayoutFound("j1") in site.fed
    assert not site.layouts.is_silent(run)


@pytest.mark.parametrize(
    ("facts", "nodes", "most"),
    [
        ({}, 1, None),
        ({"global_batch": 64}, 4, 16),
        ({"global_batch": 64, "own_batches": True}, 4, None),
        ({"global_batch": 3}, 4, 1),
        ({"global_batch": "many"}, 4, None),
    ],
)
def test_most_processes(facts, nodes, most):
    spec = JobSpec("train", "ann", "train.py", "/", "python", max_nodes=nodes)
    assert most_processes(spec, facts) == most


@pytest.mark.parametrize(("cores", "gpus"), [(16, 2), (1, 0)])
def test_a_node_with_one_layout_only_ends_the_search_at_once(store, cores, gpus):
    site = Site(store, cores, gpus)
    run = site.job("j1")
    site.learned(run)
    site.train(run, by_processes, 5.0)
    assert run.tuner.is_settled
    assert NO_OTHER in site.ends()[0]
    assert store.layout("train cpu") is None
