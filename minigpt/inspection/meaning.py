"""Whether what a file says makes sense together: step, losses, settings, shapes. Whatever does not becomes a warning; the file still opens."""

import hashlib
import math
import re

from minigpt.errors import CheckpointError
from minigpt.header import clean, strict_json
from minigpt.inspection.recognise import FLOATS, Contents
from minigpt.inspection.report import Report, TensorInfo

STORED, INFERRED, UNKNOWN = "stored", "inferred from shapes", "unknown"  # where a setting's value comes from
SETTINGS = {  # what shapes can tell or every model has: the largest sane value, and what others call it
    "vocab_size": (10**6, ("vocab_size",)),
    "d_model": (65_536, ("d_model", "n_embd", "hidden_size", "dim")),
    "n_layers": (1_000, ("n_layers", "n_layer", "num_hidden_layers")),
    "n_heads": (1_024, ("n_heads", "n_head", "num_attention_heads", "num_heads")),
    "d_ff": (10**6, ("d_ff", "n_inner", "intermediate_size")),
    "max_seq_len": (10**6, ("max_seq_len", "context_length", "block_size", "n_positions", "max_position_embeddings", "sequence_len")),
}
_METADATA_KINDS = {"series": dict, "data": dict, "samples": list, "tied": dict, "config": dict, "tokenizer": str}  # the lists are of dicts
_MAX_FINDINGS = 20  # no more than a person reads
_MAX_METADATA_VALUES, _MAX_METADATA_DEPTH = 500_000, 32
_LAYER = re.compile(r"^(.*?)\.?(\w+)\.(\d{1,6})\.")
_EMBEDDING = re.compile(r"(^|[._])(tok_emb|pos_emb|wte|wpe|emb|embed|embedding|embeddings|embed_tokens|token_emb|word_embeddings|positions)\w*($|\.)")
_PREFIX = re.compile(r"^((_orig_mod|_forward_module|module|model|transformer|net|gpt)\.)+")  # by torch.compile, DDP, Lightning, transformers
_POSITIONS = re.compile(r"(^|[._])(pos_emb|wpe|positions?|position_embeddings?|pos_embedding)(\.weight)?$")
_FEED_FORWARD = re.compile(r"(^|[._])(mlp|ffn?|feed_?forward)\.(\w+\.)*weight$")
_TOKEN_EMBEDDING = re.compile(r"(tok_emb|token_emb|wte|embed_tokens|embedding|word_embeddings)\w*\.weight$")
# GPT-2's implementations keep the causal mask as a buffer named like a bias; at length 1,024 it would count as a million parameters a layer.
_MASK = re.compile(r"\.attn\.(masked_)?bias$")
_HEAD = re.compile(r"(^|\.)(head|lm_head|ln|ln_f|norm|final_norm|ln_final|output)\w*($|\.)")


def judge(contents: Contents, size_bytes: int, *, checked: bool) -> Report:
    """Check what a file of `size_bytes` holds against itself and return the finished report; `checked` says whether every value was read."""
    config, origins = _config(contents)
    step = _step(contents)
    val_loss = _loss(contents, "val_loss", "validation loss")
    best_val_loss = _loss(contents, "best_val_loss", "best validation loss")
    _check_tensors(contents, config.get("vocab_size"))
    counted = _counted(contents)
    blocks = _parameters_by_block(contents, counted)
    shapes = sorted(f"{bare_name(tensor.name)} {list(tensor.shape)}" for tensor in counted)
    return Report(
        format=contents.format,
        made_by=contents.made_by,
        size_bytes=size_bytes,
        step=step,
        val_loss=val_loss,
        best_val_loss=best_val_loss,
        config=config,
        origins=origins,
        fingerprint=hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:12],
        tensors=contents.tensors,
        parameters=sum(blocks.values()),
        parameters_by_block=blocks,
        metadata=_metadata(contents),
        warnings=list(dict.fromkeys(contents.warnings))[:_MAX_FINDINGS],
        notes=list(dict.fromkeys(contents.notes))[:_MAX_FINDINGS],
        checked=checked,
    )


