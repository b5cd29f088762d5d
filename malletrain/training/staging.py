"""Copies tensors from a GPU to host memory through page-locked buffers, which are reused for the
next snapshot.

Starts all copies at once and waits for them once. Does nothing on a CPU. Tested by ``make
test-gpu``.
"""

from __future__ import annotations

from typing import Any


class Staging:
    """The page-locked buffers of one run's snapshots."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def on_host(self, value: Any) -> Any:
        """Return ``value`` with every GPU tensor in it replaced by a copy in host memory. The
        copies are valid until the next call.
        """
        copied: list[Any] = []
        staged = self._copy_to_host(value, "", copied)
        if copied:
            import torch

            for device in {tensor.device for tensor in copied}:
                torch.cuda.synchronize(device)
        return staged

    def _copy_to_host(self, value: Any, name: str, copied: list[Any]) -> Any:
        if getattr(value, "is_cuda", False):
            copied.append(value)
            return self._buffer(value, name).copy_(value.detach(), non_blocking=True)
        if type(value) is dict:
            return {k: self._copy_to_host(v, f"{name}/{k}", copied) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(
                self._copy_to_host(v, f"{name}/{i}", copied) for i, v in enumerate(value)
            )
        return value

    def _buffer(self, tensor: Any, name: str) -> Any:
        import torch

        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._buffers[name] = buffer
        return buffer
