import os
import stat

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from malletrain.identity.keys import (
    LOGIN_LASTS_S,
    KeyFileError,
    KeyRing,
    new_pair,
    own_key,
    read_key,
    user_name,
    write_key,
)
from tests.waiting import PATIENCE_S


def test_keys_are_made_once_and_kept(tmp_path):
    first, second = KeyRing(tmp_path), KeyRing(tmp_path)
    assert (first.server, first.client) == (second.server, second.client)
    assert first.server != first.client
    assert len(first.server.public) == 40


def test_files_are_private_and_secrets_are_not_printed(tmp_path):
    ring = KeyRing(tmp_path)
    pair = ring.make_lease_key("l1")
    assert stat.S_IMODE(ring.directory.stat().st_mode) == 0o700
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in ring.directory.iterdir()} == {
        "server.key": 0o600,
        "client.key": 0o600,
    }
    assert pair.secret not in repr(pair)


def test_whom_a_key_stands_for(tmp_path):
    ring = KeyRing(tmp_path)
    lease = ring.make_lease_key("l1")
    assert ring.identity(ring.client.public) == f"client:{user_name()}"
    assert ring.identity(lease.public) == "lease:l1"
    assert ring.identity(lease.public.encode()) == "lease:l1"
    for unknown in (new_pair().public, ring.server.public, "", b"\xff" * 40):
        assert ring.identity(unknown) is None
    assert KeyRing(tmp_path, user="ada").identity(ring.client.public) == "client:ada"


def test_a_key_is_good_for_as_long_as_its_lease(tmp_path):
    ring = KeyRing(tmp_path)
    pair = ring.make_lease_key("l1")
    ring.drop_lease("l1")
    ring.drop_lease("l1")
    assert ring.identity(pair.public) is None


def test_after_a_restart_the_leases_of_the_store_are_accepted(tmp_path):
    pair = KeyRing(tmp_path).make_lease_key("l1")
    ring = KeyRing(tmp_path)
    assert ring.identity(pair.public) is None
    ring.accept_lease("l1", pair.public)
    assert ring.identity(pair.public) == "lease:l1"


def test_users_and_unauthenticated_clients(tmp_path):
    ada, eve, bob = new_pair().public, new_pair().public, new_pair().public
    ring = KeyRing(tmp_path, lookup={ada: "ada"}.get, unauthenticated=True)
    lease = ring.make_lease_key("l1")
    assert ring.identity(ada) == "client:ada"
    assert ring.identity(eve) == f"unauthenticated:{eve}"
    assert ring.identity("no key") is None
    ring.accept_client(bob, "bob")
    assert ring.identity(bob) == "client:bob"
    ring.accept_client(lease.public, "bob")
    assert ring.identity(lease.public) == "lease:l1", "an agent does not become a user"
    ring.drop_lease("l1")
    assert ring.identity(lease.public) == f"unauthenticated:{lease.public}"


def test_a_login_has_to_be_repeated(tmp_path):
    clock = [0.0]
    ring = KeyRing(tmp_path, unauthenticated=True, now=lambda: clock[0])
    bob = new_pair().public
    ring.accept_client(bob, "bob")
    clock[0] = LOGIN_LASTS_S - 1.0
    assert ring.identity(bob) == "client:bob"
    clock[0] = LOGIN_LASTS_S
    assert ring.identity(bob) == f"unauthenticated:{bob}"
    ring.accept_client(bob, "robert")
    assert ring.identity(bob) == "client:robert"


def test_a_user_has_one_key_for_the_daemons_of_sites(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    pair = own_key()
    assert own_key() == pair
    file = tmp_path / "malletrain" / "client.key"
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (
        0o600,
        0o700,
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700 | 0o001])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    KeyRing(tmp_path)
    (tmp_path / "keys" / "server.key").chmod(mode)
    with pytest.raises(
        KeyFileError, match=f"server.key can be read by others .mode {mode:04o}.*Delete it"
    ):
        KeyRing(tmp_path)


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    KeyRing(tmp_path)
    (tmp_path / "keys").chmod(0o750)
    with pytest.raises(KeyFileError, match=r"open to others .*chmod 700"):
        KeyRing(tmp_path)


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
    write_key(tmp_path / "x.key", new_pair())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(KeyFileError, match="belongs to another user"):
        read_key(tmp_path / "x.key")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"public": "x", "secret": 5}',
        b'{"public": "x", "secret": "short"}',
    ],
)
def test_a_damaged_key_is_told(tmp_path, content):
    file = tmp_path / "x.key"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with pytest.raises(KeyFileError, match="damaged"):
        read_key(file)


def test_halves_of_two_keys_are_no_key(tmp_path):
    one, two = new_pair(), new_pair()
    write_key(tmp_path / "x.key", type(one)(one.public, two.secret))
    with pytest.raises(KeyFileError, match="damaged"):
        read_key(tmp_path / "x.key")


def test_a_key_that_is_not_there(tmp_path):
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        read_key(tmp_path / "x.key")


def test_the_authenticator_lets_in_whom_the_ring_knows(tmp_path):
    """Over a real encrypted socket: the user and a lease are heard, an unknown client and an ended
    lease are not.
    """
    ring = KeyRing(tmp_path)
    lease, ended, unknown = ring.make_lease_key("l1"), ring.make_lease_key("l2"), new_pair()
    ring.drop_lease("l2")
    context = zmq.Context()
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback("*", credentials_provider=ring)
    server = context.socket(zmq.PULL)
    server.curve_server = True
    server.curve_publickey, server.curve_secretkey = (
        ring.server.public.encode(),
        ring.server.secret.encode(),
    )
    port = server.bind_to_random_port("tcp://127.0.0.1")
    senders = []  # a socket that nobody refers to is closed
    try:
        for pair, word in (
            (unknown, b"unknown"),
            (ended, b"ended"),
            (ring.client, b"client"),
            (lease, b"lease"),
        ):
            sender = context.socket(zmq.PUSH)
            senders.append(sender)
            sender.linger = 0
            sender.curve_serverkey = ring.server.public.encode()
            sender.curve_publickey, sender.curve_secretkey = (
                pair.public.encode(),
                pair.secret.encode(),
            )
            sender.connect(f"tcp://127.0.0.1:{port}")
            sender.send(word)
        heard = {}
        while len(heard) < 2:
            assert server.poll(int(PATIENCE_S * 1000)), "the authenticator let nobody in"
            frame = server.recv(copy=False)
            heard[frame.bytes] = ring.identity(frame.get("User-Id"))
        assert heard == {b"client": f"client:{user_name()}", b"lease": "lease:l1"}
    finally:
        guard.stop()
        context.destroy(linger=0)
