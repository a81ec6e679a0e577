"""Who made a file and where it keeps what: the habits of the field's trainers, applied to an opened container.

Produces `Contents`, the same for every make; what holds no sound tensors raises `CheckpointError`. Whether the values make sense is judged elsewhere.
"""

import hashlib
import re
from dataclasses import dataclass, field
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import MAX_TENSORS, TORCH_NAMES, Header, clean, our_metadata
from minigpt.inspection.records import PickledDict, Record, plain
from minigpt.inspection.report import TensorInfo
from minigpt.inspection.tensors import FLOATS, PIECE_BYTES, Tensor, View, checked_view, count_nonfinite, number_at, pieces
from minigpt.inspection.torchfiles import TorchFile

_OURS = "model."  # what the model's own tensors are called in a file of MiniGPT; `optim.` and `rng.` hold the rest
_STATES = ("model_state_dict", "state_dict", "model", "module", "weights")
_FACTS = {
    "config": ("model_args", "config", "hyper_parameters"),
    "step": ("step", "iter_num", "global_step"),
    "val_loss": ("val_loss",),
    "best_val_loss": ("best_val_loss",),
}
_TRANSFORMERS = re.compile(r"(transformer\.)?(wte\.weight|h\.0\.attn\.)|model\.embed_tokens\.")


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


def recognise_torch(opened: TorchFile, *, scan: bool) -> Contents:
    """Find model, settings and progress in a file of `torch.save`; with `scan`, read every value, for checksums and finite numbers."""
    top = opened.root
    if isinstance(top, Record):
        name = clean(top.class_name, 60)
        raise CheckpointError(f"This file is a whole pickled object ({name}), not a checkpoint: save the model's state_dict() instead.")
    if not isinstance(top, PickledDict):
        raise CheckpointError("Not a checkpoint: the file holds no named tensors.")
    keys = [key for key, _ in top.pairs if isinstance(key, str)]
    state = next((value for key in _STATES if isinstance(value := top.get(key), PickledDict)), top)
    contents = Contents(opened.format, _maker_of_pickle(keys, opened, is_bare=state is top), warnings=list(opened.warnings))
    if len(keys) != len(set(keys)):
        contents.warnings.append("the same key appears twice; the last one counts")
    views = _add_tensors(contents, state, opened)
    if scan:
        dtypes = {view.key: view.info.dtype for view in views}  # the optimizer's records are read too, as that verifies their checksums
        nonfinite = {key for key in opened.record_bytes if sum(count_nonfinite(piece, dtypes.get(key, "")) for piece in opened.stream(key))}
        for view in views:
            if view.key in nonfinite and view.info.dtype in FLOATS:
                contents.warnings.append(f"{clean(view.info.name, 40)} holds values that are not finite (NaN or inf)")
    for fact, names in _FACTS.items():
        key = next((name for name in names if name in keys), None)
        value = top.get(key) if key is not None else None
        if isinstance(value, Tensor) and state is not top:
            contents.facts[fact] = _scalar_of(value, opened)
        elif key is not None and not isinstance(value, Tensor):  # in a bare state dict even "step" may be a weight
            contents.facts[fact] = plain(value)
    contents.notes += [f"class {clean(class_name, 60)} shown as plain data" for class_name in sorted(opened.classes)[:3]]
    return contents


def _add_tensors(contents: Contents, state: PickledDict, opened: TorchFile) -> list[View]:
    if len(state.pairs) > MAX_TENSORS:
        raise CheckpointError(f"This file declares too many tensors: more than {MAX_TENSORS:,}.")
    views: list[View] = []
    names: set[str] = set()
    holders: dict[tuple[str, int, tuple[int, ...]], str] = {}
    for key, value in state.pairs:
        if not isinstance(value, Tensor):
            continue
        name = _shown_name(key, contents)
        if name in names:
            contents.warnings.append(f"tensor name {clean(name, 40)} appears twice")
        names.add(name)
        view = checked_view(name, value, opened.record_bytes)
        if (holder := holders.setdefault((view.key, view.offset, view.info.shape), name)) != name:
            contents.shared[len(views)] = holder
        views.append(view)
    if not views:
        raise CheckpointError("Not a checkpoint: no tensors found, or only kinds MiniGPT does not open (sparse, nested, quantized, meta).")
    contents.tensors = [view.info for view in views]
    return views


