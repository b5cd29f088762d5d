"""A script's own variables for tensors and arrays in its dicts stay valid when a state is loaded,
and nothing is written to what the script uses for something else.
"""

from __future__ import annotations

import gc
import hashlib
import io
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import malletrain  # noqa: E402
from malletrain.elastic.state import Holder  # noqa: E402
from malletrain.elastic.training import StateCopy  # noqa: E402
from malletrain.training import dict_tensors  # noqa: E402
from malletrain.training.dict_tensors import DictTensors  # noqa: E402
from malletrain.training.epoch_begin import undo_of  # noqa: E402
from tests.malletrain.training.worker_side import as_plain_script  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


class Script:
    """Has a variable for each tensor and array in its dict, and an optimizer for one of them."""

    def __init__(self):
        self.center, self.counts = torch.zeros(2), np.zeros(2)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.prompt = nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.log_alpha, self.prompt], lr=1.0)
        self.facts = {
            "center": self.center,
            "counts": self.counts,
            "log_alpha": self.log_alpha,
            "prompt": self.prompt,
            "step": 0,
        }

    def train(self):
        """One step, all of it through the script's variables."""
        self.center.mul_(0.5).add_(1)
        self.counts[1] += 3
        (self.log_alpha.sum() + self.prompt.sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.facts["step"] += 1

    def values(self):
        tensors = (self.center, self.counts, self.log_alpha, self.prompt)
        return [*(tensor.tolist() for tensor in tensors), self.facts["step"]]

    def check_identity(self):
        assert all(
            self.facts[name] is getattr(self, name)
            for name in ("center", "counts", "log_alpha", "prompt")
        )
        assert self.log_alpha.requires_grad
        assert type(self.prompt) is nn.Parameter


def saved(path, **dicts):
    """Take a snapshot as the process does that ends with it."""
    return malletrain.Snapshot(path, **dicts).save()


def restored(path, **dicts):
    """Return the Snapshot of the next process, which has restored ``dicts``."""
    snapshot = malletrain.Snapshot(path, **dicts)
    assert snapshot.restore()
    return snapshot


def test_variables_stay_valid_over_restarts(tmp_path):
    undisturbed, path = Script(), tmp_path / "x.pt"
    script = Script()
    snapshot = malletrain.Snapshot(path, facts=script.facts)
    assert not snapshot.restore()
    for _ in range(3):
        for each in (undisturbed, script):
            each.train()
        assert snapshot.save()
        script = Script()
        snapshot = restored(path, facts=script.facts)
        script.check_identity()
        assert script.values() == undisturbed.values()


def test_an_object_that_has_not_changed_yet_stays_too(tmp_path):
    script = Script()
    saved(tmp_path / "x.pt", facts=script.facts)
    for step in range(3):
        script = Script()
        snapshot = restored(tmp_path / "x.pt", facts=script.facts)
        script.check_identity()
        assert script.center.tolist() == ([0, 0] if step < 2 else [1, 1])
        if step == 1:
            script.train()
        snapshot.save()


def test_variables_stay_valid_if_the_script_restores_only_what_exists(tmp_path):
    undisturbed, path = Script(), tmp_path / "x.pt"
    for _ in range(3):
        script = Script()
        snapshot = malletrain.Snapshot(path, facts=script.facts)
        if path.exists():
            assert snapshot.restore()
        script.check_identity()
        assert script.values() == undisturbed.values()
        for each in (undisturbed, script):
            each.train()
        snapshot.step()
        assert snapshot.save()


def test_nothing_is_written_to_an_object_that_the_script_replaced(tmp_path):
    path, data = tmp_path / "x.pt", torch.zeros(3)
    state = {"best": data, "last": data}
    snapshot = malletrain.Snapshot(path, state=state)
    state["best"] = torch.ones(3)
    snapshot.save()
    for _ in range(2):  # the second run replaces nothing itself, and saves
        state = {"best": data, "last": data}
        snapshot = restored(path, state=state)
        assert (state["best"].tolist(), data.tolist()) == ([1] * 3, [0] * 3)
        state["best"].add_(0)
        snapshot.save()
        assert state["last"] is data


def test_nothing_is_written_to_an_object_that_the_script_computes_at_its_start(tmp_path):
    path = tmp_path / "x.pt"
    bounds, names = torch.tensor([0, 6]), np.array([1, 2])
    saved(path, facts={"bounds": bounds, "names": names})
    bounds, names = torch.tensor([0, 3]), np.array([4, 5])
    facts = {"bounds": bounds, "names": names}
    restored(path, facts=facts)
    assert (bounds.tolist(), names.tolist()) == ([0, 3], [4, 5])
    assert (facts["bounds"].tolist(), facts["names"].tolist()) == ([0, 6], [1, 2])


def test_what_the_script_sets_before_it_restores_is_its_start(tmp_path):
    for rank in range(2):
        bounds, scale = torch.zeros(1), torch.zeros(1)
        facts = {"bounds": bounds, "scale": scale}
        snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=facts)
        facts["center"] = center = torch.zeros(1)
        bounds.fill_(rank)
        scale.data.fill_(rank)  # as a broadcast does: torch counts no change
        assert snapshot.restore() == (rank == 1)
        assert (bounds.item(), scale.item()) == (rank, rank)
        assert center.item() == rank
        center.fill_(1)
        snapshot.save()


