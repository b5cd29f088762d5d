"""Faults in a world: kind, time and number are drawn from the seed, among the allowed kinds. After
a while all faults end, and everything works again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from malletrain.protocol.messages import JobSpec
    from tests.dst.users import User
    from tests.dst.world import World

LASTS_S = 4.0, 11.0
"""Shortest and longest period with faults, seconds."""


def _node(world: World) -> str:
    return world.rng.choice(sorted(world.machine.nodes))


def notice(world: World) -> None:
    """The main scheduler takes a node back, with notice."""
    world.machine.want(_node(world), world.rng.uniform(1.0, 10.0), notice=True)


def no_notice(world: World) -> None:
    """The main scheduler takes a node back without notice."""
    world.machine.want(_node(world), world.rng.uniform(1.0, 10.0), notice=False)


def power(world: World) -> None:
    """A node's power fails."""
    world.machine.power_fails(_node(world), world.rng.uniform(2.0, 10.0))


def reset(world: World) -> None:
    """A connection breaks."""
    connections = sorted(world.network.connections)
    if connections:
        peer = world.rng.choice(connections)
        connection = world.network.connections[peer]
        world.say("fault", f"the connection of {connection.caller.place} breaks")
        connection.reset()


def cut(world: World) -> None:
    """No packet passes between a host and the head for a while."""
    place = world.rng.choice([*sorted(world.machine.nodes), "login"])
    if not world.network.cut(place):
        for_s = world.rng.choice((0.5, 2.0, 4.0, 8.0, 15.0)) * world.rng.uniform(0.5, 1.2)
        world.say("fault", f"{place} is cut off for {for_s:.1f} s")
        world.network.cut_off(place)
        world.network.later(for_s, world.mend, place)


def slow(world: World) -> None:
    """Messages of a host take long."""
    place = _node(world)
    world.say("fault", f"the messages of {place} take long")
    world.network.slow[place] = world.rng.choice((0.1, 0.5, 2.0))
    world.invariants.touch(place)
    world.network.later(world.rng.uniform(1.0, 8.0), world.network.slow.pop, place, None)


def daemon_killed(world: World) -> None:
    """The daemon is killed, and started again after a while."""
    if world.head.alive:
        world.say("fault", "the daemon is killed")
        world.head.kill()


def daemon_killed_telling(world: World) -> None:
    """The daemon is killed when it has saved something, before it has told all of it."""
    world.head.sends_left = world.rng.randrange(4)


def daemon_killed_hearing(world: World) -> None:
    """The daemon is killed when it has taken in a message, before what follows from it is saved."""
    world.head.turns_left = world.rng.randrange(4)


def agent_killed(world: World) -> None:
    """An agent is killed."""
    agents = [each.agent for each in world.machine.leases.values() if each.agent]
    living = [agent for agent in agents if agent.process.alive]
    if living:
        agent = world.rng.choice(living)
        world.say("fault", f"the agent of {agent.lease.request.id} is killed")
        agent.kill()


def launcher_killed(world: World) -> None:
    """A launcher is killed, as by the kernel that lacks memory."""
    launchers = [each for node in world.machine.nodes.values() for each in node.launchers]
    if launchers:
        launcher = world.rng.choice(launchers)
        world.say("fault", f"the launcher of {launcher.job} on {launcher.node.name} is killed")
        launcher.truth.crashes += 1
        launcher.kill()


def script_fails(world: World) -> None:
    """A worker fails by itself."""
    launchers = [each for node in world.machine.nodes.values() for each in node.launchers]
    if launchers:
        launcher = world.rng.choice(launchers)
        world.say("fault", f"the script of {launcher.job} fails on {launcher.node.name}")
        launcher.crash()


def _trouble(world: World, trouble: str) -> None:
    world.say("fault", f"the main scheduler is {trouble}")
    world.machine.trouble = trouble
    world.network.later(world.rng.uniform(1.0, 10.0), setattr, world.machine, "trouble", "")


def scheduler_down(world: World) -> None:
    """The main scheduler does not answer for a while."""
    _trouble(world, "down")


def scheduler_deaf(world: World) -> None:
    """The main scheduler carries out requests, and its answers are lost."""
    _trouble(world, "deaf")


