"""Opens a file of any make by its content, never by its name, and reports what is in it. Runs in the calling process; see `sandbox`."""

import os
from pathlib import Path
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import clean, open_regular, read_header_of
from minigpt.inspection.meaning import judge
from minigpt.inspection.pickles import DAMAGE
from minigpt.inspection.recognise import recognise_safetensors, recognise_torch
from minigpt.inspection.report import Report
from minigpt.inspection.torchfiles import open_legacy, open_zip

SCAN_LIMIT_BYTES = 64 << 20


def inspect_file(path: Path, *, scan: bool = True, scan_limit: int = SCAN_LIMIT_BYTES) -> Report:
    """Report what is in the checkpoint at `path` without running, unpickling or importing anything it names.

    Args:
        path: A file of `torch.save` (zip or legacy), of safetensors or of MiniGPT; its name decides nothing.
        scan: Read every value, for checksums and finite numbers; without it only the directory, the header and the index are read.
        scan_limit: The largest file in bytes that is scanned; a larger one is reported with `checked` false and a note.

    Raises:
        CheckpointError: It is not a checkpoint, is damaged, or asks for something that is refused; one sentence for a person.
    """
    with open_regular(path) as file:
        return inspect_open_file(file, path.name, scan=scan, scan_limit=scan_limit)


def inspect_open_file(file: BinaryIO, name: str, *, scan: bool, scan_limit: int) -> Report:
    """Do as `inspect_file` does with an open file; `name` only matters where the content could be anything, or belies it."""
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        kind = _sniff(file.read(512), name)
        checked = scan and size <= scan_limit
        if kind == "safetensors":
            contents = recognise_safetensors(file, read_header_of(file), scan=checked)
        else:
            opened = open_zip(file, size) if kind == "zip" else open_legacy(file, size)
            contents = recognise_torch(opened, scan=checked)
            if name.endswith(".safetensors"):
                contents.warnings.insert(0, "named .safetensors, but it is a file of torch.save (a pickle)")
        if not checked:
            contents.notes.insert(0, "values not checked" if not scan else f"values not checked: the file is larger than {scan_limit >> 20:,} MB")
        return judge(contents, size, checked=checked)
    except MemoryError:
        raise CheckpointError("This file needs more memory to be read than is allowed; it was not opened.") from None
    except (*DAMAGE, OSError) as error:
        # The readers refuse what they foresee; the rest is a file damaged in some new way, and its kind of error helps whoever reports it.
        raise CheckpointError(f"This file is damaged ({type(error).__name__}).") from None


def _sniff(head: bytes, name: str) -> str:
    """Tell the container from its first bytes: "zip", "legacy" or "safetensors"; say in words what anything else is."""
    text, suffix = head.lstrip().lower(), clean(Path(name).suffix, 12)
    lfs = "This is a Git LFS pointer, not the file itself. Fetch it with git lfs pull, or download it from the web page."
    for is_so, answer in (
        (not head, "This file is empty."),
        (head.startswith(b"version https://git-lfs"), lfs),
        (text.startswith((b"<!doctype", b"<html", b"<?xml")), "This is a web page (HTML), probably an error page saved under this name."),
        (head[257:262] == b"ustar", "This is torch's oldest (tar) format, which cannot be opened safely."),
        (head.startswith(b"PK\x03\x04"), "zip"),
        (head[8:9] in (b"{", b"[") and b"\0" in head[:8], "safetensors"),
        (head.startswith(b"\x80"), "legacy"),
        (name.endswith(".safetensors"), "safetensors"),
        (text.startswith((b"{", b"[")), "This is JSON text, not a checkpoint. Upload the .safetensors or .pt file."),
    ):
        if is_so:
            if answer in ("zip", "legacy", "safetensors"):
                return answer
            raise CheckpointError(answer)
    raise CheckpointError(f"Not a checkpoint: unknown file type{f' ({suffix})' if suffix else ''}.")
