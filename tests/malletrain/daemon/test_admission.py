"""Which links of a job are valid."""

from __future__ import annotations

import pytest

from malletrain.daemon.jobs.admission import MAX_LINKS, links_problem


@pytest.mark.parametrize(
    "url",
    [
        "http://login1:6006",
        "https://host.example.org/run/1?x=%20#step",
        "HTTPS://host.example.org",
        "http://[::1]:6006/",
        "http://127.0.0.1:8300/",
    ],
)
def test_an_address_of_a_web_page_is_valid(url):
    assert links_problem({"TensorBoard": url}) == ""


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("javascript:alert(1)", "is not one of a web page"),
        ("java\nscript:alert(1)", "is not one of a web page"),
        ("data:text/html,x", "is not one of a web page"),
        ("file:///etc/passwd", "is not one of a web page"),
        ("//host/x", "is not one of a web page"),
        ("host:6006", "is not one of a web page"),
        ("http:///x", "is not one of a web page"),
        ("http://host:99999/", "is not one of a web page"),
        ("http://[::1", "is not one of a web page"),
        ("http://host/a b", "is not one of a web page"),
        ("http://host/\x1b[31m", "is not one of a web page"),
        ("http://hóst/", "is not one of a web page"),
        ("", "is not one of a web page"),
        ("http://ann:secret@host/", "contains a user name"),
        ("http://ann@host/", "contains a user name"),
        ("http://host/" + "x" * 300, "300 characters at most"),
    ],
)
def test_any_other_address_is_refused_in_a_sentence(url, says):
    problem = links_problem({"TensorBoard": url})
    assert says in problem
    assert problem.endswith(".")
    assert "secret" not in problem


@pytest.mark.parametrize("name", ["", " x", "x ", "a\nb", "x" * 41])
def test_a_name_that_cannot_be_shown_is_refused(name):
    assert "1 to 40 printable characters" in links_problem({name: "http://host"})


def test_a_job_has_a_few_links():
    links = {f"page {number}": "http://host" for number in range(MAX_LINKS)}
    assert links_problem(links) == ""
    assert "8 links at most, not 9" in links_problem({**links, "one more": "http://host"})