def _scalar_of(tensor: Tensor, opened: TorchFile) -> object:
    """A step or loss kept as a tensor of one element; any larger tensor is no number, and a large record is not read for one."""
    view = checked_view("among the settings", tensor, opened.record_bytes)
    if view.info.shape not in ((), (1,)) or opened.record_bytes[view.key] > PIECE_BYTES:
        return "(a tensor)"
    return number_at(b"".join(opened.stream(view.key)), view.info.dtype, view.offset)


def _maker_of_pickle(keys: list[str], opened: TorchFile, *, is_bare: bool) -> str:
    if "pytorch-lightning_version" in keys:
        return "Lightning"
    if "model_args" in keys and "model" in keys:
        return "nanoGPT"
    if is_bare:
        return "unknown (a bare state dict)"
    return "a training script (pickled config class)" if opened.classes else "a training script"


def recognise_safetensors(file: BinaryIO, header: Header, *, scan: bool) -> Contents:
    """Find the model, and in our own files its settings and progress, in a safetensors file; with `scan`, read every value."""
    if not header.tensors:
        raise CheckpointError("Not a checkpoint: no tensors in the header.")
    is_transformers = header.metadata.get("format") == "pt" and any(map(_TRANSFORMERS.match, header.tensors))
    contents = Contents("safetensors", "Hugging Face transformers" if is_transformers else "unknown")
    try:
        ours = our_metadata(header)
    except CheckpointError as error:
        contents.warnings.append(f"metadata: {error}")
        ours = None
    if ours is not None:
        contents.format, contents.made_by, contents.metadata = "minigpt", "MiniGPT", ours
    # A run that was stopped before its first evaluation records null, and that is in order.
    contents.facts = {fact: plain(value) for fact in _FACTS if (value := contents.metadata.get(fact)) is not None}
    prefix = _OURS if ours is not None and any(name.startswith(_OURS) for name in header.tensors) else ""
    for name, entry in header.tensors.items():
        if name.startswith(prefix):
            info = TensorInfo(_shown_name(name.removeprefix(prefix), contents), entry.dtype, entry.shape, entry.end - entry.begin)
            contents.tensors.append(info)
            if info.size_bytes == 0:
                contents.warnings.append(f"{clean(info.name, 40)} is empty (shape {list(info.shape)})")
    if scan:
        _scan(file, header, contents)
    tied = contents.metadata.get("tied")
    for name, holder in tied.items() if isinstance(tied, dict) else ():
        contents.notes.append(f"{clean(name, 60)} shares its data with {clean(holder, 60)}; stored and counted once")
    return contents


def _scan(file: BinaryIO, header: Header, contents: Contents) -> None:
    """Read every value: finite or not, and in our own files against the checksum of `minigpt.checkpoint.digest`, here without torch."""
    digest = hashlib.sha256()
    for name, entry in sorted(header.tensors.items()):
        digest.update(f"{name} {TORCH_NAMES[entry.dtype]} {list(entry.shape)}\n".encode(errors="replace"))
        file.seek(header.data_start + entry.begin)
        nonfinite = 0
        for piece in pieces(file, entry.end - entry.begin):
            nonfinite += count_nonfinite(piece, entry.dtype)
            digest.update(piece)
        if nonfinite:
            contents.warnings.append(f"{clean(name, 40)} holds values that are not finite (NaN or inf)")
    sha256 = contents.metadata.get("sha256")
    if isinstance(sha256, str) and sha256 != digest.hexdigest():
        raise CheckpointError("This file is damaged: its values do not match the checksum written with them.")


def _shown_name(name: object, contents: Contents) -> str:
    if not isinstance(name, str) or clean(name) != name or re.search(r"[<>&=\"']", name):
        contents.warnings.append(f"odd tensor name {clean(name, 40)}")
    return clean(name)
