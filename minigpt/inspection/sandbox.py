"""Inspection in a child process with limits, two at a time: whatever a file does to its reader, the page goes on.

The child is a fresh interpreter that inherits no environment, gets the open file as its standard input and never learns its path. It bounds its
own memory, processor time and files before it reads a byte. Those limits are POSIX's; where the `resource` module is missing (Windows) only the
wall-clock limit and the separate process remain, and where a system refuses one limit (macOS has no bound on address space) the others hold.
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
from minigpt.header import open_regular
from minigpt.inspection.opening import SCAN_LIMIT_BYTES, inspect_open_file
from minigpt.inspection.report import Report

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]  # the one place that asks is limit_this_process

PATIENCE_S = 60.0
MEMORY_BYTES, CPU_S, WALL_S, OPEN_FILES = 768 << 20, 5, 10.0, 32  # what one child may use
MAX_REPLY_BYTES = 64 << 20
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from minigpt.inspection.sandbox import answer; answer(*sys.argv[2:])"
_slots = threading.BoundedSemaphore(2)


def inspect_safely(path: Path, *, scan: bool = True, scan_limit: int = SCAN_LIMIT_BYTES) -> Report:
    """Do as `inspect_file` does, in a child process with limits. May be called from any thread; waits while two others are at it.

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
    except (ValueError, TypeError, KeyError, RecursionError):
        refusal = "This file was not opened: its reader gave no usable answer."
    raise CheckpointError(refusal)


def run_child(file: BinaryIO, arguments: Sequence[str], wall_s: float = WALL_S, program: str = PROGRAM) -> bytes:
    """Run Python source in a bare interpreter with `file` as its standard input and return what it wrote; no trace of it outlives the call.

    Its arguments are the folder that holds this package and then `arguments`. After `wall_s` seconds it is killed.

    Raises:
        CheckpointError: The child was killed, died or exited with an error.
    """
    # -I: neither the caller's folder, nor the user's packages, nor any PYTHON* variable. -B: no bytecode is written beside ours.
    command = [sys.executable, "-I", "-B", "-c", program, str(Path(minigpt.__file__).parent.parent), *arguments]
    environment = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}  # Windows cannot start Python without it
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
    limit_this_process()
    try:
        report = inspect_open_file(sys.stdin.buffer, name, scan=bool(int(scan)), scan_limit=int(scan_limit))
        reply: dict[str, object] = {"report": report.to_dict()}
    except CheckpointError as error:
        reply = {"refused": str(error)}
    sys.stdout.write(json.dumps(reply, allow_nan=False))


def limit_this_process(memory_bytes: int = MEMORY_BYTES, cpu_s: int = CPU_S) -> None:
    """Bound this process for the rest of its life; a limit that the system does not know or refuses is skipped."""
    if resource is None:
        return
    limits = {"RLIMIT_AS": memory_bytes, "RLIMIT_CPU": cpu_s, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (AttributeError, ValueError, OSError):
            continue
