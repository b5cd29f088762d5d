"""ImportanceSampler: each draw of an epoch is trained on exactly once, whatever nodes come and
go, and the scores are those of the losses that were given.
"""

import math
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from malletrain import ElasticSampler, ImportanceSampler
from malletrain.training import importance_sampler as module
from malletrain.training.epoch_plan import order
from malletrain.training.importance_sampler import (
    FIRST_SMOOTHING,
    LEVELS,
    Importance,
    epoch_draws,
    levels_of,
)
from tests.draws import cases
from tests.malletrain import forked_programs
from tests.waiting import PATIENCE_S


def loss_of(sample, epoch):
    """The loss of a sample in an epoch."""
    return 0.1 + (sample * 7919 + epoch * 104_729) % 1009 / 100


class Job:
    """The ranks of a job in one process. Each step is made by all of them, one after another."""

    def __init__(self, world, **arguments):
        self._arguments = {"max_world_size": 5, **arguments}
        self.samplers = self._made(world)
        self.trained = []
        """(epoch, samples of the global batch) of each step."""

    def _made(self, world):
        return [
            ImportanceSampler(rank=rank, world_size=world, **self._arguments)
            for rank in range(world)
        ]

    def steps(self, count):
        """Make steps until ``count`` are made or the epoch is over."""
        epoch = self.samplers[0].epoch
        loaders = [iter(sampler) for sampler in self.samplers]
        for _ in range(count):
            batches = [next(loader) for loader in loaders]
            by_rank = [torch.tensor([loss_of(n, epoch) for n in batch]) for batch in batches]
            self.trained.append((epoch, [n for batch in batches for n in batch]))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "losses_of_ranks", lambda *_, all_=by_rank: all_)
                for sampler, losses in zip(self.samplers, by_rank, strict=True):
                    sampler.advance(losses=losses)
            if self.samplers[0].epoch != epoch:
                return

    def restart(self, world):
        """Continue in new processes from the state of rank 0, as restart mode does."""
        state = pickle.loads(pickle.dumps(self.samplers[0].state_dict()))
        self.samplers = self._made(world)
        for sampler in self.samplers:
            sampler.load_state_dict(state)

    def resize(self, world):
        """Continue in another number of processes, as live mode does: who stays keeps its state."""
        state = self.samplers[0].state_dict()
        self.samplers = self.samplers[:world]
        for joiner in self._made(world)[len(self.samplers) :]:
            joiner.load_state_dict(state)
            self.samplers.append(joiner)
        for rank, sampler in enumerate(self.samplers):
            sampler.resize(rank, world)


def draws_of(job, epoch):
    return [n for e, samples in job.trained if e == epoch for n in samples]


CHANGES = st.lists(
    st.tuples(st.sampled_from(["restart", "resize"]), st.integers(1, 5), st.integers(0, 6)),
    max_size=8,
)


@settings(deadline=None, max_examples=cases(60))
@given(st.integers(20, 60), st.integers(5, 20), CHANGES, st.integers(0, 1000), st.integers(1, 5))
def test_each_draw_is_trained_once_through_any_series_of_rescales(
    samples, batch, changes, seed, revisit
):
    arguments = {
        "num_samples": samples,
        "global_batch_size": batch,
        "seed": seed,
        "revisit": revisit,
    }
    undisturbed, job = Job(1, **arguments), Job(2, **arguments)
    for how, world, steps in changes:
        job.steps(steps)
        getattr(job, how)(world)
    while job.samplers[0].epoch < 4 or job.samplers[0].position:
        job.steps(3)
    while undisturbed.samplers[0].epoch < job.samplers[0].epoch:
        undisturbed.steps(1000)
    for epoch in range(job.samplers[0].epoch):
        assert len(draws_of(job, epoch)) == samples
        assert Counter(draws_of(job, epoch)) == Counter(draws_of(undisturbed, epoch))
        assert draws_of(job, epoch) == draws_of(undisturbed, epoch)
    for sampler in job.samplers:
        assert torch.equal(sampler.state_dict()["importance"]["levels"], saved_levels(undisturbed))
    together = [n for epoch in range(4) for n in draws_of(job, epoch)]
    assert set(together) == set(range(samples)), "the first epoch draws all"


