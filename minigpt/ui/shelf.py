"""What can be chosen on the Checkpoint tab, and how a chosen file is opened and writes. Knows nothing of how it is shown."""

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch

from minigpt.checkpoint import Checkpoint, read_checkpoint
from minigpt.errors import CheckpointError
from minigpt.foreign import open_foreign
from minigpt.generate import generate, usual_prompt, write
from minigpt.runs import RunManager
from minigpt.saved import SavedCheckpoint, describe
from minigpt.ui import feed

UPLOADED = "upload"
MAX_NEW_TOKENS, MAX_PROMPT = 400, 2000
LIST_COLUMNS = ["run", "kind", "step", "val. loss", "size", "saved (UTC)"]


def saved(manager: RunManager) -> list[SavedCheckpoint]:
    """List what can be chosen: all runs' checkpoints, then the example."""
    example = describe(feed.EXAMPLE, "example", "example")
    return [*manager.checkpoints(), *([example] if example else [])]


def listed(manager: RunManager) -> pd.DataFrame:
    """Return the list as a table."""
    rows = [
        [
            item.run,
            item.kind,
            "" if item.step is None else f"{item.step:,}",
            "" if item.val_loss is None else f"{item.val_loss:.3f}",
            f"{item.size_bytes / 1e6:.1f} MB",
            "" if item.kind == "example" else f"{pd.Timestamp(item.saved_at, unit='s'):%d %b %H:%M}",
        ]
        for item in saved(manager)
    ]
    return pd.DataFrame(rows, columns=LIST_COLUMNS)


def find(manager: RunManager, chosen: str) -> SavedCheckpoint:
    """Return the listed checkpoint with this id; an id is never used as a path.

    Raises:
        CheckpointError: there is none.
    """
    run, _, kind = chosen.rpartition("/")
    item = describe(feed.EXAMPLE, "example", "example") if chosen == "example/example" else manager.checkpoint(run, kind)
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


def opened(path: Path) -> Checkpoint:
    """Load a file for writing: one of ours, or weights of the same shape by others.

    Raises:
        CheckpointError: the file cannot write.
    """
    return read_checkpoint(path) if describe(path, "", "example") else open_foreign(path)


def written(checkpoint: Checkpoint, prompt: str, length: int, temperature: float = 0.8, seed: int = 0) -> Iterator[str]:
    """Yield the text as it grows. Without a vocabulary prompt and text are ids of tokens, apart by spaces.

    Raises:
        CheckpointError: the prompt is no list of ids where one is needed.
    """
    model, start = checkpoint.model, prompt[:MAX_PROMPT] or first_prompt(checkpoint)
    if checkpoint.tokenizer is not None:
        yield from write(model, checkpoint.tokenizer, start, length, temperature=temperature, seed=seed)
        return
    ids = [int(word) if word.isdecimal() else -1 for word in re.split(r"[\s,]+", start.strip())]
    if not all(0 <= index < checkpoint.config.vocab_size for index in ids):
        last = checkpoint.config.vocab_size - 1
        raise CheckpointError(f"the prompt must be ids from 0 to {last:,}, such as 1 2 3, because this file holds no vocabulary")
    generator = torch.Generator().manual_seed(seed)
    for index in generate(model, ids, length, temperature=temperature, generator=generator, never=()):
        ids.append(index)
        yield " ".join(map(str, ids))


def first_prompt(checkpoint: Checkpoint) -> str:
    """Return what to write from when nobody said."""
    return usual_prompt(checkpoint.tokenizer) if checkpoint.tokenizer is not None else "0"
