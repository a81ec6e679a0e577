"""The X-ray in a real browser: values of tensors, files that stay on the visitor's disk, two files compared, files taken away, hostile uploads."""

import json
import re
import shutil
import struct
import zipfile
from pathlib import Path

import hostile
import torch
from playwright.sync_api import Page, Route, expect
from safetensors.torch import load_file

from browser.conftest import EXAMPLE, Faults, Server, cells, choose, drop, open_part, opening, wait_until
from browser.test_checkpoint_page import MARKUP, STEP
from minigpt.inspection import inspect_file

LARGE = 70 << 20  # more than may be uploaded
TYPICAL = (
    "rce_os_system.pt", "rce_legacy.pt", "st_is_pickle.safetensors", "bomb_pickle.pt", "shape_stride0.pt", "hash_bomb.pt", "deep_tuple_key.pt",
    "sparse_oob.pt", "st_overlap.safetensors", "html_error.pt", "sem_names.pt", "<img src=x onerror=alert(1)>.pt",
)  # fmt: skip


def figure(page: Page, name: str) -> dict[str, object]:
    """What plotly holds of a chart's first trace."""
    page.wait_for_function("id => document.querySelector(`#${id} .js-plotly-plot`)?._fullLayout", arg=name)
    found = page.evaluate(
        "id => { const t = document.querySelector(`#${id} .js-plotly-plot`).data[0]; return {type: t.type, y: t.y, z: t.z}; }", name
    )
    return dict(found)


def test_values_are_measured_and_a_chosen_tensor_is_drawn(shelf: Page, server: Server, run: str) -> None:
    choose(shelf, run, "best")
    open_part(shelf, "tensors")
    shelf.locator("#measure").click()
    expect(shelf.locator("#measured")).to_contain_text(re.compile(r"\d+ tensors measured · all values are finite"))
    weights = load_file(server.home / run / "best.safetensors")
    rows = {row[0]: row for row in cells(shelf, "tensors")}
    embedding = weights["model.embedding.weight"]
    assert rows["embedding.weight"][1:5] == [" × ".join(map(str, embedding.shape)), "F32", f"{embedding.min():.4g}", f"{embedding.max():.4g}"]
    shelf.locator("#tensors .virtual-row").filter(has_text="embedding.weight").get_by_role("gridcell").first.click()
    expect(shelf.locator("#measured")).to_contain_text("embedding.weight: from")
    assert sum(figure(shelf, "histogram")["y"]) == embedding.numel()
    picture = figure(shelf, "picture")["z"]
    assert (len(picture), len(picture[0])) == (64, 16)
    choose(shelf, run, "last")
    expect(shelf.locator("#histogram")).to_be_hidden()
    assert "" in {row[3] for row in cells(shelf, "tensors")}


WATCH = """window.seen = new Set();
(function look() {
    for (const part of document.querySelectorAll('#measured, #text textarea')) window.seen.add(part.innerText || part.value || '');
    requestAnimationFrame(look);
})()"""


def test_what_was_asked_of_one_file_is_not_shown_beside_another(shelf: Page, server: Server, run: str, opened_tab: tuple[Page, Faults]) -> None:
    """The request is held back until the other file is open, so that nothing is there yet that could be cancelled."""
    first, second = (len(inspect_file(path).tensors) for path in (server.home / run / "best.safetensors", EXAMPLE))
    assert first != second
    choose(shelf, run, "best")
    prompt = shelf.locator("#prompt textarea").input_value()
    shelf.locator("#temperature input[type=number]").fill("0")
    texts = [server.call("generate", name, prompt, 80, 0, 0) for name in (f"{run}/best", "example/example")]
    open_part(shelf, "tensors")
    held: list[Route] = []
    shelf.route("**/queue/join*", lambda route: held.append(route) if len(held) < 2 else route.continue_())
    for button in ("measure", "write"):
        with shelf.expect_request("**/queue/join*"):
            shelf.locator(f"#{button}").click()
    choose(shelf, "example", "example")
    expect(shelf.locator("#verdict .line")).to_contain_text(STEP)
    shelf.evaluate(WATCH)
    for route in held:
        with shelf.expect_response("**/queue/join*"):
            route.continue_()
    shelf.locator("#prompt textarea").fill(prompt)
    shelf.wait_for_function("""([text, count]) => {  // a click while the first one's is awaited is none
        document.querySelector('#measure').click(); document.querySelector('#write').click();
        return document.querySelector('#text textarea').value === text && document.querySelector('#measured').innerText.startsWith(count);
    }""", arg=[texts[1], f"{second} tensors"], polling=200)  # fmt: skip
    shelf.unroute("**/queue/join*")
    opened_tab[1][:] = [fault for fault in opened_tab[1] if "422" not in fault]  # gradio asks to cancel what has no number yet
    seen = shelf.evaluate("[...window.seen]")
    assert texts[0] not in seen
    assert not [text for text in seen if text.startswith(f"{first} tensors")]


