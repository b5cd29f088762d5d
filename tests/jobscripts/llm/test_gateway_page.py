"""The page of the gateway: what whose key shows, its headers, and the page in Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import llmserve.gateway.page
import pytest
from llmserve.batch_lines import BatchLine
from llmserve.gateway.database import GatewayDatabase
from llmserve.simulated_model import tokenize

from malletrain.web import guard
from tests.integration.browser import Browser, browser
from tests.jobscripts.llm.crowded_gateway import ERROR, ERROR_LINES, MARKUP, crowded_gateway
from tests.jobscripts.llm.gateways import site

WIDE_CONTENT = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""Pixels by which the page is wider than the window."""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    with crowded_gateway(tmp_path_factory.mktemp("crowd")) as made:
        yield made


def overview(crowd, user: str) -> dict:
    answer = crowd.http(user).get("/page/overview")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    return answer.json()


def numbers(row: dict, *names: str) -> tuple:
    return tuple(row[name] for name in names)


def test_an_operator_sees_everything(crowd):
    shown = overview(crowd, "operator")
    assert numbers(shown, "user", "operator", "policy") == ("operator", True, "fairserve")
    simulated, slow = shown["models"]
    assert simulated["states"] == {"ready": 1, "failed": 1}
    assert numbers(simulated, "name", "job", "slots", "queued", "running", "node_demand") == (
        *("simulated", "", 8),
        *(0, 0, None),
    )
    assert simulated["latencies"]["answers"] == 6
    assert numbers(slow, "queued", "running", "slots") == (1, 2, 2)
    assert slow["latencies"] == {
        "answers": 0,
        "ttft_p50_s": None,
        "ttft_p99_s": None,
        "token_p50_s": None,
        "token_p99_s": None,
    }
    replicas = {replica["name"]: replica for replica in simulated["replicas"]}
    assert numbers(replicas["n7"], "state", "sentence", "load_s") == ("failed", ERROR, 41.5)
    assert replicas["n7"]["address"] == f"unix:{crowd.folder / 'front'}"
    counts = ("queued", "running", "done", "failed", "refused", "prompt_tokens", "generated_tokens")
    users = {row["name"]: numbers(row, *counts) for row in shown["users"]}
    line_tokens = len(tokenize("Hello 1")) + len(tokenize("Hello 2"))
    assert users == {
        "alice": (0, 0, 5, 0, {}, 15 + line_tokens, 30 + 16),
        "bob": (1, 2, 1, 0, {"open_requests": 1}, 5, 20),
    }
    (batch,) = shown["batches"]
    assert numbers(batch, "user", "status", "total", "completed", "failed") == (
        *("alice", "completed"),
        *(3, 2, 1),
    )
    errors = [numbers(error, "model", "replica", "sentence") for error in shown["errors"]]
    assert ("simulated", "n7", ERROR) in errors


def test_a_user_sees_sums_and_what_is_their_own(crowd):
    shown = overview(crowd, "alice")
    assert not shown["operator"]
    assert [row["name"] for row in shown["users"]] == ["alice"]
    assert shown["users"][0]["latencies"]["answers"] == 5
    assert [batch["user"] for batch in shown["batches"]] == ["alice"]
    sums = [numbers(model, "queued", "running") for model in shown["models"]]
    assert sums == [(0, 0), (1, 2)]
    assert shown["models"][0]["states"] == {"ready": 1, "failed": 1}
    text = crowd.http("alice").get("/page/overview").text
    for secret in ("bob", "n7", "CUDA", "unix:"):
        assert secret not in text
    assert overview(crowd, "bob")["batches"] == []


