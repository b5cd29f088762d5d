"""Flags from the agent to the workers on its node: one memory-mapped file for each assignment.

The file has 64 bytes (path in ``MALLETRAIN_FLAGS``) and both sides map it: eight unsigned 64-bit
integers in the machine's byte order, since both ends run on one machine. ``[0]`` is magic and
version, ``[1]`` the number of the drain request (0: none), ``[2]`` the expected time until a node
is lost, milliseconds (0: none expected), ``[3]`` the global batch that suits the job's nodes (0:
unknown). A file next to it, written before the number, names the
nodes that get the state after a drain. Standard library only, because training scripts import it.
"""

from __future__ import annotations

import json
import math
import mmap
import os

FLAGS_BYTES = 64
_MAGIC = int.from_bytes(b"MTFLAG\x00\x01", "big")
_DRAIN = 1
_LOSS = 2
_BATCH = 3
_HEIRS = ".heirs"


class FlagsWriter:
    """The agent's end of the flags file, created by it for one assignment (``path`` must not be
    shared between assignments).

    The agent resets the drain request to 0 before every new round, because a worker serves any
    number that it finds at its first step.

    Raises:
        OSError: when the file cannot be created.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Always a new file, never truncated or rewritten in place: SIGBUS would kill a reader that
        # has the old one mapped.
        temporary = f"{path}.{os.getpid()}.tmp"
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        try:
            os.write(fd, b"\0" * FLAGS_BYTES)
            self._map = mmap.mmap(fd, FLAGS_BYTES)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")
        self._words[0] = _MAGIC
        os.replace(temporary, path)

    def request_drain(self, number: int, heirs: tuple[str, ...] = ()) -> None:
        """Ask for a snapshot and a wait at the next step boundary.

        Args:
            number: increases with every request; 0 withdraws the request.
            heirs: addresses of the keepers of the remaining nodes, the first rank's first; empty:
                the snapshot is to be on disk.
        """
        if number:
            temporary = f"{self.path}{_HEIRS}.tmp"
            try:
                with open(temporary, "w", encoding="utf-8") as file:
                    json.dump([number, *heirs], file)
                os.replace(temporary, self.path + _HEIRS)
            except (
                OSError
            ):  # the node's disk is full: without heirs the snapshot goes to the shared disk
                pass
        self._words[_DRAIN] = (
            number  # one aligned 8-byte store: a reader sees the old number or the new one
        )

    def expect_loss(self, in_s: float) -> None:
        """Set the mean time until a node of the job is lost, seconds; infinite: no loss is
        expected."""
        self._words[_LOSS] = max(1, int(1e3 * min(in_s, 1e9))) if in_s < math.inf else 0

    def advise_batch(self, size: int) -> None:
        """Set the global batch that suits the job's nodes, samples."""
        self._words[_BATCH] = size

    def close(self) -> None:
        """Unmap and remove the file. Workers that have it mapped keep reading its last content."""
        self._words.release()
        self._map.close()
        for path in (self.path, self.path + _HEIRS):
            try:
                os.unlink(path)
            except OSError:
                pass


class FlagsReader:
    """The worker's end of the flags file.

    Raises:
        OSError: when the file cannot be opened.
        ValueError: when it is not a flags file of this version.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        fd = os.open(path, os.O_RDONLY)
        try:
            if os.fstat(fd).st_size != FLAGS_BYTES:
                raise ValueError(f"The flags file {path} is not {FLAGS_BYTES} bytes long.")
            self._map = mmap.mmap(fd, FLAGS_BYTES, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")
        if self._words[0] != _MAGIC:
            self.close()
            raise ValueError(
                f"The flags file {path} is of another version of malletrain than this training "
                "script's."
            )

    def drain_request(self) -> int:
        """Return the number of the current drain request, 0 if there is none. Takes about 100
        ns.
        """
        return self._words[_DRAIN]

    def loss_expected_ms(self) -> int:
        """Return the expected time until the job loses a node, milliseconds; 0: no loss is
        expected."""
        return self._words[_LOSS]

    def advised_batch(self) -> int:
        """Return the global batch that suits the job's nodes, samples; 0: unknown."""
        return self._words[_BATCH]

    def heirs(self, number: int) -> tuple[str, ...]:
        """Return the nodes that get the state after the drain ``number``: see
        :meth:`FlagsWriter.request_drain`."""
        try:
            with open(self.path + _HEIRS, encoding="utf-8") as file:
                request, *heirs = json.load(file)
        except (OSError, ValueError, TypeError):
            return ()
        return tuple(map(str, heirs)) if request == number else ()

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._map.close()
