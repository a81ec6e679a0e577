"""Runs: their folders on disk, and the one that trains now on a thread of this process.

The page and the command line are windows on what happens here; closing one changes nothing. The only module that starts threads. Knows
nothing of pages or words for people.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from minigpt import system
from minigpt.config import TransformerConfig
from minigpt.data import check_text, prepare_text
from minigpt.errors import ConfigError, DataError, MiniGPTError, RunStopped
from minigpt.events import AnyEvent, Callback, Event, StopSignal
from minigpt.history import History, to_line
from minigpt.optim import warm_up
from minigpt.presets import DEFAULT_PRESET, PRESETS
from minigpt.saved import SavedCheckpoint, describe
from minigpt.train import train

log = logging.getLogger(__name__)

State = Literal["preparing", "training", "stopping", "finished", "stopped", "diverged", "failed", "interrupted"]
LIVE: tuple[State, ...] = ("preparing", "training", "stopping")
ENDINGS: dict[str, State] = {"finished": "finished", "early": "finished", "stopped": "stopped", "diverged": "diverged"}
OWN_FILES = ("config.json", "state.json", "metrics.jsonl", "own text.txt")  # what a run writes beside its checkpoints
SHORT_TEXT = 100_000  # characters, up to which a text is tried before the run is made: it may be too short for the settings
MAX_TEXT = 20_000_000  # characters of a text given by a person on the page


class RunBusy(MiniGPTError):  # noqa: N818  not a fault: somebody else's run is under way
    """A run is training already; `run` is that one."""

    def __init__(self, run: "Run") -> None:
        super().__init__(f"run {run.id} is training already (step {run.step:,} of {run.max_steps:,}); start yours when it ends")
        self.run = run


class Run:
    """One run of this process. Its folder holds config, metrics, checkpoints and state; `history` is what pages read, from any thread."""

    def __init__(self, folder: Path, config: TransformerConfig, preset: str, *, disposable: bool) -> None:
        self.id = folder.name
        self.disposable = disposable  # the folder is ours, and goes if nothing comes of the run
        self.folder = folder
        self.config = config
        self.preset = preset
        self.stop = StopSignal()
        self.history = History()
        self.state: State = "preparing"
        self.error = ""
        self.message = ""
        self.note = ""  # something that went wrong and that the run survived
        self.ended = threading.Event()
        self._state_lock = threading.Lock()
        self._stop_asked_at = -math.inf

    @property
    def is_live(self) -> bool:
        """Tell whether the run is still at work, saving included."""
        return not self.ended.is_set()

    @property
    def step(self) -> int:
        """The latest step that was spoken of."""
        return max((int(event.get("step", 0)) for kind in ("log", "eval", "complete") if (event := self.history.last.get(kind))), default=0)

    @property
    def max_steps(self) -> int:
        """The planned number of steps."""
        return int(self.history.last.get("eval", {}).get("max_steps", self.config.max_steps))

    def ask_to_stop(self, *, ignore_within_s: float = 0.0) -> None:
        """Ask the run to stop; asked again while it stops, it skips the final evaluation.

        A second request within `ignore_within_s` seconds of the first counts as the same: a double click means one thing.
        """
        if not self.is_live or time.monotonic() - self._stop_asked_at < ignore_within_s:
            return
        self._stop_asked_at = time.monotonic() if not self.stop.is_set() else self._stop_asked_at
        self.stop.ask()
        self._enter("stopping")

    def record(self, event: AnyEvent) -> None:
        """Write an event to the disk, then to memory: the trainer's callback, on the trainer's thread."""
        try:
            system.append_line(self.folder / "metrics.jsonl", to_line(event))
        except OSError as error:  # a full disk must not end a run whose curves still live in memory
            self.note = f"the metrics could not be written: {error.strerror}"
        self.history.append(event)
        kind = event["type"]
        if kind == "status":
            if event["phase"] == "saving":
                self.note = event["message"]
                return
            self.message, self.note = event["message"], ""
            if event["phase"] == "training":
                self._enter("training")
        elif kind == "complete":
            self._enter(ENDINGS[event["reason"]])

    def _enter(self, state: State) -> None:
        """Change the state, but never back: neither from stopping to training nor out of an ending, whichever thread comes last."""
        with self._state_lock:
            if self.state not in LIVE or (self.state == "stopping" and state in LIVE):
                return
            self.state = state
            self.write_state()

    def write_config(self) -> None:
        """Write `config.json`, by which a folder is known as a run's."""
        system.write_atomically(self.folder / "config.json", self.config.model_dump_json(indent=1).encode())

    def write_state(self) -> None:
        """Write `state.json`; what cannot be written is logged and lost, for the run matters more."""
        content = {"state": self.state, "pid": os.getpid(), "preset": self.preset, "error": self.error, "step": self.step, "updated_at": time.time()}
        try:
            system.write_atomically(self.folder / "state.json", json.dumps(content).encode())
        except OSError as error:
            log.warning("the state of run %s could not be written: %s", self.id, error.strerror)

    def work(self, callback: Callback | None = None) -> None:
        """Train to the end on this thread. Whatever goes wrong ends the run as failed, with the reason in `error`."""

        def both(event: Event) -> None:
            self.record(event)
            if callback is not None:
                callback(event)

        try:
            train(self.config, both, self.stop)
        except RunStopped:
            self._enter("stopped")
        except MiniGPTError as error:
            self._fail(str(error))
        except OSError as error:
            log.warning("run %s: %s", self.id, error)
            self._fail(f"the disk refused ({error.strerror or type(error).__name__}); what was saved before is unharmed")
        except Exception as error:  # the edge of the thread: nobody above could tell the person who waits
            if isinstance(error, MemoryError) or "memory" in str(error):  # torch raises RuntimeError for want of memory
                self._fail("this machine ran out of memory: try a smaller batch, width or context")
            else:
                log.exception("run %s failed", self.id)
                self._fail(f"the training broke off ({type(error).__name__}: {str(error)[:200]})")
        finally:
            self._end()

    def fail(self, error: str) -> None:
        """End a run that never began to work."""
        self._fail(error)
        self._end()

    def _end(self) -> None:
        if not list(self.folder.glob("*.safetensors")):
            self._leave_nothing()
        elif not (self.folder / "config.json").exists():  # somebody removed the folder, and saving made it again
            with contextlib.suppress(OSError):
                self.write_config()
        self.ended.set()

    def _leave_nothing(self) -> None:
        """Remove what a run wrote that never came to a model, so that its folder can be used again."""
        if self.disposable:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for name in OWN_FILES:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def _fail(self, error: str) -> None:
        self.error = error
        self._enter("failed")


