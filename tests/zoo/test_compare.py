"""The oracle can fail: each kind of defect in a trace is reported. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.zoo.compare import Run, differences, in_the_hands_of, samples_of_step_at
from tests.zoo.trace import POINT, SAMPLE, STEP, WEIGHTS, Record


def trace_of(world: int, change_after: int = 99, world_after: int = 0) -> list[Record]:
    """Two epochs of two steps of six samples, an evaluation by rank 0, a scheduler on all ranks;
    the ranks are others after so many steps.
    """
    records: list[Record] = []
    for step in range(4):
        epoch, position = divmod(step, 2)
        moved = step >= change_after
        ranks, number = (world_after, 2) if moved else (world, 1)

        def add(kind, key, rank, ranks=ranks, number=number, **values):
            records.append(Record(len(records), kind, key, values, rank, ranks, number, rank))

        for rank in range(ranks):
            samples = list(range(step * 6, step * 6 + 6))[rank::ranks]
            add(STEP, f"{epoch} {position * 6}", rank, samples=samples, lr=0.5**epoch)
        if position == 1:
            for rank in range(ranks):
                add(POINT, "tail", rank)
                add("scheduler", f"{epoch}", rank, lr=0.5 ** (epoch + 1))
            add("evaluation", f"{epoch}", 0, loss=1.5 - epoch)
    for rank in range(ranks):
        add(WEIGHTS, "end", rank, weights=[1.0, 2.0])
    return records


EXPECTED = Run(trace_of(2), {"log.csv": "0,1.50000001\n1,0.5\n"})


def disturbed(edit=lambda records: records, **files) -> list[str]:
    texts = {"log.csv": "0,1.5\n1,0.5\n", **files}
    return differences(EXPECTED, Run(edit(trace_of(2, 1, 3)), texts))


def without(kind, key, rank=None):
    return lambda records: [
        r for r in records if (r.kind, r.key) != (kind, key) or rank not in (None, r.rank)
    ]


def twice(kind, key):
    return lambda records: [
        copy for r in records for copy in ([r, r] if (r.kind, r.key) == (kind, key) else [r])
    ]


def altered(kind, key, **values):
    return lambda records: [
        replace(r, values={**r.values, **values}) if (r.kind, r.key) == (kind, key) else r
        for r in records
    ]


def again_in_the_next_round(records):
    """The first step is in round 1 and once more in round 2."""
    redone = [replace(r, round=2) for r in records if r.round == 1]
    return [*(r for r in records if r.round == 1), *redone, *(r for r in records if r.round == 2)]


def late(records):
    """The evaluation of epoch 0 comes after the next step."""
    moved = [r for r in records if (r.kind, r.key) == ("evaluation", "0")]
    rest = [r for r in records if r not in moved]
    place = max(i for i, r in enumerate(rest) if r.key == "1 0")
    return [*rest[: place + 1], *moved, *rest[place + 1 :]]


def test_equal_runs_at_other_scales_do_not_differ():
    assert disturbed() == []


DEFECTS = {
    "a step is skipped": (without(STEP, "0 6"), "step 0 6 is missing"),
    "a step is done by one rank alone": (without(STEP, "0 6", 1), "is recorded by ranks [0, 2]"),
    "samples repeat": (altered(STEP, "1 0", samples=[12]), "trains on samples [12, 12, 12]"),
    "a step is done again": (again_in_the_next_round, "trained on again, in rounds [1, 2]"),
    "a tail is skipped": (without("scheduler", "0"), "scheduler 0 is missing"),
    "a tail runs twice": (twice("scheduler", "0"), "recorded by ranks [0, 0, 1, 1, 2, 2]"),
    "a tail is skipped on one rank": (without("scheduler", "1", 2), "recorded by ranks [0, 1]"),
    "an evaluation is missing": (without("evaluation", "1"), "evaluation 1 is missing"),
    "an evaluation comes late": (late, "comes where evaluation 0 is due"),
    "a rate by a counter": (altered(STEP, "1 0", lr=1.0), "has lr 1.0, not 0.5"),
    "an optimizer's state is lost": (altered(WEIGHTS, "end", weights=[1, 2.01]), "weights"),
    "an evaluation of other weights": (altered("evaluation", "1", loss=0.51), "has loss 0.51"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_reported(defect):
    edit, words = DEFECTS[defect]
    assert words in " ".join(disturbed(edit))


def test_rows_of_files_are_compared():
    assert "missing: ['1,0.5']" in " ".join(disturbed(**{"log.csv": "0,1.5\n"}))
    assert "too many: ['1,0.5'" in " ".join(disturbed(**{"log.csv": "0,1.5\n1,0.5\n1,0.5\n"}))
    assert disturbed(more="x") == ["file more is not in the undisturbed run"]


def test_lines_that_are_missing_from_one_file_are_not_told_of_another():
    more = {**EXPECTED.files, "z.txt": "x\n"}
    problems = differences(
        replace(EXPECTED, files=more), replace(EXPECTED, files={**more, "log.csv": ""})
    )
    assert [sentence.split(" has ")[0] for sentence in problems] == ["file log.csv"]


def test_records_may_repeat_after_a_loss_with_the_same_values():
    files = dict(EXPECTED.files)
    redone = again_in_the_next_round(trace_of(2, 1, 2))
    assert differences(EXPECTED, Run(redone, files), repeats=True) == []
    other = [replace(r, values={**r.values, "lr": 0.1}) if r.round == 1 else r for r in redone]
    assert differences(EXPECTED, Run(other, files), repeats=True) != []
    # What a rank that is lost did not record is missing in its round alone.
    partial = [r for r in redone if (r.round, r.rank) != (1, 1)]
    assert differences(EXPECTED, Run(partial, files), repeats=True) == []
    partial = [r for r in redone if (r.round, r.rank) != (2, 1)]
    assert differences(EXPECTED, Run(partial, files), repeats=True) != []


def test_samples_of_a_stream_are_each_trained_on_once():
    stream = [Record(-1, SAMPLE, f"0 {n}", {}, n % 2, 2, 1, n % 2) for n in range(4)]
    dealt = [replace(record, rank=0) for record in stream]
    assert differences(Run(stream), Run(dealt)) == []
    assert differences(Run(stream), Run(dealt[1:])) == ["sample 0 0 is missing"]
    assert differences(Run(stream), Run([*dealt, dealt[0]])) == ["sample 0 0 is trained on 2 times"]


def test_what_is_in_the_hands_of_a_lost_rank_is_one_tail():
    leader = [r for r in trace_of(1) if r.rank == 0]
    numbers = {r.name: r.number for r in leader}
    lost = in_the_hands_of(leader, numbers["scheduler 0"])
    assert {r.name for r in lost} == {"scheduler 0", "evaluation 0"}


def test_nothing_that_follows_the_last_step_is_in_the_hands_of_a_lost_rank():
    leader = [r for r in trace_of(1) if r.rank == 0]
    last = max(r.number for r in leader if r.kind == STEP)
    assert leader[-1].number > last
    assert all(not in_the_hands_of(leader, r.number) for r in leader if r.number >= last)


def test_samples_of_a_lost_rank_may_be_missing_once_its_gradients_are_averaged():
    names = ("before an update", "after an update", STEP)
    own = []
    for step in range(2):
        for name in names[:2]:
            own.append(Record(len(own), POINT, name, {}, 1, 2, 1, 1))
        own.append(Record(-1, SAMPLE, f"0 {step}", {}, 1, 2, 1, 1))
        own.append(Record(len(own), POINT, STEP, {}, 1, 2, 1, 1))
    lost = {r.number: [s.key for s in samples_of_step_at(own, r.number)] for r in own[::-1]}
    del lost[-1]
    assert list(lost.values())[::-1] == [["0 0"], ["0 0"], [], ["0 1"], ["0 1"], []]


def test_lines_may_be_missing_with_the_records_that_rank_0_alone_writes():
    lost = [r for r in EXPECTED.trace if (r.kind, r.key) == ("evaluation", "0")]
    rest = Run(without("evaluation", "0")(trace_of(2, 1, 1)), {"log.csv": "1,0.5\n"})
    assert differences(EXPECTED, rest, repeats=True, lost=lost) == []
    # The record is there, and its line is not; a line of another value; more lines than records.
    whole = Run(trace_of(2, 1, 1), {"log.csv": "1,0.5\n"})
    assert differences(EXPECTED, whole, repeats=True, lost=lost) != []
    other = Run(rest.trace, {"log.csv": "1,0.6\n"})
    assert differences(EXPECTED, other, repeats=True, lost=lost) != []
    none = Run(rest.trace, {"log.csv": ""})
    assert differences(EXPECTED, none, repeats=True, lost=lost) != []
