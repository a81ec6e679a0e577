"""Strict reading of a safetensors header, and the two guards that any text from a stranger's file passes first.

A safetensors file is a length, a JSON header and the tensors' bytes; nothing in it can run. The header is still a stranger's: its size, its
numbers and its names are checked here before anything is believed. This module knows the container and not what a checkpoint means; it reads
no tensor and never imports torch.
"""

import json
import math
import struct
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minigpt.errors import CheckpointError

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 8
MAX_NUMBER_CHARACTERS = 40  # a 128 bit generator state has 39 digits; nothing honest is longer
NAME_LIMIT = 200
METADATA_KEY = "minigpt"
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("C128",), 16),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header declares it; `begin` and `end` count bytes from the header's `data_start`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """The length of the tensor's data in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A header whose tensors are known to fill the file exactly, each byte belonging to one tensor."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    size_bytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at `path`; no tensor is read.

    Raises:
        CheckpointError: The file cannot be read, or it breaks a rule of the format or one of our limits.
    """
    try:
        with path.open("rb") as file:
            return read_header_of(file)
    except FileNotFoundError:
        raise CheckpointError("There is no such file; it may have been moved or deleted.") from None
    except OSError as error:
        raise CheckpointError(f"This file cannot be read ({error.strerror or type(error).__name__}).") from None


def read_header_of(file: BinaryIO) -> Header:
    """Read and check the header of an open, seekable binary file, whatever its position.

    Raises:
        CheckpointError: The content breaks a rule of the format or one of our limits.
    """
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError("This safetensors file is cut short: it has no header.")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise CheckpointError(f"This safetensors header is cut short, or larger than {MAX_HEADER_BYTES >> 20} MB.")
    declared = strict_json(file.read(length), "header")
    if not isinstance(declared, dict):
        raise CheckpointError("This safetensors header is not a list of named tensors.")
    metadata = declared.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("This safetensors header has metadata that is not text.")
    if len(declared) > MAX_TENSORS:
        raise CheckpointError(f"This file declares too many tensors: {len(declared):,}; at most {MAX_TENSORS:,} are read.")
    tensors = {name: _entry(name, value) for name, value in declared.items()}
    _check_layout(tensors, size - 8 - length)
    return Header(tensors, metadata, 8 + length, size)


def our_metadata(header: Header) -> dict[str, object] | None:
    """Return what MiniGPT wrote into the header, or None for a file that MiniGPT did not write.

    The result is plain JSON with finite numbers; its keys and values are still a stranger's and are not checked here.

    Raises:
        CheckpointError: The entry is there but is not a JSON object.
    """
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return None
    value = strict_json(text, "metadata")
    if not isinstance(value, dict):
        raise CheckpointError("This file's metadata is not a set of named values.")
    return value


def strict_json(data: bytes | str, what: str) -> object:
    """Parse JSON from a stranger: finite numbers of sane length, no key twice, no nesting that exhausts the stack.

    Args:
        data: The JSON, as UTF-8 or text.
        what: What it is to the reader of an error, such as "header".

    Raises:
        CheckpointError: The text is not such JSON.
    """
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            duplicates.append(what)
        return result

    try:
        value: object = json.loads(data, object_pairs_hook=unique, parse_constant=_refuse_constant, parse_int=_bounded_int, parse_float=_finite_float)
    except RecursionError:
        raise CheckpointError(f"This file's {what} is nested too deep.") from None
    except ValueError:
        raise CheckpointError(f"This file's {what} is not valid JSON.") from None
    if duplicates:
        raise CheckpointError(f"This file's {what} names the same thing twice.")
    return value


def clean(value: object, limit: int = NAME_LIMIT, *, lines: bool = False) -> str:
    """Make a value from a file safe to show: at most `limit` characters, none of them control, bidirectional or surrogate.

    Only scalars are spelled out; anything else is named by its kind, because writing out a nested value can take for ever.

    Args:
        value: Any value; text is kept as far as it is harmless.
        limit: The most characters kept; a cut ends in an ellipsis.
        lines: Keep line breaks and tabs, for text shown as a block.
    """
    if isinstance(value, str):
        text = value
    elif isinstance(value, int) and abs(value) >= 2**63:
        text = "(a very large number)"
    elif value is None or isinstance(value, (int, float)):
        text = str(value)
    else:
        text = f"({type(value).__name__})"
    kept = "\n\t" if lines else ""
    shown = "".join(c if c in kept or unicodedata.category(c)[0] != "C" else "\ufffd" for c in text[:limit])
    return shown + "…" if len(text) > limit else shown


def _entry(name: str, declared: object) -> TensorEntry:
    shown = clean(name, 60)
    if not isinstance(declared, dict) or not isinstance(dtype := declared.get("dtype"), str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"Tensor {shown}: unknown dtype in the header.")
    shape = _whole_numbers(declared.get("shape"))
    if shape is None or len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise CheckpointError(f"Tensor {shown} has an impossible shape.")
    offsets = _whole_numbers(declared.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(f"Tensor {shown}: shape and offsets disagree.")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _whole_numbers(value: object) -> list[int] | None:
    # `type(...) is int` and not isinstance: JSON's true must not pass for 1.
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        return None
    return value


def _check_layout(tensors: dict[str, TensorEntry], data_bytes: int) -> None:
    reached = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            raise CheckpointError(f"Tensor {clean(name, 60)}: its offset leaves a hole or an overlap.")
        reached = entry.end
    if reached > data_bytes:
        raise CheckpointError("This file is cut short: its tensors end past its last byte. Download or upload it again.")
    if reached < data_bytes:
        raise CheckpointError("This file has trailing bytes after its last tensor.")


def _refuse_constant(text: str) -> object:
    raise ValueError(text)


def _bounded_int(text: str) -> int:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise ValueError("number too long")
    return int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("number too large")
    return value
