"""DataCache in front of a DataLoader: the same samples as without it, from memory where they
are.
"""

import gc
import os
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import malletrain
from benchmarks.hit_ratios import pooled_hits
from malletrain import DataCache, ElasticSampler, ImportanceSampler
from malletrain.datacache import cache as cache_module
from malletrain.datacache import reader as reader_module
from malletrain.datacache import store as store_module
from malletrain.datacache.reader import SampleReader, owners
from malletrain.protocol import env
from tests.malletrain.datacache.nodes import Images, image, job
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "ANSWER_S", PATIENCE_S)
    with job(tmp_path, monkeypatch) as made:
        yield made


def right(values, samples):
    assert [label for _, label in values] == list(samples)
    for value, label in values:
        assert torch.equal(value, image(label))


def read(cache, samples):
    values = cache.__getitems__(samples)
    right(values, samples)


# --- one node ---


def test_a_sample_is_read_from_the_data_set_once(site):
    data = Images()
    cache = site.cache("n1", data)
    assert len(cache) == 200
    read(cache, range(200))
    assert data.read() == list(range(200))
    read(cache, range(199, -1, -1))
    right([cache[7]], [7])
    right([cache[-1]], [199])
    assert data.read() == []
    counts = cache.counts()
    assert (counts.node_hits, counts.peer_hits, counts.source_reads) == (202, 0, 200)
    assert counts.source_bytes > 200 * 784
    for index in (200, -201):
        with pytest.raises(IndexError, match="200 samples"):
            cache[index]


def test_another_process_of_the_user_finds_the_samples(site):
    read(site.cache("n1", Images()), range(50))
    data = Images()
    again = site.cache("n1", data)
    read(again, range(60))
    assert data.read() == list(range(50, 60))


def test_the_draws_of_an_importance_sampler_come_from_memory(site):
    sampler = ImportanceSampler(200, global_batch_size=20, rank=0, world_size=1)
    data = Images()
    cache = site.cache("n1", data, sampler=sampler)
    drawn = []
    for _ in range(3):
        assert cache.facts()["coverage"] == sampler.coverage
        assert (sampler.coverage < 1.0) == bool(drawn)
        for images, numbers in DataLoader(cache, batch_sampler=sampler):
            assert torch.equal(images[0], image(numbers[0].item()))
            drawn += set(numbers.tolist())  # a sample is read once for a batch
            sampler.advance(losses=numbers.float())
    assert sorted(data.read()) == list(range(200))
    assert cache.counts().source_reads == 200
    assert cache.counts().node_hits == len(drawn) - 200 <= 400


def test_the_time_of_reading_is_that_of_processes_side_by_side(site):
    cache = site.cache("n1", Images())
    read(cache, range(100))
    alone = cache.counts()
    assert alone.source_us > 0
    assert cache.facts()["source_us"] == alone.source_us
    for _ in DataLoader(cache, sampler=range(100, 200), batch_size=50, num_workers=1):
        pass
    both = cache.counts()
    assert both.source_us > alone.source_us
    assert cache.facts()["source_us"] == both.source_us // 2


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_use_the_store_without_a_copy_of_it(site, start):
    cache = site.cache("n1", Images(), name=start)
    # A worker that is spawned imports torch: one, for both epochs.
    loader = DataLoader(
        cache,
        batch_size=16,
        num_workers=1 if start == "spawn" else 2,
        multiprocessing_context=start,
        persistent_workers=start == "spawn",
    )
    for epoch in range(2):
        labels = []
        for images, numbers in loader:
            for one, label in zip(images, numbers.tolist(), strict=True):
                assert torch.equal(one, image(label))
            labels += numbers.tolist()
        assert labels == list(range(200))
        assert cache.counts().source_reads == 200
        assert cache.counts().node_hits == 200 * epoch


def test_a_forked_loader_worker_leaves_what_it_shares_with_the_training_to_no_garbage_collection(
    site,
):
    frozen = site.cache("n1", Images(), transform=lambda sample: gc.get_freeze_count())
    before = gc.get_freeze_count()
    shared = [[] for _ in range(100_000)]
    # Few samples: each count goes through all objects that the tests have frozen.
    loader = DataLoader(
        frozen, batch_size=2, sampler=range(4), num_workers=2, multiprocessing_context="fork"
    )
    # Frozen objects of other tests may end meanwhile.
    assert min(counts.min().item() for counts in loader) > before + len(shared) // 2
    # Not in the process that trains.
    assert frozen[0] <= before
    assert gc.get_freeze_count() <= before


