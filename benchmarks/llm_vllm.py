"""A batch with real vLLM on processors while nodes are lost: ``llmserve batch`` on two nodes,
beside ``vllm run-batch`` on two nodes with half of the lines each, restarted after each loss.

    python -m benchmarks.llm_vllm [--requests 200] [--kills 0.3,0.6] [--cases llmserve,run-batch]
        [--threads 1] [--json]

Needs ``make vllm``. The model is a random one in float32; answers are greedy and as long as
requested. A node is lost by SIGKILL: the first one when a case has generated the first share of all
tokens, the other one at the second share, and so on in turn. A lost node is available again at
once. ``seconds`` include loading. ``tokens again``: tokens that were generated beyond those of the
answers, relative to these. The answers of both cases are compared. Both nodes share this machine:
``--threads`` is the number of threads with which a node computes.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import end_in_order
from benchmarks.llm import HOME, BatchSite
from benchmarks.llm_gateway import free_ports
from tests.integration.embedded import Site
from tests.jobscripts.llm.random_llama import write_model
from tests.jobscripts.llm.vllm_environment import ENVIRONMENT, OPTIONS, NotInstalledError, folder

from llmserve.batch_store import BatchFolder  # isort: skip
from llmserve.model_tokenizer import INCOMPLETE  # isort: skip

CASES = ("llmserve", "run-batch")
NODES, SLOTS = 2, 8
POLL_S = 0.2


@dataclass(frozen=True)
class Outcome:
    """The result of one batch."""

    case: str
    kills: int
    seconds: float
    lines: int
    """Number of requests with an answer."""
    again: float
    """Tokens generated beyond those of the answers, relative to them."""
    texts: dict[str, str] = field(repr=False)
    """custom_id → text of the answer."""

    def row(self) -> dict[str, str | int | float]:
        """Return it without the texts."""
        return {name: value for name, value in asdict(self).items() if name != "texts"}


@dataclass
class Kills:
    """Loses one node after the other.

    Args:
        at: shares of the tokens of all answers, ascending.
    """

    at: Sequence[float]
    done: int = 0

    def next_node(self, generated: int, requests: int) -> int | None:
        """Return the number of the node to lose now; None for none.

        Args:
            generated: tokens until now.
            requests: number of requests.
        """
        share = generated / sum(map(tokens_of, range(requests)))
        is_due = self.done < len(self.at) and share >= self.at[self.done]
        return self.done % NODES if is_due else None


def tokens_of(number: int) -> int:
    """Return the number of tokens of the answer to a request."""
    return 50 + 100 * (number % 5)


def write_requests(path: Path, numbers: Sequence[int]) -> None:
    """Write requests for chats, the only generating requests of run-batch."""
    with path.open("w") as file:
        for number in numbers:
            messages = [{"role": "user", "content": f"Prompt {number}"}]
            body = {"model": "llama", "messages": messages, "max_tokens": tokens_of(number)}
            body |= {"temperature": 0, "ignore_eos": True}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")


def read_texts(path: Path) -> dict[str, str]:
    """Return custom_id → text of the answers in an output; empty if there is none."""
    if not path.exists():
        return {}
    texts = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line["error"] is None:
            choice = line["response"]["body"]["choices"][0]
            # at the end vLLM drops an id with an incomplete character, which may begin with
            texts[line["custom_id"]] = choice["message"]["content"].rstrip(INCOMPLETE + " ")
    return texts


# --- llmserve batch ---


def agent_at(site: Site, number: int) -> psutil.Process | None:
    """Return the agent of a node; None while there is none."""
    agents = site.agents()
    names = sorted(agents)
    return agents[names[number % len(names)]] if names else None


def llmserve_case(
    root: Path, model: Path, requests: int, kills: Kills, variables: Mapping[str, str]
) -> Outcome:
    """Run ``llmserve batch --engine vllm``.

    Args:
        root: folder for its files.
        model: folder of the model.
        requests: number of requests.
        kills: shares of the tokens at which nodes are lost.
        variables: environment of the engines.
    """
    source, output = root / "in.jsonl", root / "out.jsonl"
    write_requests(source, range(requests))
    parts = BatchFolder(output)
    site = BatchSite(root / "site", nodes=NODES)
    with contextlib.ExitStack() as stack:
        stack.callback(site.stop)
        site.start_daemon()
        began = time.monotonic()
        command = [sys.executable, "-m", "llmserve.cli", "batch", "--engine", "vllm"]
        command += ["--model", str(model), "--served-name", "llama", "--venv", str(folder())]
        command += [f"--env={name}={value}" for name, value in variables.items()]
        command += ["--nodes", f"1:{NODES}", "--slots", str(SLOTS), str(source), str(output)]
        paths = os.pathsep.join([str(HOME), *sys.path])
        of_site = {"PYTHONPATH": paths, "MALLETRAIN_STATE_DIR": str(site.state)}
        subprocess.run(
            [*command, "--", *OPTIONS],
            env={**os.environ, **of_site},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        generated: dict[int, int] = {}
        while not parts.is_done:
            status = parts.status()
            if "epoch" in status:
                generated[status["epoch"]] = status["generated_tokens"]
            node = kills.next_node(sum(generated.values()), requests)
            if node is not None and (agent := agent_at(site, node)) is not None:
                agent.kill()
                kills.done += 1
            time.sleep(POLL_S)
        seconds = time.monotonic() - began
        generated[parts.status()["epoch"]] = parts.status()["generated_tokens"]
    return outcome("llmserve", kills, seconds, read_texts(output), sum(generated.values()))


# --- vllm run-batch ---


class RunBatch:
    """``vllm run-batch`` on one node, restarted after each loss.

    Args:
        root: folder for its files.
        number: number of the node.
        model: folder of the model.
        requests: total number of requests, of which it has every second one.
        variables: environment of the engine.
    """

    def __init__(
        self, root: Path, number: int, model: Path, requests: int, variables: Mapping[str, str]
    ) -> None:
        self._variables = variables
        self._source, self.output = root / f"in{number}.jsonl", root / f"out{number}.jsonl"
        self._log = root / f"log{number}"
        write_requests(self._source, range(number, requests, NODES))
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._tokens = 0
        """Number of tokens generated in this run, as last reported."""
        self.lost_tokens = 0
        """Number of tokens generated in lost runs."""

    @property
    def generated(self) -> int:
        """Number of tokens of all runs until now."""
        return self.lost_tokens + self._tokens

    def start(self) -> None:
        """Start it."""
        self._port = free_ports(1)[0]
        command = [str(folder() / "bin" / "python"), "-m", "vllm.entrypoints.openai.run_batch"]
        command += ["-i", str(self._source), "-o", str(self.output), "--model", str(self._model)]
        command += ["--served-model-name", "llama", "--max-num-seqs", str(SLOTS), *OPTIONS]
        command += ["--enable-metrics", "--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self._variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether all its lines are answered.

        Raises:
            RuntimeError: it failed by itself.
        """
        assert self._process is not None
        code = self._process.poll()
        if code not in (None, 0):
            raise RuntimeError(f"vllm run-batch ended with {code}: {self._log.read_text()[-2000:]}")
        return code == 0

    def look(self) -> None:
        """Read how many tokens it has generated."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5.0)
            with contextlib.closing(connection):
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
            for line in text.splitlines():
                if line.startswith("vllm:generation_tokens_total{"):
                    self._tokens = int(float(line.split()[-1]))

    def kill(self) -> None:
        """Lose its node; no effect if it has ended."""
        assert self._process is not None
        if self._process.poll() is None:
            self.look()
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.lost_tokens += self._tokens
            self._tokens = 0


def run_batch_case(
    root: Path, model: Path, requests: int, kills: Kills, variables: Mapping[str, str]
) -> Outcome:
    """Run ``vllm run-batch`` with half of the lines on each node; see :func:`llmserve_case`."""
    nodes = [RunBatch(root, number, model, requests, variables) for number in range(NODES)]
    began = time.monotonic()
    try:
        for node in nodes:
            node.start()
        while not all(node.has_ended for node in nodes):
            for node in nodes:
                node.look()
            number = kills.next_node(sum(node.generated for node in nodes), requests)
            if number is not None:
                kills.done += 1
                if not nodes[number].has_ended:
                    nodes[number].kill()
                    nodes[number].start()
            time.sleep(POLL_S)
        seconds = time.monotonic() - began
    finally:
        for node in nodes:
            node.kill()
    texts = {name: text for node in nodes for name, text in read_texts(node.output).items()}
    needed = sum(map(tokens_of, range(requests)))
    lost = sum(node.lost_tokens for node in nodes)
    return outcome("run-batch", kills, seconds, texts, needed + lost)


def outcome(
    case: str, kills: Kills, seconds: float, texts: dict[str, str], generated: int
) -> Outcome:
    """Return the row of a case."""
    answered = sum(tokens_of(int(name[1:])) for name in texts)
    return Outcome(case, kills.done, seconds, len(texts), generated / max(1, answered) - 1.0, texts)


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return a sentence for each answer that differs: its name, and the position of the difference.
    Answers that only one case has are not compared.

    Args:
        first: custom_id → text in one case.
        second: the same in another case.
    """
    sentences = []
    for name in sorted(first.keys() & second.keys()):
        one, other = first[name], second[name]
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
            sentences.append(
                f"{name}: character {at} of {len(one)} and {len(other)}: "
                f"{one[at : at + 20]!r}, {other[at : at + 20]!r}"
            )
    return sentences


