"""Every call that the page on steps names as measured is measured, as the part that it names."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import malletrain
from malletrain.protocol.worker_channel import MEASURED_PARTS
from malletrain.training import step_times
from tests.malletrain.training.worker_side import as_plain_script, as_worker

torch = pytest.importorskip("torch")

from malletrain import elastic  # noqa: E402
from malletrain.elastic import background  # noqa: E402
from malletrain.elastic.group import Group  # noqa: E402
from malletrain.elastic.parallel import average_gradients  # noqa: E402


def snapshot(folder, patch):
    assert malletrain.Snapshot(folder / "run.pt", model=torch.nn.Linear(1, 1)).save()


def snapshot_of_a_step(folder, patch):
    made = malletrain.Snapshot(folder / "run.pt", every_s=0.0, model=torch.nn.Linear(1, 1))
    made.restore()
    made.step()
    assert (folder / "run.pt").exists()


def snapshot_in_memory(folder, patch):
    """A copy in memory after each step; nothing is due on disk."""
    (folder / "memory").mkdir()
    patch.setattr(sys, "argv", ["train.py"])
    patch.setenv("MALLETRAIN_MEMORY", str(folder / "memory"))
    patch.setenv("MALLETRAIN_MEMORY_LIMIT", str(1 << 30))
    patch.setenv("MALLETRAIN_KEEPER", "127.0.0.1:1")
    with as_worker(patch):
        made = malletrain.Snapshot(
            folder / "run.pt", every_s=3600.0, replicate_every=1, model=torch.nn.Linear(1, 1)
        )
        made.restore()
        clock = step_times.start()  # the worker of the test may have another one
        made.step()
        assert list((folder / "memory").iterdir())
        return clock


def snapshot_in_background(folder, patch):
    """What the step waits for is the copy."""
    copy, outside = background.to_host, []

    def copied(payload):
        outside.append(step_times.current().begin("data"))  # refused within a part
        return copy(payload)

    patch.setattr(background, "to_host", copied)
    made = background.BackgroundSnapshot(
        folder / "run.pt", 0.0, model=torch.nn.Linear(1, 1), run={}
    )
    made.step()
    made.wait()
    assert set(outside) == {False}


def collective_of_live_mode(folder, patch):
    work = SimpleNamespace(is_completed=lambda: True, wait=lambda: True)
    Group.wait(SimpleNamespace(broken=False), work)


def gradients_of_live_mode(folder, patch):
    module = torch.nn.Linear(1, 1)
    module(torch.ones(1, 1)).sum().backward()
    work = SimpleNamespace(wait=lambda: True)
    average_gradients(SimpleNamespace(several=True, average=lambda flat: work), module)


def stream(folder, patch):
    made = malletrain.ElasticStream([2], lambda shard: iter(range(shard)), batch_size=1)
    assert len(list(made)) == 2


def batches_of_live_mode(folder, patch):
    sampler = malletrain.ElasticSampler(2, global_batch_size=2)
    run = elastic.Run(model=torch.nn.Linear(1, 1), sampler=sampler)
    for _ in run.batches(sampler):  # measured, though it is no DataLoader
        with run.step():
            pass


def own_loader(folder, patch):
    assert list(malletrain.timed([1])) == [1]


CALLS = (
    (snapshot, "snapshot"),
    (snapshot_of_a_step, "snapshot"),
    (snapshot_in_memory, "snapshot"),
    (snapshot_in_background, "snapshot"),
    (collective_of_live_mode, "exchange"),
    (gradients_of_live_mode, "exchange"),
    (stream, "data"),
    (batches_of_live_mode, "data"),
    (own_loader, "data"),
)
"""Those of the integrations: tests/malletrain/integrations/test_trainers.py."""


@pytest.mark.parametrize(("call", "part"), CALLS, ids=[call.__name__ for call, _ in CALLS])
def test_the_call_is_measured(tmp_path, monkeypatch, call, part):
    with as_plain_script(monkeypatch):
        clock = step_times.start()
        try:
            clock = call(tmp_path, monkeypatch) or clock
            measured = dict(zip(MEASURED_PARTS, clock.read(), strict=True))
        finally:
            step_times.stop()
    assert [name for name, seconds in measured.items() if seconds is not None] == [part]
