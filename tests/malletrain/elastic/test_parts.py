"""The small parts of live mode: whose state counts, what a discarded step leaves, how learning
rates follow.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import malletrain.elastic as elastic
from malletrain import ElasticSampler
from malletrain.elastic.parallel import Parallel
from malletrain.elastic.state import Holder
from malletrain.elastic.state_policy import reopens_epoch, source_and_needy
from malletrain.elastic.training import (
    Standing,
    StateBeforeStep,
    StateCopy,
    Training,
    epoch_end_bytes,
)
from malletrain.training import report

standings = st.builds(Standing, st.booleans(), st.integers(0, 3), st.integers(0, 3), st.booleans())


@given(st.lists(standings, min_size=1, max_size=6))
def test_everybody_ends_with_the_state_that_is_furthest(table):
    source, needy = source_and_needy(table)
    assert source not in needy
    if any(s.has_state for s in table):
        assert table[source] == max(table)
        assert all(table[rank] == table[source] for rank in range(len(table)) if rank not in needy)
    else:
        assert (source, needy) == (0, list(range(1, len(table))))


@pytest.mark.parametrize(
    ("ahead", "behind"),
    [
        (Standing(True, 0, 0, True), Standing(False, 9, 9, True)),  # no state, whatever it counts
        (Standing(True, 5, 4, True), Standing(True, 4, 4, True)),  # one update more
        (Standing(True, 5, 5, True), Standing(True, 5, 5, False)),  # no step that broke off
    ],
)
def test_who_is_ahead(ahead, behind):
    assert source_and_needy([behind, ahead]) == (1, [0])
    assert source_and_needy([ahead, behind, ahead]) == (0, [1])


OPEN = Standing(True, 4, 4, True, epoch_closed=False)
"""In the code after an epoch's last step."""
RUN = Standing(True, 4, 4, True, epoch_closed=False, epoch_run=True)
"""At its end, and a peer is lost."""
CLOSED = Standing(True, 4, 4, True)
JOINER = Standing(False, 0, 0, True)


@pytest.mark.parametrize(
    ("table", "reopened"),
    [
        ([RUN], True),
        ([JOINER, RUN, RUN], True),
        ([OPEN, RUN], True),
        ([OPEN, OPEN], False),  # lost in the last step: the code after it is still to come
        ([CLOSED, RUN], False),  # all had run it, for one has been told so
        ([CLOSED, CLOSED, JOINER], False),
        ([JOINER], False),
        ([Standing(True, 3, 3, True, epoch_closed=False, epoch_run=True), CLOSED], False),
    ],
)
def test_an_epoch_is_reopened_if_its_end_may_not_have_run_on_a_lost_peer(table, reopened):
    assert reopens_epoch(table) == reopened


def test_a_discarded_step_leaves_nothing_behind():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    facts = {"best": 0.5}
    start = StateBeforeStep([model], [facts])
    start.keep()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn = torch.rand(3)
    model(torch.rand(8, 2)).sum().backward()
    facts.update(best=0.9, more=1)
    start.restore([])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert facts == {"best": 0.5}
    assert torch.equal(torch.rand(3), drawn)
    assert all(p.grad is None for p in model.parameters())


def test_a_step_may_resize_a_buffer():
    model = torch.nn.Module()
    model.register_buffer("scale", torch.ones(1))  # as FakeQuantize does for each channel
    start = StateBeforeStep([model])
    start.keep()
    model.scale.resize_(4).fill_(2.0)
    assert start.restore([])
    assert torch.equal(model.scale, torch.ones(1))
    model.scale.resize_(4).fill_(2.0)
    start.keep()
    model.scale.fill_(3.0)
    assert start.restore([])
    assert torch.equal(model.scale, torch.full((4,), 2.0))


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(3, 2, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(()),
        torch.ones(0, 3),
    ],
    ids=["channels last", "complex", "scalar", "empty"],
)
def test_parameters_of_any_kind_that_a_step_moved_are_noticed(weight):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight.clone())
    start = StateBeforeStep([module])
    start.keep()
    assert start.restore([])
    module.weight.data.add_(1)  # not counted by autograd
    assert start.restore([]) == (weight.numel() == 0)
    start.keep()  # copied from here on
    module.weight.data.add_(1)
    before = weight + 1
    assert start.restore([])
    assert torch.equal(module.weight.detach(), before) or weight.numel() == 0


class FakeRun:
    def __init__(self, global_batch):
        self.global_batch = global_batch


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(elastic.lr_linear, [0.1, 0.4, 0.2]), (elastic.lr_sqrt, [0.1, 0.2, 0.02**0.5])],
)
def test_learning_rates_follow_the_batch_and_keep_what_a_scheduler_made_of_them(rule, expected):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    hook = rule(optimizer, base_batch=64)
    for batch, rate in zip((64, 256, 128), expected, strict=True):
        hook(FakeRun(batch))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected[-1] / 2)
    hook(FakeRun(64))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    with pytest.raises(ValueError, match="base_batch"):
        rule(optimizer, base_batch=0)


