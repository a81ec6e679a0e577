import errno
import json
import logging
import os
import re
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minigpt import checkpoint as module
from minigpt import system
from minigpt.checkpoint import FORMAT, load_checkpoint, read_checkpoint, restate_checkpoint, save_checkpoint
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError
from minigpt.header import MAX_HEADER_BYTES, our_metadata, read_header
from minigpt.history import History
from minigpt.model import MiniGPT
from minigpt.optim import AnyOptimizer, configure_optimizer
from minigpt.tokenizer import MAX_TOKEN_BYTES, CharTokenizer, TextTokenizer, WordTokenizer

Made = tuple[MiniGPT, AnyOptimizer, TransformerConfig, TextTokenizer]


def tiny(folder: Path, text: str, **changes: Any) -> Made:
    """Make a model with something in its optimizer, as after a step."""
    tokenizer = CharTokenizer() if changes.get("tokenizer") == "char" else WordTokenizer()
    tokenizer.build_vocab(text, 50)
    settings = {"max_seq_len": 8, "d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 32, "dropout": 0.0, "checkpoint_dir": str(folder)}
    config = TransformerConfig(vocab_size=tokenizer.vocab_size, **{**settings, **changes})
    model = MiniGPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    optimizer = configure_optimizer(model, 0.01, 0.1, config.optimizer)
    x = torch.randint(tokenizer.vocab_size, (2, 8))
    model.loss(x, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, config, tokenizer


@pytest.fixture
def made(tmp_path: Path, tiny_text: str) -> Made:
    torch.manual_seed(0)
    return tiny(tmp_path / "run", tiny_text)


@pytest.fixture
def saved(made: Made) -> Path:
    model, optimizer, config, tokenizer = made
    return save_checkpoint(model, optimizer, config, 7, 3.5, tokenizer=tokenizer)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the file says of itself and leave every tensor byte as it was."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    metadata = json.loads(header["__metadata__"]["minigpt"])
    change(metadata)
    header["__metadata__"]["minigpt"] = json.dumps(metadata)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def metadata_of(path: Path) -> dict[str, Any]:
    metadata = our_metadata(read_header(path))
    assert metadata is not None
    return metadata


# There and back


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("tokens", ["word", "char"])
def test_a_checkpoint_comes_back_with_equal_logits_and_its_tokenizer(arch: str, kind: str, tokens: str, tmp_path: Path, tiny_text: str) -> None:
    model, optimizer, config, tokenizer = tiny(tmp_path, tiny_text, arch=arch, optimizer=kind, tokenizer=tokens)
    path = save_checkpoint(model, optimizer, config, 7, 3.5, tokenizer=tokenizer)
    assert path == Path(config.checkpoint_path)
    found = read_checkpoint(path)
    x = torch.randint(config.vocab_size, (2, 8))
    assert torch.equal(found.model(x), model.eval()(x))
    assert (found.step, found.val_loss) == (7, 3.5)
    assert not found.model.training
    assert found.tokenizer is not None
    assert found.tokenizer.encode(tiny_text) == tokenizer.encode(tiny_text)
    for name in TransformerConfig.model_fields.keys() - module.LOCAL_FIELDS:
        assert getattr(found.config, name) == getattr(config, name), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_and_random_states_are_in_the_file(kind: str, tmp_path: Path, tiny_text: str) -> None:
    model, optimizer, config, tokenizer = tiny(tmp_path, tiny_text, optimizer=kind)
    generator = torch.Generator().manual_seed(3)
    random_state = torch.get_rng_state()
    path = save_checkpoint(model, optimizer, config, 7, 3.5, tokenizer=tokenizer, generators={"data": generator})
    found = read_checkpoint(path)
    assert torch.equal(found.state["rng.data"], generator.get_state())
    assert torch.equal(found.state["rng.torch"], random_state)
    expected = optimizer.state_dict()
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            assert torch.equal(found.state[f"optim.{number}.{key}"], value), (number, key)
    groups = found.metadata["optimizer_groups"]
    assert [group["params"] for group in groups] == [group["params"] for group in expected["param_groups"]]
    assert [group["lr"] for group in groups] == [0.01] * len(groups)


def test_a_file_without_optimizer_holds_the_weights_alone(made: Made) -> None:
    model, _, config, tokenizer = made
    path = save_checkpoint(model, None, config, 7, 3.5, tokenizer=tokenizer)
    assert {name.split(".")[0] for name in load_file(path)} == {"model"}
    assert read_checkpoint(path).state == {}


def test_saving_changes_neither_model_nor_randomness(made: Made) -> None:
    model, optimizer, config, tokenizer = made
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    save_checkpoint(model.train(), optimizer, config, 7, 3.5, tokenizer=tokenizer)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_opening_a_checkpoint_leaves_the_randomness_of_a_live_run_alone(saved: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, draws = MiniGPT.__init__, 0

    def drawn_meanwhile(self: MiniGPT, config: TransformerConfig) -> None:
        nonlocal draws
        genuine(self, config)
        torch.rand(1, device="cpu")  # as the dropout of a run on another thread would; giving back an earlier state would repeat it
        draws += 1

    state = torch.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(MiniGPT, "__init__", drawn_meanwhile)
        read_checkpoint(saved)
        load_checkpoint(made[2], "cpu")
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in range(draws):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_header_alone_answers_every_question(made: Made) -> None:
    model, optimizer, config, tokenizer = made
    series = {"train": {"x": [1], "y": [4.0]}}
    path = save_checkpoint(model, optimizer, config, 7, 3.5, tokenizer=tokenizer, facts={"best_val_loss": 3.25, "series": series})
    metadata = metadata_of(path)
    assert metadata["format"] == FORMAT
    assert (metadata["step"], metadata["val_loss"], metadata["best_val_loss"]) == (7, 3.5, 3.25)
    assert metadata["config"]["d_model"] == 16
    assert metadata["parameters"] == model.count_parameters()
    assert metadata["tied"] == {"head.weight": "embedding.weight"}
    assert metadata["series"] == series
    assert set(metadata["versions"]) >= {"minigpt", "torch"}
    assert re.fullmatch(r"[0-9a-f]{64}", str(metadata["sha256"]))
    assert "<pad>" in str(metadata["tokenizer"])
    assert read_header(path).metadata["format"] == "pt"


def test_the_library_s_own_reader_opens_our_file(saved: Path, made: Made) -> None:
    tensors = load_file(saved)
    for name, value in made[0].state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], value)


@pytest.mark.parametrize("val_loss", [None, float("nan"), float("inf"), float("-inf"), np.float32("nan")])
def test_a_validation_loss_that_is_no_number_is_written_as_none(made: Made, val_loss: Any) -> None:
    model, optimizer, config, tokenizer = made
    path = save_checkpoint(model, optimizer, config, 7, val_loss, tokenizer=tokenizer)
    assert metadata_of(path)["val_loss"] is None
    assert read_checkpoint(path).val_loss is None


@pytest.mark.parametrize("val_loss", [np.float64(3.5), np.float32(3.5), torch.tensor(3.5), 3.5])
def test_a_validation_loss_of_any_make_becomes_a_plain_number(made: Made, val_loss: Any) -> None:
    model, optimizer, config, tokenizer = made
    path = save_checkpoint(model, optimizer, config, 7, val_loss, tokenizer=tokenizer)
    assert metadata_of(path)["val_loss"] == 3.5


def test_no_place_on_the_writer_s_disk_is_in_the_file(tmp_path: Path, tiny_text: str) -> None:
    private = tmp_path / "private-folder"
    model, optimizer, config, tokenizer = tiny(private / "run", tiny_text, data_path=str(private / "diary.txt"), vocab_path=str(private / "v.json"))
    path = save_checkpoint(model, optimizer, config, 7, 3.5, tokenizer=tokenizer)
    raw = path.read_bytes()
    for secret in (b"private-folder", b"diary", b"v.json", str(Path.home()).encode() + b"/", os.fsencode(Path.cwd())):
        assert secret not in raw


def test_folders_with_spaces_and_umlauts_work(tmp_path: Path, tiny_text: str) -> None:
    model, optimizer, config, tokenizer = tiny(tmp_path / "ü x", tiny_text)
    save_checkpoint(model, optimizer, config, 7, 3.5, tokenizer=tokenizer)
    load_checkpoint(config, "cpu")


# Whole or not at all


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_the_file_can_be_read_by_others(made: Made) -> None:
    model, optimizer, config, tokenizer = made
    before = os.umask(0o022)
    try:
        path = save_checkpoint(model, optimizer, config, 7, 3.5, tokenizer=tokenizer)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_nothing_but_the_checkpoint_is_left_in_the_folder(saved: Path) -> None:
    assert [entry.name for entry in saved.parent.iterdir()] == ["best.safetensors"]


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def break_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        def __init__(self, descriptor: int) -> None:
            self.descriptor = descriptor

        def __enter__(self) -> "Half":
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.descriptor)

        def write(self, data: bytes) -> None:
            os.write(self.descriptor, data[: len(data) // 2])
            full_disk()

    def half(descriptor: int, *_: Any) -> Half:
        return Half(descriptor)

    monkeypatch.setattr(system.os, "fdopen", half)


def break_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.os, "fsync", full_disk)


def break_renaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.os, "replace", full_disk)
    monkeypatch.setattr(Path, "replace", full_disk)


