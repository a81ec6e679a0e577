"""The values of any file's tensors as float32, a megabyte at a time, whatever made the file; nothing in it runs.

Knows what `recognise` knows of names and bounds, and reads through the open file alone. Not imported by the package itself, as it needs numpy.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from minigpt.errors import CheckpointError
from minigpt.header import ITEM_BYTES, clean, open_regular, pieces
from minigpt.inspection.pickles import DAMAGE
from minigpt.inspection.recognise import checked_tensor, model_state, opened, own_prefix
from minigpt.inspection.records import Tensor
from minigpt.inspection.torchfiles import TorchFile

CHUNK_ITEMS = 1 << 18  # a megabyte of float32
MAX_STRIDED_BYTES = 256 << 20  # a tensor that is not stored in its own order is read at once
_CODES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "u1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Place:
    """Where a tensor's numbers stand: the first at byte `start` of the file, the others behind it in row-major order or as `stride` says."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stride: tuple[int, ...] | None = None


class Values:
    """The tensors of one open file: `shapes` are by the names of its report."""

    def __init__(self, file: BinaryIO, places: Mapping[str, _Place]) -> None:
        self._file = file
        self._places = places
        self.shapes = {name: place.shape for name, place in places.items()}
        firsts: dict[_Place, str] = {}
        for name, place in places.items():
            firsts.setdefault(place, name)
        self.distinct = tuple(firsts.values())  # of tensors that share their data, the first

    def chunks(self, name: str) -> Iterator[Floats]:
        """Yield a tensor's values in row-major order, flat, at most a megabyte of float32 at a time.

        Raises:
            CheckpointError: its numbers are of a kind that is not read (complex, 8-bit floats), or the file is cut short.
            KeyError: there is no such tensor.
        """
        place = self._places[name]
        if (code := _CODES.get(place.dtype)) is None:
            raise CheckpointError(f"Tensor {clean(name, 60)} holds numbers of a kind that is not read here ({place.dtype}).")
        numel, item = math.prod(place.shape), ITEM_BYTES[place.dtype]
        whole = None
        if place.stride is not None:
            reach = 1 + sum((size - 1) * step for size, step in zip(place.shape, place.stride, strict=True))
            if reach * item > MAX_STRIDED_BYTES:
                raise CheckpointError(f"Tensor {clean(name, 60)} is stored out of order and too large to be put in order (over 256 MB).")
            stored = np.frombuffer(self._read(place.start, reach * item), code)
            whole = as_strided(stored, place.shape, [step * item for step in place.stride], writeable=False)
        for first in range(0, numel, CHUNK_ITEMS):
            count = min(CHUNK_ITEMS, numel - first)
            found = np.frombuffer(self._read(place.start + first * item, count * item), code) if whole is None else whole.flat[first : first + count]
            with np.errstate(over="ignore"):  # a double beyond float32 becomes infinite
                # The numbers of bfloat16 are the upper halves of float32's.
                yield (found.astype("<u4") << 16).view("<f4") if place.dtype == "BF16" else found.astype(np.float32)

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return b"".join(pieces(self._file, size))


@contextmanager
def open_values(path: Path) -> Iterator[Values]:
    """Open the file at `path` for reading its model's tensors.

    Raises:
        CheckpointError: it is not a checkpoint, or is damaged; one sentence for a person.
    """
    with open_regular(path) as file:
        yield values_of(file, path.name)


def values_of(file: BinaryIO, name: str) -> Values:
    """Do as `open_values` does with an open, seekable file of this name; what is returned reads from it for as long as it is open."""
    try:
        found = opened(file, name)
        if isinstance(found, TorchFile):
            tensors = {clean(key): value for key, value in model_state(found)[1].pairs if isinstance(value, Tensor)}
            return Values(file, {shown: _place(shown, tensor, found) for shown, tensor in tensors.items()})
        prefix = own_prefix(found)
        entries = {clean(key.removeprefix(prefix)): entry for key, entry in found.tensors.items() if key.startswith(prefix)}
        return Values(file, {shown: _Place(entry.dtype, entry.shape, found.data_start + entry.begin) for shown, entry in entries.items()})
    except (*DAMAGE, OSError) as error:
        raise CheckpointError(f"This file is damaged ({type(error).__name__}).") from None


def _place(name: str, tensor: Tensor, file: TorchFile) -> _Place:
    checked_tensor(name, tensor, file)
    start = file.start(tensor.storage.key) + tensor.offset * ITEM_BYTES[tensor.dtype]
    steps = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]  # of the row-major order; along a size of 1 any will do
    is_in_order = all(size == 1 or own == step for size, own, step in zip(tensor.shape, tensor.stride, steps, strict=True))
    return _Place(tensor.dtype, tensor.shape, start, None if is_in_order or not math.prod(tensor.shape) else tensor.stride)
