"""Runs: the list of their folders, and the one that trains now on a thread of this process.

The page and the command line are windows on what happens here; closing one changes nothing. Knows nothing of pages or words for people.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Literal

from minigpt import system
from minigpt.checkpoint import Checkpoint
from minigpt.config import TransformerConfig
from minigpt.data import checked_text, prepare_text
from minigpt.device import check_device
from minigpt.errors import ConfigError, MiniGPTError
from minigpt.header import clean, is_text
from minigpt.history import replay, to_line
from minigpt.optim import warm_up
from minigpt.past import MAX_NAME, PastRun, describe_run, is_elsewhere, mark_interrupted, name_of, open_run, read_state
from minigpt.presets import DEFAULT_PRESET, PRESETS
from minigpt.resume import find_checkpoint, is_run, resumed_config
from minigpt.run import OWN_FILES, Run, State
from minigpt.saved import SavedCheckpoint, describe

__all__ = ["PastRun", "Run", "RunBusy", "RunManager", "State"]

log = logging.getLogger(__name__)

KINDS: tuple[Literal["best", "last"], ...] = ("best", "last")
CHECK_DISK = "look at the disk's free space and the folder's permissions"


class RunBusy(MiniGPTError):  # noqa: N818  not a fault: somebody else's run is under way
    """A run is training already; `run` is that one."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"run {run.id} is training (step {run.step:,} of {run.max_steps:,}); start yours when it ends")
        self.run = run