def test_a_transform_comes_after_the_cache_and_may_change_its_sample(site):
    def brighten(sample):
        pixels, label = sample
        return pixels.fill_(255), label

    data = Images()
    cache = site.cache("n1", data, transform=brighten)
    plain = site.cache("n1", Images())
    for _ in range(3):
        for pixels, _ in cache.__getitems__([3, 4, 3]):
            assert pixels.unique().tolist() == [255]
        read(plain, [3, 4])
    untouched = Images()
    repeated = site.cache("n1", untouched)
    for _ in range(2):  # from the data set and from memory
        first, second = repeated.__getitems__([5, 5])
        first[0].fill_(1)
        assert torch.equal(second[0], image(5))


def test_a_full_store_hits_what_it_holds_in_every_epoch(site):
    data = Images()
    cache = site.cache("n1", data, memory="96K")
    for _ in range(3):
        read(cache, np.random.default_rng(1).permutation(200).tolist())
        reads = data.read()
    present = cache.facts()["present"]
    assert 60 < present < 140
    assert len(reads) == 200 - present


def test_a_dataset_that_reads_batches_is_asked_for_batches(site):
    class Batches(Images):
        def __getitems__(self, indices):
            batches.append(list(indices))
            return [self[i] for i in indices]

    batches = []
    cache = site.cache("n1", Batches())
    read(cache, [1, 2, 3])
    read(cache, [2, 3, 4])
    assert batches == [[1, 2, 3], [4]]


def test_other_attributes_are_those_of_the_data_set(site):
    data = Images()
    data.classes = ["shirt", "shoe"]
    assert site.cache("n1", data).classes == ["shirt", "shoe"]
    with pytest.raises(AttributeError):
        _ = site.cache("n1", data).nothing_of_this_name


def test_it_is_a_name_of_malletrain():
    assert malletrain.DataCache is DataCache


# --- refusals ---


def test_a_data_set_of_another_length_is_refused(site):
    site.cache("n1", Images(200))
    with pytest.raises(ValueError, match=r"'images' .* 200 samples, but this one has 199"):
        site.cache("n1", Images(199))


def test_too_little_memory_trains_uncached_and_says_so(site, capfd):
    data = Images()
    cache = site.cache("n1", data, memory="4K")
    assert "'images' is read without a cache: " in capfd.readouterr().err
    for _ in range(2):
        read(cache, range(20))
    assert len(data.read()) == 40
    assert not cache.cached
    assert cache.facts() is None


def test_samples_that_cannot_be_packed_are_named(site, capfd):
    class Sets(Images):
        def __getitem__(self, index):
            super().__getitem__(index)
            return {index}

    assert site.cache("n1", Sets())[3] == {3}
    assert "cannot be packed: the sample is of type set" in capfd.readouterr().err

    class SomeSets(Images):
        def __getitem__(self, index):
            return {index} if index == 5 else super().__getitem__(index)

    data = SomeSets()
    cache = site.cache("n1", data, name="some")
    for _ in range(2):
        assert cache.__getitems__([4, 5])[1] == {5}
    assert data.read() == [4]
    assert "Sample 5 and others like it are not cached" in capfd.readouterr().err
    assert cache.counts().unpacked == 2


class Augmented(Images):
    """Samples from one on are another each time."""

    def __init__(self, steady: int) -> None:
        super().__init__()
        self._steady = steady

    def __getitem__(self, index):
        return torch.rand(3) if index >= self._steady else torch.zeros(3), index


@pytest.mark.parametrize("steady", [0, 1, 7])
def test_random_augmentation_in_the_data_set_is_told_and_not_frozen(site, capfd, steady):
    """Also by the first process, which could compare with no other."""
    cache = site.cache("n1", Augmented(steady))
    output = capfd.readouterr().err
    assert f"sample {steady} differs when it is read again" in output
    assert "move them to DataCache(transform=...)" in output
    assert not cache.cached
    assert not torch.equal(cache[9][0], cache[9][0])


def test_samples_that_differ_from_those_in_memory_are_told(site, capfd):
    assert site.cache("n1", Images()).cached
    cache = site.cache("n1", Augmented(0))
    assert "sample 0 differs from the one that the cache" in capfd.readouterr().err
    assert not cache.cached


def test_a_data_set_that_is_slow_to_read_is_not_read_twice(site, monkeypatch):
    class Slow(Images):
        def read(self):
            return []  # forgets nothing

    monkeypatch.setattr(cache_module, "CHECK_S", 0.0)
    data = Slow()
    assert site.cache("n1", data).cached
    assert data.reads == [0], "the first read took longer than all may"