def saved_levels(job):
    return job.samplers[0].state_dict()["importance"]["levels"]


def test_samples_with_a_high_loss_are_drawn_more_often():
    sampler = ImportanceSampler(200, global_batch_size=20, rank=0, world_size=1, revisit=100)
    counts = torch.zeros(200)
    for epoch in range(12):
        for batch in sampler:
            numbers = torch.tensor(batch)
            counts += torch.bincount(numbers, minlength=200) if epoch else 0
            sampler.advance(losses=(numbers >= 100).float() + torch.rand(len(batch)) / 2)
    ratio = counts[100:].sum() / counts[:100].sum()
    low, high = math.log(10 + 5), math.log(10 + 15)  # mean ranks of the halves of a batch
    assert ratio.item() == pytest.approx(high / low, rel=0.1)


def test_weights_are_those_of_the_batch_in_the_loop():
    arguments = {"global_batch_size": 8, "rank": 1, "world_size": 2, "seed": 3}
    sampler = ImportanceSampler(40, **arguments)
    plain = ImportanceSampler(40, **arguments, correct=False)
    for each in (sampler, plain):
        each.load_state_dict({**each.state_dict(), "importance": scored(40).state()})
    draws = epoch_draws(scored(40), 3, 0, 10)
    loader = DataLoader(range(40), batch_sampler=sampler, num_workers=1)
    for number, batch in enumerate(loader):
        share = draws.samples[number * 8 + 4 : number * 8 + 8]
        assert batch.tolist() == share.tolist()
        assert torch.allclose(sampler.weights.double(), 1 / draws.expected[share])
        sampler.advance()
    next(iter(plain))
    assert plain.weights.tolist() == [1.0] * 4


def scored(count):
    importance = Importance.unseen(count, 8)
    return importance.trained(torch.arange(count), torch.arange(float(count))).next_epoch()


def test_several_batches_of_a_step_are_scored_together():
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    other = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    loader, other_loader = iter(sampler), iter(other)
    for _ in range(2):
        batches = [next(loader), next(loader)]
        losses = [torch.tensor(batch).float() for batch in batches]
        sampler.advance(2, losses=torch.cat(losses))
        for each in losses:
            next(other_loader)
            other.advance(losses=each)
    assert torch.equal(
        sampler.state_dict()["importance"]["levels"], other.state_dict()["importance"]["levels"]
    )


def test_the_losses_of_a_step_that_does_not_count_are_dropped():
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    next(iter(sampler))
    sampler.score(torch.arange(6.0))
    assert not sampler.state_dict()["importance"]["levels"].any()
    sampler.resize(0, 1)  # a peer was lost; the step is made again
    next(iter(sampler))
    sampler.advance()
    assert not sampler.state_dict()["importance"]["levels"].any()
    next(iter(sampler))
    sampler.score(torch.arange(6.0))
    sampler.score(torch.arange(6.0).flip(0))  # the step again
    sampler.advance()
    levels = sampler.state_dict()["importance"]["levels"]
    batch = epoch_draws(Importance.unseen(24, 6), 0, 0, 10).samples[6:12]
    assert levels[batch].tolist() == [15, 12, 9, 7, 4, 1]
    assert levels.count_nonzero() == 6


def test_a_state_of_an_elastic_sampler_goes_on_with_its_draws():
    plain = ElasticSampler(30, global_batch_size=5, rank=0, world_size=1, seed=9)
    loader = iter(plain)
    first = [next(loader) for _ in range(2)]
    for _ in first:
        plain.advance()
    sampler = ImportanceSampler(30, global_batch_size=5, rank=0, world_size=1, seed=1)
    sampler.load_state_dict(plain.state_dict())
    assert sorted(n for batch in [*first, *sampler] for n in batch) == list(range(30))


def test_an_epoch_that_is_left_early_scores_the_next_one(capsys):
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    for epoch in sampler.epochs(2):
        for batch in sampler:
            sampler.advance(losses=torch.tensor(batch).float())
            if epoch == 0:
                break
    assert "was left after 6 of 24" in capsys.readouterr().err
    assert sampler.epoch == 2
    assert sampler.state_dict()["importance"]["levels"].count_nonzero() == 24