def test_a_file_larger_than_an_upload_is_looked_at_on_the_visitors_disk(shelf: Page, tmp_path: Path) -> None:
    sent: list[int] = []
    shelf.on("request", lambda request: sent.append(len(request.post_data_buffer or b"")))
    header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [LARGE >> 5, 8], "data_offsets": [0, LARGE]}}).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + LARGE)
    drop(shelf, tmp_path / "big.safetensors")
    expect(shelf.locator("#verdict")).to_contain_text("big.safetensors, which stayed on your disk")
    expect(shelf.locator("#verdict")).to_contain_text(f"{LARGE >> 2:,} parameters")
    expect(shelf.locator("#verdict")).to_contain_text("values not checked: only the header was read")
    expect(shelf.locator("#write")).to_be_hidden()
    expect(shelf.locator("#measure")).to_be_hidden()
    torch.save({"model": {"wte.weight": torch.zeros(40, 8)}, "iter_num": 12, "best_val_loss": torch.tensor(1.5)}, tmp_path / "small.pt")
    shelf.locator("#any-file").set_input_files(tmp_path / "small.pt")
    expect(shelf.locator("#verdict .line")).to_contain_text("step 12")
    expect(shelf.locator("#verdict")).to_contain_text("best_val_loss stands among the values and was not read")
    assert max(sent) < 10_000


