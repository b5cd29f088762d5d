"""The state of an optimizer belongs to the same parameters if its groups have another order."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from malletrain import Snapshot, SnapshotError
from malletrain.elastic.state import Holder, StateError
from malletrain.elastic.training import StateCopy
from malletrain.training import snapshot_file
from malletrain.training.objects import names_by_id
from tests.malletrain.training.worker_side import as_plain_script

WEIGHTS = ["0.weight", "1.weight", "2.weight"]
BIASES = ["0.bias", "1.bias", "2.bias"]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


def send(script, joiner):
    """Send the state of one script to another, as in live mode."""
    holder, receiver = (Holder(s.objects(), torch.device("cpu")) for s in (script, joiner))
    packed, tensors = holder.pack({})
    receiver.restore(receiver.destinations(packed)[0], [t.clone() for t in tensors])


class Script:
    """A model whose layers have equal shapes, and groups as they come out of sets of names.

    Args:
        groups: names of the parameters of each group.
        optimizer: class of the optimizer.
        options: options by the first letter of a group's first name; the rest of a group's options
            are the defaults.
        model: the model; default: three layers.
    """

    def __init__(self, *groups, optimizer=torch.optim.Adam, options=None, model=None):
        torch.manual_seed(0)
        self.model = model or nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
        self.named = dict(self.model.named_parameters())
        self.options = options or {}
        self.optimizer = optimizer([self.group(names) for names in groups], lr=0.1)

    def group(self, names):
        options = self.options.get(names[0][0], {})
        params = [self.named[name] for name in names]
        return {"params": params, "param_names": list(names), **options}

    def train(self):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(6.0).reshape(3, 2)).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            self.optimizer.step(closure)
        return self

    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def save(self, path):
        Snapshot(path, **self.objects()).save()
        return self

    def restore(self, path):
        assert Snapshot(path, **self.objects()).restore()
        return self

    def averages(self):
        state = self.optimizer.state
        return {n: state[p]["exp_avg"].tolist() for n, p in self.named.items() if p in state}

    def weights(self):
        return {name: parameter.tolist() for name, parameter in self.named.items()}


ORDERS = {
    "within a group": [WEIGHTS[::-1], [BIASES[1], BIASES[2], BIASES[0]]],
    "groups": [BIASES, WEIGHTS],
    "both": [BIASES[::-1], [WEIGHTS[1], WEIGHTS[2], WEIGHTS[0]]],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_snapshot_is_loaded_by_name(tmp_path, order):
    first = Script(WEIGHTS, BIASES).train().save(tmp_path / "x.pt")
    second = Script(*order).restore(tmp_path / "x.pt")
    assert second.averages() == first.averages()
    assert second.train().weights() == first.train().weights()


def test_a_group_keeps_its_options_and_the_script_its_numbers_of_groups(tmp_path):
    groups = [[name] for name in WEIGHTS]
    options = {str(i): {"weight_decay": i / 10, "label": i} for i in range(3)}
    first = Script(*groups, options=options).train()
    first.optimizer.param_groups[0]["weight_decay"] = 0.7  # the script changes it while it trains
    first.save(tmp_path / "x.pt")
    second = Script(*groups[::-1], options=options).restore(tmp_path / "x.pt")
    loaded = second.optimizer.param_groups
    assert [(g["label"], g["weight_decay"]) for g in loaded] == [(2, 0.2), (1, 0.1), (0, 0.7)]
    assert [g["params"] for g in loaded] == [[second.named[name]] for name in WEIGHTS[::-1]]
    assert second.train().weights() == first.train().weights()


def test_a_group_that_is_added_later_is_loaded_by_name(tmp_path):
    first = Script(WEIGHTS, BIASES).train().save(tmp_path / "x.pt")
    second = Script(WEIGHTS[::-1]).restore(tmp_path / "x.pt")
    second.optimizer.add_param_group(second.group(BIASES[::-1]))
    assert second.train().averages() == first.train().averages()
    assert second.weights() == first.weights()


def test_the_vectors_of_lbfgs_are_loaded_in_their_order(tmp_path):
    first = Script(WEIGHTS, optimizer=torch.optim.LBFGS).train().save(tmp_path / "x.pt")
    second = Script(WEIGHTS[::-1], optimizer=torch.optim.LBFGS).restore(tmp_path / "x.pt")
    assert second.train().weights() == first.train().weights()


RATES = {"0": {"lr": 0.1}, "1": {"lr": 0.2}}


def test_groups_with_other_rates_in_another_order_are_refused(tmp_path):
    groups = [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    Script(*groups, options=RATES).train().save(tmp_path / "x.pt")
    with pytest.raises(SnapshotError, match=r"begin with model\.0\.weight, model\.1\.weight\."):
        Script(*groups[::-1], options=RATES).restore(tmp_path / "x.pt")


def test_another_grouping_of_the_same_parameters_is_refused(tmp_path):
    Script(WEIGHTS, BIASES).train().save(tmp_path / "x.pt")
    with pytest.raises(SnapshotError, match="another order than the saved ones, or contain other"):
        Script([*WEIGHTS[:2], BIASES[2]], [*BIASES[:2], WEIGHTS[2]]).restore(tmp_path / "x.pt")


def test_rates_in_tensors_are_compared_exactly(tmp_path):
    groups = [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    rates = {"0": {"lr": torch.tensor(0.1)}, "1": {"lr": torch.tensor(0.100001)}}
    Script(*groups, options=rates).train().save(tmp_path / "x.pt")
    with pytest.raises(SnapshotError, match="build the groups from lists"):
        Script(*groups[::-1], options=rates).restore(tmp_path / "x.pt")


def test_an_optimizer_without_averages_is_not_refused(tmp_path):
    sgd = torch.optim.SGD
    Script(WEIGHTS, BIASES, optimizer=sgd).train().save(tmp_path / "x.pt")
    other = Script([*WEIGHTS[:2], BIASES[2]], [*BIASES[:2], WEIGHTS[2]], optimizer=sgd)
    other.restore(tmp_path / "x.pt").train()


def by_position(script):
    state = script.optimizer.state
    parameters = [p for group in script.optimizer.param_groups for p in group["params"]]
    return [state[p]["exp_avg"].tolist() for p in parameters if "exp_avg" in state[p]]


def test_a_snapshot_without_names_is_loaded_by_position(tmp_path):
    first = Script(WEIGHTS).train().save(tmp_path / "x.pt")
    payload = snapshot_file.read(str(tmp_path / "x.pt"))
    assert payload.pop("parameter_names") == {"optimizer": [[f"model.{n}" for n in WEIGHTS]]}
    snapshot_file.write(str(tmp_path / "x.pt"), payload, keep=1)
    assert by_position(Script(WEIGHTS).restore(tmp_path / "x.pt")) == by_position(first)


@pytest.mark.parametrize("names", [WEIGHTS[:2], BIASES[:2], ["1.bias", "0.weight"]])
def test_other_names_are_loaded_by_position(tmp_path, names):
    first = Script(["0.weight", "2.bias"], model=Square()).train().save(tmp_path / "x.pt")
    second = Script(names, model=Square()).restore(tmp_path / "x.pt")
    assert by_position(second) == by_position(first)


class Square(nn.Sequential):
    """Layers whose weights and biases have one shape."""

    def __init__(self):
        super().__init__(*[nn.Linear(2, 2) for _ in range(3)])
        for layer in self:
            layer.bias = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x):
        for layer in self:
            x = x @ layer.weight + layer.bias.sum(0)
        return x


class Prefixed(nn.Module):
    """A wrapper that shows in the names of the parameters, and not in the state of the module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)


