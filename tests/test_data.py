import hashlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from urllib3.util.retry import Retry

from minigpt import corpus as corpus_module
from minigpt import system
from minigpt.config import UNK
from minigpt.corpus import decode_text, download_shakespeare, load_corpus, read_text
from minigpt.data import (
    TokenDataset,
    TrainLoader,
    ValLoader,
    create_dataloaders,
    create_datasets,
    prepare_text,
    split_ids,
    unigram_loss,
    unknown_share,
)
from minigpt.errors import DataError, RunStopped
from minigpt.tokenizer import WordTokenizer

GOOD = b"First Citizen:\nSpeak, speak.\n" * 10_000
PAGE = b"<!doctype html><title>Just a moment</title>"
Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(status: int, body: bytes) -> Answer:
    def handle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return handle


class Mirror:
    """A web server of this process; `asked` lists the paths requested."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.asked: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                answers[self.path](self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}{path}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, Answer]], Mirror]]:
    mirrors: list[Mirror] = []

    def start(answers: dict[str, Answer]) -> Mirror:
        mirrors.append(Mirror(answers))
        return mirrors[-1]

    yield start
    for mirror in mirrors:
        mirror.close()


@pytest.fixture(autouse=True)
def _small_shakespeare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SHAKESPEARE_BYTES", len(GOOD))
    monkeypatch.setattr(corpus_module, "SHAKESPEARE_SHA256", hashlib.sha256(GOOD).hexdigest())
    monkeypatch.setattr(corpus_module, "_last_failure", -math.inf)
    monkeypatch.setattr(Retry, "sleep", lambda *_: None)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def closed_port() -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_address[1]
    server.server_close()
    return f"http://127.0.0.1:{port}/good"


# Download


def test_a_download_arrives_whole(serve: Any, tmp_path: Path) -> None:
    mirror = serve({"/good": answer(200, GOOD)})
    path = tmp_path / "new" / "text.txt"
    assert download_shakespeare(path, urls=(mirror.url("/good"),)) == path
    assert path.read_bytes() == GOOD


@pytest.mark.parametrize("body", [PAGE, GOOD[:-1], GOOD + b"x", b"", b"x" * len(GOOD)], ids=["page", "short", "long", "nothing", "other"])
def test_an_answer_that_is_not_the_text_never_becomes_the_corpus(serve: Any, tmp_path: Path, body: bytes) -> None:
    mirror = serve({"/page": answer(200, body)})
    with pytest.raises(DataError, match="something else"):
        download_shakespeare(tmp_path / "text.txt", urls=(mirror.url("/page"),))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [answer(500, b"down"), answer(404, PAGE), answer(200, PAGE)], ids=["500", "404", "page"])
def test_the_second_mirror_is_used_when_the_first_fails(serve: Any, tmp_path: Path, bad: Answer) -> None:
    mirror = serve({"/bad": bad, "/good": answer(200, GOOD)})
    path = download_shakespeare(tmp_path / "text.txt", urls=(mirror.url("/bad"), mirror.url("/good")))
    assert path.read_bytes() == GOOD
    assert set(mirror.asked) == {"/bad", "/good"}


def test_a_server_that_is_down_for_a_moment_is_asked_again(serve: Any, tmp_path: Path) -> None:
    tries = iter([answer(503, b"soon"), answer(200, GOOD)])

    def busy_at_first(request: BaseHTTPRequestHandler) -> None:
        next(tries)(request)

    mirror = serve({"/good": busy_at_first})
    assert download_shakespeare(tmp_path / "text.txt", urls=(mirror.url("/good"),)).read_bytes() == GOOD
    assert mirror.asked == ["/good", "/good"]


def test_a_connection_that_breaks_off_leaves_no_half_file(serve: Any, tmp_path: Path) -> None:
    def half(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(GOOD)))
        request.end_headers()
        request.wfile.write(GOOD[: len(GOOD) // 2])

    mirror = serve({"/half": half})
    with pytest.raises(DataError, match=r"download failed|something else"):
        download_shakespeare(tmp_path / "text.txt", urls=(mirror.url("/half"),))
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_download_is_refused_in_words(closed_port: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be downloaded: the download failed"):
        download_shakespeare(tmp_path / "text.txt", urls=(closed_port,))
    with pytest.raises(DataError, match="no address"):
        download_shakespeare(tmp_path / "text.txt", urls=())
    assert list(tmp_path.iterdir()) == []


def test_a_good_file_is_not_fetched_again(closed_port: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(GOOD)
    before = path.stat().st_mtime_ns
    assert download_shakespeare(str(path), urls=(closed_port,)) == path
    assert path.stat().st_mtime_ns == before


def test_a_damaged_file_is_replaced(serve: Any, closed_port: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(GOOD[:100])
    with pytest.raises(DataError):
        download_shakespeare(path, urls=(closed_port,))
    mirror = serve({"/good": answer(200, GOOD)})
    download_shakespeare(path, urls=(mirror.url("/good"),))
    assert path.read_bytes() == GOOD


def test_a_stop_during_the_download_ends_it_and_leaves_nothing(serve: Any, tmp_path: Path) -> None:
    stop, asked = threading.Event(), []

    def slow(request: BaseHTTPRequestHandler) -> None:
        asked.append(1)
        request.send_response(200)
        request.send_header("Content-Length", str(len(GOOD)))
        request.end_headers()
        request.wfile.write(GOOD[: 1 << 17])
        stop.set()
        request.wfile.write(GOOD[1 << 17 :])

    mirror = serve({"/slow": slow})
    with pytest.raises(RunStopped):
        download_shakespeare(tmp_path / "text.txt", urls=(mirror.url("/slow"), mirror.url("/slow")), stop_event=stop)
    assert len(asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_stop_keeps_the_download_from_trying_further_addresses(serve: Any, tmp_path: Path) -> None:
    stop = threading.Event()

    def failing(request: BaseHTTPRequestHandler) -> None:
        stop.set()
        answer(404, b"gone")(request)

    mirror = serve({"/bad": failing, "/good": answer(200, GOOD)})
    with pytest.raises(RunStopped):
        download_shakespeare(tmp_path / "text.txt", urls=(mirror.url("/bad"), mirror.url("/good")), stop_event=stop)
    assert mirror.asked == ["/bad"]


def test_a_stop_beforehand_asks_nobody(serve: Any, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    mirror = serve({"/good": answer(200, GOOD)})
    with pytest.raises(RunStopped):
        download_shakespeare(tmp_path / "text.txt", urls=(mirror.url("/good"),), stop_event=stop)
    assert mirror.asked == []


# Reading


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xef\xbb\xbfthe cat", "the cat"),
        (b"the\r\ncat\rsat\n", "the\ncat\nsat\n"),
        ("Grüße\r\n".encode("utf-16"), "Grüße\n"),
        (b"\xfe\xff" + "Grüße".encode("utf-16-be"), "Grüße"),
        ("naïve “quotes” \U0001f339".encode(), "naïve “quotes” \U0001f339"),
        (b"", ""),
    ],
    ids=["mark", "line ends", "utf-16", "utf-16 big", "utf-8", "empty"],
)
def test_a_text_is_read_whatever_its_marks_and_line_ends(raw: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "ü x.txt"
    path.write_bytes(raw)
    assert read_text(path) == read_text(str(path)) == decode_text(raw) == text


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("Grüße".encode("latin-1"), "not UTF-8.*save it as UTF-8"),
        (b"\xff\xfeabc", "begins as UTF-16 does, but is not .*save it as UTF-8"),
        (b"\xfe\xff" + "Grüße".encode("utf-16-be") + b"\xd8\x00", r"begins as UTF-16 does, but is not \(byte 12 does not fit\)"),
        (b"PK\x03\x04\x00\x00", "zero bytes.*plain text"),
        ("abc".encode("utf-32"), "zero bytes"),
        (bytes(range(256)), "not UTF-8"),
    ],
    ids=["latin-1", "odd utf-16", "half a pair of utf-16", "binary", "utf-32", "all bytes"],
)
def test_what_is_not_a_text_is_refused_in_words(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=words):
        read_text(path)


@pytest.mark.parametrize("name", ["missing.txt", ".", "no/such/folder.txt", "zero\0byte.txt"])
def test_a_file_that_cannot_be_read_is_refused_in_words(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_text(tmp_path / name)
    assert str(tmp_path) not in str(caught.value)


def test_what_a_run_does_with_its_tokenizer_is_nothing_to_the_next_one_on_the_same_text(tiny_config: Callable[..., Any]) -> None:
    first, second = (prepare_text(tiny_config(), lambda _: None, threading.Event()) for _ in range(2))
    known = first.tokenizer.to_json()
    second.tokenizer.build_vocab("hello world", 50)
    third = prepare_text(tiny_config(), lambda _: None, threading.Event())
    assert first.tokenizer.to_json() == third.tokenizer.to_json() == known
    assert third.train_loader.dataset.ids.equal(first.train_loader.dataset.ids)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
def test_a_pipe_is_no_text_file_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="cannot be read \\(it is not a regular file\\)"):
        read_text(tmp_path / "pipe")


def test_a_text_that_is_too_large_is_refused_with_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "MAX_TEXT_BYTES", 1 << 20)
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * (1 << 20))
    assert len(read_text(path)) == 1 << 20
    path.write_bytes(b"a" * (3 << 20))
    with pytest.raises(DataError, match="3 MB; at most 1 MB"):
        read_text(path)


# Corpus


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIGPT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MINIGPT_OFFLINE")
    return tmp_path / "home"


def test_a_given_file_is_the_corpus_and_bears_its_name(tmp_path: Path) -> None:
    path = tmp_path / "my poems.txt"
    path.write_text("O rose\n", encoding="utf-8")
    corpus = load_corpus(str(path))
    assert (corpus.name, corpus.text) == ("my poems.txt", "O rose\n")
    assert corpus.sha256 == hashlib.sha256(b"O rose\n").hexdigest()


def test_a_given_file_that_cannot_be_read_is_not_replaced_by_another_text(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        load_corpus(str(tmp_path / "missing.txt"))


def test_without_a_file_the_corpus_is_downloaded_once(serve: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = serve({"/good": answer(200, GOOD)})
    monkeypatch.setattr("minigpt.corpus.SHAKESPEARE_URLS", (mirror.url("/good"),))
    for _ in range(2):
        corpus = load_corpus("")
        assert corpus.name == "Tiny Shakespeare"
        assert corpus.text.encode() == GOOD
    assert mirror.asked == ["/good"]
    assert home in next(home.rglob("*.txt")).parents


def test_without_a_network_the_built_in_plays_step_in_and_say_so(serve: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = serve({"/bad": answer(404, b"")})
    monkeypatch.setattr("minigpt.corpus.SHAKESPEARE_URLS", (mirror.url("/bad"),))
    for _ in range(2):  # the second time without waiting for the network again
        corpus = load_corpus("")
        assert "built in" in corpus.name
        assert len(corpus.text) > 1_000_000
    assert mirror.asked == ["/bad"]


def test_offline_nothing_is_asked_for(serve: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIGPT_OFFLINE", "1")
    mirror = serve({"/good": answer(200, GOOD)})
    monkeypatch.setattr("minigpt.corpus.SHAKESPEARE_URLS", (mirror.url("/good"),))
    assert system.is_offline()
    assert "built in" in load_corpus("").name
    assert mirror.asked == []


def test_offline_a_text_downloaded_before_is_still_used(serve: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.corpus.SHAKESPEARE_URLS", (serve({"/good": answer(200, GOOD)}).url("/good"),))
    load_corpus("")
    monkeypatch.setenv("MINIGPT_OFFLINE", "1")
    assert load_corpus("").name == "Tiny Shakespeare"


# Split and windows


def test_ids_are_split_90_to_10_in_order() -> None:
    train, val = split_ids(torch.arange(1000), 8)
    assert torch.equal(train.ids, torch.arange(900))
    assert torch.equal(val.ids, torch.arange(900, 1000))


def test_datasets_come_from_the_encoded_text(tiny_text: str) -> None:
    tokenizer = WordTokenizer()
    tokenizer.build_vocab(tiny_text, 60)
    train, val = create_datasets(tiny_text, tokenizer, 16)
    assert torch.cat([train.ids, val.ids]).tolist() == tokenizer.encode(tiny_text)
    assert train.ids.dtype == val.ids.dtype == torch.int64


def test_a_stop_ends_the_making_of_datasets(tiny_text: str) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(RunStopped):
        create_datasets(tiny_text, WordTokenizer(), 16, stop)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
@pytest.mark.parametrize("length", [2, 8, 9, 10, 16, 17, 18, 65, 100])
def test_validation_windows_do_not_overlap_and_count_every_target_once(length: int, batch_size: int) -> None:
    loader = ValLoader(TokenDataset(torch.arange(length), 8), batch_size)
    batches = list(loader)
    assert torch.cat([y.flatten() for _, y in batches]).tolist() == list(range(1, length))
    assert loader.targets == length - 1
    assert len(loader) == len(batches)
    for x, y in batches:
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape
        assert x.size(0) <= batch_size
        assert x.size(1) <= 8
        assert torch.equal(x + 1, y)


@pytest.mark.parametrize("length", [0, 1])
def test_nothing_to_predict_gives_no_window(length: int) -> None:
    dataset = TokenDataset(torch.arange(length), 8)
    assert len(dataset) == dataset.targets == 0
    assert list(ValLoader(dataset, 4)) == []
    with pytest.raises(IndexError):
        dataset[0]


def test_a_dataset_can_be_walked_to_its_end() -> None:
    assert sum(len(y) for _, y in TokenDataset(torch.arange(20), 8)) == 19  # type: ignore[attr-defined]  by its __getitem__


@pytest.mark.parametrize("count", [0, 1, 2, 5, 11, 12, 13, 1000])
def test_a_subset_is_evenly_spread_and_always_the_same(count: int) -> None:
    whole = ValLoader(TokenDataset(torch.arange(8 * 12 + 1), 8), 4)
    first, second = whole.subset(count), whole.subset(count)
    assert first.windows == second.windows == sorted(set(first.windows))
    assert len(first.windows) == min(max(count, 1), 12)
    gaps = {b - a for a, b in zip(first.windows, first.windows[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert first.targets == sum(y.numel() for _, y in first) == 8 * len(first.windows)


def test_a_subset_with_the_ragged_end_counts_it_rightly() -> None:
    whole = ValLoader(TokenDataset(torch.arange(21), 8), 2)
    assert whole.subset(1000).targets == whole.targets == 20
    assert ValLoader(whole.dataset, 2, [0, 2]).targets == sum(y.numel() for _, y in ValLoader(whole.dataset, 2, [0, 2])) == 12


# Training batches


def training(length: int = 500, batch_size: int = 4, T: int = 8, seed: int = 1) -> TrainLoader:
    return TrainLoader(TokenDataset(torch.arange(length), T), batch_size, torch.Generator().manual_seed(seed))


def test_training_batches_are_slices_of_the_text() -> None:
    for x, y in training():
        assert x.shape == y.shape == (4, 8)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x + 1, y)
        assert torch.equal(x, x[:, :1] + torch.arange(8))


def test_every_place_of_the_text_can_be_drawn_even_the_last() -> None:
    loader = training(length=12)
    starts = {int(start) for _ in range(100) for start in loader.batch()[0][:, 0]}
    assert starts == {0, 1, 2, 3}


def test_a_text_of_exactly_one_window_can_be_trained_on() -> None:
    x, y = training(length=9).batch()
    assert torch.equal(x[0], torch.arange(8))
    assert torch.equal(y[0], torch.arange(1, 9))


def test_batches_depend_on_their_own_generator_alone() -> None:
    first, second, other = training(seed=1), training(seed=1), training(seed=2)
    torch.manual_seed(5)
    a = first.batch()[0]
    torch.manual_seed(6)
    assert torch.equal(a, second.batch()[0])
    assert not torch.equal(a, other.batch()[0])
    kept = first.generator.get_state()
    following = first.batch()[0]
    first.generator.set_state(kept)
    assert torch.equal(first.batch()[0], following)


def test_an_epoch_has_as_many_batches_as_the_text_needs() -> None:
    assert len(training(length=500)) == len(list(training(length=500))) == math.ceil(500 / 32)
    assert len(training(length=512)) == 16


def test_loaders_are_reproducible_without_a_generator() -> None:
    train, val = split_ids(torch.arange(1000), 8)
    (first, val_loader), (second, _) = create_dataloaders(train, val, 4), create_dataloaders(train, val, 4)
    assert torch.equal(first.batch()[0], second.batch()[0])
    assert val_loader.targets == 99


# Refusals


@pytest.mark.parametrize("length", [*range(12), 19, 20, 40, 70, 72, 73])
def test_a_text_too_short_is_refused_with_a_number_that_works(length: int) -> None:
    ids = torch.arange(length)
    try:
        train, val = split_ids(ids, 64)
    except DataError as error:
        text = str(error)
    else:
        assert len(train.ids) > 64
        assert val.targets >= 1
        return
    assert f"the text has {length} tokens" in text
    if "set max_seq_len to " in text:
        split_ids(ids, int(re.findall(r"max_seq_len to (\d+)", text)[0]))
    else:
        assert "use a longer text" in text


def test_the_text_length_named_for_validation_is_enough() -> None:
    with pytest.raises(DataError, match=r"validation.*at least \d+ tokens") as caught:
        split_ids(torch.arange(10), 2)
    split_ids(torch.arange(int(re.findall(r"at least (\d+)", str(caught.value))[0])), 2)


# Baselines


def test_the_unigram_loss_is_the_one_computed_by_hand() -> None:
    train = torch.tensor([0, 0, 0, 1])
    val = torch.tensor([0, 1, 2])
    by_hand = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    assert unigram_loss(train, val, 3) == pytest.approx(by_hand, rel=1e-12)


def test_the_unigram_loss_lies_below_that_of_guessing(tiny_text: str) -> None:
    tokenizer = WordTokenizer()
    tokenizer.build_vocab(tiny_text, 60)
    train, val = create_datasets(tiny_text, tokenizer, 16)
    assert 1.0 < unigram_loss(train.ids, val.ids, 60) < math.log(60)


def test_the_share_of_unknown_tokens_is_a_share() -> None:
    assert unknown_share(torch.tensor([UNK, 5, 6, UNK])) == 0.5
    assert unknown_share(torch.tensor([5, 6])) == 0.0
