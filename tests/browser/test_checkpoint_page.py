"""The Checkpoint tab in a real browser: what it tells of saved models, what they write, and how it meets other people's files."""

import dataclasses
import json
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from browser.conftest import (
    EXAMPLE,
    Faults,
    Server,
    TabFactory,
    cells,
    choose,
    drop,
    open_part,
    opening,
    reload,
    row_of,
    trace,
    train_with,
)
from minigpt.header import our_metadata, read_header

MARKUP = "<img src=x onerror=window.ran=1>"
STEP = f"step {our_metadata(read_header(EXAMPLE))['step']:,}"
CLICK = """cells => cells.forEach(cell => ['mousedown', 'mouseup', 'click'].forEach(
    name => cell.dispatchEvent(new MouseEvent(name, { bubbles: true, cancelable: true }))))"""
VAL = 2  # trace of the loss chart


def write(page: Page, server: Server, checkpoint: str, prompt: str, length: int, temperature: float, seed: int) -> str:
    """Fill the writing part, press Write, and return the text, which must be the one that the API gives for the same checkpoint and values."""
    for name, value in (("prompt", prompt), ("length", length), ("temperature", temperature), ("seed", seed)):
        field = page.locator(f"#{name} textarea" if name == "prompt" else f"#{name} input[type=number]")
        field.fill(str(value))
        field.press("Tab")
    page.locator("#write").click()
    text = str(server.call("generate", checkpoint, prompt, length, temperature, seed))
    expect(page.locator("#text textarea")).to_have_value(text)
    return text


@dataclasses.dataclass
class TrainerConfig:
    vocab_size: int = 40
    d_model: int = 16
    n_heads: int = 2
    note: str = MARKUP


@pytest.fixture
def someone_elses_module() -> Iterator[Callable[[], Any]]:
    """Return the class of a config that lives in a module which only its writer has."""
    module = types.ModuleType("somebodys_trainer")
    TrainerConfig.__module__, TrainerConfig.__qualname__ = module.__name__, "TrainerConfig"
    module.TrainerConfig = TrainerConfig
    sys.modules[module.__name__] = module
    yield TrainerConfig
    del sys.modules[module.__name__]