def test_a_wrapper_in_only_one_of_the_processes_is_loaded_by_position(tmp_path):
    first = Script(WEIGHTS, BIASES).train()
    Snapshot(tmp_path / "x.pt", model=Prefixed(first.model), optimizer=first.optimizer).save()
    assert Script(WEIGHTS, BIASES).restore(tmp_path / "x.pt").averages() == first.averages()


class Tied(nn.Module):
    """Two layers with one weight, registered in either order."""

    def __init__(self, names):
        super().__init__()
        layers = {name: nn.Linear(2, 2) for name in ("a", "b", "c")}
        layers["b"].weight = layers["a"].weight
        for name in names:
            self.add_module(name, layers[name])

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def test_a_shared_parameter_has_one_name(tmp_path):
    first = Script(["a.weight", "c.weight"], model=Tied("abc")).train().save(tmp_path / "x.pt")
    second = Script(["c.weight", "b.weight"], model=Tied("bac")).restore(tmp_path / "x.pt")
    assert second.averages()["b.weight"] == first.averages()["a.weight"]
    assert second.averages()["c.weight"] == first.averages()["c.weight"]


class Roles(nn.Module):
    """Two layers that swap roles while the model trains.

    Args:
        with_list: whether the layers are also in a list, in their first order.
    """

    def __init__(self, with_list):
        super().__init__()
        self.active, self.backup = nn.Linear(2, 2), nn.Linear(2, 2)
        if with_list:
            self.heads = nn.ModuleList([self.active, self.backup])

    def forward(self, x):
        return self.active(x) + 2 * self.backup(x)

    def swap(self):
        self.active, self.backup = self.backup, self.active


