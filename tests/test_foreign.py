import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # whose parts are imported where they are used: it takes two seconds, and not every process runs these tests
from conftest import verse
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from minigpt.checkpoint import save_checkpoint
from minigpt.cli import main
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError
from minigpt.export import export
from minigpt.foreign import open_any, open_foreign
from minigpt.generate import generate, write
from minigpt.inspection import inspect_safely
from minigpt.model import MiniGPT
from minigpt.tokenizer import WordTokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
V, C, T = 70, 128, 24
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def shaken(model: Any, std: float = 0.05) -> Any:
    """A model none of whose numbers is a zero or one by design."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return model.eval()


def gpt2(**changes: Any) -> Any:
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": C, "n_layer": 2, "n_head": 4}
    return shaken(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **changes})))


def nanochat(**changes: Any) -> Any:
    sizes = {"vocab_size": V, "hidden_size": C, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return shaken(transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**{**sizes, "max_position_embeddings": T, **changes})))


def in_torch_order(model: Any) -> dict[str, Tensor]:
    """A GPT-2's tensors as trainers keep them that build it from `nn.Linear`."""
    state = model.state_dict()
    return {name: value.T.contiguous() if name.endswith(MATRICES) else value for name, value in state.items()}


def expect_same(path: Path, theirs: Any) -> list[str]:
    """Compare our logits with the original library's; return the notes."""
    opened = open_foreign(path)
    ids = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = theirs(ids).logits
        assert (opened.model(ids) - expected).abs().max() <= 1e-4
    assert expected.std() > 0.1, "logits that are all alike prove nothing"
    return list(opened.notes)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_a_gpt2_of_transformers_gives_the_same_logits(tmp_path: Path, activation: str, as_folder: bool) -> None:
    model = gpt2(activation_function=activation, n_inner=72)
    model.save_pretrained(tmp_path)
    assert expect_same(tmp_path if as_folder else tmp_path / "model.safetensors", model) == []


def test_a_gpt2_with_a_head_of_its_own_keeps_it(tmp_path: Path) -> None:
    model = gpt2(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    expect_same(tmp_path, model)
    opened = open_foreign(tmp_path).model
    ids = torch.arange(T).view(1, T)
    loss = model(ids, labels=ids).loss
    assert torch.allclose(opened.loss(ids[:, :-1], ids[:, 1:]), loss, atol=1e-4)


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_bare_state_dict_of_gpt2_is_read_with_or_without_its_prefix(tmp_path: Path, bare: bool, dtype: torch.dtype) -> None:
    model = gpt2(n_head=2).to(dtype)
    torch.save((model.transformer if bare else model).state_dict(), tmp_path / "a.pth")
    notes = expect_same(tmp_path / "a.pth", model.float())
    assert notes == ["assumed 2 heads, each 64 wide: the file does not say"]


def test_a_config_json_beside_the_file_tells_the_heads(tmp_path: Path) -> None:
    model = gpt2(n_head=8)
    torch.save(model.state_dict(), tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 8}))
    assert expect_same(tmp_path / "a.pth", model) == []


def test_a_look_and_the_model_take_the_same_settings_from_a_config_json(tmp_path: Path) -> None:
    model = gpt2(n_head=8)
    torch.save({"model": model.state_dict(), "config": {"dropout": 0.1}}, tmp_path / "a.pt")
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 8, "dropout": 0.5}))
    report = inspect_safely(tmp_path / "a.pt")
    assert (report.config["n_head"], report.config["dropout"]) == (8, 0.1)
    assert "further settings are those of the config.json beside it" in report.notes
    assert expect_same(tmp_path / "a.pt", model) == []


