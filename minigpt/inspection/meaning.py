"""Whether what a file says makes sense together: step, losses, settings, shapes. Whatever does not becomes a warning; the file still opens."""

import math
import re
from collections.abc import Mapping

from minigpt.header import clean
from minigpt.inspection.findings import Findings
from minigpt.inspection.recognise import Contents, Missing
from minigpt.inspection.report import Report, TensorInfo
from minigpt.inspection.tensors import FLOATS

_LARGEST: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "max_seq_len", "context_length", "block_size", "d_ff"), 10**6),
    **dict.fromkeys(("d_model", "n_embd"), 65_536),
    **dict.fromkeys(("n_heads", "n_head"), 1_024),
    **dict.fromkeys(("n_layers", "n_layer"), 1_000),
}
_RECORDS = ("history", "samples")
_MAX_METADATA_VALUES = 500_000
_MAX_METADATA_DEPTH = 32
_LAYER = re.compile(r"^(.*?)\.?(\w+)\.(\d{1,6})\.")
_EMBEDDING = re.compile(r"(^|[._])(tok_emb|pos_emb|wte|wpe|emb|embed|embedding|embeddings|embed_tokens|token_emb|word_embeddings|positions)\w*($|\.)")
_TOKEN_EMBEDDING = re.compile(r"(tok_emb|token_emb|wte|embed_tokens|embedding|word_embeddings)\w*\.weight$")
_HEAD = re.compile(r"(^|\.)(head|lm_head|ln|ln_f|norm|final_norm|ln_final|output)\w*($|\.)")
_WRAPPING = re.compile(r"^(_orig_mod\.|module\.)+")  # left in front of every name by torch.compile and by DDP
EMBEDDING, HEAD, OTHER = "embedding", "head and final norm", "other"


def judge(contents: Contents, findings: Findings, size_bytes: int, *, checked: bool) -> Report:
    """Check what a file holds against itself and return the finished report.

    Args:
        contents: What was found.
        findings: Takes the warnings; its sentences become the report's.
        size_bytes: The file's length.
        checked: Whether every value was read.
    """
    config = _config(contents, findings)
    step = _step(contents.step, findings)
    val_loss = _loss(contents.val_loss, "validation loss", findings)
    best_val_loss = _loss(contents.best_val_loss, "best validation loss", findings)
    _check_tensors(contents.tensors, config, findings)
    blocks = _parameters_by_block(contents, findings)
    metadata = _metadata(contents.metadata, findings)
    return Report(
        format=contents.format,
        made_by=contents.made_by,
        size_bytes=size_bytes,
        step=step,
        val_loss=val_loss,
        best_val_loss=best_val_loss,
        config=config,
        tensors=contents.tensors,
        parameters=sum(blocks.values()),
        parameters_by_block=blocks,
        metadata=metadata,
        warnings=findings.warnings,
        notes=findings.notes,
        checked=checked,
    )


def _config(contents: Contents, findings: Findings) -> dict[str, object]:
    config = contents.config
    if isinstance(config, Missing) or config is None:
        return {}
    if not isinstance(config, dict):
        findings.warn("config is not a set of named settings")
        return {}
    for name, largest in _LARGEST.items():
        value = config.get(name, 1)
        if type(value) is not int or not 1 <= value <= largest:
            findings.warn(f"config.{name} is {clean(value, 30)}, outside 1 to {largest:,}")
    return config


def _step(value: object, findings: Findings) -> int | None:
    if isinstance(value, Missing):
        return None
    if type(value) is not int or not 0 <= value < 2**53:
        findings.warn(f"step is not a whole number of sane size: {clean(value, 30)}")
        return None
    return value


def _loss(value: object, what: str, findings: Findings) -> float | None:
    if isinstance(value, Missing):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf or abs(value) >= 2**63:
        findings.warn(f"{what} is not a finite number from 0 up: {clean(value, 30)}")
        return None
    return float(value)