MODEL = nn.Linear(1, 2)
ROWS = torch.zeros(2, 2)
WHOLE = torch.zeros(2)
FIXED = np.zeros(2, np.float32)


def loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def seen_by_numpy(tensor):
    tensor.numpy()
    return tensor


USED_BY_OTHERS = {
    "a row": lambda: ROWS[0],
    "a view of all": lambda: WHOLE.view(2),
    "an array as a tensor": lambda: torch.from_numpy(FIXED),
    "memory of several processes": lambda: torch.zeros(2).share_memory_(),
    "a module's parameter": lambda: MODEL.bias,
    "a module's memory": lambda: MODEL.bias.detach(),
    "a view of an array": lambda: np.zeros((2, 2))[0],
    "an array that is read-only": lambda: np.broadcast_to(np.zeros(1), 2),
    "another shape": lambda: torch.zeros(3),
    "another dtype": lambda: torch.zeros(2, dtype=torch.float16),
    "another type": lambda: np.zeros(2, np.float32),
    "what is computed": lambda: torch.zeros(2, requires_grad=True) * 2,
    "objects": lambda: np.array([None, None]),
    "no tensor": lambda: 0,
    "what torch.load made": lambda: loaded(torch.zeros(2)),
    "what numpy has seen": lambda: seen_by_numpy(torch.zeros(2)),
    "sparse": lambda: torch.zeros(2).to_sparse(),
}


@pytest.mark.parametrize("own", USED_BY_OTHERS.values(), ids=USED_BY_OTHERS)
def test_nothing_is_written_to_what_others_use_or_what_does_not_fit(own, tmp_path):
    MODEL.bias.data.zero_()
    is_array = isinstance(own(), np.ndarray)
    first = {"x": np.zeros(2) if is_array else torch.zeros(2)}
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=first)
    first["x"] += 1
    snapshot.save()
    value = own()
    facts = {"x": value}
    restored(tmp_path / "x.pt", facts=facts, model=MODEL)
    assert facts["x"] is not value
    assert facts["x"].tolist() == [1, 1]
    content = value.to_dense() if isinstance(value, torch.Tensor) else np.asarray(value)
    assert 1 not in np.ravel(content.tolist())


def test_nothing_is_written_to_memory_that_two_keys_have(tmp_path):
    first = {"x": torch.zeros(2), "y": torch.zeros(2)}
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=first)
    first["x"].add_(1)
    first["y"].add_(2)
    snapshot.save()
    own = torch.zeros(2)
    alias = own.detach()
    facts = {"x": own, "y": alias}
    restored(tmp_path / "x.pt", facts=facts)
    assert (facts["x"].tolist(), facts["y"].tolist()) == ([1, 1], [2, 2])
    assert (own.tolist(), alias.tolist()) == ([0, 0], [0, 0])


def test_a_snapshot_of_an_earlier_version_loads_as_it_did(tmp_path, monkeypatch):
    script, later = Script(), Script()
    with monkeypatch.context() as patch:
        patch.setattr(DictTensors, "record", lambda self: {})
        snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=script.facts)
        script.train()
        snapshot.save()
    restored(tmp_path / "x.pt", facts=later.facts)
    assert later.center.tolist() == [0, 0]
    assert later.facts["center"].tolist() == [1, 1]


def earlier_hash(value):
    """What earlier versions recorded of a content."""
    sha = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    if isinstance(value, np.ndarray):
        sha.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return sha.hexdigest()
    content = value.detach().contiguous().reshape(-1).view(torch.uint8)
    for chunk in content.split(1 << 24):
        sha.update(chunk.to("cpu", copy=True).numpy())
    return sha.hexdigest()


