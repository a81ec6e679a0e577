"""Who made a file and where it keeps what: the habits of the field's trainers, applied to an opened container.

Produces `Contents`, the same for every make. Tensors are checked against the bytes they claim; whether the rest makes sense is judged elsewhere.
"""

import hashlib
import json
import math
import re
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import (
    ITEM_BYTES,
    MAX_TENSORS,
    PIECE_BYTES,
    TORCH_NAMES,
    Header,
    checked_shape,
    clean,
    our_metadata,
    pieces,
    read_header_of,
    strict_json,
)
from minigpt.inspection.records import PickledDict, Record, Tensor, plain
from minigpt.inspection.report import TensorInfo
from minigpt.inspection.torchfiles import TorchFile, open_legacy, open_zip

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "ckpt.pt")  # what a folder's weights are called
MAX_CONFIG_BYTES = 64 << 10  # of a config.json, which reaches the child as an argument
NOTHING_TAKEN = " Nothing was taken from it: mend it, or move it away."
_OURS = "model."  # what the model's own tensors are called in a file of MiniGPT; `optim.` and `rng.` hold the rest
_MAKERS = {"pytorch-lightning_version": "Lightning", "model_args": "nanoGPT"}  # by a key that nobody else writes
_STATES = ("model_state_dict", "state_dict", "model", "module", "weights")
_FACTS = {
    "config": ("model_args", "config", "hyper_parameters"),
    "step": ("step", "iter_num", "global_step"),
    "val_loss": ("val_loss",),
    "best_val_loss": ("best_val_loss",),
}
_TRANSFORMERS = re.compile(r"(transformer\.)?(wte\.weight|h\.0\.attn\.)|model\.embed_tokens\.")
FLOATS = {"F64": (0x7F, 0xF0), "F32": (0x7F, 0x80), "BF16": (0x7F, 0x80), "F16": (0x7C, 0x00)}  # exponent: its bits in the highest byte and the next
_NUMBER_CODES = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


@dataclass
class Contents:
    """What a file holds, as found: tensors are checked, everything else is whatever the file says, as plain JSON values."""

    format: str
    made_by: str
    tensors: list[TensorInfo] = field(default_factory=list)
    shared: dict[int, str] = field(default_factory=dict)  # position of each tensor without data of its own: the name of the one that has them
    facts: dict[str, object] = field(default_factory=dict)  # as far as the file has them: config, step, val_loss, best_val_loss
    metadata: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # may be wrong with the file; repetitions included
    notes: list[str] = field(default_factory=list)  # worth knowing, and not wrong


def weights_in(path: Path) -> Path:
    """Return the weights in a folder if this is one that has any, else what was given."""
    return next((path / name for name in WEIGHTS if (path / name).is_file()), path)


def opened(file: BinaryIO, name: str) -> Header | TorchFile:
    """Open whatever container this file called `name` is; one that is damaged in an unforeseen way raises one of `DAMAGE`."""
    size = file.seek(0, 2)
    file.seek(0)
    kind = sniff(file.read(512), name)
    if kind == "safetensors":
        return read_header_of(file)
    return open_zip(file, size) if kind == "zip" else open_legacy(file, size)


def sniff(head: bytes, name: str) -> str:
    """Tell the container from its first bytes: "zip", "legacy" or "safetensors"; say in words what anything else is."""
    text, suffix = head.lstrip().lower(), clean(Path(name).suffix, 12)
    lfs = "This is a Git LFS pointer, not the file itself. Fetch it with git lfs pull, or download it from the web page."
    for is_so, found in (
        (not head, "This file is empty."),
        (head.startswith(b"version https://git-lfs"), lfs),
        (text.startswith((b"<!doctype", b"<html", b"<?xml")), "This is a web page (HTML), probably an error page saved under this name."),
        (head[257:262] == b"ustar", "This is torch's oldest (tar) format, which cannot be opened safely."),
        (head.startswith(b"PK\x03\x04"), "zip"),
        (head[8:9] in (b"{", b"[") and b"\0" in head[:8], "safetensors"),
        (head.startswith(b"\x80"), "legacy"),
        (name.endswith(".safetensors"), "safetensors"),
        (text.startswith((b"{", b"[")), "This is JSON text, not a checkpoint. Upload the .safetensors or .pt file."),
    ):
        if is_so and found in ("zip", "legacy", "safetensors"):
            return found
        if is_so:
            raise CheckpointError(found)
    raise CheckpointError(f"Not a checkpoint: unknown file type{f', whatever its name says ({suffix})' if suffix else ''}.")


