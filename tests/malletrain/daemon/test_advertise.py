"""Which address agents are told. Routes and /etc/hosts of other machines are those of namespaces of
the test's own.
"""

import json
import subprocess
import sys

import pytest

from malletrain.daemon.server.transport import Transport
from malletrain.daemon.site.advertise import AddressError, advertised
from malletrain.identity.keys import new_pair

pytestmark = pytest.mark.slow

EVERYWHERE = "tcp://0.0.0.0:7443"
ASK = """
import json, sys
from malletrain.daemon.site.advertise import AddressError, advertised
listen, advertise, nodes, here = json.loads(sys.argv[1])
try:
    print(advertised(listen, advertise, nodes, all_here=here))
except AddressError as error:
    print(error)
"""


def may_unshare():
    """Whether this user may have a network and mounts of their own."""
    return subprocess.run(["unshare", "-Urnm", "true"], capture_output=True).returncode == 0


def on_head(tmp_path, hosts, listen=EVERYWHERE, advertise="", nodes=(), here=False):
    """The address that a head with this /etc/hosts advertises, or its error. It has two networks:
    10.1.0.1/16 with the default route, and 10.2.0.1/16.
    """
    if not may_unshare():
        pytest.skip("this user may make no network namespaces (unshare -Urnm)")
    (tmp_path / "hosts").write_text(hosts)
    setup = f"""
    set -e
    mount --bind {tmp_path}/hosts /etc/hosts
    hostname head 2>/dev/null || true
    ip link set lo up
    for n in 1 2; do
        ip link add name eth$n type veth peer name peer$n
        ip addr add 10.$n.0.1/16 dev eth$n
        ip addr add fd00:$n::1/64 dev eth$n nodad
        ip link set eth$n up
        ip link set peer$n up
    done
    ip route add default via 10.1.0.254
    exec "$@"
    """
    argv = ["unshare", "-Urnmu", "sh", "-c", setup, "sh", sys.executable, "-c", ASK]
    arguments = json.dumps([listen, advertise, list(nodes), here])
    result = subprocess.run([*argv, arguments], capture_output=True, text=True)
    assert not result.returncode, result.stderr
    return result.stdout.strip()


DEBIAN = "127.0.0.1 localhost\n127.0.1.1 head\n10.2.0.5 node5\n10.2.0.6 node6\n10.1.0.7 node7\n"
HEAD_IS_LOCALHOST = "127.0.0.1 localhost head\n10.1.0.5 node5\n"


def test_a_head_that_calls_itself_localhost_tells_its_nodes_the_address_on_their_network(tmp_path):
    assert on_head(tmp_path, HEAD_IS_LOCALHOST, nodes=["node5"]) == "10.1.0.1"
    assert on_head(tmp_path, HEAD_IS_LOCALHOST) == "10.1.0.1"  # nothing known of the nodes


def test_the_route_to_most_nodes_decides(tmp_path):
    nodes = ["node5", "node6", "node7", "unknown-node"]
    assert on_head(tmp_path, DEBIAN, nodes=nodes) == "10.2.0.1"
    assert on_head(tmp_path, DEBIAN, nodes=["10.1.0.9"]) == "10.1.0.1"


def test_a_name_that_means_loopback_is_refused_with_what_to_write(tmp_path):
    output = on_head(tmp_path, DEBIAN, advertise="head", nodes=["node5"])
    assert "advertise = head means 127.0.1.1 here" in output
    assert 'set advertise = "10.2.0.1"' in output
    output = on_head(tmp_path, DEBIAN, advertise="nobody-knows-me.invalid")
    assert "names no address that this machine can look up" in output


def test_listening_on_every_address_of_ipv6(tmp_path):
    v6 = "tcp://[::]:7443"
    assert on_head(tmp_path, DEBIAN, listen=v6, nodes=["fd00:2::5"]) == "[fd00:2::1]"
    assert on_head(tmp_path, DEBIAN, listen=v6, nodes=["node5"]) == "10.2.0.1"


@pytest.mark.parametrize(
    ("listen", "advertise", "nodes", "here", "expected"),
    [
        (EVERYWHERE, "", [], True, "127.0.0.1"),
        ("tcp://127.0.0.1:0", "", [], True, "127.0.0.1"),
        ("tcp://[::1]:0", "", [], True, "[::1]"),
        (EVERYWHERE, "", ["127.0.0.1"], False, "127.0.0.1"),
        ("tcp://127.0.0.1:0", "", ["127.0.0.1", "localhost"], False, "127.0.0.1"),
        (EVERYWHERE, "127.0.0.1", ["192.0.2.7"], False, "127.0.0.1"),
        (EVERYWHERE, "192.0.2.1", [], False, "192.0.2.1"),
        ("tcp://192.0.2.1:7443", "", [], False, "192.0.2.1"),
    ],
)
def test_what_was_said_counts(listen, advertise, nodes, here, expected):
    assert advertised(listen, advertise, nodes, all_here=here) == expected


@pytest.mark.parametrize(
    ("listen", "advertise", "nodes"),
    [
        ("tcp://127.0.0.1:0", "", []),
        ("tcp://localhost:0", "", ["192.0.2.7"]),
        (EVERYWHERE, "localhost", ["192.0.2.7"]),
    ],
)
def test_loopback_is_refused_where_there_are_other_machines(listen, advertise, nodes):
    with pytest.raises(AddressError):
        advertised(listen, advertise, nodes, all_here=False)


def test_a_daemon_listens_on_every_address_of_ipv6():
    transport = Transport(new_pair(), lambda key: None)
    try:
        assert transport.bind("tcp://[::]:0").startswith("tcp://")
    finally:
        transport.stop()
