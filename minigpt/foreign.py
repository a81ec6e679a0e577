"""Other people's weights in our model, to sample from: what is shaped like GPT-2 or NanoChat, under the names that the field's trainers use.

A file is only ever read as data: its report comes from a child process, its numbers from `inspection.values`. What a file does not say is taken as
usual and told in a note; what our model cannot compute is refused.
"""

import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from minigpt.checkpoint import Checkpoint, read_checkpoint
from minigpt.config import TransformerConfig, sentences
from minigpt.errors import CheckpointError
from minigpt.export import their_names
from minigpt.header import clean, read_header
from minigpt.inspection import inspect_safely
from minigpt.inspection.meaning import SETTINGS, bare_name
from minigpt.inspection.recognise import FLOATS, NOTHING_TAKEN, WEIGHTS, weights_in
from minigpt.inspection.values import Values, open_values
from minigpt.model import RMS_EPS, ROPE_THETA, FeedForward, MiniGPT, rotary_tables
from minigpt.tokenizer import OtherTokenizer

_EMBEDDINGS = {"embedding.weight": "", "wte.weight": "gpt2", "embed_tokens.weight": "modern"}  # by which a family is known; the first is our own
_SPELLINGS = (  # of small trainers, for names of GPT-2
    (r"^tok(en)?_emb(edding)?\.", "wte."), (r"^pos(ition)?_emb(edding)?\.", "wpe."), (r"^(ln|norm|ln_final)\.", "ln_f."), (r"^head\.", "lm_head."),
    (r"^blocks\.", "h."), (r"\.(ln|norm)([12])\.", r".ln_\2."), (r"\.attn\.qkv\.", ".attn.c_attn."), (r"\.(attn|mlp)\.proj\.", r".\1.c_proj."),
    (r"\.mlp\.fc\.", ".mlp.c_fc."),
)  # fmt: skip
_NO_WEIGHT = re.compile(r"\.attn\.(masked_)?bias$|\.inv_freq$")  # buffers that some versions store
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_ALLOWED: dict[str, tuple[object, ...]] = {  # settings under which our model computes the same
    "activation_function": ("gelu", *_TANH), "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,), "hidden_act": ("relu2",), "rms_norm_eps": (RMS_EPS,), "attention_bias": (False,),
}  # fmt: skip


def open_any(path: Path) -> Checkpoint:
    """Open a checkpoint of ours, or other people's weights as `open_foreign` does.

    Raises:
        CheckpointError: it is neither, or damaged; one sentence for a person.
    """
    is_ours = False
    with contextlib.suppress(CheckpointError):  # no safetensors, or what is wrong with it is said below
        is_ours = "minigpt" in read_header(path).metadata
    return read_checkpoint(path) if is_ours else open_foreign(path)


