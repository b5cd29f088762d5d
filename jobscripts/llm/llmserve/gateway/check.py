"""``llmserve gateway --check``: tests whether the gateway would work, before it is started.

The tests use the gateway's own code, run as the account that calls them, and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine, inspect, make_url
from sqlalchemy.exc import SQLAlchemyError

from llmserve.gateway.configuration import ConfigurationError, GatewayConfiguration, ModelSection
from llmserve.gateway.keys import KeyFile, UserKeyError
from llmserve.gateway.server import configured_tokenizer, service_access
from llmserve.replica_client import ReplicaClient, ReplicaUnreachable
from malletrain import AsyncClient

VERDICTS = {True: "OK", None: "look", False: "would not work"}


@dataclass(frozen=True)
class GatewayFinding:
    """The result of one test."""

    what: str
    """Name of the test."""
    works: bool | None
    """None: it works, but needs attention."""
    sentence: str

    def __str__(self) -> str:
        return f"{VERDICTS[self.works]:15} {self.what:10} {self.sentence}"


async def check_gateway(
    configuration: GatewayConfiguration, folder: Path, state_dir: Path | None = None
) -> list[GatewayFinding]:
    """Return the results of all tests of a configuration.

    Args:
        configuration: the operator's configuration.
        folder: folder of the configuration, to which its paths are relative.
        state_dir: state directory of the daemon; None: your own daemon, else the site's.
    """
    findings = [*_keys(configuration), *_database(configuration.database), *_address(configuration)]
    for name, section in configuration.models.items():
        findings.append(_tokenizer(name, section, folder))
        findings += [finding async for finding in _engines(name, section)]
    jobs = {name: section.job for name, section in configuration.models.items() if section.job}
    if jobs:
        findings += [finding async for finding in _services(jobs, state_dir)]
    return findings


def _keys(configuration: GatewayConfiguration) -> Iterator[GatewayFinding]:
    path = configuration.keys
    try:
        keys = KeyFile(path).list()
    except UserKeyError as error:
        yield GatewayFinding("keys", False, str(error))
        return
    if not os.access(path.parent, os.W_OK | os.X_OK):
        sentence = (
            f"{path.parent} cannot be written by this account, so no key can be made; create it, "
            "or set keys to another place."
        )
        yield GatewayFinding("keys", False, sentence)
        return
    users = {key.user for key in keys if key.revoked is None} & configuration.users.keys()
    if users:
        yield GatewayFinding(
            "keys", True, f"{path} can be used; users with a valid key: {len(users)}."
        )
    else:
        sentence = "No user has a valid key; make one with: llmserve key add USER"
        yield GatewayFinding("keys", None, sentence)


def _database(url: str) -> Iterator[GatewayFinding]:
    try:
        location = make_url(url)
        if location.get_backend_name() == "sqlite" and location.database:
            path = Path(location.database)
            problem = _file_problem(path)
            if problem:
                yield GatewayFinding("database", False, problem)
                return
            if not path.exists():
                yield GatewayFinding("database", True, f"{path} will be created.")
                return
        engine = create_engine(location)
        try:
            inspect(engine).get_table_names()
        finally:
            engine.dispose()
    except (SQLAlchemyError, ImportError) as error:
        first = str(error).splitlines()[0]
        sentence = f"The database cannot be used: {first}. Correct `database`."
        yield GatewayFinding("database", False, sentence)
        return
    shown = location.render_as_string(hide_password=True)
    yield GatewayFinding("database", True, f"{shown} can be used.")


def _file_problem(path: Path) -> str:
    """Return what is wrong with the file of a database; empty if nothing is."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return (
            f"{path.parent} cannot be written by this account, which SQLite needs; create it, or "
            "set database to another place."
        )
    if not path.exists():
        return ""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not path.is_file() or not os.access(path, os.R_OK | os.W_OK):
        return f"{path} is not a file that this account can read and write; correct `database`."
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return (
            f"{path} has the users' requests and can be read or written by other users (mode "
            f"{mode:04o}); run chmod 600 on it."
        )
    return ""


def _address(configuration: GatewayConfiguration) -> Iterator[GatewayFinding]:
    listen, (host, port) = configuration.listen, configuration.address
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, number) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            sentence = f"{listen} is in use, by a running gateway or another program."
            yield GatewayFinding("listen", None, sentence)
        else:
            sentence = f"{listen} cannot be used: {error.strerror or error}. Correct `listen`."
            yield GatewayFinding("listen", False, sentence)
        return
    yield GatewayFinding("listen", True, f"{listen} is free.")


def _tokenizer(name: str, section: ModelSection, folder: Path) -> GatewayFinding:
    try:
        configured_tokenizer(section.tokenizer, folder).encode("Hello")
    except (ConfigurationError, ValueError) as error:
        return GatewayFinding("tokenizer", False, f"Model {name}: {_joined(error)}")
    return GatewayFinding("tokenizer", True, f"Model {name}: {section.tokenizer} can be read.")


async def _engines(name: str, section: ModelSection) -> AsyncIterator[GatewayFinding]:
    for address in section.engines:
        client = ReplicaClient(address)
        try:
            is_ready = await client.is_healthy()
        except ReplicaUnreachable as error:
            sentence = f"Model {name}: {_joined(error)}"
            yield GatewayFinding("engine", False, sentence)
            continue
        finally:
            await client.close()
        state = "answers" if is_ready else "answers, but has not loaded its model yet"
        sentence = f"Model {name}: {address} {state}."
        yield GatewayFinding("engine", True if is_ready else None, sentence)


async def _services(jobs: dict[str, str], state_dir: Path | None) -> AsyncIterator[GatewayFinding]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(AsyncClient(state_dir))
            await client.status()
        except RuntimeError as error:
            yield GatewayFinding("daemon", False, _joined(error))
            return
        yield GatewayFinding("daemon", True, "The daemon answers.")
        for name, job in jobs.items():
            yield await _service(client, name, job)


async def _service(client: AsyncClient, name: str, job: str) -> GatewayFinding:
    try:
        view = await client.members(job)
    except RuntimeError as error:
        sentence = f"Model {name}: {_joined(error)} Submit the service, or correct its job."
        return GatewayFinding("service", False, sentence)
    if not view.version:
        sentence = f"Model {name}: service {job} has ended ({view.state}); submit it again."
        return GatewayFinding("service", False, sentence)
    try:
        await service_access(client, job)
    except (RuntimeError, ConfigurationError) as error:
        return GatewayFinding("service", False, f"Model {name}: {_joined(error)}")
    ready = sum(not member.loading for member in view.members)
    sentence = f"Model {name}: service {job} is {view.state}; replicas ready: {ready}."
    return GatewayFinding("service", True, sentence)


def _joined(error: Exception) -> str:
    return " ".join(str(error).split())
