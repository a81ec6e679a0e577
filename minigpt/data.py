"""From a text to batches: the corpus (downloaded, built in or given), the split, training slices and validation windows.

Knows nothing of models. Token ids are int64 tensors; `B` is the batch, `T` the context length.
"""

import hashlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor
from urllib3.util.retry import Retry

from minigpt import system
from minigpt.config import UNK
from minigpt.errors import DataError, RunStopped
from minigpt.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

SHAKESPEARE_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://cdn.jsdelivr.net/gh/karpathy/char-rnn@master/data/tinyshakespeare/input.txt",
)
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BUILT_IN = Path(__file__).parent.parent / "assets" / "shakespeare.txt"
TRAIN_SHARE = 0.9
MAX_TEXT_BYTES = 64 << 20
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


def download_shakespeare(
    path: str | Path,
    *,
    urls: tuple[str, ...] = SHAKESPEARE_URLS,
    stop_event: threading.Event | None = None,
) -> Path:
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
        retries = Retry(total=2, connect=1, backoff_factor=0.2, status_forcelist=(429, 500, 502, 503, 504), respect_retry_after_header=False)
        session.mount("https://", HTTPAdapter(max_retries=retries))
        session.mount("http://", HTTPAdapter(max_retries=retries))
        for url in urls:
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
    with session.get(url, timeout=(3.0, 5.0), stream=True) as response:
        response.raise_for_status()
        for chunk in response.iter_content(1 << 16):
            if stop_event is not None and stop_event.is_set():
                raise RunStopped("stopped while the text was being downloaded")
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
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise DataError(f"the text has {path.stat().st_size >> 20} MB; at most {MAX_TEXT_BYTES >> 20} MB can be read: use a part of it")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"the text file {path.name!r} cannot be read ({error.strerror}); give the path of a UTF-8 text file") from error
    return decode_text(data)