def recognise_torch(opened: TorchFile, *, scan: bool) -> Contents:
    """Find model, settings and progress in a file of `torch.save`; with `scan`, read every value, for checksums and finite numbers."""
    top, state = model_state(opened)
    keys = [key for key, _ in top.pairs if isinstance(key, str)]
    maker = next((maker for key, maker in _MAKERS.items() if key in keys), None)
    if maker is None and state is not top:
        maker = "a training script (pickled config class)" if opened.classes else "a training script"
    contents = Contents(opened.format, maker or "unknown (a bare state dict)", warnings=list(opened.warnings))
    if len(keys) != len(set(keys)):
        contents.warnings.append("the same key appears twice; the last one counts")
    _add_tensors(contents, state, opened, scan=scan)
    for fact, names in _FACTS.items():
        key = next((name for name in names if name in keys), None)
        value = top.get(key) if key is not None else None
        if isinstance(value, Tensor) and state is not top:  # in a bare state dict even "step" may be a weight
            if (scalar := _scalar_of(value, opened)) is None:
                contents.notes.append(f"{fact} stands among the values and was not read")
            else:
                contents.facts[fact] = scalar
        elif key is not None and not isinstance(value, Tensor):
            contents.facts[fact] = plain(value)
    contents.notes += [f"class {clean(class_name, 60)} shown as plain data" for class_name in sorted(opened.classes)[:3]]
    return contents


def model_state(opened: TorchFile) -> tuple[PickledDict, PickledDict]:
    """Return the outermost dict of a file of `torch.save` and the one with the model's tensors, which may be the same."""
    top = opened.root
    if isinstance(top, Record):
        what = clean(top.class_name, 60)
        raise CheckpointError(f"This file is a whole pickled object ({what}), not a checkpoint: save the model's state_dict() instead.")
    if not isinstance(top, PickledDict):
        raise CheckpointError("Not a checkpoint: the file holds no named tensors.")
    return top, next((value for key in _STATES if isinstance(value := top.get(key), PickledDict)), top)


def _add_tensors(contents: Contents, state: PickledDict, opened: TorchFile, *, scan: bool) -> None:
    if len(state.pairs) > MAX_TENSORS:
        raise CheckpointError(f"This file declares too many tensors: more than {MAX_TENSORS:,}.")
    tensors = [(_shown_name(key, contents), value) for key, value in state.pairs if isinstance(value, Tensor)]
    if not tensors:
        raise CheckpointError("Not a checkpoint: no tensors found, or only kinds MiniGPT does not open (sparse, nested, quantized, meta).")
    holders: dict[tuple[str, int, tuple[int, ...]], str] = {}
    for position, (name, tensor) in enumerate(tensors):
        contents.tensors.append(checked_tensor(name, tensor, opened))
        holder = holders.setdefault((tensor.storage.key, tensor.offset, tensor.shape), name)
        if holder != name:
            contents.shared[position] = holder
    counts = Counter(name for name, _ in tensors)
    contents.warnings += [f"tensor name {clean(name, 40)} appears twice" for name, count in counts.items() if count > 1]
    if scan:  # the optimizer's records are read too, as that verifies their checksums
        dtypes = {tensor.storage.key: tensor.dtype for _, tensor in tensors}
        nonfinite = {key for key in opened.record_bytes if sum(count_nonfinite(piece, dtypes.get(key, "")) for piece in opened.stream(key))}
        odd = [name for name, tensor in tensors if tensor.storage.key in nonfinite and tensor.dtype in FLOATS]
        contents.warnings += [f"{clean(name, 40)} holds values that are not finite (NaN or inf)" for name in odd]


def checked_tensor(name: str, tensor: Tensor, opened: TorchFile) -> TensorInfo:
    """Check that every element of a tensor lies inside its record.

    No more elements than the record holds, even where strides of zero would make them fit: four bytes must not become terabytes.
    """
    shown, storage = clean(name, 60), tensor.storage
    shape = checked_shape(shown, tensor.shape)
    if min(tensor.offset, *tensor.stride, 0) < 0:
        raise CheckpointError(f"Tensor {shown} has a negative stride or offset.")
    numel = math.prod(shape)
    reach = tensor.offset + sum((size - 1) * step for size, step in zip(shape, tensor.stride, strict=True)) + 1 if numel else 0
    found, declared = opened.record_bytes.get(storage.key), storage.numel * ITEM_BYTES[storage.dtype]
    if max(reach, numel) * ITEM_BYTES[tensor.dtype] > declared:
        raise CheckpointError(f"Tensor {shown} declares a shape larger than its data (stride or offset outside the record).")
    if found is None:
        raise CheckpointError(f"Tensor {shown}: its data is missing from the file.")
    if found != declared:
        raise CheckpointError(f"Tensor {shown}: the record's size is {found:,} bytes where {declared:,} were declared.")
    return TensorInfo(name, tensor.dtype, shape, numel * ITEM_BYTES[tensor.dtype])


def _scalar_of(tensor: Tensor, opened: TorchFile) -> object:
    """Return a step or loss kept as a tensor of one element; any other tensor is no number, and a large record is not read for one."""
    dtype, offset = tensor.dtype, tensor.offset
    if checked_tensor("among the settings", tensor, opened).shape not in ((), (1,)) or opened.record_bytes[tensor.storage.key] > PIECE_BYTES:
        return "(a tensor)"
    try:
        data = b"".join(opened.stream(tensor.storage.key))
    except CheckpointError:  # of a file whose values are elsewhere; where they are here, their checksums have been verified before
        return None
    if dtype == "BF16":  # the upper half of a float32
        data, dtype, offset = b"\0\0" + data[offset * 2 : offset * 2 + 2], "F32", 0
    return struct.unpack_from(_NUMBER_CODES[dtype], data, offset * ITEM_BYTES[dtype])[0] if dtype in _NUMBER_CODES else None


