import json
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import transformers  # whose parts are imported where they are used: it takes two seconds, and not every process runs these tests
from conftest import ConfigFactory, verse
from safetensors.torch import load_file

from minigpt import export as module
from minigpt.checkpoint import read_checkpoint, save_checkpoint
from minigpt.cli import main
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError, MiniGPTError
from minigpt.export import export, renamed
from minigpt.generate import generate
from minigpt.model import MiniGPT
from minigpt.tokenizer import TOKENIZERS

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CLASSES = {"gpt2": "GPT2LMHeadModel", "modern": "NanoChatForCausalLM"}
TEXTS = (
    verse(20), "", "\n\n", "ROMEO:\nThe moon <pad> is well-fed; <unk> o'er the sun--so! <bos>\n", "unknownwörd  two  spaces\t<eos> zyx 你好 😀",
    "<|endoftext|> </s> [PAD]", "end \n of\r\nlines", " leading and trailing ",
)  # fmt: skip


def shaken(config: TransformerConfig, std: float = 0.1) -> MiniGPT:
    """A model none of whose numbers is a zero or one by design, so that a tensor in the wrong place is seen."""
    model = MiniGPT(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return model


@pytest.fixture
def write(tmp_path: Path, tiny_config: ConfigFactory) -> Any:
    """Return a function that saves a checkpoint of the given architecture and tokenizer and returns its path."""

    def make(arch: str, kind: str = "word", **changes: Any) -> Path:
        tokenizer = TOKENIZERS[kind]()
        tokenizer.build_vocab(verse(50), 40)
        config = tiny_config(arch=arch, tokenizer=kind, vocab_size=tokenizer.vocab_size, n_layers=2, **changes)
        return save_checkpoint(shaken(config), None, config, 7, 1.5, path=tmp_path / "ours.safetensors", tokenizer=tokenizer)

    return make


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found = model.eval()(ids)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("kind", ["word", "char"])
def test_transformers_opens_the_folder_and_computes_what_we_compute(tmp_path: Path, write: Any, arch: str, kind: str) -> None:
    path = write(arch, kind)
    files = export(path, tmp_path / "out")
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    model, info = getattr(transformers, CLASSES[arch]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {name: list(found) for name, found in info.items() if found} == {}
    ours = read_checkpoint(path)
    ids = torch.randint(0, ours.config.vocab_size, (3, ours.config.max_seq_len), generator=torch.Generator().manual_seed(1))
    expected = logits_of(ours.model, ids)
    assert (logits_of(model, ids) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert torch.equal(logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), ids), logits_of(model, ids))


@pytest.mark.parametrize("kind", ["word", "char"])
@pytest.mark.parametrize("opener", ["AutoTokenizer", "PreTrainedTokenizerFast"])
def test_the_tokenizer_in_the_folder_gives_our_ids_and_our_text(tmp_path: Path, write: Any, kind: str, opener: str) -> None:
    ours = read_checkpoint(path := write("gpt2", kind)).tokenizer
    assert ours is not None
    export(path, tmp_path / "out")
    theirs = getattr(transformers, opener).from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.decode([0, 1, 2, 3, 5]) == ours.decode([0, 1, 2, 3, 5])
    assert [theirs.pad_token_id, theirs.unk_token_id, theirs.bos_token_id, theirs.eos_token_id] == [0, 1, 2, 3]


def test_transformers_writes_the_likeliest_tokens_that_we_write_and_no_special_one(tmp_path: Path, tiny_config: ConfigFactory) -> None:
    model = shaken(config := tiny_config())
    with torch.no_grad():
        weights = model.state_dict()
        weights["norm.weight"].mul_(0.3)
        weights["norm.bias"].add_(20 * weights["embedding.weight"][3])  # the likeliest of all is the end token
    export(save_checkpoint(model, None, config, 7, 1.5, path=tmp_path / "ours.safetensors"), tmp_path / "out")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    found = theirs.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=10)[0].tolist()
    assert found == [5, 6, 7, *generate(model, [5, 6, 7], 10, temperature=0)]
    assert logits_of(model, torch.tensor([found]))[0, -1].argmax() == 3


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_plain_safetensors_have_our_names_settings_and_tokenizer(tmp_path: Path, write: Any, arch: str) -> None:
    ours = read_checkpoint(path := write(arch))
    assert [file.name for file in export(path, tmp_path / "out", "safetensors")] == ["config.json", "model.safetensors", "tokenizer.json"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == ours.model.state_dict().keys()
    assert all(torch.equal(found[name], weight) for name, weight in ours.model.state_dict().items())
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["arch"] == arch
    assert not {"data_path", "checkpoint_dir"} & settings.keys()
    assert ours.tokenizer is not None
    assert (tmp_path / "out" / "tokenizer.json").read_text() == ours.tokenizer.to_json()


def test_a_checkpoint_without_a_tokenizer_exports_its_model(tmp_path: Path, tiny_config: ConfigFactory) -> None:
    path = save_checkpoint(MiniGPT(tiny_config()), None, tiny_config(), 0, None, path=tmp_path / "a.safetensors")
    assert {file.name for file in export(path, tmp_path / "out")} == {"config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in export(path, tmp_path / "plain", "safetensors")} == {"config.json", "model.safetensors"}


def test_a_part_that_transformers_has_no_place_for_is_refused_with_what_works() -> None:
    with pytest.raises(CheckpointError, match=r"NanoChat of transformers has no place for blocks.0.gate.weight: --to safetensors"):
        renamed("modern", {"blocks.0.gate.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"GPT-2 of transformers has no place for head.weight"):
        renamed("gpt2", {"head.weight": torch.zeros(2, 2)})


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path, write: Any) -> None:
    taken = tmp_path / "out"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    with pytest.raises(MiniGPTError, match="not an empty folder, so nothing was written: name a new one"):
        export(write("gpt2"), taken)
    assert [(file.name, file.read_text()) for file in taken.iterdir()] == [("thesis.txt", "mine")]
    with pytest.raises(MiniGPTError, match="not an empty folder"):
        export(write("gpt2"), taken / "thesis.txt")


def test_an_empty_folder_is_used(tmp_path: Path, write: Any) -> None:
    (tmp_path / "out").mkdir()
    assert all(file.is_file() for file in export(write("gpt2"), tmp_path / "out"))


def test_a_folder_named_from_where_one_stands_is_made(tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("gpt2")
    monkeypatch.chdir(tmp_path)
    export(path, Path("deep/er"))
    assert (tmp_path / "deep" / "er" / "config.json").is_file()


@pytest.mark.parametrize("moment", [1, 2, 4])
def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    path, written = write("gpt2"), []

    def full(target: Path, data: bytes) -> None:
        written.append(target)
        if len(written) == moment:
            raise OSError(28, "No space left on device")
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)

    monkeypatch.setattr(module, "write_atomically", full)
    before = set(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space"):
        export(path, tmp_path / "out")
    assert len(written) == moment
    assert set(tmp_path.iterdir()) == before


def test_a_folder_filled_meanwhile_is_left_alone(tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = write("gpt2"), tmp_path / "out"
    real = module.write_atomically

    def meanwhile(target: Path, data: bytes) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("x")
        real(target, data)

    monkeypatch.setattr(module, "write_atomically", meanwhile)
    with pytest.raises(OSError):
        export(path, out)
    assert [file.name for file in out.iterdir()] == ["theirs"]
    assert not list(tmp_path.glob(".out*"))


def test_the_command_exports_a_run_s_best_checkpoint_and_lists_the_files(tmp_path: Path, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write("modern").rename(run / "best.safetensors")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert [Path(line) for line in capsys.readouterr().out.splitlines()] == [
        tmp_path / "out" / name for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    assert transformers.NanoChatForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 16
    assert main(["export", str(run / "best.safetensors"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'out'} is there already and is not an empty folder, so nothing was written: name a new one\n"
    assert main(["export", str(run), str(tmp_path / "other"), "--to", "onnx"]) == 2
    assert "invalid choice: 'onnx'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")
def test_an_export_that_is_killed_leaves_nothing_or_all_and_the_next_one_sweeps(tmp_path: Path) -> None:
    from crashes import main as experiment  # which needs a module that Windows has not

    done = forks.run(experiment, "export", tmp_path, 15, 3, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cut"] > 0
    assert found["cut"] + found["whole"] == 15
    assert (found["torn"], found["strays"]) == ([], [])
