"""Reports what is in a file of any make: `inspect_file` in this process, `inspect_safely` in a child with limits, two at a time.

The child is a fresh interpreter that inherits no environment, gets the open file as its standard input and never learns its path. It bounds its
own memory, processor time and files before it reads a byte. Those limits are POSIX's: Windows has only the wall-clock limit and the separate
process, and where a system refuses one limit (macOS has no bound on address space) the others hold.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import minigpt
from minigpt.errors import CheckpointError
from minigpt.header import open_regular, read_header_of
from minigpt.inspection.meaning import judge
from minigpt.inspection.pickles import DAMAGE
from minigpt.inspection.recognise import recognise_safetensors, recognise_torch, sniff
from minigpt.inspection.report import Report
from minigpt.inspection.torchfiles import open_legacy, open_zip
from minigpt.system import limit_this_process

SCAN_LIMIT_BYTES = 64 << 20
PATIENCE_S = 60.0
MEMORY_BYTES, CPU_S, WALL_S, OPEN_FILES = 768 << 20, 5, 10.0, 32  # what one child may use
MAX_REPLY_BYTES = 64 << 20
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from minigpt.inspection.opening import answer; answer(*sys.argv[2:])"
_slots = threading.BoundedSemaphore(2)


def inspect_safely(path: Path, *, scan: bool = True, scan_limit: int = SCAN_LIMIT_BYTES) -> Report:
    """Do as `inspect_file` does, in a child process. May be called from any thread; waits while two others are at it.

    Raises:
        CheckpointError: The file is refused, or its reader broke a limit or died; one sentence for a person.
    """
    with open_regular(path) as file:
        if not _slots.acquire(timeout=PATIENCE_S):
            raise CheckpointError("Too many files are being opened at the moment; try again in a minute.")
        try:
            reply = run_child(file, [path.name, str(int(scan)), str(scan_limit)])
        finally:
            _slots.release()
    try:
        values = json.loads(reply if len(reply) <= MAX_REPLY_BYTES else b"")
        if "refused" not in values:
            return Report.from_dict(values["report"])
        refusal = " ".join(str(values["refused"]).split())[:300]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        refusal = "This file was not opened: its reader gave no usable answer."
    raise CheckpointError(refusal)


def run_child(file: BinaryIO, arguments: Sequence[str], wall_s: float = WALL_S, program: str = PROGRAM) -> bytes:
    """Run Python source in a bare interpreter with `file` as its standard input and return what it wrote; no trace of it outlives the call.

    Its arguments are the folder of this package and then `arguments`. One that fails, or takes more than `wall_s` seconds, raises `CheckpointError`.
    """
    # -I: neither the caller's folder, nor the user's packages, nor any PYTHON* variable. -B: no bytecode is written beside ours.
    command = [sys.executable, "-I", "-B", "-c", program, str(Path(minigpt.__file__).parent.parent), *arguments]
    environment = {name: value for name, value in os.environ.items() if name == "SYSTEMROOT"}  # Windows cannot start Python without it
    try:
        done = subprocess.run(  # noqa: S603  the command is ours; the file only decides the data on standard input
            command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, timeout=wall_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"This file was not opened: reading it took longer than {wall_s:g} seconds.") from None
    except OSError as error:
        raise CheckpointError(f"No process could be started to open this file ({type(error).__name__}); try again in a minute.") from None
    if done.returncode:
        raise CheckpointError("This file was not opened: reading it took more memory or processor time than is allowed, or broke its reader.")
    return done.stdout


def answer(name: str, scan: str, scan_limit: str) -> None:
    """Be the child: bound this process, inspect standard input, and write one line of JSON with the report or the refusal."""
    limit_this_process(MEMORY_BYTES, CPU_S, OPEN_FILES)
    try:
        reply: dict[str, object] = {"report": _inspect(sys.stdin.buffer, name, scan=scan == "1", scan_limit=int(scan_limit)).to_dict()}
    except CheckpointError as error:
        reply = {"refused": str(error)}
    sys.stdout.write(json.dumps(reply, allow_nan=False))


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
        return _inspect(file, path.name, scan=scan, scan_limit=scan_limit)


def _inspect(file: BinaryIO, name: str, *, scan: bool, scan_limit: int) -> Report:
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        kind = sniff(file.read(512), name)
        checked = scan and size <= scan_limit
        if kind == "safetensors":
            contents = recognise_safetensors(file, read_header_of(file), scan=checked)
        else:
            contents = recognise_torch(open_zip(file, size) if kind == "zip" else open_legacy(file, size), scan=checked)
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
