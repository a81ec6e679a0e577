"""What differs between operating systems, each with the fallback that holds where it is missing. Knows no torch and no page."""

import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
    import resource
except ModuleNotFoundError:  # Windows
    fcntl = resource = None  # type: ignore[assignment]  # the places that ask are limit_this_process and exclusive

STRAY_SUFFIX = ".tmp"


def prepare_environment() -> None:
    """Set what must be in the environment before torch and gradio are imported; values set by the caller win, but the program ends if one that
    must be a number is none.

    Idle OpenMP threads of torch spin, which takes the core away from the page's server: PASSIVE lets them sleep.
    """
    for name, value in {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "GRADIO_TEMP_DIR": str(Path(tempfile.gettempdir()) / f"minigpt-{getattr(os, 'getuid', lambda: 'uploads')()}"),
    }.items():
        os.environ.setdefault(name, value)
    for name, low in (("GRADIO_SERVER_PORT", 1), ("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)):
        if not re.fullmatch(r"[0-9]{1,5}", value := os.environ.get(name, "1")) or not low <= int(value) < 1 << 16:
            sys.stderr.write(f"{name} is {value[:40]!r}; it must be a whole number from {low} to 65,535: change it in the environment\n")
            raise SystemExit(2)


def home() -> Path:
    """Return the folder of all runs: MINIGPT_HOME, else a Space's persistent disk, else `runs` beside the caller."""
    if chosen := os.environ.get("MINIGPT_HOME"):
        return Path(chosen)
    if os.environ.get("SPACE_ID") and os.access("/data", os.W_OK):
        return Path("/data/runs")
    return Path("runs")


def is_offline() -> bool:
    """Tell whether downloads are switched off by MINIGPT_OFFLINE=1."""
    return os.environ.get("MINIGPT_OFFLINE", "") not in ("", "0")


def rank() -> int:
    """Return this process's number among those that torchrun started to train one model; 0 is the first, or the only one."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def stray(path: Path) -> Path:
    """Return a name beside `path` for what is not whole yet; whatever a killed process leaves under such a name is swept."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{STRAY_SUFFIX}")


def read_regular(path: Path) -> bytes:
    """Read a file whole; what is none, such as a pipe, which may keep a reader for ever, is refused as an OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_bytes()


def modified(path: Path) -> float:
    """Return when a file was last written; 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def write_atomically(path: Path, data: bytes, *, keep_as: Path | None = None) -> None:
    """Replace `path` by `data` so that a reader, a kill or a full disk finds either the old file or the new one, whole.

    With `keep_as` the old file takes that name once the new one is safely on the disk. The folder is synced where the system can open one (not
    on Windows, where the rename is still atomic).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = stray(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if keep_as is not None and path.exists():
            keep(path, keep_as)
        _rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def _rename(source: Path, target: Path) -> None:
    """Rename over `target`; on Windows, which refuses while somebody reads the old file, try for a second."""
    for _ in range(20 if sys.platform == "win32" else 0):
        try:
            source.replace(target)
        except PermissionError:
            time.sleep(0.05)
        else:
            return
    source.replace(target)


def keep(path: Path, keep_as: Path) -> None:
    """Give the file at `path` a second name, replacing what had it; where a file can have only one, it is moved."""
    second = stray(keep_as)
    try:
        os.link(path, second)
    except OSError:
        path.replace(keep_as)
        return
    try:
        second.replace(keep_as)
    except BaseException:
        with contextlib.suppress(OSError):
            second.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where the system allows a folder to be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str) -> None:
    """Append one line with one system call, so that a kill loses nothing that was acknowledged and no half line of another writer.

    A full disk may take a part of it; that part is cut off again, so that the next line starts on its own.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
    try:
        before, data = os.fstat(descriptor).st_size, line.encode() + b"\n"
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def sweep_strays(folder: Path, of: str = "") -> int:
    """Remove what a killed process left half written in `folder`, of everything or of one name; return how many. Those of processes that live stay.

    Their names hold the process's number; our own counts as dead, for this is called at the start, and a restarted container gives it out again.
    """
    strays = [stray for stray in folder.glob(f".{glob.escape(f'{of}.' if of else '')}*{STRAY_SUFFIX}") if not _is_in_use(stray)]
    for stray in strays:
        with contextlib.suppress(OSError):
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    return len(strays)


def _is_in_use(stray: Path) -> bool:
    number = stray.name.split(".")[-3]
    return number.isdecimal() and len(number) < 10 and int(number) != os.getpid() and process_lives(int(number))


def process_lives(pid: int) -> bool:
    """Tell whether a process with this number exists. Where that cannot be asked (Windows), say no: such a run counts as interrupted."""
    if pid <= 0 or sys.platform == "win32":
        return False
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # then it is somebody else's
    return True


def process_birth(pid: int) -> str | None:
    """Return when a process began, so that one to which its number was given again is not taken for it; None where that is not told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError, ValueError):
        return None


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here with the same folder. Without file locks (Windows) nobody waits."""
    if fcntl is None or not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def on_termination(handler: Callable[[], None]) -> None:
    """Call `handler` at Ctrl-C and, where it exists, at SIGTERM. Must be called on the main thread."""
    for name in ("SIGINT", "SIGTERM"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, lambda _number, _frame: handler())


def limit_this_process(space_bytes: int, data_bytes: int, cpu_s: int, open_files: int) -> None:
    """Bound this process for the rest of its life; it may write no file. A limit that the system does not know or refuses is skipped.

    `space_bytes` bounds the addresses it may reserve, `data_bytes` those that it may write to.

    Where there are none (Windows), whoever waits for the process must bound its time.
    """
    if resource is None:
        return
    limits = {
        "RLIMIT_AS": space_bytes,
        "RLIMIT_DATA": data_bytes,
        "RLIMIT_CPU": cpu_s,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NOFILE": open_files,
        "RLIMIT_CORE": 0,
    }
    for name, most in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (most, most))
