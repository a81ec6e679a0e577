"""What a process does that forks again and again: each child trains, saves or exports, and is killed or runs out of disk or memory.

`main(mode, place, *numbers)` prints what was found as JSON; it runs in a process that `forks` makes, never in pytest's own, whose threads would
not survive a fork. `kill TRIALS SEED` kills one run again and again, `naive TRIALS SEED` a save without any care, `export TRIALS SEED` an export,
`disk` limits how large a file may become, `memory HELD` what memory there is (with HELD 1 somebody keeps hold of the trainer).
"""

import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from minigpt import export as exporting
from minigpt import runs, train
from minigpt.checkpoint import read_checkpoint
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError
from minigpt.events import StopSignal
from minigpt.history import to_line
from minigpt.optim import warm_up
from minigpt.resume import find_checkpoint
from minigpt.runs import RunManager

METRICS = ("log", "eval", "sample")
PATIENCE_S = 0.05  # how long a child lives at most after its first sign


def settings(folder: Path, corpus: Path, max_steps: int = 1_000_000) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=60, max_seq_len=8, d_model=8, n_heads=2, n_layers=1, d_ff=16, batch_size=2, warmup_steps=1, max_steps=max_steps,
        log_interval=1, eval_interval=2, device="cpu", threads=1, data_path=str(corpus), checkpoint_dir=str(folder),
    )  # fmt: skip


