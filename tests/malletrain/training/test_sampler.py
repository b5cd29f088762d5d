"""ElasticSampler: over any sequence of orderly rescales every sample of every epoch is seen exactly
once, and no rank goes without.
"""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from malletrain import ElasticSampler
from malletrain.protocol.worker_channel import WorkLeft
from malletrain.training import report
from tests.draws import cases
from tests.malletrain.training.worker_side import as_worker


def group(world, **arguments):
    """One sampler per rank."""
    return [ElasticSampler(rank=rank, world_size=world, **arguments) for rank in range(world)]


class Run:
    """A training run in which every rank fetches ahead of its steps, as DataLoader workers do."""

    def __init__(self, samplers, state=None, ahead=0):
        self.samplers = samplers
        self.ahead = ahead
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        self.open_epoch()

    def open_epoch(self):
        self.epoch = self.samplers[0].epoch
        self.loaders = [iter(sampler) for sampler in self.samplers]
        self.fetched = [[] for _ in self.samplers]

    def step(self):
        """One step of all ranks: (epoch, batches)."""
        for loader, fetched in zip(self.loaders, self.fetched, strict=True):
            fetched.extend(itertools.islice(loader, self.ahead + 1 - len(fetched)))
        assert len({len(fetched) > 0 for fetched in self.fetched}) == 1, (
            "some rank has a batch while another has none"
        )
        assert self.fetched[0], "an epoch without a step left must not be entered"
        epoch, batches = self.epoch, [fetched.pop(0) for fetched in self.fetched]
        for sampler in self.samplers:
            sampler.advance()
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states), "the ranks disagree about the position"
        if self.samplers[0].epoch != epoch:
            assert not any(
                fetched or list(loader)
                for fetched, loader in zip(self.fetched, self.loaders, strict=True)
            )
            self.open_epoch()
        return epoch, batches


@st.composite
def plans(draw):
    """(sampler arguments, [(world size, steps, batches fetched ahead), ...])"""
    most = draw(st.integers(1, 8))
    samples = draw(st.integers(most, 90))
    arguments = {
        "num_samples": samples,
        "max_world_size": most,
        "seed": draw(st.integers(0, 2**70)),
    }
    if draw(st.booleans()):
        arguments["global_batch_size"] = draw(st.integers(most, 100))
    else:
        arguments["batch_size"] = draw(st.integers(1, 20))
    arguments["shuffle"] = draw(st.booleans())
    rounds = draw(
        st.lists(
            st.tuples(st.integers(1, most), st.integers(1, 12), st.integers(0, 4)),
            min_size=1,
            max_size=6,
        )
    )
    return arguments, rounds


@settings(deadline=None, max_examples=cases(200))
@given(plans())
def test_every_sample_exactly_once_over_any_rescales(plan):
    arguments, rounds = plan
    seen = {}
    state = None
    for world, steps, ahead in rounds:
        run = Run(group(world, **arguments), state, ahead)
        for _ in range(steps):
            epoch, batches = run.step()
            sizes = [len(batch) for batch in batches]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            seen.setdefault(epoch, []).extend(itertools.chain(*batches))
            remaining = arguments["num_samples"] - run.samplers[0].position
            assert remaining >= arguments["max_world_size"]
        state = run.samplers[0].state_dict()
    everything = list(range(arguments["num_samples"]))
    assert sorted(seen) == list(range(len(seen)))
    for epoch, samples in seen.items():
        assert len(set(samples)) == len(samples)
        if epoch < state["epoch"]:
            assert sorted(samples) == everything
        else:
            assert len(samples) == state["position"]


@settings(deadline=None, max_examples=cases(100))
@given(plans())
def test_a_fixed_global_batch_means_the_same_steps_at_any_scale(plan):
    arguments, rounds = plan
    arguments.pop("batch_size", None)
    arguments.setdefault("global_batch_size", arguments["max_world_size"] + 3)
    alone = Run(group(1, **arguments))
    state = None
    for world, steps, ahead in rounds:
        run = Run(group(world, **arguments), state, ahead)
        for _ in range(steps):
            epoch, batches = run.step()
            assert (epoch, [list(itertools.chain(*batches))]) == alone.step()
        state = run.samplers[0].state_dict()


