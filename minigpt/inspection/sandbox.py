"""Child processes that read a stranger's file: a fresh interpreter with limits, two at a time.

A child inherits no environment, gets the open file as its standard input and never learns its path. It bounds its own memory, processor time and
files before it reads a byte. Those limits are POSIX's: Windows has only the wall-clock limit and the separate process, and where a system refuses
one limit (macOS has no bound on address space) the others hold.
"""

import faulthandler
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import minigpt
from minigpt.errors import CheckpointError
from minigpt.system import limit_this_process

PATIENCE_S = 60.0
# What one child may use. Its memory is what it can write to: with it, at most 64 MB more is resident than in a child that has read nothing.
SPACE_BYTES, MEMORY_BYTES, CPU_S, WALL_S, OPEN_FILES = 768 << 20, 72 << 20, 3, 10.0, 32
PROGRAM = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*sys.argv[4:])
"""
TOO_MUCH = "This file was not opened: reading it took more memory or processor time than is allowed, or broke its reader."
NO_ANSWER = "This file was not opened: its reader gave no usable answer."
_slots = threading.BoundedSemaphore(2)


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no more than one other file is being read.

    Raises:
        CheckpointError: that took too long.
    """
    if not _slots.acquire(timeout=PATIENCE_S):
        raise CheckpointError("Too many files are being opened at the moment; try again in a minute.")
    try:
        yield
    finally:
        _slots.release()


def run_child(file: BinaryIO, arguments: Sequence[str], wall_s: float = WALL_S, program: str = "") -> bytes:
    """Run Python source in a bare interpreter with `file` as its standard input and return what it wrote; no trace of it outlives the call.

    Its arguments are the folder of this package and then `arguments`. One that fails, or takes more than `wall_s` seconds, raises `CheckpointError`.
    """
    with start_child(file, arguments, program) as child:
        try:
            out, _ = child.communicate(timeout=wall_s)
        except subprocess.TimeoutExpired:
            raise CheckpointError(f"This file was not opened: reading it took longer than {wall_s:g} seconds.") from None
        if child.returncode:
            raise CheckpointError(TOO_MUCH)
        return out


@contextmanager
def start_child(file: BinaryIO, arguments: Sequence[str], program: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """Start a child as `run_child` describes it; one that still lives at the end is killed."""
    # -I: neither the caller's folder, nor the user's packages, nor any PYTHON* variable. -B: no bytecode is written beside ours.
    command = [sys.executable, "-I", "-B", "-c", program or PROGRAM, str(Path(minigpt.__file__).parent.parent), *arguments]
    environment = {name: value for name, value in os.environ.items() if name == "SYSTEMROOT"}  # Windows cannot start Python without it
    environment["OPENBLAS_NUM_THREADS"] = "1"  # each thread of numpy's library reserves memory, which the limit counts
    try:
        child = subprocess.Popen(  # noqa: S603  the command is ours; the file only decides the data on standard input
            command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
    except OSError as error:
        raise CheckpointError(f"No process could be started to open this file ({type(error).__name__}); try again in a minute.") from None
    with child:  # which waits for it
        try:
            yield child
        finally:
            child.kill()


def parsed(reply: bytes) -> dict[str, Any]:
    """Read a line that a child wrote.

    Raises:
        CheckpointError: it is a refusal, or no answer at all.
    """
    try:
        told = json.loads(reply)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise CheckpointError(NO_ANSWER)
    if "refused" in told:
        raise CheckpointError(" ".join(str(told["refused"]).split())[:300])
    return told


def tell(work: Callable[[], dict[str, object] | None]) -> bool:
    """Write what is found, or the refusal, as a line of JSON; return whether there was anything, and no refusal."""
    try:
        reply = work()
    except CheckpointError as error:
        sys.stdout.write(json.dumps({"refused": str(error)}))
        return False
    if reply is not None:
        sys.stdout.write(json.dumps(reply, allow_nan=False) + "\n")
        sys.stdout.flush()
    return reply is not None


def limit_this_child(cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
    """Bound this process, for at most `cpu_s` seconds of work; where there are no limits it at least ends itself in time."""
    limit_this_process(SPACE_BYTES, memory_bytes, cpu_s, OPEN_FILES)
    threading.stack_size(1 << 18)  # of the thread that this starts, which counts in full: the system's may be larger than all that is allowed
    faulthandler.dump_traceback_later(cpu_s + WALL_S, exit=True, file=sys.stderr)
