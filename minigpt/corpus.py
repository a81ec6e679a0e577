"""Where the text comes from: downloaded, built in, or a file of one's own. Knows nothing of tokens."""

import hashlib
import logging
import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from minigpt import system
from minigpt.errors import DataError, RunStopped

log = logging.getLogger(__name__)

SHAKESPEARE_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://cdn.jsdelivr.net/gh/karpathy/char-rnn@master/data/tinyshakespeare/input.txt",
)
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BUILT_IN = Path(__file__).parent.parent / "assets" / "shakespeare.txt"
MAX_TEXT_BYTES = 64 << 20
DOWNLOAD_S = 10.0  # for the whole text: a server that dribbles must not keep a person waiting
RETRY_AFTER_S = 300.0

_last_failure = -math.inf  # when the last download failed, so that a classroom without a network waits for it once and not at every run


@dataclass(frozen=True)
class Corpus:
    """A text with the name a person knows it by."""

    name: str
    text: str
    sha256: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", hashlib.sha256(self.text.encode()).hexdigest())


def download_shakespeare(path: str | Path, *, urls: tuple[str, ...] = SHAKESPEARE_URLS, stop_event: threading.Event | None = None) -> Path:
    """Put Tiny Shakespeare at `path` unless it is there already, whole and unchanged.

    Each address is tried with a few retries; size and sha256 must fit, so that an error page never becomes the corpus. The file appears
    whole or not at all.

    Raises:
        DataError: no address gave the text; the message has the last reason.
        RunStopped: the stop event was set meanwhile.
    """
    path = Path(path)
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHAKESPEARE_SHA256:
        return path
    reason = "no address was given"
    with requests.Session() as session:
        retries = Retry(total=2, connect=0, backoff_factor=0.2, status_forcelist=(429, 500, 502, 503, 504), respect_retry_after_header=False)
        session.mount("https://", HTTPAdapter(max_retries=retries))
        session.mount("http://", HTTPAdapter(max_retries=retries))
        for url in urls:
            if stop_event is not None and stop_event.is_set():
                raise RunStopped("stopped before the text was downloaded")
            try:
                data = _fetch(session, url, stop_event)
            except requests.RequestException as error:
                reason = f"the download failed ({type(error).__name__})"
                continue
            if hashlib.sha256(data).hexdigest() == SHAKESPEARE_SHA256:
                system.write_atomically(path, data)
                return path
            reason = f"the address answered with something else ({len(data):,} bytes where {SHAKESPEARE_BYTES:,} are right)"
    raise DataError(f"Tiny Shakespeare could not be downloaded: {reason}")


def _fetch(session: requests.Session, url: str, stop_event: threading.Event | None) -> bytes:
    data = b""
    deadline = time.monotonic() + DOWNLOAD_S
    with session.get(url, timeout=(3.0, 5.0), stream=True) as response:
        response.raise_for_status()
        for chunk in response.iter_content(1 << 16):
            if stop_event is not None and stop_event.is_set():
                raise RunStopped("stopped while the text was being downloaded")
            if time.monotonic() > deadline:
                raise requests.Timeout(f"more than {DOWNLOAD_S:.0f} s")
            data += chunk
            if len(data) > SHAKESPEARE_BYTES:
                break
    return data


def read_text(path: str | Path) -> str:
    """Read a text file: UTF-8 with or without a byte order mark, or UTF-16 with one; line ends become single line breaks.

    Raises:
        DataError: the file is missing, too large, binary, or in another encoding.
    """
    path = Path(path)
    try:
        _check_size(path.stat().st_size)
        data = system.read_regular(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise DataError(f"the text file {path.name!r} cannot be read ({reason}); give the path of a UTF-8 text file") from error
    return decode_text(data)


def decode_text(data: bytes) -> str:
    """Decode a text as `read_text` does.

    Raises:
        DataError: the bytes are too many, binary or in another encoding.
    """
    _check_size(len(data))
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        wrong = "is not UTF-8" if encoding == "utf-8-sig" else "begins as UTF-16 does, but is not"
        raise DataError(f"the text {wrong} (byte {error.start:,} does not fit): save it as UTF-8 and try again") from None
    if "\x00" in text:
        raise DataError("the text holds zero bytes, so it is a binary file: give a plain text file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_size(size: int) -> None:
    if size > MAX_TEXT_BYTES:
        raise DataError(f"the text has {-(-size >> 20)} MB; at most {MAX_TEXT_BYTES >> 20} MB can be read: use a part of it")


def load_corpus(data_path: str, stop_event: threading.Event | None = None) -> Corpus:
    """Return the text to learn from: the file given, else Tiny Shakespeare, else the plays that come with the program.

    Raises:
        DataError: the given file cannot be read.
        RunStopped: the stop event was set meanwhile.
    """
    global _last_failure  # noqa: PLW0603  see its definition
    if data_path:
        return Corpus(Path(data_path).name, read_text(data_path))
    path = system.home() / "data" / "tinyshakespeare.txt"
    may_download = not system.is_offline() and time.monotonic() - _last_failure > RETRY_AFTER_S
    try:
        if path.is_file() or may_download:
            urls = SHAKESPEARE_URLS if may_download else ()
            return Corpus("Tiny Shakespeare", read_text(download_shakespeare(path, urls=urls, stop_event=stop_event)))
    except (DataError, OSError) as error:
        _last_failure = time.monotonic()
        log.info("%s; using the built-in plays", error)
    return Corpus("Shakespeare, twelve plays (built in)", read_text(BUILT_IN))