def test_several_samplers_are_refused():
    samplers = {name: ElasticSampler(8, global_batch_size=2) for name in ("one", "other")}
    with pytest.raises(TypeError, match=r"several samplers, and a step counts .* restart mode"):
        Training(samplers, torch.device("cpu"), None, 60.0)


def test_the_copy_of_an_epochs_end_is_left_out_where_memory_is_short():
    model = torch.nn.Linear(2, 2)
    copy = StateCopy(Holder({"model": model}, torch.device("cpu")))
    size = sum(t.nbytes for t in copy._state.pack({})[1])  # noqa: SLF001
    assert not copy.keep_in_host_memory({"steps": 3}, size - 1)
    assert copy.restore() is None
    before = model.weight.detach().clone()
    assert copy.keep_in_host_memory({"steps": 3}, size)
    with torch.no_grad():
        model.weight.add_(1)
    assert copy.restore() == {"steps": 3}
    assert torch.equal(model.weight, before)
    assert copy.restore() is None, "once"


class Steps:
    """Loads a state by as many steps as it has, and takes the state apart."""

    def __init__(self, adds=True):
        self.steps, self.rate, self.loads, self._adds = 0, 1.0, 0, adds

    def step(self, count=1):
        self.steps += count
        self.rate = 0.5**self.steps

    def state_dict(self):
        return {"inner": {"steps": self.steps}, "steps": self.steps}

    def load_state_dict(self, state):
        self.loads += 1
        state.pop("inner")
        self.step(state["steps"] - (0 if self._adds else self.steps))


@pytest.mark.parametrize(
    ("adds", "before", "saved", "now", "loads"),
    [
        (True, 0, 4, 5, 2),
        (True, 0, 4, 4, 2),
        (True, 2, 4, 5, 2),  # the script has made two steps itself before the run begins
        (True, 0, 4, 0, 1),  # a joiner
        (True, 0, 0, 3, 1),  # nothing to add
        (False, 0, 4, 5, 1),
        (False, 0, 4, 8, 1),
    ],
)
def test_an_object_that_adds_what_it_loads_is_loaded_as_in_a_new_process(
    adds, before, saved, now, loads
):
    steps = Steps(adds)
    steps.step(before)
    copy = StateCopy(Holder({"steps": steps}, torch.device("cpu")))
    steps.step(saved - steps.steps)
    copy.keep({})
    steps.step(now - steps.steps)
    copy.restore()
    expected = saved + before if adds and saved else now if adds else saved
    assert (steps.steps, steps.rate, steps.loads) == (expected, 0.5**expected, loads)


@pytest.mark.parametrize(
    ("free", "lease", "processes", "expected"),
    [
        (80, 100, 1, 40),  # half of what is free
        (80, 30, 1, 30),  # the lease has less
        (80, 100, 4, 10),  # four processes copy at the same time
        (80, 30, 4, 7),
        (0, 100, 8, 0),
    ],
)
def test_the_copies_of_all_processes_of_a_node_have_room(free, lease, processes, expected):
    assert epoch_end_bytes(free, lease, processes) == expected


@pytest.mark.parametrize(("local_rank", "count"), [("0", 1), ("1", 0)])
def test_without_room_the_copy_is_left_out_and_each_node_says_so_once(
    monkeypatch, capsys, local_rank, count
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("malletrain.elastic.training.available", lambda: 8)
    report.sentence_keys.clear()
    sampler = ElasticSampler(2, global_batch_size=2)
    model = torch.nn.Linear(2, 2)
    training = Training({"model": model, "sampler": sampler}, torch.device("cpu"), None, 60.0)
    training.copies_epoch_ends = True
    for _ in sampler.epochs(2):
        for _batch in sampler:
            training.begin_step(1)
            training.commit(0, 2, 1, False)
    log = capsys.readouterr().err
    assert log.count("too little free memory for a copy of the state") == count


def test_a_hook_for_the_exchange_of_gradients_is_refused():
    def fp16_compress_hook(state, bucket):
        """As of torch's ``ddp_comm_hooks``."""

    net = Parallel(torch.nn.Linear(1, 1), lambda: None, {})
    with pytest.raises(AttributeError, match=r"Leave the hook out.*restart"):
        net.register_comm_hook(None, fp16_compress_hook)
    assert not hasattr(net, "register_comm_hook")
    assert getattr(net, "register_comm_hook", None) is None
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = net.other
