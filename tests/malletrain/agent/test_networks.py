"""A node's networks, as the kernel has them here."""

import ipaddress
import socket

from malletrain.agent.networks import address_to, interface_of, networks


def test_the_loopback_is_one_and_comes_last():
    result = networks()
    assert result[-1].interface == "lo"
    assert {n.interface for n in result} <= {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.1", result) == "lo"
    assert interface_of("192.0.2.77", result) == ""
    [lo] = [n for n in result if n.address == "127.0.0.1"]
    assert ipaddress.ip_interface(f"{lo.address}/{lo.bits}").network == ipaddress.ip_network(
        "127.0.0.0/8"
    )


def test_every_address_can_be_listened_at():
    for network in networks():
        v6 = ":" in network.address
        with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET) as one:
            one.bind((network.address, 0))


def test_the_way_to_the_daemon():
    assert address_to("tcp://127.0.0.1:7443") == "127.0.0.1"
    assert address_to("tcp://[::1]:7443") in ("::1", "")  # "": no IPv6 here
    assert address_to("tcp://no.such.host.invalid:7443") == ""
    assert address_to("ipc:///x") == ""
