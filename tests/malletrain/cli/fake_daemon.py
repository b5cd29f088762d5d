"""A daemon that knows nothing but the protocol: a ROUTER under CURVE that answers each operation
from a table.
"""

import os
import socket
import threading
import time

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from malletrain.identity.keys import KeyRing
from malletrain.identity.state_directory import (
    INFO,
    DaemonInfo,
    remove_daemon_info,
    write_daemon_info,
)
from malletrain.protocol import messages, wire
from malletrain.protocol.views import (
    CurvePointView,
    EventView,
    InterruptionView,
    JobDetail,
    JobView,
    LogView,
    NodeView,
    ProfileView,
    RateView,
    RescaleView,
    StatusView,
)


class Refuse(Exception):
    """An answer with ok=False."""

    def __init__(self, sentence, code="refused"):
        super().__init__(sentence)
        self.code = code


SILENCE = object()
"""Returned by an operation that must never be answered."""


class FakeDaemon:
    """``answers``: op → function of the params. ``seen``: (op, params) of every request, in
    order.
    """

    def __init__(self, state_dir, answers):
        self.state_dir = state_dir
        self.answers = answers
        self.seen = []
        state_dir.mkdir(mode=0o700, exist_ok=True)
        self.keys = KeyRing(state_dir)
        self._context = zmq.Context()
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback("*", self.keys)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = self.keys.server.secret.encode()
        self._socket.curve_publickey = self.keys.server.public.encode()
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.info = DaemonInfo(
            f"tcp://127.0.0.1:{port}",
            self.keys.server.public,
            os.getpid(),
            socket.gethostname(),
            "0.1.0",
            time.time(),
        )
        write_daemon_info(state_dir / INFO, self.info)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            peer, *frames = self._socket.recv_multipart()
            request = wire.decode(frames)
            self.seen.append((request.op, request.parameters()))
            try:
                data = self.answers[request.op](request.parameters())
                if data is SILENCE:
                    continue
                reply = messages.Reply(request.id, True, msgspec.to_builtins(data))
            except Refuse as error:
                reply = messages.Reply(request.id, False, None, str(error), error.code)
            self._socket.send_multipart([peer, *wire.encode(reply)])

    def stop(self, forget=True):
        """End it; ``forget=False`` leaves daemon.json behind as kill -9 does."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._socket.close(linger=0)
            self._auth.stop()
            self._context.term()
            if forget:
                remove_daemon_info(self.state_dir / INFO)


def job_view(**changes):
    """A running job."""
    base = JobView(
        id="j1",
        name="train",
        owner="ada",
        state="running",
        reason="",
        nodes=("n1", "n2"),
        min_nodes=1,
        max_nodes=4,
        rate=123.4,
        samples=5000.0,
        rescales=3,
        tries=0,
        submitted=1000.0,
        started=1001.0,
        ended=None,
        metrics={"accuracy": 0.98},
    )
    return msgspec.structs.replace(base, **changes)


def status_view(**changes):
    base = StatusView(
        version="0.1.0",
        pid=42,
        boot="b",
        started=1000.0,
        now=1100.0,
        scheduler="local",
        nodes_idle=1,
        nodes_leased=3,
        nodes_training=2,
        jobs={"running": 1},
        samples=5000.0,
        rate=123.4,
        rescales=3,
        preemptions=2,
        last_poll=1099.0,
        poll_error="",
    )
    return msgspec.structs.replace(base, **changes)


def node_view(node="n1", state="job", job="j1", **changes):
    base = NodeView(node=node, state=state, lease="l1", job=job, since=1000.0, horizon_s=120.0)
    return msgspec.structs.replace(base, **changes)


def event_view(seq, kind="rescaled", **changes):
    base = EventView(
        seq=seq,
        time=1000.0 + seq,
        kind=kind,
        job="j1",
        node="n1",
        lease="l1",
        sentence=f"Event number {seq}.",
    )
    return msgspec.structs.replace(base, **changes)


def detail(**changes):
    base = JobDetail(
        job=job_view(),
        spec={
            "script": "/home/ada/train.py",
            "args": ["--lr", "0.1"],
            "workdir": "/home/ada",
            "python": "/usr/bin/python3",
        },
        rates=(RateView(nodes=2, rate=123.4, spread=1.5, samples=4000.0, seconds=32.0),),
        rescales=(
            RescaleView(
                generation=2,
                kind="up",
                from_nodes=1,
                to_nodes=2,
                began=1010.0,
                cost_s=3.25,
                phases={"rendezvous": 0.5},
            ),
            RescaleView(
                generation=3, kind="down", from_nodes=2, to_nodes=1, began=1050.0, cost_s=None
            ),
        ),
        notices=("The snapshot could not be written: no space left.",),
        failure="",
        profile=ProfileView(
            "measured",
            "Every size has been visited.",
            "default",
            2.0,
            1.0,
            3.0,
            (CurvePointView(1, 70.0, 1.0, True, 69.8), CurvePointView(2, 123.4, 2.0, False, 123.0)),
            (InterruptionView(1_700_000_000.0, "j9", 4, 2),),
        ),
    )
    return msgspec.structs.replace(base, **changes)


def log_view(text="hello\n", cursor="1", more=False, ended=True, streams=("rank0", "rank1")):
    return LogView(text=text, cursor=cursor, more=more, streams=streams, ended=ended)


def default_answers():
    """A daemon with one running job."""
    return {
        "status": lambda p: status_view(),
        "jobs": lambda p: [job_view()],
        "job": lambda p: detail(),
        "nodes": lambda p: [
            node_view(),
            node_view("n2", "leaving", gone_in_s=4.0),
            node_view("n3", "idle", "", lease=""),
        ],
        "events": lambda p: [event_view(k) for k in range(1, 4) if k > p["since"]],
        "logs": lambda p: log_view(),
        "submit": lambda p: {"job": job_view(name=p["spec"]["name"], state="queued", nodes=())},
        "cancel": lambda p: {
            "results": [{"job": j, "ok": True, "sentence": f"Cancelled {j}."} for j in p["jobs"]]
        },
    }