def break_last_renaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the new file takes its place, after whatever was done to keep the old one."""
    for owner, genuine in ((system.os, os.replace), (Path, Path.replace)):

        def picky(source: Any, target: Any, genuine: Any = genuine, **__: Any) -> Any:
            return full_disk() if str(source).endswith(".tmp") and Path(target).name == "last.safetensors" else genuine(source, target)

        monkeypatch.setattr(owner, "replace", picky)


@pytest.mark.parametrize("keep", [False, True], ids=["replace", "keep the old one"])
@pytest.mark.parametrize("fault", [break_writing, break_syncing, break_renaming, break_last_renaming])
def test_a_disk_that_fails_leaves_the_old_file_whole_and_no_stray(fault: Any, keep: bool, made: Made) -> None:
    model, optimizer, config, tokenizer = made
    folder = Path(config.checkpoint_dir)
    kept = {"path": folder / "last.safetensors", "keep_as": folder / "previous.safetensors" if keep else None, "tokenizer": tokenizer}
    save_checkpoint(model, optimizer, config, 7, 3.5, **kept)
    with pytest.MonkeyPatch.context() as patched:
        fault(patched)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(model, optimizer, config, 9, 2.5, **kept)
    assert read_checkpoint(folder / "last.safetensors").step == 7
    assert not list(folder.glob(".*"))
    save_checkpoint(model, optimizer, config, 11, 2.5, **kept)
    assert read_checkpoint(folder / "last.safetensors").step == 11


def test_the_file_that_was_there_stays_under_another_name(made: Made) -> None:
    model, optimizer, config, tokenizer = made
    folder = Path(config.checkpoint_dir)
    last, previous = folder / "last.safetensors", folder / "previous.safetensors"
    for step in (1, 2, 3):
        save_checkpoint(model, optimizer, config, step, 3.5, path=last, keep_as=previous, tokenizer=tokenizer)
        assert read_checkpoint(last).step == step
        assert previous.exists() == (step > 1)
    assert read_checkpoint(previous).step == 2
    assert len(list(folder.iterdir())) == 2


def test_strays_of_a_killed_process_are_swept_and_nothing_else(saved: Path) -> None:
    system.stray(saved).write_bytes(b"half")
    (saved.parent / "notes.tmp").write_bytes(b"mine")
    assert system.sweep_strays(saved.parent) == 1
    assert {entry.name for entry in saved.parent.iterdir()} == {"best.safetensors", "notes.tmp"}


# Damage and strangers


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_one_flipped_bit_among_the_values_is_found(saved: Path, share: float) -> None:
    header = read_header(saved)
    first, last = header.data_start, header.size_bytes - 1
    flip(saved, round(first + share * (last - first)))
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(saved)
    assert metadata_of(saved)["step"] == 7


def other_heads(metadata: dict[str, Any]) -> None:
    metadata["config"]["n_heads"] = 4


def swapped_words(metadata: dict[str, Any]) -> None:
    tokenizer = json.loads(metadata["tokenizer"])
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["my"], vocabulary["the"] = vocabulary["the"], vocabulary["my"]
    metadata["tokenizer"] = json.dumps(tokenizer)


@pytest.mark.parametrize("change", [other_heads, swapped_words])
def test_settings_or_words_changed_after_they_were_written_are_found(saved: Path, change: Any) -> None:
    # No shape tells: any number of heads has the same matrices, any order of words the same number, and each gives another text.
    edit_header(saved, change)
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(saved)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, -1, -100])
def test_a_file_cut_short_is_refused(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(CheckpointError):
        read_checkpoint(saved)


def test_bytes_after_the_end_are_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"more")
    with pytest.raises(CheckpointError):
        read_checkpoint(saved)


@pytest.mark.parametrize(
    "raw", [b"<!doctype html>", b"PK\x03\x04" + b"x" * 100, b"\x80\x02}q\x00.", os.urandom(1000)], ids=["page", "zip", "pickle", "noise"]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "best.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_checkpoint(tmp_path / "best.safetensors")


def test_somebody_else_s_safetensors_file_is_refused_as_such(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    save_file({"model.embedding.weight": torch.zeros(5, 16)}, path)
    with pytest.raises(CheckpointError, match="not written by MiniGPT"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format="minigpt/99"), "not written by MiniGPT"),
        (lambda m: m.pop("config"), "no settings"),
        (lambda m: m.update(config=[1]), "no settings"),
        (lambda m: m["config"].update(d_model=32), "asks? for"),
        (lambda m: m["config"].update(vocab_size=49), "asks? for"),
        (lambda m: m["config"].update(n_layers=2), "asks? for"),
        (lambda m: m["config"].update(arch="modern"), "asks? for"),
        (lambda m: m["config"].update(max_seq_len=4096), "asks? for"),
        (lambda m: m["config"].update(n_heads=3), "do not work: n_heads is 3"),
        (lambda m: m["config"].update(d_model="16"), "do not work: d_model is '16'"),
        (lambda m: m["config"].update(d_model=8192, d_ff=65536, n_layers=128), "do not work"),
        (lambda m: m["config"].update(surprise=1), "do not work: surprise"),
        (lambda m: m.pop("sha256"), "damaged"),
        (lambda m: m.update(tokenizer="{}"), r"tokenizer|damaged"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_with_the_reason(saved: Path, change: Any, words: str) -> None:
    edit_header(saved, change)
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(saved)


def test_a_tokenizer_of_another_size_is_refused(saved: Path) -> None:
    other = WordTokenizer()
    other.build_vocab("just a few words", 50)
    edit_header(saved, lambda metadata: metadata.update(tokenizer=other.to_json()))
    with pytest.raises(CheckpointError):
        read_checkpoint(saved)


@pytest.mark.parametrize("key", ["step", "val_loss", "tokenizer"])
@pytest.mark.parametrize("value", ["three", [3], {}, True, -1])
def test_a_fact_of_a_wrong_type_is_refused_or_left_out(saved: Path, key: str, value: Any) -> None:
    edit_header(saved, lambda metadata: metadata.update({key: value}))
    try:
        found = read_checkpoint(saved)
    except CheckpointError:
        return
    assert type(found.step) is int
    assert found.step >= 0
    assert found.val_loss is None or type(found.val_loss) is float


@pytest.mark.parametrize("dtype", ["C64", "C128", "F8_E8M0", "F8_E4M3FNUZ", "U16", "BOOL"])
def test_a_tensor_of_a_rare_type_is_refused_or_read_and_never_an_error_of_the_library(saved: Path, dtype: str) -> None:
    raw = saved.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header["extra"] = {"dtype": dtype, "shape": [1], "data_offsets": [end, end + {"C64": 8, "C128": 16, "U16": 2}.get(dtype, 1)]}
    text = json.dumps(header).encode()
    saved.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :] + b"\0" * (header["extra"]["data_offsets"][1] - end))
    with pytest.raises(CheckpointError):
        read_checkpoint(saved)


# Falling back


def test_loading_opens_the_best_with_the_settings_it_was_saved_with(made: Made) -> None:
    model, optimizer, config, tokenizer = made
    folder = Path(config.checkpoint_dir)
    save_checkpoint(model, optimizer, config, 7, 3.5, tokenizer=tokenizer)
    with torch.no_grad():
        model.embedding.weight.add_(1.0)
    save_checkpoint(model, optimizer, config, 9, 3.75, path=folder / "last.safetensors", tokenizer=tokenizer)
    asked = TransformerConfig(checkpoint_dir=str(folder), learning_rate=0.5)
    loaded, stored = load_checkpoint(asked, "cpu")
    assert stored.d_model == 16
    assert stored.learning_rate == config.learning_rate
    assert not torch.equal(loaded.embedding.weight, model.embedding.weight)


def test_loading_falls_back_and_says_what_it_skipped(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, config, tokenizer = made
    folder = Path(config.checkpoint_dir)
    marks = {"best": 1.0, "last": 2.0, "previous": 3.0}
    for name, mark in marks.items():
        with torch.no_grad():
            model.embedding.weight.fill_(mark)
        save_checkpoint(model, optimizer, config, 7, 3.5, path=folder / f"{name}.safetensors", tokenizer=tokenizer)

    def opened() -> float:
        return load_checkpoint(config, "cpu")[0].embedding.weight[0, 0].item()

    assert opened() == marks["best"]
    (folder / "best.safetensors").write_bytes(b"half a file")
    with caplog.at_level(logging.WARNING):
        assert opened() == marks["last"]
    assert "best.safetensors was skipped" in caplog.text
    flip(folder / "last.safetensors", -5)
    with caplog.at_level(logging.WARNING):
        assert opened() == marks["previous"]
    assert "last.safetensors was skipped" in caplog.text
    assert "checksum" in caplog.text
    (folder / "previous.safetensors").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        opened()


def test_a_chosen_file_that_is_damaged_gives_way_to_last_then_previous_then_best(made: Made) -> None:
    model, optimizer, config, tokenizer = made
    folder = Path(config.checkpoint_dir)
    chosen = config.model_copy(update={"checkpoint_path": str(folder / "mine.safetensors")})
    folder.mkdir()
    (folder / "mine.safetensors").write_bytes(b"half a file")
    for name, mark in [("best", 1.0), ("previous", 2.0), ("last", 3.0)]:  # each newcomer comes before the one that was opened so far
        with torch.no_grad():
            model.embedding.weight.fill_(mark)
        save_checkpoint(model, optimizer, config, 7, 3.5, path=folder / f"{name}.safetensors", tokenizer=tokenizer)
        assert load_checkpoint(chosen, "cpu")[0].embedding.weight[0, 0].item() == mark


def test_an_empty_folder_has_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is none"):
        load_checkpoint(TransformerConfig(checkpoint_dir=str(tmp_path)), "cpu")


# What the header has room for


@pytest.mark.parametrize("restated", [False, True])
def test_what_no_reader_would_take_is_refused_and_replaces_nothing(restated: bool, saved: Path, made: Made) -> None:
    model, optimizer, config, tokenizer = made
    before = saved.read_bytes()
    too_much = {"remark": "x" * (MAX_HEADER_BYTES + (1 << 20))}
    with pytest.raises(
        CheckpointError, match=r"the file's header would have 1\d,\d{3},\d{3} bytes; at most 16,\d{3},\d{3} can be read again: keep fewer"
    ):
        if restated:
            restate_checkpoint(saved, **too_much)
        else:
            save_checkpoint(model, optimizer, config, 9, 2.5, tokenizer=tokenizer, facts=too_much)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_the_largest_vocabulary_of_the_longest_words_and_a_month_of_samples_can_be_read_again(tmp_path: Path) -> None:
    most = int(TransformerConfig.model_fields["vocab_size"].metadata[1].le)
    words = [f"{index:0{MAX_TOKEN_BYTES}}" for index in range(most)]
    tokenizer = WordTokenizer()
    tokenizer.build_vocab("\n".join(words), most)
    config = TransformerConfig(vocab_size=most, max_seq_len=8, d_model=2, n_heads=1, n_layers=1, d_ff=4, checkpoint_dir=str(tmp_path))
    history = History()
    for minute in range(30 * 24 * 60):
        history.append({"type": "sample", "step": minute, "elapsed": 60.0 * minute, "loss": 3.0, "prompt": words[-1], "text": " ".join(words[:48])})
        history.append({"type": "log", "step": minute, "loss": 1 / 3, "lr": 1e-5 / 3, "grad_norm": 1 / 3, "tokens_per_s": 1e5 / 3, "elapsed": 1.0})
    read = read_checkpoint(save_checkpoint(MiniGPT(config), None, config, 7, 3.5, tokenizer=tokenizer, facts=history.to_dict()))
    assert read.tokenizer is not None
    assert read.tokenizer.vocab_size == most
