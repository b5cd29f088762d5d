"""Dashboards and alert rules of site-configs/ against a real Prometheus that scrapes a real daemon.

Every query of every panel returns numbers. What an embedded cluster does not have comes from
stand-ins that are scraped as well: the calls of a main scheduler, memory that snapshots take,
deadlines, and node exporter's counters.

Rates are taken over longer than the test lasts: what happened once, such as a rescale, stays in
their windows however rarely a busy machine scrapes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, start_http_server

from malletrain.daemon.site.metrics import Metrics
from malletrain.shipped import shipped
from tests import waiting
from tests.integration.embedded import Site
from tests.integration.web_page import CHATTY, COLD

RULES = shipped("site-configs/prometheus/malletrain.rules.yml")
ALERTS = Path(__file__).with_name("alerts.yml")
BOARDS = {name: shipped(f"site-configs/grafana/{name}.json") for name in ("operator", "user")}
VARIABLES = {
    "$__rate_interval": "1h",
    "$__range": "1h",
    "$instance": ".*",
    "$job": ".*",
}
"""What Grafana puts into queries."""


@pytest.fixture
def installed() -> None:
    """Prometheus and its tool are there."""
    if lacking := [name for name in ("prometheus", "promtool") if shutil.which(name) is None]:
        reason = f"There is no {' and no '.join(lacking)}; run tests/slurm/install.sh as root"
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail(reason)
        pytest.skip(reason)


def queries() -> list[tuple[str, str]]:
    """(board and panel, query) of all panels, as Grafana would send it."""
    rows = []
    for name, path in BOARDS.items():
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"]
                for variable, value in VARIABLES.items():
                    query = query.replace(variable, value)
                rows.append((f"{name}: {panel['title']}", query))
    return rows


def rules() -> list[dict[str, str]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def test_panels_and_rules_use_metrics_that_there_are():
    served = set()
    for family in Metrics().registry.collect():
        name = family.name
        served |= {name, f"{name}_total", f"{name}_bucket"}
    served |= {rule["record"] for rule in rules() if "record" in rule}
    shown = [query for _, query in queries()]
    expressions = " ".join([*shown, *(rule["expr"] for rule in rules())])
    assert set(re.findall(r"\bmalletrain[_:][\w:]+", expressions)) <= served
    assert "$" not in " ".join(shown)


def test_panels_do_not_lie_upon_each_other():
    for path in BOARDS.values():
        board = json.loads(path.read_text())
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        places: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            here = set(
                itertools.product(
                    range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
                )
            )
            assert not places & here, panel["title"]
            assert at["x"] + at["w"] <= 24
            places |= here


def lost(board, round_trip, at=""):
    """The places of a board that Grafana's own types drop or understand otherwise."""
    if isinstance(board, dict) and isinstance(round_trip, dict):
        inside = [lost(board[key], round_trip.get(key), f"{at}/{key}") for key in board]
    elif isinstance(board, list) and isinstance(round_trip, list) and len(board) == len(round_trip):
        pairs = enumerate(zip(board, round_trip, strict=True))
        inside = [lost(mine, theirs, f"{at}/{n}") for n, (mine, theirs) in pairs]
    else:
        return [] if board == round_trip else [at]
    return [place for places in inside for place in places]