def open_foreign(path: Path) -> Checkpoint:
    """Open other people's weights for use; its `notes` say what had to be assumed.

    Args:
        path: a file of torch or safetensors, where a config.json beside it is read too, or a folder with both. Only from a folder is its
            tokenizer.json taken, for its rules are its author's; without one the model reads and writes ids.

    Raises:
        CheckpointError: it is no checkpoint, or no model that ours can compute; one sentence for a person.
    """
    file = weights_in(path)
    if file.is_dir():
        raise CheckpointError(f"this folder holds no weights; they would be called {' or '.join(WEIGHTS)}")
    report = inspect_safely(file, scan=False)
    if odd := next((tensor for tensor in report.tensors if tensor.dtype not in FLOATS and not _NO_WEIGHT.search(tensor.name)), None):
        raise CheckpointError(f"tensor {clean(odd.name, 60)} is of {odd.dtype}; only floats can be put into a model here")
    if unread := next((warning for warning in report.warnings if warning.endswith(NOTHING_TAKEN)), None):
        raise CheckpointError(unread)  # what it says may be what the model computes with
    settings = report.config  # the file's own, or those of a config.json beside it
    if wrong := next((name for name, allowed in _ALLOWED.items() if settings.get(name, allowed[0]) not in allowed), None):
        raise CheckpointError(f"its setting {wrong} is {clean(settings[wrong], 40)}, which the model here does not compute")
    notes: list[str] = []
    with open_values(file) as values:
        source = _Source(values, notes)
        config = _config(source, settings)
        with torch.device("meta"):
            model = MiniGPT(config)
        weights = {name: source.take(name, tuple(value.shape)) for name, value in model.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        if "lm_head.weight" in source.names:
            head = source.read("lm_head.weight", (config.vocab_size, config.d_model))
            model.head = None if torch.equal(head, model.embedding.weight) else nn.Parameter(head)
    if left := sorted(source.names.keys() - source.used):
        raise CheckpointError(f"it has a tensor {clean(left[0], 60)}, which the model here has no place for")
    _set_kind(model, source, settings)
    tokenizer = None
    if path.is_dir() and (path / "tokenizer.json").is_file():
        tokenizer = OtherTokenizer().load(path / "tokenizer.json")
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(f"tokenizer.json has {tokenizer.vocab_size:,} tokens; the model knows {config.vocab_size:,}")
    metadata = {"format": report.format, "made_by": report.made_by}
    val_loss = report.val_loss if report.val_loss is not None else report.best_val_loss
    return Checkpoint(model.eval(), tokenizer, config, report.step or 0, val_loss, metadata, {}, tuple(notes))


def _config(source: "_Source", settings: Mapping[str, Any]) -> TransformerConfig:
    """Work out the model's settings: sizes from the shapes, which cannot lie, the rest from the file's settings or as is usual."""
    vocab_size, width = source.shape("embedding.weight")
    numbers = [int(found[1]) for name in source.names if (found := re.match(r"(?:h|layers|blocks)\.(\d{1,6})\.", name))]
    inner = math.prod(source.shape("blocks.0.feed_forward.up.weight")) // max(width, 1)
    sizes = {"vocab_size": vocab_size, "d_model": width, "n_layers": max(numbers, default=-1) + 1, "d_ff": inner}
    usual = 64 if source.arch == "gpt2" else 128
    if (heads := _number(settings, "n_heads")) is None:
        heads = width // usual if width % usual == 0 else 0
        source.notes.append(f"assumed {heads} {'head' if heads == 1 else 'heads'}, each {usual} wide: the file does not say")
    if source.arch == "gpt2":
        length: int | None = math.prod(source.shape("positions.weight")) // max(width, 1)
    elif (length := _number(settings, "max_seq_len")) is None:
        length = 2048
        source.notes.append(f"assumed a context of {length:,} tokens: the file does not say")
    if heads < 1 or width % (heads * (2 if source.arch == "modern" else 1)):
        raise CheckpointError(
            f"its width of {width} cannot be split into {heads or 'an unknown number of'} heads: put a config.json with n_head beside it"
        )
    try:
        return TransformerConfig.model_validate({"arch": source.arch, "max_seq_len": length, "n_heads": heads, "dropout": 0.0, **sizes})
    except ValidationError as error:
        raise CheckpointError(f"a model of this size cannot be used here: {sentences(error)[0]}"[:300]) from None


def _number(settings: Mapping[str, Any], setting: str) -> int | None:
    """Return a whole number by any of a setting's names, also from settings one level down, as Lightning keeps them."""
    levels = [settings, *(inner for inner in settings.values() if isinstance(inner, dict))]
    return next((value for level in levels for name in SETTINGS[setting][1] if type(value := level.get(name)) is int), None)


def _set_kind(model: MiniGPT, source: "_Source", settings: Mapping[str, Any]) -> None:
    """Set what shapes do not show: the kind of GELU, the base of the rotation, the cap on the logits."""
    rope, cap = settings.get("rope_parameters"), None
    rope = rope if isinstance(rope, dict) else {}
    if source.arch == "gpt2":
        activation = settings.get("activation_function", "gelu_new" if source.is_turned else "gelu")
        for module in model.modules():
            if isinstance(module, FeedForward):
                module.approximate = "tanh" if activation in _TANH else "none"
    elif not source.is_ours:
        cap = settings.get("final_logit_softcapping", 15.0)
        if "final_logit_softcapping" not in settings:
            source.notes.append("assumed NanoChat's usual cap of 15 on the logits: the file does not say")
    theta = rope.get("rope_theta", ROPE_THETA)
    if rope.get("rope_type", "default") != "default" or not all(type(value) in (int, float) and 0 < value < 2**63 for value in (theta, cap or 1)):
        raise CheckpointError("its rope_parameters or final_logit_softcapping are of a kind that the model here does not compute")
    model.softcap = float(cap) if cap is not None else None
    model.cos, model.sin = rotary_tables(model.config.max_seq_len, model.config.d_model // model.config.n_heads, theta)


class _Source:
    """A file's tensors under plain names, without what wrappers put before them; remembers which were used."""

    def __init__(self, values: Values, notes: list[str]) -> None:
        self.values, self.notes = values, notes
        self.used: set[str] = set()
        self.names = {bare_name(name): name for name in values.shapes if not _NO_WEIGHT.search(name)}
        if not _EMBEDDINGS.keys() & self.names.keys():
            for pattern, spelling in _SPELLINGS:
                self.names = {re.sub(pattern, spelling, plain): name for plain, name in self.names.items()}
            notes.append("read as a GPT-2 by its tensors' names: if it was built otherwise, what it writes is noise")
        embedding = next((name for name in _EMBEDDINGS if name in self.names), "")
        if len(self.values.shapes.get(self.names.get(embedding, ""), ())) != 2:
            raise CheckpointError(f"these weights are not shaped like GPT-2's or NanoChat's: no matrix is called {', '.join(_EMBEDDINGS)}")
        self.is_ours = not _EMBEDDINGS[embedding]
        self.arch = _EMBEDDINGS[embedding] or ("gpt2" if "positions.weight" in self.names else "modern")
        # In transformers the matrices of GPT-2's blocks are (in, out); nanoGPT and most others keep torch's (out, in).
        self.is_turned = self.arch == "gpt2" and self.shape("blocks.0.attention.qkv.weight")[:1] == self.shape("embedding.weight")[1:]

    def theirs(self, name: str) -> tuple[str, ...]:
        """Return the plain names of our tensor `name`."""
        return (name,) if self.is_ours else their_names(self.arch, name)

    def find(self, plain: str) -> str:
        """Return what the file calls the tensor of this plain name."""
        if plain not in self.names:
            raise CheckpointError(f"these weights are not shaped like GPT-2's or NanoChat's: {plain} is missing")
        return self.names[plain]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the first of a tensor's parts."""
        return self.values.shapes[self.find(self.theirs(name)[0])]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return our tensor `name` of this shape; a bias that is not there is zero."""
        theirs = self.theirs(name)
        if name.endswith(".bias") and not self.names.keys() & set(theirs):
            return torch.zeros(shape)
        is_turned = self.is_turned and name.startswith("blocks.") and len(shape) == 2
        wanted = (shape[0] // len(theirs), *shape[1:])
        parts = [self.read(there, wanted[::-1] if is_turned else wanted) for there in theirs]
        return parts[0].T.contiguous() if is_turned else torch.cat(parts)

    def read(self, plain: str, wanted: tuple[int, ...]) -> Tensor:
        """Return the tensor of this plain name, which must have the shape `wanted` and finite values."""
        name = self.find(plain)
        if (found := self.values.shapes[name]) != wanted:
            shared = ": its heads share keys, which the model here cannot" if re.search(r"\.[kv]_proj\.", plain) else ""
            raise CheckpointError(f"tensor {clean(plain, 60)} has shape {list(found)}; {list(wanted)} would fit{shared}")
        self.used.add(plain)
        result = torch.cat([torch.from_numpy(chunk) for chunk in self.values.chunks(name)]).view(wanted)
        if not result.isfinite().all():
            raise CheckpointError(f"tensor {clean(plain, 60)} holds values that are not finite (NaN or inf)")
        return result
