"""What a job's owner asked for besides nodes is kept, by a real daemon and over its restart."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from malletrain.client import ClientError
from malletrain.daemon.api.notices import deliver
from malletrain.daemon.engine.unfinished_jobs import NODE_EVENTS, running_s
from malletrain.protocol import messages
from malletrain.store.records import EventRow
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon
from tests.waiting import until

pytestmark = pytest.mark.slow

STARTED, SUSPENDED = NODE_EVENTS


def events(*history):
    return [EventRow(time, kind) for time, kind in history]


@pytest.mark.parametrize(
    ("history", "seconds"),
    [
        ((), 0.0),
        (((10.0, STARTED),), 90.0),
        (((10.0, STARTED), (30.0, SUSPENDED)), 20.0),
        (((10.0, STARTED), (30.0, SUSPENDED), (80.0, STARTED)), 40.0),
        (((10.0, SUSPENDED), (60.0, STARTED), (70.0, STARTED), (80.0, SUSPENDED)), 20.0),
    ],
)
def test_time_with_nodes_is_what_counts(history, seconds):
    assert running_s(events(*history), now=100.0) == seconds


class Machine:
    """A daemon of several users on one node, and its agent."""

    def __init__(self, folder, **options):
        self.folder, self.machine, self.options = folder, Imagined("n1"), options
        self.daemon = RunningDaemon(folder, self.machine, **options)
        self.agents = []

    def agent(self, owner=None):
        """The agent of the next lease."""
        with_agent = {agent.lease for agent in self.agents}

        def new():
            return [lease for lease in self.machine.leases if lease not in with_agent]

        until(new, "a node is leased")
        self.agents.append(Agent(self.daemon, new()[0]))
        self.agents[-1].hello()
        return self.agents[-1]

    def restart(self):
        self.daemon.stop()
        self.daemon = RunningDaemon(self.folder, self.machine, **self.options)

    def until_state(self, job, state):
        until(lambda: self.daemon.job(job).state == state, f"{job} is {state}")
        return self.daemon.job(job)

    def close(self):
        for agent in self.agents:
            agent.close()
        self.daemon.stop()


@pytest.fixture
def site(tmp_path):
    site = Machine(tmp_path)
    yield site
    site.close()


def waiting(daemon):
    """The jobs that begin after others."""
    with daemon.client() as client:
        return {job.id for job in client.jobs() if job.reason.startswith("begins when")}


def test_a_job_begins_after_another_completed_and_not_before(site):
    first = site.daemon.submit("ann", name="first")
    second = site.daemon.submit("ann", name="second", after=("first",))
    third = site.daemon.submit("ann", name="third", after=(second,))
    assert site.daemon.job(second).reason == f"begins when {first} (first) completed"
    assert waiting(site.daemon) == {second, third}
    site.restart()
    assert site.daemon.job(second).reason == f"begins when {first} (first) completed"
    assert waiting(site.daemon) == {second, third}
    agent = site.agent()
    agent.work(first)
    agent.say(messages.Phase(messages.Assignment(first, "succeeded", 1)))
    agent.hear(messages.Release)
    agent.say(messages.Released(first))
    assert agent.hear(messages.Assign).job == second
    assert site.daemon.job(second).reason == ""
    assert waiting(site.daemon) == {third}
    with site.daemon.client("ann") as client:
        assert client.cancel([second])[0]["ok"]
    assert site.until_state(third, "cancelled").reason == (
        f"job {second} (second), after which it was to begin, was cancelled"
    )
    with pytest.raises(ClientError, match=f"Job {second} .second. was cancelled, so a job after"):
        site.daemon.submit("ann", name="late", after=("second",))
    with pytest.raises(ClientError, match="There is no job 'nobody'"):
        site.daemon.submit("ann", name="late", after=("nobody",))


def test_a_job_that_waits_for_another_can_be_cancelled(site):
    first = site.daemon.submit("ann", name="first")
    second = site.daemon.submit("ann", name="second", after=(first,))
    with site.daemon.client("ann") as client:
        assert client.cancel([second]) == [
            {"job": second, "ok": True, "sentence": f"Job {second} (second) is cancelled."}
        ]
    assert site.daemon.job(second).reason == "cancelled by its owner"
    assert site.daemon.job(first).state != "cancelled"


def test_a_job_over_its_limit_of_time_is_cancelled_and_no_other(site):
    free = site.daemon.submit("ann", name="free", time_limit_s=1e6)
    agent = site.agent()
    agent.hear(messages.Assign)
    site.restart()
    agent.close()
    site.agents.clear()
    site.agent()
    limited = site.daemon.submit("ann", name="limited", time_limit_s=0.01)
    with site.daemon.client("ann") as client:
        assert client.cancel([free])[0]["ok"]
    assert site.until_state(limited, "cancelled").reason == "its time limit of 0.0 s is over"
    assert site.daemon.job(free).reason == "cancelled by its owner"


@contextlib.contextmanager
def hook():
    """The address of a web hook, and the messages that were posted to it."""
    posts = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", posts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def submitted_in_time(daemon, **fields):
    """A job that misses its deadline soon. On a machine that stands still the deadline may be over
    before the job comes; such a job is refused.
    """

    def submitted():
        try:
            return daemon.submit("", deadline=time.time() + 2.0, **fields)
        except ClientError as error:
            if "passed already" not in str(error):
                raise

    return until(submitted, "it is submitted")


def test_owners_are_told_once_each_of_what_they_asked_for(tmp_path):
    box = tmp_path / "mail"
    sendmail = tmp_path / "sendmail"
    sendmail.write_text(f'#!/bin/sh\necho "$@" >> {box}.args\ncat >> {box}\n')
    sendmail.chmod(0o755)
    site = Machine(tmp_path, several=False, allocation=f'[notify]\nsendmail = "{sendmail}"')
    try:
        with hook() as (address, posts):
            job = submitted_in_time(
                site.daemon,
                name="told",
                script=__file__,
                work=1e12,
                notify=(
                    messages.Notification(address, "webhook", ("start", "end", "at-risk")),
                    messages.Notification("ann@example.org", "mail", ("end", "failure")),
                    messages.Notification(
                        f"echo $MALLETRAIN_JOB_STATE >> {tmp_path}/ran; exit 3", "command", ("end",)
                    ),
                ),
            )
            agent = site.agent()
            agent.work(job)
            until(lambda: "start" in [t["event"] for t in posts], "its start is told")
            until(lambda: any("was not done as" in t["text"] for t in posts), "it missed its time")
            with site.daemon.client() as client:
                client.cancel([job])
            until(
                lambda: (
                    "end" in [t["event"] for t in posts]
                    and box.exists()
                    and (tmp_path / "ran").exists()
                ),
                "all",
            )
            until(
                lambda: any("could not be notified" in e.sentence for e in site.daemon.events()),
                "the owner hears that the command failed",
            )
            seen = site.daemon.daemon.components.state.store.last_notified()
            site.restart()
            until(
                lambda: site.daemon.daemon.components.state.store.last_notified() > seen,
                "the next one looked",
            )
            start_and_end = [(t["event"], t["job"]) for t in posts if t["event"] != "at-risk"]
            assert start_and_end == [("start", job), ("end", job)]
            assert [t["state"] for t in posts if t["event"] == "end"] == ["cancelled"]
            texts = [t["text"] for t in posts if t["event"] == "at-risk"]
            assert len(set(texts)) == len(texts)
    finally:
        site.close()
    mail = box.read_text()
    assert (tmp_path / "mail.args").read_text() == "-t -i\n"
    assert "To: ann@example.org\n" in mail
    assert f"Subject: malletrain: Job {job} (told) of" in mail
    assert (tmp_path / "ran").read_text() == "cancelled\n"


def test_a_web_hook_whose_server_is_none_of_the_web_is_told():
    """Such as the port of an SSH server. The owner was told nothing."""

    class Ssh(socketserver.BaseRequestHandler):
        def handle(self):
            request = b""
            while not request.endswith(b'{"text": "x"}'):  # else its sender gets a broken pipe
                request += self.request.recv(65536)
            self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Ssh) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        hook = messages.Notification(to=address, kind="webhook", on=("end",))
        with pytest.raises(OSError, match=r"its answer is not HTTP \(BadStatusLine\)"):
            deliver(hook, {"text": "x"}, "")
    hook = messages.Notification(to="http://127.0.0.1/a b", kind="webhook", on=("end",))
    with pytest.raises(ValueError, match="can't contain control characters"):
        deliver(hook, {"text": "x"}, "")


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (messages.Notification("rm -rf /", "command", ("end",)), "run as the daemon's own user"),
        (messages.Notification("http://10.0.0.1/", "webhook", ("end",)), "calls no web hooks"),
        (messages.Notification("a@b", "mail", ("end",)), "has no program /usr/sbin/nosuch"),
        (messages.Notification("a@b", "pigeon", ("end",)), "'pigeon' of end is not known"),
        (messages.Notification("a@b\nBcc: c", "mail", ("end",)), "a control character"),
    ],
)
def test_other_users_have_nothing_run_on_the_daemons_host(tmp_path_factory, one, why):
    from malletrain.config.sections import NotifySection
    from malletrain.daemon.api.notices import refused

    class SomebodyElse:
        def of(self, user):
            return user

    spec = messages.JobSpec("a", "", "/x", "/", "python", notify=(one,))
    settings = NotifySection(sendmail="/usr/sbin/nosuch")
    assert why in refused(spec, "bob", SomebodyElse(), settings)
