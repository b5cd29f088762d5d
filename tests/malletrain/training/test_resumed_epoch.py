"""Scripts that skip or count batches themselves in the epoch in which a run resumes are told."""

from __future__ import annotations

import itertools
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import malletrain
from malletrain.protocol.worker_channel import OwnerNotice
from tests.malletrain import forked_programs
from tests.malletrain.training.worker_side import as_worker

BATCHES, DONE = 12, 4
SKIPPED = "has left out 3 batches, which the script skipped before its first step"
COMPARED = "in which this run resumed at"


@pytest.fixture
def agent(monkeypatch):
    with as_worker(monkeypatch) as agent:
        yield agent


def sampler_and_batches(kind, workers=0):
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
    data = TensorDataset(torch.arange(BATCHES))
    return sampler, DataLoader(data, batch_sampler=sampler, num_workers=workers)


def resumed(kind="sampler", epoch=0, workers=0, done=DONE):
    """A sampler and its batches in a process that goes on after ``done`` batches of ``epoch``."""
    sampler, batches = sampler_and_batches(kind)
    for _ in range(epoch):
        for _ in batches:
            sampler.advance()
    for _ in itertools.islice(batches, done):
        sampler.advance()
    state = sampler.state_dict()
    sampler, batches = sampler_and_batches(kind, workers)
    sampler.load_state_dict(state)
    return sampler, batches


def notices(agent, capsys):
    """The notices in the log; the owner gets the first of them at once."""
    lines = [line.removeprefix("malletrain: ") for line in capsys.readouterr().err.splitlines()]
    sentences = [line for line in lines if COMPARED in line]
    received = [notice.sentence for notice in agent.received(OwnerNotice)]
    assert received[:1] == sentences[:1]
    return sentences


def skip_by_counter(sampler, loader):
    for number, _ in enumerate(loader):
        if number >= 3:
            sampler.advance()


def skip_by_slice(sampler, loader):
    for _ in itertools.islice(loader, 3, None):
        sampler.advance()


def skip_by_next(sampler, loader):
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    for _ in batches:
        sampler.advance()


def skip_and_accumulate(sampler, loader):
    """Groups of two; the last group is incomplete, and dropped in every epoch."""
    for number, _ in enumerate(itertools.islice(loader, 3, None)):
        if number % 2:
            sampler.advance(batches=2)


SKIPPING = [skip_by_counter, skip_by_slice, skip_by_next, skip_and_accumulate]


@pytest.mark.parametrize("kind", ["sampler", "stream"])
@pytest.mark.parametrize("skip", SKIPPING)
def test_batches_that_a_script_skips_after_a_restart_are_told(agent, capsys, skip, kind):
    sampler, batches = resumed(kind, epoch=1)
    for _ in sampler.epochs(2):
        skip(sampler, batches)
    (sentence,) = notices(agent, capsys)
    assert SKIPPED in sentence
    assert sentence.startswith("Epoch 1, ")


def test_they_are_told_where_workers_read_ahead(agent, capsys):
    sampler, batches = resumed(workers=2)
    for _ in sampler.epochs(1):
        skip_by_counter(sampler, batches)
    (sentence,) = notices(agent, capsys)
    assert SKIPPED in sentence


def test_they_are_told_in_a_loop_of_its_own_at_the_next_epoch(agent, capsys):
    sampler, batches = resumed()
    skip_by_counter(sampler, batches)
    assert not notices(agent, capsys)
    next(iter(batches))
    (sentence,) = notices(agent, capsys)
    assert SKIPPED in sentence


def test_one_look_at_the_data_before_a_loop_of_its_own_is_not_told(agent, capsys):
    """For the initial loss, or statistics."""
    sampler, batches = resumed()
    for _ in batches:
        pass
    for _ in range(3):
        as_it_should(sampler, batches)
    next(iter(batches))
    assert not notices(agent, capsys)


def test_nothing_is_told_of_a_loop_of_its_own_that_always_looks_first(agent, capsys):
    sampler, batches = resumed(done=8)
    for _ in range(4):
        look_first(sampler, batches)
    assert not notices(agent, capsys)


