"""Text to ids and back: words with the line break as a token, or single characters.

Both are pipelines of the `tokenizers` library and live entirely in their JSON. Nothing here knows of files other than that JSON, or of models.
"""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minigpt.config import SPECIAL_TOKENS, UNK
from minigpt.errors import CheckpointError, RunStopped
from minigpt.header import is_text
from minigpt.system import write_atomically

WORD_RULE = r"\n|['’]?\w+(?:['’\-]\w+)*['’]?|--|[^\w\s]"
PIECE = 1 << 16  # characters handed to the library at once: it holds the interpreter's lock for tens of milliseconds, not for the whole text
PIECES_A_BATCH = 8
MAX_TOKEN_BYTES = 100  # of a word in a vocabulary: the largest of them must fit into what is read of a checkpoint's header


class TextTokenizer:
    """What both tokenizers share. Ids 0 to 3 are pad, unk, bos and eos; they count in the vocabulary's size."""

    kind = ""
    never_written: tuple[int, ...] = tuple(range(len(SPECIAL_TOKENS)))

    def __init__(self) -> None:
        self._tokenizer = self._pipeline({token: index for index, token in enumerate(SPECIAL_TOKENS)})

    def _pipeline(self, vocabulary: dict[str, int]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[UNK]))
        tokenizer.encode_special_tokens = True
        self._add_rules(tokenizer)
        return tokenizer

    def _add_rules(self, tokenizer: Tokenizer) -> None:
        """Set how text falls into tokens and how they are joined again."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, stop_event: threading.Event | None = None) -> list[int]:
        """Turn text into ids; what is not in the vocabulary becomes id 1.

        Works in pieces that end at white space, so that other threads go on and a stop is obeyed within a batch of pieces.

        Raises:
            RunStopped: the stop event was set meanwhile.
        """
        ids: list[int] = []
        pieces = _pieces(text, stop_event)
        while batch := list(itertools.islice(pieces, PIECES_A_BATCH)):
            ids += [token for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False) for token in encoding.ids]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Turn ids into text. A token's neighbours decide on spaces: decode whole lists and show the new end."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """Return a token's id, or None if it is not in the vocabulary."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def token_of(self, index: int) -> str:
        """Return the token with this id, or the unknown token's text for an id that does not exist."""
        return self._tokenizer.id_to_token(index) or SPECIAL_TOKENS[UNK]

    def to_json(self) -> str:
        """Return the whole tokenizer as the library's JSON."""
        return self._tokenizer.to_str()

    def from_json(self, text: str) -> Self:
        """Become the tokenizer that `text` describes.

        Raises:
            CheckpointError: the text is not a tokenizer of the library, or lacks the special tokens.
        """
        try:
            vocabulary = json.loads(text)["model"]["vocab"]
            ids = sorted(vocabulary.values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError("the tokenizer in this file is damaged; its JSON is not a tokenizer") from error
        if ids != list(range(len(ids))) or any(type(index) is not int for index in ids):
            raise CheckpointError("the tokenizer in this file is damaged; its ids are not 0, 1, 2 and so on")
        if not all(map(is_text, vocabulary)):
            raise CheckpointError("the tokenizer in this file is damaged; it has a token that is no text")
        if any(vocabulary.get(token) != index for index, token in enumerate(SPECIAL_TOKENS)):
            raise CheckpointError(f"the tokenizer in this file lacks {', '.join(SPECIAL_TOKENS)} as ids 0 to 3")
        self._tokenizer = self._pipeline(vocabulary)  # our own rules: a stranger's patterns can take for ever
        return self

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file, atomically."""
        write_atomically(Path(path), self.to_json().encode())

    def load(self, path: str | Path) -> Self:
        """Become the tokenizer saved at `path`.

        Raises:
            CheckpointError: the file is not a tokenizer.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError("the tokenizer file is not text") from error
        return self.from_json(text)


class WordTokenizer(TextTokenizer):
    """Words as written, with inner apostrophes and hyphens; single punctuation marks; and the line break."""

    kind = "word"

    def _add_rules(self, tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_RULE), "removed", invert=True)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace(Regex(r"^(?=.)"), " "),
                decoders.Fuse(),
                decoders.Replace(Regex(r" +(?=[.,;:!?)\]\n])"), ""),
                decoders.Replace(Regex(r"(?<=\n) +"), ""),
                decoders.Replace(Regex(r" ?-- ?"), "--"),
                decoders.Strip(" ", 1, 0),
            ]
        )

    def build_vocab(self, text: str, max_vocab: int, stop_event: threading.Event | None = None) -> None:
        """Learn the `max_vocab` most frequent tokens of `text`, the four specials included; one of more than `MAX_TOKEN_BYTES` stays unknown.

        Raises:
            RunStopped: the stop event was set meanwhile.
        """
        learner = self._pipeline({})
        trainer = trainers.WordLevelTrainer(vocab_size=max_vocab, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
        learner.train_from_iterator(_pieces(text, stop_event), trainer)
        found = learner.get_vocab()
        kept = [token for token in sorted(found, key=found.__getitem__) if len(token.encode()) <= MAX_TOKEN_BYTES]
        self._tokenizer = self._pipeline({token: index for index, token in enumerate(kept)})


class CharTokenizer(TextTokenizer):
    """One token per character; decoding gives the text back exactly."""

    kind = "char"

    def _add_rules(self, tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()

    def build_vocab(self, text: str, max_vocab: int, stop_event: threading.Event | None = None) -> None:
        """Learn the `max_vocab` most frequent characters of `text`, the four specials included."""
        counts: Counter[str] = Counter()
        for piece in _pieces(text, stop_event):  # the count of one long string would hold the interpreter's lock
            counts.update(piece)
        kept = sorted(character for character, _ in counts.most_common(max_vocab - len(SPECIAL_TOKENS)))
        self._tokenizer = self._pipeline({token: index for index, token in enumerate([*SPECIAL_TOKENS, *kept])})


class OtherTokenizer(TextTokenizer):
    """Any tokenizer of the library, with its own rules. A stranger's rules can take for ever: only for files of the person who waits."""

    kind = "other"

    def from_json(self, text: str) -> Self:
        """Become the tokenizer that `text` describes; its ids mean what it says.

        Raises:
            CheckpointError: the text is not a tokenizer of the library.
        """
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError("tokenizer.json is not a tokenizer of the tokenizers library") from error
        is_like_ours = all(self.id_of(token) == index for index, token in enumerate(SPECIAL_TOKENS))
        self.never_written = TextTokenizer.never_written if is_like_ours else ()
        return self


TOKENIZERS: dict[str, type[WordTokenizer] | type[CharTokenizer]] = {"word": WordTokenizer, "char": CharTokenizer}


def _pieces(text: str, stop_event: threading.Event | None) -> Iterator[str]:
    """Cut text at white space into pieces of at most `PIECE` characters; no token of either kind spans white space."""
    start = 0
    while start < len(text):
        if stop_event is not None and stop_event.is_set():
            raise RunStopped("stopped while the text was being read")
        end = start + PIECE
        if end < len(text):
            cut = max(text.rfind("\n", start, end), text.rfind(" ", start, end))
            end = cut + 1 if cut > start else end
        yield text[start:end]
        start = end
