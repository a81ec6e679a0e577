"""Tensors as a file declares them: whether they lie inside their data, and whether their numbers are finite.

Works on bytes alone, in pieces of one megabyte, with neither torch nor numpy.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from minigpt.errors import CheckpointError
from minigpt.header import ITEM_BYTES, MAX_DIMENSIONS

PIECE_BYTES = 1 << 20  # a multiple of every item's size, so no number is split between pieces
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
STORAGE_KINDS: Mapping[str, str] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "UntypedStorage": "U8",
}
"""The storage classes of torch that hold plain numbers; quantized ones are left out on purpose."""
DTYPE_NAMES: Mapping[str, str] = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.uint16": "U16",
    "torch.uint32": "U32",
    "torch.uint64": "U64",
    "torch.bool": "BOOL",
    "torch.complex64": "C64",
    "torch.complex128": "C128",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ",
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Storage:
    """A record of numbers that a pickle refers to by `key`; `numel` is what the pickle says of its length."""

    dtype: str
    key: str
    numel: int

    @property
    def size_bytes(self) -> int:
        """The length its record must have."""
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """A tensor as a pickle declares it, unchecked: the fields hold whatever the file passed."""

    storage: object
    offset: object
    shape: object
    stride: object
    own_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A checked tensor: every element lies inside its record, and there are no more elements than the record holds."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes that its shape amounts to."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def checked_view(name: str, tensor: Tensor, record_bytes: Mapping[str, int]) -> View:
    """Check a declared tensor against the sizes of the file's records.

    An element count above the record's is refused even where strides of zero would make it fit: four bytes must not become terabytes.

    Args:
        name: The tensor's name, safe to show.
        tensor: What the pickle declares.
        record_bytes: The size of each record in the file, by key.

    Raises:
        CheckpointError: The tensor is malformed or does not fit its record.
    """
    storage, offset = tensor.storage, tensor.offset
    shape, stride = _numbers(tensor.shape), _numbers(tensor.stride)
    if not isinstance(storage, Storage) or type(offset) is not int or shape is None or stride is None:
        raise CheckpointError(f"Tensor {name} is malformed.")
    if len(shape) > MAX_DIMENSIONS or len(shape) != len(stride) or min(shape, default=0) < 0:
        raise CheckpointError(f"Tensor {name} has an impossible shape.")
    if min(stride, default=0) < 0 or offset < 0:
        raise CheckpointError(f"Tensor {name} has a negative stride or offset.")
    dtype = tensor.own_dtype or storage.dtype
    numel = math.prod(shape)
    reach = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if numel else 0
    if max(reach, numel) * ITEM_BYTES[dtype] > storage.size_bytes:
        raise CheckpointError(f"Tensor {name} declares a shape larger than its data (stride or offset outside the record).")
    found = record_bytes.get(storage.key)
    if found is None:
        raise CheckpointError(f"Tensor {name}: its data is missing from the file.")
    if found != storage.size_bytes:
        raise CheckpointError(f"Tensor {name}: the record's size is {found:,} bytes where {storage.size_bytes:,} were declared.")
    return View(storage, dtype, offset, shape)


def pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of `file`, a megabyte at a time.

    Raises:
        CheckpointError: The file ends before.
    """
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
    masks = _EXPONENT_BITS.get(dtype)
    if masks is None:
        return 0
    item = ITEM_BYTES[dtype]
    whole = piece[: len(piece) // item * item]
    high = int.from_bytes(whole[item - 1 :: item].translate(_all_set(masks[0])), "little")
    low = int.from_bytes(whole[item - 2 :: item].translate(_all_set(masks[1])), "little")
    return (high & low).bit_count()


def number_at(data: bytes, dtype: str, offset: int) -> int | float | None:
    """Return element `offset` of a record as a number, or None for a kind that no step or loss is stored in."""
    if dtype == "BF16":  # the upper half of a float32
        data, dtype, offset = b"\0\0" + data[offset * 2 : offset * 2 + 2], "F32", 0
    code = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}.get(dtype)
    if code is None:
        return None
    value: int | float = struct.unpack_from(code, data, offset * ITEM_BYTES[dtype])[0]
    return value


_EXPONENT_BITS: Mapping[str, tuple[int, int]] = {"F64": (0x7F, 0xF0), "F32": (0x7F, 0x80), "BF16": (0x7F, 0x80), "F16": (0x7C, 0x00)}


def _all_set(mask: int) -> bytes:
    return bytes(byte & mask == mask for byte in range(256))


def _numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, tuple) or not all(type(item) is int and item.bit_length() <= 64 for item in value):
        return None
    return value
