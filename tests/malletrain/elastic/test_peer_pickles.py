"""What workers of two versions send each other as pickles: those of earlier versions are read, and
newer ones name no module of malletrain but one.
"""

from __future__ import annotations

import base64
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from malletrain.elastic import peer_pickles
from malletrain.elastic.module_modes import ModuleModes
from malletrain.elastic.sharded import sharing, training
from malletrain.elastic.sharded.chunks import Chunk
from malletrain.elastic.sharded.copies import ShardStanding, Version
from malletrain.elastic.state import Holder, Slot
from malletrain.elastic.step_exchange import EXCHANGES, Invited
from tests.pickle_names import names_in

VERSION = Version(3, 4, "one")
OBJECTS: dict[str, Any] = {
    "Invited": Invited(2, (0, 2)),
    "Chunk": Chunk((0, 4), (2, 3)),
    "Version": VERSION,
    "ShardStanding": ShardStanding(VERSION, True, False, (VERSION,)),
    "ModuleModes": ModuleModes({"w": True}, {"": False}),
    "Slot": Slot(1, (2, 3), torch.float32, False),
    "tensor": torch.tensor(7.0),
}
FIRST = {
    "Invited": "gASVXQAAAAAAAACMIG1hbGxldHJhaW4uZWxhc3RpYy5zdGVwX2V4Y2hhbmdllIwHSW52aXRlZ"
    "JSTlCmBlH2UKIwKZ2VuZXJhdGlvbpRLAowFcGxhY2WUSwBLAoaUjAR2b2lklIl1Yi4=",
    "Chunk": "gASVVQAAAAAAAACMIW1hbGxldHJhaW4uZWxhc3RpYy5zaGFyZGVkLmNodW5rc5SMBUNodW5rlJO"
    "UKYGUfZQojAdvZmZzZXRzlEsASwSGlIwFc2l6ZXOUSwJLA4aUdWIu",
    "Version": "gASVXwAAAAAAAACMIW1hbGxldHJhaW4uZWxhc3RpYy5zaGFyZGVkLmNvcGllc5SMB1ZlcnNpb"
    "26Uk5QpgZR9lCiMB3VwZGF0ZXOUSwOMBXN0ZXBzlEsEjAdoaXN0b3J5lIwDb25llHViLg==",
    "ShardStanding": "gASVowAAAAAAAACMIW1hbGxldHJhaW4uZWxhc3RpYy5zaGFyZGVkLmNvcGllc5SMDVN"
    "oYXJkU3RhbmRpbmeUk5QpgZR9lCiMBGxpdmWUaACMB1ZlcnNpb26Uk5QpgZR9lCiMB3"
    "VwZGF0ZXOUSwOMBXN0ZXBzlEsEjAdoaXN0b3J5lIwDb25llHVijAV3aG9sZZSIjAdwZ"
    "W5kaW5nlImMBmNvcGllc5RoCIWUdWIu",
    "ModuleModes": "gASVZQAAAAAAAACMH21hbGxldHJhaW4uZWxhc3RpYy5tb2R1bGVfbW9kZXOUjAtNb2R1b"
    "GVNb2Rlc5STlCmBlH2UKIwNcmVxdWlyZXNfZ3JhZJR9lIwBd5SIc4wIdHJhaW5pbmeUfZ"
    "SMAJSJc3ViLg==",
    "Slot": "gASVaQAAAAAAAACMGG1hbGxldHJhaW4uZWxhc3RpYy5zdGF0ZZSMBFNsb3SUk5QpgZR9lCiMBWlu"
    "ZGV4lEsBjAVzaGFwZZRLAksDhpSMBWR0eXBllIwFdG9yY2iUjAdmbG9hdDMylJOUjARjdWRhlIl1"
    "Yi4=",
    "tensor": "gASVVgAAAAAAAACMI21hbGxldHJhaW4uZWxhc3RpYy5zaGFyZGVkLnRyYWluaW5nlIwJdGVuc2"
    "9yX29mlJOUR0AcAAAAAAAAjAV0b3JjaJSMB2Zsb2F0MzKUk5SGlFKULg==",
}
"""What the workers before the exchange by name send."""
BY_NAME = {
    "Invited": "gASVZgAAAAAAAACMH21hbGxldHJhaW4uZWxhc3RpYy5wZWVyX3BpY2tsZXOUjAdyZWJ1aWx0l"
    "JOUjAdJbnZpdGVklH2UKIwKZ2VuZXJhdGlvbpRLAowFcGxhY2WUSwBLAoaUjAR2b2lklIl1hp"
    "RSlC4=",
    "Chunk": "gASVXQAAAAAAAACMH21hbGxldHJhaW4uZWxhc3RpYy5wZWVyX3BpY2tsZXOUjAdyZWJ1aWx0lJO"
    "UjAVDaHVua5R9lCiMB29mZnNldHOUSwBLBIaUjAVzaXplc5RLAksDhpR1hpRSlC4=",
    "Version": "gASVZwAAAAAAAACMH21hbGxldHJhaW4uZWxhc3RpYy5wZWVyX3BpY2tsZXOUjAdyZWJ1aWx0l"
    "JOUjAdWZXJzaW9ulH2UKIwHdXBkYXRlc5RLA4wFc3RlcHOUSwSMB2hpc3RvcnmUjANvbmWUdY"
    "aUUpQu",
    "ShardStanding": "gASVqQAAAAAAAACMH21hbGxldHJhaW4uZWxhc3RpYy5wZWVyX3BpY2tsZXOUjAdyZWJ"
    "1aWx0lJOUjA1TaGFyZFN0YW5kaW5nlH2UKIwEbGl2ZZRoAowHVmVyc2lvbpR9lCiMB3"
    "VwZGF0ZXOUSwOMBXN0ZXBzlEsEjAdoaXN0b3J5lIwDb25llHWGlFKUjAV3aG9sZZSIj"
    "AdwZW5kaW5nlImMBmNvcGllc5RoDYWUdYaUUpQu",
    "ModuleModes": "gASVbwAAAAAAAACMH21hbGxldHJhaW4uZWxhc3RpYy5wZWVyX3BpY2tsZXOUjAdyZWJ1a"
    "Wx0lJOUjAtNb2R1bGVNb2Rlc5R9lCiMDXJlcXVpcmVzX2dyYWSUfZSMAXeUiHOMCHRyYW"
    "luaW5nlH2UjACUiXN1hpRSlC4=",
    "Slot": "gASVegAAAAAAAACMH21hbGxldHJhaW4uZWxhc3RpYy5wZWVyX3BpY2tsZXOUjAdyZWJ1aWx0lJOU"
    "jARTbG90lH2UKIwFaW5kZXiUSwGMBXNoYXBllEsCSwOGlIwFZHR5cGWUjAV0b3JjaJSMB2Zsb2F0"
    "MzKUk5SMBGN1ZGGUiXWGlFKULg==",
    "tensor": "gASVbwAAAAAAAACMH21hbGxldHJhaW4uZWxhc3RpYy5wZWVyX3BpY2tsZXOUjAdyZWJ1aWx0lJ"
    "OUjAZ0ZW5zb3KUfZQojAdudW1iZXJzlEdAHAAAAAAAAIwFZHR5cGWUjAV0b3JjaJSMB2Zsb2F0"
    "MzKUk5R1hpRSlC4=",
}
"""What those with it send."""


