"""Mutated messages of agents, clients and those that have not logged in: each costs its
sender an error at most. The long form is ``python -m benchmarks.fuzz_messages``.
"""

from __future__ import annotations

import random

import zmq

from malletrain.identity.keys import new_pair
from malletrain.protocol import messages
from tests import mutations
from tests.malletrain.daemon.forged import USERS, Agent, Imagined, RunningDaemon, until


def socket_of(running, context, pair):
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_secretkey, socket.curve_publickey = pair.secret.encode(), pair.public.encode()
    socket.curve_serverkey = running.daemon.keys.server.public.encode()
    socket.connect(running.daemon.endpoint)
    return socket


def test_no_mutated_message_meets_a_defect(tmp_path, any_seed):
    seed = any_seed(7)
    rng = random.Random(seed)
    machine = Imagined("n0", "n1")
    running = RunningDaemon(tmp_path, machine)
    job = running.submit("ann", max_nodes=2)
    lease = until(lambda: machine.of("ann"), "ann has a lease")[0]
    agent = Agent(running, lease)
    agent.hello()
    agent.work(job)
    names = (job, lease, agent.node, "running", "failed", "rank0", "j2")
    # One that says that its node leaves soon has nothing more to say.
    stay = [t for t in mutations.of_agents() if t not in (messages.Leaving, messages.Sick)]
    reports = mutations.Mutator(rng, stay, names, without=("gone_in_s", "sick"))
    requests = mutations.Mutator(rng, (messages.Request, messages.Heartbeat), names)
    context = zmq.Context()
    client = socket_of(running, context, USERS["ann"])
    stranger = socket_of(running, context, new_pair())
    for number in range(900):
        agent.send_raw(reports.frames())
        if number % 3 == 0:
            client.send_multipart(mutations.request(requests, job))
            stranger.send_multipart(requests.frames())
    for _ in range(3):
        agent.hello(assignment=messages.Assignment(job, "running", 1))
        agent.say(messages.Heartbeat("b"))
    assert running.alive()
    agent.hear(messages.Alive)
    last = running.daemon.handler_failures.last
    assert last is None, (seed, last.sentence)
    context.destroy(linger=0)
    agent.close()
    running.stop()