@settings(deadline=None, max_examples=cases(100))
@given(plans(), st.integers(1, 4))
def test_drop_last_gives_full_batches_only_and_repeats_nothing(plan, batch):
    arguments, rounds = plan
    arguments.pop("global_batch_size", None)
    arguments |= {"batch_size": batch, "drop_last": True}
    arguments["num_samples"] += batch * arguments["max_world_size"]
    seen = {}
    state = None
    for world, steps, ahead in rounds:
        run = Run(group(world, **arguments), state, ahead)
        for _ in range(steps):
            epoch, batches = run.step()
            assert {len(one) for one in batches} == {batch}
            seen.setdefault(epoch, []).extend(itertools.chain(*batches))
        state = run.samplers[0].state_dict()
    for epoch, samples in seen.items():
        assert len(set(samples)) == len(samples)
        if epoch < state["epoch"]:
            assert arguments["num_samples"] - len(samples) < batch * arguments["max_world_size"]


@given(plans(), st.integers(1, 8))
@settings(deadline=None, max_examples=cases(100))
def test_the_lengths_are_the_numbers_of_steps(plan, world):
    arguments, _ = plan
    sampler = ElasticSampler(
        rank=0, world_size=min(world, arguments["max_world_size"]), **arguments
    )
    assert len(sampler) == sampler.steps_per_epoch == len(list(sampler))
    next(iter(sampler))
    sampler.advance()
    if sampler.epoch == 0:
        assert len(sampler) == sampler.steps_per_epoch - 1 == len(list(sampler))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("position", [0, 12])
def test_the_length_of_a_loader_stays_while_it_is_iterated(position, workers):
    sampler = ElasticSampler(22, global_batch_size=4, max_world_size=3, rank=0, world_size=1)
    loader = DataLoader(range(22), batch_sampler=sampler, num_workers=workers)
    sampler.set_position(1, position)
    lengths = []
    for number, _ in enumerate(loader, 1):
        lengths.append((number, len(loader)))
        sampler.advance()
    whole = 5 if position == 0 else 2
    assert lengths == [(number, whole) for number in range(1, whole + 1)]
    assert len(loader) == 5  # of the next epoch


def test_the_length_of_a_loader_whose_loop_was_left_is_what_is_left():
    sampler = ElasticSampler(22, global_batch_size=4, max_world_size=3, rank=0, world_size=1)
    loader = DataLoader(range(22), batch_sampler=sampler)
    for _ in loader:
        sampler.advance()
        break
    assert len(loader) == 4


