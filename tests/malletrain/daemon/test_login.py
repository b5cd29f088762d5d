"""What unauthenticated clients are answered: whatever they send, a reply."""

import asyncio
import threading
from itertools import islice

import pytest

from malletrain.daemon.server.message_router import MAX_WAITING, UNAUTHENTICATED, Login
from malletrain.identity.keys import KeyRing, new_pair
from malletrain.identity.users import UsersError, login_payload
from malletrain.protocol import wire
from tests.waiting import PATIENCE_S

KEY = new_pair().public


class Believes:
    """In place of MUNGE. Credentials are user names; ``go``: answers are given when this is set."""

    def __init__(self, server):
        self.server = server
        self.go = threading.Event()
        self.go.set()
        self.together = self.most = 0

    def user(self, credential, payload):
        self.together += 1
        self.most = max(self.most, self.together)
        try:
            assert self.go.wait(PATIENCE_S)
            assert payload.startswith(login_payload(self.server, ""))
            if credential == "odd":
                raise OSError(5, "of a kind that nobody thought of")
            if not credential:
                raise UsersError("That is nothing.")
            return credential
        finally:
            self.together -= 1


@pytest.fixture
def logins(tmp_path):
    keys = KeyRing(tmp_path / "state", unauthenticated=True)
    munge = Believes(keys.server.public)
    logins = Login(keys, munge)
    logins.keys, logins.munge = keys, munge
    return logins


def login(logins, credential, key=KEY):
    return logins.answer(key, wire.request("r1", "login", {"credential": credential}))


def test_who_is_believed_becomes_a_user(logins):
    reply = asyncio.run(login(logins, "ann"))
    assert (reply.ok, reply.data) == (True, {"user": "ann"})
    assert logins.keys.identity(KEY) == "client:ann"


def test_unauthenticated_clients_are_told_what_to_do(logins):
    reply = asyncio.run(logins.answer(KEY, wire.request("r1", "submit", {})))
    assert (reply.ok, reply.code, reply.data) == (False, UNAUTHENTICATED, {"munge": True})


def test_unauthenticated_clients_learn_of_the_list_only_whether_their_own_line_is_ignored(tmp_path):
    keys = KeyRing(tmp_path / "state", unauthenticated=True)
    logins, request = Login(keys, None, KEY.__eq__), wire.request("r1", "submit", {})
    mine = asyncio.run(logins.answer(KEY, request))
    assert mine.data == {"munge": False, "ignored_line": True}
    another = asyncio.run(logins.answer(new_pair().public, request))
    assert another.data == {"munge": False}


@pytest.mark.parametrize(
    ("params", "code", "words"),
    [
        ({}, None, "That is nothing"),
        ({"credential": ""}, None, "That is nothing"),
        ({"credential": "odd"}, "internal", "could not check your credential"),
    ],
)
def test_whatever_goes_wrong_is_a_reply(logins, params, code, words):
    reply = asyncio.run(logins.answer(KEY, wire.request("r1", "login", params)))
    assert not reply.ok
    assert (reply.code or None) == code
    assert words in reply.error
    assert logins.keys.identity(KEY) == f"unauthenticated:{KEY}"
    assert asyncio.run(login(logins, "ann")).ok, "others come in still"


def test_one_credential_is_checked_at_a_time_and_few_wait(logins):
    async def crowd():
        logins.munge.go.clear()
        requests = [
            asyncio.ensure_future(login(logins, f"u{i}", new_pair().public)) for i in range(100)
        ]
        refused = [
            await answer for answer in islice(asyncio.as_completed(requests), 100 - MAX_WAITING - 1)
        ]
        logins.munge.go.set()
        return refused, await asyncio.gather(*requests)

    refused, replies = asyncio.run(crowd())
    assert {reply.error for reply in refused} == {
        "Too many users are just logging in; try again in a moment."
    }
    assert sum(reply.ok for reply in replies) == MAX_WAITING + 1
    assert logins.munge.most == 1
    assert asyncio.run(login(logins, "ann")).ok
