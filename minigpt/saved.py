"""The list of saved checkpoints: one line a file, read from its header alone. Knows nothing of runs at work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minigpt.header import number, told


@dataclass(frozen=True)
class SavedCheckpoint:
    """One line of the list of checkpoints, read from the file's header alone."""

    run: str
    kind: Literal["best", "last", "example"]
    path: Path
    step: int | None
    val_loss: float | None
    size_bytes: int
    saved_at: float
    name: str  # of the run, to be shown

    @property
    def id(self) -> str:
        """What a page may send back to name this file; never a path."""
        return f"{self.run}/{self.kind}"

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{self.name}/{self.kind}"


def describe(path: Path, run: str, kind: Literal["best", "last", "example"], name: str) -> SavedCheckpoint | None:
    """Read one file's line of the list, or None if there is no readable checkpoint of ours."""
    try:
        metadata, status = told(path), path.stat()
    except OSError:
        return None
    if not metadata:
        return None
    step, loss = metadata.get("step"), number(metadata.get("val_loss"))
    return SavedCheckpoint(run, kind, path, step if type(step) is int else None, loss, status.st_size, status.st_mtime, name)