def test_the_check_of_a_new_data_set_changes_no_later_draws(site):
    """Only the first process of a node makes it, and a split by numbers that are drawn later is to
    be the same in all.
    """

    class Drawing(Images):
        def __getitem__(self, index):
            torch.rand(3), np.random.rand(3), random.random()
            return super().__getitem__(index)

    def drawn_after_a_cache():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        cache = site.cache("n1", Drawing())
        assert cache.cached
        return torch.randperm(100).tolist(), np.random.rand(3).tolist(), random.random()

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        assert drawn_after_a_cache() == drawn_after_a_cache()
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def test_a_sample_that_cannot_be_read_fails_when_it_is_needed(site):
    class Broken(Images):
        def __getitem__(self, index):
            if index == 3:
                raise OSError("a damaged file")
            return super().__getitem__(index)

    cache = site.cache("n1", Broken())
    right([cache[4]], [4])
    with pytest.raises(OSError, match="a damaged file"):
        cache[3]


def test_a_folder_of_another_user_trains_uncached(site, monkeypatch, capfd):
    folder = site.folder("n1")
    os.chmod(folder, 0o755)
    monkeypatch.setenv(env.DATA, str(folder))
    cache = DataCache(Images(), name="images", memory="4M")
    assert not cache.cached
    assert "Other users can use" in capfd.readouterr().err
    right([cache[4]], [4])


