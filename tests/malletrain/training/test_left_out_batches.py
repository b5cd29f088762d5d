"""Batches that a loop takes and does not count are not counted for it: it may read them ahead."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import malletrain
from tests.malletrain.training.worker_side import as_plain_script

BATCHES = 12


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


def sampler_and_batches(kind):
    if kind == "stream":
        stream = malletrain.ElasticStream(
            *(["a"], lambda _: range(BATCHES)),
            global_batch_size=1,
            shuffle=False,
            rank=0,
            world_size=1,
        )
        return stream, stream
    sampler = malletrain.ElasticSampler(
        BATCHES, global_batch_size=1, shuffle=False, rank=0, world_size=1
    )
    return sampler, DataLoader(TensorDataset(torch.arange(BATCHES)), batch_sampler=sampler)


def counted(sampler):
    state = sampler.state_dict()
    return state.get("position", state.get("samples"))


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_a_read_ahead_that_grows_loses_no_sample(kind):
    """Groups of 1, 2, 4 and 4 batches; the next group is read before a group is trained on."""
    sampler, batches = sampler_and_batches(kind)
    batches, done = iter(batches), 0
    sizes = iter((1, 2, 4, 4, 1))
    group = list(itertools.islice(batches, next(sizes)))
    while group:
        following = list(itertools.islice(batches, next(sizes, 0)))
        for _ in group:
            sampler.advance()
            done += 1
            assert counted(sampler) == done % BATCHES
        group = following
    assert done == BATCHES


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_a_loop_that_peeks_before_it_saves_loses_no_sample(kind, tmp_path):
    sampler, batches = sampler_and_batches(kind)
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", every_s=float("inf"), sampler=sampler)
    batches, peeked = iter(batches), 0
    for done in range(1, 9):
        if not peeked:
            next(batches)
        peeked = int(done % 3 == 0)
        if peeked:
            next(batches)
        sampler.advance()
        snapshot.step()
        if done % 3 == 0:
            snapshot.save()
            again, rest = sampler_and_batches(kind)
            malletrain.Snapshot(tmp_path / "x.pt", sampler=again).restore()
            assert counted(again) == counted(sampler) == done
            assert len(list(rest)) == BATCHES - done


def test_the_log_names_an_epoch_whose_batches_were_left_out(capsys):
    sampler, loader = sampler_and_batches("sampler")
    for _ in sampler.epochs(2):
        for number, _ in enumerate(loader):
            if number in (2, 5):  # as `if torch.isnan(loss): continue`
                continue
            sampler.advance()
    messages = capsys.readouterr().err
    assert messages.count("Epoch 0 was left after 10 of 12 samples") == 1
    assert "also before a `continue`" in messages


class Partial(torch.nn.Module):
    """A model with a layer that no forward pass reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(1, 1, bias=False), torch.nn.LazyLinear(2)


def test_a_model_with_a_lazy_layer_that_is_never_used_is_saved(tmp_path):
    model = Partial()
    sampler, loader = sampler_and_batches("sampler")
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", model=model, sampler=sampler)
    for epoch in sampler.epochs(2):
        for number, _ in enumerate(loader):
            model.used.weight.data.add_(1.0)
            sampler.advance()
            snapshot.step()
            if number == 3:
                assert snapshot.save()
        assert snapshot.save()
        if epoch == 1:
            break
    again = Partial()
    assert malletrain.Snapshot(tmp_path / "x.pt", model=again).restore()
    assert torch.equal(again.used.weight, model.used.weight)


def test_what_the_script_puts_into_the_model_after_a_save_changes_no_snapshot(tmp_path):
    path, model = tmp_path / "x.pt", torch.nn.Linear(1, 1, bias=False)
    sampler, loader = sampler_and_batches("sampler")
    snapshot = malletrain.Snapshot(path, every_s=float("inf"), model=model, sampler=sampler)
    saved = b""
    for number, _ in enumerate(loader):
        assert not saved or path.read_bytes() == saved
        model.weight.data.add_(1.0)
        sampler.advance()
        snapshot.step()
        if number == 2:
            snapshot.save()
            saved = path.read_bytes()
            model.weight.data.zero_()
    assert path.read_bytes() == saved