@pytest.mark.parametrize("steps", [0, 1])
def test_an_end_after_an_epoch_without_a_step_is_told(tmp_path, steps):
    """Not if the script trains after it: it may look at its data first."""
    script = (
        textwrap.dedent(f"""
        import torch, malletrain
        from torch.utils.data import DataLoader
        sampler = malletrain.ElasticSampler(12, global_batch_size=1)
        sampler.load_state_dict({{**sampler.state_dict(), "position": 8}})
        loader = DataLoader(torch.arange(12), batch_sampler=sampler)
        for batch in loader:
            pass
        for batch in list(loader)[:{steps}]:
            sampler.advance()
        """)
        if steps
        else textwrap.dedent("""
        import torch, malletrain
        from torch.utils.data import DataLoader
        sampler = malletrain.ElasticSampler(12, global_batch_size=1)
        sampler.load_state_dict({**sampler.state_dict(), "position": 8})
        for batch in DataLoader(torch.arange(12), batch_sampler=sampler):
            pass
        """)
    )
    ended = forked_programs.run(script, folder=tmp_path)
    assert ended.code == 0, ended.errors
    assert ended.errors.count("took the last 4 batches of epoch 0") == (not steps)


def test_they_are_told_when_the_script_ends(tmp_path):
    script = textwrap.dedent("""
        import itertools, torch, malletrain
        from torch.utils.data import DataLoader
        sampler = malletrain.ElasticSampler(12, global_batch_size=1)
        sampler.load_state_dict({**sampler.state_dict(), "position": 4})
        for _ in itertools.islice(DataLoader(torch.arange(12), batch_sampler=sampler), 3, None):
            sampler.advance()
        """)
    ended = forked_programs.run(script, folder=tmp_path)
    assert ended.code == 0, ended.errors
    assert ended.errors.count(SKIPPED) == 1


def test_a_job_is_told_once(agent, capsys):
    sampler, batches = resumed()
    for _ in sampler.epochs(1):
        skip_by_counter(sampler, batches)
    assert notices(agent, capsys)
    state = sampler.state_dict()
    again, batches = sampler_and_batches("sampler")
    again.load_state_dict({**state, "epoch": 1, "position": DONE})
    for _ in again.epochs(2):
        skip_by_counter(again, batches)
    assert not notices(agent, capsys)


class StatefulLoader(DataLoader):
    """As that of torchdata: reads the batches of its state from the sampler, and drops them."""

    skipped = 3

    def _get_iterator(self):
        iterator = super()._get_iterator()
        for _ in range(self.skipped):
            next(iterator._sampler_iter)  # noqa: SLF001 (as torchdata does)
        return iterator


def test_batches_that_a_resumable_loader_skips_are_told(agent, capsys):
    sampler, _ = resumed()
    loader = StatefulLoader(torch.arange(BATCHES), batch_sampler=sampler)
    for _ in sampler.epochs(1):
        for _ in loader:
            sampler.advance()
    (sentence,) = notices(agent, capsys)
    assert SKIPPED in sentence


def as_it_should(sampler, loader):
    for _ in loader:
        sampler.advance()


def one_ahead(sampler, loader):
    """As a prefetcher does."""
    batches = iter(loader)
    batch = next(batches, None)
    while batch is not None:
        batch = next(batches, None)
        sampler.advance()


def look_first(sampler, loader):
    """An example batch, and the mean of the data, before the training."""
    next(iter(loader))
    for _ in loader:
        pass
    as_it_should(sampler, loader)


def accumulate(sampler, loader):
    """The last group is incomplete."""
    batches = iter(loader)
    while len(group := list(itertools.islice(batches, 5))) == 5:
        sampler.advance(batches=len(group))


def limited(sampler, loader):
    for _ in loader:
        if sampler.position >= 9:
            break
        sampler.advance()


def without_the_last(sampler, loader):
    for _ in loader:
        if sampler.position + 1 < BATCHES:
            sampler.advance()


UNDISTURBED = {
    as_it_should: (1, 5, 11),
    one_ahead: (1, 10, 11),
    look_first: (1, 5, 11),
    accumulate: (5, 10),
    limited: (1, 5, 9),
    without_the_last: (1, 5, 11),
}
"""Loops, and positions of their snapshots."""


