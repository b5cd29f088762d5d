"""Jobs that ask for a kind of slots, or a class of nodes."""

from __future__ import annotations

import pytest

from malletrain.core.commands import Start, TakeLeases
from malletrain.core.events import GapsSeen, Tick
from tests.malletrain.core.controller_script import controller, job, nodes, play


def leased(commands):
    return {node for one in commands if isinstance(one, TakeLeases) for node in one.nodes}


def test_a_job_gets_the_slots_of_its_kind_and_leaves_the_others():
    c = controller()
    play(c, [(0.0, job("g", 1, 4, node_class="gpu")), (0.0, job("c", 1, 4, node_class="cpu"))])
    commands = play(
        c,
        [
            *nodes("h/cpu.0", node_class="cpu"),
            *nodes("h/gpu.0", "h/gpu.1", node_class="gpu"),
            (1.0, Tick()),
        ],
    )
    starts = {one.job: set(one.nodes) for one in commands if isinstance(one, Start)}
    assert starts == {"g": {"h/gpu.0", "h/gpu.1"}, "c": {"h/cpu.0"}}


def test_a_job_whose_kind_is_missing_holds_up_nobody():
    c = controller(max_running=1)
    play(c, [(0.0, job("g", 2, 4, node_class="gpu")), (0.0, job("c", 1, 4))])
    commands = play(
        c,
        [*nodes("a", "b", "c"), *nodes("h/gpu.0", node_class="gpu"), (1.0, Tick())],
    )
    assert commands == [Start("c", ("a", "b", "c"))]


def test_leases_are_taken_of_the_kind_that_a_job_can_use():
    c = controller()
    slots = {f"h/gpu.{number}": (900.0, "gpu") for number in range(3)}
    offers = {"a": (900.0, "default"), "b": (900.0, "default"), **slots}
    commands = play(c, [(0.0, job("g", 1, 2, node_class="gpu")), (1.0, GapsSeen(offers))])
    assert len(leased(commands)) == 2
    assert leased(commands) <= slots.keys()


@pytest.mark.parametrize("profile", [False, True])
def test_a_profile_is_measured_on_nodes_of_the_kind(profile):
    c = controller()
    play(c, [(0.0, job("g", 1, 2, node_class="gpu", profile=profile))])
    commands = play(
        c,
        [
            *nodes("a", "b", "c"),
            *nodes("h/gpu.0", "h/gpu.1", node_class="gpu"),
            (1.0, Tick()),
        ],
    )
    [start] = [one for one in commands if isinstance(one, Start)]
    assert set(start.nodes) <= {"h/gpu.0", "h/gpu.1"}