def main() -> int:
    """Print the table. Return exit code 1 if a request has no answer, or another one in the other
    case.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", default="0.3,0.6", help="shares of the tokens")
    parser.add_argument("--threads", type=int, default=1, help="of each node")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    end_in_order()
    try:
        folder()
    except NotInstalledError as error:
        parser.error(str(error))
    at = [float(text) for text in options.kills.split(",") if text]
    variables = {**ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)}
    run = {"llmserve": llmserve_case, "run-batch": run_batch_case}
    outcomes = []
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "llama"
        write_model(model)
        for case in options.cases.split(","):
            if case not in run:
                parser.error(f"{case} is no case; possible: {', '.join(CASES)}.")
            place = Path(root) / case
            place.mkdir()
            kills = Kills(at)
            outcomes.append(run[case](place, model, options.requests, kills, variables))
    sentences = [
        sentence for each in outcomes for sentence in differences(outcomes[0].texts, each.texts)
    ]
    if options.json:
        print(json.dumps([each.row() for each in outcomes], indent=1))
    else:
        table = Table("case", "nodes killed", "seconds", "lines answered", "tokens again")
        for each in outcomes:
            cells = (each.kills, f"{each.seconds:.0f}", each.lines, f"{each.again:.1%}")
            table.add_row(each.case, *map(str, cells))
        Console().print(table)
        print(f"Answers that differ between the cases: {len(sentences)}")
        for sentence in sentences[:5]:
            print(sentence)
        print(f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} processors")
    is_complete = all(each.lines == options.requests for each in outcomes)
    return 0 if is_complete and not sentences else 1


if __name__ == "__main__":
    sys.exit(main())
