"""The two containers of `torch.save`, the zip and the legacy stream, read under strict bounds into pickled records and byte streams.

Directory and index are bounded before anything is built from them; nothing is extracted, decompressed or written. What the records mean is not
known here.
"""

import io
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import ITEM_BYTES, MAX_HEADER_BYTES, MAX_TENSORS, clean
from minigpt.inspection.calls import PickledDict
from minigpt.inspection.findings import Findings
from minigpt.inspection.pickles import DAMAGE, MAX_PICKLE_BYTES, PickleReader
from minigpt.inspection.tensors import pieces

MAX_ENTRIES = 20_000
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
_END_BYTES = 22
_ZIP64_LOCATOR_BYTES = 20
_ZIP64_END_BYTES = 56


@dataclass(frozen=True)
class TorchFile:
    """An opened file of `torch.save`: the object it pickles, as records, and its numbers, as byte streams by storage key."""

    format: str
    root: object
    classes: frozenset[str]
    record_bytes: Mapping[str, int]
    stream: Callable[[str], Iterator[bytes]]
    has_checksums: bool


def open_zip(file: BinaryIO, size: int, findings: Findings) -> TorchFile:
    """Open the zip that `torch.save` writes.

    The streams of the result verify each record's CRC when they are read to the end, and raise `CheckpointError` where it differs.

    Args:
        file: The file, seekable.
        size: Its length in bytes.
        findings: Takes the warnings.

    Raises:
        CheckpointError: The zip is damaged, dishonest about its sizes, compressed, or holds something else.
    """
    _check_directory_size(file, size)
    try:
        archive = zipfile.ZipFile(file)
    except (*DAMAGE, zipfile.BadZipFile, NotImplementedError, OSError):
        raise CheckpointError("This zip is damaged or cut short: its directory cannot be read.") from None
    entries = archive.infolist()
    names = {entry.filename for entry in entries}
    _check_entries(entries, names, size, findings)
    indexes = [entry for entry in entries if entry.filename == "data.pkl" or entry.filename.endswith("/data.pkl")]
    if len(indexes) != 1:
        raise CheckpointError("Not a checkpoint: this zip has no data.pkl." if not indexes else "This zip holds more than one data.pkl.")
    if indexes[0].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"This file's index (data.pkl) is too large: more than {MAX_PICKLE_BYTES >> 20} MB.")
    folder = indexes[0].filename.removesuffix("data.pkl")
    if folder + "byteorder" in names and b"".join(_stream_entry(archive, folder + "byteorder", 16)) != b"little":
        raise CheckpointError("This checkpoint is big-endian, which is not opened.")
    reader = PickleReader()
    root = reader.read(io.BytesIO(b"".join(_stream_entry(archive, indexes[0].filename))), "index")
    data = folder + "data/"
    return TorchFile(
        format="torch zip",
        root=root,
        classes=frozenset(reader.classes),
        record_bytes={entry.filename.removeprefix(data): entry.file_size for entry in entries if entry.filename.startswith(data)},
        stream=lambda key: _stream_entry(archive, data + key),
        has_checksums=True,
    )


def open_legacy(file: BinaryIO, size: int) -> TorchFile:
    """Open the stream that `torch.save` wrote before version 1.6: five pickles, then the numbers of each storage behind its length.

    Args:
        file: The file, seekable.
        size: Its length in bytes.

    Raises:
        CheckpointError: The file is damaged, cut short, or another kind of pickle.
    """
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
        starts[storage.key] = file.tell()
        if length < 0 or starts[storage.key] + length > size:
            raise CheckpointError("This file is cut short: a tensor is larger than what is left of the file.")
        record_bytes[storage.key] = length
        file.seek(length, io.SEEK_CUR)

    def stream(key: str) -> Iterator[bytes]:
        file.seek(starts[key])
        return pieces(file, record_bytes[key])

    return TorchFile("torch legacy", root, frozenset(reader.classes), record_bytes, stream, has_checksums=False)


def _check_directory_size(file: BinaryIO, size: int) -> None:
    """Refuse a zip whose directory is huge or not where its end record says, before `zipfile` builds an object for each entry of it.

    The end record must be the last 22 bytes, as torch writes it: where readers search for it, two of them can find different directories.
    """
    end = size - _END_BYTES
    file.seek(max(0, end))
    record = file.read(_END_BYTES)
    if not record.startswith(b"PK\x05\x06") or not record.endswith(b"\0\0"):
        raise CheckpointError("This zip is cut short, or has bytes after its end. Download or upload it again.")
    entries, directory_bytes, start = struct.unpack_from("<HII", record, 10)
    file.seek(max(0, end - _ZIP64_LOCATOR_BYTES))
    locator = file.read(_ZIP64_LOCATOR_BYTES)
    if locator.startswith(b"PK\x06\x07"):  # whatever the short record says, zipfile then believes the long one
        end -= _ZIP64_LOCATOR_BYTES + _ZIP64_END_BYTES
        file.seek(max(0, end))
        record = file.read(_ZIP64_END_BYTES)
        if struct.unpack_from("<Q", locator, 8)[0] != end or not record.startswith(b"PK\x06\x06"):
            raise CheckpointError("This zip is damaged: its end record is not where it should be.")
        entries, directory_bytes, start = struct.unpack_from("<QQQ", record, 32)
    if entries > MAX_ENTRIES or directory_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"This zip has too many entries: {entries:,}; at most {MAX_ENTRIES:,} are read.")
    if start + directory_bytes != end:
        raise CheckpointError("This zip is damaged: its directory is not where it should be.")


def _check_entries(entries: list[zipfile.ZipInfo], names: set[str], size: int, findings: Findings) -> None:
    if len(names) != len(entries):
        raise CheckpointError("This zip holds the same name twice, so readers disagree about its content.")
    if len(entries) > MAX_ENTRIES:
        raise CheckpointError(f"This zip has too many entries: {len(entries):,}; at most {MAX_ENTRIES:,} are read.")
    if any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError("This is a TorchScript program, not a checkpoint.")
    if any(entry.flag_bits & 1 for entry in entries):
        raise CheckpointError("This zip is encrypted; a checkpoint is not.")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise CheckpointError("This zip holds compressed entries or a false size; torch.save never writes those (possibly a zip bomb).")
    if sum(entry.file_size for entry in entries) > size:
        raise CheckpointError("This zip declares more data than it has (overlapping entries).")
    for entry in entries:
        path, is_link = entry.filename, stat.S_ISLNK(entry.external_attr >> 16)
        if is_link or ".." in path.split("/") or path.startswith("/") or "\\" in path:
            findings.warn(f"unexpected zip entry {clean(path, 40)} ignored")


def _stream_entry(archive: zipfile.ZipFile, name: str, most: int | None = None) -> Iterator[bytes]:
    try:
        with archive.open(name) as entry:
            size = archive.getinfo(name).file_size
            yield from pieces(entry, size if most is None else min(size, most))
    except (*DAMAGE, zipfile.BadZipFile, NotImplementedError, OSError):
        raise CheckpointError(f"This file is damaged: {clean(name, 40)} fails its checksum or cannot be read.") from None