@pytest.mark.parametrize(
    ("train", "done"), [(train, done) for train, dones in UNDISTURBED.items() for done in dones]
)
def test_nothing_is_told_of_what_a_script_does_in_every_epoch(agent, capsys, train, done):
    sampler, batches = sampler_and_batches("sampler")
    for epoch in sampler.epochs(3):
        if epoch == 2:
            state = {**sampler.state_dict(), "position": done}
        train(sampler, batches)
    sampler, batches = sampler_and_batches("sampler")
    sampler.load_state_dict(state)
    for _ in sampler.epochs(5):
        train(sampler, batches)
    assert not notices(agent, capsys)


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_nothing_is_told_of_batches_that_a_thread_reads_ahead(agent, capsys, kind):
    """It is four ahead at the first step, and the script leaves out the last three of an epoch."""
    sampler, batches = resumed(kind)
    with ThreadPoolExecutor(1) as thread:
        for epoch in sampler.epochs(1):
            iterator = iter(batches)
            for _ in range(4):
                thread.submit(next, iterator).result()
            while (BATCHES - DONE) - counted_since(sampler) > 3:
                sampler.advance()
                thread.submit(next, iterator, None).result()
            assert epoch == 0
    assert not notices(agent, capsys)


def counted_since(sampler):
    done = sampler.position if hasattr(sampler, "position") else sampler.samples
    return done - DONE


def test_an_end_while_a_thread_has_read_all_that_is_left_is_not_told(tmp_path):
    script = textwrap.dedent("""
        import threading, torch, malletrain
        from torch.utils.data import DataLoader
        sampler = malletrain.ElasticSampler(12, global_batch_size=1)
        sampler.load_state_dict({**sampler.state_dict(), "position": 8})
        loader = DataLoader(torch.arange(12), batch_sampler=sampler)
        thread = threading.Thread(target=list, args=(loader,))
        thread.start()
        thread.join()
        """)
    ended = forked_programs.run(script, folder=tmp_path)
    assert ended.code == 0, ended.errors
    assert "without a step" not in ended.errors


def test_nothing_is_told_of_an_end_in_the_resumed_epoch(agent, capsys):
    """At a maximum number of steps of the whole training."""
    sampler, batches = resumed(epoch=2)
    for _ in sampler.epochs(9):
        for number, _ in enumerate(batches):
            sampler.advance()
            if number == 2:
                break
        else:
            continue
        break
    assert not notices(agent, capsys)


def counted_to(limit, sampler, loader):
    for number, _ in enumerate(loader):
        if number == limit:
            break
        sampler.advance()


def fewer_updates(sampler, loader):
    """The number of steps of an epoch, of which those before the restart are subtracted again."""
    steps = len(loader)
    for _, _ in zip(range(sampler.position, steps), loader, strict=False):
        sampler.advance()


@pytest.mark.parametrize(
    ("epoch", "train", "expected"),
    [
        (1, fewer_updates, "Epoch 1, {} sample 4, ended after 8 samples, and two others after 12"),
        (0, fewer_updates, "Epoch 0, {} sample 4, ended after 8 samples, and two others after 12"),
        (0, lambda *a: counted_to(6, *a), "ended after 10 samples, and two others after 6"),
    ],
)
def test_an_epoch_of_another_length_than_two_others_is_told(agent, capsys, epoch, train, expected):
    sampler, batches = resumed(epoch=epoch)
    for _ in sampler.epochs(4):
        train(sampler, batches)
    (sentence,) = notices(agent, capsys)
    assert expected.format(COMPARED) in sentence


def test_the_length_of_the_epoch_before_is_in_the_state(agent, capsys):
    sampler, batches = sampler_and_batches("sampler")
    for epoch in sampler.epochs(2):
        if epoch == 1:
            state = {**sampler.state_dict(), "position": DONE}
        counted_to(6, sampler, batches)
    sampler, batches = sampler_and_batches("sampler")
    sampler.load_state_dict(state)
    for _ in sampler.epochs(3):
        counted_to(6, sampler, batches)
    (sentence,) = notices(agent, capsys)
    assert "ended after 10 samples, and two others after 6" in sentence


def stopped_at(length):
    """One epoch of the run is shorter: a limit of every third epoch, or an early stop of one."""

    def train(sampler, loader):
        for _ in loader:
            sampler.advance()
            if sampler.epoch == 1 and sampler.position == length:
                break

    return train


