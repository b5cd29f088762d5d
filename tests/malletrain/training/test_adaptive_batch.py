"""AdaptiveBatch: the noise that it measures has known values, the batch follows it, and the
learning rate follows the batch.
"""

import math
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from malletrain import AdaptiveBatch, ElasticSampler, Snapshot
from malletrain.protocol.flags import FlagsWriter
from malletrain.training import adaptive_batch
from malletrain.training.adaptive_batch import (
    ESTIMATES_BETWEEN_CHANGES,
    Estimate,
    NoiseAverage,
    from_parts,
    from_successive,
    gain,
    next_size,
    next_towards,
)
from tests.forked import run_ranks

SAMPLES, WIDTH = 960, 40


def data(mean, deviation, samples=SAMPLES):
    """With a loss that is linear in the weights, the gradient of a sample is the sample."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
    return mean + deviation * (noise - noise.mean(0)) / noise.std(0, correction=0)


class Training:
    """One rank's training of a linear loss."""

    def __init__(self, inputs, *, batch=8, most=64, rate=0.1, distributed=False, **arguments):
        self.inputs = inputs
        self.model = torch.nn.Linear(WIDTH, 1, bias=False).double()
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        place = {} if distributed else {"rank": 0, "world_size": 1}
        self.sampler = ElasticSampler(len(inputs), global_batch_size=batch, **place)
        self.adaptive = AdaptiveBatch(self.sampler, self.optimizer, most, **arguments)
        self.loader = DataLoader(TensorDataset(inputs), batch_sampler=self.sampler)
        self.net = DistributedDataParallel(self.model) if distributed else self.model

    def loss(self, x):
        return self.net(x).mean() * self.sampler.loss_weight

    def train(self, epochs=1, before_update=lambda: None):
        for _ in self.sampler.epochs(epochs):
            for (x,) in self.loader:
                self.optimizer.zero_grad()
                self.loss(x).backward()
                before_update()
                self.optimizer.step()
                self.sampler.advance()
        return self.adaptive.noise.mean


def test_one_rank_measures_the_noise_from_successive_gradients():
    training = Training(data(0.3, 0.5), most=8)
    measured = training.train(4)
    assert measured.squared_gradient == pytest.approx(40 * 0.09, rel=0.1)
    assert measured.noise == pytest.approx(40 * 0.25, rel=0.1)


def test_accumulation_measures_the_noise_between_micro_batches():
    training = Training(data(0.3, 0.5), most=8)
    for _ in training.sampler.epochs(2):
        batches = []
        for (x,) in training.loader:
            (training.loss(x) / 4).backward()
            batches.append(x)
            if len(batches) == 4:
                training.optimizer.step()
                training.optimizer.zero_grad()
                training.sampler.advance(4)
                batches.clear()
    measured = training.adaptive.noise.mean
    assert measured.squared_gradient == pytest.approx(40 * 0.09, rel=0.1)
    assert measured.noise == pytest.approx(40 * 0.25, rel=0.15)
    assert training.adaptive.noise.scale == pytest.approx(2.78, rel=0.2)


@pytest.mark.parametrize("kind", ["clipped", "scaled", "set to zero"])
def test_what_the_script_does_to_all_gradients_changes_no_estimate(kind):
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaled", growth_interval=5)
    plain = Training(data(0.3, 0.5), most=8)
    other = Training(data(0.3, 0.5), most=8, scaler=scaler)
    measured = plain.train()
    if kind == "clipped":
        again = other.train(
            before_update=lambda: torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.1)
        )
    else:
        for _ in other.sampler.epochs(1):
            for (x,) in other.loader:
                other.optimizer.zero_grad(set_to_none=kind == "scaled")
                scaler.scale(other.loss(x)).backward()
                if kind == "scaled":
                    scaler.unscale_(other.optimizer)
                    torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.1)
                scaler.step(other.optimizer)
                scaler.update()
                other.sampler.advance()
        again = other.adaptive.noise.mean
    assert again.squared_gradient == pytest.approx(measured.squared_gradient, rel=1e-6)
    assert again.noise == pytest.approx(measured.noise, rel=1e-6)


