"""Who is let in: the table of what may come to the page, and what is answered."""

from __future__ import annotations

import asyncio

import pytest

from malletrain.web.guard import AccessPolicy, WebGuard, host_name

TOKEN = "t" * 32
HOST = {"host": "127.0.0.1:8870"}
COOKIE = {"cookie": f"malletrain-web={TOKEN}"}
PAGE = {"x-malletrain": "page"}
POLICY = AccessPolicy("ann", TOKEN, frozenset({"127.0.0.1", "localhost"}))


def ask(headers, method="GET", path="/api/v1/jobs", query="", policy=POLICY):
    """(status, headers, who looks) of one request."""
    answers, viewers = [], []

    async def app(scope, receive, send):
        viewers.append(scope["state"]["viewer"].name)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        answers.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(k.encode(), v.encode()) for k, v in headers],
    }
    asyncio.run(WebGuard(app, policy)(scope, None, send))
    sent = {k.decode(): v.decode() for k, v in answers[0]["headers"]}
    return answers[0]["status"], sent, viewers[0] if viewers else None


def status(headers, method="GET", **more):
    code, _, viewer = ask(list(headers.items()), method, **more)
    assert (viewer is not None) == (code == 200)
    return code


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({**HOST, **COOKIE}, 200),
        ({**HOST, "authorization": f"Bearer {TOKEN}"}, 200),
        ({**HOST, "cookie": f"other=1; malletrain-web={TOKEN}"}, 200),
        (HOST, 401),
        ({**HOST, "cookie": f'theme={{"dark": true}}; malletrain-web={TOKEN}'}, 200),
        ({**HOST, "cookie": f"path; consent; malletrain-web={TOKEN}"}, 200),
        ({**HOST, "cookie": f"malletrain-web=old; malletrain-web={TOKEN}"}, 200),
        ({**HOST, "cookie": f"x-malletrain-web={TOKEN}"}, 401),
        ({**HOST, "cookie": "malletrain-web=wrong"}, 401),
        ({**HOST, "cookie": "malletrain-web="}, 401),
        ({**HOST, "authorization": "Bearer wrong"}, 401),
        ({**HOST, "authorization": f"Basic {TOKEN}"}, 401),
        (COOKIE, 421),
        ({"host": "evil.example:8870", **COOKIE}, 421),
        ({"host": "127.0.0.1.evil.example", **COOKIE}, 421),
        ({"host": "127.0.0.1:8870@evil.example", **COOKIE}, 421),
        ({"host": "LOCALHOST:9", **COOKIE}, 200),
    ],
)
def test_who_knows_the_token_and_calls_the_page_by_its_name_is_let_in(headers, expected):
    assert status(headers) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (PAGE, 200),
        ({**PAGE, "origin": "http://127.0.0.1:8870"}, 200),
        ({**PAGE, "origin": "http://127.0.0.1:8870", "sec-fetch-site": "same-origin"}, 200),
        ({}, 403),
        ({"content-type": "application/json"}, 403),
        ({**PAGE, "origin": "http://evil.example"}, 403),
        ({**PAGE, "origin": "null"}, 403),
        ({**PAGE, "origin": "http://127.0.0.1:9999"}, 403),
        ({**PAGE, "sec-fetch-site": "cross-site"}, 403),
        ({**PAGE, "sec-fetch-site": "same-site"}, 403),
    ],
)
def test_only_the_page_itself_changes_something(headers, expected):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert status({**HOST, **COOKIE, **headers}, method) == expected


def test_a_page_may_come_by_way_of_a_proxy_that_was_named():
    policy = AccessPolicy(
        "ann", TOKEN, POLICY.hosts | {"portal.example"}, proxies=frozenset({"portal.example"})
    )
    for origin, expected in (("https://portal.example", 200), ("https://evil.example", 403)):
        sent = {**HOST, **COOKIE, **PAGE, "origin": origin}
        assert status(sent, "POST", policy=policy) == expected
        assert status(sent, "POST") == 403


