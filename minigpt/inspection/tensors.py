"""Tensors as a file declares them: whether they lie inside their data, and whether their numbers are finite.

Works on bytes alone, in pieces of one megabyte, with neither torch nor numpy. What does not fit is refused with a `CheckpointError`.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from minigpt.errors import CheckpointError
from minigpt.header import ITEM_BYTES, checked_shape, clean, whole_numbers
from minigpt.inspection.report import TensorInfo

PIECE_BYTES = 1 << 20  # a multiple of every item's size, so no number is split between pieces
FLOATS = ("F64", "F32", "F16", "BF16")
_EXPONENT_BITS = {"F64": (0x7F, 0xF0), "F32": (0x7F, 0x80), "BF16": (0x7F, 0x80), "F16": (0x7C, 0x00)}  # in the highest byte and the next
_NUMBER_CODES = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Storage:
    """A record of numbers that a pickle refers to by `key`; `numel` is what the pickle says of its length."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """A tensor as a pickle declares it; but for its kind of numbers, the fields hold whatever the file passed."""

    storage: Storage
    dtype: str
    offset: object
    shape: object
    stride: object


@dataclass(frozen=True, slots=True)
class View:
    """A checked tensor: every element lies inside the record `key`, and there are no more elements than the record holds."""

    key: str
    offset: int
    info: TensorInfo


def checked_view(name: str, tensor: Tensor, record_bytes: Mapping[str, int]) -> View:
    """Check a declared tensor against the sizes of the file's records, by key.

    An element count above the record's is refused even where strides of zero would make it fit: four bytes must not become terabytes.
    """
    shown = clean(name, 60)
    storage, offset, stride = tensor.storage, tensor.offset, whole_numbers(tensor.stride)
    shape = checked_shape(shown, tensor.shape)
    if type(offset) is not int or stride is None or len(stride) != len(shape):
        raise CheckpointError(f"Tensor {shown} is malformed.")
    if min(offset, *stride, 0) < 0:
        raise CheckpointError(f"Tensor {shown} has a negative stride or offset.")
    numel = math.prod(shape)
    reach = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if numel else 0
    found, declared = record_bytes.get(storage.key), storage.numel * ITEM_BYTES[storage.dtype]
    if max(reach, numel) * ITEM_BYTES[tensor.dtype] > declared:
        raise CheckpointError(f"Tensor {shown} declares a shape larger than its data (stride or offset outside the record).")
    if found is None:
        raise CheckpointError(f"Tensor {shown}: its data is missing from the file.")
    if found != declared:
        raise CheckpointError(f"Tensor {shown}: the record's size is {found:,} bytes where {declared:,} were declared.")
    return View(storage.key, offset, TensorInfo(name, tensor.dtype, shape, numel * ITEM_BYTES[tensor.dtype]))


def pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of `file`, a megabyte at a time; a file that ends before is refused."""
    while size > 0:
        piece = file.read(min(size, PIECE_BYTES))
        if not piece:
            raise CheckpointError("This file is cut short. Download or upload it again.")
        size -= len(piece)
        yield piece


def count_nonfinite(piece: bytes, dtype: str) -> int:
    """Count the NaNs and infinities in little-endian numbers of `dtype`; kinds without them count as zero.

    Such a number has every bit of its exponent set, and the exponent lies in the two highest bytes. Those bytes are taken out by slicing and
    matched by a table, so the whole piece costs a few passes at the speed of C.
    """
    if dtype not in _EXPONENT_BITS:
        return 0
    item, all_set = ITEM_BYTES[dtype], -1
    whole = piece[: len(piece) // item * item]
    for place, mask in enumerate(_EXPONENT_BITS[dtype], start=1):
        is_set = bytes(byte & mask == mask for byte in range(256))
        all_set &= int.from_bytes(whole[item - place :: item].translate(is_set), "little")
    return all_set.bit_count()


def number_at(data: bytes, dtype: str, offset: int) -> int | float | None:
    """Return element `offset` of a record as a number, or None for a kind that no step or loss is stored in."""
    if dtype == "BF16":  # the upper half of a float32
        data, dtype, offset = b"\0\0" + data[offset * 2 : offset * 2 + 2], "F32", 0
    if dtype not in _NUMBER_CODES:
        return None
    value: int | float = struct.unpack_from(_NUMBER_CODES[dtype], data, offset * ITEM_BYTES[dtype])[0]
    return value
