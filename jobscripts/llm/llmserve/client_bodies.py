"""Reads the request bodies of clients: checks the fields of the OpenAI API, and tokenizes the
prompt. Pure.

Fields that only an engine understands are passed on unchanged. ``openai_messages`` has the bodies
that the simulated engine reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmserve.generation import GenerationRequest
from llmserve.openai_messages import CHAT_MAX_TOKENS, DEFAULT_MAX_TOKENS, ApiRefusal
from llmserve.oversize import too_long
from llmserve.text import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)
"""Paths of requests that generate."""
NOT_CONTINUABLE = (
    "best_of",
    "echo",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
    "suffix",
    "tools",
    "top_logprobs",
    "use_beam_search",
)
"""Fields with which no answer can be continued after a loss. Others may prevent it, too, see
:attr:`ClientOrder.continuable`.
"""
GENERATED_ONLY = ("bad_words", "frequency_penalty", "presence_penalty", "repetition_detection")
"""Fields that make engines evaluate generated ids but not the prompt, which contains the earlier
part of a continued answer. (``repetition_penalty`` evaluates both.) With these fields only streams
are continued, because their clients already have the beginning.
"""
READ_HERE = (
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "n",
    "prompt",
    "return_token_ids",
    "stream",
    "stream_options",
    "user",
    *NOT_CONTINUABLE,
)
"""Fields that an engine does not get, or gets in another form, if the prompt is ids."""


@dataclass(frozen=True)
class ClientOrder:
    """The parsed body of a client's request."""

    path: str
    """One of :data:`PATHS`."""
    prompt: list[int]
    """Ids of the prompt."""
    max_tokens: int
    """Maximum number of ids to generate for each choice."""
    choices: int = 1
    """Number of answers that the engine generates for it."""
    stream: bool = False
    include_usage: bool = False
    """Whether the stream ends with the numbers of tokens."""
    return_token_ids: bool = False
    continuable: bool = True
    """Whether it is submitted as ids, so that its answer can be continued after a loss. If not, its
    unchanged body goes to an engine
    (:meth:`llmserve.live_dispatcher.LiveDispatcher.submit_body`)."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Further fields for the engine, such as ``temperature``, and ``stop``."""
    body: dict[str, Any] = field(default_factory=dict)
    """The whole body, with ``max_tokens``: engines would generate more by default."""

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of the prompt and all choices."""
        return len(self.prompt) + self.max_tokens * self.choices

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat."""
        return self.path == CHAT

    def request(
        self, name: str, user: str, application: str = "", **more: Any
    ) -> GenerationRequest:
        """Return the request for the dispatcher.

        Args:
            name: a name that is unique among the requests that have not ended.
            user: user of the request.
            application: an application that the operator has declared; empty: none.
            more: further fields of the request.
        """
        return GenerationRequest(
            name,
            user,
            self.prompt,
            self.max_tokens,
            application=application,
            choices=self.choices,
            stream=self.stream and self.continuable,
            continuable=self.continuable,
            **more,
        )