def _check_tensors(tensors: list[TensorInfo], config: Mapping[str, object], findings: Findings) -> None:
    for tensor in tensors:
        if tensor.dtype not in FLOATS and tensor.size_bytes:
            findings.warn(f"{clean(tensor.name, 40)} has dtype {tensor.dtype}; weights are floats")
    rows = next((tensor.shape[0] for tensor in tensors if len(tensor.shape) == 2 and _TOKEN_EMBEDDING.search(tensor.name)), None)
    if rows is None:
        findings.warn("no token embedding found: it is missing, or this is not a language model")
    elif type(vocab_size := config.get("vocab_size")) is int and vocab_size != rows:
        findings.warn(f"config says a vocabulary of {clean(vocab_size, 30)}, the embedding has {rows:,} rows (vocab_size)")


def _parameters_by_block(contents: Contents, findings: Findings) -> dict[str, int]:
    """Count parameters by part of the model: the embeddings, each numbered layer, the head with the last norm, and what fits none of these."""
    names = [_WRAPPING.sub("", tensor.name) for tensor in contents.tensors]
    paths = {match[1] + "." + match[2] for name in names if (match := _LAYER.match(name))}
    counts: dict[tuple[int, str, int], int] = {}
    unknown: list[str] = []
    for position, (name, tensor) in enumerate(zip(names, contents.tensors, strict=True)):
        if position in contents.shared:
            findings.note(f"{clean(name, 60)} shares its data with {clean(contents.shared[position], 60)}; counted once")
            continue
        if _is_attention_mask(name, tensor.shape):
            findings.note("stored attention masks are not counted as parameters")
            continue
        part = _part(name)
        if part[1] == OTHER:
            unknown.append(name)
        counts[part] = counts.get(part, 0) + math.prod(tensor.shape)
    if unknown:
        findings.warn(f"{len(unknown):,} unknown tensor name(s), such as {clean(unknown[0], 40)}")
    label = "block {}" if len(paths) < 2 else "{1} {0}"
    return {label.format(number, path) if number >= 0 else path: count for (_, path, number), count in sorted(counts.items())}


def _part(name: str) -> tuple[int, str, int]:
    """Return (order, path, layer number or -1), which sorts as the parts come in a model."""
    if layer := _LAYER.match(name):
        return 1, f"{layer[1]}.{layer[2]}".strip("."), int(layer[3])
    if _EMBEDDING.search(name):
        return 0, EMBEDDING, -1
    return (2, HEAD, -1) if _HEAD.search(name) else (3, OTHER, -1)


def _is_attention_mask(name: str, shape: tuple[int, ...]) -> bool:
    # GPT-2's implementations keep the causal mask as a buffer named like a bias; at length 1,024 it would count as a million parameters a layer.
    return name.endswith(".attn.masked_bias") or (name.endswith(".attn.bias") and shape[:2] == (1, 1) and len(shape) == 4)


def _metadata(metadata: dict[str, object], findings: Findings) -> dict[str, object]:
    """Return our own metadata without what is not of the kind MiniGPT writes, so that a page may rely on the kinds."""
    if not _is_shallow(metadata):
        findings.warn("metadata is too large or nested too deep to show")
        return {}
    kept = dict(metadata)
    for name in _RECORDS:
        value = kept.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            findings.warn(f"metadata: {name} is not a list of records")
            del kept[name]
    if not isinstance(kept.get("tokenizer"), (str, type(None))):
        findings.warn("metadata: tokenizer is not text")
        del kept["tokenizer"]
    for name, shape in (("tied", dict), ("config", dict)):
        if not isinstance(kept.get(name), (shape, type(None))):
            findings.warn(f"metadata: {name} is not a set of named values")
            del kept[name]
    return kept


def _is_shallow(value: object) -> bool:
    """Tell whether a JSON value is within our limits, level by level, so that its depth is found without recursion."""
    level: list[object] = [value]
    total = 0
    for _ in range(_MAX_METADATA_DEPTH):
        total += len(level)
        level = [child for item in level if isinstance(item, (dict, list)) for child in (item.values() if isinstance(item, dict) else item)]
        if not level or total > _MAX_METADATA_VALUES:
            break
    return not level and total <= _MAX_METADATA_VALUES