def scheduler_refuses(world: World) -> None:
    """The main scheduler refuses every job."""
    _trouble(world, "refuses")


def scheduler_slow(world: World) -> None:
    """The answers of the main scheduler take seconds."""
    usual = world.loop.thread_s
    if usual is world.usual_thread_s:
        world.say("fault", "the main scheduler is slow")
        mean = world.rng.choice((0.5, 3.0))
        world.loop.thread_s = lambda: world.rng.expovariate(1 / mean)
        world.network.later(
            world.rng.uniform(2.0, 10.0), setattr, world.loop, "thread_s", world.usual_thread_s
        )


def cancel(world: World) -> None:
    """A user cancels one of their jobs."""
    submitted = [(key, user) for user in world.users for key in sorted(user.jobs)]
    if submitted:
        key, user = world.rng.choice(submitted)
        world.say("user", f"cancels {user.jobs[key]}")
        user.cancel(key)


def scale(world: World) -> None:
    """A user gives one of their jobs other limits, and thinks better of it now and then."""
    submitted = [(key, user) for user in world.users for key in sorted(user.jobs)]
    if not submitted:
        return
    key, user = world.rng.choice(submitted)
    spec = next(spec for spec in world.specs if spec.key == key)
    nodes = len(world.machine.nodes)
    least = world.rng.randint(1, nodes)
    world.trainings.least[spec.name] = min(world.trainings.least[spec.name], least)
    world.say("user", f"wants {least} nodes for {user.jobs[key]}")
    user.scale(key, least, world.rng.randint(least, nodes))
    if world.rng.random() < 0.7:
        world.network.later(world.rng.uniform(0.1, 2.0), _scale_back, world, user, spec)


def _scale_back(world: World, user: User, spec: JobSpec) -> None:
    world.happened["scale"] += 1
    user.scale(spec.key, spec.min_nodes, spec.max_nodes)


def meddle(world: World) -> None:
    """A user tries to cancel somebody else's job."""
    others = sorted(job for job in world.users[0].jobs.values())
    if len(world.users) > 1 and others:
        world.users[1].meddle(world.rng.choice(others))


def clock_set(world: World) -> None:
    """The clocks of all hosts are set."""
    by_s = world.apart.choice((-1, 1)) * world.apart.choice(
        (90.0, 3600.0, 5 * 3600.0, 40 * 86400.0)
    )
    world.say("fault", f"the clocks are set by {by_s:g} s")
    world.loop.set_by_s += by_s


KINDS: dict[str, Callable[[World], None]] = {
    kind.__name__: kind
    for kind in (
        notice,
        no_notice,
        power,
        reset,
        cut,
        slow,
        daemon_killed,
        daemon_killed_telling,
        daemon_killed_hearing,
        agent_killed,
        launcher_killed,
        script_fails,
        scheduler_down,
        scheduler_deaf,
        scheduler_refuses,
        scheduler_slow,
        cancel,
        scale,
        meddle,
        clock_set,
    )
}
APART: dict[str, float] = {clock_set.__name__: 0.1}
"""Kinds of faults with a probability of their own. They are drawn from another generator, so that
seeds found before a kind was added still give the same faults.
"""


def plan(world: World) -> float:
    """Draw the faults of this world: some kinds, each some times. Return the time until they are
    over, seconds.
    """
    rng = world.rng
    until_s = rng.uniform(*LASTS_S)
    allowed = sorted(set(KINDS if world.kinds is None else world.kinds) - APART.keys())
    chance = 0.35 if world.kinds is None else 0.9
    kinds = [kind for kind in allowed if rng.random() < chance]
    for kind in kinds:
        for _ in range(rng.choice((1, 1, 2, 4))):
            world.network.later(rng.uniform(0.0, until_s), _happens, world, kind)
    for kind, chance in APART.items():
        if world.apart.random() < (chance if world.kinds is None else kind in world.kinds):
            for _ in range(world.apart.choice((1, 2))):
                at = world.apart.uniform(0.0, until_s)
                world.network.later(at, _happens, world, kind)
    return until_s


def _happens(world: World, kind: str) -> None:
    world.happened[kind] = world.happened.get(kind, 0) + 1
    KINDS[kind](world)