@pytest.mark.parametrize("with_list", [True, False])
def test_the_averages_of_layers_that_swap_roles_stay_with_their_weights(tmp_path, with_list):
    first, second = (
        Script(["active.weight", "backup.weight"], model=Roles(with_list)) for _ in range(2)
    )
    first.train().model.swap()
    first.train().save(tmp_path / "x.pt")
    second.restore(tmp_path / "x.pt")
    if with_list:  # the last name of a parameter decides which weights it gets
        second.model.swap()
    first.train(), second.train()
    ours, theirs = (dict(script.model.named_parameters()) for script in (first, second))
    for name in ("active.weight", "backup.weight"):
        assert torch.equal(ours[name], theirs[name])


class Mixture(nn.Module):
    """Layers that are saved by the numbers of the experts."""

    def __init__(self, numbers):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in numbers])
        self.numbers = numbers

    def forward(self, x):
        return sum((n + 1) * e(x) for n, e in zip(self.numbers, self.experts, strict=True))

    def state_dict(self, **_):
        return {n: e.state_dict() for n, e in zip(self.numbers, self.experts, strict=True)}

    def load_state_dict(self, state_dict):
        for number, expert in zip(self.numbers, self.experts, strict=True):
            expert.load_state_dict(state_dict[number])


@pytest.mark.parametrize("inner", [False, True])
def test_modules_that_load_by_something_else_than_names_have_none(inner):
    for own in ("state_dict", "load_state_dict", "_save_to_state_dict"):
        module = type("Own", (nn.Linear,), {own: getattr(nn.Linear, own)})(2, 2)
        assert names_by_id({"model": module})
        setattr(type(module), own, lambda *_, **__: {})
        model = nn.Sequential(nn.Linear(2, 2), module) if inner else module
        expected = {"model.0.weight", "model.0.bias"} if inner else set()
        assert set(names_by_id({"model": model}).values()) == expected
    model = nn.Linear(2, 2)
    model.state_dict = dict
    assert names_by_id({"model": model}) == {}
    assert set(names_by_id({"model": nn.BatchNorm1d(2)}).values()) == {"model.weight", "model.bias"}


def test_experts_that_are_saved_by_number_keep_their_averages(tmp_path):
    first = Script(["experts.0.weight", "experts.1.weight"], model=Mixture([0, 1]))
    first.train().save(tmp_path / "x.pt")
    second = Script(["experts.1.weight", "experts.0.weight"], model=Mixture([1, 0]))
    second.restore(tmp_path / "x.pt")
    first.train(), second.train()
    for ours, theirs in zip(first.model.experts, reversed(second.model.experts), strict=True):
        assert torch.allclose(ours.weight, theirs.weight)


class WithGroups(nn.Linear):
    """A module that collects the groups for its optimizer."""

    def __init__(self):
        super().__init__(2, 2)
        self.param_groups = ["weight", "bias"]

    def add_param_group(self, name):
        self.param_groups.append(name)


def test_a_module_with_groups_is_no_optimizer(tmp_path):
    model = WithGroups()
    assert Snapshot(tmp_path / "x.pt", model=model).save()
    holder = Holder({"model": model}, torch.device("cpu"))
    assert holder.destinations(holder.pack({})[0])[0]["parameter_names"] == {}
    assert holder.digest()


