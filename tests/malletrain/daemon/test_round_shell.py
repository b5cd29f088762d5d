"""What the controller hears of a round."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from malletrain.core.events import RoundInterrupted, WorkersFailed
from malletrain.daemon.engine.round_shell import RoundShell
from malletrain.protocol.failures import describe
from malletrain.protocol.messages import Failure
from malletrain.rounds.interface import Broke

RUN = SimpleNamespace(
    row=SimpleNamespace(id="j1"),
    spec=SimpleNamespace(sweep="", script="train.py", nproc_per_node=1),
    rounds=SimpleNamespace(members=("n1",), generation=1),
    launcher_tail="",
)


def shell_of(fed, *, layout_failed=False, failing=None, repository=None):
    """A shell whose events for the controller are in ``fed``."""
    layouts = MagicMock()
    layouts.failed.return_value, layouts.of_round.return_value = layout_failed, None
    others = (MagicMock(), MagicMock(), failing or MagicMock())
    return RoundShell(
        *(MagicMock() for _ in range(3)),
        repository or MagicMock(),
        MagicMock(),
        fed.append,
        *others,
        layouts,
        members_changed=MagicMock(),
    )


def test_a_failure_of_a_layout_costs_no_try():
    fed = []
    shell_of(fed, layout_failed=True).act(RUN, [Broke((), "They failed.")])
    assert fed == [RoundInterrupted("j1")]


def test_workers_that_end_of_a_hang_are_planned_anew_and_cost_no_try():
    fed = []
    shell = shell_of(fed)
    shell.act(RUN, [Broke((), "They hung.", expected=True)])
    assert fed == [RoundInterrupted("j1")]
    shell.act(RUN, [Broke((), "They failed.")])
    assert [type(event) for event in fed[1:]] == [WorkersFailed]


@pytest.mark.parametrize("nodes", [(), ("n1",), ("n1", "n2")])
def test_a_failure_counts_for_its_node_if_it_is_of_one(nodes):
    failing = MagicMock()
    shell_of([], failing=failing).act(RUN, [Broke((), "They failed.", nodes=nodes)])
    counted_for = [call.args[2] for call in failing.failed.call_args_list]
    assert counted_for == (["n1"] if nodes == ("n1",) else [])


def test_the_stored_failure_begins_with_its_sentence():
    repository, killed = MagicMock(), Failure(1, -9, 1.0, "epoch 3\nepoch 4")
    sentence = describe([killed])
    shell_of([], repository=repository).act(RUN, [Broke((killed,), sentence)])
    stored = repository.save.call_args.kwargs["failure"]
    assert stored == f"{sentence}\n[rank 1]\nepoch 3\nepoch 4"
    assert stored.startswith("Rank 1 was killed by signal 9; often the node ran out of memory.")
    silent = Failure(1, -9, 1.0)
    shell_of([], repository=repository).act(RUN, [Broke((silent,), describe([silent]))])
    assert repository.save.call_args.kwargs["failure"] == describe([silent])
