"""Going on where a run left off: which file, with which settings, and how its state gets back into a trainer.

Knows files and trainers, not the list of runs.
"""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minigpt.checkpoint import LOCAL_FIELDS, NAMES, Checkpoint, first_usable
from minigpt.config import TransformerConfig, parse_config
from minigpt.errors import CheckpointError, ConfigError, DataError
from minigpt.header import number, told
from minigpt.history import replay
from minigpt.system import read_regular

if TYPE_CHECKING:
    from minigpt.train import Trainer


def find_checkpoint(place: Path) -> Checkpoint:
    """Open the checkpoint to go on from: the file `place`, or the first usable one of last, previous and best in the folder `place`.

    Raises:
        CheckpointError: no file can be used; the message says why.
    """
    files = [place / f"{name}.safetensors" for name in NAMES] if place.is_dir() else [place]
    name, advice = place.name or str(place), "give the folder of a run, or one of its checkpoints"
    if not any(file.is_file() for file in files):
        raise CheckpointError(f"there is no checkpoint at {name!r}: {advice}")
    if not place.is_dir() and not told(place):
        raise CheckpointError(f"{name!r} is no checkpoint of MiniGPT, or a damaged one: {advice}")
    return first_usable(files, to_resume=True)


def resumed_config(
    checkpoint: Checkpoint, folder: Path | None, *, max_steps: int | None = None, learning_rate: float | None = None
) -> TransformerConfig:
    """Return the settings to go on with: those in the checkpoint, with this machine's places from the folder's `config.json`.

    A new `max_steps` re-plans the schedule from where the run is: update n gets the rate that a run planned that long would have given it.

    Args:
        checkpoint: to go on from.
        folder: of the run; None for a file that belongs to none.
        max_steps: the new end; None keeps the plan.
        learning_rate: the new highest rate; None keeps it. The final rate is lowered with it where it must.

    Raises:
        ConfigError: no step is left to make, or a new value is out of its range.
    """
    values = checkpoint.config.model_dump(exclude=LOCAL_FIELDS) | ({} if folder is None else _places(folder))
    values["threads"] = checkpoint.metadata.get("threads", 0)  # one more would add up in another order
    if max_steps is not None:
        values |= {"max_steps": max_steps, "max_epochs": None}
    if learning_rate is not None:
        values |= {"learning_rate": learning_rate, "min_lr": min(values["min_lr"], learning_rate)}
    config = parse_config(values)
    stored = checkpoint.metadata.get("max_steps")  # epochs may have made it less than the setting
    planned = stored if max_steps is None and type(stored) is int else config.max_steps
    if checkpoint.step >= planned:
        more = 2 * max(checkpoint.step, 1)
        raise ConfigError(f"max_steps is {planned:,}; the run has made {checkpoint.step:,} steps already: to go on, try max_steps {more}")
    return config


def is_run(folder: Path) -> bool:
    """Tell whether a folder is a run's, and not one of a model that has a `config.json` of its own, be it an export of ours."""
    if any((folder / name).is_file() for name in ("state.json", "metrics.jsonl")):
        return True
    return (config := _remembered(folder)) is not None and "checkpoint_dir" in config.model_fields_set


def stored_config(folder: Path) -> TransformerConfig:
    """Return the settings that a run's folder remembers, or default ones if they cannot be read."""
    return _remembered(folder) or TransformerConfig(checkpoint_dir=str(folder))


def _remembered(folder: Path) -> TransformerConfig | None:
    try:
        return TransformerConfig.model_validate_json(read_regular(folder / "config.json"))
    except (OSError, ValueError):
        return None


def _places(folder: Path) -> dict[str, Any]:
    """Return the local settings of a run's folder, which may have been moved: what lies inside it is found anew."""
    stored = stored_config(folder).model_dump(include=LOCAL_FIELDS)
    if stored["checkpoint_path"] == str(Path(stored["checkpoint_dir"]) / "best.safetensors"):
        del stored["checkpoint_path"]
    own = folder / "own text.txt"
    return stored | {"checkpoint_dir": str(folder)} | ({"data_path": str(own)} if own.is_file() else {})


def restore(trainer: "Trainer", checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights, optimizer, random states and counts into a trainer that has made no step.

    Everything is copied into the memory that the trainer has: where a tensor lies can change the last bit of a sum.

    Raises:
        CheckpointError: something that a resume needs is missing or does not fit.
        DataError: the text is not the one that the checkpoint learned from.
    """
    facts, corpus = checkpoint.metadata, trainer.text.corpus
    try:
        if facts["corpus"]["sha256"] != corpus.sha256 or facts["tokenizer"] != trainer.tokenizer.to_json():
            was = str(facts["corpus"]["name"])[:100]
            raise DataError(f"the text {corpus.name!r} is not the one that this run learned from ({was!r}): put that one back, or start a new run")
        trainer.model.load_state_dict(checkpoint.model.state_dict())
        _restore_optimizer(trainer, checkpoint.state)
        checks = facts["checks"]
        trainer.step, trainer.elapsed_before = checkpoint.step, _not_negative(facts, "elapsed")
        trainer.next_sample = int(_not_negative(facts, "next_sample"))
        trainer.val_loss, trainer.val_step = _loss(checks["val_loss"], torch.nan), int(checks["val_step"])
        trainer.best_val_loss, trainer.best_step = _loss(checks["best_val_loss"], torch.inf), int(checks["best_step"])
        trainer.without_best = int(checks["without_best"]) % max(trainer.config.patience, 1)  # who goes on after an early end has patience again
        trainer.text.train_loader.generator.set_state(checkpoint.state["rng.data"])
        torch.set_rng_state(checkpoint.state["rng.torch"])
    except (LookupError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"this file does not hold all that a resume needs ({type(error).__name__}: {str(error)[:100]})") from error
    for event in replay(facts):
        if event.get("step", 0) <= trainer.step:  # a run that diverged was saved with a point behind its weights
            trainer.history.append(event)


def _restore_optimizer(trainer: "Trainer", stored: dict[str, Tensor]) -> None:
    """Load the optimizer's tensors; its settings stay those of the configuration, so that a new rate takes effect."""
    parameters = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name in (name for name in stored if name.startswith("optim.")):
        _, index, key = name.split(".")
        if stored[name].dim() and stored[name].shape != parameters[int(index)].shape:
            raise ValueError(f"{name} has the wrong shape")
        state[int(index)][key] = stored[name].clone()
    trainer.optimizer.load_state_dict({"state": dict(state), "param_groups": trainer.optimizer.state_dict()["param_groups"]})


def _not_negative(facts: dict[str, Any], name: str) -> float:
    if (found := number(facts[name])) is None or found < 0:
        raise ValueError(f"{name} is {str(facts[name])[:40]}; it must be 0 or more")
    return found


def _loss(value: float | None, missing: float) -> float:
    return missing if value is None else float(value)
