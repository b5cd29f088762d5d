"""ElasticStream: every record of an epoch once, over changes of the number of ranks; each rank a
thread here, over real gloo groups. Processes are in ``test_stream_ranks``.
"""

import gzip
import io
import itertools
import tarfile
import threading
from collections import Counter
from datetime import timedelta

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from malletrain import ElasticStream
from malletrain.training.stream_sources import hub_shards, line_records, tar_records
from tests.draws import cases
from tests.malletrain.training.worker_side import as_plain_script


def records_of(shard):
    """(number, length) of a shard to its records."""
    number, length = shard
    return ((number, i) for i in range(length))


class Threads:
    """Groups of any number of ranks, each rank in a thread of this process."""

    def __init__(self):
        self._groups = {}

    def groups(self, world):
        if world not in self._groups:
            store, made = torch.distributed.HashStore(), [None] * world

            def join(rank):
                made[rank] = torch.distributed.ProcessGroupGloo(
                    store, rank, world, timedelta(seconds=600)
                )

            self._each(world, join)
            self._groups[world] = made
        return self._groups[world]

    def run(self, world, work):
        """``work(rank, group)`` on each rank; what they returned."""
        groups = self.groups(world) if world > 1 else [None]
        outcomes = [None] * world

        def one(rank):
            try:
                outcomes[rank] = ("returned", work(rank, groups[rank]))
            except BaseException as error:
                outcomes[rank] = ("raised", error)

        self._each(world, one)
        for how, what in outcomes:
            if how == "raised":
                raise what
        return [what for _, what in outcomes]

    def close(self):
        self._groups.clear()

    @staticmethod
    def _each(world, work):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def threads():
    made = Threads()
    yield made
    made.close()


def train(threads, lengths, world, state=None, steps=None, epochs=1, batch=8, most=6):
    """Train ``steps`` steps on ``world`` ranks. Return the records of each step of each rank, and
    the state after them.
    """

    def work(rank, group):
        stream = ElasticStream(
            list(enumerate(lengths)),
            records_of,
            global_batch_size=batch,
            collate_fn=list,
            rank=rank,
            world_size=world,
            max_world_size=most,
            group=group,
        )
        if state is not None:
            stream.load_state_dict(state)
        seen, weights = [], []
        for _ in stream.epochs(epochs):
            for records in itertools.islice(stream, None if steps is None else steps - len(seen)):
                seen.append(records)
                weights.append(stream.loss_weight)
                stream.advance()
            if len(seen) == steps:
                break
        return seen, weights, stream.state_dict()

    results = threads.run(world, work)
    states = [state for _, _, state in results]
    assert all(each == states[0] for each in states)
    assert len({len(seen) for seen, _, _ in results}) == 1
    totals = []
    for parts in zip(*(seen for seen, _, _ in results), strict=True):
        assert all(parts)  # no rank without a record
        totals.append(sum(map(len, parts)))
    assert set(totals[:-1]) <= {batch}
    assert all(most <= total < batch + most for total in totals[-1:])
    for number, weights in enumerate(zip(*(weights for _, weights, _ in results), strict=True)):
        total = sum(len(seen[number]) for seen, _, _ in results)
        assert weights == tuple(len(seen[number]) * world / total for seen, _, _ in results)
    return (
        [r for seen, _, _ in results for part in seen for r in part],
        states[0],
        len(results[0][0]),
    )


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=24).filter(
    lambda lengths: sum(lengths) >= 16
)


@settings(max_examples=cases(40))
@given(
    lengths=LENGTHS,
    phases=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
)
@example(lengths=[17] * 24, phases=[(1, 3), (4, 6), (3, 5), (2, 4)])
@example(lengths=[40, 1, 1, 1, 1, 1, 1, 30], phases=[(4, 2), (2, 9)])
def test_every_record_of_an_epoch_once_whatever_the_numbers_of_ranks(threads, lengths, phases):
    seen, state = Counter(), None
    for world, steps in phases:
        records, state, _ = train(threads, lengths, world, state, steps)
        seen.update(records)
        if state["epoch"]:
            break
    else:
        records, state, _ = train(threads, lengths, 3, state)
        seen.update(records)
    assert state["epoch"] == 1
    assert (state["done"], state["begun"], state["samples"]) == ([], [], 0)
    assert seen == Counter((n, i) for n, length in enumerate(lengths) for i in range(length))


def test_the_global_batch_stays_and_the_order_of_shards_changes_with_the_epoch(threads):
    lengths = [20] * 16
    records, state, steps = train(threads, lengths, 4, epochs=2)
    assert steps == 2 * 320 // 8
    assert Counter(records) == Counter((n, i) for n in range(16) for i in range(20) for _ in "12")
    one, _, _ = train(threads, lengths, 1, {**state, "epoch": 0}, steps=20)
    two, _, _ = train(threads, lengths, 1, {**state, "epoch": 1}, epochs=2, steps=20)
    assert one != two


