"""Changes of the global batch size: every sample of every epoch is seen exactly once over any
sequence of sizes and numbers of ranks, and sizes that do not suit are refused.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from malletrain import ElasticSampler, Snapshot
from malletrain.training.batch_change import check_batch_norm
from tests.draws import cases
from tests.forked import run_ranks


class Ranks:
    """The ranks of a run. Each reads ahead of its steps, as a DataLoader does."""

    def __init__(self, world, ahead, state, live, arguments):
        self.samplers = [
            ElasticSampler(rank=rank, world_size=world, **arguments) for rank in range(world)
        ]
        self.ahead = ahead
        self.live = live
        for sampler in self.samplers:
            if live:
                sampler.change_size_at_steps(lambda: False)
            if state is not None:
                sampler.load_state_dict(state)
        self.iterate()

    @property
    def size(self):
        (size,) = {sampler.global_batch_size for sampler in self.samplers}
        return size

    def iterate(self):
        self.loaders = [iter(sampler) for sampler in self.samplers]
        self.fetched = [[] for _ in self.samplers]

    def set_size(self, size):
        """As the loop of live mode, it iterates again if the size has changed."""
        before = self.size
        for sampler in self.samplers:
            sampler.set_global_batch_size(size)
        if self.live and self.size != before:
            self.iterate()

    def step(self):
        """One step: (epoch, samples of all ranks)."""
        for loader, fetched in zip(self.loaders, self.fetched, strict=True):
            fetched.extend(itertools.islice(loader, self.ahead + 1 - len(fetched)))
        assert all(self.fetched), "a rank has no sample"
        epoch = self.samplers[0].epoch
        samples = [number for fetched in self.fetched for number in fetched.pop(0)]
        for sampler in self.samplers:
            sampler.advance()
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        if self.samplers[0].epoch != epoch:
            assert not any(self.fetched), "a batch was read and not trained on"
            assert not any(list(loader) for loader in self.loaders)
            self.iterate()
        return epoch, samples


@st.composite
def plans(draw):
    """(arguments of the sampler, [(ranks, batches read ahead, [size before a step or None])])"""
    most = draw(st.integers(1, 6))
    largest = draw(st.integers(most, 40))
    arguments = {
        "num_samples": draw(st.integers(largest, 90)),
        "global_batch_size": draw(st.integers(most, largest)),
        "max_world_size": most,
        "drop_last": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
    }
    sizes = st.lists(st.none() | st.integers(most, largest), min_size=1, max_size=15)
    rounds = st.tuples(st.integers(1, most), st.integers(0, 3), sizes)
    return arguments, draw(st.lists(rounds, min_size=1, max_size=5))


@settings(deadline=None, max_examples=cases(150))
@given(plans(), st.booleans())
def test_every_sample_exactly_once_over_any_sizes_and_ranks(plan, live):
    arguments, rounds = plan
    seen, trained = {}, {}
    state, size, request = None, arguments["global_batch_size"], None
    for world, ahead, sizes in rounds:
        ranks = Ranks(world, ahead, state, live, arguments)
        for new in sizes:
            at_start = ranks.samplers[0].position == 0
            if new is not None:
                ranks.set_size(new)
                request = new
            if request and (at_start or (live and not arguments["drop_last"])):
                size, request = request, None
            assert ranks.size == size
            position = ranks.samplers[0].position
            epoch, samples = ranks.step()
            if ranks.samplers[0].epoch == epoch:  # not the last one of its epoch
                assert len(samples) == size
                assert ranks.samplers[0].position == position + size
            else:
                size, request = request or size, None
            seen.setdefault(epoch, []).extend(samples)
            trained[epoch] = position + len(samples)
        state = ranks.samplers[0].state_dict()
    for epoch, samples in seen.items():
        assert len(set(samples)) == len(samples) == trained[epoch]
        if epoch < state["epoch"]:
            remainder = arguments["num_samples"] - len(samples)
            assert remainder == 0 or (arguments["drop_last"] and remainder < 40)
        else:
            assert len(samples) == state["position"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_with_a_loader_that_reads_ahead_the_next_epoch_has_the_new_size(workers, persistent):
    sampler = ElasticSampler(20, global_batch_size=4, rank=0, world_size=1)
    loader = DataLoader(
        range(20),
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
    )
    sizes = []
    for epoch in sampler.epochs(3):
        if epoch == 1:
            sampler.set_global_batch_size(10)
        for batch in loader:
            sizes.append((epoch, len(batch)))
            if epoch == 1:
                sampler.set_global_batch_size(20)
            sampler.advance()
    assert sizes == [(0, 4)] * 5 + [(1, 10)] * 2 + [(2, 20)]


def test_a_batch_that_is_only_looked_at_does_not_delay_the_change():
    sampler = ElasticSampler(20, global_batch_size=4, rank=0, world_size=1)
    loader = DataLoader(range(20), batch_sampler=sampler)
    assert len(next(iter(loader))) == 4
    sampler.set_global_batch_size(5)
    assert sampler.global_batch_size == 5
    assert [len(batch) for batch in loader] == [5] * 4


def test_a_change_in_the_first_step_of_an_epoch_waits_for_the_next_epoch():
    sampler = ElasticSampler(20, global_batch_size=10, rank=0, world_size=1)
    batches = iter(sampler)
    assert len(next(batches)) == 10
    sampler.set_global_batch_size(5)
    sampler.advance()
    assert len(next(batches)) == sampler.global_batch_size == 10
    sampler.advance()
    assert (sampler.epoch, sampler.global_batch_size) == (1, 5)


def test_the_code_after_an_epoch_may_read_the_data_before_a_change():
    sampler = ElasticSampler(20, global_batch_size=10, rank=0, world_size=1)
    sizes = []
    for epoch in sampler.epochs(2):
        for batch in sampler:
            sizes.append(len(batch))
            sampler.advance()
        if epoch == 0:
            evaluation = iter(sampler)
            next(evaluation)
            sampler.set_global_batch_size(5)
            assert sampler.global_batch_size == 5
    assert sizes == [10, 10, 5, 5, 5, 5]


def test_an_iterator_from_before_a_change_does_not_count():
    sampler = ElasticSampler(20, global_batch_size=4, rank=0, world_size=1)
    sampler.change_size_at_steps(lambda: False)
    before = iter(sampler)
    next(before)
    sampler.set_global_batch_size(5)
    next(before)
    with pytest.raises(RuntimeError, match="more often than batches were taken"):
        sampler.advance()


def test_leaving_an_epoch_early_keeps_a_requested_size_in_the_state():
    sampler = ElasticSampler(20, global_batch_size=4, rank=0, world_size=1)
    for _ in sampler.epochs(1):
        next(iter(sampler))
        sampler.advance()
        sampler.set_global_batch_size(5)
        sampler.leave_early()
        state = sampler.state_dict()
    assert (state["epoch"], state["position"], state["global_batch_size"]) == (1, 0, 5)


def test_the_state_has_a_size_only_if_it_is_not_the_scripts():
    sampler = ElasticSampler(20, global_batch_size=4, rank=0, world_size=1)
    assert "global_batch_size" not in sampler.state_dict()
    sampler.set_global_batch_size(5)
    state = sampler.state_dict()
    assert state["global_batch_size"] == 5
    other = ElasticSampler(20, global_batch_size=8, rank=0, world_size=1)
    other.load_state_dict(state)
    assert other.global_batch_size == 5
    sampler.set_global_batch_size(4)
    other.load_state_dict(sampler.state_dict())
    assert other.global_batch_size == 8
    per_rank = ElasticSampler(20, batch_size=3, rank=0, world_size=1)
    per_rank.load_state_dict(state)
    assert per_rank.global_batch_size == 3


def test_a_state_whose_size_is_below_the_ranks_of_the_job_is_refused():
    sampler = ElasticSampler(20, global_batch_size=8, rank=0, world_size=1)
    sampler.set_global_batch_size(3)
    more = ElasticSampler(20, global_batch_size=8, rank=0, world_size=1, max_world_size=4)
    with pytest.raises(ValueError, match="a global batch of 3 samples cannot be shared by the 4"):
        more.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("arguments", "size", "complaint"),
    [
        ({"global_batch_size": 8}, 3, "of 3 samples cannot be shared by the 4 ranks"),
        ({"global_batch_size": 8}, 0, "must be a whole number from 1, not 0"),
        ({"global_batch_size": 8}, 8.0, "must be a whole number from 1, not 8.0"),
        ({"global_batch_size": 8, "drop_last": True}, 21, "no full global batch of 21 samples"),
        ({"batch_size": 2}, 8, r"this sampler has batch_size \(per rank\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_and_change_nothing(arguments, size, complaint):
    sampler = ElasticSampler(20, rank=0, world_size=1, max_world_size=4, **arguments)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=complaint):
        sampler.set_global_batch_size(size)
    assert sampler.state_dict() == before


def model(*layers):
    return torch.nn.Sequential(torch.nn.Linear(2, 2), *layers)


def frozen():
    layer = torch.nn.BatchNorm1d(2)
    layer.eval()
    return layer


@pytest.mark.parametrize(
    ("layer", "smallest", "refused"),
    [
        (torch.nn.BatchNorm1d(2), 1, True),
        (torch.nn.BatchNorm2d(2), 1, True),
        (torch.nn.BatchNorm1d(2), 2, False),
        (torch.nn.SyncBatchNorm(2), 1, False),
        (torch.nn.LayerNorm(2), 1, False),
        (frozen(), 1, False),
    ],
)
def test_a_batch_normalisation_needs_two_samples(layer, smallest, refused):
    objects = {"model": model(layer), "facts": {}}
    if refused:
        with pytest.raises(ValueError, match="the batch normalisation '1' takes mean and variance"):
            check_batch_norm(objects, smallest)
    else:
        check_batch_norm(objects, smallest)


def test_a_model_under_evaluation_will_train_again():
    with pytest.raises(ValueError, match="batch normalisation"):
        check_batch_norm({"model": model(torch.nn.BatchNorm1d(2)).eval()}, 1)


def test_a_snapshot_knows_the_model_whose_portions_change(tmp_path):
    sampler = ElasticSampler(20, global_batch_size=8, rank=0, world_size=1, max_world_size=4)
    Snapshot(tmp_path / "run.pt", model=model(torch.nn.BatchNorm1d(2)), sampler=sampler)
    with pytest.raises(ValueError, match="Use a larger size"):
        sampler.set_global_batch_size(7)
    sampler.set_global_batch_size(9)
    assert sampler.global_batch_size == 9


def set_sizes(rank, path, sizes):
    """What a rank of two does: a size that all name, then one of its own."""
    torch.distributed.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    sampler = ElasticSampler(20, global_batch_size=8)
    sampler.set_global_batch_size(10)
    try:
        sampler.set_global_batch_size(sizes[rank])
        answer = f"no refusal, {sampler.global_batch_size}"
    except ValueError as error:
        answer = f"{sampler.global_batch_size} {error}"
    (path / f"answer-{rank}").write_text(answer)
    torch.distributed.destroy_process_group()


def test_ranks_that_set_different_sizes_are_refused(tmp_path):
    run_ranks(set_sizes, (tmp_path, (4, 5)), 2)
    for rank in range(2):
        answer = (tmp_path / f"answer-{rank}").read_text()
        assert answer.startswith("10 The ranks set different global batch sizes (rank 0: 4, rank 1")
