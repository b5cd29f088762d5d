"""The search for the best layout of a node, in real jobs in restart mode: no sample is lost or
trained on twice, whatever happens meanwhile, and the layout is stored for later jobs.

Each sample has a parameter of its own, of which a step takes 1/(global batch): what is left of it
says how often the sample was trained on. A step lasts as long as a process has samples, so that two
processes are twice as fast as one. With the argument ``slower`` they are four times as fast, which
a busy machine shows, too.
"""

from __future__ import annotations

import json
import signal

import pytest

from malletrain.launch.cores import allowed_cores
from tests.integration.embedded import site

pytest.importorskip("torch")

from tests.torch_versions import trains_shards

pytestmark = pytest.mark.slow

BATCH = 8
"""Global batch size of the scripts."""

SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
import malletrain

SAMPLES, BATCH = 100_000, 8
alone = os.environ["LOCAL_WORLD_SIZE"] == "1"
SAMPLE_S = 0.1 if alone and "slower" in sys.argv else 0.05
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

class Tally(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, numbers):
        return self.parameter[numbers].mean()

model, sharded = Tally(), "sharded" in sys.argv
if sharded:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
BATCHES = {"own": dict(batch_size=8)}.get(sys.argv[1], dict(global_batch_size=BATCH))
sampler = malletrain.ElasticSampler(SAMPLES, **BATCHES)
snapshot = malletrain.Snapshot(model=model, sampler=sampler, every_s=2)
snapshot.restore()
if "fails" in sys.argv and size > 1:
    sys.exit("no room for two")
net = model if sharded else torch.nn.parallel.DistributedDataParallel(model)
loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=sampler)
if rank == 0:
    with open("layouts", "a") as file:
        threads, loaders = torch.get_num_threads(), loader.num_workers
        file.write(f"{size} {os.environ['LOCAL_WORLD_SIZE']} {threads} {loaders}\\n")
stop = torch.zeros(1)
for epoch in sampler.epochs(1):
    for numbers in loader:
        optimizer.zero_grad()
        (net(numbers) * sampler.loss_weight).backward()
        optimizer.step()
        time.sleep(SAMPLE_S * len(numbers))  # what a step takes
        sampler.advance()
        malletrain.report(len(numbers))
        snapshot.step()
        stop.fill_(os.path.exists("enough"))
        dist.all_reduce(stop)
        if stop.item():
            break
    break
snapshot.save()
trained = model.parameter.detach()
trained = trained.full_tensor() if sharded else trained
if rank == 0:
    times = torch.round(-trained * BATCH).to(torch.int64)
    record = dict(
        position=sampler.state_dict()["position"],
        once=int((times == 1).sum()),
        more=int((times > 1).sum()),
    )
    with open("trained", "w") as file:
        json.dump(record, file)
"""
GROUP = """dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""
LIVE_SCRIPT = (
    SCRIPT.partition("BATCHES =")[0].replace(GROUP, "")
    + """
from malletrain import elastic
sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler, snapshot="live.pt",
                  snapshot_every_s=600)
net = run.ddp(model)
loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=sampler)
if run.rank == 0:
    with open("layouts", "a") as file:
        threads, loaders = torch.get_num_threads(), loader.num_workers
        processes = os.environ["LOCAL_WORLD_SIZE"]
        file.write(f"{run.world_size} {processes} {threads} {loaders}\\n")
for epoch in sampler.epochs(1):
    for numbers in run.batches(loader):
        with run.step():
            optimizer.zero_grad()
            (net(numbers) * run.loss_weight).backward()
            optimizer.step()
            time.sleep(SAMPLE_S * len(numbers))  # what a step takes
        if os.path.exists("enough"):
            run.request_stop()
    break
if run.rank == 0:
    times = torch.round(-model.parameter.detach() * BATCH).to(torch.int64)
    record = dict(
        position=sampler.state_dict()["position"],
        once=int((times == 1).sum()),
        more=int((times > 1).sum()),
    )
    with open("trained", "w") as file:
        json.dump(record, file)
"""
)
AUTO = {"nproc_per_node": 0, "tuned": ("processes",), "profile": False}
LONG = 'enabled = false\nlayout_time = "1 h"'
"""A search ends once it has measured enough, however busy the machine is."""
FAST = "2 processes × 1 thread"
needs_two_cores = pytest.mark.skipif(allowed_cores() != 2, reason="written for two cores")