def test_gradients_that_are_clipped_element_by_element_are_not_measured():
    training = Training(data(0.3, 0.5))
    training.train(
        before_update=lambda: torch.nn.utils.clip_grad_value_(training.model.parameters(), 0.05)
    )
    assert training.adaptive.noise.mean == Estimate(0, 0)
    assert training.sampler.global_batch_size == 8


def test_a_step_whose_update_is_skipped_leaves_no_trace():
    training = Training(data(0.3, 0.5), most=8)
    steps = iter(range(10**6))
    for _ in training.sampler.epochs(2):
        for (x,) in training.loader:
            training.optimizer.zero_grad()
            if next(steps) % 3 == 0:  # as after an overflow
                (training.loss(x) * 1e6).backward()
                training.optimizer.zero_grad()
            training.loss(x).backward()
            training.optimizer.step()
            training.sampler.advance()
    assert training.adaptive.noise.mean.noise == pytest.approx(40 * 0.25, rel=0.1)


def test_the_batch_doubles_up_to_the_most_where_there_is_only_noise():
    training = Training(data(0.0, 1.0), most=24)
    sizes = []
    for _ in training.sampler.epochs(4):
        sizes.append(training.sampler.global_batch_size)
        for (x,) in training.loader:
            training.optimizer.zero_grad()
            training.loss(x).backward()
            training.optimizer.step()
            training.sampler.advance()
    assert sizes[0] == 8
    assert sizes[-1] == training.sampler.global_batch_size == 24
    assert sizes == sorted(sizes)


def test_the_batch_stays_where_there_is_no_noise():
    training = Training(data(0.3, 0.0))
    training.train(2)
    assert training.sampler.requested_batch_size == 8
    assert training.adaptive.noise.scale == pytest.approx(0, abs=1e-9)


def test_the_batch_halves_again_when_the_noise_is_gone():
    training = Training(data(0.3, 0.0), most=64)
    training.sampler.set_global_batch_size(32)
    training.train(4)
    assert training.sampler.global_batch_size < 32


@pytest.mark.parametrize(
    ("rule", "noise", "factor"),
    [
        ("adascale", (0.0, 100.0), 4),
        ("adascale", (1.0, 0.0), 1),
        ("adascale", (1.0, 8.0), 2 / (1 / 4 + 1)),
        ("sqrt", (1.0, 8.0), 2),
        ("none", (0.0, 100.0), 1),
    ],
)
def test_the_update_has_the_rate_of_its_batch(rule, noise, factor):
    training = Training(data(0.3, 0.0), most=64, lr=rule)
    training.sampler.set_global_batch_size(32)
    training.adaptive.noise.load({"squared_gradient": noise[0], "noise": noise[1], "weight": 1})
    (x,) = next(iter(training.loader))
    training.loss(x).backward()
    training.optimizer.step()
    assert training.optimizer.param_groups[0]["lr"] == 0.1
    assert float(training.model.weight[0, 0].detach()) == pytest.approx(-0.1 * factor * 0.3)
    assert training.adaptive.scale_invariant_steps == pytest.approx(factor)