@pytest.mark.parametrize("own", [None, "conf/gpt2.yaml", {}, [1]])
def test_a_config_json_is_also_taken_where_the_file_has_no_settings_by_name(tmp_path: Path, own: object) -> None:
    model = gpt2(n_head=8)
    torch.save({"model": model.state_dict(), "config": own}, tmp_path / "a.pt")
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 8}))
    assert "settings are those of the config.json beside it" in inspect_safely(tmp_path / "a.pt").notes
    assert expect_same(tmp_path / "a.pt", model) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[1, 2]", "holds no settings by name"),
        (json.dumps({"n_head": 8, "id2label": {str(label): "x" * 60 for label in range(1000)}}), "is larger than 64 kB"),
    ],
)
def test_a_config_json_that_cannot_be_read_is_warned_of_and_no_model_is_made_without_it(tmp_path: Path, text: str, reason: str) -> None:
    torch.save({"model": gpt2(n_head=8).state_dict()}, tmp_path / "a.pt")
    (tmp_path / "config.json").write_text(text)
    said = f"This file's config.json {reason}. Nothing was taken from it: mend it, or move it away."
    report = inspect_safely(tmp_path / "a.pt")
    assert said in report.warnings
    assert not any("config.json" in note for note in report.notes)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        open_foreign(tmp_path / "a.pt")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_a_checkpoint_of_nanogpt_gives_the_same_logits(tmp_path: Path, bias: bool, prefix: str) -> None:
    model = gpt2(activation_function="gelu")
    if not bias:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()
    state = {f"{prefix}{name}": value for name, value in in_torch_order(model).items() if bias or not name.endswith("bias")}
    state |= {f"{prefix}transformer.h.{layer}.attn.bias": torch.ones(1, 1, T, T).tril() for layer in range(2)}  # as its older versions do
    arguments = {"n_layer": 2, "n_head": 4, "n_embd": C, "block_size": T, "bias": bias, "vocab_size": V, "dropout": 0.2}
    saved = {"model": state, "model_args": arguments, "iter_num": 250, "best_val_loss": torch.tensor(1.5), "config": {"dataset": "plays"}}
    torch.save(saved, tmp_path / "ckpt.pt")
    assert expect_same(tmp_path, model) == []
    opened = open_foreign(tmp_path / "ckpt.pt")
    assert (opened.step, opened.val_loss, opened.metadata["made_by"], opened.tokenizer) == (250, 1.5, "nanoGPT", None)


def test_a_checkpoint_that_lightning_wrote_gives_the_same_logits(tmp_path: Path) -> None:
    import lightning

    class Wrapped(lightning.LightningModule):
        def __init__(self, n_head: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = gpt2(n_head=n_head)

        def training_step(self, batch: Tensor) -> Tensor:
            return self.model(batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = Wrapped(n_head=8)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(T).view(1, T)))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert expect_same(tmp_path / "a.ckpt", module.model.eval()) == []
    assert (open_foreign(tmp_path / "a.ckpt").step, open_foreign(tmp_path / "a.ckpt").metadata["made_by"]) == (1, "Lightning")


def test_a_small_trainer_s_names_with_a_pickled_dataclass_are_read_as_gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = make_dataclass("TransformerConfig", [("n_heads", int, 8), ("vocab_size", int, V)])
    kind.__module__ = "config"
    monkeypatch.setitem(sys.modules, "config", types.ModuleType("config"))
    sys.modules["config"].TransformerConfig = kind  # type: ignore[attr-defined]
    model = gpt2(activation_function="gelu", n_head=8)
    names = {"transformer.": "", "wte": "tok_emb", "wpe": "pos_emb", "h.0": "blocks.0", "h.1": "blocks.1", "ln_1": "ln1", "ln_2": "ln2",
             "c_attn": "qkv", "c_proj": "proj", "c_fc": "fc", "lm_head": "head"}  # fmt: skip
    state = {}
    for name, value in in_torch_order(model).items():
        for theirs, other in names.items():
            name = name.replace(theirs, other)  # noqa: PLW2901
        state[name] = value
    torch.save({"model_state_dict": state, "config": kind(), "step": 9, "val_loss": 2.5}, tmp_path / "a.pt")
    del sys.modules["config"]
    assert expect_same(tmp_path / "a.pt", model) == ["read as a GPT-2 by its tensors' names: if it was built otherwise, what it writes is noise"]


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {}, {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": None},
     {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}],
)  # fmt: skip
def test_a_nanochat_of_transformers_gives_the_same_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = nanochat(**changes)
    model.save_pretrained(tmp_path)
    assert expect_same(tmp_path, model) == []
    assert (open_foreign(tmp_path).model.head is None) == bool(changes.get("tie_word_embeddings"))