def submit(embedded, *args, **options):
    live = options.get("mode") == "live"
    script = embedded.script("tally.py", LIVE_SCRIPT if live else SCRIPT)
    return embedded.submit(script, *(args or ("global",)), **{**AUTO, **options})


def layouts(embedded):
    """(world size, processes on a node, threads, loader workers) of each round."""
    return [
        tuple(map(int, x.split())) for x in (embedded.work / "layouts").read_text().split("\n") if x
    ]


def end_of_search(embedded, job):
    embedded.until(lambda: embedded.events("layout-found", job), "the layout is found")
    [event] = embedded.events("layout-found", job)
    return event


def ended(embedded, job, *, unsaved_steps=0):
    """End the job; every sample up to the sampler's position was trained on exactly once.

    A change in a round's first step can come before a worker has said that it saves on request. The
    step is made again from the snapshot before it, and the workers that had reported it are counted
    twice: at most one global batch for each of ``unsaved_steps``.
    """
    (embedded.work / "enough").touch()
    embedded.until_state(job, "completed", "failed")
    assert embedded.job(job).state == "completed", embedded.show(job).failure
    record = json.loads((embedded.work / "trained").read_text())
    assert record["more"] == 0
    assert record["once"] == record["position"] > 0
    assert 0 <= embedded.job(job).samples - record["position"] <= unsaved_steps * BATCH
    return record


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """Two nodes for tests that kill nothing."""
    with site(tmp_path_factory.mktemp("layouts") / "site", nodes=2, profiling=LONG) as made:
        yield made


@needs_two_cores
def test_a_search_loses_no_sample_and_a_later_job_begins_with_what_it_found(shared):
    job = submit(shared, "global", "slower", nodes=(2, 2))
    event = end_of_search(shared, job)
    assert event.data["layout"] == {"processes": 2, "threads": 1, "loader_workers": 0}
    assert event.data["default"] == {"processes": 1, "threads": 2, "loader_workers": 0}
    assert FAST in event.sentence
    rates = {tuple(rate[:2]): rate[3] for rate in event.data["rates"]}
    assert rates[2, 1] > rates[1, 2]
    before = shared.job(job).samples
    shared.until_samples(job, before + 100)
    view = shared.show(job).layout
    assert (view.layout, view.searching, view.source) == (FAST, False, "")
    assert [tried.result for tried in view.tried] == ["slower, default", "chosen"]
    assert layouts(shared)[0] == (2, 1, 2, 0)
    assert layouts(shared)[-1] == (4, 2, 1, 0)
    assert len(shared.events("layout-changed", job)) == len(layouts(shared)) - 1
    ended(shared, job)

    (shared.work / "enough").unlink()
    (shared.work / "layouts").unlink()
    later = submit(shared, "global", "slower", nodes=(2, 2))
    shared.until_samples(later, 200)
    assert {layout[1:] for layout in layouts(shared)} == {(2, 1, 0)}
    assert shared.show(later).layout.source == job
    ended(shared, later)
    assert not shared.events("layout-changed", later)


@pytest.mark.thorough
@needs_two_cores
def test_a_daemon_that_is_killed_in_the_middle_goes_on_with_the_search(tmp_path):
    with site(tmp_path / "site", nodes=1) as embedded:
        job = submit(embedded, tuned=("processes", "loader-workers"))
        for count in (1, 3):
            embedded.until(
                lambda count=count: len(embedded.events("layout-changed", job)) >= count,
                f"layout {count} is tried",
            )
            embedded.kill_daemon()
            embedded.start_daemon()
        event = end_of_search(embedded, job)
        assert event.data["layout"]["processes"] == 2, event.sentence
        assert len(event.data["rates"]) >= 3  # what was measured before counts
        ended(embedded, job)
        assert not embedded.events("workers-failed", job)


