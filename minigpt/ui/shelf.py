"""What can be chosen on the Checkpoint tab, and how a chosen file is opened and writes. Knows nothing of how it is shown."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from minigpt.checkpoint import Checkpoint
from minigpt.config import TEMPERATURE
from minigpt.errors import CheckpointError, ConfigError
from minigpt.generate import first_prompt, write
from minigpt.runs import RunManager
from minigpt.saved import SavedCheckpoint, describe
from minigpt.ui import feed, words

UPLOADED = "upload"
MAX_NEW_TOKENS, USUAL_LENGTH, MAX_PROMPT = 400, 80, 2000
LIST_COLUMNS = ["run", "kind", "step", "val. loss", "size", "saved (UTC)"]


def saved(manager: RunManager) -> list[SavedCheckpoint]:
    """List what can be chosen: all runs' checkpoints, then the example. A name that two runs have is told with their folders."""
    example = describe(feed.EXAMPLE, "example", "example", "example")
    items = [*manager.checkpoints(), *([example] if example else [])]
    runs = Counter(name for name, _ in {(item.name, item.run) for item in items})
    return [dataclasses.replace(item, name=f"{item.name} ({item.run})") if runs[item.name] > 1 else item for item in items]


def first(items: Sequence[SavedCheckpoint]) -> SavedCheckpoint:
    """Return which of some checkpoints, the best before the last, is to be opened first: not one that has learnt nothing, if there is another."""
    return next((item for item in items if item.step), items[0])


def listed(manager: RunManager) -> pd.DataFrame:
    """Return the list as a table."""
    rows = [
        [
            item.name,
            item.kind,
            "" if item.step is None else f"{item.step:,}",
            "" if item.val_loss is None else f"{item.val_loss:.3f}",
            words.size(item.size_bytes),
            "" if item.kind == "example" else f"{pd.Timestamp(item.saved_at, unit='s'):%d %b %H:%M}",
        ]
        for item in saved(manager)
    ]
    return pd.DataFrame(rows, columns=LIST_COLUMNS)


def id_of(manager: RunManager, name: object, kind: object) -> str:
    """Return the id of the checkpoint in a row of the list, whose names are all different."""
    return next((item.id for item in saved(manager) if (item.name, item.kind) == (name, kind)), f"{name}/{kind}")


def find(manager: RunManager, chosen: str) -> SavedCheckpoint:
    """Return the listed checkpoint with this id; an id is never used as a path.

    Raises:
        CheckpointError: there is none.
    """
    run, _, kind = chosen.rpartition("/") if isinstance(chosen, str) else ("", "", "")
    item = describe(feed.EXAMPLE, "example", "example", "example") if chosen == "example/example" else manager.checkpoint(run, kind)
    if item is not None:
        return item
    raise CheckpointError("this checkpoint is no longer there; choose another from the list")


def path_of(manager: RunManager, chosen: str, upload: str | None) -> Path:
    """Return where the chosen file is.

    Raises:
        CheckpointError: nothing is chosen, or the file is gone.
    """
    if not chosen:
        raise CheckpointError("choose a checkpoint from the list first")
    if chosen == UPLOADED and not upload:
        raise CheckpointError("the upload is gone; drop the file again")
    return Path(upload) if chosen == UPLOADED and upload else find(manager, chosen).path


def title(manager: RunManager, chosen: str) -> str:
    """Return what people call the chosen file: its run's name, if a person gave it one."""
    return "your upload" if chosen == UPLOADED else find(manager, chosen).title


def delete(manager: RunManager, chosen: str) -> None:
    """Remove one listed checkpoint of a run that has ended.

    Raises:
        MiniGPTError: it is not there, is the example, or its run is at work.
        OSError: it cannot be removed.
    """
    item = find(manager, chosen)
    if item.kind == "example":
        raise CheckpointError("the example belongs to the program and stays")
    manager.delete_checkpoint(item)


def written(checkpoint: Checkpoint, prompt: str, length: int, temperature: float = TEMPERATURE, seed: int = 0) -> Iterator[str]:
    """Yield the text as it grows; see `write` and `check_wish`."""
    check_wish(prompt, length, temperature, seed)
    start = prompt[:MAX_PROMPT] or first_prompt(checkpoint)
    return write(checkpoint.model, checkpoint.tokenizer, start, length, temperature=temperature, seed=seed)


def check_wish(prompt: object, length: object, temperature: object, seed: object) -> None:
    """Check what a model is asked to write, by whomever.

    Raises:
        ConfigError: with the first value that cannot be.
    """
    if not isinstance(prompt, str):
        raise ConfigError(f"prompt is {str(prompt)[:40]}; it must be text: leave it empty for the usual one")
    _check("max_tokens", length, int, 1, MAX_NEW_TOKENS)
    _check("temperature", temperature, float, 0, 5)
    _check("seed", seed, int, 0, 2**32 - 1)


def _check(name: str, value: object, kind: type[int] | type[float], low: float, high: float) -> None:
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high:  # type: ignore[operator]
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} is {str(value)[:40]}; it must be {what} from {low:,} to {high:,}")