def of_malletrain(data: bytes) -> set[tuple[str, str]]:
    return {name for name in names_in(data) if name[0].split(".")[0] == "malletrain"}


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("recorded", [FIRST, BY_NAME], ids=["first", "by name"])
def test_what_was_sent_by_earlier_versions_is_read_and_sent(kind, recorded):
    by_name = recorded is BY_NAME
    data = base64.b64decode(recorded[kind])
    assert pickle.loads(data) == OBJECTS[kind]
    assert type(pickle.loads(data)) is type(OBJECTS[kind])
    assert names_in(training.dumps(OBJECTS[kind], by_name)) == names_in(data)


def test_every_class_that_is_exchanged_has_a_recorded_pickle():
    assert set(peer_pickles.MAKERS) == set(FIRST) == set(BY_NAME)


def test_pickles_by_name_need_no_module_but_one():
    """A version that has the classes elsewhere reads them."""
    data = training.dumps([OBJECTS], by_name=True)
    assert of_malletrain(data) == {("malletrain.elastic.peer_pickles", "rebuilt")}
    assert pickle.loads(data) == [OBJECTS]
    assert [exchange.by_name for exchange in EXCHANGES[:2]] == [False, True]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_whole_state_is_sent_by_name_to_those_that_know_it(by_name):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = Holder({"model": model, "optimizer": optimizer}, torch.device("cpu"))
    packed, tensors = state.pack({"steps": 3}, by_name=by_name)
    modules = {module for module, _ in of_malletrain(packed)}
    assert (modules == {"malletrain.elastic.peer_pickles"}) == by_name
    skeleton, received = state.destinations(packed, in_place=False)
    for tensor, value in zip(received, tensors, strict=True):
        tensor.copy_(value)
    assert state.restore(skeleton, received) == {"steps": 3}


@pytest.mark.parametrize("version", [0, 1])
def test_all_ranks_of_a_sharded_model_are_sent_what_their_exchange_has(monkeypatch, version):
    sent = []

    def all_gather_object(values, value):
        sent.append(value)
        values[:] = [value] * len(values)

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    group = SimpleNamespace(several=True, place=SimpleNamespace(size=2), layout=EXCHANGES[version])
    assert sharing.all_gather(group, VERSION) == [VERSION, VERSION]
    if EXCHANGES[version].by_name:
        assert of_malletrain(sent[0]) == {("malletrain.elastic.peer_pickles", "rebuilt")}
    else:
        assert sent == [VERSION]
