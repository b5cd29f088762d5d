"""Where the page listens, and what goes together there."""

from __future__ import annotations

import os
import stat

import pytest

from malletrain.client.errors import TRANSIENT
from malletrain.web.serve import (
    STATUS,
    ListenAddress,
    WebError,
    bind,
    make_access_policy,
    parse_address,
    url_of,
)

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1", ListenAddress("127.0.0.1")),
        ("127.0.0.1:80", ListenAddress("127.0.0.1", 80)),
        (":80", ListenAddress("127.0.0.1", 80)),
        ("[::1]:80", ListenAddress("::1", 80)),
        ("[::1]", ListenAddress("::1")),
        ("node7:8000", ListenAddress("node7", 8000)),
        ("unix:/run/x", ListenAddress(path="/run/x")),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address


def test_the_page_repeats_a_request_whose_error_says_nothing_about_it():
    assert {code for code, status in STATUS.items() if status >= 500} == TRANSIENT


@pytest.mark.parametrize("text", ["127.0.0.1:x", "127.0.0.1:99999", "unix:"])
def test_what_is_no_address_is_said(text):
    with pytest.raises(WebError, match=r"--listen .*give"):
        parse_address(text)


def test_a_header_is_believed_only_where_nobody_but_the_proxy_can_send_one():
    header = "X-Remote-User"
    with pytest.raises(WebError, match="anybody could send it"):
        make_access_policy(ListenAddress("0.0.0.0"), "ann", TOKEN, (), header)
    with pytest.raises(WebError, match="every user of this host"):
        make_access_policy(ListenAddress(), "ann", "", (), header)
    assert (
        make_access_policy(ListenAddress(), "ann", TOKEN, (), header).user_header == "x-remote-user"
    )
    assert make_access_policy(ListenAddress(path="/run/x"), "ann", "", (), header).token == ""


def test_without_a_proxy_there_is_always_a_token():
    for address in (ListenAddress(), ListenAddress("0.0.0.0"), ListenAddress(path="/run/x")):
        first, second = (make_access_policy(address, "ann", "", (), "").token for _ in range(2))
        assert len(first) == 64
        assert first != second
    with pytest.raises(WebError, match="too easy"):
        make_access_policy(ListenAddress(), "ann", "secret", (), "")


def test_the_page_is_known_by_the_names_that_were_allowed():
    policy = make_access_policy(ListenAddress("10.0.0.7"), "ann", "", ("Ondemand.Example.org",), "")
    assert {"10.0.0.7", "ondemand.example.org", "localhost"} <= policy.hosts
    assert "0.0.0.0" not in make_access_policy(ListenAddress("0.0.0.0"), "ann", "", (), "").hosts
    with pytest.raises(WebError, match="--allow-host"):
        make_access_policy(ListenAddress(), "ann", "", ("a:b:c",), "")


def test_a_port_that_is_taken_is_passed_over_unless_it_was_asked_for():
    first = bind(ListenAddress())
    second = bind(ListenAddress())
    try:
        port = first.getsockname()[1]
        assert second.getsockname()[1] != port
        assert url_of(ListenAddress(), first, "T") == f"http://127.0.0.1:{port}/?token=T"
        with pytest.raises(WebError, match=f"127.0.0.1:{port} cannot be used"):
            bind(ListenAddress(port=port))
    finally:
        first.close()
        second.close()


def test_a_unix_socket_is_for_its_group_and_replaces_one_that_nobody_serves(tmp_path):
    address = ListenAddress(path=str(tmp_path / "web"))
    first = bind(address)
    assert stat.S_IMODE(os.stat(address.path).st_mode) == 0o660
    with pytest.raises(WebError, match="Another page"):
        bind(address)
    first.close()
    bind(address).close()
