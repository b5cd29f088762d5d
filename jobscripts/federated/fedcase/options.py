"""The options of a federated training, in the file through which the server passes them to its
apps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained, and how."""

    task: str
    """The task, as ``MODULE:FACTORY``."""
    task_options: str = "{}"
    """Arguments of the factory, a JSON object."""
    name: str = "fedcase"
    """Name of the training, under which the nodes keep its samples in memory."""
    folder: str = ""
    """Folder of the state, at the server."""
    rounds: int = 100
    clients: int = 20
    """Number of clients of a round."""
    epochs: int = 1
    """Number of epochs of a client in a round."""
    cold_share: float = 0.3
    """Part of the samples outside memory that an epoch reads, above 0 to 1."""
    cache_share: float = 0.1
    """Part of the samples of a client that may be hot."""
    cache_bytes: int = 1 << 30
    """Memory of a node for hot samples, bytes."""
    rule: str = "epsilon-greedy"
    """Name of the ratio rule."""
    answer_s: float = 3600.0
    """Seconds after which the clients of a present node that does not answer count as failed."""
    seed: int = 0

    def write(self, path: Path) -> None:
        """Write them to a file."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> TrainingOptions:
        """Read them from a file.

        Raises:
            ValueError: the file cannot be read, or has other options.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"The options in {path} cannot be read: {error}.") from None

    def for_clients(self) -> dict[str, Any]:
        """Return what is sent to the nodes."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}