def as_grafana_has_it(board):
    """A board, read into the types that Grafana publishes and written again."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's package needs Python 3.11")
@pytest.mark.parametrize("name", BOARDS)
def test_grafana_knows_each_word_of_a_board(name):
    board = json.loads(BOARDS[name].read_text())
    assert lost(board, as_grafana_has_it(board)) == []
    board["panels"][1]["fieldConfig"]["defaults"]["unti"] = "s"
    board["panels"][1]["targets"][0]["exprr"] = "up"
    assert set(lost(board, as_grafana_has_it(board))) == {
        "/panels/1/fieldConfig/defaults/unti",
        "/panels/1/targets/0/exprr",
    }


def test_every_rule_does_what_it_says(installed, tmp_path):
    for path in (RULES, ALERTS):
        shutil.copy(path, tmp_path)
    for words in (["check", "rules", RULES.name], ["test", "rules", ALERTS.name]):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tried = yaml.safe_load(ALERTS.read_text())["tests"]
    fires = {
        each["alertname"]
        for test in tried
        for each in test.get("alert_rule_test", ())
        if each["exp_alerts"]
    }
    assert fires == {rule["alert"] for rule in rules() if "alert" in rule}


class Prometheus:
    """One that scrapes these targets, by name of the scrape job."""

    def __init__(self, root: Path, targets: dict[str, str], labels: dict[str, dict[str, str]]):
        (scrape,) = yaml.safe_load(shipped("site-configs/prometheus/scrape.yml").read_text())[
            "scrape_configs"
        ]
        shutil.copy(RULES, root)
        jobs = [
            {
                **scrape,
                "job_name": name,
                "scrape_interval": "5s",
                "scrape_timeout": "5s",
                "static_configs": [{"targets": [target], "labels": labels.get(name, {})}],
            }
            for name, target in targets.items()
        ]
        config = root / "prometheus.yml"
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"evaluation_interval": "1s"},
                    "rule_files": [RULES.name],
                    "scrape_configs": jobs,
                }
            )
        )
        self._log = (root / "prometheus.log").open("w+")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={root / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                f"--query.timeout={waiting.PATIENCE_S:g}s",
                "--log.format=json",
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        try:
            self.base = f"http://{waiting.until(self._address, 'it listens', 0.05, self.log)}"
        except BaseException:
            self.stop()
            raise

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _address(self) -> str:
        assert self._process.poll() is None, self.log()
        if "ready to receive web requests" not in self.log():
            return ""
        return next(iter(re.findall(r'"address":"([\d.]+:[1-9]\d*)"', self.log())), "")

    def ask(self, query: str) -> list[float]:
        """The numbers that a query returns now."""
        values = [float(each["value"][1]) for each in self.series(query)]
        return [value for value in values if not math.isnan(value)]

    def series(self, query: str) -> list[dict[str, Any]]:
        """What a query returns now. One that cannot be answered just now is asked again."""
        (reply,) = waiting.until(lambda: self._answer(query), f"it answers {query}", 0.5, self.log)
        return reply["data"]["result"]

    def _answer(self, query: str) -> tuple[Any, ...]:
        """The answer; nothing where there is none yet."""
        assert self._process.poll() is None, self.log()
        address = f"{self.base}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(address, timeout=waiting.PATIENCE_S) as answer:
                return (json.load(answer),)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read().decode()
            if error.code != 503:
                pytest.fail(f"{query}: {error.code} {body}")
        except (urllib.error.URLError, ConnectionError):
            pass
        return ()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def prometheus(root, targets, labels) -> Iterator[Prometheus]:
    made = Prometheus(root, targets, labels)
    try:
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def served(registry: CollectorRegistry) -> Iterator[str]:
    """The address at which a registry can be scraped."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.thorough
def test_every_panel_returns_data(installed, tmp_path):
    made = Site(tmp_path / "site", nodes=1, config=f'{COLD}[accounting]\nwatts = ["default 1 2"]\n')
    text = made.config.read_text()
    made.config.write_text(text.replace('metrics_listen = ""', 'metrics_listen = "127.0.0.1:0"'))
    calls, exporter = Metrics(), CollectorRegistry()
    idle = Counter("node_cpu_seconds_total", "As of node exporter.", ["mode"], registry=exporter)
    idle.labels("idle").inc(5)
    calls.scheduler_calls({("squeue", "ok"): 3})
    calls.memory({"j0": 1000})
    calls.goals({"on_track": 1}, {"j0": 60.0}, {"j0": 3600.0})
    with contextlib.ExitStack() as stack:
        stack.callback(made.stop)
        made.start_daemon()
        (port,) = made.until(
            lambda: re.findall(r"metrics +port=(\d+)", (made.root / "daemon.log").read_text()),
            "its metrics are served",
        )
        targets = {
            "malletrain": f"127.0.0.1:{port}",
            "calls": stack.enter_context(served(calls.registry)),
            "node": stack.enter_context(served(exporter)),
        }
        (tmp_path / "prometheus").mkdir()
        server = stack.enter_context(
            prometheus(tmp_path / "prometheus", targets, {"node": {"instance": "n1:9100"}})
        )
        # Before its first plan: what was counted before the first look is no increase.
        of_it = 'malletrain_samples_total{job="malletrain"}'
        made.until(lambda: server.ask(of_it), "the daemon is scraped")
        script, stop = made.script("chatty.py", CHATTY), made.work / "stop"
        job = made.submit(script, str(stop), "loss", nodes=(1, 1), profile=False)
        missing = queries()

        def all_answer() -> bool:
            missing[:] = [each for each in missing if not server.ask(each[1])]
            return not missing

        def unanswered() -> str:
            up = {each["metric"]["job"]: each["value"][1] for each in server.series("up")}
            return f"No data: {missing}\nScraped: {up}\n{made.daemon_log(20)}"

        waiting.until(all_answer, "every panel shows data", 1.0, unanswered)
        nodes, ended = (
            f'malletrain_job_nodes{{exported_job="{job}"}}',
            "malletrain_jobs_ended_total",
        )
        made.until(lambda: server.ask(nodes) == [1.0], "its node is shown")
        stop.touch()
        made.until_state(job, "completed")
        of_daemon = f'{ended}{{job="malletrain",state="completed"}}'
        made.until(lambda: server.ask(of_daemon) == [1.0], "its end is counted")
        made.until(lambda: not server.ask(nodes), "it is shown no more")
        # MalleTrainDown is about scrapes that fail, which they may where a machine is busy.
        firing = 'ALERTS{alertstate="firing",alertname!="MalleTrainDown"}'
        assert [each["metric"] for each in server.series(firing)] == []
