"""A training set that is drawn anew at each start is refused."""

import pytest
import torch
from torch.utils.data import DataLoader, Subset, random_split

import malletrain
from malletrain.training.sampler_loaders import fingerprint


def train(state, choose, steps):
    """Train ``steps`` steps on the subset that ``choose(epoch)`` returns; return the state."""
    sampler = malletrain.ElasticSampler(12, global_batch_size=4, rank=0, world_size=1)
    if state is not None:
        sampler.load_state_dict(state)
    for epoch in sampler.epochs(9):
        for _ in DataLoader(choose(epoch), batch_sampler=sampler):
            sampler.advance()
            steps -= 1
            if not steps:
                break
        if not steps:
            break
    return sampler.state_dict()


def split(seed):
    generator = torch.Generator().manual_seed(seed)
    return random_split(range(20), [12, 8], generator=generator)[0]


@pytest.mark.parametrize("steps", [1, 3, 4, 6, 7])
def test_the_same_split_goes_on(steps):
    state = train(None, lambda epoch: split(1), steps)
    train(train(state, lambda epoch: split(1), 4), lambda epoch: split(1), 4)


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_another_split_is_refused_within_an_epoch(steps):
    state = train(None, lambda epoch: split(1), steps)
    with pytest.raises(ValueError, match=r"another Subset than before the restart.*manual_seed"):
        train(state, lambda epoch: split(2), 1)


def test_another_split_between_two_epochs_is_reported(capfd):
    state = train(None, lambda epoch: split(1), 6)
    train(state, lambda epoch: split(2), 1)
    assert "another Subset than in the epoch before the restart" in capfd.readouterr().err


@pytest.mark.parametrize("steps", [1, 3, 4, 6, 8])
def test_a_subset_for_each_epoch_goes_on(steps):
    state = train(None, split, steps)
    train(train(state, split, 5), split, 2)


def test_a_class_of_the_script_with_the_same_name_is_another_data_set():
    own = type("Subset", (torch.utils.data.Dataset,), {})
    assert fingerprint(own()) == ""


def test_the_samples_of_a_subset_in_a_subset_count():
    inner, other = Subset(range(20), [3, 1, 2]), Subset(range(20), [1, 2, 3])
    prints = {fingerprint(Subset(s, n)) for s in (inner, other) for n in ([0, 1], [1, 0])}
    assert len(prints) == 4
    assert fingerprint(Subset(inner, torch.tensor([0, 1]))) in prints
    assert fingerprint(range(20)) == ""
    assert fingerprint(Subset({"a": 1}, ["a"])) != fingerprint(Subset({"b": 1}, ["b"]))
