"""The API of the page, before a real daemon: it says what the command line says, and does what that
does.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.integration.embedded import site
from tests.integration.web_page import CHATTY, COLD, MARKUP, TOKEN, page
from tests.waiting import PATIENCE_S

pytest.importorskip("fastapi")


def conforms(web):
    """The answers to any request are as in the OpenAPI description."""
    # Here: it takes a second to import, which every process of the tests would spend.
    import schemathesis
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    no_say = [positive_data_acceptance]  # no description can say which scripts there are
    schema = schemathesis.openapi.from_dict(web.get("openapi.json"))
    headers = {"Authorization": f"Bearer {TOKEN}", "X-MalleTrain": "test"}
    operations = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.endswith("/stream"):
            continue  # has no end

        @given(operation.as_strategy())
        @settings(
            max_examples=2, database=None, deadline=None, suppress_health_check=list(HealthCheck)
        )
        def answers_as_described(case):
            case.call_and_validate(
                base_url=web.base, headers=headers, excluded_checks=no_say, timeout=PATIENCE_S
            )

        answers_as_described()
        operations.add((operation.method, operation.path))
    assert len(operations) >= 12


def test_the_api_shows_and_does_what_the_command_line_does(tmp_path):
    with site(tmp_path, nodes=2, config=COLD) as made, page(made.state) as web:
        script, stop = made.script("chatty.py", CHATTY), made.work / "stop"
        job = made.submit(script, str(stop), MARKUP, name=MARKUP, nodes=(1, 2), profile=False)
        made.until_samples(job, 8)
        made.until(lambda: web.ask("jobs").status == 200, "the page has seen the daemon")
        made.until(lambda: web.get("jobs")[0]["samples"] > 0, "the page knows of the samples")

        # Looking.
        (shown,) = web.get("jobs")
        assert (shown["id"], shown["name"]) == (job, MARKUP)
        assert web.get("jobs?state=failed") == []
        detail = web.get(f"jobs/{job}")
        assert detail["spec"] == made.show(job).spec
        made.until(lambda: MARKUP in web.get(f"jobs/{job}/logs")["text"], "the log has come")
        made.until(
            lambda: MARKUP in [each["name"] for each in web.get(f"jobs/{job}/metrics")], "a metric"
        )
        assert web.get(f"jobs/{job}/history")["points"]
        assert web.get("machine")["status"]["pid"] == made.daemon.pid
        assert {node["node"] for node in web.get("nodes")} <= {"n1", "n2"}
        spans = web.get("timeline")["spans"]
        assert any(span["state"] == "job" and span["job"] == job for span in spans)
        kinds = {event["kind"] for event in web.get(f"events?job={job}&since=0")}
        assert {"job-submitted", "job-started"} <= kinds
        assert [row["user"] for row in web.get("usage")] == [shown["owner"]]
        assert web.ask("jobs/nothing").status == 404
        assert "no job 'nothing'" in web.ask("jobs/nothing").data["error"]

        conforms(web)

        # Changing something.
        made.until(lambda: len(made.job(job).nodes) == 2, "it has both nodes")
        limits = {"min_nodes": 1, "max_nodes": 1}
        assert web.ask(f"jobs/{job}/scale", "PUT", limits).status == 200
        made.until(lambda: len(made.job(job).nodes) == 1, "it gave one up")
        assert made.job(job).max_nodes == 1
        form = {"script": str(script), "args": [str(stop), "m"], "name": "second", "profile": False}
        form["env"] = ["MALLETRAIN_PRELOAD=0"]
        second = web.ask("jobs", "POST", {**form, "workdir": str(made.work)})
        assert second.status == 201, second
        made.until_state(second.data["id"], "running")
        assert web.ask("jobs", "POST", {**form, "nodes": "4:1"}).status == 400
        assert web.ask("jobs", "POST", {**form, "script": "/nowhere.py"}).status == 400
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert web.ask(f"jobs/{job}/cancel", "POST", **headers).status == 403
        assert web.ask("jobs", Host="evil.example").status == 421
        assert web.ask("jobs", Authorization="Bearer wrong").status == 401
        assert made.job(job).state == "running"
        made.until(lambda: len(web.get("jobs")) == 2, "the page knows of both")
        with web.stream() as changes:
            first = next(changes)
            assert first["full"]
            assert {each["id"] for each in first["jobs"]} == {job, second.data["id"]}
            assert web.ask(f"jobs/{job}/cancel", "POST").status == 200
            for change in changes:
                if any(each["state"] == "cancelled" for each in change["jobs"]):
                    break
        assert made.job(job).state == "cancelled"
        again = web.ask(f"jobs/{job}/cancel", "POST")
        assert (again.status, again.data["code"]) == (409, "refused")

        # Without a daemon, and with the next one.
        made.kill_daemon()
        made.until(lambda: web.get("machine")["away"], "the page notices")
        assert [each["id"] for each in web.get("jobs")] == [job, second.data["id"]]
        made.until(lambda: web.ask(f"jobs/{job}").status == 503, "what was just asked is forgotten")
        made.start_daemon()
        made.until(lambda: not web.get("machine")["away"], "the page finds the new daemon")
        assert web.get("machine")["status"]["pid"] == made.daemon.pid
        made.until(lambda: web.ask(f"jobs/{job}").status == 200, "what was asked before is old")
        assert web.get(f"jobs/{job}")["job"]["state"] == "cancelled"
        stop.touch()
        made.until_state(second.data["id"], "completed")
        with web.stream() as changes:
            next(changes)
            assert web.stop() == 130  # while somebody follows
        assert "Traceback" not in web.last_words
        assert TOKEN not in web.last_words