class RunManager:
    """All runs under one folder, of which at most one trains in this process at a time."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._lock = threading.Lock()
        self.latest: Run | None = None

    @property
    def active(self) -> Run | None:
        """The run that is at work now."""
        return self.latest if self.latest is not None and self.latest.is_live else None

    def create(self, config: TransformerConfig, *, preset: str, text: str | None = None) -> Run:
        """Check the settings and make the run's folder; nothing trains yet.

        Args:
            config: its `checkpoint_dir` becomes the run's folder, unless the caller chose one, which must not hold a run yet.
            preset: where the settings started from, for the run's name.
            text: a text given on the page, kept in the folder; None trains on `config.data_path`.

        Raises:
            ConfigError: settings that do not fit, or a folder that cannot be made.
            DataError: an empty, too short or too long text.
        """
        config.check()
        if text is not None and not text.strip():
            raise DataError("the text is empty; paste at least a page of text, or choose Shakespeare")
        if text is not None and len(text) > MAX_TEXT:
            raise DataError(f"the text has {len(text):,} characters; at most {MAX_TEXT:,} can be read: use a part of it")
        if text is not None and len(text) < SHORT_TEXT:
            check_text(text, config)
        slug = re.sub(r"[^a-z0-9]+", "-", preset.lower())[:20] or "run"
        chosen = "checkpoint_dir" in config.model_fields_set
        folder = Path(config.checkpoint_dir) if chosen else self.home / f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}-{secrets.token_hex(2)}"
        try:
            if chosen and (list(folder.glob("*.safetensors")) or any((folder / name).exists() for name in OWN_FILES)):
                raise ConfigError(f"checkpoint_dir {folder.name!r} holds a run already; its files would be replaced: choose a new folder")
            folder.mkdir(parents=True, exist_ok=chosen)
            config.checkpoint_dir = str(folder)
            if text is not None:
                system.write_atomically(folder / "own text.txt", text.encode("utf-8", "replace"))
                config.data_path = str(folder / "own text.txt")
            run = Run(folder, config, preset, disposable=not chosen)
            run.write_config()
        except OSError as error:
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
            if (live := self.active) is not None:
                raise RunBusy(live)
            run = self.latest = self.create(config, preset=preset, text=text)
            try:
                threading.Thread(target=run.work, name=f"run-{run.id}", daemon=True).start()
            except RuntimeError as error:
                run.fail("this machine has no thread left to train on: close other programs and try again")
                raise MiniGPTError(run.error) from error
            return run

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Stop the run at work, without its final evaluation, and wait for it to be saved."""
        if (run := self.active) is not None:
            run.ask_to_stop()
            run.ask_to_stop()
            run.ended.wait(timeout_s)

    def prepare(self) -> None:
        """Mark runs whose process died as interrupted and sweep what it left; fetch the text and wake torch, in the background, before anybody
        waits for it."""
        for folder in self._folders():
            system.sweep_strays(folder)
            _mark_interrupted(folder / "state.json")
        threading.Thread(target=_warm_up, name="warm-up", daemon=True).start()

    def _folders(self) -> list[Path]:
        """List the folders of runs, the newest first."""
        return [path.parent for path in sorted(self.home.glob("*/config.json"), key=_modified, reverse=True)]

    def checkpoint(self, run: str, kind: str) -> SavedCheckpoint | None:
        """Return one listed checkpoint by the names of its run and kind, neither of which is used as a path."""
        for folder in self._folders():
            if folder.name == run and kind in ("best", "last"):
                return describe(folder / f"{kind}.safetensors", run, "best" if kind == "best" else "last")
        return None

    def checkpoints(self, limit: int = 100) -> list[SavedCheckpoint]:
        """List saved checkpoints, newest run first, best before last; files that are no checkpoints of ours are left out."""
        found: list[SavedCheckpoint] = []
        for folder in self._folders():
            found += [saved for kind in ("best", "last") if (saved := describe(folder / f"{kind}.safetensors", folder.name, kind)) is not None]
            if len(found) >= limit:
                break
        return found[:limit]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _mark_interrupted(path: Path) -> None:
    try:
        state: Mapping[str, Any] = json.loads(path.read_bytes())
        # Our own number counts as dead: a restarted container gives it to the new process, and this one has just begun.
        if state.get("state") in LIVE and (state.get("pid") == os.getpid() or not system.process_lives(int(state.get("pid", 0)))):
            system.write_atomically(path, json.dumps({**state, "state": "interrupted"}).encode())
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        log.warning("%s/state.json cannot be read or written; the run's checkpoints are unharmed", path.parent.name)


def _warm_up() -> None:
    warm_up()
    with contextlib.suppress(MiniGPTError, OSError):  # the run itself will say what is wrong
        prepare_text(PRESETS[DEFAULT_PRESET].config(), lambda _event: None, threading.Event())
