"""The HTTP client of one replica: posts attempts, reads their ids as they are generated, and
requests the replica's status.

A replica is an engine with the OpenAI API that supports ``return_token_ids`` (vLLM from 0.10.2, the
simulated engine), alone or behind the front of ``llmserve serve``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from llmserve.generation import FinishReason
from llmserve.replica_status import ENGINE_ENDED, ENGINE_LOADS, ReplicaStatus

CONNECT_S = 5.0
"""Maximum time to connect, seconds."""
STATUS_S = 5.0
"""Maximum time for the answer to a request for the status, seconds."""
READ_BYTES = 1 << 20
UNIX = "unix:"
"""Prefix of the address of a Unix socket."""


class EngineRefusal(Exception):
    """An engine has refused or aborted an attempt, and continues to run.

    Args:
        sentence: its message.
        may_repeat: whether another attempt may succeed.
        status: HTTP status of its answer, or the code of an error within a stream; 0: neither.
    """

    def __init__(self, sentence: str, *, may_repeat: bool, status: int = 0) -> None:
        super().__init__(sentence)
        self.sentence, self.may_repeat, self.status = sentence, may_repeat, status


class EngineCrash(Exception):
    """The front of a replica reports that its engine ended; the text has the last lines of that."""


class ReplicaUnreachable(Exception):
    """The connection to a replica is broken or could not be made, or its engine is not ready."""


@dataclass(frozen=True)
class EngineChunk:
    """The ids that an engine generated since the last chunk."""

    ids: list[int]
    reason: FinishReason | None = None
    """Why the answer ended; None: it has not ended."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    text: str = ""


class _Error(msgspec.Struct):
    message: str = ""
    code: Any = None

    @property
    def status(self) -> int:
        """The error's code as an HTTP status, as in streams of vLLM; 0: it is none."""
        return self.code if type(self.code) is int and 400 <= self.code < 600 else 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