def test_variables_stay_valid_with_a_snapshot_of_an_earlier_version(tmp_path, monkeypatch):
    undisturbed, script, path = Script(), Script(), tmp_path / "x.pt"
    script.facts["bounds"] = torch.zeros(1)
    with monkeypatch.context() as patch:
        patch.setattr(dict_tensors, "_content_hash", earlier_hash)
        snapshot = malletrain.Snapshot(path, facts=script.facts)
        for each in (undisturbed, script):
            each.train()
        script.facts["bounds"].fill_(2)
        assert snapshot.save()
    values = undisturbed.values()
    script = Script()
    script.facts["bounds"] = bounds = torch.ones(1)
    snapshot = malletrain.Snapshot(path, facts=script.facts)
    for _ in range(2):  # at its start, and back to the same snapshot
        assert snapshot.restore()
        script.check_identity()
        assert script.values() == values
        assert (bounds.item(), script.facts["bounds"].item()) == (1, 2)
        script.train()
    assert snapshot.save()
    later = Script()
    restored(path, facts=later.facts)
    later.check_identity()
    assert later.values() == script.values()


def test_a_joiner_understands_the_hashes_of_an_earlier_version(monkeypatch):
    survivor, joiner = Script(), Script()
    with monkeypatch.context() as patch:
        patch.setattr(dict_tensors, "_content_hash", earlier_hash)
        survivors = Holder({"facts": survivor.facts}, CPU)
    joiners = Holder({"facts": joiner.facts}, CPU)
    survivor.train()
    packed, tensors = survivors.pack({})
    joiners.restore(joiners.destinations(packed)[0], tensors)
    joiner.check_identity()
    assert joiner.values() == survivor.values()


def test_an_object_that_the_script_drops_is_freed():
    facts = {"outputs": torch.zeros(2)}
    reference = weakref.ref(facts["outputs"])
    tensors = DictTensors({"facts": facts})
    facts["outputs"] = torch.ones(2)
    gc.collect()
    assert reference() is None
    assert tensors.record() == {}


def test_going_back_to_a_snapshot_of_this_process(tmp_path):
    script, data = Script(), torch.zeros(1)
    script.facts["best"] = data
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=script.facts)
    snapshot.restore()
    script.train()
    snapshot.step()
    snapshot.save()
    values = script.values()
    script.train()
    script.facts["best"] = torch.ones(1)
    assert snapshot.restore()
    script.check_identity()
    assert script.values() == values
    assert script.facts["best"] is data
    assert data.item() == 0


def test_variables_of_a_joiner_stay_valid():
    survivor, joiner = Script(), Script()
    survivors, joiners = (Holder({"facts": each.facts}, CPU) for each in (survivor, joiner))
    for _ in range(2):
        survivor.train()
        packed, tensors = survivors.pack({})
        joiners.restore(joiners.destinations(packed)[0], tensors)
        joiner.check_identity()
        assert joiner.values() == survivor.values()
        assert joiners.digest() == survivors.digest()  # with tensor.numpy()


@pytest.mark.parametrize("trained", [0, 1])
def test_variables_stay_valid_when_the_copy_of_a_step_is_restored(trained):
    script = Script()
    holder = Holder({"facts": script.facts}, CPU)
    for _ in range(trained):
        script.train()
    values = script.values()
    copy = StateCopy(holder)
    copy.keep({})
    script.train()
    copy.restore()
    script.check_identity()
    assert script.values() == values


def test_a_variable_is_as_the_beginning_of_an_epoch_leaves_it():
    scale = torch.zeros(1)
    facts = {"scale": scale}
    (undo,) = undo_of({"facts": facts}, constant_batch=True)
    scale.fill_(0.5)
    undo()
    assert (scale.item(), facts["scale"].item()) == (0.5, 0)


ALL_LABELS = {"labels": torch.arange(6), "order": np.arange(6)}


def part_of(rank):
    """Return what one of two ranks has at its start."""
    return {
        "labels": ALL_LABELS["labels"][rank::2].clone(),
        "order": ALL_LABELS["order"][rank::2].copy(),
    }