def test_a_header_that_comes_twice_is_neither_of_them():
    twice = [("host", "127.0.0.1"), ("host", "evil.example"), *COOKIE.items()]
    assert ask(twice)[0] == 421


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/jobs/j1", "./j1?a=b"),
        ("/jobs/", "./?a=b"),
        ("/\N{GREEK SMALL LETTER ALPHA}", "./%CE%B1?a=b"),
        ("/x\r\nset-cookie: a=b", "./x%0D%0Aset-cookie%3A%20a%3Db?a=b"),
        ("/https:evil.example", "./https%3Aevil.example?a=b"),
    ],
)
def test_the_address_without_the_token_is_one_of_this_page(path, location):
    code, sent, _ = ask(list(HOST.items()), path=path, query=f"token={TOKEN}&a=b")
    assert (code, sent["location"]) == (303, location)


def test_the_token_moves_from_the_address_into_a_cookie():
    code, sent, viewer = ask(list(HOST.items()), path="/", query=f"token={TOKEN}&a=b")
    assert (code, viewer, sent["location"]) == (303, None, "./?a=b")
    assert sent["set-cookie"] == f"malletrain-web={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    assert ask(list(HOST.items()), path="/", query="token=wrong")[0] == 403
    assert ask([("host", "evil.example")], path="/", query=f"token={TOKEN}")[0] == 421


def test_every_answer_forbids_what_the_page_does_not_need():
    for headers in ({**HOST, **COOKIE}, HOST, {"host": "evil.example"}):
        sent = ask(list(headers.items()))[1]
        assert "default-src 'none'" in sent["content-security-policy"]
        assert "unsafe" not in sent["content-security-policy"]
        assert sent["x-content-type-options"] == "nosniff"
        assert sent["referrer-policy"] == "no-referrer"


def test_a_proxy_says_who_looks_only_where_it_is_trusted():
    named = {**HOST, **COOKIE, "x-remote-user": "bob"}
    assert ask(list(named.items()))[2] == "ann"
    policy = AccessPolicy("site", TOKEN, POLICY.hosts, "x-remote-user")
    assert ask(list(named.items()), policy=policy)[2] == "bob"
    assert status({**HOST, **COOKIE}, policy=policy) == 401
    for name in ("", "bob, ann", "../x", "bob\n", "x" * 300):
        assert status({**named, "x-remote-user": name}, policy=policy) == 401
    assert status({**HOST, "x-remote-user": "bob"}, policy=policy) == 401
    twice = [*named.items(), ("x-remote-user", "ann")]
    assert ask(twice, policy=policy)[0] == 401


def test_websockets_are_not_spoken():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(WebGuard(None, POLICY)({"type": "websocket", "headers": []}, None, send))
    assert sent == []


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Example.org:80", "example.org"),
        ("example.org.", "example.org"),
        ("[::1]:80", "[::1]"),
        ("[::1]", "[::1]"),
        ("a b:c:d", ""),
        ("", ""),
    ],
)
def test_names_of_hosts(host, name):
    assert host_name(host) == name


def test_wrong_tokens_are_logged_with_their_address_and_answered_ever_later(caplog):
    pauses, statuses = [], []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def sleep(seconds):
        pauses.append(seconds)

    guard = WebGuard(app, POLICY, sleep)

    def come(headers, client=("10.0.0.7", 5), query=""):
        raw = [(k.encode(), v.encode()) for k, v in {**HOST, **headers}.items()]
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": query.encode()}
        asyncio.run(guard({**scope, "headers": raw, "client": client}, None, send))

    come({})  # no token is no attempt
    come({"authorization": "Bearer wrong"})
    come({"cookie": "malletrain-web=wrong"})
    come({}, query="token=wrong")
    come(COOKIE)
    come({"authorization": "Bearer wrong", "x-forwarded-for": "9.9.9.9, 10.0.0.8"}, client=None)
    come({"authorization": "Bearer wrong", "x-forwarded-for": "\nforged line"}, client=None)
    assert statuses == [401, 401, 401, 403, 200, 401, 401]
    assert pauses == [0.25, 0.5, 1.0, 0.25, 0.25]
    lines = [record.getMessage().partition(" ")[2] for record in caplog.records]
    refused = "A login with a wrong token was refused. It came from"
    assert lines == [f"{refused} {where}." for where in ("10.0.0.7", "10.0.0.8", "a Unix socket")]