def bare_name(name: str) -> str:
    """Return a tensor's name without what wrappers put before it."""
    return _PREFIX.sub("", name)


def _config(contents: Contents) -> tuple[dict[str, object], dict[str, str]]:
    """Return the settings and where each comes from; what the file does not say is inferred from shapes where they tell it."""
    stored = contents.facts.get("config")
    if not isinstance(stored, dict):
        if stored is not None:
            contents.warnings.append("config is not a set of named settings")
        stored = {}
    config, origins = dict(stored), dict.fromkeys(stored, STORED)
    inferred = _inferred(contents.tensors)
    for setting, (largest, names) in SETTINGS.items():
        found = {name: stored[name] for name in names if stored.get(name) is not None}
        for name, value in found.items():
            if type(value) is not int or not 1 <= value <= largest:
                contents.warnings.append(f"config.{name} is {clean(value, 30)}, outside 1 to {largest:,}")
        if not found and inferred:
            config[setting] = inferred.get(setting)
            origins[setting] = INFERRED if setting in inferred else UNKNOWN
    return config, origins


def _inferred(tensors: list[TensorInfo]) -> dict[str, int]:
    """Return the settings that the shapes of a language model tell; nothing tells into how many heads its attention is cut."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    if (embedding := next((tensor.shape for tensor in matrices if _TOKEN_EMBEDDING.search(tensor.name)), None)) is None:
        return {}
    vocab_size, d_model = embedding
    layers: dict[str, set[str]] = {}
    for layer in filter(None, (_LAYER.match(tensor.name) for tensor in tensors)):
        layers.setdefault(f"{layer[1]}.{layer[2]}", set()).add(layer[3])
    lengths = [tensor.shape[0] for tensor in matrices if _POSITIONS.search(tensor.name)]
    lengths += [tensor.shape[-1] for tensor in tensors if _MASK.search(tensor.name) and len(tensor.shape) == 4]
    # The least: a gate may be stored in one matrix with the way up, the way down never is.
    widths = [sum(tensor.shape) - d_model for tensor in matrices if _FEED_FORWARD.search(tensor.name) and d_model in tensor.shape]
    found = {"vocab_size": vocab_size, "d_model": d_model, "n_layers": max(map(len, layers.values()), default=None)}
    found |= {"d_ff": min(widths, default=None), "max_seq_len": next(iter(lengths), None)}
    return {name: value for name, value in found.items() if value is not None}


def _step(contents: Contents) -> int | None:
    step = contents.facts.get("step", 0)
    if type(step) is not int or not 0 <= step < 2**53:
        contents.warnings.append(f"step is not a whole number of sane size: {clean(step, 30)}")
        return None
    return step if "step" in contents.facts else None


def _loss(contents: Contents, name: str, words: str) -> float | None:
    loss = contents.facts.get(name, 0.0)
    if isinstance(loss, bool) or not isinstance(loss, (int, float)) or not 0 <= loss < 2**63:
        contents.warnings.append(f"{words} is not a finite number from 0 up: {clean(loss, 30)}")
        return None
    return float(loss) if name in contents.facts else None


def _check_tensors(contents: Contents, vocab_size: object) -> None:
    for tensor in contents.tensors:
        if tensor.dtype not in FLOATS and tensor.size_bytes:
            contents.warnings.append(f"{clean(tensor.name, 40)} has dtype {tensor.dtype}; weights are floats")
    rows = next((tensor.shape[0] for tensor in contents.tensors if len(tensor.shape) == 2 and _TOKEN_EMBEDDING.search(tensor.name)), None)
    if rows is None:
        contents.warnings.append("no token embedding found: it is missing, or this is not a language model")
    elif type(vocab_size) is int and vocab_size != rows:
        contents.warnings.append(f"config says a vocabulary of {vocab_size}, the embedding has {rows:,} rows (vocab_size)")
    if rows is not None and (tokens := _tokens(contents)) not in (None, rows):
        contents.warnings.append(f"the tokenizer has {tokens:,} tokens, the embedding {rows:,} rows")


def _tokens(contents: Contents) -> int | None:
    """Count the tokens of the vocabulary that MiniGPT stores in its files."""
    stored = contents.metadata.get("tokenizer")
    try:
        parsed = strict_json(stored, "tokenizer") if isinstance(stored, str) else None
    except CheckpointError as error:
        contents.warnings.append(f"metadata: {error}")
        return None
    model = parsed.get("model") if isinstance(parsed, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return len(vocabulary) if isinstance(vocabulary, dict) else None


def _counted(contents: Contents) -> list[TensorInfo]:
    """Return the tensors that hold parameters of their own."""
    counted = []
    for position, tensor in enumerate(contents.tensors):
        if position in contents.shared:
            contents.notes.append(f"{clean(tensor.name, 60)} shares its data with {clean(contents.shared[position], 60)}; counted once")
        elif _MASK.search(tensor.name) and tensor.shape[:2] in ((), (1, 1)):
            contents.notes.append("stored attention masks are not counted as parameters")
        else:
            counted.append(tensor)
    return counted


def _parameters_by_block(contents: Contents, counted: list[TensorInfo]) -> dict[str, int]:
    """Count parameters by part of the model: the embeddings, each numbered layer, the head with the last norm, and what fits none of these."""
    counts: dict[tuple[int, str, int], int] = {}
    unknown: list[str] = []
    for tensor in counted:
        part = _part(tensor.name)
        counts[part] = counts.get(part, 0) + math.prod(tensor.shape)
        unknown += [tensor.name] if part[1] == "other" else []
    if unknown:
        contents.warnings.append(f"{len(unknown):,} unknown tensor name(s), such as {clean(unknown[0], 40)}")
    label = "{path} {number}" if len({path for _, path, number in counts if number >= 0}) > 1 else "block {number}"
    return {label.format(path=path, number=number) if number >= 0 else path: count for (_, path, number), count in sorted(counts.items())}


def _part(name: str) -> tuple[int, str, int]:
    """Return (order, path, layer number or -1), which sorts as the parts come in a model."""
    if layer := _LAYER.match(name):
        return 1, f"{layer[1]}.{layer[2]}".strip("."), int(layer[3])
    if _EMBEDDING.search(name):
        return 0, "embedding", -1
    return (2, "head and final norm", -1) if _HEAD.search(name) else (3, "other", -1)


def _metadata(contents: Contents) -> dict[str, object]:
    """Return our own metadata without what is not of the kind MiniGPT writes, so that a page may rely on the kinds."""
    if _count(contents.metadata) > _MAX_METADATA_VALUES:
        contents.warnings.append("metadata is too large or nested too deep to show")
        return {}
    kept = dict(contents.metadata)
    for name, kind in _METADATA_KINDS.items():
        value = kept.get(name)
        records = value if isinstance(value, list) else []
        if value is not None and not (isinstance(value, kind) and all(isinstance(record, dict) for record in records)):
            contents.warnings.append(f"metadata: {name} is not of the kind that MiniGPT writes")
            del kept[name]
    for name in ("best_step", "val_step"):
        if (step := kept.get(name)) is not None and (type(step) is not int or not -1 <= step < 2**53):
            contents.warnings.append(f"metadata: {name} is not a whole number of sane size: {clean(step, 30)}")
            del kept[name]
    return kept


def _count(value: object, depth: int = 1) -> int:
    """Count the values in a JSON value; one that is nested too deep counts as too many."""
    if depth > _MAX_METADATA_DEPTH:
        return _MAX_METADATA_VALUES + 1
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_count(child, depth + 1) for child in children)
