"""How many tokens the KV cache of an engine holds, from what the engine says at ``/metrics``. Pure.

vLLM has the gauge ``vllm:cache_config_info`` with the settings of the cache as labels, one line for
each engine (https://docs.vllm.ai/en/stable/design/metrics/). Newer versions have the label
``kv_cache_size_tokens``; before, it is ``num_gpu_blocks`` times ``block_size``. Of both, the first
block is no request's.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def cache_tokens(metrics: str, slots: int) -> int | None:
    """Return the number of tokens that requests may have at once so that no cache overflows; None
    if the engine does not say it.

    A request takes whole blocks, so each of ``slots`` requests may waste all but one token of a
    block. That is not deducted beyond half the cache.

    Args:
        metrics: text of ``/metrics``.
        slots: maximum number of requests at once.
    """
    total, waste = 0, 0
    for line in _LINE.finditer(metrics):
        labels = dict(_LABEL.findall(line[1]))
        size, block = _number(labels, "kv_cache_size_tokens"), _number(labels, "block_size")
        if size is None:
            blocks = _number(labels, "num_gpu_blocks")
            size = None if blocks is None or block is None else blocks * block
        if size is None:
            return None
        total += size - (block or 0)
        waste = max(waste, slots * ((block or 1) - 1))
    if total < 1:
        return None
    return max(total - waste, total // 2, 1)


def _number(labels: dict[str, str], name: str) -> int | None:
    """Return the number in a label; None if the label is missing or ``None``."""
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