def recognise_safetensors(file: BinaryIO, header: Header, *, scan: bool) -> Contents:
    """Find the model, and in our own files its settings and progress, in a safetensors file; with `scan`, read every value."""
    if not header.tensors:
        raise CheckpointError("Not a checkpoint: no tensors in the header.")
    is_transformers = header.metadata.get("format") == "pt" and any(map(_TRANSFORMERS.match, header.tensors))
    contents = Contents("safetensors", "Hugging Face transformers" if is_transformers else "unknown")
    try:
        if (ours := our_metadata(header)) is not None:
            contents.format, contents.made_by, contents.metadata = "minigpt", "MiniGPT", ours
    except CheckpointError as error:
        contents.warnings.append(f"metadata: {error}")
    # A run that was stopped before its first evaluation records null, and that is in order.
    contents.facts = {fact: plain(value) for fact in _FACTS if (value := contents.metadata.get(fact)) is not None}
    prefix = own_prefix(header)
    for name, entry in header.tensors.items():
        if name.startswith(prefix):
            shown = _shown_name(name.removeprefix(prefix), contents)
            contents.tensors.append(TensorInfo(shown, entry.dtype, entry.shape, entry.end - entry.begin))
    empty = [tensor for tensor in contents.tensors if not tensor.size_bytes]
    contents.warnings += [f"{clean(tensor.name, 40)} is empty (shape {list(tensor.shape)})" for tensor in empty]
    if scan:
        _scan(file, header, contents)
    if isinstance(corpus := contents.metadata.get("corpus"), dict) and corpus.get("name"):
        contents.notes.append(f"learnt from {clean(str(corpus['name']), 100)}")
    if isinstance(tied := contents.metadata.get("tied"), dict):
        contents.notes += [f"{clean(name, 60)} shares its data with {clean(other, 60)}; stored and counted once" for name, other in tied.items()]
    return contents


def add_config(contents: Contents, text: str) -> None:
    """Take what the file does not say of its settings from the text of a config.json that lies beside it; one of ours says all."""
    if text and contents.format != "minigpt":
        own = contents.facts.get("config")
        try:
            if len(text) > MAX_CONFIG_BYTES:
                raise CheckpointError(f"This file's config.json is larger than {MAX_CONFIG_BYTES >> 10} kB.")
            if not isinstance(found := plain(strict_json(text, "config.json")), dict):
                raise CheckpointError("This file's config.json holds no settings by name.")
            contents.facts["config"] = {**found, **own} if isinstance(own, dict) else found
            contents.notes.append(f"{'further ' if own and isinstance(own, dict) else ''}settings are those of the config.json beside it")
        except CheckpointError as error:
            contents.warnings.insert(0, f"{error}{NOTHING_TAKEN}")


def own_prefix(header: Header) -> str:
    """Return what the names of the model's tensors begin with: a file of MiniGPT has others beside them, and its names are shown without it."""
    return _OURS if "minigpt" in header.metadata and any(name.startswith(_OURS) for name in header.tensors) else ""


def _scan(file: BinaryIO, header: Header, contents: Contents) -> None:
    """Read every value: finite or not, and in our own files against the checksum of `minigpt.checkpoint.digest`, here without torch."""
    metadata = contents.metadata
    digest = hashlib.sha256(json.dumps([metadata.get("config"), metadata.get("tokenizer")], sort_keys=True).encode())
    for name, entry in sorted(header.tensors.items()):
        digest.update(f"{name} {TORCH_NAMES[entry.dtype]} {list(entry.shape)}\n".encode(errors="replace"))
        file.seek(header.data_start + entry.begin)
        nonfinite = 0
        for piece in pieces(file, entry.end - entry.begin):
            nonfinite += count_nonfinite(piece, entry.dtype)
            digest.update(piece)
        if nonfinite:
            contents.warnings.append(f"{clean(name, 40)} holds values that are not finite (NaN or inf)")
    if isinstance(metadata.get("sha256"), str) and metadata["sha256"] != digest.hexdigest():
        raise CheckpointError("This file is damaged: its values do not match the checksum written with them.")


def count_nonfinite(piece: bytes, dtype: str) -> int:
    """Count the NaNs and infinities in little-endian numbers of `dtype`; kinds without them count as zero.

    In such a number every bit of the exponent is set. It lies in the two highest bytes, which are sliced out and matched by a table, all in C.
    """
    if dtype not in FLOATS:
        return 0
    item, all_set = ITEM_BYTES[dtype], -1
    for place, mask in enumerate(FLOATS[dtype], start=1):
        is_set = bytes(byte & mask == mask for byte in range(256))
        all_set &= int.from_bytes(piece[item - place :: item].translate(is_set), "little")
    return all_set.bit_count()


def _shown_name(name: object, contents: Contents) -> str:
    if not isinstance(name, str) or clean(name) != name or re.search(r"[<>&=\"']", name):
        contents.warnings.append(f"odd tensor name {clean(name, 40)}")
    return clean(name)
