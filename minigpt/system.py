"""What differs between operating systems, each with the fallback that holds where it is missing. Knows no torch and no page."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

try:
    import fcntl
    import resource
except ModuleNotFoundError:  # Windows
    fcntl = resource = None  # type: ignore[assignment]  # the places that ask are limit_this_process and exclusive

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_STRAY = re.compile(r"\.(.+)\.([0-9]+)\.[0-9a-f]{8}\.tmp", re.DOTALL)  # the form of the names that `stray` gives


def prepare_environment() -> None:
    """Set what must be in the environment before torch and gradio are imported; values set by the caller win, unless they are empty, but the
    program ends if one that must be a number is none.

    Idle OpenMP threads of torch spin, which takes the core away from the page's server: PASSIVE lets them sleep.
    """
    for name, value in {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "GRADIO_TEMP_DIR": _usual_uploads(),
    }.items():
        os.environ[name] = os.environ.get(name) or value
    for name, low in (("GRADIO_SERVER_PORT", 1), ("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)):
        if not re.fullmatch(r"[0-9]{1,5}", value := os.environ.get(name, "1")) or not low <= int(value) < 1 << 16:
            _refuse(name, value[:40], f"a whole number from {low} to 65,535")


def _refuse(name: str, value: str, allowed: str) -> NoReturn:
    sys.stderr.write(f"{name} is {value!r}; it must be {allowed}: change it in the environment\n")
    raise SystemExit(2)


def _usual_uploads() -> str:
    return str(Path(tempfile.gettempdir()) / f"minigpt-{getattr(os, 'getuid', lambda: 'uploads')()}")


def prepare_page() -> None:
    """End the program, before gradio is imported, if the folder of all runs or that of the uploads can be none; make the usual folder of uploads.

    Uploads are other people's: nobody else may look into that folder, and as its name can be guessed, it must not be a link or somebody else's. A
    folder that a person chose is taken as it is.
    """
    uploads = Path(os.environ["GRADIO_TEMP_DIR"])
    if str(uploads) == _usual_uploads():
        with contextlib.suppress(OSError):
            uploads.mkdir(mode=0o700)
        if not is_own_folder(uploads):
            _refuse("GRADIO_TEMP_DIR", str(uploads), "a folder that can be made, or is your own and no link")
        uploads.chmod(0o700)
    for name, place in (("MINIGPT_HOME", home()), ("GRADIO_TEMP_DIR", uploads)):
        try:
            os.scandir(place).close()
        except FileNotFoundError:  # it is made when it is needed
            continue
        except OSError as error:
            _refuse(name, str(place), f"a folder, or a new name for one ({error.strerror})")


def is_own_folder(path: Path) -> bool:
    """Tell whether this is a folder of ours and not a link to one; where folders have no owners (Windows), any that is no link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == getattr(os, "getuid", lambda: found.st_uid)()


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
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def read_regular(path: Path) -> bytes:
    """Read a file whole; what is none, such as a pipe, which may keep a reader for ever, is refused as an OSError."""
    _refuse_irregular(path)
    return path.read_bytes()


def _refuse_irregular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


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
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # what was asked for, and not the hidden name beside it
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

    A full disk may take a part of it; that part is cut off again, so that the next line starts on its own. What is no file, such as a pipe, which may
    keep a writer for ever, is refused as an OSError.
    """
    _refuse_irregular(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
    try:
        before, data = os.fstat(descriptor).st_size, line.encode() + b"\n"
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def sweep_strays(folder: Path, of: str = "") -> int:
    """Remove what a killed process left half written in `folder`, of everything or of one name; return how many.

    Those of processes that live stay, and whatever has a name that `stray` did not give. The names hold the process's number; our own counts as
    dead, for this is called at the start, and a restarted container gives it out again.
    """
    found = ((path, _STRAY.fullmatch(path.name)) for path in folder.glob(".*.tmp"))
    strays = [path for path, form in found if form and of in ("", form[1]) and (int(form[2]) == os.getpid() or not process_lives(int(form[2])))]
    for stray in strays:
        with contextlib.suppress(OSError):
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    return len(strays)


def process_lives(pid: int) -> bool:
    """Tell whether a process with this number exists. Where that cannot be asked (Windows), say no: such a run counts as interrupted."""
    if pid <= 0 or sys.platform == "win32":
        return False
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # then it is somebody else's
    return _facts(pid)[:1] != ["Z"]  # a dead one that its parent has not asked about


def process_birth(pid: int) -> str | None:
    """Return when a process began, so that one to which its number was given again is not taken for it; None where that is not told."""
    return facts[19] if len(facts := _facts(pid)) > 19 else None


def _facts(pid: int) -> list[str]:
    """Return what Linux tells of a process behind its name, as proc(5) lists it from the state on; elsewhere nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, ValueError):
        return []


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here with the same folder. Without file locks (Windows, some disks of a network) nobody waits."""
    if fcntl is None or not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def keep_freed_memory() -> None:
    """Let this process keep the memory that a training step frees, up to 128 MB, for the next step to take: pages anew from the system cost a fifth
    of the time. Only glibc can be asked; elsewhere nothing happens."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 128 << 20)


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