def test_nothing_is_known_of_the_next_epoch():
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    loader = iter(sampler)
    assert len(sampler.unread_batches(10)) == 4
    next(loader)
    assert [b.position for b in sampler.unread_batches(2)] == [6, 12]
    list(loader)
    assert sampler.unread_batches(2) == []


def test_the_coverage_is_that_of_the_epoch():
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    assert sampler.coverage == 1.0
    sampler.load_state_dict({**sampler.state_dict(), "importance": scored(24).state()})
    distinct = len(set(epoch_draws(scored(24), 0, 0, 10).samples.tolist()))
    assert sampler.coverage == distinct / 24 < 1.0


def test_losses_that_are_not_finite_are_told_once(capsys):
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    for _ in sampler:
        sampler.advance(losses=torch.tensor([1.0, math.nan, 2.0, math.inf, 3.0, 4.0]))
    message = capsys.readouterr().err
    assert message.count("is not a finite number (and of 1 others of the same step)") == 1
    assert sampler.epoch == 1


def test_an_epoch_without_losses_is_told(capsys):
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    for _ in sampler:
        sampler.advance()
    assert "got no losses in a whole epoch" in capsys.readouterr().err
    assert [n for batch in sampler for n in batch] != sorted(range(24))


@pytest.mark.parametrize("losses", [torch.ones(5), torch.tensor(1.0), [1.0] * 7])
def test_a_wrong_number_of_losses_is_refused(losses):
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    next(iter(sampler))
    with pytest.raises(ValueError, match="has 6 samples on this rank"):
        sampler.advance(losses=losses)
    sampler.advance(losses=[1.0] * 6)


def test_several_ranks_without_a_process_group_are_refused():
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=2)
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="is rank 0 of 2, but"):
        sampler.advance(losses=torch.ones(3))


def test_an_earlier_epoch_is_refused():
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    state = sampler.state_dict()
    for batch in sampler:
        sampler.advance(losses=torch.tensor(batch).float())
    with pytest.raises(ValueError, match="epoch 0 cannot be trained on again in epoch 1"):
        sampler.set_position(0, 6)
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.position) == (0, 0)
    with pytest.raises(ValueError, match="revisit must be a whole number from 1, not 0"):
        ImportanceSampler(24, global_batch_size=6, revisit=0)


def test_a_damaged_or_foreign_state_is_refused():
    sampler = ImportanceSampler(24, global_batch_size=6, rank=0, world_size=1)
    other = ImportanceSampler(30, global_batch_size=6, rank=0, world_size=1).state_dict()
    with pytest.raises(ValueError, match="scores of 30 samples, but this dataset has 24"):
        sampler.load_state_dict(other)
    with pytest.raises(ValueError, match="damaged scores"):
        sampler.load_state_dict({**sampler.state_dict(), "importance": {"levels": 3}})
    with pytest.raises(ValueError, match="has version 7"):
        sampler.load_state_dict({**sampler.state_dict(), "version": 7})
    assert len(sampler.state_dict()["importance"]["levels"]) == 24