def read_client_body(
    body: bytes,
    path: str,
    *,
    models: Collection[str],
    tokenizer: Tokenizer,
    max_request_tokens: int | None = None,
) -> ClientOrder:
    """Parse and check a body.

    Args:
        body: JSON.
        path: one of :data:`PATHS`.
        models: names of the models that are served.
        tokenizer: the tokenizer of the model.
        max_request_tokens: maximum of prompt and answer together; None: no limit.

    Raises:
        ApiRefusal: the body is broken, of another model or too long, or a field is wrong.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _wrong(f"The body is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise _wrong("The body is not a JSON object.")
    _check_model(fields.get("model"), models)
    ids = _chat_ids(fields, tokenizer) if path == CHAT else _prompt_ids(fields, tokenizer)
    max_tokens, choices = _max_tokens(fields, path == CHAT), _choices(fields)
    tokens = max_tokens * choices
    if max_request_tokens is not None and len(ids) + tokens > max_request_tokens:
        refusal = too_long(len(ids), tokens, max_request_tokens)
        raise ApiRefusal(400, refusal.sentence, refusal.limit)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _wrong("stream_options is not an object.")
    parameters = {name: value for name, value in fields.items() if name not in READ_HERE}
    _check_stop(parameters.get("stop"))
    return ClientOrder(
        path,
        ids,
        max_tokens,
        choices,
        _flag(fields, "stream"),
        bool(options.get("include_usage")),
        _flag(fields, "return_token_ids"),
        _is_continuable(fields),
        parameters,
        {**fields, "max_tokens": max_tokens},
    )


def _wrong(sentence: str, code: str = "invalid_body") -> ApiRefusal:
    return ApiRefusal(400, sentence, code)


def _check_model(model: Any, models: Collection[str]) -> None:
    if not isinstance(model, str):
        raise _wrong("The body names no model.")
    if model not in models:
        served = ", ".join(sorted(models)) or "none"
        sentence = f"There is no model {model!r}; served: {served}."
        raise ApiRefusal(404, sentence, "model_not_found")


def _prompt_ids(fields: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list) and all(
        type(token) is int and 0 <= token < 1 << 32 for token in prompt
    ):
        ids = prompt
    elif isinstance(prompt, list):
        raise _wrong(
            "A request has one prompt: text, or a list of ids from 0 to 2^32 - 1. Send several "
            "prompts as several requests."
        )
    else:
        raise _wrong("The body has no prompt.")
    if not ids:
        raise _wrong("The prompt is empty; it needs one token or more.", "empty_prompt")
    return ids


def _chat_ids(fields: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("The body has no messages.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(f"Message {number} has no role.")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not (content is None or isinstance(content, (str, list))):
            raise _wrong(f"The content of message {number} is neither text nor a list of parts.")
        if any(not isinstance(part, dict) or part.get("type", "text") != "text" for part in parts):
            raise _wrong(f"Message {number} has parts that are not text; send only text.")
    try:
        ids = tokenizer.encode_chat(messages)
    except ValueError as error:
        raise _wrong(f"The model's chat template refuses the messages: {error}") from None
    if not ids:
        raise _wrong("The prompt is empty; it needs one token or more.", "empty_prompt")
    return ids


def _max_tokens(fields: Mapping[str, Any], is_chat: bool) -> int:
    value = fields.get("max_completion_tokens") if is_chat else None
    value = fields.get("max_tokens") if value is None else value
    if value is None:
        return CHAT_MAX_TOKENS if is_chat else DEFAULT_MAX_TOKENS
    if type(value) is not int or value < 1:
        raise _wrong(
            f"max_tokens is {value!r}; it must be a whole number, at least 1.",
            "invalid_max_tokens",
        )
    return value


def _choices(fields: Mapping[str, Any]) -> int:
    """Return the larger of ``n`` and ``best_of``."""
    choices = 1
    for name in ("n", "best_of"):
        value = fields.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise _wrong(f"{name} is {value!r}; it must be a whole number, at least 1.")
        choices = max(choices, value)
    return choices


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not (value is None or isinstance(value, bool)):
        raise _wrong(f"{name} is {value!r}; it must be true or false.")
    return bool(value)


def _check_stop(stop: Any) -> None:
    texts = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(isinstance(text, str) for text in texts):
        raise _wrong("stop is neither text nor a list of texts.")


def _is_continuable(fields: Mapping[str, Any]) -> bool:
    if fields.get("n") not in (None, 1):
        return False
    # logprobs = 0 requests those of the chosen tokens; only None and False request none
    if fields.get("logprobs") is not None and fields["logprobs"] is not False:
        return False
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        return False
    exact = () if fields.get("stream") else GENERATED_ONLY
    names = (*NOT_CONTINUABLE, *exact)
    return not any(fields.get(name) for name in names if name != "logprobs")
