"""Our checkpoint: one safetensors file with weights, optimizer and random states, and everything else as JSON in its header.

Nothing in such a file can execute, its header alone answers every question about it, and a file appears whole or not at all. Knows nothing of
other people's files.
"""

import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor

import minigpt
from minigpt.config import TransformerConfig, parse_config
from minigpt.errors import CheckpointError, ConfigError
from minigpt.events import finite
from minigpt.header import MAX_HEADER_BYTES, clean, number, our_metadata, read_header
from minigpt.model import MiniGPT, rotary_tables
from minigpt.optim import AnyOptimizer
from minigpt.system import write_atomically
from minigpt.tokenizer import TOKENIZERS, TextTokenizer

log = logging.getLogger(__name__)

FORMAT = "minigpt/1"
NAMES = ("last", "previous", "best")
LOCAL_FIELDS = {"checkpoint_dir", "checkpoint_path", "vocab_path", "data_path"}  # places on the writer's disk: nobody else's business


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint opened for use. `model` is in evaluation mode; `metadata` is the header's JSON; `state` has optimizer and random states.

    `notes` says in sentences what had to be assumed of other people's weights.
    """

    model: MiniGPT
    tokenizer: TextTokenizer | None
    config: TransformerConfig
    step: int
    val_loss: float | None
    metadata: dict[str, Any]
    state: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    path: Path = Path()
    skipped: str = ""  # what was passed over to find it


def save_checkpoint(
    model: MiniGPT,
    optimizer: AnyOptimizer | None,
    config: TransformerConfig,
    step: int,
    val_loss: float | None,
    *,
    path: str | Path | None = None,
    keep_as: Path | None = None,
    tokenizer: TextTokenizer | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint atomically to `path`, by default `config.checkpoint_path`; return where it is.

    Args:
        model: its weights are copied to the CPU.
        optimizer: None leaves optimizer and random states out, for a file that is only read and sampled from.
        config: settings; places on this machine's disk are left out of the file.
        step: updates made so far.
        val_loss: nats per token; None or not finite is written as null.
        path: the file to replace.
        keep_as: name under which the file that was there stays.
        tokenizer: kept inside the file.
        generators: random generators to keep, by name; torch's global one always is.
        facts: further plain JSON values, such as `best_val_loss` or `series`.

    Raises:
        CheckpointError: so much is to be told beside the weights that no reader would take the file.
        OSError: the disk is full or the folder cannot be written; an older file at `path` is unharmed.
    """
    target = Path(path if path is not None else config.checkpoint_path)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    metadata: dict[str, Any] = dict(facts or {})
    if optimizer is not None:
        state = optimizer.state_dict()
        metadata["optimizer_groups"] = state["param_groups"]
        tensors |= {f"optim.{number}.{key}": torch.as_tensor(value) for number, entry in state["state"].items() for key, value in entry.items()}
        tensors["rng.torch"] = torch.get_rng_state()
        tensors |= {f"rng.{name}": generator.get_state() for name, generator in (generators or {}).items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    metadata |= {
        "format": FORMAT,
        "config": config.model_dump(exclude=LOCAL_FIELDS),
        "tokenizer": tokenizer.to_json() if tokenizer is not None else None,
        "step": step,
        "val_loss": finite(val_loss),
        "parameters": model.count_parameters(),
        "tied": {"head.weight": "embedding.weight"},
        "versions": {"minigpt": minigpt.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }
    metadata["sha256"] = digest(tensors, metadata)
    write_atomically(target, _packed(tensors, metadata), keep_as=keep_as)
    return target


def restate_checkpoint(path: Path, **facts: Any) -> None:
    """Change facts in a checkpoint's header, atomically; tensors and everything else stay as they are.

    Raises:
        CheckpointError: it is no checkpoint of ours, or its header would be larger than can be read.
    """
    metadata = our_metadata(read_header(path)) or {}
    write_atomically(path, _packed(load_tensors(path.read_bytes()), {**metadata, **facts}))


def anything_saved(config: TransformerConfig) -> bool:
    """Tell whether a run with these settings has left a checkpoint."""
    files = (config.checkpoint_path, *map(str, Path(config.checkpoint_dir).glob("*.safetensors")))
    return any(os.path.isfile(file) for file in files)  # noqa: PTH113  `is_file` raises if a name is too long


def _packed(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """Return a checkpoint's bytes, of which it is known that `read_header` takes them."""
    data = pack_tensors(dict(tensors), metadata={"format": "pt", "minigpt": json.dumps(metadata, allow_nan=False, ensure_ascii=False)})
    if (size := int.from_bytes(data[:8], "little")) > MAX_HEADER_BYTES:  # a safetensors file begins with its header's length
        raise CheckpointError(f"the file's header would have {size:,} bytes; at most {MAX_HEADER_BYTES:,} can be read again: keep fewer facts in it")
    return data


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Return the sha256 of the settings, the tokenizer, and all names, types, shapes and values of tensors; safetensors itself has no checksum.

    Step, losses and curves are not in it: they may be put right later without a look at the weights.
    """
    result = hashlib.sha256(json.dumps([metadata.get("config"), metadata.get("tokenizer")], sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        result.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        result.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def read_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Open one of our checkpoints for use: verified by its digest, its tensors compared with what its settings promise.

    Raises:
        CheckpointError: not ours, damaged, or at odds with itself; the message says which.
        OSError: the file cannot be read.
    """
    path = Path(path)
    header = read_header(path)
    metadata = our_metadata(header)
    if metadata is None or metadata.get("format") != FORMAT:
        raise CheckpointError("this file was not written by MiniGPT")
    config = _stored_config(metadata)
    with torch.device("meta"):
        model = MiniGPT(config)
    expected = {f"model.{name}": tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: entry.shape for name, entry in header.tensors.items() if name.startswith("model.")}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"tensor {name[:80]} has shape {found.get(name, 'none')}; the settings in the file ask for {expected.get(name, 'none')}"
            )
    try:
        tensors = load_tensors(path.read_bytes())
    except (SafetensorError, KeyError) as error:
        raise CheckpointError("this file is damaged: its tensors cannot be read") from error
    if digest(tensors, metadata) != metadata.get("sha256"):
        raise CheckpointError("this file is damaged: its values do not match the checksum written with them")
    # Filled on the meta device's skeleton: a fresh model would draw from the global generator, which a live run on another thread depends on.
    weights = {name.removeprefix("model."): value.float() for name, value in tensors.items() if name.startswith("model.")}
    model.load_state_dict(weights, assign=True)
    model.cos, model.sin = rotary_tables(config.max_seq_len, config.d_model // config.n_heads)
    stored = metadata.get("tokenizer")
    tokenizer = TOKENIZERS[config.tokenizer]().from_json(stored) if isinstance(stored, str) else None
    if tokenizer is not None and tokenizer.vocab_size != config.vocab_size:
        raise CheckpointError(f"the tokenizer in this file has {tokenizer.vocab_size} tokens; the model knows {config.vocab_size}")
    step = metadata.get("step")
    return Checkpoint(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        config=config,
        step=step if type(step) is int and step >= 0 else 0,
        val_loss=number(metadata.get("val_loss")),
        metadata=metadata,
        state={name: value for name, value in tensors.items() if not name.startswith("model.")},
    )


def _stored_config(metadata: Mapping[str, Any]) -> TransformerConfig:
    stored = metadata.get("config")
    if not isinstance(stored, dict):
        raise CheckpointError("this file holds no settings")
    try:
        return parse_config({name: value for name, value in stored.items() if name not in LOCAL_FIELDS})
    except ConfigError as error:
        raise CheckpointError(f"the settings in this file do not work: {str(error).splitlines()[0]}"[:300]) from error


def load_checkpoint(config: TransformerConfig, device: str | torch.device) -> tuple[MiniGPT, TransformerConfig]:
    """Open `config.checkpoint_path`, or the newest readable checkpoint beside it; return the model and the settings it was saved with.

    What was skipped, and why, goes to the log.

    Raises:
        CheckpointError: none of the files can be used.
    """
    chosen = Path(config.checkpoint_path)
    checkpoint = first_usable([chosen, *(chosen.with_name(f"{name}.safetensors") for name in NAMES)], device)
    return checkpoint.model, checkpoint.config


def first_usable(paths: Iterable[Path], device: str | torch.device = "cpu", *, to_resume: bool = False) -> Checkpoint:
    """Open the first of `paths` that can be used; what was skipped, and why, goes to the log and into the result's `skipped`.

    With `to_resume` a file must hold finite weights and the states of optimizer and random generators.

    Raises:
        CheckpointError: none can be used.
    """
    skipped: list[str] = []
    for path in dict.fromkeys(paths):
        if not path.is_file():
            continue
        try:
            checkpoint = read_checkpoint(path, device)
            if to_resume and "rng.data" not in checkpoint.state:
                raise CheckpointError("it holds weights alone, without the states of optimizer and random generators")
            if to_resume and not all(value.isfinite().all() for value in checkpoint.model.parameters()):
                raise CheckpointError("its weights are no longer finite numbers")
        except (CheckpointError, OSError) as error:
            skipped.append(f"{path.name} was skipped: {clean(str(error))}")
            log.warning(skipped[-1])
        else:
            checkpoint.path, checkpoint.skipped = path, "; ".join(skipped)
            return checkpoint
    raise CheckpointError(f"no checkpoint could be opened: {'; '.join(skipped) or 'there is none'}")
