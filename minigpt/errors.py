"""The errors MiniGPT raises on purpose, each carrying one sentence for a person.

A message says what is wrong, the value found, what is allowed and what to do. Turning an error into something a person sees is the job of the
page and of the command line; nothing here prints.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MiniGPTError(Exception):
    """Base of every error whose message may be shown to a person as it stands."""


class ConfigError(MiniGPTError):
    """Settings that cannot be trained with; the message lists all problems, one sentence a line."""


class DataError(MiniGPTError):
    """A text that cannot be read or is too short to train on."""


class CheckpointError(MiniGPTError):
    """A file that is not a checkpoint, is damaged, or does not fit its own description."""


class RunStopped(MiniGPTError):  # noqa: N818  not a fault: the run was asked to end
    """A stop was asked for before there was a model to return."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put a file's name before what is wrong with it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