@pytest.mark.parametrize("first", [True, False])
def test_a_scheduler_sees_the_scripts_rate(first):
    training = Training(data(0.3, 0.5))
    if first:
        optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        AdaptiveBatch(training.sampler, optimizer, 64)
    else:
        optimizer = training.optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    begin = optimizer.param_groups[0]["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.loss(training.inputs[:8]).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == begin / 2


def test_an_update_that_fails_changes_neither_rate_nor_state():
    training = Training(data(0.0, 1.0))
    training.train()
    before, size = training.adaptive.state_dict(), training.sampler.requested_batch_size

    def refuse(*_):
        raise RuntimeError("a peer is lost")

    training.optimizer.register_step_pre_hook(refuse)
    (x,) = next(iter(training.loader))
    training.loss(x).backward()
    with pytest.raises(RuntimeError, match="a peer is lost"):
        training.optimizer.step()
    assert training.adaptive.state_dict() == before
    assert training.sampler.requested_batch_size == size
    assert set(training.optimizer.param_groups[0]) == set(
        torch.optim.SGD(training.model.parameters(), lr=0.1).param_groups[0]
    )
    assert training.optimizer.param_groups[0]["lr"] == 0.1


def test_a_closure_is_refused():
    training = Training(data(0.3, 0.5))
    for arguments in (((lambda: 0.0),), ()):
        with pytest.raises(RuntimeError, match="measures one gradient for each update"):
            training.optimizer.step(*arguments, **({} if arguments else {"closure": lambda: 0.0}))


@pytest.mark.parametrize(
    ("of_sampler", "of_batch", "complaint"),
    [
        ({"global_batch_size": 8}, {"most": 7}, "most is 7, but the sampler begins with .* 8"),
        ({"batch_size": 8}, {}, r"the sampler has batch_size \(per rank\)"),
        ({"global_batch_size": 8, "drop_last": True}, {"most": 99}, "of 90 samples has no full"),
        ({"global_batch_size": 8}, {"lr": "cosine"}, "one of adascale, sqrt, none, not 'cosine'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(of_sampler, of_batch, complaint):
    sampler = ElasticSampler(90, rank=0, world_size=1, **of_sampler)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match=complaint):
        AdaptiveBatch(sampler, optimizer, **of_batch)


def test_the_optimizer_of_accelerate_calls_it_without_a_closure():
    """AcceleratedOptimizer and GradScaler call ``step(None)`` of the optimizer inside."""
    training = Training(data(0.3, 0.5))
    training.loss(training.inputs[:8]).backward()
    training.optimizer.step(None)
    assert training.adaptive.scale_invariant_steps == 1


def test_the_daemon_learns_batch_and_noise(monkeypatch):
    reports = []
    monkeypatch.setattr(adaptive_batch, "tell_batch", lambda *facts: reports.append(facts))
    training = Training(data(0.3, 0.5), most=16)
    training.train()
    updates = SAMPLES // 8 - 1  # the first one has none before it
    assert len(reports) == updates // ESTIMATES_BETWEEN_CHANGES
    assert {facts[:4] for facts in reports} == {(0, 8, 8, 16)}
    assert reports[-1][4] == pytest.approx(training.adaptive.noise.scale, rel=0.3)


@pytest.mark.parametrize(
    ("advised", "sizes"), [(32, {8, 16, 32}), (8, {8}), (1000, {8, 16, 32, 64})]
)
def test_the_batch_goes_where_the_daemon_advises(monkeypatch, tmp_path, advised, sizes):
    """Whatever the noise: alone it would keep the batch at 8."""
    writer = FlagsWriter(str(tmp_path / "flags"))
    monkeypatch.setenv("MALLETRAIN_FLAGS", writer.path)
    training = Training(data(0.3, 0.5), most=64)
    writer.advise_batch(advised)
    seen = set()
    for epoch in range(1, 7):
        training.train(epoch)
        seen.add(training.sampler.global_batch_size)
    assert seen | {8} == sizes
    writer.close()


def test_ranks_without_a_process_group_are_refused():
    sampler = ElasticSampler(90, rank=0, world_size=2, global_batch_size=8)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    AdaptiveBatch(sampler, optimizer)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="the gradients of the 2 ranks of the sampler"):
        optimizer.step()


def test_a_wrapped_optimizer_is_refused():
    class AcceleratedOptimizer(torch.optim.SGD):
        """Stands for the wrapper of Accelerate."""

    sampler = ElasticSampler(90, rank=0, world_size=1, global_batch_size=8)
    optimizer = AcceleratedOptimizer([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(TypeError, match=r"Create AdaptiveBatch before prepare\(\)"):
        AdaptiveBatch(sampler, optimizer)


def test_the_base_batch_is_that_of_the_script():
    """It may be created after the sampler has another size."""
    sampler = ElasticSampler(90, rank=0, world_size=1, global_batch_size=8)
    sampler.set_global_batch_size(32)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert AdaptiveBatch(sampler, optimizer, most=16).base == 8


def test_a_lower_most_takes_effect_where_the_run_resumes():
    first, second = Training(data(0.0, 1.0), most=64), Training(data(0.0, 1.0), most=16)
    first.train(3)
    assert first.sampler.global_batch_size == 64
    second.sampler.load_state_dict(first.sampler.state_dict())
    second.adaptive.load_state_dict(first.adaptive.state_dict())
    second.train(5)
    assert second.sampler.global_batch_size == 16


def test_a_base_batch_that_batch_normalisation_cannot_have_is_refused_at_the_first_update(tmp_path):
    """Otherwise the run would fail when the batch returns to it."""
    training = Training(data(0.3, 0.5), batch=8)
    training.sampler.max_world_size = 8
    norm = torch.nn.BatchNorm1d(2)
    Snapshot(tmp_path / "run.pt", model=norm, sampler=training.sampler)
    training.loss(training.inputs[:8]).backward()
    with pytest.raises(ValueError, match="batch normalisation"):
        training.optimizer.step()


def test_an_update_without_gradients_is_not_measured():
    training = Training(data(0.3, 0.5))
    training.optimizer.step()
    assert training.adaptive.state_dict()["estimates"] == 0


def test_a_restart_continues_with_the_batch_and_the_noise(tmp_path):
    def snapshot(training):
        return Snapshot(
            tmp_path / "run.pt",
            model=training.model,
            optimizer=training.optimizer,
            sampler=training.sampler,
            adaptive=training.adaptive,
        )

    first, second = Training(data(0.0, 1.0)), Training(data(0.0, 1.0))
    writer = snapshot(first)
    first.train(2)
    assert writer.save()
    assert snapshot(second).restore()
    assert first.sampler.global_batch_size > 8
    assert second.sampler.global_batch_size == first.sampler.global_batch_size
    assert second.adaptive.state_dict() == first.adaptive.state_dict()
    assert second.adaptive.base == 8


def train_distributed(rank, world, folder, mean, batch):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    training = Training(data(mean, 0.5), batch=batch, most=4 * batch, distributed=True)
    measured = training.train(3)
    facts = (
        measured.squared_gradient,
        measured.noise,
        training.sampler.global_batch_size,
        training.adaptive.state_dict(),
        training.model.weight.detach(),
    )
    torch.save(facts, Path(folder, f"rank-{rank}"))
    # The end of DDP's reducer holds the GIL while it waits for gloo's thread, which may need it.
    os._exit(0)


@pytest.mark.parametrize(("mean", "batch"), [(0.3, 8), (0.3, 7), (0.0, 8)])
def test_ranks_measure_the_noise_between_their_portions(tmp_path, mean, batch):
    run_ranks(train_distributed, (2, tmp_path, mean, batch), 2)
    first, second = (torch.load(tmp_path / f"rank-{rank}") for rank in range(2))
    squared, noise, size, state, weight = first
    assert noise == pytest.approx(40 * 0.25, rel=0.1)
    assert squared == pytest.approx(40 * mean**2, rel=0.1, abs=0.15)
    assert size == (batch if mean else 4 * batch)
    assert second[:4] == (squared, noise, size, state)
    assert torch.equal(second[4], weight)
    assert state["estimates"] >= ESTIMATES_BETWEEN_CHANGES


SQUARED, NOISE = 4.0, 60.0
"""|G|² and tr Σ; the noise scale is 15 samples."""


def expected(samples):
    """Expectation of the squared norm of a gradient over so many samples."""
    return SQUARED + NOISE / samples


@pytest.mark.parametrize("sizes", [(8, 8), (3, 5), (1, 2, 2), (7, 7, 7, 6)])
def test_the_expected_norms_give_the_true_values(sizes):
    part = sum(map(expected, sizes)) / len(sizes)
    inverse = sum(1 / size for size in sizes) / len(sizes)
    estimate = from_parts(part, inverse, expected(sum(sizes)), sum(sizes))
    assert estimate.squared_gradient == pytest.approx(SQUARED)
    assert estimate.noise == pytest.approx(NOISE)


def test_one_part_says_nothing():
    assert from_parts(expected(8), 1 / 8, expected(8), 8) is None


def test_the_expected_products_of_successive_gradients_give_the_true_values():
    difference = NOISE / 8 + NOISE / 4
    estimate = from_successive(SQUARED, difference, 8, 4)
    assert (estimate.squared_gradient, estimate.noise) == pytest.approx((SQUARED, NOISE))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_synthetic_gradients_of_a_known_noise_scale(ranks):
    """200 elements: each sample's gradient is G plus noise of variance 0.3 an element."""
    generator = torch.Generator().manual_seed(5)
    true = torch.full((200,), 0.1414, dtype=torch.float64)
    average, before, share = NoiseAverage(), None, 4
    for _ in range(400):
        noise = torch.randn(ranks, share, 200, generator=generator, dtype=torch.float64)
        parts = (true + math.sqrt(0.3) * noise).mean(1)
        whole, size = parts.mean(0), ranks * share
        part = float(parts.square().sum(1).mean())
        estimate = from_parts(part, 1 / share, float(whole.square().sum()), size)
        if before is not None and estimate is None:
            product, difference = float(whole @ before), float((whole - before).square().sum())
            estimate = from_successive(product, difference, size, size)
        before = whole
        if estimate is not None:
            average.add(estimate, 1)
    assert average.mean.squared_gradient == pytest.approx(4.0, rel=0.1)
    assert average.mean.noise == pytest.approx(60.0, rel=0.05)
    assert average.scale == pytest.approx(15, rel=0.15)


def test_the_gain_is_1_without_noise_and_the_ratio_with_noise_only():
    assert gain(Estimate(4.0, 0.0), 32, 256) == 1
    assert gain(Estimate(0.0, 60.0), 32, 256) == pytest.approx(8)
    assert gain(Estimate(-1.0, 60.0), 32, 256) == pytest.approx(8)
    assert gain(Estimate(0.0, 0.0), 32, 256) == 1
    # noise of a base batch as large as the gradient: (1 + 1) / (1 / 8 + 1)
    assert gain(Estimate(1.0, 32.0), 32, 256) == pytest.approx(2 / (1 / 8 + 1))


@given(
    st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 100), st.integers(1, 50), st.integers(0, 9)
)
def test_the_gain_lies_between_1_and_the_ratio_and_grows_with_it(squared, noise, base, ratio, more):
    estimate = Estimate(squared, noise)
    value = gain(estimate, base, ratio * base)
    assert 1 - 1e-9 <= value <= ratio * (1 + 1e-9)
    assert gain(estimate, base, (ratio + more) * base) >= value * (1 - 1e-9)


def test_a_batch_below_the_base_has_no_gain():
    assert gain(Estimate(0.0, 60.0), 32, 16) == 1


@pytest.mark.parametrize(
    ("size", "noise_scale", "following"),
    [
        (64, 127.0, 64),
        (64, 128.0, 128),
        (64, math.inf, 128),
        (512, 1e9, 600),
        (600, 1e9, 600),
        (1200, 1e9, 600),
        (1200, 1200.0, 600),
        (2400, 0.0, 600),
        (128, 64.0, 128),
        (128, 63.0, 64),
        (100, 0.0, 64),
        (64, 0.0, 64),
    ],
)
def test_the_batch_follows_the_noise_scale(size, noise_scale, following):
    assert next_size(size, 64, 600, noise_scale) == following


@pytest.mark.parametrize(
    ("size", "target", "following"),
    [
        (64, 64, 64),
        (64, 512, 128),
        (256, 300, 300),
        (512, 64, 256),
        (100, 64, 64),
        (600, 512, 512),
        (1, 1, 1),
    ],
)
def test_the_batch_goes_to_an_advised_one_step_by_step(size, target, following):
    assert next_towards(size, target) == following


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50), st.floats(0, 1e9))
def test_the_batch_stays_between_base_and_most(base, above, more, noise_scale):
    size, most = base + above, base + more
    assert base <= next_size(size, base, most, noise_scale) <= most


def test_the_average_does_not_depend_on_how_samples_are_cut_into_updates():
    small, large = NoiseAverage(), NoiseAverage()
    for noise in (10.0, 30.0):
        for _ in range(8):
            small.add(Estimate(1.0, noise), 1)
        large.add(Estimate(1.0, noise), 8)
    assert small.scale == pytest.approx(large.scale)
    assert 20 < small.scale < 30


def test_an_average_without_estimates_or_without_noise():
    average = NoiseAverage()
    assert average.scale == 0
    average.add(Estimate(math.nan, 1.0), 1)
    average.add(Estimate(1.0, math.inf), 1)
    assert average.scale == 0
    average.add(Estimate(-1.0, 2.0), 1)
    assert average.scale == math.inf
    average.add(Estimate(1e9, -5.0), 1000)
    assert average.scale == 0


def test_the_state_is_plain_numbers_and_continues():
    average, other = NoiseAverage(), NoiseAverage()
    average.add(Estimate(2.0, 6.0), 3)
    other.load(average.state())
    assert other.scale == average.scale == pytest.approx(3)
    assert all(isinstance(value, float) for value in average.state().values())