def test_a_step_that_is_repeated_has_the_same_records(threads):
    """Nothing counts until advance(): a rank that was killed and began again at the snapshot."""
    lengths = [13] * 12
    _, state, _ = train(threads, lengths, 3, steps=4)
    again = [train(threads, lengths, 3, state, steps=2)[0] for _ in range(2)]
    assert again[0] == again[1]


def test_shards_are_read_by_one_rank_each_until_few_are_left(threads):
    opened = Counter()

    def counted(shard):
        opened[shard] += 1
        return records_of(shard)

    def work(rank, group):
        stream = ElasticStream(
            [(n, 40) for n in range(40)],
            counted,
            batch_size=4,
            collate_fn=list,
            rank=rank,
            world_size=4,
            group=group,
        )
        for _ in stream:
            stream.advance()

    threads.run(4, work)
    # All ranks read the last few; the rest is opened once, or twice where it was dealt out anew.
    assert sum(opened.values()) <= 40 + 4 * 4 + 8


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="exactly one of global_batch_size"):
        ElasticStream([1], records_of)
    with pytest.raises(ValueError, match="there are no shards"):
        ElasticStream([], records_of, batch_size=1)
    with pytest.raises(ValueError, match="batch of 3 records cannot be shared by the 4 ranks"):
        ElasticStream([1], records_of, global_batch_size=3, max_world_size=4)
    stream = ElasticStream([(0, 9)], records_of, batch_size=3, rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="more often than batches were taken"):
        stream.advance()
    epochs = stream.epochs(1)
    assert [list(stream) for _ in (next(epochs),)] != [[]]
    with pytest.raises(RuntimeError, match=r"without a single call of stream.advance\(\)"):
        next(epochs)
    other = ElasticStream([(0, 9), (1, 9)], records_of, batch_size=3, rank=0, world_size=1)
    with pytest.raises(ValueError, match="written for 2 shards, but there are 1 now"):
        stream.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="1 shards have too few records for 1 ranks"):
        next(iter(ElasticStream([(0, 0)], records_of, batch_size=3, rank=0, world_size=1)))
    with pytest.raises(RuntimeError, match=r"Call torch.distributed.init_process_group\(\) first"):
        next(
            iter(
                ElasticStream(
                    [(n, 9) for n in range(4)], records_of, batch_size=3, rank=0, world_size=2
                )
            )
        )


def test_a_tar_of_samples(tmp_path):
    path = tmp_path / "00.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("a/x.jpg", b"1"),
            ("a/x.cls", b"2"),
            ("a/y.jpg", b"3"),
            ("b/y.seg.png", b"4"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    assert list(tar_records(path)) == [
        {"__key__": "a/x", "jpg": b"1", "cls": b"2"},
        {"__key__": "a/y", "jpg": b"3"},
        {"__key__": "b/y", "seg.png": b"4"},
    ]


@pytest.mark.parametrize(
    ("names", "contents", "records", "is_named"),
    [
        ("x.jpg x.cls", "01", [{"jpg": b"0", "cls": b"1"}], False),
        (
            *("x.jpg x.cls x.jpg x.cls", "0123"),
            [{"jpg": b"0", "cls": b"1"}, {"jpg": b"2", "cls": b"3"}],
            False,
        ),
        # as from a writer that tried again
        ("x.jpg x.cls x.jpg x.cls", "0101", [{"jpg": b"0", "cls": b"1"}], False),
        ("x.jpg x.jpg x.cls", "012", [{"jpg": b"1", "cls": b"2"}], True),
        ("x.jpg x.cls x.jpg", "012", [{"jpg": b"2", "cls": b"1"}], True),
        ("x.jpg x.cls x.cls x.jpg", "0123", [{"jpg": b"3", "cls": b"2"}], True),
        ("x.jpg x.jpg", "01", [{"jpg": b"1"}], True),
        ("x.JPG x.jpg x.json", "012", [{"jpg": b"1", "json": b"2"}], True),
    ],
)
def test_only_records_of_one_name_are_separated_in_a_tar(
    names, contents, records, is_named, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "00.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in zip(["w.jpg", *names.split(), "y.jpg"], f"8{contents}9", strict=True):
            entry = tarfile.TarInfo(name)
            entry.size = 1
            archive.addfile(entry, io.BytesIO(content.encode()))
    with as_plain_script(monkeypatch):
        both = [list(tar_records(path)) for _ in range(2)]
    assert both[0] == both[1]
    first, *middle, last = both[0]
    assert (first, last) == ({"__key__": "w", "jpg": b"8"}, {"__key__": "y", "jpg": b"9"})
    assert middle == [{"__key__": "x", **record} for record in records]
    assert capsys.readouterr().err.count("have the name 'x' and the same extension") == is_named


def test_lines_of_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"x\ny"))
    assert list(line_records(tmp_path / "a.jsonl")) == ['{"a": 1}', '{"a": 2}']
    assert list(line_records(tmp_path / "b.jsonl.gz")) == ["x", "y"]


