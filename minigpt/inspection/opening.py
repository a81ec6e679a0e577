"""Reports what is in a file of any make: `inspect_file` in this process, `inspect_safely` in a child with limits.

`inspect_parts` reports, in a child too, on a file of which only the header is at hand.
"""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import Header, open_regular
from minigpt.inspection.meaning import judge
from minigpt.inspection.pickles import DAMAGE
from minigpt.inspection.recognise import MAX_CONFIG_BYTES, add_config, opened, recognise_safetensors, recognise_torch, sniff
from minigpt.inspection.report import Report
from minigpt.inspection.sandbox import NO_ANSWER, limit_this_child, parsed, run_child, tell, turn

SCAN_LIMIT_BYTES = MAX_REPLY_BYTES = 64 << 20  # a larger file is reported with its values not checked
MAX_UPLOAD_MB = 64  # of a file for the page


def inspect_safely(path: Path, *, scan: bool = True) -> Report:
    """Do as `inspect_file` does, in a child process. May be called from any thread; waits while two others are at it.

    Raises:
        CheckpointError: The file is refused, or its reader broke a limit or died; one sentence for a person.
    """
    with open_regular(path) as file:
        return _report_of(file, [__name__, "answer", path.name, str(int(scan)), _beside(path)])


def inspect_parts(name: str, size: int, parts: Mapping[int, bytes], beside: bytes = b"") -> Report:
    """Report what a file elsewhere holds, of which only the header or directory is here; its values are not checked.

    Args:
        name: what the file is called.
        size: its length in bytes.
        parts: pieces of it by the place where they start; everything else counts as zeros.
        beside: the config.json that belongs to it.

    Raises:
        CheckpointError: see `inspect_safely`.
    """
    head = parts.get(0, b"")[:512]
    if head.startswith(b"\x80") and sniff(head, name) == "legacy":  # the length of a safetensors header may begin so too
        raise CheckpointError(
            f"This is torch's old format, its index among its values: upload it (up to {MAX_UPLOAD_MB} MB) or use python -m minigpt inspect."
        )
    with tempfile.TemporaryFile() as file:
        for start, data in parts.items():
            file.seek(start)
            file.write(data)
        try:
            file.truncate(size)  # the rest is a hole and takes no place
        except (OSError, OverflowError):
            raise CheckpointError("This file is said to be of a size that no file can have.") from None
        file.seek(0)
        return _report_of(file, [__name__, "answer", name, "0", beside.decode(errors="ignore").replace("\0", "")])


def _report_of(file: BinaryIO, arguments: Sequence[str]) -> Report:
    with turn():
        reply = run_child(file, arguments)
    told = parsed(reply if len(reply) <= MAX_REPLY_BYTES else b"")
    try:
        return Report.from_dict(told["report"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(NO_ANSWER) from None


def _beside(path: Path) -> str:
    """Return the text of the config.json that lies beside weights, as the Hub keeps them, or nothing."""
    config = path.with_name("config.json")
    if not config.is_file():
        return ""
    with config.open("rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1).decode(errors="ignore").replace("\0", "")  # one more says that it is too large


def answer(name: str, scan: str, beside: str = "") -> None:
    """Be the child: bound this process, inspect standard input, and write one line of JSON with the report or the refusal."""
    limit_this_child()
    tell(lambda: {"report": _inspect(sys.stdin.buffer, name, scan == "1", beside).to_dict()})


def inspect_file(path: Path, *, scan: bool = True) -> Report:
    """Report what is in the checkpoint at `path` without running, unpickling or importing anything it names.

    Args:
        path: A file of `torch.save` (zip or legacy), of safetensors or of MiniGPT; its name decides nothing.
        scan: Read every value, for checksums and finite numbers; without it only the directory, the header and the index are read.

    Raises:
        CheckpointError: It is not a checkpoint, is damaged, or asks for something that is refused; one sentence for a person.
    """
    with open_regular(path) as file:
        return _inspect(file, path.name, scan, _beside(path))


def _inspect(file: BinaryIO, name: str, scan: bool, beside: str) -> Report:
    try:
        found, size = opened(file, name), file.seek(0, os.SEEK_END)
        checked = scan and size <= SCAN_LIMIT_BYTES
        if isinstance(found, Header):
            contents = recognise_safetensors(file, found, scan=checked)
            if (suffix := Path(name).suffix) in (".pt", ".pth", ".ckpt", ".bin"):
                contents.warnings.insert(0, f"named {suffix}, but it is a safetensors file")
        else:
            contents = recognise_torch(found, scan=checked)
            if name.endswith(".safetensors"):
                contents.warnings.insert(0, "named .safetensors, but it is a file of torch.save (a pickle)")
        add_config(contents, beside)
        if not checked:
            reason = f", for the file is larger than {SCAN_LIMIT_BYTES >> 20:,} MB" if scan else ""
            contents.notes.insert(0, f"values not checked: only the header was read{reason}")
        return judge(contents, size, checked=checked)
    except MemoryError:
        raise CheckpointError("This file needs more memory to be read than is allowed; it was not opened.") from None
    except (*DAMAGE, OSError) as error:
        # The readers refuse what they foresee; the rest is a file damaged in some new way, and its kind of error helps whoever reports it.
        raise CheckpointError(f"This file is damaged ({type(error).__name__}).") from None