class ReplicaClient:
    """The connections to one replica.

    Args:
        address: ``HOST:PORT``, or ``unix:PATH``.
        token: bearer token; empty: none is sent.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self.address = address
        connector: aiohttp.BaseConnector
        if address.startswith(UNIX):
            connector = aiohttp.UnixConnector(address[len(UNIX) :], limit=0)
            self._base = "http://localhost"
        else:
            connector = aiohttp.TCPConnector(limit=0)
            self._base = f"http://{address}"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, read_bufsize=READ_BYTES
        )

    async def close(self) -> None:
        """Close all connections; attempts on them raise ReplicaUnreachable."""
        await self._session.close()

    async def status(self, timeout_s: float = STATUS_S) -> ReplicaStatus:
        """Return the status of the replica from its front.

        Raises:
            ReplicaUnreachable: there is no answer in time, or the answer is not that of a front.
        """
        async with self._answer("GET", "/replica", timeout_s=timeout_s) as response:
            if response.status != 200:
                raise ReplicaUnreachable(
                    f"{self.address} answers /replica with status {response.status}."
                )
            try:
                return msgspec.json.decode(await response.read(), type=ReplicaStatus)
            except msgspec.DecodeError as error:
                sentence = f"{self.address} is not the front of a replica: {error}."
                raise ReplicaUnreachable(sentence) from None

    async def is_healthy(self, timeout_s: float = STATUS_S) -> bool:
        """Return whether an engine has loaded its model and reports that it is healthy.

        Raises:
            ReplicaUnreachable: there is no answer in time.
        """
        async with self._answer("GET", "/health", timeout_s=timeout_s) as response:
            return response.status == 200

    async def metrics(self, timeout_s: float = STATUS_S) -> str:
        """Return the text of an engine's metrics; empty if it has none.

        Raises:
            ReplicaUnreachable: there is no answer in time.
        """
        async with self._answer("GET", "/metrics", timeout_s=timeout_s) as response:
            return await response.text(errors="replace") if response.status == 200 else ""

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[EngineChunk, None]:
        """Yield what an engine generates; the last chunk has a reason. Closing the iterator before
        that stops the attempt.

        Args:
            body: a body of ``/v1/completions``, with ids as the prompt.

        Raises:
            EngineRefusal: the engine refuses or aborts it.
            EngineCrash: the engine ended.
            ReplicaUnreachable: the connection is broken.
        """
        order = {**body, "stream": True, "return_token_ids": True, "n": 1}
        async with self._attempt("/v1/completions", order) as response:
            await _check(response)
            rest, is_complete = b"", False
            async for data in response.content.iter_any():
                if is_complete:
                    continue  # read to the end, so that the connection can be used again
                lines = (rest + data).split(b"\n")
                rest = lines.pop()
                chunk = _read_lines(lines)
                is_complete = chunk.reason is not None
                if chunk.ids or is_complete:
                    yield chunk
            if is_complete:
                return
        raise ReplicaUnreachable(f"{self.address} ended an answer before it was complete.")

    async def whole(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the unchanged answer of the engine to a request that is not streamed.

        Args:
            path: such as ``/v1/chat/completions``.
            body: without ``stream``.

        Raises:
            EngineRefusal: the engine refuses it.
            EngineCrash: the engine ended.
            ReplicaUnreachable: the connection is broken.
        """
        async with self._attempt(path, body) as response:
            await _check(response)
            answer = await response.json()
        if not isinstance(answer, dict):
            raise EngineRefusal("The answer of the engine is not a JSON object.", may_repeat=False)
        return answer

    @contextlib.asynccontextmanager
    async def _attempt(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Return the answer to an attempt. An engine whose inner process has ended may answer every
        request with an error for some seconds before it ends itself; therefore its health is
        checked.
        """
        try:
            async with self._answer("POST", path, body) as response:
                yield response
        except EngineRefusal as refusal:
            is_well = True
            if refusal.status >= 500:
                with contextlib.suppress(ReplicaUnreachable):  # it is busy
                    is_well = await self.is_healthy()
            if not is_well:
                raise EngineCrash(refusal.sentence) from None
            raise

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                method, self._base + path, data=data, headers=headers, timeout=timeout
            ) as response:
                yield response
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            text = str(error) or type(error).__name__
            raise ReplicaUnreachable(f"{self.address} cannot be reached: {text}") from error


def _read_lines(lines: list[bytes]) -> EngineChunk:
    """Return the ids in some lines of a stream of events."""
    ids: list[int] = []
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.DecodeError as error:
            sentence = f"The engine's stream cannot be read: {error}."
            raise EngineRefusal(sentence, may_repeat=True) from None
        if chunk.error is not None:
            _raise(chunk.error, chunk.error.status)
        for choice in chunk.choices:
            if choice.token_ids is None and choice.text:
                raise EngineRefusal(
                    "The engine answers without token_ids. llmserve needs an engine that supports "
                    "return_token_ids, such as vLLM 0.10.2 or later.",
                    may_repeat=False,
                )
            ids += choice.token_ids or ()
            if choice.finish_reason is not None:
                return EngineChunk(ids, _reason(choice.finish_reason))
    return EngineChunk(ids)


def _reason(text: str) -> FinishReason:
    if text == "abort":
        raise EngineRefusal("The engine has aborted the answer.", may_repeat=True)
    return FinishReason.LENGTH if text == "length" else FinishReason.STOP


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise the error for a status other than 200."""
    if response.status == 200:
        return
    text = await response.read()
    try:
        error = msgspec.json.decode(text, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    if error is None or not error.message:
        error = _Error(f"The engine answers with status {response.status}.")
    _raise(error, response.status)


def _raise(error: _Error, status: int) -> None:
    if error.code == ENGINE_ENDED:
        raise EngineCrash(error.message)
    if error.code == ENGINE_LOADS:
        raise ReplicaUnreachable(error.message)
    # 401 and 404 concern this replica, 408 and 429 the moment; another replica may succeed.
    may_repeat = not 400 <= status < 500 or status in (401, 404, 408, 429)
    raise EngineRefusal(error.message, may_repeat=may_repeat, status=status)
