"""What a run's folder says of it to one who did not see it train: its state, its line in the list of runs, its curves. Knows no run at work."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt import system
from minigpt.checkpoint import NAMES
from minigpt.config import TransformerConfig
from minigpt.header import clean, number, told
from minigpt.history import read_history
from minigpt.resume import stored_config
from minigpt.run import ENDED, LIVE, Run, State

log = logging.getLogger(__name__)

MAX_STATE_TEXT = 10_000  # characters
MAX_NAME = 60  # characters of what a person calls a run


@dataclass(frozen=True)
class PastRun:
    """One line of the list of runs. `resumable` tells that its folder holds a checkpoint to go on from, or, if it is finished, to extend."""

    id: str
    name: str
    preset: str
    state: State
    step: int
    max_steps: int
    val_loss: float | None
    best_val_loss: float | None
    started_at: float
    error: str
    resumable: bool
    parameters: int | None
    tokenizer: str  # "word", "char", or "" if no checkpoint says


def read_state(folder: Path) -> dict[str, Any]:
    """Read a run's `state.json`, its texts made safe to show; {} if it is damaged or not there."""
    try:
        state = json.loads(system.read_regular(folder / "state.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    found = state.items() if isinstance(state, dict) else ()
    return {name: clean(value, MAX_STATE_TEXT, lines=True) if isinstance(value, str) else value for name, value in found}


def name_of(folder: Path) -> str:
    """Return the name of a run that a person gave it, or that of its folder."""
    return str(read_state(folder).get("name") or folder.name)[:MAX_NAME]


def is_orphan(state: dict[str, Any]) -> bool:
    """Tell whether a state speaks of a run at work whose process is no more.

    Our own number counts as dead: a restarted container gives it to the new process, which knows its own run anyway.
    """
    pid = state.get("pid")
    if type(pid) is not int or pid == os.getpid() or not system.process_lives(pid):
        return state.get("state") in LIVE
    return state.get("state") in LIVE and state.get("born") not in (None, system.process_birth(pid))


def is_elsewhere(state: dict[str, Any]) -> bool:
    """Tell whether a state speaks of a run at work in another process that lives."""
    return state.get("state") in LIVE and not is_orphan(state)


def mark_interrupted(folder: Path) -> None:
    """Write into the state of a run whose process died that it was interrupted."""
    if is_orphan(state := read_state(folder)):
        try:
            system.write_atomically(folder / "state.json", json.dumps({**state, "state": "interrupted"}).encode())
        except OSError as error:
            log.warning("%s/state.json cannot be written (%s), so the run is not marked as interrupted", folder.name, error.strerror)


def describe_run(folder: Path) -> PastRun:
    """Read one run's line of the list from its state and the header of its newest readable checkpoint."""
    state = read_state(folder)
    header = next(filter(None, (told(folder / f"{name}.safetensors") for name in NAMES)), {})
    stored = state.get("state")
    return PastRun(
        id=folder.name,
        name=name_of(folder),
        preset=str(state.get("preset", "")),
        state="interrupted" if is_orphan(state) or stored not in (*LIVE, *ENDED) else stored,
        step=int(number(header.get("step", state.get("step"))) or 0),
        max_steps=int(number(header.get("max_steps", state.get("max_steps"))) or 0),
        val_loss=number(header.get("val_loss")),
        best_val_loss=number(header.get("best_val_loss")),
        started_at=number(state.get("started_at")) or 0.0,
        error=str(state.get("error", "")),
        resumable="optimizer_groups" in header and not is_elsewhere(state),
        parameters=int(count) if (count := number(header.get("parameters"))) is not None else None,
        tokenizer=str(config.get("tokenizer", "")) if isinstance(config := header.get("config"), dict) else "",
    )


def open_run(folder: Path, config: TransformerConfig | None = None) -> Run:
    """Return a run of the past with the curves of its folder, as one that has ended; with `config`, as one that will go on with these settings.

    If another process trains it, its state says so, but nothing of it can be asked here.
    """
    line = describe_run(folder)
    run = Run(folder, config or stored_config(folder), line.preset)
    run.name, run.started_at, run.history = line.name, line.started_at, read_history(folder / "metrics.jsonl")
    if config is None:
        run.state, run.error, run.saved_step = line.state, line.error, line.step if line.resumable else None
        run.max_steps = run.history.last.get("log", {}).get("max_steps", line.max_steps)  # a checkpoint may be older than the latest plan
        run.life = "past"  # the same however often the folder is read: what stands there only grows
        run.ended.set()
    return run