@pytest.mark.thorough
@needs_two_cores
def test_a_node_that_is_taken_in_the_middle_costs_no_sample(tmp_path):
    with site(tmp_path / "site", nodes=2) as embedded:
        job = submit(embedded, nodes=(1, 2))
        embedded.until(lambda: embedded.events("layout-changed", job), "another layout is tried")
        node = embedded.show(job).job.nodes[-1]
        embedded.agents()[node].send_signal(signal.SIGTERM)
        event = end_of_search(embedded, job)
        assert event.data["layout"]["processes"] == 2, event.sentence
        before = embedded.job(job).samples
        embedded.until_samples(job, before + 100)
        ended(embedded, job, unsaved_steps=len(embedded.events("drain-without-snapshot", job)))


@trains_shards
@pytest.mark.thorough
@needs_two_cores
def test_a_sharded_model_is_sharded_anew_for_each_layout(tmp_path):
    limit = 'enabled = false\nlayout_time = "15 s"'  # its exchanges may take as long as its steps
    with site(tmp_path / "site", nodes=2, profiling=limit) as embedded:
        job = submit(embedded, "global", "sharded", nodes=(2, 2))
        end_of_search(embedded, job)
        before = embedded.job(job).samples
        embedded.until_samples(job, before + 100)
        assert {layout[:2] for layout in layouts(embedded)} == {(2, 1), (4, 2)}
        ended(embedded, job)
        assert not embedded.events("layout-failed", job)


@pytest.mark.thorough
@needs_two_cores
def test_a_live_job_is_started_again_from_its_snapshot_for_each_layout(tmp_path):
    with site(tmp_path / "site", nodes=2) as embedded:
        job = submit(embedded, nodes=(2, 2), mode="live")
        event = end_of_search(embedded, job)
        assert event.data["layout"]["processes"] == 2, event.sentence
        before = embedded.job(job).samples
        embedded.until_samples(job, before + 100)
        assert layouts(embedded)[0][:2] == (2, 1)
        assert layouts(embedded)[-1][:3] == (4, 2, 1)
        ended(embedded, job)
        assert not embedded.events("workers-failed", job)


@pytest.mark.thorough
@needs_two_cores
def test_a_layout_in_which_the_script_fails_is_dropped_and_costs_no_try(tmp_path):
    with site(tmp_path / "site", nodes=1) as embedded:
        job = submit(embedded, "global", "fails")
        event = end_of_search(embedded, job)
        assert event.data["layout"]["processes"] == 1
        assert [e.data["layout"]["processes"] for e in embedded.events("layout-failed", job)] == [2]
        before = embedded.job(job).samples
        embedded.until_samples(job, before + 100)
        ended(embedded, job)
        assert not embedded.events("workers-failed", job)


@pytest.mark.thorough
def test_batches_of_each_process_keep_the_number_of_processes(tmp_path):
    with site(tmp_path / "site", nodes=1) as embedded:
        job = submit(embedded, "own")
        event = end_of_search(embedded, job)
        assert "another one would change the result" in event.sentence
        ended_layouts = layouts(embedded)
        assert {layout[1] for layout in ended_layouts} == {1}
        assert not embedded.events("layout-changed", job)


@pytest.mark.thorough
def test_loader_workers_are_found_too(tmp_path):
    with site(tmp_path / "site", nodes=1) as embedded:
        job = submit(embedded, nproc_per_node=1, tuned=("loader-workers", "threads"))
        end_of_search(embedded, job)
        tried = {layout[1:] for layout in layouts(embedded)}
        assert {loaders for *_, loaders in tried} >= {0, 1}
        assert {processes for processes, *_ in tried} == {1}
        ended(embedded, job)


def test_fixed_numbers_need_no_search(shared):
    job = submit(shared, nproc_per_node=2, threads=3, loader_workers=1, tuned=())
    shared.until_samples(job, 100)
    assert layouts(shared) == [(2, 2, 3, 1)]
    ended(shared, job)
    assert not shared.events("layout-found", job)