def test_nothing_is_written_to_what_a_rank_has_for_itself(tmp_path):
    first = part_of(0)
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=first)
    snapshot.restore()
    first["labels"][0] = 9
    first["order"][:] = first["order"][::-1]
    snapshot.save()
    for rank in range(2):
        own = part_of(rank)
        facts = dict(own)
        restored(tmp_path / "x.pt", facts=facts)
        assert (facts["labels"].tolist(), facts["order"].tolist()) == ([9, 2, 4], [4, 2, 0])
        for name, value in own.items():
            assert (facts[name] is value) == (rank == 0)
            assert rank == 0 or value.tolist() == part_of(rank)[name].tolist()


def test_nothing_is_written_to_what_a_joiner_has_for_itself():
    first, own = part_of(0), part_of(1)
    survivors, joiners = (Holder({"facts": facts}, CPU) for facts in (first, dict(own)))
    first["labels"][0] = 9
    packed, tensors = survivors.pack({})
    joiners.restore(joiners.destinations(packed)[0], tensors)
    assert joiners.objects["facts"]["labels"].tolist() == [9, 2, 4]
    assert own["labels"].tolist() == [1, 3, 5]
    assert joiners.digest() == survivors.digest()


def test_contents_are_read_only_at_the_start(tmp_path, monkeypatch):
    script = Script()
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=script.facts)
    snapshot.restore()
    holder = Holder({"facts": script.facts}, CPU)
    monkeypatch.setattr(dict_tensors, "_content_hash", _refuse)
    script.train()
    snapshot.step()
    assert snapshot.save()
    packed, tensors = holder.pack({})
    holder.restore(holder.destinations(packed)[0], tensors)
    assert snapshot.restore()
    script.check_identity()


def test_what_nothing_may_be_written_to_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(dict_tensors, "_content_hash", _refuse)
    data = np.memmap(tmp_path / "data", np.float32, "w+", shape=(4,))
    facts = {
        "view": torch.zeros(2, 2)[0],
        "file": np.asarray(data),
        "file as a tensor": torch.from_numpy(data),
        "array as a tensor": torch.from_numpy(np.zeros(2)),
        "slice": np.zeros((2, 2))[0],
        "nested": torch.nested.nested_tensor([torch.zeros(2)]),
    }
    assert DictTensors({"facts": facts}).record() == {}


def _refuse(value):
    raise AssertionError("a content is read")


def test_a_tensor_larger_than_a_chunk_and_other_layouts_are_read_whole(monkeypatch):
    monkeypatch.setattr(dict_tensors, "_CHUNK_BYTES", 8)
    values = [torch.zeros(3, 3) for _ in range(2)]
    values[1][2, 1] = 1
    values.append(torch.empty_strided((3, 3), (1, 3)).copy_(values[1]))
    assert not values[2].is_contiguous()
    values.append(torch.zeros(9))
    for _ in range(2):  # what was read still counts as torch's memory
        tensors = [DictTensors({"facts": {"x": value}}) for value in values]
        hashes = [each.record()["facts"]["x"] for each in tensors]
        assert len(set(hashes)) == 3
        assert hashes[1] == hashes[2]


def test_a_nested_tensor_is_restored(tmp_path):
    def nested(value):
        return torch.nested.nested_tensor([torch.full((2,), value), torch.full((1,), value)])

    saved(tmp_path / "x.pt", facts={"x": nested(1.0)})
    value = nested(0.0)
    facts = {"x": value}
    restored(tmp_path / "x.pt", facts=facts)
    assert [part.tolist() for part in facts["x"].unbind()] == [[1, 1], [1]]
    assert [part.tolist() for part in value.unbind()] == [[0, 0], [0]]


@pytest.mark.parametrize("first_call", ["restore", "save"])
def test_a_script_without_steps_goes_back_twice(first_call, tmp_path):
    script = Script()
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=script.facts)
    getattr(snapshot, first_call)()
    script.train()
    snapshot.save()
    values = script.values()
    for _ in range(2):
        script.train()
        assert snapshot.restore()
        script.check_identity()
        assert script.values() == values
    later = Script()
    restored(tmp_path / "x.pt", facts=later.facts)
    later.check_identity()
    assert later.values() == values


def test_a_passed_object_needs_no_method_parameters(tmp_path):
    class Wrapper(Script):
        """Lists its parameters by name only."""

        def named_parameters(self):
            return [("prompt", self.prompt)]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    script = Wrapper()
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", facts=script.facts)
    script.train()
    snapshot.save()
    later = Wrapper()
    restored(tmp_path / "x.pt", facts=later.facts, wrapper=later)
    later.check_identity()