def test_what_cannot_be_looked_at_replaces_the_old_verdict(shelf: Page, tmp_path: Path) -> None:
    torch.save({"wte.weight": torch.zeros(4, 2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "page.pt").write_text("<!doctype html>" + " " * 600)
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04" + bytes(50))
    for name, said in (("old.pt", "upload it (up to 64 MB) or use python -m minigpt inspect"), ("page.pt", "web page"), ("cut.pt", "cut short")):
        shelf.locator("#any-file").set_input_files(tmp_path / name)
        expect(shelf.locator("#verdict .wrong")).to_contain_text(said)
        expect(shelf.locator("#config")).to_be_hidden()


def plain_cells(page: Page, name: str) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in page.locator(f"#{name} tbody tr").all()]


def test_a_name_with_markup_is_text_wherever_it_is_shown(shelf: Page, server: Server, run: str, tmp_path: Path) -> None:
    odd = tmp_path / f"{MARKUP}.safetensors"
    shutil.copy(EXAMPLE, odd)
    shelf.locator("#any-file").set_input_files(odd)
    expect(shelf.locator("#verdict")).to_contain_text(f"{MARKUP}.safetensors, which stayed on your disk")
    shutil.copytree(server.home / run, server.home / MARKUP)
    try:
        shelf.get_by_role("tab", name="Train").click()
        shelf.get_by_role("tab", name="Checkpoint").click()
        expect(shelf.locator("#checkpoints")).to_contain_text(MARKUP)
        choose(shelf, MARKUP, "best")
        expect(shelf.locator("#verdict")).to_contain_text(f"{MARKUP}/best")
        open_part(shelf, "compare-part")
        shelf.locator("#other-upload input[type=file]").set_input_files(odd)
        expect(shelf.locator("#other-upload")).to_contain_text("safetensors")
        shelf.locator("#compare").click()
        expect(shelf.locator("#text-b textarea")).to_have_value(re.compile(r"\S+ \S+ \S+"))
        expect(shelf.locator("#text-a")).to_contain_text(MARKUP)
        expect(shelf.locator("#both-curves")).to_contain_text("img src=x")
        shelf.locator("#other-upload").get_by_label("Clear").click()
        torch.save({"model": 5}, tmp_path / f"{MARKUP}.pt")
        shelf.locator("#any-file").set_input_files(tmp_path / f"{MARKUP}.pt")
        expect(shelf.locator("#verdict .wrong")).to_contain_text("Not a checkpoint")
    finally:
        shutil.rmtree(server.home / MARKUP)
    assert shelf.locator("img[src=x]").count() == 0
    assert shelf.evaluate("window.ran") is None


def test_two_checkpoints_are_compared(shelf: Page, run: str) -> None:
    choose(shelf, run, "best")
    open_part(shelf, "compare-part")
    shelf.locator("#compare").click()
    expect(shelf.get_by_test_id("toast-body").last).to_contain_text("choose another saved checkpoint to compare with, or drop a file")
    shelf.locator("#other input").fill("example/example")
    shelf.locator("#other input").press("Enter")
    shelf.locator("#compare").click()
    expect(shelf.locator("#text-b textarea")).to_have_value(re.compile(r"\S+ \S+ \S+"))
    expect(shelf.locator("#differences")).to_contain_text("d_model")
    assert ["d_model", "16", "32"] in plain_cells(shelf, "differences")
    assert figure(shelf, "both-curves")["type"] == "scatter"
    for name in ("differences", "changes"):  # as long as they are, they stay above the chart
        assert shelf.evaluate("name => getComputedStyle(document.getElementById(name)).overflowY", name) == "auto"


def test_the_choice_of_the_other_checkpoint_may_get_shorter_at_any_moment(shelf: Page, server: Server, run: str) -> None:
    copy = server.home / "copy"
    shutil.copytree(server.home / run, copy)
    try:
        choose(shelf, run, "last")
        with shelf.expect_response("**/queue/join*"):
            open_part(shelf, "compare-part")
        shelf.locator("#other input").click()
        expect(shelf.get_by_role("option", name="copy/best")).to_be_visible()
        shelf.locator("#other input").press("Escape")  # it may lie over what is clicked next
        choose(shelf, run, "best")
    finally:
        shutil.rmtree(copy)
    held: list[Route] = []
    shelf.route("**/queue/join*", lambda route: route.continue_() if held else held.append(route))
    open_part(shelf, "compare-part")
    wait_until(lambda: shelf.evaluate("document.querySelector('#other input').focus(), 1") and held, "the question for the choices")
    held[0].continue_()
    shelf.unroute("**/queue/join*")
    shelf.locator("#other input").click()
    options = shelf.locator("#other").get_by_role("option")
    expect(options.filter(has_text="example/example")).to_have_count(1)
    expect(options.filter(has_text="copy/")).to_have_count(0)
    shelf.locator("#other input").press("Escape")


def test_a_comparison_asked_for_while_another_is_made_comes_after_it(shelf: Page, run: str) -> None:
    """As a learner does who changes the choice while both still write: the first request is held back until the second is made."""
    choose(shelf, run, "best")
    open_part(shelf, "compare-part")
    held: list[Route] = []
    shelf.route("**/queue/join*", lambda route: route.continue_() if held else held.append(route))
    for other in ("example/example", f"{run}/last"):
        shelf.locator("#other input").fill(other)
        shelf.locator("#other input").press("Enter")
        shelf.locator("#compare").click()
        wait_until(lambda: shelf.evaluate("1") and held, "the first request")
    held[0].continue_()
    expect(shelf.locator("#changes")).to_contain_text("embedding.weight")
    shelf.unroute("**/queue/join*")
    assert all(0 <= float(row[1]) < 1 for row in plain_cells(shelf, "changes"))


def test_a_checkpoint_is_taken_away_for_transformers_and_as_it_is(shelf: Page, server: Server, run: str, tmp_path: Path) -> None:
    choose(shelf, run, "best")
    open_part(shelf, "take-part")
    shelf.get_by_label("a folder for transformers").check()
    shelf.locator("#prepare").click()
    with shelf.expect_download() as told:
        shelf.locator("#ready a").first.click()
    told.value.save_as(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert {Path(name).name for name in archive.namelist()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    shelf.get_by_label("the file as it is").check()
    shelf.locator("#prepare").click()
    expect(shelf.locator("#ready")).to_contain_text(".safetensors")
    with shelf.expect_download() as told:
        shelf.locator("#ready a").first.click()
    told.value.save_as(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (server.home / run / "best.safetensors").read_bytes()


def test_typical_hostile_files_get_a_sentence_each_and_run_nothing(shelf: Page, tmp_path: Path) -> None:
    manifest = {item["file"]: item for item in hostile.write_corpus(tmp_path)}
    for name in TYPICAL:
        with opening(shelf):
            drop(shelf, tmp_path / name)
        said = shelf.locator({"reject": "#verdict .wrong", "warn": "#verdict ul"}.get(manifest[name]["expect"], "#verdict .small"))
        expect(said.first).to_contain_text(re.compile(manifest[name]["say"] or "made by", re.IGNORECASE))
        assert len(said.first.inner_text()) <= (300 if manifest[name]["expect"] == "reject" else 2000)
        assert str(tmp_path) not in shelf.locator("#verdict").inner_text()
    assert not list(tmp_path.glob("MARKER-*"))
    assert shelf.evaluate("document.querySelectorAll('#verdict script, #verdict img').length") == 0


def test_a_checkpoint_is_deleted_only_when_the_visitor_says_yes(shelf: Page, server: Server, run: str) -> None:
    choose(shelf, run, "last")
    open_part(shelf, "take-part")
    shelf.once("dialog", lambda dialog: dialog.dismiss())
    shelf.locator("#delete-file").click()
    expect(shelf.locator("#verdict")).to_contain_text(f"{run}/last")
    assert (server.home / run / "last.safetensors").exists()
    shelf.once("dialog", lambda dialog: dialog.accept())
    shelf.locator("#delete-file").click()
    expect(shelf.locator("#verdict .line")).to_have_text(f"{run}/last was deleted.")
    assert not (server.home / run / "last.safetensors").exists()
    assert [run, "last"] not in [row[:2] for row in cells(shelf, "checkpoints")]
    choose(shelf, "example", "example")
    expect(shelf.locator("#verdict .line")).to_contain_text("step")
    expect(shelf.locator("#delete-file")).to_be_hidden()
    assert EXAMPLE.exists()