def decode_text(data: bytes) -> str:
    """Decode a text as `read_text` does.

    Raises:
        DataError: the bytes are binary or in another encoding.
    """
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"the text is not UTF-8 (byte {error.start:,} does not fit): save it as UTF-8 and try again") from None
    if "\x00" in text:
        raise DataError("the text holds zero bytes, so it is a binary file: give a plain text file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def load_corpus(data_path: str, stop_event: threading.Event | None = None) -> Corpus:
    """Return the text to learn from: the file given, else Tiny Shakespeare, else the plays that come with the program.

    Raises:
        DataError: the given file cannot be read.
        RunStopped: the stop event was set meanwhile.
    """
    global _last_failure  # noqa: PLW0603  see its definition
    if data_path:
        return Corpus(Path(data_path).name, read_text(data_path))
    if not system.is_offline():
        path = system.home() / "data" / "tinyshakespeare.txt"
        try:
            if path.is_file() or time.monotonic() - _last_failure > RETRY_AFTER_S:
                return Corpus("Tiny Shakespeare", read_text(download_shakespeare(path, stop_event=stop_event)))
        except (DataError, OSError) as error:
            _last_failure = time.monotonic()
            log.info("%s; using the built-in plays", error)
    return Corpus("Shakespeare, twelve plays (built in)", read_text(BUILT_IN))


class TokenDataset:
    """A stretch of token ids seen as windows of `max_seq_len` inputs with their next tokens; windows do not overlap."""

    def __init__(self, ids: Tensor, max_seq_len: int) -> None:
        self.ids = ids
        self.max_seq_len = max_seq_len

    def __len__(self) -> int:
        """Number of windows; the last may be shorter."""
        return math.ceil(self.targets / self.max_seq_len)

    @property
    def targets(self) -> int:
        """Number of tokens to predict: all but the first."""
        return max(len(self.ids) - 1, 0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one window, each (T,) or shorter at the end."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.max_seq_len
        window = self.ids[start : start + self.max_seq_len + 1]
        return window[:-1], window[1:]


def create_datasets(
    text: str,
    tokenizer: TextTokenizer,
    max_seq_len: int,
    stop_event: threading.Event | None = None,
) -> tuple[TokenDataset, TokenDataset]:
    """Encode `text` and split its ids 90 to 10 into training and validation.

    Raises:
        DataError: the text is too short for the context, or leaves nothing to validate on.
        RunStopped: the stop event was set meanwhile.
    """
    return split_ids(torch.tensor(tokenizer.encode(text, stop_event), dtype=torch.int64), max_seq_len)


def split_ids(ids: Tensor, max_seq_len: int) -> tuple[TokenDataset, TokenDataset]:
    """Split a tensor of ids (N,) 90 to 10; see `create_datasets`."""
    border = int(len(ids) * TRAIN_SHARE)
    train, val = TokenDataset(ids[:border], max_seq_len), TokenDataset(ids[border:], max_seq_len)
    if border < max_seq_len + 1:
        hint = f"set max_seq_len to {border - 1} or less" if border > 2 else "use a longer text"
        raise DataError(
            f"the text has {len(ids):,} tokens, {border:,} of them for training; a max_seq_len of {max_seq_len} needs {max_seq_len + 1}: {hint}"
        )
    if val.targets < 1:
        raise DataError(
            f"the text has {len(ids):,} tokens, so its validation tenth has nothing to predict; at least 20 tokens are needed: use a longer text"
        )
    return train, val


class TrainLoader:
    """Endless slices of the training ids at random places, drawn from an own generator whose state can be saved."""

    def __init__(self, dataset: TokenDataset, batch_size: int, generator: torch.Generator) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.generator = generator
        self._window = torch.arange(dataset.max_seq_len + 1)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return math.ceil(len(self.dataset.ids) / (self.batch_size * self.dataset.max_seq_len))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one epoch of batches."""
        for _ in range(len(self)):
            yield self.batch()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets, each (B, T) int64."""
        last = len(self.dataset.ids) - self.dataset.max_seq_len
        starts = torch.randint(last, (self.batch_size, 1), generator=self.generator)
        window = self.dataset.ids[starts + self._window]  # (B, T + 1)
        return window[:, :-1], window[:, 1:]


class ValLoader:
    """Validation windows in order, in batches; the last, shorter window comes alone so that every target counts once."""

    def __init__(self, dataset: TokenDataset, batch_size: int, windows: list[int] | None = None) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.windows = list(range(len(dataset))) if windows is None else windows

    @property
    def targets(self) -> int:
        """Number of targets in all batches together."""
        return sum(min(self.dataset.max_seq_len, self.dataset.targets - index * self.dataset.max_seq_len) for index in self.windows)

    def subset(self, count: int) -> "ValLoader":
        """Return a loader over `count` windows, evenly spread and always the same ones; over all if there are no more."""
        total = len(self.dataset)
        if count >= total:
            return ValLoader(self.dataset, self.batch_size)
        return ValLoader(self.dataset, self.batch_size, [index * total // count for index in range(max(count, 1))])

    def __len__(self) -> int:
        """Number of batches."""
        return sum(1 for _ in self._groups())

    def _groups(self) -> Iterator[list[int]]:
        ragged = len(self.dataset) - 1 if self.dataset.targets % self.dataset.max_seq_len else None
        whole = [index for index in self.windows if index != ragged]
        for start in range(0, len(whole), self.batch_size):
            yield whole[start : start + self.batch_size]
        if ragged is not None and ragged in self.windows:
            yield [ragged]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, each (B, T) int64; (1, shorter) for the ragged end."""
        for group in self._groups():
            pairs = [self.dataset[index] for index in group]
            yield torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def create_dataloaders(
    train: TokenDataset,
    val: TokenDataset,
    batch_size: int,
    *,
    generator: torch.Generator | None = None,
) -> tuple[TrainLoader, ValLoader]:
    """Make loaders that yield `(x, y)`, int64 (B, T); training draws from `generator`, one seeded with 1337 if none is given."""
    if generator is None:
        generator = torch.Generator().manual_seed(1337)
    return TrainLoader(train, batch_size, generator), ValLoader(val, batch_size)


def unknown_share(ids: Tensor) -> float:
    """Return the share of ids (N,) that stand for an unknown token."""
    return float((ids == UNK).double().mean())


def unigram_loss(train_ids: Tensor, val_ids: Tensor, vocab_size: int) -> float:
    """Return the loss on `val_ids`, in nats per token, of a reader who knows only how frequent each token of `train_ids` is.

    Source: cross-entropy of the counts plus one (Laplace), -mean(log((n_i + 1) / (N + V))).
    """
    counts = torch.bincount(train_ids, minlength=vocab_size).double() + 1.0
    return float(-(counts / counts.sum()).log()[val_ids].mean())
