"""The files that a person names for `train` to write, looked at before it trains: none may replace what is saved already."""

import os
from pathlib import Path

from minigpt.config import TransformerConfig
from minigpt.errors import ConfigError
from minigpt.header import told
from minigpt.resume import is_run


def check_outputs(config: TransformerConfig, weights: Path | None, resumed: Path | None = None) -> None:
    """Refuse outputs that are there already, lie among the run's own files or are one file; weights alone may replace weights of ours.

    Args:
        config: names the vocabulary, the best checkpoint and, if a person chose it, the run's folder.
        weights: where the weights go.
        resumed: the folder or the checkpoint that is gone on with; its own settings are then not looked at.

    Raises:
        ConfigError: with every problem, one sentence a line.
    """
    folder = Path(config.checkpoint_dir) if "checkpoint_dir" in config.model_fields_set else None
    if resumed is not None:
        folder = resumed if resumed.is_dir() else resumed.parent if is_run(resumed.parent) else None
    best = config.checkpoint_path if "checkpoint_path" in config.model_fields_set else ""
    problems = []
    taken: dict[Path, str] = {}
    for name, given in (("vocab_path", config.vocab_path), ("checkpoint_path", best), ("weights", str(weights or ""))):
        file, where = Path(os.path.realpath(given)), f"{name} is {given!r}"
        if not given:
            continue
        if folder is not None and file.parent == Path(os.path.realpath(folder)) and (name, file.name) != ("checkpoint_path", "best.safetensors"):
            problems.append(f"{where}, in the run's own folder: choose a place outside of it")
        elif (other := taken.setdefault(file, name)) != name:
            problems.append(f"{where}, the same file as {other}: give each its own")
        elif os.path.lexists(file) and not (name == "weights" and _is_weights(file)):
            problems.append(f"{where}, which is there already and would be replaced: name a new file")
    if problems:
        raise ConfigError("\n".join(problems))


def _is_weights(file: Path) -> bool:
    facts = told(file)
    return bool(facts) and "optimizer_groups" not in facts