class OfWorkers(torch.utils.data.IterableDataset):
    """As many are: each loader worker takes files of its own."""

    def __init__(self, files):
        self._files = files

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        mine = self._files[worker.id :: worker.num_workers] if worker else self._files
        return iter([(file, n) for file in mine for n in range(3)])


def records_of_workers(file):
    """Not in the test, for workers that are not forked."""
    return OfWorkers([file])


def test_a_dataset_that_leaves_out_what_is_other_workers():
    stream = ElasticStream(
        range(8),
        records_of_workers,
        batch_size=4,
        num_workers=2,
        collate_fn=list,
        rank=0,
        world_size=1,
    )
    batches = iter(stream)
    # Both workers read: three records of the first file, one of the next but one, and so on.
    first, second = next(batches), next(batches)
    assert len({file for file, _ in first} | {file for file, _ in second}) == 4
    assert sorted([*first, *second, *(r for batch in batches for r in batch)]) == [
        (file, n) for file in range(8) for n in range(3)
    ]


class HubDataset:
    """The part of Hugging Face's ``IterableDataset`` that is used, by its documentation."""

    num_shards = 3

    def __init__(self, records=()):
        self._records = records

    def shard(self, num_shards, index):
        return HubDataset([{"text": f"{index}-{n}"} for n in range(4)][: num_shards + 1])

    def skip(self, n):
        return HubDataset(self._records[n:])

    def __iter__(self):
        return iter(self._records)


def test_a_hub_dataset_in_streaming_mode_goes_on_in_the_middle_of_a_shard():
    shards, read = hub_shards(HubDataset())

    def stream():
        return ElasticStream(
            shards, read, batch_size=3, shuffle=False, collate_fn=list, rank=0, world_size=1
        )

    first = stream()
    seen = []
    for batch in itertools.islice(first, 2):
        seen += batch
        first.advance()
    second = stream()
    second.load_state_dict(first.state_dict())
    for batch in second:
        seen += batch
        second.advance()
    assert [record["text"] for record in seen] == [f"{s}-{n}" for s in range(3) for n in range(4)]
    with pytest.raises(TypeError, match="hub_shards takes a dataset of load_dataset"):
        hub_shards([1])


class SkipExamplesIterable:
    """A part of a Hugging Face dataset, by its attributes."""

    def __init__(self, ex_iterable=None, generator=None):
        self.ex_iterable, self.generator = ex_iterable, generator


class TakeExamplesIterable(SkipExamplesIterable):
    pass


class OtherExamplesIterable(SkipExamplesIterable):
    pass


class Interleaved:
    def __init__(self, *ex_iterables):
        self.ex_iterables = ex_iterables


def divided(**attributes):
    """A dataset with private attributes of Hugging Face's."""
    dataset = HubDataset()
    vars(dataset).update(attributes)
    return dataset


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"_distributed": object()}, "Leave out split_dataset_by_node"),
        (
            {"_ex_iterable": OtherExamplesIterable(generator=numpy.random.default_rng())},
            "without a seed.*Pass a seed",
        ),
        (
            {"_shuffling": OtherExamplesIterable(generator=numpy.random.default_rng())},
            "without a seed.*Pass a seed",
        ),
        ({"_ex_iterable": SkipExamplesIterable()}, r"\.skip\(\) would skip"),
        (
            {"_ex_iterable": Interleaved(None, OtherExamplesIterable(TakeExamplesIterable()))},
            r"\.take\(\) would take records of every shard",
        ),
    ],
)
def test_a_hub_dataset_whose_shards_are_not_its_records_is_refused(attributes, sentence):
    with pytest.raises(ValueError, match=sentence):
        hub_shards(divided(**attributes))


def test_a_hub_dataset_with_a_seed_or_cut_in_its_only_shard_is_accepted():
    seeded = OtherExamplesIterable(generator=numpy.random.default_rng(42))
    assert hub_shards(divided(_ex_iterable=seeded, _distributed=None))[0] == range(3)
    cut = divided(_ex_iterable=TakeExamplesIterable(seeded), num_shards=1)
    assert hub_shards(cut)[0] == range(1)


class CyclingMultiSourcesExamplesIterable(Interleaved):
    """Interleaved datasets, by their attributes."""

    def __init__(self, stopping_strategy):
        super().__init__()
        self.stopping_strategy = stopping_strategy


@pytest.mark.parametrize(
    ("strategy", "shards", "sentence"),
    [
        ("first_exhausted", 3, "ends as soon as one of the datasets"),
        ("all_exhausted", 3, "repeats its records of one dataset"),
        ("all_exhausted_without_replacement", 3, ""),
        ("first_exhausted", 1, ""),  # the one shard is the dataset
    ],
)
def test_interleaved_datasets_are_named_that_stop_in_each_shard(
    strategy, shards, sentence, capsys, monkeypatch
):
    with as_plain_script(monkeypatch):
        part = OtherExamplesIterable(CyclingMultiSourcesExamplesIterable(strategy))
        hub_shards(divided(_ex_iterable=part, num_shards=shards))
    messages = capsys.readouterr().err
    assert sentence in messages if sentence else not messages
