import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minigpt import tokenizer as module
from minigpt.config import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from minigpt.corpus import BUILT_IN
from minigpt.errors import CheckpointError, RunStopped
from minigpt.tokenizer import TOKENIZERS, CharTokenizer, TextTokenizer, WordTokenizer

KINDS = list(TOKENIZERS)
TINY_SHAKESPEARE = Path(__file__).parent / "tiny_shakespeare.txt"  # sixty lines of it, with speakers, dashes, hyphens and apostrophes


def learned(text: str, kind: str = "word", cap: int = 100_000) -> TextTokenizer:
    tokenizer = TOKENIZERS[kind]()
    tokenizer.build_vocab(text, cap)
    return tokenizer


def tokens(text: str) -> list[str]:
    tokenizer = learned(text)
    return [tokenizer.token_of(index) for index in tokenizer.encode(text)]


@pytest.fixture(scope="module")
def plays() -> str:
    return BUILT_IN.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def play_tokenizer(plays: str) -> TextTokenizer:
    return learned(plays)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The the THE", ["The", "the", "THE"]),
        ("'tis say'st o'er-leap loves' don’t", ["'tis", "say'st", "o'er-leap", "loves'", "don’t"]),
        ("well-fed true-love-knot", ["well-fed", "true-love-knot"]),
        ("fashion,--bequeathed me--by", ["fashion", ",", "--", "bequeathed", "me", "--", "by"]),
        ("No!! Why?; (so)", ["No", "!", "!", "Why", "?", ";", "(", "so", ")"]),
        ("ROMEO:\nO, speak\n\nagain", ["ROMEO", ":", "\n", "O", ",", "speak", "\n", "\n", "again"]),
        ("tab\tand  spaces ", ["tab", "and", "spaces"]),
        ("Grüße 42 naïve", ["Grüße", "42", "naïve"]),
    ],
)
def test_words_are_cut_by_the_word_rule(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


def test_the_line_break_is_a_token_and_decoding_puts_no_space_before_punctuation() -> None:
    text = "ROMEO:\nO, speak again; bright angel! Why?\n\nJULIET:\nSay--no.\n"
    tokenizer = learned(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_specials_are_ids_0_to_3_before_and_after_learning(kind: str) -> None:
    for tokenizer in (TOKENIZERS[kind](), learned("so it is", kind)):
        assert [tokenizer.id_of(token) for token in SPECIAL_TOKENS] == [PAD, UNK, BOS, EOS] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [5, 6, 12, 20])
def test_the_cap_counts_the_specials_and_is_used_up(kind: str, cap: int, tiny_text: str) -> None:
    tokenizer = learned(tiny_text, kind, cap)
    assert tokenizer.vocab_size == cap
    assert max(tokenizer.encode(tiny_text)) < cap


def test_a_text_with_fewer_words_than_the_cap_gives_a_smaller_vocabulary() -> None:
    assert learned("a b c a", cap=2000).vocab_size == 4 + 3
    assert learned("abca", "char", cap=2000).vocab_size == 4 + 3


def test_the_most_frequent_words_are_kept_and_the_others_are_unknown() -> None:
    tokenizer = learned("the the the cat cat sat", cap=6)
    assert tokenizer.encode("the cat sat") == [tokenizer.id_of("the"), tokenizer.id_of("cat"), UNK]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_gives_the_same_vocabulary_each_time(kind: str, tiny_text: str) -> None:
    assert learned(tiny_text, kind, 30).to_json() == learned(tiny_text, kind, 30).to_json()


def test_the_vocabulary_of_a_long_text_is_counted_on_all_of_it(plays: str) -> None:
    # Not by pieces: a count over what the rule finds in one go must agree with the vocabulary learned.
    common = Counter(re.findall(module.WORD_RULE, plays)).most_common(2000)
    tokenizer = learned(plays, cap=2000)
    threshold = common[2000 - 4 - 1][1]
    assert tokenizer.vocab_size == 2000
    assert all(tokenizer.id_of(word) is not None for word, count in common if count > threshold)


def test_nearly_all_lines_of_the_plays_come_back_exactly(plays: str, play_tokenizer: TextTokenizer) -> None:
    lines = plays.splitlines()
    exact = sum(play_tokenizer.decode(play_tokenizer.encode(line)) == line for line in lines[:: max(1, len(lines) // 4000)])
    assert exact >= 0.98 * len(lines[:: max(1, len(lines) // 4000)])


def test_a_page_of_tiny_shakespeare_comes_back_exactly() -> None:
    page = TINY_SHAKESPEARE.read_text(encoding="utf-8")
    tokenizer = learned(page)
    assert tokenizer.decode(tokenizer.encode(page)) == page


def test_characters_come_back_exactly(plays: str) -> None:
    text = plays[:20_000] + "\t  odd\u00a0spaces “quotes” émigré\U0001f339\n\n"
    tokenizer = learned(text, "char")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_ids_do_not_depend_on_how_a_long_text_is_cut(kind: str, plays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = plays[: 3 * module.PIECE + 17]
    tokenizer = learned(text, kind, 3000)
    whole = tokenizer.encode(text)
    assert whole == [index for line in text.splitlines(keepends=True) for index in tokenizer.encode(line)]
    start = text[: text.index("\n", 20_000)]
    expected = tokenizer.encode(start)
    monkeypatch.setattr(module, "PIECE", 100)
    assert tokenizer.encode(start) == expected == whole[: len(expected)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_where_a_long_text_has_no_white_space(kind: str) -> None:
    text = "春眠不覚暁、" * 40_000
    tokenizer = learned(text, kind)
    assert tokenizer.decode(tokenizer.encode(text)).replace(" ", "") == text


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_has_no_ids(kind: str) -> None:
    tokenizer = learned("a b", kind)
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reload", [False, True])
def test_a_typed_special_is_text_and_not_the_special(kind: str, reload: bool) -> None:
    text = "a <pad> b <eos> <unk> <bos>"
    tokenizer = learned(text, kind)
    if reload:
        tokenizer = TOKENIZERS[kind]().from_json(tokenizer.to_json())
    ids = tokenizer.encode(text)
    assert min(ids) > EOS
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_reads_and_writes_the_same(kind: str, tiny_text: str, tmp_path: Path) -> None:
    tokenizer = learned(tiny_text, kind)
    path = tmp_path / "new folder" / "tokenizer.json"
    tokenizer.save(path)
    loaded = TOKENIZERS[kind]().load(path)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.encode(tiny_text) == tokenizer.encode(tiny_text)
    assert loaded.decode(loaded.encode(tiny_text)) == tokenizer.decode(tokenizer.encode(tiny_text))
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]


def damaged(change: Any) -> str:
    stored = json.loads(learned("the cat").to_json())
    change(stored)
    return json.dumps(stored)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "{}",
        "[" * 100_000,
        learned("the cat").to_json()[:-40],
        damaged(lambda stored: stored.pop("model")),
        damaged(lambda stored: stored["model"]["vocab"].pop("<unk>")),
        damaged(lambda stored: stored["model"]["vocab"].update({"<unk>": 0, "<pad>": 1})),
        damaged(lambda stored: stored["model"]["vocab"].update({"gap": 99})),
        damaged(lambda stored: stored["model"]["vocab"].update({"twice": 4})),
        damaged(lambda stored: stored["model"]["vocab"].update({"word": -1})),
        damaged(lambda stored: stored["model"]["vocab"].update({"word": "5"})),
        damaged(lambda stored: stored["model"]["vocab"].update({"\ud800": len(stored["model"]["vocab"])})),
    ],
    ids=[
        "empty",
        "no json",
        "no tokenizer",
        "deep",
        "half",
        "no model",
        "no unk",
        "other order",
        "gap",
        "id twice",
        "negative",
        "text id",
        "half a pair",
    ],
)
def test_a_damaged_tokenizer_is_refused_with_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    tokenizer = learned("so it is")
    before = tokenizer.encode("so it is")
    with pytest.raises(CheckpointError, match="tokenizer"):
        tokenizer.load(path)
    assert tokenizer.encode("so it is") == before


def test_a_tokenizer_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(CheckpointError, match="not text"):
        WordTokenizer().load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
        lambda stored: stored.update(normalizer={"type": "Replace", "pattern": {"String": "cat"}, "content": "dog"}),
        lambda stored: stored.update(decoder={"type": "Replace", "pattern": {"String": "cat"}, "content": "dog"}),
        lambda stored: stored.update(truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}),
        lambda stored: stored.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ],
    ids=["pattern that explodes", "other text", "other output", "cut", "panic in the library"],
)
def test_a_stranger_s_tokenizer_brings_its_words_but_not_its_rules(change: Any) -> None:
    honest = learned("the cat aa")
    try:
        loaded = WordTokenizer().from_json(damaged_like(honest, change))
    except CheckpointError:
        return
    assert loaded.encode("the cat aa") == honest.encode("the cat aa")
    assert loaded.decode(loaded.encode("the cat")) == "the cat"


def damaged_like(tokenizer: TextTokenizer, change: Any) -> str:
    stored = json.loads(tokenizer.to_json())
    change(stored)
    return json.dumps(stored)


class SetLater(threading.Event):
    """A stop event that is set between the second and the third look at it."""

    looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [threading.Event, SetLater], ids=["beforehand", "meanwhile"])
def test_a_stop_ends_the_encoding_of_a_long_text(stop: Any, kind: str, plays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = learned(plays[:5000], kind)
    monkeypatch.setattr(module, "PIECE", 1000)
    event = stop()
    event.set()
    with pytest.raises(RunStopped):
        tokenizer.encode(plays[:100_000], event)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [threading.Event, SetLater], ids=["beforehand", "meanwhile"])
def test_a_stop_ends_the_learning_of_a_vocabulary(stop: Any, kind: str, plays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)
    event = stop()
    event.set()
    with pytest.raises(RunStopped):
        TOKENIZERS[kind]().build_vocab(plays[:100_000], 2000, event)


def test_a_stop_event_that_is_not_set_changes_nothing(tiny_text: str) -> None:
    tokenizer = WordTokenizer()
    tokenizer.build_vocab(tiny_text, 50, threading.Event())
    assert tokenizer.to_json() == learned(tiny_text, cap=50).to_json()
    assert tokenizer.encode(tiny_text, threading.Event()) == tokenizer.encode(tiny_text)


def turns_of_another_thread(work: Callable[[], object]) -> int:
    """Count how often another thread that asks every half millisecond gets its turn during `work`."""
    done = threading.Event()
    turns = 0

    def tick() -> None:
        nonlocal turns
        while not done.wait(0.0005):
            turns += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = turns
    try:
        work()
        return turns - before
    finally:
        done.set()
        ticker.join()


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_go_on_while_a_long_text_is_encoded(kind: str, plays: str) -> None:
    tokenizer = learned(plays[:200_000], kind, 2000)
    assert turns_of_another_thread(lambda: tokenizer.encode(plays[:1_000_000])) >= 4  # one call over the whole text gives it one


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_go_on_while_a_vocabulary_is_learned(kind: str, plays: str) -> None:
    assert turns_of_another_thread(lambda: learned(plays, kind, 2000)) >= 4


def test_an_id_that_does_not_exist_reads_as_unknown() -> None:
    assert CharTokenizer().token_of(10**6) == "<unk>"
    assert WordTokenizer().id_of("word") is None


def test_a_word_of_more_bytes_than_a_vocabulary_keeps_is_unknown() -> None:
    longest, wide = "x" * module.MAX_TOKEN_BYTES, "ü" * (module.MAX_TOKEN_BYTES // 2)
    tokenizer = learned(f"key {longest}\n{wide} {longest}x {wide}ü {'9' * 9000} end end", cap=12)
    found = [tokenizer.token_of(index) for index in tokenizer.encode(f"key {longest} {wide} {longest}x {wide}ü {'9' * 9000} end")]
    assert found == ["key", longest, wide, *[SPECIAL_TOKENS[UNK]] * 3, "end"]
    assert sorted(json.loads(tokenizer.to_json())["model"]["vocab"].values()) == list(range(tokenizer.vocab_size))
