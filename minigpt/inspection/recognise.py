"""Who made a file and where it keeps what: the habits of the field's trainers, applied to an opened container.

Produces `Contents`, the same for every make. Whether the values make sense is judged elsewhere.
"""

import hashlib
import re
from dataclasses import dataclass, field
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import MAX_TENSORS, Header, clean, our_metadata
from minigpt.inspection.calls import PickledDict, Record
from minigpt.inspection.findings import Findings
from minigpt.inspection.plain import Budget, plain
from minigpt.inspection.report import TensorInfo
from minigpt.inspection.tensors import DTYPE_NAMES, FLOATS, PIECE_BYTES, Tensor, View, checked_view, count_nonfinite, number_at, pieces
from minigpt.inspection.torchfiles import TorchFile

OURS = "model."
"""What the names of the model's own tensors start with in a file of MiniGPT; `optim.` and `rng.` hold the rest."""
_STATES = ("model_state_dict", "state_dict", "model", "module", "weights")
_CONFIGS = ("model_args", "config", "hyper_parameters")
_TORCH_NAMES = {dtype: name for name, dtype in DTYPE_NAMES.items()}
_STEPS = ("step", "iter_num", "global_step")


@dataclass(frozen=True)
class Missing:
    """Stands for a value that the file does not have, where None is a value it may have."""


MISSING = Missing()


@dataclass
class Contents:
    """What a file holds, as found: tensors are checked, everything else is whatever the file says, as plain JSON values."""

    format: str
    made_by: str
    tensors: list[TensorInfo] = field(default_factory=list)
    shared: dict[int, str] = field(default_factory=dict)
    """Position of each tensor that has no data of its own, with the name of the one it shares."""
    config: object = MISSING
    step: object = MISSING
    val_loss: object = MISSING
    best_val_loss: object = MISSING
    metadata: dict[str, object] = field(default_factory=dict)


def recognise_torch(opened: TorchFile, findings: Findings, *, scan: bool) -> Contents:
    """Find model, settings and progress in a file of `torch.save`.

    Args:
        opened: The file.
        findings: Takes warnings and notes.
        scan: Read every value, for checksums and finite numbers.

    Raises:
        CheckpointError: There are no tensors by name, one does not fit its data, or a checksum fails.
    """
    top = opened.root
    if isinstance(top, Record):
        name = clean(top.class_name, 60)
        raise CheckpointError(f"This file is a whole pickled object ({name}), not a checkpoint: save the model's state_dict() instead.")
    if not isinstance(top, PickledDict):
        raise CheckpointError("Not a checkpoint: the file holds no named tensors.")
    keys = [key for key, _ in top.pairs if isinstance(key, str)]
    if len(keys) != len(set(keys)):
        findings.warn("the same key appears twice; the last one counts")
    state = next((value for key in _STATES if isinstance(value := top.get(key), PickledDict)), top)
    contents = Contents(opened.format, _maker_of_pickle(set(keys), opened, is_bare=state is top))
    views = _views(state, opened, findings)
    if not views:
        raise CheckpointError("Not a checkpoint: no tensors found, or only kinds MiniGPT does not open (sparse, nested, quantized, meta).")
    _add_views(contents, views)
    if scan:
        _scan_records(opened, views, findings)

    def first(*wanted: str) -> object:
        value = next((top.get(key) for key in wanted if key in keys), MISSING)
        if isinstance(value, Tensor):  # in a bare state dict even "step" may be a weight
            return MISSING if state is top else _scalar_of(value, opened)
        return value if isinstance(value, Missing) else plain(value, Budget())

    contents.config = first(*_CONFIGS)
    contents.step = first(*_STEPS)
    contents.val_loss = first("val_loss")
    contents.best_val_loss = first("best_val_loss")
    for class_name in sorted(opened.classes)[:3]:
        findings.note(f"class {clean(class_name, 60)} shown as plain data")
    return contents


def recognise_safetensors(file: BinaryIO, header: Header, findings: Findings, *, scan: bool) -> Contents:
    """Find the model, and in our own files its settings and progress, in a safetensors file.

    Args:
        file: The file, seekable.
        header: Its checked header.
        findings: Takes the warnings.
        scan: Read every value, for finite numbers.

    Raises:
        CheckpointError: The file names no tensors.
    """
    if not header.tensors:
        raise CheckpointError("Not a checkpoint: no tensors in the header.")
    try:
        ours = our_metadata(header)
    except CheckpointError as error:
        findings.warn(f"metadata: {error}")
        ours = None
    contents = Contents("safetensors" if ours is None else "minigpt", "MiniGPT" if ours is not None else _maker_of_names(header))
    own_names = ours is not None and any(name.startswith(OURS) for name in header.tensors)
    for name, entry in header.tensors.items():
        if own_names and not name.startswith(OURS):
            continue
        _check_name(name, findings)
        shown = clean(name.removeprefix(OURS) if own_names else name)
        contents.tensors.append(TensorInfo(shown, entry.dtype, entry.shape, entry.size_bytes))
        if entry.size_bytes == 0:
            findings.warn(f"{clean(shown, 40)} is empty (shape {list(entry.shape)})")
    if scan:
        _scan_tensors(file, header, ours.get("sha256") if ours is not None else None, findings)
    if ours is not None:
        contents.metadata = ours
        contents.config = plain(ours.get("config"), Budget())
        contents.step = ours.get("step", MISSING)
        # A run that was stopped before its first evaluation records null, and that is in order.
        contents.val_loss = MISSING if ours.get("val_loss") is None else ours["val_loss"]
        tied = ours.get("tied")
        for name, holder in tied.items() if isinstance(tied, dict) else ():
            findings.note(f"{clean(name, 60)} shares its data with {clean(holder, 60)}; stored and counted once")
        contents.best_val_loss = MISSING if ours.get("best_val_loss") is None else ours["best_val_loss"]
    return contents


