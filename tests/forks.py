"""Processes of their own that need not import everything again: a server has done so once and forks for each, in a tenth of the time.

Their output, their exit status and what signals do to them are those of a process started afresh. What is not: `__main__`, and how the
interpreter ends. Each kind of behaviour therefore has a test with a fresh process too. Needs fork, so not for Windows.
"""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = ["minigpt.cli_flags", "minigpt.distributed", "minigpt.export", "minigpt.foreign", "minigpt.outputs", "minigpt.progress", "minigpt.ui.page"]


@functools.cache
def server() -> ForkServerContext:
    """Start the server, once; it ends with this process."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        forkserver.ensure_running()
    return context


class Forked:
    """A process that runs `work(*arguments)` and ends with the status it returns; otherwise like subprocess.Popen, as far as it goes."""

    def __init__(
        self, work: Callable[..., object], *arguments: object, cwd: Path, env: Mapping[str, str] = os.environ, stdout: int, stderr: int
    ) -> None:
        streams = [Connection(os.dup(number)) for number in (stdout, stderr)]  # which is how a descriptor is sent
        self.process = server().Process(target=_in_child, args=(work, arguments, cwd, dict(env), *streams), daemon=True)
        self.process.start()
        for stream in streams:
            stream.close()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.process.exitcode


def run(
    work: Callable[..., object], *arguments: object, cwd: Path, env: Mapping[str, str] = os.environ, timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Run a function in a process of its own, and return how it went and what it printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        forked = Forked(work, *arguments, cwd=cwd, env=env, stdout=out.fileno(), stderr=err.fileno())
        try:
            code = forked.wait(timeout)
        finally:
            forked.kill()
        texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (out, err)]
    return subprocess.CompletedProcess([work.__name__], code, *texts)


def _in_child(work: Callable[..., object], arguments: tuple[object, ...], cwd: Path, env: dict[str, str], *streams: Connection) -> None:
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    # Those that are there remember what the server's were: whether one can seek in them, say.
    sys.stdout, sys.stderr = (open(number, "w", buffering=kind, closefd=False) for number, kind in ((1, -1), (2, 1)))  # noqa: SIM115  they stay
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = work(*arguments)
    sys.exit(code if isinstance(code, int) else 0)
