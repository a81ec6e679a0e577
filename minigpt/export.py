"""Our checkpoint in other forms: a folder for transformers, plain safetensors with the settings beside them, or our own file without what only a
resume needs.

Both architectures are known to transformers under names of its own: `gpt2` is its GPT-2, `modern` its NanoChat. Knows those names and layouts, and
never imports it.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save as pack_tensors
from torch import Tensor

from minigpt.checkpoint import LOCAL_FIELDS, Checkpoint, read_checkpoint, save_checkpoint
from minigpt.config import BOS, EOS, PAD, SPECIAL_TOKENS, TEMPERATURE, TOP_K, UNK, TransformerConfig
from minigpt.errors import CheckpointError, MiniGPTError
from minigpt.generate import first_prompt, sample
from minigpt.model import RMS_EPS, ROPE_THETA
from minigpt.system import stray, sweep_strays, sync_folder, write_atomically

Target = Literal["transformers", "safetensors"]
PREFIX = {"gpt2": "transformer.", "modern": "model."}
# Our modules by the names that transformers gives them behind its prefix; three names share one of our matrices, a third of its rows each.
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "embedding": ("wte",), "positions": ("wpe",), "norm": ("ln_f",),
        "blocks.N.attention_norm": ("h.N.ln_1",), "blocks.N.attention.qkv": ("h.N.attn.c_attn",), "blocks.N.attention.out": ("h.N.attn.c_proj",),
        "blocks.N.feed_forward_norm": ("h.N.ln_2",), "blocks.N.feed_forward.up": ("h.N.mlp.c_fc",), "blocks.N.feed_forward.down": ("h.N.mlp.c_proj",),
    },
    "modern": {
        "embedding": ("embed_tokens",), "blocks.N.attention.qkv": tuple(f"layers.N.self_attn.{part}_proj" for part in "qkv"),
        "blocks.N.attention.out": ("layers.N.self_attn.o_proj",),
        "blocks.N.feed_forward.up": ("layers.N.mlp.fc1",), "blocks.N.feed_forward.down": ("layers.N.mlp.fc2",),
    },
}  # fmt: skip


def export(checkpoint: Path, folder: Path, to: Target = "transformers") -> list[Path]:
    """Write a checkpoint's model and tokenizer into a new folder, which appears whole or not at all; return its files.

    Args:
        checkpoint: one of our checkpoints.
        folder: must not exist yet, or be empty.
        to: "transformers" for `from_pretrained`, or "safetensors" for our own names with settings and tokenizer beside them.

    Raises:
        CheckpointError: the checkpoint cannot be used, or transformers has no place for a part of it.
        MiniGPTError: the folder is taken.
        OSError: the folder cannot be written; what had been written is removed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MiniGPTError(f"{folder} is there already and is not an empty folder, so nothing was written: name a new one")
    sweep_strays(folder.absolute().parent, folder.absolute().name)  # of an earlier export that was killed
    opened = read_checkpoint(checkpoint)
    files = _for_transformers(opened) if to == "transformers" else _plain(opened)
    temporary = stray(folder.absolute())
    try:
        for name, data in files.items():
            write_atomically(temporary / name, data)
        if folder.exists():
            folder.rmdir()  # empty; if somebody has filled it meanwhile, this fails and nothing is touched
        temporary.rename(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            error.filename = str(folder)  # what was asked for, and not the hidden name beside it
        raise
    sync_folder(folder.absolute().parent)
    return [folder / name for name in files]


def write_weights(best: Path, last: Path, target: Path) -> int:
    """Copy a checkpoint to `target` without optimizer and random states; return its size in bytes.

    Args:
        best: the checkpoint to copy.
        last: the run's last checkpoint, whose curves and samples reach further if it was made at the same step.
        target: the file to write.

    Raises:
        CheckpointError: a file cannot be used.
        OSError: the file cannot be written.
    """
    checkpoint, newest = read_checkpoint(best), read_checkpoint(last)
    told = newest.metadata if newest.step == checkpoint.step else checkpoint.metadata
    names = ("series", "samples", "data", "val_step", "best_val_loss", "best_step", "max_steps", "elapsed", "threads", "corpus")
    facts = {name: told[name] for name in names if name in told}
    if checkpoint.tokenizer is not None and (text := sample(checkpoint.model, checkpoint.tokenizer, first_prompt(newest), checkpoint.config.seed)):
        moment = {"step": checkpoint.step, "elapsed": told.get("elapsed", 0.0), "loss": checkpoint.val_loss}
        earlier = [shown for shown in facts.get("samples", []) if shown["step"] < checkpoint.step]
        facts["samples"] = [*earlier, {"type": "sample", **moment, "prompt": first_prompt(newest), "text": text}]
    save_checkpoint(
        checkpoint.model, None, checkpoint.config, checkpoint.step, checkpoint.val_loss, path=target, tokenizer=checkpoint.tokenizer, facts=facts
    )
    return target.stat().st_size


def their_names(arch: str, name: str) -> tuple[str, ...]:
    """Return what transformers calls our tensor `name`, without its prefix; nothing if it has no place for it."""
    module, _, kind = name.rpartition(".")
    number = re.search(r"\d+", module)
    theirs = NAMES[arch].get(re.sub(r"\d+", "N", module, count=1), ())
    return tuple(f"{there.replace('N', number[0] if number else '')}.{kind}" for there in theirs)


def renamed(arch: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors under transformers' names and in its layout: GPT-2 keeps the matrices of its blocks as (in, out).

    Raises:
        CheckpointError: it has no place for one of them.
    """
    result: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not (theirs := their_names(arch, name)):
            kind = "NanoChat" if arch == "modern" else "GPT-2"
            raise CheckpointError(f"the {kind} of transformers has no place for {name[:80]}: --to safetensors can write this model")
        turn = arch == "gpt2" and name.startswith("blocks.") and weight.dim() == 2
        parts = (weight.T if turn else weight).chunk(len(theirs))
        result |= {PREFIX[arch] + there: part.contiguous() for there, part in zip(theirs, parts, strict=True)}
    return result


def _for_transformers(opened: Checkpoint) -> dict[str, bytes]:
    config = opened.config
    weights = renamed(config.arch, opened.model.state_dict())
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    settings = {"vocab_size": config.vocab_size, "tie_word_embeddings": True, "dtype": "float32", **ids}
    # What we write by default: the special tokens never, each of the others by its odds.
    writing = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K, "suppress_tokens": [PAD, UNK, BOS, EOS], **ids}
    files = {
        "config.json": _json(settings | (_nanochat(config) if config.arch == "modern" else _gpt2(config))),
        "generation_config.json": _json(writing),
        "model.safetensors": pack_tensors(weights, metadata={"format": "pt"}),
    }
    if opened.tokenizer is not None:
        tokens = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
        # Split, or a text that spells out a special token would become that token; and without a class another one is guessed, with other ids.
        rules = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True, "clean_up_tokenization_spaces": False}
        files["tokenizer.json"] = opened.tokenizer.to_json().encode()
        files["tokenizer_config.json"] = _json({**rules, "model_max_length": config.max_seq_len, **tokens})
    return files


def _gpt2(config: TransformerConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu", "layer_norm_epsilon": 1e-5,
        "n_positions": config.max_seq_len, "n_embd": config.d_model, "n_layer": config.n_layers, "n_head": config.n_heads, "n_inner": config.d_ff,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    }  # fmt: skip


def _nanochat(config: TransformerConfig) -> dict[str, Any]:
    return {
        "architectures": ["NanoChatForCausalLM"], "model_type": "nanochat", "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.d_model, "intermediate_size": config.d_ff, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_heads, "hidden_act": "relu2", "rms_norm_eps": RMS_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}, "attention_bias": False, "attention_dropout": config.dropout,
        "final_logit_softcapping": None,
    }  # fmt: skip


def _plain(opened: Checkpoint) -> dict[str, bytes]:
    files = {
        "config.json": _json(opened.config.model_dump(exclude=LOCAL_FIELDS)),
        "model.safetensors": pack_tensors(dict(opened.model.state_dict()), metadata={"format": "pt"}),
    }
    return files | ({"tokenizer.json": opened.tokenizer.to_json().encode()} if opened.tokenizer is not None else {})


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
