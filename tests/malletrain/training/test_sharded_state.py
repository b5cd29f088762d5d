"""States of optimizers by the names of their parameters."""

import re

import pytest
import torch

from malletrain.training.sharded_state import load_by_name, names_of, state_by_name


def named_optimizer(**modules):
    parameters = [p for module in modules.values() for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=0.1), names_of(modules)


def test_a_state_without_any_of_its_parameters_is_refused_with_names_of_both():
    saved = state_by_name(*named_optimizer(encoder=torch.nn.Linear(1, 1)))
    optimizer, names = named_optimizer(head=torch.nn.Linear(1, 1))
    sentence = "the snapshot has encoder.weight, …; the optimizer has head.weight, …"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_by_name(optimizer, saved, names)