@given(st.integers(1, 7), st.integers(7, 30), st.integers(0, 5))
@settings(deadline=None, max_examples=cases(50))
def test_the_loss_weight_makes_the_gradient_the_mean_over_the_global_batch(world, batch, seed):
    data = torch.randn(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    samplers = group(world, num_samples=60, global_batch_size=batch, max_world_size=7)
    run = Run(samplers)
    for _ in range(3):
        weights = [sampler.loss_weight for sampler in samplers]
        _, batches = run.step()
        averaged = (
            sum(data[one].mean() * weight for one, weight in zip(batches, weights, strict=True))
            / world
        )
        assert torch.isclose(
            averaged, data[list(itertools.chain(*batches))].mean(), rtol=1e-12, atol=1e-12
        )
    even = ElasticSampler(64, global_batch_size=16, rank=1, world_size=4)
    assert even.loss_weight == 1.0


def test_epochs_differ_and_seeds_differ():
    def order(seed, epoch):
        sampler = ElasticSampler(50, batch_size=10, seed=seed, rank=0, world_size=1)
        sampler.set_position(epoch, 0)
        return tuple(itertools.chain(*sampler))

    orders = {order(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert order(3, 4) == order(3, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_real_data_loader_and_a_restart_in_between(workers):
    data = torch.arange(37)

    def loaders(world, state=None):
        samplers = group(world, num_samples=37, global_batch_size=8, max_world_size=4)
        if state:
            for sampler in samplers:
                sampler.load_state_dict(state)
        return samplers, [
            iter(DataLoader(data, batch_sampler=sampler, num_workers=workers))
            for sampler in samplers
        ]

    seen = []
    samplers, iterators = loaders(2)
    for _ in range(2):
        for iterator in iterators:
            seen.extend(next(iterator).tolist())
        for sampler in samplers:
            sampler.advance()
    state = samplers[0].state_dict()
    assert state["position"] == 16
    del iterators
    samplers, iterators = loaders(3, state)
    for batches in zip(*iterators, strict=True):
        seen.extend(torch.cat(batches).tolist())
        for sampler in samplers:
            sampler.advance()
    assert sorted(seen) == list(range(37))
    assert samplers[0].epoch == 1


def test_epochs_resume_where_the_state_says_and_a_finished_run_has_none_left():
    sampler = ElasticSampler(20, batch_size=5, rank=0, world_size=1)
    seen = []
    for epoch in sampler.epochs(3):
        for _ in sampler:
            sampler.advance()
            seen.append((epoch, sampler.position))
            if len(seen) == 6:
                state = sampler.state_dict()
    assert len(seen) == 12
    assert list(sampler.epochs(3)) == []
    again = ElasticSampler(20, batch_size=5, rank=0, world_size=1)
    again.load_state_dict(state)
    resumed = []
    for epoch in again.epochs(3):
        for _ in again:
            again.advance()
            resumed.append((epoch, again.position))
    assert resumed == seen[6:]


def test_leaving_an_epoch_early_goes_on_with_the_next_and_is_told(capsys):
    report.sentence_keys.clear()
    sampler = ElasticSampler(20, batch_size=5, rank=0, world_size=1)
    visited = []
    for epoch in sampler.epochs(3):
        visited.append(epoch)
        for _ in sampler:
            sampler.advance()
            break
    assert visited == [0, 1, 2]
    assert capsys.readouterr().err.count("was left after 5 of 20 samples") == 1


def test_an_epoch_that_is_resumed_at_the_scripts_limit_has_no_step_left():
    state = {"epoch": 1, "position": 10}
    sampler = ElasticSampler(20, batch_size=5, rank=0, world_size=1)
    sampler.load_state_dict({**sampler.state_dict(), **state})
    steps = []
    for epoch in sampler.epochs(3):
        for _ in sampler:
            if sampler.position >= 10:
                break
            steps.append((epoch, sampler.position))
            sampler.advance()
    assert steps == [(2, 0), (2, 5)]


def test_a_forgotten_advance_is_an_error_after_the_first_epoch():
    sampler = ElasticSampler(20, batch_size=5, rank=0, world_size=1)
    epochs = sampler.epochs(3)
    next(epochs)
    assert len(list(sampler)) == 4
    with pytest.raises(RuntimeError, match=r"without a single call of sampler\.advance"):
        next(epochs)


def test_advancing_past_what_the_loader_took_is_an_error():
    sampler = ElasticSampler(20, batch_size=5, rank=0, world_size=1)
    batches = iter(sampler)
    next(batches)
    next(batches)
    sampler.advance(batches=2)
    assert sampler.position == 10
    with pytest.raises(RuntimeError, match="more often than batches were taken"):
        sampler.advance()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "exactly one of"),
        ({"batch_size": 4, "global_batch_size": 4}, "exactly one of"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1, not 0"),
        ({"batch_size": 2.5}, "not 2.5"),
        ({"batch_size": 4, "num_samples": 0}, "num_samples"),
        ({"batch_size": 4, "world_size": 0}, "world_size"),
        ({"batch_size": 4, "rank": 4}, "rank 4 is not one of the 4 ranks"),
        ({"batch_size": 4, "max_world_size": 3}, "max_world_size is 3, but there are 4 ranks"),
        ({"batch_size": 4, "max_world_size": 101}, "100 samples are fewer than the 101 ranks"),
        (
            {"global_batch_size": 7, "max_world_size": 8},
            "a global batch of 7 samples cannot be shared by the 8 ranks",
        ),
        (
            {"batch_size": 20, "max_world_size": 6, "drop_last": True},
            "no full global batch of 120 samples",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match="ElasticSampler") as caught:
        ElasticSampler(**({"num_samples": 100, "rank": 0, "world_size": 4} | arguments))
    assert complaint in str(caught.value)


def test_rank_and_world_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE", "6")
    sampler = ElasticSampler(100, global_batch_size=10)
    assert (sampler.rank, sampler.world_size, sampler.max_world_size) == (1, 2, 6)
    monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE", "one")
    assert ElasticSampler(100, global_batch_size=10).max_world_size == 2


STATE = ElasticSampler(20, batch_size=5, rank=0, world_size=1).state_dict()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_samples": 21}, "written for a dataset of 21 samples, but this one has 20"),
        ({"version": 2}, "version 2"),
        ({"position": 21}, "no sample 21 of 20"),
        ({"position": -1}, "no sample -1 of 20"),
        ({"epoch": -1}, "in epoch -1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        ElasticSampler(20, batch_size=5, rank=0, world_size=1).load_state_dict(STATE | change)


def test_the_order_of_the_state_wins(capsys):
    sampler = ElasticSampler(20, batch_size=5, seed=1, rank=0, world_size=1)
    sampler.load_state_dict(STATE | {"position": 5})
    assert sampler.seed == 0
    assert "seed 0" in capsys.readouterr().err
    rest = list(itertools.chain(*sampler))
    first = next(iter(ElasticSampler(20, batch_size=5, seed=0, rank=0, world_size=1)))
    assert sorted(first + rest) == list(range(20))


def test_a_tail_too_short_for_more_ranks_than_were_planned_is_left_out_and_told(capsys):
    small = ElasticSampler(20, batch_size=6, rank=0, world_size=1, max_world_size=2)
    for _ in itertools.islice(small, 3):
        small.advance()
    assert small.position == 18
    big = ElasticSampler(20, batch_size=6, rank=0, world_size=3, max_world_size=3)
    big.load_state_dict(small.state_dict())
    assert (big.epoch, big.position) == (1, 0)
    assert "The last 2 samples of epoch 0 are left out" in capsys.readouterr().err


# --- a loader that takes the batches for something else ---


def test_as_sampler_instead_of_batch_sampler_it_refuses_at_the_first_batch():
    sampler = ElasticSampler(20, global_batch_size=5, rank=0, world_size=1)
    for drop_last in (False, True):
        loader = DataLoader(torch.arange(20), batch_size=4, sampler=sampler, drop_last=drop_last)
        with pytest.raises(TypeError, match=r"DataLoader\(dataset, batch_sampler=sampler\)"):
            next(iter(loader))
    assert next(iter(DataLoader(torch.arange(20), batch_sampler=sampler))).shape == (5,)


def test_a_loader_that_accelerate_shares_out_once_more_is_refused():
    data_loader = pytest.importorskip("accelerate.data_loader", reason="malletrain[integrations]")
    sampler = ElasticSampler(20, global_batch_size=6, rank=0, world_size=2)
    shard = data_loader.BatchSamplerShard(sampler, num_processes=2, even_batches=False)
    with pytest.raises(TypeError, match="leave it out of prepare"):
        next(iter(DataLoader(torch.arange(20), batch_sampler=shard)))


@pytest.mark.parametrize(
    ("drop_last", "position", "remaining"),
    [(False, (0, 0), 300), (False, (1, 40), 160), (True, (1, 32), 160)],
)
def test_rank_0_says_how_many_samples_are_left(monkeypatch, drop_last, position, remaining):
    for rank in (0, 1):
        with as_worker(monkeypatch, rank=rank, world=2) as agent:
            sampler = ElasticSampler(
                100, global_batch_size=32, rank=rank, world_size=2, drop_last=drop_last
            )
            sampler.set_position(*position)
            epochs = sampler.epochs(3)
            next(epochs)
            counts = [message.samples for message in agent.received(WorkLeft)]
            epochs.close()
            assert counts == ([remaining] if rank == 0 else [])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_says_that_its_training_is_over(monkeypatch, rank, early):
    with as_worker(monkeypatch, rank=rank, world=2) as agent:
        sampler = ElasticSampler(8, global_batch_size=4, rank=rank, world_size=2)
        for _ in sampler.epochs(2):
            for _ in sampler:
                sampler.advance()
            assert 0 not in [message.samples for message in agent.received(WorkLeft)]
            if early:
                break
        assert [message.samples for message in agent.received(WorkLeft)][-1:] == [0]


# --- gradient accumulation ---


def accumulated(ranks, samples, batch, micro, workers=0, prefetch=False):
    """Gradients that training with accumulation gives on ``ranks`` ranks: the mean over ranks, as
    DDP makes it, of the sums over the micro-batches of each step.
    """
    values = torch.arange(samples, dtype=torch.float64) ** 2

    def gradients(rank):
        sampler = ElasticSampler(
            samples, global_batch_size=batch, rank=rank, world_size=ranks, max_world_size=3
        )
        loader = DataLoader(values, batch_sampler=sampler, num_workers=workers)
        for _ in sampler.epochs(2):
            batches = ahead(iter(loader)) if prefetch else iter(loader)
            remaining, todo, total = len(loader), 0, 0.0
            for x in batches:
                todo, remaining = todo + 1, remaining - 1
                total += float(x.mean() * sampler.loss_weight / micro)
                if todo == micro or remaining == 0:
                    yield total
                    sampler.advance(batches=todo)
                    todo, total = 0, 0.0

    by_rank = zip(*(gradients(rank) for rank in range(ranks)), strict=True)
    return [sum(step) / ranks for step in by_rank]


def ahead(batches):
    """As a prefetcher for a GPU does: it has the next batch before it gives this one."""
    following = next(batches, None)
    while following is not None:
        batch, following = following, next(batches, None)
        yield batch


@pytest.mark.parametrize(
    ("samples", "batch", "micro"), [(45, 8, 3), (46, 7, 4), (31, 5, 2), (29, 8, 1), (12, 5, 8)]
)
def test_accumulated_gradients_do_not_depend_on_the_number_of_ranks(samples, batch, micro):
    alone, *more = (accumulated(ranks, samples, batch, micro) for ranks in (1, 2, 3))
    for several in more:
        assert several == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("samples", "batch"), [(45, 8), (29, 8), (46, 7)])
def test_a_prefetcher_that_is_a_batch_ahead_is_no_accumulation(samples, batch):
    alone, *more = (accumulated(ranks, samples, batch, 1, prefetch=True) for ranks in (1, 2, 3))
    for several in more:
        assert several == pytest.approx(alone, rel=1e-12)


def test_accumulated_gradients_where_loader_workers_read_ahead():
    alone = accumulated(1, 45, 8, 3)
    assert accumulated(3, 45, 8, 3, workers=2) == pytest.approx(alone, rel=1e-12)


def test_a_sampler_can_be_copied_and_pickled_while_it_is_read():
    sampler = ElasticSampler(20, global_batch_size=5, rank=0, world_size=1)
    batches = iter(DataLoader(torch.arange(20), batch_sampler=sampler))
    sampler.on_epoch_closed(lambda: None)
    next(batches)
    sampler.advance()
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert twin.state_dict() == sampler.state_dict()
        assert list(twin) == list(sampler)


@pytest.mark.slow
@pytest.mark.parametrize("loader", [{}, {"num_workers": 1}], ids=["alone", "a worker"])
@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_what_a_step_draws_does_not_depend_on_where_the_loader_was_begun(loader, shuffle):
    """A DataLoader draws a number of its own from the same generator when it is iterated."""

    def draws(interrupted):
        torch.manual_seed(7)
        drawn, sampler = [], None
        for stop in (interrupted, None):
            state = sampler.state_dict() if sampler else None
            sampler = ElasticSampler(12, global_batch_size=3, shuffle=shuffle, rank=0, world_size=1)
            if state:
                sampler.load_state_dict(state)
            batches = DataLoader(torch.arange(12), batch_sampler=sampler, **loader)
            for _ in sampler.epochs(2):
                for _ in batches:
                    drawn.append(float(torch.rand(1)))
                    sampler.advance()
                    if len(drawn) == stop:
                        break
                if len(drawn) == stop:
                    break
        return drawn

    undisturbed = draws(None)
    assert len(undisturbed) == 8
    for step in range(1, 8):
        assert draws(step) == undisturbed, step


@pytest.mark.parametrize(
    ("usual", "of_layouts", "batches", "most"),
    [
        ("2", None, {"global_batch_size": 8}, 2),
        ("2", "16", {"global_batch_size": 8}, 8),  # layouts with more ranks are left out
        ("2", "4", {"global_batch_size": 8}, 4),
        ("4", "2", {"global_batch_size": 8}, 4),
        ("2", "16", {"batch_size": 8}, 2),
    ],
)
def test_the_most_ranks_cover_the_layouts_that_may_be_tried(
    monkeypatch, usual, of_layouts, batches, most
):
    monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE", usual)
    if of_layouts is not None:
        monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE_OF_LAYOUTS", of_layouts)
    assert ElasticSampler(100, **batches).max_world_size == most


def test_a_global_batch_below_the_ranks_of_the_default_layout_stays_an_error(monkeypatch):
    monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE", "8")
    monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE_OF_LAYOUTS", "16")
    with pytest.raises(ValueError, match="cannot be shared by the 8 ranks"):
        ElasticSampler(100, global_batch_size=4)
