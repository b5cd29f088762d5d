"""Epochs: when one is over, for scripts of every shape, and that what is due at its last step waits
for the code that follows its steps.
"""

import pytest
import torch

import malletrain
from malletrain.protocol.worker_channel import BetweenEpochs, DrainDone
from tests.malletrain.training.worker_side import as_plain_script, as_worker


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


def sampler_of(kind):
    if kind == "sampler":
        return malletrain.ElasticSampler(8, global_batch_size=4, rank=0, world_size=1)
    return malletrain.ElasticStream(
        list(range(2)),
        lambda shard: range(4),
        global_batch_size=4,
        shuffle=False,
        rank=0,
        world_size=1,
    )


def over_epochs(sampler, events):
    for epoch in sampler.epochs(2):
        for _ in sampler:
            sampler.advance()
            events.append(("step", epoch))
        events.append(("code", epoch))


def over_a_range(sampler, events):
    for epoch in range(sampler.epoch, 2):
        for _ in sampler:
            sampler.advance()
            events.append(("step", epoch))
        events.append(("code", epoch))


def over_a_while(sampler, events):
    while (epoch := sampler.epoch) < 2:
        for _ in sampler:
            sampler.advance()
            events.append(("step", epoch))
        events.append(("code", epoch))


def evaluating_on_its_training_data(sampler, events):
    for epoch in sampler.epochs(2):
        for _ in sampler:
            sampler.advance()
            events.append(("step", epoch))
        assert len(list(sampler)) == 2
        events.append(("code", epoch))


STEPS = [("step", 0), ("step", 0), ("code", 0), "closed", ("step", 1), ("step", 1), ("code", 1)]


@pytest.mark.parametrize("kind", ["sampler", "stream"])
@pytest.mark.parametrize(
    ("script", "last"),
    [
        (over_epochs, ["closed"]),
        (over_a_range, []),  # nobody asks for another epoch
        (over_a_while, []),
        (evaluating_on_its_training_data, ["closed"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_epoch_is_closed_when_the_code_after_its_steps_has_run(kind, script, last):
    sampler, events = sampler_of(kind), []
    sampler.on_epoch_closed(lambda: events.append("closed"))
    script(sampler, events)
    assert events == STEPS + last


def test_between_epochs_is_the_time_from_the_last_step_to_the_next_epoch():
    sampler = sampler_of("sampler")
    states = []
    for _ in sampler.epochs(2):
        for _ in sampler:
            states.append(sampler.between_epochs)
            sampler.advance()
            states.append(sampler.between_epochs)
        states.append(sampler.between_epochs)
    assert states == [False, False, False, True, True] * 2
    assert not sampler.between_epochs
    assert sampler.finished


def test_a_restored_state_is_at_an_epochs_beginning():
    sampler = sampler_of("sampler")
    for _ in sampler:
        sampler.advance()
    assert sampler.between_epochs
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    assert not sampler.between_epochs
    assert (sampler.epoch, sampler.position) == (1, 0)


def test_a_run_that_goes_back_into_the_epoch_before_does_that_again():
    """A live run with a sharded model does so after a loss, in the loop of the later epoch."""
    sampler = sampler_of("sampler")
    epochs = []
    for epoch in sampler.epochs(3):
        epochs.append(epoch)
        for _ in sampler:
            sampler.advance()
        if epochs == [0, 1]:
            sampler.set_position(0, 4)
            for _ in sampler:
                sampler.advance()
    assert epochs == [0, 1, 1, 2]


# --- what is due at an epoch's last step ---


class Script:
    """An ordinary training with a scheduler that makes a step an epoch; ``ask`` is called in every
    step with (epoch, step of the epoch).
    """

    def __init__(self, path, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.sampler = malletrain.ElasticSampler(8, global_batch_size=4, rank=0, world_size=1)
        self.snapshot = malletrain.Snapshot(
            path,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            **options,
        )
        self.snapshot.restore()
        self.rates = []
        self.ends = []

    def run(self, epochs, ask=lambda epoch, step: None):
        for epoch in self.sampler.epochs(epochs):
            for step, batch in enumerate(self.sampler):
                ask(epoch, step)
                self.optimizer.zero_grad()
                self.model(torch.tensor(batch, dtype=torch.float32)[:, None]).sum().backward()
                self.optimizer.step()
                self.rates.append(self.scheduler.get_last_lr()[0])
                self.sampler.advance()
                self.snapshot.step()
            self.scheduler.step()
            self.ends.append(epoch)


class Stopped(BaseException):
    """The launcher ends the process."""


@pytest.fixture
def stops_when_drained(monkeypatch):
    def wait(flags, number, limit_s=None, again=None):
        raise Stopped

    monkeypatch.setattr("malletrain.training.snapshot.wait_to_be_stopped", wait)


@pytest.mark.parametrize("at", [(e, s) for e in range(3) for s in range(2)])
def test_a_drain_at_any_step_skips_and_repeats_nothing(
    tmp_path, monkeypatch, stops_when_drained, at
):
    undisturbed = Script(tmp_path / "undisturbed.pt")
    undisturbed.run(3)
    with as_worker(monkeypatch) as agent:
        first = Script(tmp_path / "x.pt")
        stopped = False
        try:
            first.run(
                3, ask=lambda epoch, step: (epoch, step) == at and agent.flags.request_drain(1)
            )
        except Stopped:
            stopped = True
        agent.flags.request_drain(0)
        # After the training nobody waits: what follows it is done in this process.
        assert stopped == (at != (2, 1))
        second = Script(tmp_path / "x.pt")
        second.run(3)
    assert first.rates + second.rates == undisturbed.rates
    assert first.ends + second.ends == undisturbed.ends == [0, 1, 2]
    assert torch.equal(second.model.weight, undisturbed.model.weight)


def test_a_drain_after_the_last_epoch_leaves_the_trained_state_behind(tmp_path, monkeypatch):
    with as_worker(monkeypatch) as agent:
        run = Script(tmp_path / "x.pt")
        run.run(1, ask=lambda epoch, step: step == 1 and agent.flags.request_drain(1))
        assert not agent.received(DrainDone)
        again = Script(tmp_path / "x.pt")
        assert again.sampler.epoch == 1
        assert again.scheduler.get_last_lr() == [0.05]


def test_a_snapshot_that_is_due_at_the_last_step_is_taken_after_the_code(tmp_path):
    run = Script(tmp_path / "x.pt", every_s=0.0)
    run.run(1)
    again = Script(tmp_path / "x.pt")
    assert again.sampler.epoch == 1
    assert again.scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize("first", ["save", "scheduler"])
def test_a_script_that_saves_before_its_scheduler_makes_a_step_skips_none(tmp_path, first):
    run = Script(tmp_path / "x.pt")
    for _ in run.sampler.epochs(2):
        for _ in run.sampler:
            if run.sampler.epoch == 1:
                break  # lost in epoch 1
            run.sampler.advance()
            run.snapshot.step()
        else:
            if first == "save":
                run.snapshot.save()
            run.scheduler.step()
            if first == "scheduler":
                run.snapshot.save()
            continue
        break
    again = Script(tmp_path / "x.pt")
    assert again.sampler.epoch == 1
    assert again.scheduler.get_last_lr() == [0.05]


def test_the_agent_hears_of_the_code_after_an_epoch(tmp_path, monkeypatch):
    """So that a planned change waits for a long evaluation. Short epochs are not all announced."""
    with as_worker(monkeypatch) as agent:
        run = Script(tmp_path / "x.pt")
        run.run(3)
        assert [m.entered for m in agent.received(BetweenEpochs)] == [True, False]
