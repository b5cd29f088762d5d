"""What is told of objects in dicts that a load replaces."""

import copy

import pytest
import torch

from malletrain import Snapshot
from malletrain.training.dict_objects import tell_copies

NET = torch.nn.Linear(2, 2)
ADAM = torch.optim.Adam(NET.parameters())


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"gen": NET}, "['gen']"),
        ({"nets": {"gen": NET}, "best": 0.5}, "['nets']['gen']"),
        ({"optimizers": [ADAM, ADAM]}, "['optimizers'][0], ['optimizers'][1]"),
        ({"pair": (1, NET)}, "['pair'][1]"),
        ({str(n): NET for n in range(6)}, "['0'], ['1'], ['2'], ['3'], ['4'], …"),
        ({"weights": NET.state_dict(), "best": 0.5, "kind": torch.nn.Linear, "none": None}, None),
        ({1: {2: {3: {4: NET}}}}, None),
    ],
)
def test_replaced_objects_are_named(capsys, own, named):
    saved = {key: copy.deepcopy(value) for key, value in own.items()}
    source = f"The state {named}"
    tell_copies(own, saved, source)
    tell_copies(own, saved, source)
    message = capsys.readouterr().err
    if named is None:
        assert not message
    else:
        assert message.count(f"by copies: {named}. ") == 1


def test_values_that_stay_and_missing_ones_are_not_named(capsys):
    tell_copies({"gen": NET}, {"gen": NET}, "Same")
    tell_copies({"gen": NET}, {}, "Absent")
    tell_copies({"gen": NET}, {"gen": None}, "None")
    tell_copies({}, {"gen": NET}, "New")
    assert not capsys.readouterr().err


def test_a_restored_script_is_told(tmp_path, capsys):
    for resumed in (False, True):
        nets = {"gen": torch.nn.Linear(2, 2)}
        mine = nets["gen"]
        snapshot = Snapshot(tmp_path / "snapshot.pt", every_s=0, nets=nets)
        snapshot.restore()
        assert (nets["gen"] is not mine) == resumed
        message = capsys.readouterr().err
        assert ("by copies: ['gen']" in message) == resumed
        snapshot.save()
