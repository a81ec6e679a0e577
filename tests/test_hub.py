import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from minigpt.cli import main
from minigpt.errors import CheckpointError
from minigpt.inspection import hub as module
from minigpt.inspection import opening
from minigpt.inspection.hub import inspect_hub

WEIGHTS = {"wte.weight": torch.zeros(50, 8), "h.0.ln_1.weight": torch.ones(8), "h.0.attn.c_attn.weight": torch.zeros(8, 24)}
CONFIG = {"model_type": "gpt2", "vocab_size": 50, "n_head": 2, "architectures": ["GPT2LMHeadModel"]}
MODEL, SETTINGS = "/someone/tiny/resolve/main/model.safetensors", "/someone/tiny/resolve/main/config.json"


class Hub:
    """A real server with what the Hub would have: a file's bytes, or a status and headers."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | tuple[int, dict[str, str]]] = {
            MODEL: save(WEIGHTS, metadata={"format": "pt"}), SETTINGS: json.dumps(CONFIG).encode(),
        }  # fmt: skip
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.knows_ranges = True
        self.told_size = ""  # in place of the true one
        this = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                this.asked.append((self.path, dict(self.headers)))
                this.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        found = self.files.get(handler.path, (404, {"X-Error-Code": "EntryNotFound"}))
        if isinstance(found, tuple):
            headers, body = found[1], b""
            handler.send_response(found[0])
        elif self.knows_ranges:
            last = min(int(handler.headers["Range"].removeprefix("bytes=0-")), len(found) - 1)
            headers, body = {"Content-Range": f"bytes 0-{last}/{self.told_size or len(found)}"}, found[: last + 1]
            handler.send_response(206)
        else:
            headers, body = {}, found
            handler.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            handler.send_header(name, value)
        handler.end_headers()
        try:
            handler.wfile.write(body)
        except OSError:
            handler.close_connection = True  # whoever asked has read enough

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("MINIGPT_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Hub()
    yield server
    server.close()


def test_a_model_is_described_by_its_header_and_its_config(hub: Hub) -> None:
    report = inspect_hub("someone/tiny", hub.url)
    assert {tensor.name: tensor.shape for tensor in report.tensors} == {name: tuple(value.shape) for name, value in WEIGHTS.items()}
    assert (report.format, report.made_by, report.checked) == ("safetensors", "Hugging Face transformers", False)
    assert report.parameters == sum(value.numel() for value in WEIGHTS.values())
    assert report.config["n_head"] == 2
    assert report.size_bytes == len(hub.files[MODEL])
    assert report.warnings == []
    assert report.notes[0] == "values not checked: only the header was read"


def test_two_requests_are_made_each_for_a_bounded_range_and_without_a_login(hub: Hub, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    inspect_hub("someone/tiny", hub.url)
    assert [(path, headers["Range"]) for path, headers in hub.asked] == [(MODEL, "bytes=0-16777223"), (SETTINGS, "bytes=0-65536")]
    assert not any("Authorization" in headers or "Cookie" in headers for _, headers in hub.asked)


def test_of_a_large_file_only_the_header_is_taken(hub: Hub) -> None:
    hub.files[MODEL] = save({"wte.weight": torch.zeros(8 << 20)}, metadata={"format": "pt"})  # 32 MB
    hub.knows_ranges = False
    seen: list[int] = []
    real = module.inspect_parts

    def counted(name: str, size: int, parts: Any, beside: bytes) -> Any:
        seen.append(len(parts[0]))
        return real(name, size, parts, beside)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "inspect_parts", counted)
        assert inspect_hub("someone/tiny", hub.url).size_bytes == len(hub.files[MODEL])
    assert seen[0] <= 1 << 17


def test_a_long_header_is_read_and_one_above_16_mb_refused(hub: Hub) -> None:
    hub.files[MODEL] = save(WEIGHTS, metadata={"format": "pt", "note": "x" * (15 << 20)})
    assert inspect_hub("someone/tiny", hub.url).parameters == sum(value.numel() for value in WEIGHTS.values())
    hub.files[MODEL] = ((16 << 20) + 1).to_bytes(8, "little") + b"{}"
    with pytest.raises(CheckpointError, match="header is cut short, or larger than 16 MB"):
        inspect_hub("someone/tiny", hub.url)


def test_a_header_that_would_fill_the_memory_does_so_in_a_child_with_limits(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "run_child", lambda *_: b'{"refused": "this was a child"}')
    with pytest.raises(CheckpointError, match="this was a child"):
        inspect_hub("someone/tiny", hub.url)


@pytest.mark.parametrize("size", ["-5", "9" * 30])
def test_a_size_that_no_file_can_have_is_refused(hub: Hub, size: str) -> None:
    hub.told_size = size
    with pytest.raises(CheckpointError, match="said to be of a size that no file can have"):
        inspect_hub("someone/tiny", hub.url)


def test_a_model_without_a_config_json_is_described_all_the_same(hub: Hub) -> None:
    del hub.files[SETTINGS]
    assert "stored" not in inspect_hub("someone/tiny", hub.url).origins.values()


def test_a_config_json_that_is_no_json_becomes_a_warning(hub: Hub) -> None:
    hub.files[SETTINGS] = b'{"vocab_size": NaN}'
    report = inspect_hub("someone/tiny", hub.url)
    assert "stored" not in report.origins.values()
    assert "This file's config.json is not valid JSON. Nothing was taken from it: mend it, or move it away." in report.warnings


def test_a_config_json_at_odds_with_the_weights_becomes_a_warning(hub: Hub) -> None:
    hub.files[SETTINGS] = b'{"vocab_size": 60}'
    assert "config says a vocabulary of 60, the embedding has 50 rows (vocab_size)" in inspect_hub("someone/tiny", hub.url).warnings


def test_the_hub_s_own_redirects_are_followed(hub: Hub) -> None:
    hub.files["/api/resolve-cache/x"] = hub.files[MODEL]
    hub.files["/moved"] = (302, {"Location": f"{hub.url}/api/resolve-cache/x"})
    hub.files[MODEL] = (307, {"Location": "/moved"})
    assert inspect_hub("someone/tiny", hub.url).parameters > 0


@pytest.mark.parametrize(
    "place",
    ["http://169.254.169.254/latest", "https://evil.example/x", "https://hf.co.evil.example/x", "https://evilhf.co/x", "http://cdn-lfs.hf.co/x",
     "https://user@cdn-lfs.hf.co/x", "https://cdn-lfs.hf.co:8443/x", "https://evil.example\\.hf.co/x", "file:///etc/passwd", "//evil.example/x"],
)  # fmt: skip
def test_a_redirect_to_any_other_host_is_not_followed(hub: Hub, place: str) -> None:
    hub.files[MODEL] = (302, {"Location": place})
    with pytest.raises(CheckpointError, match="sent on to a host that is not its own; it was not followed"):
        inspect_hub("someone/tiny", hub.url)
    assert len(hub.asked) == 1


@pytest.mark.parametrize("host", ["cdn-lfs.hf.co", "cdn-lfs-us-1.hf.co", "cas-bridge.xethub.hf.co", "hf.co"])
def test_the_hosts_where_the_hub_keeps_large_files_are_its_own(host: str) -> None:
    assert module._STORES.fullmatch(host)


def test_redirects_in_a_circle_end(hub: Hub) -> None:
    hub.files[MODEL] = (302, {"Location": MODEL})
    with pytest.raises(CheckpointError, match="could not be reached"):
        inspect_hub("someone/tiny", hub.url)
    assert len(hub.asked) == module.MAX_REDIRECTS


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((401, {"X-Error-Code": "RepoNotFound"}), "no public model of this name on the Hub: it is missing, private, or asks for a login"),
        ((403, {"X-Error-Code": "GatedRepo"}), "no public model of this name"),
        ((404, {"X-Error-Code": "RepoNotFound"}), "no public model of this name"),
        ((404, {"X-Error-Code": "EntryNotFound"}), r"has no model\.safetensors: its weights are split into several files"),
        ((503, {}), r"could not be reached \(HTTPError\)"),
        ((429, {}), r"could not be reached \(HTTPError\)"),
        (b"", "file is empty"),
        (b"<html>sorry</html>", "is a web page"),
        (b"<htm", "header is cut short"),
        ((2**40).to_bytes(8, "little") + b"{}", "header is cut short, or larger than 16 MB"),
        (save(WEIGHTS)[:-1], "its tensors end past its last byte"),
    ],
)
def test_what_the_hub_cannot_give_is_said_in_a_sentence(hub: Hub, answer: Any, sentence: str) -> None:
    hub.files[MODEL] = answer
    with pytest.raises(CheckpointError, match=sentence):
        inspect_hub("someone/tiny", hub.url)


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b/c", "../etc/passwd", "a/..", "a/b?x=1", "a/b#c", "a b/c", "a/b\n", "/a/b", "https://x/y", "a/@b", "ä/b", ""]
)
def test_a_name_of_another_form_is_refused_before_anything_is_asked(hub: Hub, name: str) -> None:
    with pytest.raises(CheckpointError, match="called owner/name, such as openai-community/gpt2"):
        inspect_hub(name, hub.url)
    assert hub.asked == []


def test_without_a_network_a_sentence_says_so(hub: Hub) -> None:
    hub.server.server_close()
    with pytest.raises(CheckpointError, match=r"could not be reached \(ConnectionError\); try again, or open a downloaded file"):
        inspect_hub("someone/tiny", hub.url)


def test_where_downloads_are_switched_off_nothing_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIGPT_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="needs the network, which MINIGPT_OFFLINE switches off"):
        inspect_hub("someone/tiny", hub.url)
    assert hub.asked == []


def lookups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hub"]


def test_a_server_that_dribbles_is_left_and_no_thread_stays(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def dribble(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not over.wait(0.02):
            handler.wfile.write(b"\0")

    monkeypatch.setattr(hub, "answer", dribble)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    try:
        with pytest.raises(CheckpointError, match=r"could not be reached \(Timeout(Error)?\)"):
            inspect_hub("someone/tiny", hub.url)
        for lookup in lookups():
            lookup.join(20)
        assert lookups() == []
    finally:
        over.set()


def test_a_name_that_is_looked_for_in_vain_keeps_nobody_waiting(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(20) and [])
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    try:
        with pytest.raises(CheckpointError, match=r"The Hub could not be reached \(TimeoutError\); try again, or open a downloaded file"):
            inspect_hub("someone/tiny", "http://hub.invalid")
        assert len(lookups()) == 1
    finally:
        over.set()
        for lookup in lookups():
            lookup.join(20)


def test_the_command_takes_a_name_where_there_is_no_such_path(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "inspect_hub", lambda name: inspect_hub(name, hub.url))
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "someone/tiny"]) == 0
    assert "parameters: 600" in capsys.readouterr().out
    assert main(["inspect", "someone/large", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == {"error": said.err.removeprefix("someone/large: ").strip()}
    hub.asked.clear()
    (tmp_path / "runs").mkdir()
    for path in ("runs/lost", "elsewhere/lost.safetensors", "tiny", "a/b/c"):
        assert main(["inspect", path]) == 1
        assert "There is no such file" in capsys.readouterr().err
    assert hub.asked == []