class Command:
    """Leaves a marker where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"touch {self.marker}",)


def test_the_example_is_there_when_there_is_no_run(untouched: Server, tab: TabFactory) -> None:
    page = tab(untouched)
    page.get_by_role("tab", name="Checkpoint").click()
    metadata = our_metadata(read_header(EXAMPLE))
    expect(page.locator("#verdict .line")).to_contain_text(f"step {metadata['step']:,} · validation loss {metadata['val_loss']:.2f}")
    assert [row[:3] for row in cells(page, "checkpoints")] == [["example", "example", f"{metadata['step']:,}"]]
    prompt = page.locator("#prompt textarea").input_value()
    assert prompt.endswith(":")
    text = page.locator("#text textarea").input_value()
    assert text.startswith(prompt)
    assert len(text.split()) > 10


def test_the_list_shows_a_runs_best_and_last_and_a_click_opens_one(shelf: Page, server: Server, run: str) -> None:
    rows = cells(shelf, "checkpoints")
    assert [run, "best"] in [row[:2] for row in rows]
    assert [run, "last"] in [row[:2] for row in rows]
    metadata = our_metadata(read_header(server.home / run / "last.safetensors"))
    choose(shelf, run, "last")
    expect(shelf.locator("#verdict .line")).to_have_text(
        re.compile(rf"step 60 · validation loss {metadata['val_loss']:.2f} · perplexity [\d,.]+ · .*best")
    )
    settings = {row[0]: row for row in cells(shelf, "config")}
    assert settings["d_model"] == ["d_model", "16", "Width", "stored"]
    assert "arch" in settings
    x, y = trace(shelf, "curve", VAL)
    assert x == metadata["series"]["val"]["x"] == [0, 20, 40, 60]
    assert y == metadata["series"]["val"]["y"]
    open_part(shelf, "parts")
    expect(shelf.locator("#parts .virtual-row").first).to_be_visible()
    parts = cells(shelf, "parts")
    assert [row[0] for row in parts] == ["embedding", "block 0"]
    assert sum(int(row[1].replace(",", "")) for row in parts) == metadata["parameters"]


def test_of_two_quick_clicks_the_last_is_shown(shelf: Page, run: str) -> None:
    choose(shelf, "example", "example")
    both = [row_of(shelf, run, kind).get_by_role("gridcell").nth(1).element_handle() for kind in ("last", "best")]
    with shelf.expect_request("**/queue/join*"):
        shelf.evaluate(CLICK, both)  # a mouse sent to places that were measured before would miss on a page that moves
    expect(shelf.locator("#verdict")).to_contain_text(f"{run}/best")


def test_write_continues_the_prompt_and_the_same_seed_writes_the_same(shelf: Page, server: Server) -> None:
    choose(shelf, "example", "example")
    prompt = shelf.locator("#prompt textarea").input_value() + "\nO"
    first = write(shelf, server, "example/example", prompt, 40, 0.8, 3)
    assert first.startswith(prompt)
    assert len(first.split()) > 10
    assert write(shelf, server, "example/example", prompt, 40, 0.8, 4) != first
    assert write(shelf, server, "example/example", prompt, 40, 0.8, 3) == first
    cold = write(shelf, server, "example/example", prompt, 40, 0, 1)
    assert cold.startswith(prompt)
    assert write(shelf, server, "example/example", prompt, 40, 0, 2) == cold


def test_an_uploaded_checkpoint_of_ours_is_shown_and_writes(shelf: Page, server: Server, run: str) -> None:
    choose(shelf, run, "best")
    expect(shelf.locator("#verdict .line")).to_contain_text("step 60")
    drop(shelf, EXAMPLE)
    expect(shelf.locator("#verdict .line")).to_contain_text(STEP)
    assert ["vocab_size", "2000", "Vocabulary", "stored"] in cells(shelf, "config")
    assert len(trace(shelf, "curve", VAL)[0]) > 3
    assert write(shelf, server, "example/example", "KING:", 20, 0.8, 7).startswith("KING:")


def test_somebody_elses_pickled_checkpoint_is_shown_and_never_run(shelf: Page, tmp_path: Path, someone_elses_module: Callable[[], Any]) -> None:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(40, 16), "head": torch.nn.Linear(16, 40)})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    state = {**model.state_dict(), f"block.{MARKUP}.weight": torch.zeros(2, 2)}
    whole = {
        "model_state_dict": state,
        "optimizer_state_dict": optimizer.state_dict(),
        "config": someone_elses_module(),
        "step": 1234,
        "val_loss": 2.5,
    }
    torch.save(whole, tmp_path / "theirs.pt")
    drop(shelf, tmp_path / "theirs.pt")
    expect(shelf.locator("#verdict .line")).to_contain_text("step 1,234 · validation loss 2.50 · perplexity 12")
    settings = {row[0]: row[1] for row in cells(shelf, "config")}
    assert settings["d_model"] == "16"
    assert settings["note"] == MARKUP
    open_part(shelf, "tensors")
    expect(shelf.locator("#tensors")).to_contain_text(MARKUP)
    assert shelf.evaluate("window.ran") is None
    assert shelf.locator("img[src=x]").count() == 0
    expect(shelf.locator("#verdict")).to_contain_text("it can be looked at but not made to write")
    expect(shelf.locator("#write")).to_be_hidden()


def test_a_bad_file_gets_one_sentence_and_harms_nothing(shelf: Page, server: Server, tmp_path: Path, run: str) -> None:
    marker = tmp_path / "marker"
    torch.save({"model": Command(marker)}, tmp_path / "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps({"model": Command(marker)}))
    (tmp_path / "notes.pt").write_text("this is no checkpoint\n" * 20)
    (tmp_path / "page.safetensors").write_text("<!DOCTYPE html><html><body>404</body></html>\n" * 50)
    (tmp_path / "cut.safetensors").write_bytes(EXAMPLE.read_bytes()[:100_000])
    (tmp_path / "empty.pt").write_bytes(b"")
    before = {path: path.read_bytes() for path in (server.home / run).iterdir()}
    choose(shelf, run, "best")
    expect(shelf.locator("#verdict .line")).to_contain_text("best of its run")
    for file in sorted(path for path in tmp_path.iterdir() if path != marker):
        with opening(shelf):
            drop(shelf, file)
        line = shelf.locator("#verdict .wrong")
        expect(line).to_have_text(re.compile(r"^[A-Z].{15,}[.)]$"))
        assert shelf.locator("#verdict p").count() == 1
        assert str(tmp_path) not in line.inner_text()
        expect(shelf.locator("#config")).to_be_hidden()
        assert not marker.exists()
    assert {path: path.read_bytes() for path in (server.home / run).iterdir()} == before
    choose(shelf, run, "best")
    expect(shelf.locator("#verdict .line")).to_contain_text("best of its run")


def test_markup_in_a_checkpoint_of_ours_is_shown_as_text(shelf: Page, tmp_path: Path) -> None:
    with safe_open(EXAMPLE, "pt") as file:
        stored = dict(file.metadata())
    metadata = json.loads(stored["minigpt"])
    metadata["samples"] = [{"step": 1, "elapsed": 0.0, "loss": 1.0, "prompt": "", "text": MARKUP}]
    metadata["data"]["corpus"] = MARKUP
    save_file(load_file(EXAMPLE), tmp_path / f"{MARKUP}.safetensors", {**stored, "minigpt": json.dumps(metadata)})
    drop(shelf, tmp_path / f"{MARKUP}.safetensors")
    open_part(shelf, "kept")
    expect(shelf.locator("#kept")).to_contain_text(MARKUP)
    shelf.locator("#prompt textarea").fill(MARKUP)
    shelf.locator("#write").click()
    expect(shelf.locator("#text textarea")).to_have_value(re.compile("^<"))
    assert shelf.evaluate("window.ran") is None
    assert shelf.locator("img[src=x]").count() == 0


def test_a_text_with_markup_trains_without_touching_the_page(page: Page, faults: Faults) -> None:
    train_with(page, f"{MARKUP}\n" * 300, max_steps=20)
    page.wait_for_function("window.minigpt.samples.length > 1")
    reload(page, faults)
    expect(page.locator("#after")).to_contain_text("onerror")
    assert page.locator("img[src=x]").count() == 0
    assert page.evaluate("window.ran") is None