def test_a_bare_nanochat_is_read_with_its_usual_settings_and_says_so(tmp_path: Path) -> None:
    model = nanochat(num_attention_heads=1)
    torch.save({f"model.{name}": value for name, value in model.state_dict().items()}, tmp_path / "a.pt")
    notes = expect_same(tmp_path / "a.pt", model)
    assert [note.split(":")[0] for note in notes] == [
        "assumed 1 head, each 128 wide", "assumed a context of 2,048 tokens", "assumed NanoChat's usual cap of 15 on the logits",
    ]  # fmt: skip


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("to", ["transformers", "safetensors"])
def test_what_we_export_comes_back_with_its_words(tmp_path: Path, arch: str, to: Any) -> None:
    tokenizer = WordTokenizer()
    tokenizer.build_vocab(verse(50), V)
    config = TransformerConfig(arch=arch, vocab_size=tokenizer.vocab_size, max_seq_len=T, d_model=C, n_heads=4)
    model = shaken(MiniGPT(config))
    path = save_checkpoint(model, None, config, 1, None, path=tmp_path / "a.safetensors", tokenizer=tokenizer)
    export(path, tmp_path / "out", to)
    opened = open_foreign(tmp_path / "out")
    ids = torch.randint(0, config.vocab_size, (2, T))
    with torch.inference_mode():
        assert torch.equal(opened.model(ids), model(ids))
    assert opened.tokenizer is not None
    assert opened.notes == ()
    assert list(write(opened.model, opened.tokenizer, "ROMEO:\n", 12)) == list(write(model, tokenizer, "ROMEO:\n", 12))
    assert open_foreign(tmp_path / "out" / "model.safetensors").tokenizer is None, "only a folder's tokenizer is taken"


def bytes_tokenizer(folder: Path, size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([verse(60)], trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_a_tokenizer_of_others_in_the_folder_reads_and_writes_their_ids(tmp_path: Path) -> None:
    gpt2(vocab_size=300).save_pretrained(tmp_path)
    theirs = bytes_tokenizer(tmp_path, 300)
    opened = open_foreign(tmp_path)
    assert opened.tokenizer is not None
    assert opened.tokenizer.encode("ROMEO:\n  sweet") == theirs.encode("ROMEO:\n  sweet").ids
    *_, text = write(opened.model, opened.tokenizer, "ROMEO:", 5)
    assert text.startswith("ROMEO:")


def test_no_id_is_special_where_a_vocabulary_is_not_ours(tmp_path: Path) -> None:
    model = gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(20 * model.transformer.wte.weight[2])  # whatever it reads, token 2 is the likeliest
    model.save_pretrained(tmp_path)
    opened = open_foreign(tmp_path)
    assert list(generate(opened.model, [5], 3, temperature=0, never=())) == [2, 2, 2]
    gpt2(vocab_size=300).save_pretrained(tmp_path)
    bytes_tokenizer(tmp_path, 300)
    tokenizer = open_foreign(tmp_path).tokenizer
    assert tokenizer is not None
    assert tokenizer.never_written == ()


def without(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: without(state, "transformer.h.1.mlp.c_fc.weight"), r"GPT-2's or NanoChat's: h\.1\.mlp\.c_fc\.weight is missing"),
        (lambda state: without(state, "transformer.wpe.weight"), r"wpe\.weight is missing"),
        (lambda state: state | {"transformer.wpe.weight": torch.tensor(1.0)}, "cannot be used here: max_seq_len is 0"),
        (lambda state: state | {"transformer.h.0.mlp.c_fc.weight": torch.tensor(1.0)}, r"cannot be used here: d_ff is 0"),
        (lambda state: {name: value[:0] for name, value in state.items()}, "cannot be used here: vocab_size is 0"),
        (lambda state: without(state, "transformer.wte.weight"), r"no matrix is called embedding\.weight, wte\.weight, embed_tokens\.weight"),
        (lambda state: state | {"transformer.h.0.gate.weight": torch.ones(2)}, r"tensor h\.0\.gate\.weight, which the model here has no place for"),
        (lambda state: state | {"transformer.h.0.mlp.c_proj.weight": torch.ones(2, 2)}, r"c_proj\.weight has shape \[2, 2\]; \[512, 128\] would fit"),
        (lambda state: state | {"transformer.h.0.ln_1.bias": torch.ones(C).int()}, "is of I32; only floats"),
        (lambda state: state | {"transformer.h.0.ln_1.bias": torch.full((C,), torch.nan)}, "not finite"),
        (lambda state: state | {"lm_head.weight": torch.ones(V + 2, C)}, r"lm_head\.weight has shape \[72, 128\]; \[70, 128\] would fit"),
        (lambda state: state | {"transformer.wte.weight": torch.ones(4, C)}, "model of this size cannot be used here: vocab_size is 4"),
        (lambda state: state | {"transformer.wte.weight": torch.ones(4)}, "no matrix is called"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_what_does_not_fit(tmp_path: Path, change: Any, sentence: str) -> None:
    torch.save(change(dict(gpt2(n_head=2).state_dict())), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=sentence):
        open_foreign(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"activation_function": "relu"}, "setting activation_function is relu, which the model here does not compute"),
        ({"layer_norm_epsilon": 1e-3}, "setting layer_norm_epsilon is 0.001"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"n_head": 5}, "its width of 128 cannot be split into 5 heads: put a config.json with n_head beside it"),
        ({"n_head": 0}, "cannot be split into an unknown number of heads"),
    ],
)
def test_settings_that_ours_cannot_compute_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    gpt2().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=sentence):
        open_foreign(tmp_path)


