"""The two containers of `torch.save`, the zip and the legacy stream, read under strict bounds into pickled records and byte streams.

Directory and index are bounded before anything is built from them; nothing is extracted, decompressed or written. Knows not what they mean.
"""

import io
import stat
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import ITEM_BYTES, MAX_HEADER_BYTES, MAX_TENSORS, clean, pieces
from minigpt.inspection.pickles import DAMAGE, MAX_PICKLE_BYTES, PickleReader
from minigpt.inspection.records import PickledDict

MAX_ENTRIES = 20_000
LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
_ZIP_DAMAGE = (*DAMAGE, zipfile.BadZipFile, NotImplementedError, OSError)


@dataclass(frozen=True)
class TorchFile:
    """An opened file of `torch.save`: the object it pickles, as records, and its numbers, as byte streams by storage key."""

    format: str
    root: object
    classes: frozenset[str]
    record_bytes: Mapping[str, int]
    stream: Callable[[str], Iterator[bytes]]  # a zip's verifies the checksum of its record, if it is read to the end
    start: Callable[[str], int]  # where in the file a storage's record begins
    warnings: Sequence[str] = ()


def open_zip(file: BinaryIO, size: int) -> TorchFile:
    """Open the zip that `torch.save` writes; `size` is the file's length in bytes."""
    _check_directory_size(file, size)
    try:
        archive = zipfile.ZipFile(file)
    except _ZIP_DAMAGE:
        raise CheckpointError("This zip is damaged or cut short: its directory cannot be read.") from None
    sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    indexes = [name for name in sizes if name == "data.pkl" or name.endswith("/data.pkl")]
    if not indexes:
        raise CheckpointError(f"This is a zip archive, not a checkpoint (it has no data.pkl){_advice(sizes)}.")
    warnings = _check_entries(archive.infolist(), sizes, size)

    def stream(name: str) -> Iterator[bytes]:
        try:
            with archive.open(name) as entry:
                yield from pieces(entry, sizes[name])
        except _ZIP_DAMAGE:
            raise CheckpointError(f"This file is damaged: {clean(name, 40)} fails its checksum or cannot be read.") from None

    def start(name: str) -> int:
        at = archive.getinfo(name).header_offset
        file.seek(at + 26)  # the record lies behind its own header, which ends in the name and extra bytes of these two lengths
        return at + 30 + int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")

    if len(indexes) > 1:
        raise CheckpointError("This zip holds more than one data.pkl.")
    if sizes[indexes[0]] > MAX_PICKLE_BYTES:
        raise CheckpointError(f"This file's index (data.pkl) is too large: more than {MAX_PICKLE_BYTES >> 20} MB.")
    folder = indexes[0].removesuffix("data.pkl")
    order, data = folder + "byteorder", folder + "data/"
    if order in sizes and next(stream(order), b"") != b"little":
        raise CheckpointError("This checkpoint is big-endian, which is not opened.")
    reader = PickleReader()
    root = reader.read(io.BytesIO(b"".join(stream(indexes[0]))), "index")
    record_bytes = {name.removeprefix(data): length for name, length in sizes.items() if name.startswith(data)}
    return TorchFile(
        "torch zip", root, frozenset(reader.classes), record_bytes, lambda key: stream(data + key), lambda key: start(data + key), warnings
    )


