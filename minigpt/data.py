"""From a text to batches: vocabulary, split, training slices and validation windows.

Knows nothing of models. Token ids are int64 tensors; `B` is the batch, `T` the context length.
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minigpt.config import UNK, TransformerConfig
from minigpt.corpus import MAX_TEXT_BYTES, Corpus, decode_text, download_shakespeare, load_corpus
from minigpt.errors import ConfigError, DataError, RunStopped
from minigpt.events import Callback
from minigpt.tokenizer import TOKENIZERS, TextTokenizer

__all__ = ["create_dataloaders", "create_datasets", "download_shakespeare", "prepare_text"]

TRAIN_SHARE = 0.9
SHORT_TEXT = 100_000  # characters, up to which a text is tried before there is a run: it may be too short for the settings
MAX_TEXT = 20_000_000  # characters of a text given by a person on the page


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
    text: str, tokenizer: TextTokenizer, max_seq_len: int, stop_event: threading.Event | None = None
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
        hint = f"set max_seq_len to {border - 1} or less" if border > 2 and val.targets else "use a longer text"
        raise DataError(
            f"the text has {len(ids):,} tokens, {border:,} of them for training; a max_seq_len of {max_seq_len} needs {max_seq_len + 1}: {hint}"
        )
    if val.targets < 1:
        raise DataError(
            f"the text has {len(ids):,} tokens, so its validation tenth has nothing to predict; at least 11 tokens are needed: use a longer text"
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
        count = min(max(count, 1), total)
        return ValLoader(self.dataset, self.batch_size, [index * total // count for index in range(count)])

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
    train: TokenDataset, val: TokenDataset, batch_size: int, *, generator: torch.Generator | None = None
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


@dataclass(frozen=True)
class Text:
    """A corpus made ready for a run: its vocabulary, its loaders, and the steps that the settings plan over it."""

    corpus: Corpus
    tokenizer: TextTokenizer
    train_loader: TrainLoader
    val_loader: ValLoader
    steps: int

    def facts(self) -> dict[str, Any]:
        """Return the text's part of a data event."""
        train_ids, val_ids = self.train_loader.dataset.ids, self.val_loader.dataset.ids
        size = self.tokenizer.vocab_size
        return {
            "corpus": self.corpus.name,
            "characters": len(self.corpus.text),
            "train_tokens": len(train_ids),
            "val_tokens": len(val_ids),
            "vocab_size": size,
            "unknown_share": unknown_share(torch.cat([train_ids, val_ids])),
            "uniform_loss": math.log(size),
            "unigram_loss": unigram_loss(train_ids, val_ids, size),
        }


def checked_text(text: str, config: TransformerConfig) -> str:
    """Return a text that a person gave as it will be read from its file, if there can be a run on it.

    Raises:
        DataError: it is empty, too long, binary, or too short for these settings; the message then has a number that would work.
    """
    if not text.strip():
        raise DataError(f"the text is empty; give at least a page of it, as text or as a file of at most {MAX_TEXT_BYTES >> 20} MB")
    if len(text) > MAX_TEXT:
        raise DataError(f"the text has {len(text):,} characters; at most {MAX_TEXT:,} can be read: use a part of it")
    text = decode_text(text.encode("utf-8", "replace"))
    if len(text) < SHORT_TEXT:
        tokenizer = TOKENIZERS[config.tokenizer]()
        tokenizer.build_vocab(text, config.vocab_size)
        create_datasets(text, tokenizer, config.max_seq_len)
    return text


_recent: dict[tuple[str, str, int], tuple[str, Tensor]] = {}


def _tokenised(corpus: Corpus, config: TransformerConfig, stop: threading.Event) -> tuple[TextTokenizer, Tensor]:
    """Return the vocabulary of a corpus and its ids (N,). The latest answer is kept, so that a second run on the same text begins at once."""
    key = (corpus.sha256, config.tokenizer, config.vocab_size)
    tokenizer = TOKENIZERS[config.tokenizer]()
    if (known := _recent.get(key)) is not None:
        return tokenizer.from_json(known[0]), known[1]
    tokenizer.build_vocab(corpus.text, config.vocab_size, stop)
    ids = torch.tensor(tokenizer.encode(corpus.text, stop), dtype=torch.int64)
    _recent.clear()
    _recent[key] = tokenizer.to_json(), ids  # not the object, which its receiver may change
    return tokenizer, ids


def prepare_text(config: TransformerConfig, emit: Callback, stop: threading.Event) -> Text:
    """Read the text that `config` names, learn its vocabulary and plan the run; `config.vocab_size` becomes the real one.

    Raises:
        ConfigError: the warm-up does not fit into the epochs asked for.
        DataError: the text cannot be read or is too short.
        RunStopped: the stop event was set meanwhile.
    """
    corpus = load_corpus(config.data_path, stop)
    emit({"type": "status", "phase": "preparing", "message": f"reading {len(corpus.text):,} characters of {corpus.name}"})
    tokenizer, ids = _tokenised(corpus, config, stop)
    if tokenizer.vocab_size < 5:
        raise DataError(f"{corpus.name} has nothing to learn from: use a longer text")
    config.vocab_size = tokenizer.vocab_size
    if config.vocab_path:
        tokenizer.save(config.vocab_path)
    train, val = create_dataloaders(*split_ids(ids, config.max_seq_len), config.batch_size, generator=torch.Generator().manual_seed(config.seed))
    if stop.is_set():
        raise RunStopped("stopped before there was a model")
    steps = config.max_steps if config.max_epochs is None else min(config.max_steps, config.max_epochs * len(train))
    if config.warmup_steps >= steps:
        raise ConfigError(
            f"warmup_steps is {config.warmup_steps}; max_epochs {config.max_epochs} makes this run {steps} steps long: try {steps // 10}"
        )
    return Text(corpus, tokenizer, train, val, steps)
