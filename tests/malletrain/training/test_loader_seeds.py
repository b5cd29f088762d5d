"""Loader workers draw other random numbers after each restart."""

import pytest
import torch
from torch.utils.data import DataLoader

import malletrain


class Seeds(torch.utils.data.Dataset):
    """The seed of the worker that reads a sample."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return torch.initial_seed()


def seeds(restarts, generator=None, looks=False):
    """Seed of the workers of each iteration of a training of 3 epochs with a restart after each of
    ``restarts`` steps; the main process draws nothing, as a training on a GPU. ``looks``: whether
    the script looks at a batch before it restores its snapshot.
    """
    torch.manual_seed(3)
    made, steps, state, rng = [], 0, None, torch.get_rng_state()
    for stop in (*restarts, None):
        torch.manual_seed(3)
        torch.set_rng_state(rng)
        own = torch.Generator().manual_seed(5) if generator else None
        sampler = malletrain.ElasticSampler(12, global_batch_size=3, rank=0, world_size=1)
        loader = DataLoader(
            Seeds(),
            batch_sampler=sampler,
            generator=own,
            num_workers=1,
            multiprocessing_context="fork",
        )
        if looks:
            next(iter(loader))
        if state:
            sampler.load_state_dict(state)
        while sampler.epoch < 3:
            for number, batch in enumerate(loader):
                if number == 0:
                    made.append(int(batch[0]))
                sampler.advance()
                steps += 1
                if steps == stop:
                    break
            if steps == stop:
                break
        state, rng = sampler.state_dict(), torch.get_rng_state()
    return made


@pytest.mark.parametrize("generator", [False, True])
def test_no_seed_of_workers_comes_twice(generator):
    whole = seeds([], generator)
    parts = seeds([1, 2, 5, 7, 10], generator)
    assert len(set(whole)) == 3
    assert len(set(parts)) == len(parts) == 8


def test_a_look_before_the_restore_uses_up_no_seed_of_workers():
    parts = seeds([1, 2, 5, 7, 10], generator=True, looks=True)
    assert len(set(parts)) == len(parts) == 8


def test_an_epoch_that_is_not_interrupted_has_its_own_seed():
    whole = seeds([])
    parts = seeds([2, 6])
    assert [parts[0], parts[2], parts[4]] == whole