def open_legacy(file: BinaryIO, size: int) -> TorchFile:
    """Open the stream that `torch.save` wrote before version 1.6: five pickles, then the numbers of each storage behind its length."""
    file.seek(0)
    index = io.BytesIO(file.read(MAX_PICKLE_BYTES))
    reader = PickleReader()
    if reader.read(index, "header") != LEGACY_MAGIC:
        raise CheckpointError("Not a checkpoint: a bare pickle without the header that torch.save writes.")
    if reader.read(index, "header") != LEGACY_VERSION:
        raise CheckpointError("This file is in an unknown version of torch's old format.")
    machine = reader.read(index, "header")
    if isinstance(machine, PickledDict) and machine.get("little_endian") is False:
        raise CheckpointError("This checkpoint is big-endian, which is not opened.")
    root, keys = reader.read(index, "index"), reader.read(index, "index")
    if not isinstance(keys, list) or len(keys) > MAX_TENSORS:
        raise CheckpointError("This file's index is damaged: it has no list of its tensors.")
    starts: dict[str, int] = {}
    record_bytes: dict[str, int] = {}
    file.seek(index.tell())
    for key in keys:
        storage = reader.storages.get(key) if isinstance(key, str) else None
        prefix = file.read(8)
        if len(prefix) < 8 or storage is None:
            raise CheckpointError("This file is cut short, or its index is damaged.")
        length = struct.unpack("<q", prefix)[0] * ITEM_BYTES[storage.dtype]
        starts[key], record_bytes[key] = file.tell(), length
        if length < 0 or file.tell() + length > size:
            raise CheckpointError("This file is cut short: a tensor is larger than what is left of the file.")
        file.seek(length, io.SEEK_CUR)

    def stream(key: str) -> Iterator[bytes]:
        file.seek(starts[key])
        return pieces(file, record_bytes[key])

    return TorchFile("torch legacy", root, frozenset(reader.classes), record_bytes, stream, starts.__getitem__)


def _check_directory_size(file: BinaryIO, size: int) -> None:
    """Refuse a zip whose directory is huge or not where its end record says, before `zipfile` builds an object for each entry of it.

    Its end records must be the last 22 bytes or, in a large file, the last 98: where readers search for them, two can find different directories.
    """
    file.seek(max(0, size - 98))
    tail = file.read(98).rjust(98, b"\0")
    long, locator, short, end = tail[:56], tail[56:76], tail[76:], size - 22
    if not short.startswith(b"PK\x05\x06") or not short.endswith(b"\0\0"):
        raise CheckpointError("This zip is cut short, or has bytes after its end. Download or upload it again.")
    entries, directory_bytes, start = struct.unpack_from("<HII", short, 10)
    if locator.startswith(b"PK\x06\x07"):  # whatever the short record says, zipfile then believes the long one
        end = size - 98
        if struct.unpack_from("<Q", locator, 8)[0] != end or not long.startswith(b"PK\x06\x06"):
            raise CheckpointError("This zip is damaged: its end record is not where it should be.")
        entries, directory_bytes, start = struct.unpack_from("<QQQ", long, 32)
    if entries > MAX_ENTRIES or directory_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"This zip has too many entries: {entries:,}; at most {MAX_ENTRIES:,} are read.")
    if start + directory_bytes != end:
        raise CheckpointError("This zip is damaged: its directory is not where it should be.")


def _advice(names: Iterable[str]) -> str:
    inside = next((name.rpartition("/")[2] for name in names if name.endswith((".safetensors", ".pt", ".pth", ".ckpt"))), "")
    return f": unpack it and open the {clean(inside, 40)} in it" if inside else ""


def _check_entries(entries: list[zipfile.ZipInfo], sizes: Mapping[str, int], size: int) -> list[str]:
    is_false = any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries)
    for is_so, sentence in (
        (len(sizes) != len(entries), "This zip holds the same name twice, so readers disagree about its content."),
        (len(entries) > MAX_ENTRIES, f"This zip has too many entries: {len(entries):,}; at most {MAX_ENTRIES:,} are read."),
        (any(name.endswith("/constants.pkl") for name in sizes), "This is a TorchScript program, not a checkpoint."),
        (any(entry.flag_bits & 1 for entry in entries), "This zip is encrypted; a checkpoint is not."),
        (is_false, "This zip holds compressed entries or a false size; torch.save never writes those (possibly a zip bomb)."),
        (sum(sizes.values()) > size, "This zip declares more data than it has (overlapping entries)."),
    ):
        if is_so:
            raise CheckpointError(sentence)
    links = {entry.filename for entry in entries if stat.S_ISLNK(entry.external_attr >> 16)}
    odd = [name for name in sizes if name in links or ".." in name.split("/") or name.startswith("/") or "\\" in name]
    return [f"unexpected zip entry {clean(name, 40)} ignored" for name in odd]
