import io
import json
import math
import os
import random
import re
import struct
import sys
import types
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import hostile
import pytest
import torch
from safetensors.torch import save, save_file
from torchs_view import views

from minigpt.checkpoint import save_checkpoint
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError
from minigpt.header import clean
from minigpt.inspection import Report, inspect_file, inspect_safely, opening, sandbox
from minigpt.inspection.recognise import count_nonfinite
from minigpt.model import MiniGPT

Manifest = list[dict[str, str]]
# The peak of a process's own resident memory, in kB; what getrusage tells begins with that of the process it was forked from.
TELL_PEAK = """
with open("/proc/self/status") as status:
    print("\\n" + next(line for line in status if line.startswith("VmHWM")).split()[1], end="")
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("hostile")
    return folder, hostile.write_corpus(folder)


def look(path: Path, *, safely: bool = False) -> Report | str:
    """The report, or the sentence of the refusal."""
    try:
        return inspect_safely(path) if safely else inspect_file(path)
    except CheckpointError as error:
        return str(error)


def disagreement(item: dict[str, str], found: Report | str, folder: Path) -> str:
    """What is wrong with an answer, measured by the manifest and by the rules for every sentence; empty if nothing is."""
    sentences = [found] if isinstance(found, str) else [*found.warnings, *found.notes]
    for sentence in sentences:
        if len(sentence) > 300 or not sentence.isprintable() or str(folder) in sentence or "weights_only" in sentence:
            return f"unfit for a visitor: {sentence!r}"
    said = found if isinstance(found, str) else " | ".join(found.warnings)
    right = isinstance(found, str) == (item["expect"] == "reject") and (item["expect"] == "accept" or re.search(item["say"], said, re.IGNORECASE))
    return "" if right else f"{item} gave {said!r}"


def test_each_of_the_128_files_is_opened_warned_about_or_refused_as_the_manifest_says(corpus: tuple[Path, Manifest]) -> None:
    folder, manifest = corpus
    assert len(manifest) == 128
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    wrong = [text for item in manifest if (text := disagreement(item, look(folder / item["file"]), folder))]
    assert wrong == []
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before, "a file was written, or a payload left its marker"


@pytest.mark.slow
def test_the_child_process_gives_the_same_answer_to_each_of_the_128_files_in_64_mb(
    corpus: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest = corpus
    paths = [folder / item["file"] for item in manifest]
    peaks: list[int] = []
    real = opening.run_child

    def measured(file: BinaryIO, arguments: Sequence[str]) -> bytes:
        reply, peak = real(file, arguments, program=sandbox.PROGRAM + TELL_PEAK).rsplit(b"\n", 1)
        peaks.append(int(peak))
        return reply

    if sys.platform == "linux":
        monkeypatch.setattr(opening, "run_child", measured)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda path: look(path, safely=True), paths))
    assert [path.name for path, answer in zip(paths, answers, strict=True) if answer != look(path)] == []
    assert not list(folder.glob("MARKER-*"))
    assert max(peaks, default=0) <= 64 << 10
    assert not peaks or len(peaks) == 128


def test_honest_files_of_the_field_open_without_a_warning(corpus: tuple[Path, Manifest]) -> None:
    folder, manifest = corpus
    reports = {item["file"]: inspect_file(folder / item["file"]) for item in manifest if item["group"] == "valid"}
    assert {name: report.warnings for name, report in reports.items() if report.warnings} == {}
    found = {name: (report.format, report.made_by, report.step, report.val_loss, report.best_val_loss) for name, report in reports.items()}
    single = struct.unpack("<f", struct.pack("<f", 1.83))[0]
    assert found == {
        "ok_seed.pt": ("torch zip", "a training script (pickled config class)", 500, 1.83, None),
        "ok_legacy.pt": ("torch legacy", "a training script (pickled config class)", 500, 1.83, None),
        "ok_nanogpt.pt": ("torch zip", "nanoGPT", 500, None, single),
        "ok_lightning.ckpt": ("torch zip", "Lightning", 500, None, None),
        "ok_state_dict.pth": ("torch zip", "unknown (a bare state dict)", None, None, None),
        "ok_bf16.pth": ("torch zip", "unknown (a bare state dict)", None, None, None),
        "ok_proto4.pt": ("torch zip", "a training script", 1, None, None),
        "ok_numpy_scalar.pt": ("torch zip", "a training script", 500, None, 1.83),
        "ok_hf.safetensors": ("safetensors", "unknown", None, None, None),
        "ok_minigpt.safetensors": ("minigpt", "MiniGPT", 500, 1.83, None),
    }
    untied = reports.pop("ok_bf16.pth")  # converted one by one, so the head has numbers of its own
    assert untied.parameters_by_block == {"embedding": 648, "block 0": 784, "head and final norm": 520}
    assert all(report.parameters_by_block == {"embedding": 648, "block 0": 784} for report in reports.values())
    assert {report.parameters for report in reports.values()} == {1432}
    assert all(report.checked for report in [untied, *reports.values()])


@pytest.mark.parametrize("module", ["config", "__main__"])
def test_a_pickled_config_object_is_shown_as_plain_data_though_its_class_is_nowhere(tmp_path: Path, module: str) -> None:
    kind = make_dataclass("TransformerConfig", [(name, type(value), value) for name, value in hostile.CONFIG.items()])
    kind.__module__ = module
    holder = sys.modules[module] if module in sys.modules else types.ModuleType(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, holder)
        patch.setattr(holder, "TransformerConfig", kind, raising=False)
        torch.save(hostile.classic(kind(**hostile.CONFIG)) | {"val_loss": torch.tensor(1.5)}, tmp_path / "model.pt")
    report = inspect_safely(tmp_path / "model.pt")
    assert {name: value for name, value in report.config.items() if report.origins[name] == "stored"} == hostile.CONFIG
    assert (report.config["d_ff"], report.origins["d_ff"]) == (32, "inferred from shapes")
    assert (report.step, report.val_loss, report.parameters) == (500, 1.5, 1432)
    assert report.made_by == "a training script (pickled config class)"
    assert f"class {module}.TransformerConfig shown as plain data" in report.notes


def test_names_and_shapes_are_those_that_torch_sees(corpus: tuple[Path, Manifest]) -> None:
    folder, _ = corpus
    for name in ("ok_nanogpt.pt", "ok_state_dict.pth", "ok_bf16.pth"):
        loaded = torch.load(folder / name, weights_only=True)
        state = loaded.get("model", loaded)
        assert {tensor.name: tensor.shape for tensor in inspect_file(folder / name).tensors} == {
            key: tuple(value.shape) for key, value in state.items()
        }


def own_file(path: Path, **facts: object) -> Path:
    config = TransformerConfig(vocab_size=50, d_model=8, n_heads=2, n_layers=2, d_ff=16, max_seq_len=8)
    return save_checkpoint(MiniGPT(config), None, config, 7, 2.5, path=path, facts=facts)


def test_our_own_file_tells_everything_from_its_header_and_its_checksum_is_verified(tmp_path: Path) -> None:
    series = {"train": {"x": [1], "y": [3.0]}}
    path = own_file(tmp_path / "own.safetensors", best_val_loss=2.25, series=series, corpus={"name": "my <b>diary\x1b</b>", "sha256": "x"})
    report = inspect_safely(path)
    assert (report.format, report.made_by, report.step, report.val_loss, report.best_val_loss) == ("minigpt", "MiniGPT", 7, 2.5, 2.25)
    assert report.config["n_layers"] == 2
    assert report.metadata["series"] == series
    assert list(report.parameters_by_block)[:3] == ["embedding", "block 0", "block 1"]
    assert report.parameters == report.metadata["parameters"]
    assert "learnt from " + clean("my <b>diary\x1b</b>") in report.notes
    assert not any(tensor.name.startswith(("model.", "optim.", "rng.")) for tensor in report.tensors)
    assert report.warnings == []
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="checksum"):
        inspect_file(path)


def test_metadata_of_the_wrong_kind_is_left_out_with_a_warning(tmp_path: Path) -> None:
    odd = {"series": [1], "data": 2, "samples": {}, "tokenizer": 3, "tied": [], "config": [], "val_loss": -1, "kept": 1}
    (tmp_path / "x.safetensors").write_bytes(save({"model.w": torch.zeros(2)}, metadata={"minigpt": json.dumps(odd)}))
    report = inspect_file(tmp_path / "x.safetensors")
    assert report.metadata == {"val_loss": -1, "kept": 1}
    assert report.val_loss is None
    assert len([sentence for sentence in report.warnings if sentence.startswith("metadata: ")]) == 6


def test_shared_weights_count_once_and_stored_attention_masks_not_at_all(tmp_path: Path) -> None:
    weight = torch.zeros(10, 4)
    state = {"wte.weight": weight, "h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.mlp.weight": torch.zeros(4, 4), "lm_head.weight": weight}
    torch.save(state | {"ln_f.weight": torch.zeros(4)}, tmp_path / "x.pt")
    report = inspect_file(tmp_path / "x.pt")
    assert report.parameters_by_block == {"embedding": 40, "block 0": 16, "head and final norm": 4}
    assert report.parameters == 60


def test_a_parameter_in_a_model_of_several_stacks_is_counted_under_its_own_path(tmp_path: Path) -> None:
    state = {f"{part}.layers.{i}.fc.weight": torch.zeros(2, 2) for part in ("encoder", "decoder") for i in (0, 1)}
    torch.save(state, tmp_path / "x.pt")
    assert inspect_file(tmp_path / "x.pt").parameters_by_block == {f"{part}.layers {i}": 4 for part in ("decoder", "encoder") for i in (0, 1)}


def test_kinds_of_numbers_newer_than_the_storage_classes_are_opened(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3, 2, dtype=torch.float8_e4m3fn), "b": torch.zeros(5, dtype=torch.uint16)}, tmp_path / "x.pt")
    assert [(tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in inspect_file(tmp_path / "x.pt").tensors] == [
        ("F8_E4M3", (3, 2), 6),
        ("U16", (5,), 10),
    ]


def test_a_whole_pickled_module_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear.*state_dict"):
        inspect_file(tmp_path / "x.pt")


def test_values_are_not_read_above_the_limit_or_on_request_and_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"wte.weight": torch.full((4, 4), math.nan)}
    torch.save(state, tmp_path / "x.pt")
    save_file(state, tmp_path / "x.safetensors")
    for path in (tmp_path / "x.pt", tmp_path / "x.safetensors"):
        with monkeypatch.context() as limited:
            limited.setattr(opening, "SCAN_LIMIT_BYTES", 100)
            too_large = inspect_file(path)
        for report in (too_large, inspect_file(path, scan=False)):
            assert not report.checked
            assert not any("not finite" in sentence for sentence in report.warnings)
            assert any(sentence.startswith("values not checked") for sentence in report.notes)
        assert any("not finite" in sentence for sentence in inspect_file(path).warnings)


def test_a_file_of_many_gigabytes_is_reported_from_its_header(tmp_path: Path) -> None:
    numel = 1 << 31
    header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [numel // 8, 8], "data_offsets": [0, numel * 4]}}).encode()
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + numel * 4)  # a hole: no disk is used
    report = inspect_safely(tmp_path / "x.safetensors")
    assert (report.parameters, report.checked) == (numel, False)


@pytest.mark.parametrize(("kind", "bits"), [("F64", 64), ("F32", 32), ("F16", 16), ("BF16", 16)])
def test_numbers_that_are_not_finite_are_counted_as_torch_counts_them(kind: str, bits: int) -> None:
    dtype = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    exponents = random.Random(5)
    edge = [math.inf, -math.inf, math.nan, torch.finfo(dtype).max, torch.finfo(dtype).tiny, 0.0, -1.5]
    data = torch.tensor(edge, dtype=dtype).view(torch.uint8).numpy().tobytes()
    data += b"".join(exponents.getrandbits(bits).to_bytes(bits // 8, "little") for _ in range(5000))
    values = torch.frombuffer(bytearray(data), dtype=dtype)
    assert count_nonfinite(data, kind) == int((~torch.isfinite(values)).sum()) > 2


def test_a_missing_file_a_folder_and_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / "nothing.pt", tmp_path]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        paths.append(tmp_path / "pipe")
    for path in paths:
        for inspect in (inspect_file, inspect_safely):
            with pytest.raises(CheckpointError, match="no such file" if path == paths[0] else "not a regular file"):
                inspect(path)


def test_a_report_survives_its_trip_through_json_and_nothing_else_passes_for_one(corpus: tuple[Path, Manifest]) -> None:
    report = inspect_file(corpus[0] / "ok_minigpt.safetensors")
    values: dict[str, Any] = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert Report.from_dict(values) == report
    for wrong in ({}, values | {"tensors": [1]}, values | {"step": "5"}, values | {"more": 1}, values | {"config": None}):
        with pytest.raises(TypeError):
            Report.from_dict(wrong)


def settings(*pairs: tuple[str, bytes]) -> bytes:
    """A checkpoint with one good tensor and these further settings, as pickled values."""
    w = hostile.dict_of((hostile.text("w"), hostile.tensor(hostile.storage("0", 4), [4], [1])))
    return hostile.torch_zip(hostile.model(w, *((hostile.text(key), value) for key, value in pairs)), {"0": hostile.floats(4)})


def repeated(value: bytes, use: bytes, times: int) -> bytes:
    """A list of `times` uses of one value that stands in the file once."""
    return value + b"q\x010" + b"](" + use * times + b"e"


def wide_object() -> bytes:
    fields = b"}(" + b"".join(hostile.text(f"k{i}") + b"N" for i in range(50_000)) + b"u"
    return hostile.name_of("config", "C") + b")\x81" + fields + b"b"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(settings(("step", hostile.doubled(64))), id="a step that can never be written out"),
        pytest.param(settings(("val_loss", hostile.doubled(64))), id="a loss that can never be written out"),
        pytest.param(settings(("config", hostile.doubled(64))), id="settings that can never be walked"),
        pytest.param(settings(("config", hostile.dict_of((hostile.doubled(64), b"N")))), id="a settings name that can never be written out"),
        pytest.param(
            settings(
                ("config", repeated(hostile.text("x" * 1_000_000), hostile.name_of("_codecs", "encode") + b"(h\x01X\x06\0\0\0latin1tR", 40_000))
            ),
            id="one long text encoded forty thousand times",
        ),
        pytest.param(
            settings(("config", repeated(b"](" + b"]" * 50_000 + b"e", hostile.name_of("collections", "OrderedDict") + b"(h\x01tR", 40_000))),
            id="one long list copied into forty thousand dicts",
        ),
        pytest.param(settings(("config", repeated(wide_object(), b"h\x01", 40_000))), id="one wide object shown forty thousand times"),
        pytest.param(
            settings(("config", hostile.name_of("a", "B") + b")\x81" + (hostile.name_of("a", "B") + b")\x81") * 60_000 + b"b" * 60_000)),
            id="deep states",
        ),
    ],
)
def test_a_file_that_costs_its_reader_more_than_it_weighs_is_answered_within_the_limits(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    found = look(tmp_path / "x.pt", safely=True)
    assert isinstance(found, Report) or "too many entries" in found


def test_a_zip_around_a_checkpoint_is_refused_with_what_to_open_instead(tmp_path: Path) -> None:
    path = tmp_path / "export.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/config.json", "{}" * 99)
        archive.writestr("model/model.safetensors", bytes(999))
    with pytest.raises(CheckpointError, match=r"a zip archive, not a checkpoint .*: unpack it and open the model.safetensors in it\.$"):
        inspect_file(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("notes.txt", "a" * 99)
    with pytest.raises(CheckpointError, match=r"a zip archive, not a checkpoint \(it has no data.pkl\)\.$"):
        inspect_file(path)


def zip64(data: bytes) -> bytes:
    """The same entries in a zip whose directory ends in the long records that files above 4 GB have."""
    buffer = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch, zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(buffer, "w") as target:
        patch.setattr(zipfile, "ZIP64_LIMIT", 10)
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
        target.close()
    return buffer.getvalue()


def test_the_directory_of_a_very_large_zip_is_read_and_may_not_lie(corpus: tuple[Path, Manifest], tmp_path: Path) -> None:
    data = zip64((corpus[0] / "ok_nanogpt.pt").read_bytes())
    assert b"PK\x06\x06" in data
    (tmp_path / "x.pt").write_bytes(data)
    assert inspect_file(tmp_path / "x.pt").tensors == inspect_file(corpus[0] / "ok_nanogpt.pt").tensors
    start = data.index(b"PK\x06\x06")
    for field, value, sentence in ((32, 10**9, "too many entries"), (40, 10**9, "too many entries"), (48, 5, "not where it should be")):
        lying = bytearray(data)
        struct.pack_into("<Q", lying, start + field, value)
        (tmp_path / "x.pt").write_bytes(lying)
        assert sentence in str(look(tmp_path / "x.pt"))


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Flip, overwrite, cut, double or drop a few stretches of a file."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(changed) + 1)
        stop = min(len(changed), start + chance.choice((1, 1, 4, 16, 200)))
        action = chance.randrange(5)
        if action == 0:
            changed[start:stop] = bytes(byte ^ 1 << chance.randrange(8) for byte in changed[start:stop])
        elif action == 1:
            changed[start:stop] = chance.randbytes(stop - start)
        elif action == 2:
            del changed[start:stop]
        elif action == 3:
            changed[start:start] = changed[start:stop]
        elif chance.random() < 0.2:
            del changed[start:]
    return bytes(changed)


def nudged(data: bytes, chance: random.Random) -> bytes:
    """Change one or two bytes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 2)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def repacked(data: bytes, chance: random.Random) -> bytes:
    """Change a byte or two of a zip's index, or mutate any record, and leave the zip itself in order, checksums too: as a clever hand would."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(buffer, "w") as target:
        infos = source.infolist()
        index = next(info for info in infos if info.filename.endswith("data.pkl"))
        chosen, change = (index, nudged) if chance.random() < 0.8 else (chance.choice(infos), mutated)
        for info in infos:
            target.writestr(info.filename, change(source.read(info), chance) if info is chosen else source.read(info))
    return buffer.getvalue()


def check_mutations(folder: Path, manifest: Manifest, target: Path, count: int) -> dict[Path, Report]:
    """Look at `count` mutated files; return those that were opened."""
    chance = random.Random(20)
    originals = [folder / item["file"] for item in manifest if item["group"] == "valid"]
    target.mkdir()
    opened: dict[Path, Report] = {}
    for number in range(count):
        original = chance.choice(originals)
        data = original.read_bytes()
        mutation = repacked if data.startswith(b"PK") and chance.random() < 0.5 else mutated
        path = target / f"{number}{original.suffix}"
        path.write_bytes(mutation(data, chance))
        found = look(path)
        sentences = [found] if isinstance(found, str) else [*found.warnings, *found.notes]
        assert all(len(sentence) <= 300 and sentence.isprintable() and str(target) not in sentence for sentence in sentences)
        if isinstance(found, Report):
            json.dumps(found.to_dict(), allow_nan=False)
            opened[path] = found
        else:
            path.unlink()
    assert 0 < len(opened) < count
    return opened


@pytest.mark.filterwarnings("ignore:invalid escape")  # pickletools, on a mutated text
def test_300_mutated_files_are_reported_or_refused(corpus: tuple[Path, Manifest], tmp_path: Path) -> None:
    check_mutations(*corpus, tmp_path / "mutations", 300)


@pytest.mark.filterwarnings("ignore:invalid escape")  # pickletools, on a mutated text
@pytest.mark.slow
def test_of_3000_mutated_files_those_that_torch_opens_too_have_the_names_and_shapes_it_finds(corpus: tuple[Path, Manifest], tmp_path: Path) -> None:
    opened = check_mutations(*corpus, tmp_path / "mutations", 3000)
    compared, different = 0, []
    for (path, report), theirs in zip(opened.items(), views(list(opened)), strict=True):
        ours = {tensor.name: list(tensor.shape) for tensor in report.tensors}
        if theirs is not None:
            compared += 1
            parts = [{clean(name): shape for name, shape in part.items()} for part in theirs]
            models = [{name.removeprefix("model."): shape for name, shape in part.items() if name.startswith("model.")} for part in parts]
            different += [] if ours in (*parts, *models) else [(path.name, ours, parts)]
    assert different == []
    assert compared > 200
