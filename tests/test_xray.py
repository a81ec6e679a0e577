"""What an X-ray tells beyond the container: origins, fingerprints, files of which only the header is here, two files compared, what is taken away."""

import base64
import dataclasses
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gradio as gr
import hostile
import pytest
import torch
import transformers
from conftest import ROOT
from gradio.context import LocalContext
from safetensors.torch import load_file, save_file
from torch import nn

from minigpt.checkpoint import read_checkpoint, save_checkpoint
from minigpt.cli import main
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError
from minigpt.inspection import Report, inspect_file, inspect_parts, inspect_safely, measuring
from minigpt.inspection.measuring import measure_safely, relative_changes
from minigpt.inspection.opening import MAX_UPLOAD_MB
from minigpt.model import MiniGPT
from minigpt.runs import RunManager
from minigpt.tokenizer import WordTokenizer
from minigpt.ui import checkpoint_tab, compare, feed, pages, shelf, takeaway, xray, xray_charts

TINY: dict[str, Any] = {"vocab_size": 60, "max_seq_len": 16, "d_model": 16, "n_heads": 2, "n_layers": 2, "d_ff": 48}
MARKUP = "<img src=x onerror=window.ran=1>"


def own(path: Path, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = TransformerConfig(**{**TINY, **changes})
    return save_checkpoint(MiniGPT(config), None, config, 7, 2.5, path=path)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as the Hub has it."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2, n_inner=48)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def settings(report: Report, origin: str) -> dict[str, object]:
    return {name: value for name, value in report.config.items() if report.origins[name] == origin}


# The report


def test_settings_that_a_file_does_not_store_are_inferred_from_its_shapes_or_unknown(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes())
    report = inspect_safely(tmp_path / "model.safetensors")
    assert settings(report, "inferred from shapes") == {"vocab_size": 60, "d_model": 16, "n_layers": 2, "d_ff": 48, "max_seq_len": 16}
    assert settings(report, "unknown") == {"n_heads": None}
    beside = inspect_safely(gpt2 / "model.safetensors")
    assert settings(beside, "stored")["n_head"] == 2
    assert settings(beside, "inferred from shapes") == settings(beside, "unknown") == {}
    assert "settings are those of the config.json beside it" in beside.notes
    assert inspect_file(gpt2 / "model.safetensors") == beside
    ours = inspect_safely(own(tmp_path / "ours.safetensors"))
    assert set(ours.origins.values()) == {"stored"}


def test_a_lightning_checkpoint_tells_its_step_and_shapes(tmp_path: Path) -> None:
    import lightning  # here, for it takes a second, and not every process runs this

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"n_heads": 4})
            self.wte, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.wte(batch)).flatten(0, 1), batch.flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randint(0, 30, (12, 5)), 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    report = inspect_safely(tmp_path / "a.ckpt")
    assert (report.made_by, report.step) == ("Lightning", 3)
    assert settings(report, "stored") == {"n_heads": 4}
    assert settings(report, "inferred from shapes")["vocab_size"] == 30