@pytest.mark.parametrize("key", ["", "llm-1-2"])
def test_the_overview_needs_a_key(crowd, key):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx2.get(f"{crowd.url}/page/overview", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["message"].endswith(".")


def test_the_page_needs_no_key_and_loads_only_its_own_files(crowd):
    page = httpx2.get(crowd.url)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    links = set(re.findall(r'(?:href|src)="([^"#]+)"', page.text))
    assert links == {"page/icon.svg", "page/page.css", "page/main.js"}
    for path in ("", *links):
        answer = httpx2.get(f"{crowd.url}/{path}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"


def test_the_page_is_guarded_and_looks_like_the_page_of_malletrain():
    """llmserve imports only what is public of MalleTrain, so it has copies."""
    own = dict(llmserve.gateway.page.HEADERS)
    assert own.pop("cache-control") == "no-cache"
    assert own == guard.HEADERS
    colours = re.compile(r"(--(?:back|raised|text|faint|line|accent|bad|good|wait)): ?([^;]+);")
    page, whole = (
        [colours.findall(line) for line in (folder / "page.css").read_text().splitlines()]
        for folder in (llmserve.gateway.page.STATIC, Path(guard.__file__).with_name("static"))
    )
    assert [line for line in page if line] == [line for line in whole if line]


@pytest.mark.parametrize("name", ["none.js", "..%2fpage.py", "%2e%2e/page.py"])
def test_no_other_file_is_served(crowd, name):
    answer = httpx2.get(f"{crowd.url}/page/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_the_files_are_part_of_the_distribution():
    package = Path(llmserve.gateway.page.__file__).parents[2]
    assert "llmserve.gateway = static/*" in (package / "setup.cfg").read_text()


def test_a_gateway_without_requests_shows_zeros(tmp_path):
    with site(tmp_path, engines=0, configuration=one_engine_that_is_not_there(tmp_path)) as made:
        shown = overview(made, "alice")
        assert [model["states"] for model in shown["models"]] == [{"loading": 1}]
        (alice,) = shown["users"]
        assert numbers(alice, "queued", "running", "done", "generated_tokens") == (0, 0, 0, 0)


def one_engine_that_is_not_there(folder: Path) -> str:
    return (
        f'listen = "127.0.0.1:0"\n[users.alice]\n[models.simulated]\n'
        f'engines = ["unix:{folder}/none"]\ntokenizer = "simulated"\n'
    )


def test_only_the_newest_batches_are_read(tmp_path):
    database = GatewayDatabase(f"sqlite:///{tmp_path / 'gateway.db'}")
    lines = [BatchLine("line", "/v1/completions", "simulated", b"{}")]
    names = [
        database.add_batch(user, "", "/v1/completions", "file", "24h", lines, {}).id
        for user in ("alice", "bob", "alice")
    ]
    assert [batch.id for batch in database.newest_batches(2)] == [names[2], names[1]]
    assert [batch.id for batch in database.newest_batches(2, "bob")] == [names[1]]
    database.close()


# --- in a browser ---


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as made:
        yield made


def sign_in(chromium: Browser, crowd, key: str) -> None:
    chromium.open(crowd.url)
    chromium.run("sessionStorage.clear()")
    chromium.open(crowd.url)
    chromium.type("#key", key)
    chromium.click("#login button")


def test_the_page_of_an_operator(crowd, chromium):
    chromium.complaints()
    sign_in(chromium, crowd, crowd.key("operator"))
    chromium.until_text("#who", "operator (operator); policy fairserve")
    assert [title.strip() for title in chromium.texts("h2")] == [
        *("simulated", "slow", "Users", "Batches", "Errors of replicas"),
    ]
    assert "n7" in chromium.text("#models td")
    assert ERROR in chromium.text("#errors li")  # as text, with what looks like markup
    assert MARKUP in chromium.text("#models td")
    assert chromium.run("window.pwned === undefined && !document.querySelector('img')")
    assert "3 of 3" in chromium.text("#batches td")
    for width in (1200, 400):
        chromium.width(width)
        assert chromium.run(WIDE_CONTENT) <= 0
    assert chromium.complaints() == []


def heights(chromium: Browser, selector: str) -> tuple[float, float]:
    """Height of an element and of its content, in sizes of its font."""
    size = "parseFloat(getComputedStyle(box).fontSize)"
    ratios = f"(box) => [box.clientHeight / {size}, box.scrollHeight / {size}]"
    shown, whole = chromium.run(f"({ratios})(document.querySelector('{selector}'))")
    return shown, whole


def test_the_last_lines_of_an_engine_keep_their_breaks_and_do_not_fill_the_page(crowd, chromium):
    chromium.width(1200)
    sign_in(chromium, crowd, crowd.key("operator"))
    chromium.until_text("#who", "operator")
    assert chromium.text(".tail") == ERROR
    shown, whole = heights(chromium, ".tail")
    assert whole >= ERROR_LINES
    assert shown <= 8
    assert heights(chromium, "#errors li")[1] >= ERROR_LINES
    assert chromium.run("document.querySelector('.events').clientHeight") <= 420
    last = "document.querySelector('.tail').scrollTop"
    assert chromium.run(f"({last} = 10000, {last})") > 0  # the last line can be reached


def test_what_is_wrong_is_above_what_was_seen_before(crowd, chromium):
    sign_in(chromium, crowd, crowd.key("operator"))
    chromium.until_text("#who", "operator")
    answers = {
        "No answer from the gateway; trying again …": "Promise.reject(new Error())",
        "The gateway is stopping.": (
            "Promise.resolve(new Response("
            '\'{"error": {"message": "The gateway is stopping."}}\', {status: 503}))'
        ),
    }
    chromium.run("(window.kept = window.fetch, true)")
    for sentence, answer in answers.items():
        chromium.run(f"(window.fetch = () => {answer}, true)")
        chromium.until_text("#away", f"{sentence} What you see is of ")
        assert chromium.run("document.getElementById('away').clientHeight") > 0
        assert chromium.run("document.body.classList.contains('stale')")
        assert "simulated" in chromium.text("#models h2")
    chromium.run("(window.fetch = window.kept, true)")
    chromium.until(lambda: chromium.run("document.getElementById('away').hidden"), "it is over")
    assert not chromium.run("document.body.classList.contains('stale')")


def test_the_page_of_a_user(crowd, chromium):
    chromium.width(1200)
    sign_in(chromium, crowd, crowd.key("bob"))
    chromium.until_text("#who", "bob; policy fairserve")
    assert [title.strip() for title in chromium.texts("h2")] == [
        *("simulated", "slow", "Your requests", "Your batches"),
    ]
    assert "1 by open requests" in chromium.text("#users td")
    assert "alice" not in chromium.text("body")
    chromium.click("#leave")
    chromium.until(lambda: chromium.run("!document.getElementById('login').hidden"), "signed out")
    assert chromium.run("sessionStorage.length") == 0
    assert "simulated" not in chromium.text("main")


def test_a_wrong_key_is_a_sentence(crowd, chromium):
    sign_in(chromium, crowd, "llm-1-2")
    chromium.until_text("#refusal", "This key is not valid or was revoked")
    chromium.type("#key", "clé")
    chromium.click("#login button")
    chromium.until_text("#refusal", "This is not a key")


def test_a_key_that_is_revoked_signs_out(crowd, chromium):
    sign_in(chromium, crowd, crowd.key("alice"))
    chromium.until_text("#who", "alice")
    for key in crowd.keys.list():
        if key.user == "alice":
            crowd.keys.revoke(key.id)
    chromium.until_text("#refusal", "This key is not valid or was revoked")