def forked(work: Callable[[int], object]) -> tuple[int, int]:
    """Run `work` in a child, giving it a pipe to write to; return the child's number and the pipe to read from."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        try:
            work(writer)
        except BaseException:  # noqa: BLE001  a child must never go on as its parent
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    return child, reader


def killed_within(child: int, reader: int, seconds: float, sign: bytes = b"\n") -> bytes:
    """Wait for a sign from a child, then as long as given, kill it, and return all that it wrote to its pipe."""
    said = b""
    while sign not in said and (more := os.read(reader, 1 << 16)):
        said += more
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 1 << 16):
        said += more
    os.close(reader)
    return said


def readable(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except (CheckpointError, OSError):
        return False
    return True


def train_and_tell(home: Path, corpus: Path, writer: int) -> None:
    """Begin a run, or go on with it, saving as often as it can; acknowledge what was recorded."""
    train.SAVE_EVERY_S, train.SAVE_BETWEEN_S, train.SAVE_SHARE = 0.0, 0.0, torch.inf
    os.write(writer, b"\n")  # the moment of death may come while the run is still being prepared
    manager, folder = RunManager(home), home / "run"
    started = (folder / "config.json").exists()
    run = manager.reopen(folder) if started else manager.create(settings(folder, corpus), preset="quick")
    run.work(lambda event: os.write(writer, to_line(event).encode() + b"\n") if event["type"] in (*METRICS, "resume") else None)


def kill(place: Path, trials: int, seed: int) -> dict[str, Any]:
    """Kill one run `trials` times at random moments, looking at what is left each time as the next start would."""
    home, draw = place / "home", random.Random(seed)
    folder = home / "run"
    names = ("trials", "unreadable", "missing", "lost", "left_strays", "backwards", "not_interrupted", "not_resumable")
    found = dict.fromkeys((*names, "strays", "acknowledged", "resumes"), 0)
    step = -1
    while found["trials"] < trials:
        child, reader = forked(lambda writer: train_and_tell(home, place / "corpus.txt", writer))
        # One in four dies at any moment, while it is being prepared for example; the others while they train, save and rotate.
        sign = b'"step": 6' if step < 0 else b"\n" if draw.random() < 0.25 else b"resume"
        said = [line for line in killed_within(child, reader, draw.uniform(0, PATIENCE_S), sign).split(b"\n")[:-1] if line]
        found["trials"] += 1
        found["strays"] += len(list(folder.glob(".*.tmp")))
        kept = (folder / "metrics.jsonl").read_bytes().splitlines()
        found["lost"] += sum(line not in kept for line in said)
        found["acknowledged"] += len(said)
        found["resumes"] += any(json.loads(line)["type"] == "resume" for line in said)
        found["unreadable"] += sum(not readable(path) for path in folder.glob("*.safetensors"))
        found["missing"] += not (folder / "best.safetensors").is_file() or not (folder / "last.safetensors").is_file()
        manager = RunManager(home)
        manager.prepare()
        found["left_strays"] += len(list(folder.glob(".*.tmp")))
        line = manager.past()[0]
        found["not_interrupted"] += line.state != "interrupted"
        found["not_resumable"] += not line.resumable
        now = find_checkpoint(folder).step
        found["backwards"] += now < step
        step = now
    return {**found, "step": step}


def naive(place: Path, trials: int, seed: int) -> dict[str, Any]:
    """Kill a child that writes a checkpoint straight onto the only file there is."""
    draw, path = random.Random(seed), place / "naive.safetensors"
    trainer = train.Trainer(settings(place / "naive", place / "corpus.txt"), lambda _: None, StopSignal())
    trainer.save("best")
    data = (place / "naive" / "best.safetensors").read_bytes()

    def save_for_ever(writer: int) -> None:
        path.write_bytes(data)
        os.write(writer, b"\n")
        while True:
            path.write_bytes(data)

    unreadable = 0
    for _ in range(trials):
        killed_within(*forked(save_for_ever), draw.uniform(0, 0.005))
        unreadable += not readable(path)
    return {"trials": trials, "unreadable": unreadable}


def disk(place: Path) -> dict[str, Any]:
    """Let a save meet a disk that takes only so many bytes of a file, for seven sizes around that of the checkpoint."""
    folder, corpus = place / "disk", place / "corpus.txt"
    path = folder / "last.safetensors"
    train.time = SimpleNamespace(perf_counter=float)  # type: ignore[attr-defined,assignment]  # equal times make files of equal size

    def save(writer: int, limit: int) -> None:
        said: list[Any] = []
        trainer = train.Trainer(settings(folder, corpus), said.append, StopSignal())
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        trainer.tolerant_save("last")
        os.write(writer, json.dumps([event["message"] for event in said if event["type"] == "status" and event["phase"] == "saving"]).encode())

    def attempt(limit: int) -> dict[str, Any]:
        before = path.read_bytes() if path.exists() else b""
        child, reader = forked(lambda writer: save(writer, limit))
        os.waitpid(child, 0)
        said = json.loads(os.read(reader, 1 << 16) or b"null")
        os.close(reader)
        return {"said": said, "same": path.read_bytes() == before, "strays": len(list(folder.glob(".*.tmp"))), "readable": readable(path)}

    attempt(1 << 30)
    size, header = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    inode = path.stat().st_ino
    answers = [attempt(limit) for limit in (0, 1, header - 1, header + 1, size // 2, size - 1)]
    kept = path.stat().st_ino == inode
    return {"refused": answers, "kept": kept, "taken": attempt(size), "replaced": path.stat().st_ino != inode}


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory(place: Path, held: int) -> dict[str, Any]:
    """Let a run whose step needs more memory than there is meet that end, then train a small one in the same process."""
    made: list[Any] = []
    genuine = train.Trainer.loop

    def loop(self: train.Trainer) -> Any:
        made.extend([weakref.ref(self.model), self if held else None, resident()])
        return genuine(self)

    manager, corpus = RunManager(place / "home"), place / "corpus.txt"
    train.Trainer.loop = loop  # type: ignore[method-assign]
    before = resident()
    large = {"d_model": 1024, "d_ff": 4096, "n_layers": 4, "batch_size": 4096, "max_seq_len": 64}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (2 << 30), hard))
    gc.disable()  # whatever is freed goes at once, not when the collector happens to come
    run = manager.create(settings(place / "large", corpus).model_copy(update=large), preset="quick")
    run.work()
    freed, after = made[0]() is None, resident()
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    small = manager.create(settings(place / "small", corpus, max_steps=6), preset="quick")
    small.work()
    found = {"state": run.state, "error": run.error, "freed": freed, "grew": made[2] - before, "kept": after - before}
    return {**found, "then": [small.state, small.step], "files": sorted(path.name for path in run.folder.glob("*.safetensors"))}


def export(place: Path, trials: int, seed: int) -> dict[str, Any]:
    """Kill an export before and after the beginning of each of its files; at any moment it must have left nothing or all."""
    folder, checkpoint, draw = place / "exported", Path(__file__).parent.parent / "assets" / "example.safetensors", random.Random(seed)
    names = sorted(path.name for path in exporting.export(checkpoint, folder))
    found: dict[str, Any] = {"cut": 0, "whole": 0, "torn": []}
    genuine = exporting.write_atomically

    def export_and_tell(writer: int) -> None:
        def write_and_tell(path: Path, data: bytes) -> None:
            os.write(writer, b"\n")
            genuine(path, data)

        exporting.write_atomically = write_and_tell
        exporting.export(checkpoint, folder)

    for trial in range(trials):
        shutil.rmtree(folder, ignore_errors=True)
        killed_within(*forked(export_and_tell), draw.uniform(0, 0.001), sign=b"\n" * (trial % (len(names) + 1)))
        left = sorted(path.name for path in folder.iterdir()) if folder.exists() else None
        found["cut"] += left is None
        found["whole"] += left == names
        found["torn"] += [left] if left not in (None, names) else []
    shutil.rmtree(folder, ignore_errors=True)
    exporting.export(checkpoint, folder)
    return {**found, "strays": sorted(path.name for path in place.iterdir() if path != folder)}


def main(mode: str, place: Path, *numbers: int) -> None:
    """Make an experiment and print what was found."""
    torch.set_num_threads(1)
    runs._warm_up = lambda: None  # a thread would not survive the next fork
    warm_up()
    with contextlib.redirect_stdout(sys.stderr):
        result = {"kill": kill, "naive": naive, "export": export, "disk": disk, "memory": memory}[mode](place, *numbers)
    sys.stdout.write(json.dumps(result))
