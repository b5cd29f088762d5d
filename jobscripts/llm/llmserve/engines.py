"""Engines that ``llmserve serve`` knows: their command lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROFILES: Mapping[str, tuple[str, ...]] = {
    "simulated": (
        "{python}",
        "-m",
        "llmserve.simulated_server",
        "--socket",
        "{socket}",
        "--model",
        "{name}",
        "--slots",
        "{slots}",
        "--kv-tokens",
        "{kv_tokens}",
    ),
    # https://docs.vllm.ai/en/stable/cli/serve/, from 0.10.2 on (return_token_ids)
    "vllm": (
        "{python}",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--uds",
        "{socket}",
        "--model",
        "{model}",
        "--served-model-name",
        "{name}",
        "--max-num-seqs",
        "{slots}",
        "--tensor-parallel-size",
        "{gpus}",
        # Its log of health requests would replace the last lines, which are shown when it ends.
        "--disable-uvicorn-access-log",
    ),
}
"""Name → words of the command, with the fields of :func:`engine_command`."""
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "simulated": ("fastapi", "uvicorn"),
    "vllm": ("vllm",),
}
"""Name → packages that the Python of a node needs for it, beside llmserve."""
INSTALLATIONS: Mapping[str, str] = {
    "simulated": "pip install -e 'jobscripts/llm[serve]' (in the clone)",
    "vllm": "pip install vllm",
}
"""Name → how they are installed."""
THREADS = "OMP_NUM_THREADS"
CHOSEN_THREADS = "MALLETRAIN_THREADS"
"""Variable that has the number of threads if MalleTrain has chosen it (docs/environment.md)."""


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine: that of the replica without a number of threads chosen
    by MalleTrain. vLLM takes such a number for the user's and computes with that many threads,
    which keep processors busy between the steps of a GPU. Without it vLLM chooses a number
    (``set_torch_threads_for_runtime`` in vllm/utils/torch_utils.py).
    """
    engine = dict(environment)
    chosen = engine.pop(CHOSEN_THREADS, "")
    if chosen and engine.get(THREADS) == chosen:
        del engine[THREADS]
    return engine


def engine_command(words: Sequence[str], fields: Mapping[str, str]) -> list[str]:
    """Return a command with its fields filled in. Other braces stay.

    Args:
        words: of the command.
        fields: ``socket``, ``model`` (path or name), ``name`` (as clients call it), ``slots``,
            ``kv_tokens``, ``gpus`` (of the lease on this node, at least 1) and ``python`` → value.

    Raises:
        ValueError: the command has no ``{socket}``, so that the engine could not be reached.
    """
    if not any("{socket}" in word for word in words):
        raise ValueError(
            "The command of an engine needs {socket}, the path of the Unix socket on which it is "
            f"to listen; got: {' '.join(words) or '(nothing)'}."
        )
    filled = []
    for word in words:
        for name, value in fields.items():
            word = word.replace("{" + name + "}", value)
        filled.append(word)
    return filled