RANK = """
import sys, torch, torch.distributed as dist
from malletrain import ImportanceSampler
rank, store, state = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
dist.get_backend = lambda: sys.argv[4]
sampler = ImportanceSampler(25, global_batch_size=7, seed=4, max_world_size=2)
draws = []
for epoch in range(3):
    for batch in sampler:
        draws += batch
        sampler.advance(losses=torch.tensor(batch) * 0.1 + epoch)
torch.save({"state": sampler.state_dict(), "draws": draws}, state)
dist.barrier()
dist.destroy_process_group()  # else gloo's threads may abort the interpreter at its end
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_ranks_exchange_their_losses(tmp_path, backend):
    """With the second one, on a machine without a GPU, too: gloo takes what is on the CPU."""
    store, log = str(tmp_path / "store"), tmp_path / "log"
    ranks = [
        forked_programs.start(
            *(RANK, str(rank), store, str(tmp_path / name), backend),
            folder=tmp_path,
            output=log,
        )
        for rank, name in enumerate("ab")
    ]
    try:
        assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0], log.read_text()
    finally:
        for rank in ranks:
            rank.kill()
    alone = Job(1, num_samples=25, global_batch_size=7, seed=4, max_world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "loss_of", lambda sample, epoch: sample * 0.1 + epoch)
        while alone.samplers[0].epoch < 3:
            alone.steps(100)
    results = [torch.load(tmp_path / name) for name in "ab"]
    for result in results:
        assert torch.equal(result["state"]["importance"]["levels"], saved_levels(alone))
    together = Counter(results[0]["draws"] + results[1]["draws"])
    assert together == Counter(n for _, samples in alone.trained for n in samples)


def levels(*values):
    return torch.tensor(values, dtype=torch.uint8)


def of_levels(values, batch=128):
    return Importance(levels(*values), levels(*values), batch)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.1, 0.5, 0.3], [1, 15, 8]),
        ([5.0, 4.0, 3.0, 2.0, 1.0], [15, 12, 8, 4, 1]),  # 14 · 3 / 4 = 10.5, to even: 10
        ([7.0, 7.0], [8, 8]),
        ([1.0, 2.0, 2.0, 3.0], [1, 8, 8, 15]),  # both have rank 1.5 of 3
        ([4.0], [8]),
        ([-1.0, 0.0], [1, 15]),
    ],
)
def test_the_level_of_a_loss_is_its_rank_in_the_batch(losses, expected):
    assert levels_of(torch.tensor(losses).double()).tolist() == pytest.approx(expected, abs=1)
    low, high = expected.index(min(expected)), expected.index(max(expected))
    result = levels_of(torch.tensor(losses).double()).tolist()
    assert (result[low], result[high]) == (min(expected), max(expected))


def test_weights_are_logarithms_of_ranks():
    importance = of_levels([1, 8, 15, 0], batch=3)  # ranks 0, 1, 2 of 3
    weights = importance.weights().double()
    assert (weights / 2**20).tolist() == pytest.approx(
        [math.log(10), math.log(11), math.log(12), 0.0], abs=1e-6
    )
    wide = of_levels([1, 15], batch=128).weights().double()
    assert (wide[1] / wide[0]).item() == pytest.approx(math.log(137) / math.log(10), abs=1e-6)


def test_the_term_of_all_weights_follows_the_mean_loss():
    importance = Importance.unseen(4, 4)
    smoothing = []
    for mean in (2.0, 1.0, 1.5):
        half = torch.tensor([mean - 0.5, mean + 0.5])
        importance = importance.trained(torch.tensor([0, 1]), half).next_epoch()
        smoothing.append(importance.smoothing)
    first = FIRST_SMOOTHING * 2.0
    assert smoothing == pytest.approx([first, first * math.exp(-0.5), first])
    assert importance.last_loss == 1.5
    again = importance.next_epoch()  # an epoch without losses
    assert (again.smoothing, again.last_loss) == (importance.smoothing, 1.5)
    raised = of_levels([1, 15], batch=3)
    raised = Importance(raised.levels, raised.newest, 3, smoothing=0.5)
    assert (raised.weights() / 2**20).tolist() == pytest.approx(
        [math.log(10) + 0.5, math.log(12) + 0.5], abs=1e-6
    )


def test_scores_count_from_the_next_epoch_on():
    importance = Importance.unseen(4, 3)
    after = importance.trained(torch.tensor([3, 1, 2]), torch.tensor([0.3, 0.1, 0.2]))
    assert after.levels.tolist() == [0, 0, 0, 0]
    assert after.next_epoch().levels.tolist() == [0, 1, 8, 15]
    assert (after.loss_sum, after.loss_count) == (pytest.approx(0.6), 3)


def test_a_loss_that_is_not_finite_changes_no_score():
    importance = of_levels([1, 8, 15])
    after = importance.trained(torch.arange(3), torch.tensor([math.nan, 2.0, math.inf]))
    assert after.newest.tolist() == [1, 8, 15]  # one loss alone has the middle level
    assert (after.loss_sum, after.loss_count) == (2.0, 1)
    assert importance.trained(torch.tensor([0]), torch.tensor([math.nan])) is importance


def test_the_first_epoch_draws_each_sample_once_in_the_order_of_an_elastic_sampler():
    draws = epoch_draws(Importance.unseen(50, 8), 3, 0, 10)
    assert draws.samples.tolist() == order(50, 3, 0).tolist()
    assert draws.expected.tolist() == [1.0] * 50


def test_samples_without_a_score_are_drawn_for_certain():
    importance = of_levels([0, 15, 0, *[1] * 37])
    for epoch in range(20):
        draws = epoch_draws(importance, 1, epoch, 10)
        counts = torch.bincount(draws.samples, minlength=40)
        assert counts[0] == counts[2] == 1
        assert draws.expected[[0, 2]].tolist() == [1.0, 1.0]


@given(
    st.lists(st.integers(0, LEVELS), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(0, 2**40),
    st.integers(0, 1000),
)
def test_draws_are_as_many_as_samples_and_as_often_as_expected(values, revisit, seed, epoch):
    importance = of_levels(values)
    draws = epoch_draws(importance, seed, epoch, revisit)
    again = epoch_draws(of_levels(values), seed, epoch, revisit)
    assert torch.equal(draws.samples, again.samples)
    count = len(values)
    counts = torch.bincount(draws.samples, minlength=count)
    assert len(counts) == count
    assert counts.sum() == count
    assert draws.expected.sum().item() == pytest.approx(count)
    assert (draws.expected > 0).all()
    # A part of the samples is drawn once for certain, and the others go by weight: as often as
    # their share says, rounded up or down.
    weights = importance.weights().double()
    if weights.sum() > 0 and revisit == 1:
        assert counts.tolist() == [1] * count
    for sample in range(count):
        if not values[sample]:
            assert counts[sample] == 1
        elif revisit > 1:
            most = count * (weights[sample] / weights.sum()).item()
            assert counts[sample] <= math.ceil(most + 1e-9) + 1


@given(
    st.lists(st.integers(1, LEVELS), min_size=1, max_size=40),
    st.integers(1, 7),
    st.integers(0, 1000),
    st.integers(0, 50),
)
def test_each_sample_is_drawn_at_least_once_in_some_epochs(values, revisit, seed, first):
    importance = of_levels(values)
    epochs = [epoch_draws(importance, seed, first + n, revisit).samples for n in range(revisit)]
    assert len(torch.cat(epochs).unique()) == len(values)


@pytest.mark.parametrize(("revisit", "unseen"), [(4, 0), (3, 2), (6, 1)])
def test_the_corrected_mean_has_the_mean_of_all_samples(revisit, unseen):
    """The number of draws of a sample varies by less than one: part of it is drawn with
    probability 1 / revisit, the rest is rounded at random. So the deviation of a mean over as many
    seeds is known.
    """
    count, seeds = 12, 3000
    importance = of_levels([*[0] * unseen, *[1, 15, 4, 9, 15, 1, 2, 3, 8, 13, 7, 15][unseen:]])
    values = torch.arange(1.0, count + 1).double() ** 2
    totals = torch.zeros(count).double()
    estimate = 0.0
    for seed in range(seeds):
        draws = epoch_draws(importance, seed, seed % revisit, revisit)
        totals += torch.bincount(draws.samples, minlength=count)
        estimate += (values / draws.expected)[draws.samples].mean().item() / seeds
    expected = draws.expected
    deviation = math.sqrt(2 * 0.25 / seeds)
    assert (totals / seeds).tolist() == pytest.approx(expected.tolist(), abs=5 * deviation)
    bound = (values / expected).sum().item() / count * deviation
    assert estimate == pytest.approx(values.mean().item(), abs=5 * bound)
    uncorrected = (values * expected).mean().item()
    assert abs(uncorrected - values.mean().item()) > 0.5, "the test would see a missing weight"


def test_the_state_is_a_byte_for_each_sample():
    importance = Importance.unseen(1000, 64)
    for epoch in range(3):
        draws = epoch_draws(importance, 5, epoch, 10).samples[:640]
        for batch in draws.split(64):
            importance = importance.trained(batch, torch.sin(batch.float()) + 1)
        importance = importance.next_epoch()
    importance = importance.trained(torch.arange(64), torch.arange(64.0))
    state = importance.state()
    assert (state["levels"].numel(), state["levels"].element_size()) == (1000, 1)
    other = Importance.of_state(state)
    assert torch.equal(other.levels, importance.levels)
    assert torch.equal(other.newest, importance.newest)
    numbers = ("batch", "smoothing", "last_loss", "loss_sum", "loss_count")
    assert [getattr(other, n) for n in numbers] == [getattr(importance, n) for n in numbers]