@pytest.mark.parametrize("length", [5, 6, 7, 9])
def test_one_shorter_epoch_is_not_told_if_it_is_not_what_a_second_skip_does(agent, capsys, length):
    sampler, batches = resumed(epoch=1)
    for _ in sampler.epochs(4):
        stopped_at(length)(sampler, batches)
    assert not notices(agent, capsys)


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_the_length_of_an_epoch_without_a_sample_left_is_in_the_state(agent, capsys, kind):
    sampler, batches = sampler_and_batches(kind)
    for epoch in sampler.epochs(2):
        if epoch:
            break
        as_it_should(sampler, batches)
    for _ in itertools.islice(batches, DONE):
        sampler.advance()
    state = sampler.state_dict()
    assert state["epoch_length"] == BATCHES
    sampler, batches = sampler_and_batches(kind)
    sampler.load_state_dict(state)
    for _ in sampler.epochs(3):
        counted_to(BATCHES - 2 * DONE if sampler.epoch == 1 else BATCHES, sampler, batches)
    (sentence,) = notices(agent, capsys)
    assert "ended after 8 " in sentence
    assert "and two others after 12." in sentence


def test_without_a_length_in_the_state_two_later_epochs_are_needed(agent, capsys):
    """The epoch before may have been as short, as in a state that another sampler wrote."""
    sampler, batches = resumed(epoch=1)
    assert "epoch_length" not in sampler.state_dict()
    for epoch in sampler.epochs(3):
        counted_to(8 - DONE if epoch == 1 else BATCHES, sampler, batches)
    assert not notices(agent, capsys)


def test_a_number_of_steps_is_another_number_of_samples_at_each_scale(agent, capsys):
    """With a batch per rank. The script counts its steps itself, and does not begin anew."""
    ended, facts = 0, {"steps": 0}
    state: dict = {}
    for world in (1, 2):
        sampler = malletrain.ElasticSampler(64, batch_size=2, rank=0, world_size=world)
        loader = DataLoader(torch.arange(64), batch_sampler=sampler)
        if state:
            sampler.load_state_dict(state)
        for _ in sampler.epochs(4):
            for _ in loader:
                sampler.advance()
                facts["steps"] += 1
                if (world == 1 and facts["steps"] == 5) or facts["steps"] % 10 == 0:
                    break
            ended += 1
            if world == 1:
                state = {**sampler.state_dict(), "position": sampler.position, "epoch": 0}
                break
    assert ended == 5
    assert not notices(agent, capsys)


def test_in_live_mode_a_process_that_joins_resumes_no_epoch(agent, capsys, monkeypatch):
    """The others have not loaded the state that it has, with the entries of a restart."""
    monkeypatch.setenv("MALLETRAIN_LIVE", "1")
    sampler, batches = sampler_and_batches("sampler")
    state = {**sampler.state_dict(), "position": DONE}
    sampler.load_state_dict({**state, "epoch_length": 6, "skipping_notice": True})
    assert sampler.state_dict() == state
    sampler.load_state_dict(state)
    skip_by_counter(sampler, batches)
    next(iter(batches))
    assert not notices(agent, capsys)


def test_in_live_mode_the_state_is_the_same_in_processes_that_join(agent, capsys, monkeypatch):
    monkeypatch.setenv("MALLETRAIN_LIVE", "1")
    first, batches = sampler_and_batches("sampler")
    for _ in first.epochs(2):
        counted_to(6 + first.epoch, first, batches)
    state = {**first.state_dict(), "position": DONE}
    for joiner, loader in (sampler_and_batches("sampler"), (first, batches)):
        joiner.load_state_dict(state)
        for _ in joiner.epochs(4):
            counted_to(6 + joiner.epoch, joiner, loader)
        assert joiner.state_dict() == {**state, "epoch": 4, "position": 0}
    assert not notices(agent, capsys)


def test_epochs_that_all_differ_tell_nothing(agent, capsys):
    sampler, batches = resumed(epoch=1)
    for epoch in sampler.epochs(5):
        counted_to(6 + epoch, sampler, batches)
    assert not notices(agent, capsys)