def test_files_of_the_same_shape_share_a_fingerprint_whatever_is_put_before_names(gpt2: Path, tmp_path: Path) -> None:
    state = load_file(gpt2 / "model.safetensors")
    print_of = inspect_safely(gpt2 / "model.safetensors").fingerprint
    for prefix in ("", "module.", "_orig_mod.", "model._orig_mod.transformer."):
        renamed = {prefix + name.removeprefix("transformer."): torch.randn_like(value) for name, value in state.items()}
        if not prefix:
            renamed["lm_head.weight"] = renamed["wte.weight"]  # tied
            renamed["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # a stored mask
        torch.save({"model": renamed}, tmp_path / "a.pt")
        assert inspect_file(tmp_path / "a.pt").fingerprint == print_of, prefix
    state["transformer.wte.weight"] = torch.zeros(61, 16)
    save_file(state, tmp_path / "b.safetensors")
    assert inspect_file(tmp_path / "b.safetensors").fingerprint != print_of
    assert len(print_of) == 12


def test_a_vocabulary_of_another_size_and_a_wrong_name_are_warned_about(tmp_path: Path, tiny_text: str) -> None:
    tokenizer = WordTokenizer()
    tokenizer.build_vocab(tiny_text, 40)
    config = TransformerConfig(**TINY)
    path = save_checkpoint(MiniGPT(config), None, config, 1, None, path=tmp_path / "a.safetensors", tokenizer=tokenizer)
    assert inspect_file(path).warnings == [f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding 60 rows"]
    path.rename(tmp_path / "a.pt")
    assert inspect_file(tmp_path / "a.pt").warnings[0] == "named .pt, but it is a safetensors file"


# Only the header is here


def test_a_header_alone_gives_the_report_of_the_whole_file_but_for_its_values(gpt2: Path) -> None:
    data = (gpt2 / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    found = inspect_parts("model.safetensors", len(data), {0: data[:length]})
    whole = inspect_safely(gpt2 / "model.safetensors", scan=False)
    assert (found.tensors, found.fingerprint, found.size_bytes, found.checked) == (whole.tensors, whole.fingerprint, len(data), False)
    assert found.notes[0] == "values not checked: only the header was read"


def test_a_header_whose_length_begins_as_a_pickle_does_is_one_of_safetensors(tmp_path: Path) -> None:
    """One length in 32 does: they are multiples of 8."""
    for filler in range(64):
        save_file({"wte.weight": torch.zeros(4, 8)}, tmp_path / "a.safetensors", metadata={"x": "x" * 8 * filler})
        data = (tmp_path / "a.safetensors").read_bytes()
        if data[0] == 0x80:
            break
    assert data[0] == 0x80
    assert inspect_parts("a.safetensors", len(data), {0: data}).tensors == inspect_safely(tmp_path / "a.safetensors").tensors


def sparse_zip(path: Path, gigabytes: int) -> None:
    """Write a file of torch.save whose one tensor is a hole of the disk."""
    numel = gigabytes << 28
    index = hostile.model(hostile.dict_of((hostile.text("wte.weight"), hostile.tensor(hostile.storage("0", numel), [numel // 8, 8], [8, 1]))))
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        archive.writestr("archive/data.pkl", index)
        archive.writestr("archive/byteorder", b"little")
        entry = zipfile.ZipInfo("archive/data/0")
        with archive.open(entry, "w", force_zip64=True):
            pass
        entry.file_size = entry.compress_size = numel * 4  # the hole follows its header
        archive.start_dir += numel * 4
        assert archive.fp is not None
        archive.fp.truncate(archive.start_dir)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_two_gigabytes_are_told_from_the_header_in_little_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"big.{kind}"
    if kind == "pt":
        sparse_zip(path, 2)
    else:
        header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [1 << 26, 8], "data_offsets": [0, 2 << 30]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(path, 8 + len(header) + (2 << 30))
    # A small process in between: what is started from a large one counts, for a moment, with the memory of that.
    watch = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", watch, sys.executable, "-m", "minigpt", "inspect", str(path), "--json"]
    *told, kilobytes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    report = json.loads("\n".join(told))
    assert (report["parameters"], report["checked"]) == (2 << 28, False)
    assert report["notes"][0] == "values not checked: only the header was read, for the file is larger than 64 MB"
    assert int(kilobytes) < 100 << 10


@pytest.mark.parametrize(
    "sent",
    [None, "", "[]", "5", "{", "[" * 100_000, '{"name": "a", "size": 5}', '{"name": "a", "size": 9007199254740993, "parts": []}',
     *(f'{{"name": "a", "size": {size}, "parts": {parts}}}' for size, parts in (
        ("-1", "[]"), ("1e400", "[]"), ("9", '[[-1, ""]]'), ("9", '[[0, "@"]]'), ("9", "[[0]]"), ("9", "[[0, 5]]"), ("9", "7")))],
)  # fmt: skip
def test_what_no_script_of_ours_would_send_gets_a_sentence(sent: str | None) -> None:
    chosen, verdict, inside, *_ = checkpoint_tab.open_parts(sent)
    assert (chosen, inside.visible) == ("", False)
    assert "could not read this file" in verdict


def test_what_is_sent_of_a_file_is_shown_with_its_name_as_text(gpt2: Path) -> None:
    data = (gpt2 / "model.safetensors").read_bytes()
    part = base64.b64encode(data[: 8 + int.from_bytes(data[:8], "little")]).decode()
    shown = checkpoint_tab.open_parts(json.dumps({"name": f"{MARKUP}\0.safetensors", "size": len(data), "parts": [[0, part]]}))
    assert len(shown) == checkpoint_tab.DETAILS
    assert shown[0] == ""
    assert "&lt;img" in shown[1]
    assert "<img" not in shown[1]
    old = checkpoint_tab.open_parts(json.dumps({"name": "a.pt", "size": 99, "parts": [[0, base64.b64encode(b"\x80\x02").decode()]]}))
    assert "old format" in old[1]
    assert "a name on the Hub" not in checkpoint_tab.open_hub("../x")[1]
    assert "wrong" in checkpoint_tab.open_hub(None)[1]


# Values, comparison, command line


def test_the_command_line_prints_a_line_for_each_tensor_and_json_holds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own(tmp_path / "best.safetensors")
    assert main(["inspect", str(tmp_path), "--tensors"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    weight = load_file(path)["model.embedding.weight"]
    assert lines["embedding.weight"][:5] == ["60", "x", "16", f"{weight.min():.4g}", f"{weight.max():.4g}"]
    assert lines["tensor"] == ["shape", "min", "max", "mean", "std", "zeros", "NaN", "inf"]
    assert main(["inspect", str(path), "--tensors", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"format", "step", "val_loss", "config", "origins", "parameters", "fingerprint", "tensors", "warnings"} <= told.keys()
    assert {found["name"] for found in told["statistics"]} == {tensor["name"] for tensor in told["tensors"]}


def test_the_change_of_each_tensor_is_relative_to_the_second_file(tmp_path: Path) -> None:
    state = {"wte.weight": torch.randn(30, 8), "same": torch.ones(4), "zero": torch.zeros(4), "lost": torch.ones(2), "bent": torch.ones(2, 3)}
    other = {f"module.{name}": value.clone() for name, value in state.items()}
    other["module.wte.weight"] = state["wte.weight"] * 1.5
    other["module.bent"] = torch.ones(3, 2)
    del other["module.lost"]
    torch.save({"model": state | {"zero": torch.ones(4)}}, tmp_path / "a.pt")
    save_file(other, tmp_path / "b.safetensors")
    changes = dict(relative_changes(tmp_path / "a.pt", tmp_path / "b.safetensors"))
    assert changes == {"wte.weight": pytest.approx(1 / 3, rel=1e-6), "same": 0.0, "zero": float("inf")}
    assert compare.changes_table(changes.items())["tensor"].tolist() == ["zero", "wte.weight", "same"]


def test_a_tensor_that_cannot_be_read_hides_no_other_ones_change(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.ones(4).to(torch.float8_e4m3fn), "c": torch.full((4,), torch.nan)}, tmp_path / "a.safetensors")
    changes = compare.changes_table(relative_changes(tmp_path / "a.safetensors", tmp_path / "a.safetensors"))
    assert sorted(changes.values.tolist()) == [["a", "0"], ["b", "not read"], ["c", "nan"]]
    assert changes["tensor"].tolist()[-1] == "a"


def test_a_refusal_in_the_middle_of_measuring_is_told_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(measuring, "parsed", lambda _: {})  # as if the child had said something else
    assert main(["inspect", str(tmp_path / "a.safetensors"), "--tensors", "--json"]) == 1
    told = capsys.readouterr()
    assert told.err.strip() == f"{tmp_path / 'a.safetensors'}: {json.loads(told.out)['error']}"


@pytest.mark.parametrize("step", [10**30, -(10**30), -2, 1.5, "7", True, [1]])
def test_a_step_in_the_metadata_that_is_none_is_left_out_and_the_rest_shown(step: object, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(feed.EXAMPLE)
    facts = {**checkpoint.metadata, "best_step": step, "val_step": step}
    path = tmp_path / "a.safetensors"
    save_checkpoint(checkpoint.model, None, checkpoint.config, 420, 3.9, path=path, tokenizer=checkpoint.tokenizer, facts=facts)
    shown = checkpoint_tab.shown_details("", path, "a")
    assert "step 420 · validation loss 3.90" in shown[1]
    assert "best_step is not a whole number of sane size" in shown[1]
    assert not inspect_file(path).metadata.keys() & {"best_step", "val_step"}


def test_the_script_that_looks_at_large_files_leaves_those_alone_that_may_be_uploaded() -> None:
    assert f"LARGEST_UPLOAD = {MAX_UPLOAD_MB} * 2 ** 20," in (ROOT / "minigpt/ui/peek.js").read_text()


def test_settings_that_are_equal_are_no_difference() -> None:
    table = compare.differences({"a": 1, "b": 2, MARKUP: [1]}, {"a": 1, "b": 3, "c": None, "d": "x"})
    assert table.values.tolist() == [["b", "2", "3"], [MARKUP, "[1]", ""], ["d", "", "x"]]


def test_a_comparison_begins_with_how_far_both_got(gpt2: Path) -> None:
    ours, theirs = inspect_file(feed.EXAMPLE), inspect_file(gpt2 / "model.safetensors")
    rows = compare.differences(compare.facts(ours), compare.facts(theirs)).values.tolist()
    assert [row[0] for row in rows[:4]] == ["step", "validation loss", "text", "parameters"]
    assert rows[0][1:] == [str(ours.step), ""]
    assert rows[1][1:] == [f"{ours.val_loss:.3f}", ""]
    assert rows[2][1:] == ["Tiny Shakespeare", ""]
    assert rows[3][1:] == [f"{ours.parameters:,}", f"{theirs.parameters:,}"]


def test_a_comparison_says_when_the_losses_are_of_different_texts(gpt2: Path) -> None:
    ours, theirs = inspect_file(feed.EXAMPLE), inspect_file(gpt2 / "model.safetensors")
    other = dataclasses.replace(ours, metadata={**ours.metadata, "corpus": {**ours.metadata["corpus"], "sha256": "0" * 64}})
    assert compare.heading(ours, other) == "What differs: losses on different texts cannot be compared"
    assert compare.heading(ours, ours) == "What differs"
    assert compare.heading(ours, theirs) == "What differs", "nothing is known of the other's text"


def test_names_in_figures_are_text_and_the_values_are_all_there(tmp_path: Path) -> None:
    save_file({MARKUP: torch.tensor([[1.0, 2.0], [2.0, 4.0]])}, tmp_path / "a.safetensors")
    ((_, found),) = [pair for pair in measure_safely(tmp_path / "a.safetensors", MARKUP) if pair[1]]
    assert found is not None
    histogram, picture = xray_charts.histogram_figure(found), xray_charts.picture_figure(found)
    assert sum(histogram.data[0].y) == 4
    assert (histogram.data[0].x[0], histogram.data[0].x[-1]) == pytest.approx((1 + 3 / 80, 4 - 3 / 80))
    assert [list(row) for row in picture.data[0].z] == [[1.0, 2.0], [2.0, 4.0]]
    figures = [histogram, picture, xray_charts.blocks_figure({MARKUP: 5}), xray_charts.two_runs_figure({MARKUP: {"val": ([1], [2.0])}})]
    assert all("<img" not in figure.to_json() for figure in figures)
    report = inspect_file(tmp_path / "a.safetensors")
    row = xray.tensors_table(report, {found.name: found}).values.tolist()[0]
    assert row == [MARKUP, "2 × 2", "F32", "1", "4", "2.25", "1.09", "0", "0, 0"]


# What is taken away


@pytest.fixture
def manager(tmp_path: Path) -> RunManager:
    (tmp_path / "home" / "run").mkdir(parents=True)
    (tmp_path / "home" / "run" / "config.json").write_text('{"checkpoint_dir": "where it was made"}')
    return RunManager(tmp_path / "home")


def test_a_checkpoint_is_packed_for_each_use_and_a_strangers_only_as_it_is(manager: RunManager, gpt2: Path, tmp_path: Path) -> None:
    path = own(manager.home / "run" / "best.safetensors")
    for form, files in (
        ("transformers", {"config.json", "generation_config.json", "model.safetensors"}),
        ("safetensors", {"config.json", "model.safetensors"}),
    ):
        (tmp_path / form).mkdir()
        packed = takeaway.packed(path, "run/best", form, tmp_path / form)
        assert packed.name == f"run-best-{form}.zip"
        with zipfile.ZipFile(packed) as archive:
            assert {name for name in archive.namelist() if not name.endswith("/")} == {f"run-best/{name}" for name in files}
    (tmp_path / "whole").mkdir()
    assert takeaway.packed(path, "run/best", "", tmp_path / "whole").read_bytes() == path.read_bytes()
    with pytest.raises(CheckpointError, match="not written by MiniGPT"):
        takeaway.packed(gpt2 / "model.safetensors", "upload", "transformers", tmp_path / "whole")


def test_only_a_listed_checkpoint_of_a_run_that_has_ended_is_deleted(manager: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own(manager.home / "run" / "best.safetensors")
    for chosen, said in (
        ("example/example", "example belongs"),
        ("run/last", "no longer there"),
        ("../run/best", "no longer there"),
        ("upload", "no longer"),
    ):
        with pytest.raises(CheckpointError, match=said):
            shelf.delete(manager, chosen)
    assert checkpoint_tab.delete(manager, "") == [gr.skip()] * checkpoint_tab.DETAILS
    assert path.exists()
    _, verdict, inside, *_ = checkpoint_tab.delete(manager, "run/best")
    assert verdict == '<p class="line">run/best was deleted.</p>'
    assert not inside.visible
    assert not path.exists()
    warned: list[str] = []
    monkeypatch.setattr(gr, "Warning", lambda said, **_: warned.append(said))
    assert checkpoint_tab.delete(manager, "run/best") == [gr.skip()] * checkpoint_tab.DETAILS  # an error would be written over what is shown
    assert "no longer there" in warned[0]


def test_weights_of_others_write_on_the_page_in_ids(gpt2: Path) -> None:
    shown = checkpoint_tab.shown_details(shelf.UPLOADED, gpt2 / "model.safetensors", "your upload")
    assert "its prompt is ids of tokens" in shown[1]
    text = shown[10]
    assert text.startswith("0 ")
    assert all(0 <= int(word) < 60 for word in text.split())


def test_what_had_to_be_assumed_of_other_people_s_weights_is_said_on_the_page(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=64, n_layer=1, n_head=2, n_inner=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    shown = checkpoint_tab.open_upload(str(tmp_path / "model.safetensors"))
    assert any(isinstance(part, str) and "assumed 1 head, each 64 wide: the file does not say" in part for part in shown)


def test_a_page_is_sent_nothing_that_was_made_of_a_file_it_no_longer_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_shown", {})
    handler = pages.while_shown(lambda *_: iter("abc"))

    def on(page: str, act: Any) -> Any:
        LocalContext.request.set(gr.Request(session_hash=page))
        return act()

    on("one", lambda: pages.opened("run/best"))
    on("two", lambda: pages.opened("run/best"))
    mine, others, upload = (on(page, lambda: handler("run/best", None)) for page in ("one", "two", "new"))
    assert [on(page, lambda it=it: next(it)) for page, it in (("one", mine), ("two", others), ("new", upload))] == ["a", "a", "a"]
    on("one", lambda: pages.opened("run/last"))
    assert [list(mine), list(others), list(upload)] == [[], ["b", "c"], ["b", "c"]]
    on("one", lambda: pages.opened("/uploads/a/x.pt"))
    assert on("one", lambda: list(handler(shelf.UPLOADED, "/uploads/a/x.pt"))) == ["a", "b", "c"]
    assert on("one", lambda: list(handler(shelf.UPLOADED, "/uploads/b/x.pt"))) == []
    for number in range(pages.MAX_PAGES + 5):
        on(str(number), lambda: pages.opened("run/best"))
    assert len(pages._shown) == pages.MAX_PAGES
    LocalContext.request.set(None)