class OwnOrder(torch.optim.Adam):
    """Loads states by names of its own."""

    def load_state_dict(self, state_dict):
        names = [n for group in state_dict["param_groups"] for n in group["param_names"]]
        own_names = [n for group in self.param_groups for n in group["param_names"]]
        state = {i: state_dict["state"][names.index(n)] for i, n in enumerate(own_names)}
        super().load_state_dict({**state_dict, "state": state})


def test_an_optimizer_with_its_own_way_to_load_is_left_alone(tmp_path):
    first = Script(WEIGHTS, BIASES, optimizer=OwnOrder).train().save(tmp_path / "x.pt")
    second = Script(*ORDERS["both"], optimizer=OwnOrder).restore(tmp_path / "x.pt")
    assert second.averages() == first.averages()


def test_an_optimizer_with_a_hook_for_states_is_loaded_by_position(tmp_path):
    groups = [[name] for name in WEIGHTS]
    first = Script(*groups).train().save(tmp_path / "x.pt")
    second = Script(*groups[::-1])
    second.optimizer.register_load_state_dict_post_hook(lambda _: None)
    assert by_position(second.restore(tmp_path / "x.pt")) == by_position(first)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_joiner_and_two_survivors_agree(order):
    device = torch.device("cpu")
    first, survivor = Script(WEIGHTS, BIASES).train(), Script(*order).train()
    joiner = Script(*order[::-1])
    send(first, joiner)
    assert joiner.averages() == first.averages() == survivor.averages()
    for script in (first, survivor, joiner):
        script.train()
    digests = {Holder(s.objects(), device).digest() for s in (first, survivor, joiner)}
    assert len(digests) == 1


def test_a_joiner_with_other_groups_is_refused():
    first, joiner = Script(WEIGHTS, BIASES).train(), Script([*WEIGHTS[:2], BIASES[2]], BIASES[:2])
    joiner.optimizer.param_groups[1]["params"].append(joiner.named["2.weight"])
    with pytest.raises(StateError, match="another order than the saved ones"):
        send(first, joiner)


LIVE_OPTIONS = {
    "lr": (0.1, torch.tensor(0.100001)),
    "weight_decay": (0.0, 0.1),
    "betas": ((0.9, 0.99), (0.9, 0.999)),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("option", LIVE_OPTIONS)
def test_a_joiner_whose_groups_have_other_options_by_position_is_refused(option, trained):
    groups = [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    options = {str(i): {option: value} for i, value in enumerate(LIVE_OPTIONS[option])}
    first, joiner = Script(*groups, options=options), Script(*groups[::-1], options=options)
    if trained:
        first.train()
    with pytest.raises(StateError, match="build the groups from lists"):
        send(first, joiner)


def test_another_grouping_without_averages_and_with_equal_options_may_join():
    first = Script(WEIGHTS, BIASES)
    joiner = Script([*WEIGHTS[:2], BIASES[2]], [*BIASES[:2], WEIGHTS[2]])
    send(first, joiner)
    assert joiner.train().weights() == first.train().weights()


def test_groups_with_other_rates_and_without_averages_are_restored_by_position(tmp_path):
    groups = [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    Script(*groups, options=RATES).save(tmp_path / "x.pt")
    Script(*groups[::-1], options=RATES).restore(tmp_path / "x.pt")


def test_the_copy_before_a_step_has_no_names():
    script = Script(WEIGHTS, BIASES).train()
    copy = StateCopy(Holder(script.objects(), torch.device("cpu")))
    averages = script.averages()
    for keep in (copy.keep, lambda counters: copy.keep_in_host_memory(counters, 10**6)):
        keep({"steps": 3})
        assert pickle.loads(copy._skeleton)["parameter_names"] == {}  # noqa: SLF001
        script.train()
        assert copy.restore() == {"steps": 3}
        assert script.averages() == averages


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer as Accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


def test_the_optimizer_in_a_wrapper_of_a_library_is_loaded_by_name(tmp_path):
    first, second = Script(WEIGHTS, BIASES).train(), Script(*ORDERS["both"])
    wrapped, other = (
        {"model": s.model, "optimizer": AcceleratedOptimizer(s.optimizer)} for s in (first, second)
    )
    Snapshot(tmp_path / "x.pt", **wrapped).save()
    assert Snapshot(tmp_path / "x.pt", **other).restore()
    assert second.averages() == first.averages()
