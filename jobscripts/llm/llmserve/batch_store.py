"""The folder of a batch on the shared file system: which process dispatches, and which requests are
answered.

* ``manifest.json``: which input and model the folder belongs to. A folder of another batch is
  refused.
* ``epoch-N.json``: a link that only one process can make. That process dispatches until another one
  has made the next link.
* ``segment-N.jsonl``: the records of the dispatcher of epoch N, which alone writes it: answers,
  errors, and the ids of incomplete answers. A last line without a line end is an interrupted write.
* ``status.json``: the newest progress. ``done.json``: it exists if the output is complete.

The output is made from all segments. If a request has several answers, the first one counts, so a
dispatcher that still writes shortly after it was replaced does no harm.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

FORMAT = 1


class BatchFolderError(RuntimeError):
    """The folder of a batch cannot be used; the message says why."""


class Manifest(msgspec.Struct, kw_only=True):
    """Which batch a folder belongs to."""

    format: int = FORMAT
    input: str
    """Path of the input."""
    digest: str
    """SHA-256 of the input."""
    model: str
    """Path or name of the model with which the engine is started."""
    name: str
    """Name of the model in the requests."""
    requests: int
    """Number of requests."""
    created: int
    """Seconds since the epoch."""
    job: str = ""
    """Id of the newest job that works on the batch."""


class Epoch(msgspec.Struct):
    """A period in which one process dispatches."""

    number: int
    owner: str
    """Address of its replica."""


class BatchRecord(msgspec.Struct, omit_defaults=True):
    """One line of a segment."""

    index: int
    """Number of the request, from 0."""
    answer: msgspec.Raw = msgspec.Raw(b"")
    """Line of the output; empty: none."""
    error: msgspec.Raw = msgspec.Raw(b"")
    """Line of the file of errors; empty: none."""
    start: int = 0
    """Number of ids before :attr:`ids`."""
    ids: list[int] = []
    """Ids of an incomplete answer."""

    @property
    def has_answer(self) -> bool:
        """Whether it has the line of an answer."""
        return bool(bytes(self.answer))

    @property
    def is_end(self) -> bool:
        """Whether it has the line of an answer or of an error."""
        return self.has_answer or bool(bytes(self.error))


@dataclass
class BatchProgress:
    """The progress of a batch according to its segments."""

    answered: set[int] = field(default_factory=set)
    """Indices of requests with an answer."""
    failed: set[int] = field(default_factory=set)
    """Indices of requests with an error."""
    generated: dict[int, list[int]] = field(default_factory=dict)
    """Index of an incomplete request → its generated ids."""


class BatchFolder:
    """The folder of one batch.

    Args:
        output: path of the output; the folder is ``OUTPUT.parts`` beside it.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.errors = output.with_name(f"{output.stem}.errors{output.suffix}")
        """Path of the file with a line for each request without an answer."""
        self.path = output.with_name(f"{output.name}.parts")

    # --- manifest ---

    def create(self, manifest: Manifest) -> bool:
        """Create the folder, or continue one of the same batch. Return whether it existed.

        Raises:
            BatchFolderError: it belongs to another batch.
            OSError: it cannot be written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = self.manifest()
        if before is None:
            self._replace("manifest.json", msgspec.json.encode(manifest))
            return False
        if (before.digest, before.model, before.name) != (
            manifest.digest,
            manifest.model,
            manifest.name,
        ):
            what = "input" if before.digest != manifest.digest else "model"
            raise BatchFolderError(
                f"{self.path} has the answers of another {what} ({before.input}, model "
                f"{before.name}). Name another output, or delete the folder to start again."
            )
        return True

    def manifest(self) -> Manifest | None:
        """Return the manifest; None if there is none."""
        try:
            return msgspec.json.decode((self.path / "manifest.json").read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise BatchFolderError(f"{self.path} is not the folder of a batch: {error}.") from None

    def set_job(self, job: str) -> None:
        """Record the job that works on the batch."""
        manifest = self.manifest()
        assert manifest is not None
        manifest.job = job
        self._replace("manifest.json", msgspec.json.encode(manifest))

    # --- epochs ---

    def newest_epoch(self) -> Epoch | None:
        """Return the newest epoch; None if no process has dispatched yet."""
        names = sorted(path.name for path in self.path.glob("epoch-*.json"))
        if not names:
            return None
        return msgspec.json.decode((self.path / names[-1]).read_bytes(), type=Epoch)

    def claim(self, owner: str) -> Epoch | None:
        """Begin the next epoch. Return it; None if another process has begun it meanwhile."""
        newest = self.newest_epoch()
        epoch = Epoch(1 if newest is None else newest.number + 1, owner)
        draft = self.path / f".{uuid.uuid4().hex}"
        _write_synced(draft, msgspec.json.encode(epoch))
        try:
            os.link(draft, self._epoch_path(epoch.number))
        except FileExistsError:
            return None
        finally:
            draft.unlink()
        _sync_folder(self.path)
        return epoch

    def is_current(self, epoch: Epoch) -> bool:
        """Whether no process has begun a later epoch."""
        return not self._epoch_path(epoch.number + 1).exists()

    # --- segments ---

    def append(self, epoch: Epoch, records: list[BatchRecord]) -> bool:
        """Append to the segment of an epoch; the records are on disk when it returns. Returns
        whether the epoch is current; if it is not, nothing is written.
        """
        if not self.is_current(epoch):
            return False
        if not records:
            return True
        path = self._segment_path(epoch.number)
        is_new = not path.exists()
        with path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self.path)
        return True

    def progress(self) -> BatchProgress:
        """Return the progress in all segments, without the texts."""
        progress = BatchProgress()
        for record in self._records():
            index = record.index
            if index in progress.answered or index in progress.failed:
                continue
            if record.is_end:
                (progress.answered if record.has_answer else progress.failed).add(index)
                progress.generated.pop(index, None)
            else:
                ids = progress.generated.setdefault(index, [])
                if record.start <= len(ids):
                    ids[record.start :] = record.ids
        return progress

    def merge(self, requests: int) -> tuple[int, int]:
        """Make the output from all segments, in the order of the input. Return the numbers of
        answers and of errors.

        Raises:
            BatchFolderError: a request has neither.
        """
        places: dict[int, tuple[Path, int]] = {}
        for path, offset, record in self._placed_records():
            if record.is_end:
                places.setdefault(record.index, (path, offset))
        missing = requests - len(places)
        if missing:
            raise BatchFolderError(f"{missing} requests of {self.output} have no answer yet.")
        counts = {"answer": 0, "error": 0}
        drafts = [self.path / f".{uuid.uuid4().hex}" for _ in range(2)]
        files = {path: path.open("rb") for path, _ in places.values()}
        with drafts[0].open("wb") as answers, drafts[1].open("wb") as errors:
            for index in range(requests):
                path, offset = places[index]
                files[path].seek(offset)
                record = msgspec.json.decode(files[path].readline(), type=BatchRecord)
                if record.has_answer:
                    answers.write(bytes(record.answer) + b"\n")
                    counts["answer"] += 1
                else:
                    errors.write(bytes(record.error) + b"\n")
                    counts["error"] += 1
            for file in (answers, errors):
                file.flush()
                os.fsync(file.fileno())
        for source in files.values():
            source.close()
        if counts["error"]:
            os.replace(drafts[1], self.errors)
        else:
            drafts[1].unlink()
        os.replace(drafts[0], self.output)
        _sync_folder(self.output.parent)
        return counts["answer"], counts["error"]

    # --- status ---

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace the newest progress."""
        self._replace("status.json", msgspec.json.encode(status), synced=False)

    def status(self) -> dict[str, Any]:
        """Return the newest progress; empty if there is none."""
        try:
            value = msgspec.json.decode((self.path / "status.json").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return {}
        return value if isinstance(value, dict) else {}

    def finish(self, status: dict[str, Any]) -> None:
        """Record that the output is complete."""
        self._replace("done.json", msgspec.json.encode({**status, "at": time.time()}))

    @property
    def is_done(self) -> bool:
        """Whether the output is complete."""
        return (self.path / "done.json").exists()

    # --- inside ---

    def _records(self) -> Iterator[BatchRecord]:
        for _, _, record in self._placed_records():
            yield record

    def _placed_records(self) -> Iterator[tuple[Path, int, BatchRecord]]:
        for path in sorted(self.path.glob("segment-*.jsonl")):
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        yield path, offset, msgspec.json.decode(line, type=BatchRecord)
                    offset += len(line)

    def _epoch_path(self, number: int) -> Path:
        return self.path / f"epoch-{number:06d}.json"

    def _segment_path(self, number: int) -> Path:
        return self.path / f"segment-{number:06d}.jsonl"

    def _replace(self, name: str, content: bytes, *, synced: bool = True) -> None:
        draft = self.path / f".{uuid.uuid4().hex}"
        if synced:
            _write_synced(draft, content)
        else:
            draft.write_bytes(content)
        os.replace(draft, self.path / name)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
