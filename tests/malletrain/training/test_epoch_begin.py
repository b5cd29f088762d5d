"""A run that resumes in the middle of an epoch begins with the code of its beginning: it counts
once.
"""

import random
from collections import Counter

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

import malletrain
from malletrain.training import rng
from malletrain.training.epoch_begin import EpochBegin


class Halves(torch.nn.Module):
    """A model whose attributes and buffers a script sets at the beginning of an epoch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.temperature = 8.0
        self.register_buffer("correct", torch.zeros(()))

    def forward(self, x):
        return self.layer(x) / self.temperature


class Run:
    """A script with as much as possible at the beginning of each epoch."""

    def __init__(self, path, sampler=None):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.model, self.teacher = Halves(), torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.sampler = sampler or malletrain.ElasticSampler(
            12, global_batch_size=4, max_world_size=1
        )
        self.sums = {"samples": 0, "losses": [], "seen": numpy.zeros(12)}
        self.snapshot = malletrain.Snapshot(
            path,
            model=self.model,
            teacher=self.teacher,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            sums=self.sums,
        )
        self.snapshot.restore()
        self.trace = []

    def train(self, stop_after=100):
        data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
        loader = DataLoader(data, batch_sampler=self.sampler)
        for epoch in self.sampler.epochs(3):
            if epoch:
                self.scheduler.step()
                self.model.temperature /= 2
            self.optimizer.param_groups[0]["weight_decay"] = (
                self.optimizer.param_groups[0]["weight_decay"] + 0.01
            )
            self.model.correct.zero_()
            self.sums["samples"] = 0
            self.sums["losses"].clear()
            self.sums["seen"][:] = 0
            self.teacher.load_state_dict(self.model.layer.state_dict())
            drawn = (random.random(), float(numpy.random.rand()), float(torch.rand(())))
            for (x,) in loader:
                self.optimizer.zero_grad()
                (self.model(x) + self.teacher(x).detach()).pow(2).mean().backward()
                self.optimizer.step()
                self.model.correct += len(x)
                self.sums["samples"] += len(x)
                self.sums["losses"].append(float(self.model.layer.bias.detach()))
                self.sums["seen"][len(self.sums["losses"])] = 1
                self.sampler.advance()
                self.trace.append(
                    (
                        *(self.optimizer.param_groups[0][k] for k in ("lr", "weight_decay")),
                        *(self.model.temperature, float(self.model.correct)),
                        *(self.sums["samples"], list(self.sums["losses"])),
                        *(self.sums["seen"].sum(), drawn, float(torch.rand(()))),
                        float(self.teacher(x).detach().sum()),
                        float(self.model.layer.weight.sum()),
                    )
                )
                self.snapshot.save()
                stop_after -= 1
                if not stop_after:
                    return


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 8])
def test_the_code_at_the_beginning_of_an_epoch_counts_once(tmp_path, steps):
    whole = Run(tmp_path / "whole.pt")
    whole.train()
    first = Run(tmp_path / "parts.pt")
    first.train(stop_after=steps)
    second = Run(tmp_path / "parts.pt")
    second.train()
    assert first.trace + second.trace == whole.trace


def test_a_batch_that_grows_at_the_beginning_of_an_epoch_grows_once(tmp_path):
    sizes = []

    def train(stop_after):
        sampler = malletrain.ElasticSampler(48, global_batch_size=4, max_world_size=1)
        snapshot = malletrain.Snapshot(tmp_path / "run.pt", sampler=sampler)
        snapshot.restore()
        for epoch in sampler.epochs(3):
            if epoch:
                sampler.set_global_batch_size(2 * sampler.global_batch_size)
            for batch in DataLoader(list(range(48)), batch_sampler=sampler):
                sizes.append((epoch, len(batch)))
                sampler.advance()
                snapshot.save()
                stop_after -= 1
                if not stop_after:
                    return

    train(15)
    train(100)
    assert sizes == [(0, 4)] * 12 + [(1, 8)] * 6 + [(2, 16)] * 3


def test_a_rate_for_the_present_number_of_ranks_stays(tmp_path):
    def run(world_size, stop_after):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sampler = malletrain.ElasticSampler(
            24, batch_size=2, rank=0, world_size=world_size, max_world_size=3
        )
        snapshot = malletrain.Snapshot(
            tmp_path / "run.pt", model=model, optimizer=optimizer, sampler=sampler
        )
        snapshot.restore()
        for _ in sampler.epochs(1):
            optimizer.param_groups[0]["lr"] = 0.1 * world_size
            for _ in sampler:
                optimizer.step()
                sampler.advance()
                snapshot.save()
                stop_after -= 1
                if not stop_after:
                    return optimizer.param_groups[0]["lr"]
        return None

    assert (run(1, 2), run(3, 1)) == (0.1, pytest.approx(0.3))


def test_an_importance_sampler_is_set_back_without_its_weights(tmp_path):
    sampler = malletrain.ImportanceSampler(12, global_batch_size=4, max_world_size=1)
    Run(tmp_path / "run.pt", sampler).train(stop_after=2)
    again = malletrain.ImportanceSampler(12, global_batch_size=4, max_world_size=1)
    second = Run(tmp_path / "run.pt", again)
    second.train(stop_after=1)
    assert second.trace[0][4] == 12


class Uncopied:
    """An object whose state cannot be read at a certain time."""

    fails = False

    def state_dict(self):
        if self.fails:
            raise RuntimeError("not now")
        return {}

    def load_state_dict(self, state):
        self.fails = True


def test_an_object_that_cannot_be_copied_is_named_and_the_training_goes_on(tmp_path, capfd):
    for _ in range(2):
        sampler = malletrain.ElasticSampler(12, global_batch_size=4, max_world_size=1)
        snapshot = malletrain.Snapshot(tmp_path / "run.pt", sampler=sampler, odd=Uncopied())
        snapshot.restore()
        for _ in sampler.epochs(1):
            for _ in DataLoader(list(range(12)), batch_sampler=sampler):
                sampler.advance()
                break
            break
        if sampler.position != 8:
            snapshot.save()
    assert sampler.position == 8
    assert "'odd' cannot be copied (not now)" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("steps", range(1, 9))
def test_other_iterations_are_not_the_beginning_of_the_epoch(tmp_path, steps):
    """The script iterates another sampler before the steps of each epoch, and its training data
    after them.
    """
    data = torch.utils.data.TensorDataset(torch.arange(12.0))

    def run(path, stop_after=100):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        training = malletrain.ElasticSampler(12, global_batch_size=4, max_world_size=1)
        validation = malletrain.ElasticSampler(4, global_batch_size=4, max_world_size=1)
        sums, trace = {"samples": 0, "sizes": Counter()}, []
        snapshot = malletrain.Snapshot(
            path,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            training=training,
            validation=validation,
            sums=sums,
        )
        snapshot.restore()
        loader = DataLoader(data, batch_sampler=training)
        for epoch in training.epochs(3):
            for _ in DataLoader(data, batch_sampler=validation):
                pass
            if epoch:
                scheduler.step()
            sums["samples"] = 0
            sums["sizes"].clear()
            for (x,) in loader:
                optimizer.step()
                sums["samples"] += len(x)
                sums["sizes"][len(x)] += 1
                training.advance()
                rate = optimizer.param_groups[0]["lr"]
                trace.append((epoch, rate, sums["samples"], dict(sums["sizes"])))
                stop_after -= 1
                if training.position:
                    snapshot.save()
                    if stop_after <= 0:
                        return trace
            for _ in loader:
                pass
            snapshot.save()
            if stop_after <= 0:
                return trace
        return trace

    first = run(tmp_path / "run.pt", steps)
    expected = [(epoch, 0.5**epoch, 4 * n, {4: n}) for epoch in range(3) for n in range(1, 4)]
    assert first + run(tmp_path / "run.pt") == expected


def test_ranks_with_seeds_of_their_own_draw_other_numbers_at_the_beginning_of_an_epoch():
    sampler = malletrain.ElasticSampler(12, global_batch_size=4, max_world_size=1)
    texts = []
    torch.manual_seed(1)
    rng.RankSeeds(lambda text: texts.append(text) or text)
    first = EpochBegin(dict)
    first.epoch_begins(sampler, begun=False)
    of_rank_0 = float(torch.rand(()))

    def drawn_again(seed):
        torch.manual_seed(seed)
        seeds, begin = rng.RankSeeds(lambda text: texts[0]), EpochBegin(dict)
        begin.load_state_dict(first.state_dict())
        begin.separate(seeds)
        begin.epoch_begins(sampler, begun=True)
        return float(torch.rand(()))

    numbers = [drawn_again(seed) for seed in (1, 5, 6, 5)]
    assert numbers[0] == of_rank_0
    assert numbers[1] == numbers[3]
    assert len(set(numbers)) == 3