def _scan_tensors(file: BinaryIO, header: Header, sha256: object, findings: Findings) -> None:
    """Read every value: finite or not, and in our own files against the checksum of `minigpt.checkpoint.digest`, here without torch."""
    digest = hashlib.sha256()
    for name, entry in sorted(header.tensors.items()):
        digest.update(f"{name} {_TORCH_NAMES.get(entry.dtype)} {list(entry.shape)}\n".encode(errors="replace"))
        file.seek(header.data_start + entry.begin)
        nonfinite = 0
        for piece in pieces(file, entry.size_bytes):
            nonfinite += count_nonfinite(piece, entry.dtype)
            digest.update(piece)
        if nonfinite:
            findings.warn(f"{clean(name, 40)} holds values that are not finite (NaN or inf)")
    if isinstance(sha256, str) and sha256 != digest.hexdigest():
        raise CheckpointError("This file is damaged: its values do not match the checksum written with them.")


def _views(state: PickledDict, opened: TorchFile, findings: Findings) -> list[tuple[str, View]]:
    if len(state.pairs) > MAX_TENSORS:
        raise CheckpointError(f"This file declares too many tensors: more than {MAX_TENSORS:,}.")
    views: list[tuple[str, View]] = []
    names: set[str] = set()
    for key, value in state.pairs:
        if not isinstance(value, Tensor):
            continue
        name = clean(key)
        _check_name(key, findings)
        if name in names:
            findings.warn(f"tensor name {clean(name, 40)} appears twice")
        names.add(name)
        views.append((name, checked_view(clean(name, 60), value, opened.record_bytes)))
    return views


def _add_views(contents: Contents, views: list[tuple[str, View]]) -> None:
    holders: dict[tuple[str, int, tuple[int, ...]], str] = {}
    for position, (name, view) in enumerate(views):
        holder = holders.setdefault((view.storage.key, view.offset, view.shape), name)
        if holder != name:
            contents.shared[position] = holder
        contents.tensors.append(TensorInfo(name, view.dtype, view.shape, view.size_bytes))


def _scan_records(opened: TorchFile, views: list[tuple[str, View]], findings: Findings) -> None:
    dtypes = {view.storage.key: view.dtype for _, view in views}
    nonfinite: set[str] = set()
    for key in opened.record_bytes:
        dtype = dtypes.get(key, "")
        # Records of the optimizer are read too where that verifies a checksum.
        if (dtype or opened.has_checksums) and sum(count_nonfinite(piece, dtype) for piece in opened.stream(key)):
            nonfinite.add(key)
    for name, view in views:
        if view.storage.key in nonfinite and view.dtype in FLOATS:
            findings.warn(f"{clean(name, 40)} holds values that are not finite (NaN or inf)")


def _scalar_of(tensor: Tensor, opened: TorchFile) -> object:
    """A step or loss kept as a tensor of one element; any larger tensor is no number, and a large record is not read for one."""
    view = checked_view("among the settings", tensor, opened.record_bytes)
    if view.shape not in ((), (1,)) or opened.record_bytes[view.storage.key] > PIECE_BYTES:
        return "(a tensor)"
    return number_at(b"".join(opened.stream(view.storage.key)), view.dtype, view.offset)


def _check_name(name: object, findings: Findings) -> None:
    if not isinstance(name, str) or clean(name) != name or re.search(r"[<>&=\"']", name):
        findings.warn(f"odd tensor name {clean(name, 40)}")


def _maker_of_pickle(keys: set[str], opened: TorchFile, *, is_bare: bool) -> str:
    if "pytorch-lightning_version" in keys:
        return "Lightning"
    if "model_args" in keys and "model" in keys:
        return "nanoGPT"
    if is_bare:
        return "unknown (a bare state dict)"
    return "a training script (pickled config class)" if opened.classes else "a training script"


def _maker_of_names(header: Header) -> str:
    is_transformers = header.metadata.get("format") == "pt" and any(
        re.match(r"(transformer\.)?(wte\.weight|h\.0\.attn\.)|model\.embed_tokens\.", name) for name in header.tensors
    )
    return "Hugging Face transformers" if is_transformers else "unknown"
