"""Epochs: when one is over, for scripts of every shape, and that what is due at its last step waits
for the code that follows its steps.
"""

import textwrap

import pytest
import torch

import malletrain
from malletrain.protocol.worker_channel import BetweenEpochs, DrainDone
from malletrain.training import snapshot_file
from tests.malletrain import forked_programs
from tests.malletrain.training.worker_side import as_plain_script, as_worker, process_ends
from tests.selection import every_change

pytestmark = pytest.mark.slow


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
        # After the training no rank waits for another: the code after it runs in this process.
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


# --- snapshots that a script takes in the code after the steps of an epoch ---

EPOCH_ENDS = {
    "save, scheduler": "sl",
    "scheduler, save": "ls",
    "save, save, scheduler": "ssl",
    "save, scheduler, save": "sls",
    "save, average": "sa",
}
"""What a script does after the steps of an epoch: s save, l scheduler, a change weights."""


class EndOfEpochScript(Script):
    """Saves in the code after an epoch; ``lost_at`` is (epoch, how much of that code has run)."""

    def run_with(self, code, epochs=3, lost_at=None):
        for epoch in self.sampler.epochs(epochs):
            for batch in self.sampler:
                self.optimizer.zero_grad()
                self.model(torch.tensor(batch, dtype=torch.float32)[:, None]).sum().backward()
                self.optimizer.step()
                self.sampler.advance()
                self.snapshot.step()
            for done, what in enumerate(code):
                if (epoch, done) == lost_at:
                    raise Stopped
                if what == "s":
                    self.snapshot.save()
                elif what == "l":
                    self.scheduler.step()
                else:
                    with torch.no_grad():
                        self.model.weight.mul_(0.5)
            if (epoch, len(code)) == lost_at:
                raise Stopped

    def outcome(self):
        return (self.model.weight.item(), self.scheduler.get_last_lr(), self.sampler.epoch)


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("every_s", [0.0, pytest.param(60.0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("code", EPOCH_ENDS.values(), ids=EPOCH_ENDS.keys())
def test_a_loss_anywhere_in_the_code_after_an_epoch_skips_and_repeats_nothing(
    tmp_path, code, every_s, keep
):
    undisturbed = EndOfEpochScript(tmp_path / "undisturbed.pt")
    undisturbed.run_with(code)
    for lost_at in ((epoch, done) for epoch in range(3) for done in range(len(code) + 1)):
        path = tmp_path / f"{lost_at}.pt"
        with pytest.raises(Stopped):
            EndOfEpochScript(path, every_s=every_s, keep=keep).run_with(code, lost_at=lost_at)
        process_ends()
        again = EndOfEpochScript(path, every_s=every_s, keep=keep)
        again.run_with(code)
        assert again.outcome() == undisturbed.outcome(), lost_at


def test_a_snapshot_of_an_open_epoch_is_used_where_no_other_is_kept(tmp_path):
    with pytest.raises(Stopped):
        EndOfEpochScript(tmp_path / "x.pt", keep=0).run_with("sl", lost_at=(1, 1))
    process_ends()
    assert EndOfEpochScript(tmp_path / "x.pt", keep=0).sampler.epoch == 2


def test_a_snapshot_of_the_first_epochs_end_leaves_a_run_to_begin_anew(tmp_path, capsys):
    with pytest.raises(Stopped):
        EndOfEpochScript(tmp_path / "x.pt").run_with("sl", lost_at=(0, 1))
    process_ends()
    assert EndOfEpochScript(tmp_path / "x.pt").sampler.epoch == 0
    assert "begins anew" in capsys.readouterr().err


def test_a_script_that_goes_on_to_another_training_has_closed_the_epoch(tmp_path):
    """As in a notebook: what it saved last is what the next one begins with."""
    first = EndOfEpochScript(tmp_path / "x.pt")
    for _ in first.sampler.epochs(9):
        for _ in first.sampler:
            first.sampler.advance()
            first.snapshot.step()
        first.snapshot.save()
        break
    assert EndOfEpochScript(tmp_path / "x.pt").sampler.epoch == 1


WORKER = "import runpy; runpy.run_module('malletrain.launch.script', run_name='__main__')"
ENDS = {"returns": "", "leaves": "raise SystemExit(0)", "fails": "raise RuntimeError"}


@pytest.mark.parametrize(
    ("end", "runner"),
    every_change(
        [(end, runner) for end in ENDS for runner in ("python", "worker")],
        ("returns", "worker"),
        ("leaves", "python"),
        ("fails", "worker"),
    ),
)
def test_a_script_that_breaks_after_its_last_save_has_closed_the_epoch(tmp_path, end, runner):
    """Nothing but the end of the process says that the code after the epoch has run."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import torch, malletrain
            model = torch.nn.Linear(1, 1)
            sampler = malletrain.ElasticSampler(8, global_batch_size=4)
            snapshot = malletrain.Snapshot({str(tmp_path / "x.pt")!r}, model=model, sampler=sampler)
            snapshot.restore()
            for epoch in sampler.epochs(9):
                for batch in sampler:
                    sampler.advance()
                    snapshot.step()
                snapshot.save()
                if epoch == 1:
                    {ENDS[end] or "break"}
            """
        )
    )
    program = [script.read_text()] if runner == "python" else [WORKER, str(script)]
    ended = forked_programs.run(*program, folder=tmp_path)
    assert ended.code == (1 if end == "fails" else 0), ended.errors
    assert EndOfEpochScript(tmp_path / "x.pt").sampler.epoch == (1 if end == "fails" else 2)


def test_the_agent_hears_of_the_code_after_an_epoch(tmp_path, monkeypatch):
    """So that a planned change waits for a long evaluation. Short epochs are not all announced. The
    end of the last one is that of the training, which is not left.
    """
    with as_worker(monkeypatch) as agent:
        run = Script(tmp_path / "x.pt")
        run.run(3)
        entered = [m.entered for m in agent.received(BetweenEpochs)]
        assert entered[:2] == [True, False]
        assert entered == ([True, False] * 3)[: len(entered)]


def test_of_several_samplers_the_one_in_the_loop_says_where_an_epoch_ends(tmp_path):
    """The other one goes round, three steps at a time."""
    path = tmp_path / "x.pt"
    few, sampler = (malletrain.ElasticSampler(n, global_batch_size=2) for n in (6, 8))
    facts = {"steps": 0, "tails": 0}
    snapshot = malletrain.Snapshot(path, every_s=0.0, few=few, sampler=sampler, facts=facts)
    turn = iter(few)
    for epoch in sampler.epochs(2):
        for _ in sampler:
            if next(turn, None) is None:
                turn = iter(few)
                next(turn)
            facts["steps"] += 1
            few.advance()
            sampler.advance()
            snapshot.step()
        saved = snapshot_file.read(str(path))["objects"]["facts"]
        assert saved == {"steps": 4 * epoch + 3, "tails": epoch}
        facts["tails"] += 1
    assert snapshot_file.read(str(path))["objects"]["facts"] == {"steps": 8, "tails": 2}


def restored_after_iter(workers):
    """A sampler, its loader, and an iterator that was made before a state was restored."""
    sampler = malletrain.ElasticSampler(12, global_batch_size=4, shuffle=False)
    loader = torch.utils.data.DataLoader(
        range(12),
        batch_sampler=sampler,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    batches = iter(loader)
    sampler.load_state_dict({**sampler.state_dict(), "position": 8})
    return sampler, loader, batches


def test_batches_that_workers_read_before_a_restore_are_refused():
    _, loader, batches = restored_after_iter(1)
    with pytest.raises(RuntimeError, match=r"Call iter\(loader\) after restore\(\)"):
        next(batches)
    assert [batch.tolist() for batch in loader] == [[8, 9, 10, 11]]


def test_batches_that_workers_read_are_trained_on_when_their_position_is_restored_again():
    sampler, _, batches = restored_after_iter(1)
    sampler.load_state_dict({**sampler.state_dict(), "position": 0})
    assert next(batches).tolist() == [0, 1, 2, 3]


def test_batches_that_nobody_read_before_a_restore_are_those_of_the_state():
    _, _, batches = restored_after_iter(0)
    assert [batch.tolist() for batch in batches] == [[8, 9, 10, 11]]


def test_batches_that_workers_read_from_the_restored_position_are_trained_on():
    sampler = malletrain.ElasticSampler(12, global_batch_size=4, shuffle=False)
    loader = torch.utils.data.DataLoader(
        range(12), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    batches = iter(loader)
    sampler.load_state_dict(sampler.state_dict())
    assert next(batches).tolist() == [0, 1, 2, 3]
