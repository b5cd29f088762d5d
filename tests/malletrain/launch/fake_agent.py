"""The agent's end of the launcher channel, played by the test."""

import uuid

import zmq

from malletrain.protocol import wire
from tests.waiting import PATIENCE_S


class FakeAgent:
    """Receives the launcher's messages and answers them. ``heard``: every phase it received, as
    (phase, generation).
    """

    def __init__(self, directory):
        self.endpoint = f"ipc://{directory}/a-{uuid.uuid4().hex[:8]}"
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)
        self.identity = None

    def hear(self):
        """The next message of the launcher."""
        assert self.socket.poll(int(PATIENCE_S * 1000)), "the launcher says nothing"
        self.identity, *frames = self.socket.recv_multipart()
        return wire.decode(frames)

    def hear_phase(self):
        assignment = self.hear().assignment
        return assignment.phase, assignment.generation

    def say(self, message):
        self.socket.send_multipart([self.identity, *wire.encode(message)])
