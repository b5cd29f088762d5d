"""What an agent hears when it says Hello."""

import pytest

from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Imagined
from tests.malletrain.daemon.test_other_users_agents import (  # noqa: F401  # fixtures
    agent,
    lease_of,
    start,
)

pytestmark = pytest.mark.slow

BEAT = messages.Heartbeat("", 1, 0, 0)


def welcomed(daemon, agent):  # noqa: F811
    """An agent whose daemon has a job for it."""
    job = daemon.submit("ann")
    [lease] = lease_of(daemon.machine, "ann")
    new_agent = agent(daemon, lease)
    new_agent.hello()
    new_agent.hear(messages.Welcome)
    new_agent.work(job)
    new_agent.assignment = messages.Assignment(job, "running", 1)
    return lease, new_agent


def test_one_whose_first_words_over_a_new_connection_were_lost_is_welcomed(start, agent):  # noqa: F811
    """Of Hello, heartbeat and Hello once more the first was lost with the connection before."""
    daemon = start(Imagined("n0"))
    lease, _ = welcomed(daemon, agent)
    back = agent(daemon, lease)
    back.say(BEAT)
    back.hear(messages.WhoAreYou)
    back.hello(again=True)
    back.hear(messages.Welcome)


def test_one_whose_older_connection_was_heard_last_is_asked_and_told_again(start, agent):  # noqa: F811
    """Messages of two connections come in any order: the daemon answered over the older one."""
    daemon = start(Imagined("n0"))
    lease, older = welcomed(daemon, agent)
    newer = agent(daemon, lease)
    newer.hello(assignment=older.assignment)
    newer.hear(messages.Welcome)
    older.say(BEAT)
    older.hear(messages.WhoAreYou)
    newer.say(BEAT)
    newer.hear(messages.WhoAreYou)
    newer.hello(assignment=older.assignment)
    newer.hear(messages.Welcome)
    newer.say(BEAT)
    newer.hear(messages.Alive)


def test_one_that_waits_for_its_answer_is_welcomed_once(start, agent):  # noqa: F811
    daemon = start(Imagined("n0"))
    _, new_agent = welcomed(daemon, agent)
    new_agent.hello(again=True)
    new_agent.say(BEAT)
    assert isinstance(new_agent.hear((messages.Welcome, messages.Alive)), messages.Alive)