def test_nanochats_that_ours_cannot_compute_are_refused(tmp_path: Path) -> None:
    nanochat(num_key_value_heads=2).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has shape \[64, 128\]; \[128, 128\] would fit: its heads share keys"):
        open_foreign(tmp_path)
    nanochat().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    for change in (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"final_logit_softcapping": -1},
        {"rope_parameters": {"rope_theta": True}},
    ):
        path.write_text(json.dumps(settings | change))
        with pytest.raises(CheckpointError, match="rope_parameters or final_logit_softcapping are of a kind"):
            open_foreign(tmp_path)


def test_unknown_heads_of_an_odd_width_are_asked_for(tmp_path: Path) -> None:
    torch.save(gpt2(n_embd=48, n_head=4).state_dict(), tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match=r"its width of 48 cannot be split into an unknown number of heads: put a config.json with n_head beside it"
    ):
        open_foreign(tmp_path / "a.pt")


def test_folders_and_files_without_usable_weights_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"this folder holds no weights; they would be called model.safetensors"):
        open_foreign(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        open_foreign(tmp_path / "none.pt")
    llama = {"model.embed_tokens.weight": torch.ones(V, C), "model.layers.0.mlp.gate_proj.weight": torch.ones(C, C)}
    save_file(llama, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not shaped like GPT-2's or NanoChat's"):
        open_foreign(tmp_path)
    gpt2(n_head=2).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not a tokenizer"):
        open_foreign(tmp_path)
    bytes_tokenizer(tmp_path, 300)
    with pytest.raises(CheckpointError, match=r"tokenizer.json has 300 tokens; the model knows 70"):
        open_foreign(tmp_path)


def test_a_file_of_any_make_is_opened_and_ours_by_its_checksum(tmp_path: Path) -> None:
    config = TransformerConfig(vocab_size=V, max_seq_len=T, d_model=C, n_heads=4)
    path = save_checkpoint(MiniGPT(config), None, config, 3, 1.25, path=tmp_path / "a.safetensors")
    assert (open_any(path).step, open_any(path).notes) == (3, ())
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="checksum"):
        open_any(path)
    torch.save(gpt2(n_head=2).state_dict(), tmp_path / "a.pt")
    assert len(open_any(tmp_path / "a.pt").notes) == 1


def test_generate_writes_ids_where_there_is_no_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(gpt2(n_head=2).state_dict(), tmp_path / "a.pt")
    command = ["generate", str(tmp_path / "a.pt"), "--max-tokens", "5", "--temperature", "0"]
    assert main([*command, "--ids", "7, 8 9"]) == 0
    said = capsys.readouterr()
    expected = [7, 8, 9, *generate(open_foreign(tmp_path / "a.pt").model, [7, 8, 9], 5, temperature=0, never=())]
    assert [int(index) for index in said.out.split()] == expected
    assert said.err == "assumed 2 heads, each 64 wide: the file does not say\n"
    assert main(command) == 1
    assert "a.pt: it holds no tokenizer, so its model reads and writes numbers of tokens: try --ids" in capsys.readouterr().err
    assert main([*command, "--ids", "70"]) == 2
    assert capsys.readouterr().err.endswith("ids has 70; this model knows 0 to 69: use smaller numbers\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ids", "1 x"], "ids is '1 x'; it must be whole numbers from 0 up"),
        (["--ids", "-3"], "ids is '-3'; it must be whole numbers"),
        (["--ids="], "ids is ''; it must be whole numbers"),
        (["--ids", "1 ²"], "ids is '1 ²'"),
        (["--ids", "1", "--prompt", "a"], "prompt and ids are two ways to begin: give one of them"),
    ],
)
def test_ids_that_are_none_are_refused(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "nowhere", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_generate_writes_text_from_a_folder_with_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2(vocab_size=300).save_pretrained(tmp_path)
    bytes_tokenizer(tmp_path, 300)
    assert main(["generate", str(tmp_path), "--prompt", "ROMEO: !", "--max-tokens", "4"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("ROMEO: !")
    assert said.err == ""
    assert main(["generate", str(tmp_path), "--ids", "5 6", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("5 6 ")
