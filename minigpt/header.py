"""Opens a stranger's file, reads its safetensors header strictly, and has the guards that JSON, shapes and text from such a file pass first.

A safetensors file is a length, a JSON header and the tensors' bytes: nothing in it can run, but its sizes, numbers and names may lie. This module
knows the container and not what a checkpoint means; it reads no tensor and never imports torch. Whatever is wrong raises `CheckpointError`.
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeGuard

from minigpt.errors import CheckpointError

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS, MAX_DIMENSIONS = 20_000, 8
PIECE_BYTES = 1 << 20  # a multiple of every item's size, so no number is split between pieces
MAX_NUMBER_CHARACTERS = 40  # a 128 bit generator state has 39 digits; nothing honest is longer
_KINDS = (  # of numbers: the name in a header, the bytes of one, the name in torch
    ("F64", 8, "float64"), ("F32", 4, "float32"), ("F16", 2, "float16"), ("BF16", 2, "bfloat16"), ("C64", 8, "complex64"), ("C128", 16, "complex128"),
    ("I64", 8, "int64"), ("I32", 4, "int32"), ("I16", 2, "int16"), ("I8", 1, "int8"), ("BOOL", 1, "bool"),
    ("U64", 8, "uint64"), ("U32", 4, "uint32"), ("U16", 2, "uint16"), ("U8", 1, "uint8"), ("F8_E8M0", 1, "float8_e8m0fnu"),
    ("F8_E4M3", 1, "float8_e4m3fn"), ("F8_E4M3FNUZ", 1, "float8_e4m3fnuz"), ("F8_E5M2", 1, "float8_e5m2"), ("F8_E5M2FNUZ", 1, "float8_e5m2fnuz"),
)  # fmt: skip
ITEM_BYTES = {kind: size for kind, size, _ in _KINDS}
_SURROGATE = re.compile("[\ud800-\udfff]")
TORCH_NAMES = {kind: f"torch.{name}" for kind, _, name in _KINDS}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header declares it; `begin` and `end` count bytes from the header's `data_start`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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
    with open_regular(path) as file:
        return read_header_of(file)


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; a folder, a pipe or a device is refused before it can block."""
    try:
        if not path.is_file():
            raise CheckpointError("This is not a regular file." if path.exists() else "There is no such file; it may have been moved or deleted.")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"This file cannot be read ({error.strerror or type(error).__name__}).") from None


def pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of `file`, a megabyte at a time; a file that ends before is refused."""
    while size > 0:
        piece = file.read(min(size, PIECE_BYTES))
        if not piece:
            raise CheckpointError("This file is cut short. Download or upload it again.")
        size -= len(piece)
        yield piece


def read_header_of(file: BinaryIO, size: int | None = None) -> Header:
    """Do as `read_header` does with an open, seekable file, whatever its position; one of which only the beginning is here has its `size` told."""
    size = size if size is not None else file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise CheckpointError(f"This safetensors header is cut short, or larger than {MAX_HEADER_BYTES >> 20} MB.")
    data = file.read(length)
    _check_count(data.count(b'"data_offsets"'))  # before anything is built of them; spelled with an escape they are counted below
    declared = strict_json(data, "header")
    if not isinstance(declared, dict):
        raise CheckpointError("This safetensors header is not a list of named tensors.")
    metadata = declared.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("This safetensors header has metadata that is not text.")
    _check_count(len(declared))
    tensors = {name: _entry(clean(name, 60), value) for name, value in declared.items()}
    reached = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            raise CheckpointError(f"Tensor {clean(name, 60)}: its offset leaves a hole or an overlap.")
        reached = entry.end
    if 8 + length + reached > size:
        raise CheckpointError("This file is cut short: its tensors end past its last byte. Download or upload it again.")
    if 8 + length + reached < size:
        raise CheckpointError("This file has trailing bytes after its last tensor.")
    return Header(tensors, metadata, 8 + length, size)


def _check_count(count: int) -> None:
    if count > MAX_TENSORS:
        raise CheckpointError(f"This file declares too many tensors: {count:,}; at most {MAX_TENSORS:,} are read.")


def _entry(name: str, declared: object) -> TensorEntry:
    if not isinstance(declared, dict) or not isinstance(dtype := declared.get("dtype"), str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"Tensor {name}: unknown dtype in the header.")
    shape, offsets = checked_shape(name, declared.get("shape")), whole_numbers(declared.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(f"Tensor {name}: shape and offsets disagree.")
    return TensorEntry(dtype, shape, offsets[0], offsets[1])


def our_metadata(header: Header) -> dict[str, object] | None:
    """Return what MiniGPT wrote into the header, as strict JSON whose keys and values are still a stranger's; None if MiniGPT wrote nothing."""
    if "minigpt" not in header.metadata:
        return None
    value = strict_json(header.metadata["minigpt"], "metadata")
    if not isinstance(value, dict):
        raise CheckpointError("This file's metadata is not a set of named values.")
    return value


def told(path: Path) -> dict[str, Any]:
    """Return what MiniGPT wrote into the header of the file at `path`; {} if that is nothing, or no file that can be read."""
    try:
        return our_metadata(read_header(path)) or {}
    except CheckpointError:
        return {}


def strict_json(data: bytes | str, what: str) -> object:
    """Parse JSON from a stranger: finite numbers of sane length, no key twice, no nesting that exhausts the stack. A refusal calls it `what`."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(result := dict(pairs)) != len(pairs):
            raise CheckpointError(f"This file's {what} names the same thing twice.")
        return result

    try:
        return json.loads(data, object_pairs_hook=unique, parse_int=_bounded_int, parse_float=_finite_float, parse_constant=_finite_float)
    except RecursionError:
        raise CheckpointError(f"This file's {what} is nested too deep.") from None
    except ValueError:
        raise CheckpointError(f"This file's {what} is not valid JSON.") from None


def _bounded_int(text: str) -> int:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise ValueError("number too long")
    return int(text)


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError("not finite")
    return value


def checked_shape(name: str, value: object) -> tuple[int, ...]:
    """Return the shape that a file declares for the tensor `name`: few sizes, and none of them negative."""
    shape = whole_numbers(value)
    if shape is None or len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise CheckpointError(f"Tensor {name} has an impossible shape.")
    return shape


def whole_numbers(value: object) -> tuple[int, ...] | None:
    """Return a list or tuple of ints of at most 64 bits as a tuple, and None for anything else; `true` does not pass for 1."""
    if isinstance(value, (list, tuple)) and all(type(item) is int and item.bit_length() <= 64 for item in value):
        return tuple(value)
    return None


def number(value: object) -> float | None:
    """Return a number of sane size as a float, and None for anything else, NaN included; `true` does not pass for 1."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63 else None


def is_text(value: object) -> TypeGuard[str]:
    """Tell whether a value is text that can be sent: a lone surrogate, as from a name that is no UTF-8 or from JSON, cannot."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def clean(value: object, limit: int = 200, *, lines: bool = False) -> str:
    """Make a value from a file safe to show: at most `limit` characters and an ellipsis, none of them control, bidirectional or surrogate.

    Only scalars are spelled out, as a nested value can take for ever; anything else is named by its kind. `lines` keeps line breaks and tabs.
    """
    if isinstance(value, int) and abs(value) >= 2**63:
        value = "(a very large number)"
    elif value is not None and not isinstance(value, (str, int, float)):
        value = f"({type(value).__name__.lower()})"
    text, kept = str(value), "\n\t" if lines else ""
    shown = "".join(c if c in kept or unicodedata.category(c)[0] != "C" else "\ufffd" for c in text[:limit])
    return shown + "…" if len(text) > limit else shown