class RunManager:
    """All runs under one folder, of which at most one trains in this process at a time."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._lock = threading.Lock()
        self._closing = False
        self._latest: Run | None = None

    @property
    def latest(self) -> Run | None:
        """The run that this process began last; told as its folder tells it if somebody else has written there since it ended."""
        if (run := self._latest) is None or run.is_live or system.modified(run.folder / "state.json") in (run.written_at, 0.0):
            return run
        return _past(run.folder) or run

    @property
    def active(self) -> Run | None:
        """The run that is at work now."""
        return run if (run := self._latest) is not None and run.is_live else None

    def create(self, config: TransformerConfig, *, preset: str, text: str | None = None) -> Run:
        """Check the settings and make the run's folder; nothing trains yet.

        Args:
            config: its `checkpoint_dir` becomes the run's folder, unless the caller chose one, which must not hold a run yet.
            preset: where the settings started from, for the run's name.
            text: a text given on the page, kept in the folder; None trains on `config.data_path`.

        Raises:
            ConfigError: settings that do not fit each other or this machine, or a folder that cannot be made.
            DataError: an empty, too short, too long or binary text.
        """
        config.check()
        check_device(config)
        if text is not None:
            text = checked_text(text, config)
        slug = re.sub(r"[^a-z0-9]+", "-", preset.lower())[:20] or "run"
        chosen = "checkpoint_dir" in config.model_fields_set
        folder = Path(config.checkpoint_dir) if chosen else self.home / f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}-{secrets.token_hex(2)}"
        try:
            folder.mkdir(parents=True, exist_ok=chosen)
            with system.exclusive(folder):  # of two processes that begin in one folder, the second shall see the first
                if chosen and (list(folder.glob("*.safetensors")) or any((folder / name).exists() for name in OWN_FILES)):
                    raise ConfigError(f"checkpoint_dir {folder.name!r} holds a run already; its files would be replaced: choose a new folder")
                config.checkpoint_dir = str(folder)
                config.data_path = os.path.realpath(config.data_path) if config.data_path else ""  # a resume may begin elsewhere
                if text is not None:
                    system.write_atomically(folder / "own text.txt", text.encode())
                    config.data_path = str(folder / "own text.txt")
                run = Run(folder, config, preset, disposable=not chosen)
                run.write_config()
        except OSError as error:
            if chosen:
                raise ConfigError(f"checkpoint_dir is {str(folder)!r}, which cannot be a run's folder ({error.strerror}): choose another") from error
            raise ConfigError(f"the run's folder cannot be made ({error.strerror}): set MINIGPT_HOME to a folder that can be written") from error
        run.write_state()
        return run

    def start(self, config: TransformerConfig, *, preset: str, text: str | None = None) -> Run:
        """Start a run on a thread of its own and return it at once.

        Raises:
            RunBusy: a run is at work; its `run` is that one.
            ConfigError: see `create`.
            DataError: see `create`.
        """
        with self._lock:
            self._check_free()
            return self._launch(self.create(config, preset=preset, text=text))

    def _check_free(self) -> None:
        if self._closing:
            raise MiniGPTError("the program is being ended: start again when it is back")
        if (live := self.active) is not None:
            raise RunBusy(live)

    def _launch(self, run: Run) -> Run:
        self._latest = run
        try:
            threading.Thread(target=run.work, name=f"run-{run.id}", daemon=True).start()
        except RuntimeError as error:
            run.fail("this machine has no thread left to train on: close other programs and try again")
            raise MiniGPTError(run.error) from error
        return run

    def resume(self, run_id: str, *, max_steps: int | None = None, learning_rate: float | None = None) -> Run:
        """Go on with a run of the list, on a thread of its own, and return it at once.

        Args:
            run_id: as `past` told it.
            max_steps: a new end, for a run that is finished; the schedule is planned anew from where the run is.
            learning_rate: a new rate; a run that diverged goes on from its last finite weights with a third of it.

        Raises:
            RunBusy: a run is at work.
            MiniGPTError: see `reopen`; or there is no such run.
        """
        with self._lock:
            self._check_free()
            return self._launch(self.reopen(self._folder(run_id), max_steps=max_steps, learning_rate=learning_rate))

    def reopen(self, place: Path, *, max_steps: int | None = None, learning_rate: float | None = None) -> Run:
        """Make ready to go on with a run; nothing trains yet.

        Args:
            place: the folder of a run, or one of our checkpoint files; a file that lies in no run's folder begins a run of its own.
            max_steps: see `resume`.
            learning_rate: see `resume`.

        Raises:
            CheckpointError: nothing there can be gone on from.
            ConfigError: no step is left to make, or a value is out of its range.
            MiniGPTError: another process trains this run, or its folder cannot be written.
        """
        with system.exclusive(place if place.is_dir() else place.parent):  # of two processes that resume one run, the second shall see the first
            return self._reopened(find_checkpoint(place), max_steps=max_steps, learning_rate=learning_rate)

    def _reopened(self, found: Checkpoint, **changes: Any) -> Run:
        folder = found.path.parent if is_run(found.path.parent) else None
        config = resumed_config(found, folder, **changes)
        try:
            run = self.create(config, preset="resumed") if folder is None else open_run(self._at_rest(folder), config)
            system.sweep_strays(run.folder)
            metrics = run.folder / "metrics.jsonl"
            if not metrics.is_file():
                for event in replay(found.metadata):
                    system.append_line(metrics, to_line(event))
                    run.history.append(event)
            elif metrics.read_bytes()[-1:] not in (b"", b"\n"):
                system.append_line(metrics, "")  # ends the line that a power cut left half written
            run.write_config()
        except OSError as error:
            raise MiniGPTError(f"the run's folder cannot be written ({error.strerror}): {CHECK_DISK}") from error
        run.origin, run.skipped = found.path, found.skipped
        run.write_state()
        return run

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Stop the run at work, without its final evaluation, and wait for it to be saved. From now on nothing starts."""
        with self._lock:
            self._closing = True
        if (run := self.active) is not None:
            run.ask_to_stop()
            run.ask_to_stop()
            run.ended.wait(timeout_s)

    def prepare(self) -> None:
        """Mark runs whose process died as interrupted and sweep what it left; fetch the text and wake torch, in the background, before anybody
        waits for it."""
        for folder in self._folders():
            system.sweep_strays(folder)
            mark_interrupted(folder)
        threading.Thread(target=_warm_up, name="warm-up", daemon=True).start()

    def _folders(self) -> list[Path]:
        """List the folders of runs, the newest first, without those whose names are no text: a page could not be told of them."""
        found = [path for path in self.home.glob("*/config.json") if path.is_file() and is_text(path.parent.name) and is_run(path.parent)]
        return [path.parent for path in sorted(found, key=system.modified, reverse=True)]

    def _folder(self, run_id: str) -> Path:
        """Return the folder of a listed run, whose id is never used as a path."""
        for folder in self._folders():
            if folder.name == run_id:
                return folder
        raise MiniGPTError("there is no such run; it may have been deleted")

    def past(self, limit: int = 10) -> list[PastRun]:
        """List the latest runs, the newest first and the one at work included, each read from its state and one header."""
        with self._lock:  # a start makes a run's folder before the run is known, which would look like one that was interrupted
            folders, run = self._folders()[:limit], self.active
        lines = [describe_run(folder) for folder in folders]
        if run is None:
            return lines
        now: dict[str, Any] = {"state": run.state, "step": run.step, "max_steps": run.max_steps, "resumable": False}
        now |= {name: run.history.last.get("eval", {}).get(name) for name in ("val_loss", "best_val_loss")}
        return [dataclasses.replace(line, **now) if line.id == run.id else line for line in lines]

    def run(self, run_id: str) -> Run | None:
        """Return a run by its id, for reading: this process's latest, or one of the past with the curves of its folder."""
        if (latest := self.latest) is not None and latest.id == run_id:
            return latest
        try:
            return _past(self._folder(run_id))
        except MiniGPTError:
            return None

    def rename(self, run_id: str, name: str) -> None:
        """Give a run a name to be shown, cleaned and cut; an empty one takes the name away.

        Raises:
            MiniGPTError: another run has this name, there is no such run, another process trains it, or its state cannot be written.
        """
        name = clean(" ".join(str(name or "").split())[:MAX_NAME]) or run_id
        if any(name in (folder.name, name_of(folder)) for folder in self._folders() if folder.name != run_id):
            raise MiniGPTError(f"another run is called “{name}” already: choose a different name")
        if (live := self.active) is not None and live.id == run_id:
            live.rename(name)
            return
        folder, latest = self._at_rest(self._folder(run_id)), self.latest
        try:
            system.write_atomically(folder / "state.json", json.dumps({**read_state(folder), "name": name}).encode())
        except OSError as error:
            raise MiniGPTError(f"the name cannot be written ({error.strerror}): {CHECK_DISK}") from error
        if latest is not None and latest is self._latest and latest.id == run_id:
            latest.name, latest.written_at = name, system.modified(folder / "state.json")

    def delete(self, run_id: str) -> None:
        """Delete a run with all its files.

        Raises:
            MiniGPTError: there is no such run, it is at work here or in another process, or the disk refuses.
        """
        with self._lock:
            folder = self._at_rest(self._folder(run_id))
            try:
                shutil.rmtree(folder)  # which refuses a link to a folder elsewhere
            except OSError as error:
                raise MiniGPTError(f"run {run_id} cannot be deleted ({error.strerror or error}): {CHECK_DISK}") from error
            if self._latest is not None and self._latest.id == run_id:
                self._latest = None

    def delete_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Remove one listed checkpoint of a run that has ended.

        Raises:
            MiniGPTError: its run is at work here or in another process.
            OSError: it cannot be removed.
        """
        with self._lock:
            self._at_rest(saved.path.parent)
            saved.path.unlink()

    def _at_rest(self, folder: Path) -> Path:
        """Return the folder of a run unless somebody trains it."""
        if (live := self.active) is not None and live.folder == folder:
            raise MiniGPTError(f"run {folder.name} is training: stop it first")
        if is_elsewhere(read_state(folder)):
            raise MiniGPTError(f"run {folder.name} is training in another process: stop it there first")
        return folder

    def checkpoint(self, run: str, kind: str) -> SavedCheckpoint | None:
        """Return one listed checkpoint by the names of its run and kind, neither of which is used as a path."""
        for folder in self._folders():
            if folder.name == run and kind in KINDS:
                return describe(folder / f"{kind}.safetensors", run, "best" if kind == "best" else "last", name_of(folder))
        return None

    def checkpoints(self, limit: int = 100) -> list[SavedCheckpoint]:
        """List saved checkpoints, newest run first, best before last; files that are no checkpoints of ours are left out."""
        files = (describe(folder / f"{kind}.safetensors", folder.name, kind, name_of(folder)) for folder in self._folders() for kind in KINDS)
        return list(itertools.islice(filter(None, files), limit))


def _past(folder: Path) -> Run | None:
    """Return a run with the curves of its folder, which is read again only when it has changed; None if it cannot be read."""
    try:
        return _opened(folder, system.modified(folder / "metrics.jsonl"), system.modified(folder / "state.json"))
    except OSError:
        return None


@functools.lru_cache(maxsize=8)
def _opened(folder: Path, *_changed: float) -> Run:
    return open_run(folder)


def _warm_up() -> None:
    warm_up()
    with contextlib.suppress(MiniGPTError, OSError):  # the run itself will say what is wrong
        prepare_text(PRESETS[DEFAULT_PRESET].config(), lambda _event: None, threading.Event())
