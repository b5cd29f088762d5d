"""The messages of the OpenAI API: checks the bodies that the simulated engine reads, and makes
answers and errors. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from llmserve.oversize import too_long
from llmserve.simulated_model import tokenize

DEFAULT_MAX_TOKENS = 16
"""Default of the OpenAI API for completions."""
CHAT_MAX_TOKENS = 256
MAX_BODY_BYTES = 16 << 20

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Status → type of the error in the OpenAI API; other statuses below 500 are invalid requests."""


class ApiRefusal(Exception):
    """A request that is refused.

    Args:
        status: HTTP status.
        sentence: what is wrong, and what to do.
        code: short name of the problem, for programs.
    """

    def __init__(self, status: int, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.code = status, sentence, code
        self.retry_after_s: float | None = None
        """Seconds after which the same request may be accepted; None: not known."""

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        error = {"message": self.sentence, "type": kind, "param": None, "code": self.code}
        return {"error": error}


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool = False


class _Generation(msgspec.Struct, kw_only=True):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """An extension that vLLM has too: ids beside the text."""
    n: int = 1
    stop: str | list[str] | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionBody(_Generation, kw_only=True):
    """Body of ``/v1/completions``."""

    prompt: str | list[int]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The text of all its parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content or ())


class ChatBody(_Generation, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False


class GenerationOrder(msgspec.Struct):
    """The parsed body of a request."""

    ids: list[int]
    """Ids of the prompt."""
    max_tokens: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    is_chat: bool


def read_order(body: bytes, *, is_chat: bool, model: str, kv_tokens: int) -> GenerationOrder:
    """Parse and check a body.

    Args:
        body: JSON.
        is_chat: whether it is a body of ``/v1/chat/completions``.
        model: name of the served model.
        kv_tokens: maximum number of tokens of prompt and answer together.

    Raises:
        ApiRefusal: the body is broken, names another model, is too long, or needs a feature that
            the simulated engine does not have.
    """
    try:
        order: CompletionBody | ChatBody
        if is_chat:
            order = msgspec.json.decode(body, type=ChatBody)
        else:
            order = msgspec.json.decode(body, type=CompletionBody)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        sentence = f"The body of the request is wrong: {error}."
        raise ApiRefusal(400, sentence, "invalid_body") from None
    if order.model != model:
        sentence = f"There is no model {order.model!r}; {model!r} is served."
        raise ApiRefusal(404, sentence, "model_not_found")
    _refuse_unsupported(order)
    if isinstance(order, ChatBody):
        ids, most = tokenize(chat_text(order.messages)), order.max_completion_tokens
        most = order.max_tokens if most is None else most
        max_tokens = CHAT_MAX_TOKENS if most is None else most
    else:
        ids = tokenize(order.prompt) if isinstance(order.prompt, str) else order.prompt
        max_tokens = DEFAULT_MAX_TOKENS if order.max_tokens is None else order.max_tokens
    _check_lengths(ids, max_tokens, kv_tokens)
    usage = order.stream_options is not None and order.stream_options.include_usage
    return GenerationOrder(ids, max_tokens, order.stream, usage, order.return_token_ids, is_chat)


def chat_text(messages: list[ChatMessage]) -> str:
    """Return the prompt of a chat. If the chat goes on, the next prompt begins with this one."""
    return "".join(f"<{message.role}>{message.text}" for message in messages) + "<assistant>"


def _refuse_unsupported(order: CompletionBody | ChatBody) -> None:
    is_requested = {
        "n": order.n != 1,
        "stop": bool(order.stop),
        "tools": bool(order.tools),
        "response_format": bool(order.response_format)
        and (order.response_format or {}).get("type") != "text",
        "logprobs": bool(order.logprobs),
        "echo": isinstance(order, CompletionBody) and order.echo,
    }
    unsupported = [name for name, requested in is_requested.items() if requested]
    if unsupported:
        sentence = (
            f"The simulated engine has no {', '.join(unsupported)}; leave it out, or use a real "
            "engine."
        )
        raise ApiRefusal(400, sentence, "unsupported")


def _check_lengths(ids: list[int], max_tokens: int, kv_tokens: int) -> None:
    if not ids:
        raise ApiRefusal(400, "The prompt is empty; it needs one token or more.", "empty_prompt")
    if min(ids) < 0 or max(ids) >= 1 << 32:
        raise ApiRefusal(400, "The prompt has an id that is not a token.", "invalid_prompt")
    if max_tokens < 1:
        sentence = f"max_tokens is {max_tokens}; it must be at least 1."
        raise ApiRefusal(400, sentence, "invalid_max_tokens")
    if len(ids) + max_tokens > kv_tokens:
        refusal = too_long(len(ids), max_tokens, kv_tokens)
        raise ApiRefusal(400, refusal.sentence, refusal.limit)


class AnswerShape(msgspec.Struct):
    """Makes the messages of one answer.

    ``name``: name of the answer. ``created``: seconds since the epoch.
    """

    name: str
    created: int
    model: str
    order: GenerationOrder

    def usage(self, generated: int) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompt = len(self.order.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }

    def whole(self, text: str, ids: list[int], reason: str = "length") -> dict[str, Any]:
        """Return an answer that is not streamed.

        Args:
            text: the text of the answer.
            ids: its ids.
            reason: why it ended.
        """
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.order.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self.order.return_token_ids:
            choice["token_ids"] = ids
        kind = "chat.completion" if self.order.is_chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self.usage(len(ids))}

    def chunk(
        self, text: str, ids: list[int], *, is_first: bool, reason: str | None
    ) -> dict[str, Any]:
        """Return one part of a stream.

        Args:
            text: text that it adds.
            ids: ids that it adds.
            is_first: whether it is the first part.
            reason: why the answer ended; None: it has not ended.
        """
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.order.is_chat:
            choice["delta"] = (
                {"role": "assistant", "content": text} if is_first else ({"content": text})
            )
        else:
            choice["text"] = text
        if self.order.return_token_ids:
            choice["token_ids"] = ids
        kind = "chat.completion.chunk" if self.order.is_chat else "text_completion"
        return {**self._head(kind), "choices": [choice]}

    def usage_chunk(self, generated: int) -> dict[str, Any]:
        """Return the part of a stream that has the numbers of tokens."""
        kind = "chat.completion.chunk" if self.order.is_chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": self.usage(generated)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