def test_shared_memory_that_cannot_be_used_trains_uncached(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv(env.DATA, str(tmp_path / "absent" / "folder"))
    assert not DataCache(Images(), name="images", memory="4M").cached
    assert "shared memory cannot be used" in capfd.readouterr().err


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "options", "error"),
    [
        (Endless(), {}, "with indices and a length; a Endless"),
        (Images(), {"name": ""}, "needs a name"),
        (Images(), {"memory": "many"}, "'many' is no size of memory"),
        (Images(), {"memory": "0%"}, "'0%' is no size of memory"),
        (Images(0), {}, "has no samples"),
        (Images(), {"sampler": ElasticSampler(100, batch_size=4)}, "100 samples, but .* 200"),
    ],
)
def test_what_is_refused_at_once(dataset, options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        DataCache(dataset, **{"name": "images", **options})


def test_a_stream_is_refused_by_name():
    class ElasticStream:
        pass

    with pytest.raises(TypeError, match="ElasticStream reads shards"):
        DataCache(Images(), name="images", sampler=ElasticStream())


# --- outside MalleTrain ---


def test_outside_malletrain_the_samples_go_with_their_last_user(monkeypatch, tmp_path):
    monkeypatch.setattr("malletrain.datacache.cache.SHARED_MEMORY", tmp_path)
    for name in (env.DATA, env.JOB, env.JOB_KEY, env.NODE):
        monkeypatch.delenv(name, raising=False)
    one = DataCache(Images(), name="images", memory="4M")
    other = DataCache(Images(), name="images", memory="4M")
    read(one, range(10))
    one.close()
    read(other, range(10))
    assert other.counts().source_reads == 0
    other.close()
    assert list(tmp_path.glob("*/*")) == []


def test_the_memory_of_the_submission_is_the_default(monkeypatch, tmp_path, site):
    monkeypatch.setenv(env.DATA_MEMORY, "2M")
    assert site.cache("n1", Images(), name="a", memory=None).facts()["memory_bytes"] < 2 << 20
    assert site.cache("n1", Images(), name="b", memory="3M").facts()["memory_bytes"] > 2 << 20
    monkeypatch.setenv(env.SLOT_MEMORY_MB, "8")
    facts = site.cache("n1", Images(), name="c", memory="50%").facts()
    assert 3 << 20 < facts["memory_bytes"] < 4 << 20
    assert facts["node_bytes"] == 8 << 20


# --- several nodes ---


def epoch(caches, data, seed):
    """One epoch, dealt to the nodes in turn, in batches. Return the samples read from the data
    set."""
    order = np.random.default_rng(seed).permutation(200).tolist()
    for turn, start in enumerate(range(0, 200, 10)):
        read(caches[turn % len(caches)], order[start : start + 10])
    return data.read()


def test_the_nodes_of_a_job_pool_their_memory(site):
    site.add("n1", "n2", "n3")
    data = Images()
    caches = [site.cache(node, data) for node in ("n1", "n2", "n3")]
    assert sorted(epoch(caches, data, 1)) == list(range(200))
    assert epoch(caches, data, 2) == []
    present = [cache.facts()["present"] for cache in caches]
    assert sum(present) == 200  # one owner each
    counts = caches[0].counts() + caches[1].counts() + caches[2].counts()
    assert counts.reads == 400
    assert counts.source_reads == 200
    assert counts.peer_hits == pytest.approx(200 * 2 / 3, abs=30)


def test_pooled_hits_are_those_of_the_memories_together(site):
    nodes = ["n1", "n2", "n3", "n4"]
    site.add(*nodes)
    data = Images()
    caches = [site.cache(node, data, memory="36K") for node in nodes]
    for seed in range(4):
        reads = epoch(caches, data, seed)
    present = sum(cache.facts()["present"] for cache in caches)
    assert 0.5 < present / 200 < 0.95
    assert len(reads) == 200 - present
    memories = [cache.facts()["memory_bytes"] for cache in caches]
    assert present / 200 == pytest.approx(
        pooled_hits(memories, caches[0].facts()["data_bytes"]), abs=0.1
    )


def test_a_lost_node_means_misses_and_nothing_else(site):
    site.add("n1", "n2", "n3")
    data = Images()
    caches = [site.cache(node, data) for node in ("n1", "n2", "n3")]
    epoch(caches, data, 1)
    owned = {s for s, o in enumerate(owners(range(200), ["n1", "n2", "n3"])) if o == "n3"}
    site.lose("n3", announce=False)  # before the daemon knows
    assert set(epoch(caches[:2], data, 2)) == owned
    site.announce()
    assert set(epoch(caches[:2], data, 3)) == owned  # their new owners fill
    assert epoch(caches[:2], data, 4) == []


def test_a_node_that_joins_fills_as_the_order_comes_by(site):
    site.add("n1", "n2")
    data = Images()
    caches = [site.cache(node, data) for node in ("n1", "n2")]
    epoch(caches, data, 1)
    site.add("n3")
    caches.append(site.cache("n3", data))
    owned = {s for s, o in enumerate(owners(range(200), ["n1", "n2", "n3"])) if o == "n3"}
    reads = set(epoch(caches, data, 2))
    # A node still uses what it owned before; the others ask the new owner.
    assert reads <= owned
    for seed in range(3, 9):
        reads = set(epoch(caches, data, seed))
    assert reads == set() or len(reads) < len(owned) / 4
    for cache in caches:
        read(cache, range(200))
    assert len(data.read()) < len(owned)
    for cache in caches:
        read(cache, range(200))
    assert data.read() == []


def test_a_store_that_is_removed_under_a_running_job_means_misses(site):
    site.add("n1", "n2")
    data = Images()
    caches = [site.cache(node, data) for node in ("n1", "n2")]
    epoch(caches, data, 1)
    for path in site.folder("n2").glob(f"*{store_module.SUFFIX}"):
        path.unlink()
    epoch(caches, data, 2)  # right samples, from wherever


def test_samples_of_the_next_batches_come_before_they_are_needed(site, monkeypatch):
    site.add("n1", "n2")
    data = Images()
    other = site.cache("n2", data)
    sampler = ElasticSampler(200, global_batch_size=10, seed=3, rank=0, world_size=1)
    cache = site.cache("n1", data, sampler=sampler, prefetch=2)
    read(other, range(200))  # hands n1 what it owns
    data.read()
    fetch, late = SampleReader.fetch, []

    def fetch_late(reader, samples, *rest):
        late.extend(samples if threading.current_thread() is threading.main_thread() else ())
        return fetch(reader, samples, *rest)

    monkeypatch.setattr(SampleReader, "fetch", fetch_late)
    labels = []
    for _ in sampler.epochs(2):
        for _, numbers in DataLoader(cache, batch_sampler=sampler):
            labels += numbers.tolist()
            sampler.advance()
            until(lambda: cache.prefetches_nothing, "the thread is ahead")
    assert sorted(labels) == sorted([*range(200)] * 2)
    assert data.read() == []
    counts = cache.counts()
    assert counts.source_reads == 0
    assert counts.peer_hits == 2 * sum(o == "n2" for o in owners(range(200), ["n1", "n2"]))
    assert len(late) <= 10  # those of the very first batch


def test_the_cache_can_be_pickled_for_a_spawned_worker(site):
    cache = site.cache("n1", Images())
    read(cache, range(5))
    again = pickle.loads(pickle.dumps(cache))
    read(again, range(5))
    assert again.prefetches_nothing
    assert cache.counts().node_hits == 5
    read(cache, range(200))
    read(pickle.loads(pickle.dumps(cache)), range(200))  # a full store
    assert cache.counts().node_hits == 5 + 5 + 200
