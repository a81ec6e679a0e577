"""One run: its folder on disk, its state, and the work that trains it on whatever thread calls it. Knows nothing of other runs or of pages."""

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Literal

from minigpt import system
from minigpt.checkpoint import anything_saved
from minigpt.config import TransformerConfig
from minigpt.distributed import train
from minigpt.errors import MiniGPTError, RunStopped
from minigpt.events import AnyEvent, Callback, Event, StopSignal
from minigpt.history import History, read_history, to_line

log = logging.getLogger(__name__)

State = Literal["preparing", "training", "stopping", "finished", "stopped", "diverged", "failed", "interrupted"]
LIVE: tuple[State, ...] = ("preparing", "training", "stopping")
ENDED: tuple[State, ...] = ("finished", "stopped", "diverged", "failed", "interrupted")
ENDINGS: dict[str, State] = {"finished": "finished", "early": "finished", "stopped": "stopped", "diverged": "diverged"}
OWN_FILES = ("config.json", "state.json", "metrics.jsonl", "own text.txt")  # what a run writes beside its checkpoints


class Run:
    """One run of this process. Its folder holds config, metrics, checkpoints and state; `history` is what pages read, from any thread."""

    def __init__(self, folder: Path, config: TransformerConfig, preset: str, *, disposable: bool = False) -> None:
        self.id = folder.name
        self.disposable = disposable  # the folder is ours, and goes if nothing comes of the run
        self.folder = folder
        self.config = config
        self.preset = preset
        self.name = folder.name  # until a person gives another
        self.started_at = time.time()  # only to be shown
        self.origin: Path | None = None  # the checkpoint that the run goes on from
        self.skipped = ""  # what was passed over to find it
        self.max_steps = config.max_steps
        self.saved_step: int | None = None  # of the checkpoint from which a run of the past can go on, if there is one
        self.stop = StopSignal()
        self.history = History()
        self.state: State = "preparing"
        self.error = ""
        self.message = ""
        self.note = ""  # what is worth saying beside the state: something that went wrong and was survived, or a compilation
        self.ended = threading.Event()
        self.life = secrets.token_hex(4)  # a reader's curves are of one life: a run that is gone on with keeps its id but not all its points
        self.written_at = 0.0  # when `state.json` was last written by this run; another time on it is somebody else's
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
        kind = event["type"]
        try:
            system.append_line(self.folder / "metrics.jsonl", to_line(event))
            if kind == "resume":  # the rows behind its step are void
                self.history = read_history(self.folder / "metrics.jsonl")
        except OSError as error:  # a full disk must not end a run whose curves still live in memory
            self.note = f"the metrics could not be written: {error.strerror}"
        self.history.append(event)
        self.max_steps = event.get("max_steps", self.max_steps)
        if kind == "status":
            if event["phase"] in ("saving", "compiling"):
                self.note = event["message"]
                return
            self.message, self.note = event["message"], self.skipped
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
        known = ("state", "preset", "error", "step", "max_steps", "started_at")
        content = {
            **{name: getattr(self, name) for name in known},
            "name": "" if self.name == self.id else self.name,  # a copy of the folder is called by its own name
            "pid": os.getpid(),
            "born": system.process_birth(os.getpid()),
            "updated_at": time.time(),
        }
        path = self.folder / "state.json"
        try:
            system.write_atomically(path, json.dumps(content).encode())
            self.written_at = system.modified(path)
        except OSError as error:
            log.warning("the state of run %s could not be written: %s", self.id, error.strerror)

    def rename(self, name: str) -> None:
        """Take a name given by a person."""
        with self._state_lock:
            self.name = name
            self.write_state()

    def work(self, callback: Callback | None = None) -> None:
        """Train to the end on this thread. Whatever goes wrong ends the run as failed, with the reason in `error`."""

        def both(event: Event) -> None:
            self.record(event)
            if callback is not None:
                callback(event)

        try:
            train(self.config, both, self.stop, resume=self.origin)
        except RunStopped:
            self._enter("stopped")
        except MiniGPTError as error:
            self._fail(str(error))
        except OSError as error:
            log.warning("run %s: %s", self.id, error)
            unharmed = "; what was saved before is unharmed" if anything_saved(self.config) else ""
            self._fail(f"the disk refused ({error.strerror or type(error).__name__}){unharmed}")
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
