"""What a run must survive: kills, full disks, folders that vanish, damaged logs, wrong clocks, readers that never come."""

import errno
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest

from minigpt import system
from minigpt import train as module
from minigpt.checkpoint import read_checkpoint
from minigpt.history import MAX_POINTS, History, read_history, to_line
from minigpt.runs import RunManager

LIMIT_S = 60.0
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")


def crashes(place: Path, mode: str, *numbers: int) -> dict[str, Any]:
    from crashes import main  # which needs modules that Windows has not

    done = forks.run(main, mode, place, *numbers, cwd=place, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def place(tmp_path: Path, tiny_text: str) -> Path:
    (tmp_path / "corpus.txt").write_text(tiny_text, encoding="utf-8")
    return tmp_path


# Kills


@posix
@pytest.mark.slow
def test_a_run_killed_a_hundred_times_loses_nothing_and_arrives(place: Path) -> None:
    found = crashes(place, "kill", 100, 20)
    harm = {name: found[name] for name in ("unreadable", "missing", "lost", "left_strays", "backwards", "not_interrupted", "not_resumable")}
    assert harm == dict.fromkeys(harm, 0)
    assert found["trials"] == 100
    assert found["resumes"] >= 50, "too few were killed while they trained to prove anything"
    assert found["acknowledged"] > 100
    assert found["step"] > 6


@posix
@pytest.mark.slow
def test_a_save_without_care_does_not_survive_the_same_kills(place: Path) -> None:
    assert crashes(place, "naive", 40, 20)["unreadable"] >= 1


# Disks and folders


@posix
@pytest.mark.slow
def test_a_full_disk_is_told_once_and_costs_neither_the_run_nor_the_older_file(place: Path) -> None:
    found = crashes(place, "disk")
    told = "could not save: File too large; the older checkpoint is unharmed, training goes on"
    assert found["refused"] == [{"said": [told], "same": True, "strays": 0, "readable": True}] * 6
    assert found["kept"]
    assert found["replaced"]
    assert (found["taken"]["said"], found["taken"]["strays"], found["taken"]["readable"]) == ([], 0, True)


@pytest.mark.parametrize("taken", [0, 1, 20])
def test_a_row_that_the_disk_takes_only_a_part_of_is_reported_and_spoils_no_other(
    taken: int, manager: RunManager, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = manager.create(tiny_config(), preset="quick")
    genuine = os.write

    def full(descriptor: int, data: bytes) -> int:
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return genuine(descriptor, data[:taken])

    for step in range(1, 10):
        with monkeypatch.context() as patch:
            if step % 3 == 0:
                patch.setattr(system.os, "write", full)
            run.record(log(step))
        assert (run.note == "the metrics could not be written: No space left on device") == (step >= 3)
    assert run.history.series["train"].x == list(range(1, 10)), "the page still has them"
    read = read_history(run.folder / "metrics.jsonl")
    assert (read.series["train"].x, read.bad_lines) == ([1, 2, 4, 5, 7, 8], 0)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("in the way")


def block_the_checkpoint(folder: Path) -> None:
    (folder / "last.safetensors").unlink()
    (folder / "last.safetensors").mkdir()
    (folder / "last.safetensors" / "x").write_text("in the way")


@pytest.mark.parametrize(
    ("harm", "state", "words"),
    [
        (remove, "finished", ""),
        (replace_by_a_file, "failed", r"the disk refused \([^)]+\)"),
        (block_the_checkpoint, "failed", r"the disk refused \([^)]+\); what was saved before is unharmed"),  # the best
    ],
)
def test_a_folder_that_can_no_longer_be_written_does_not_stop_the_training(
    harm: Callable[[Path], None], state: str, words: str, manager: RunManager, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY_S", 0.0)
    run = manager.create(tiny_config(), preset="quick")
    notes: list[str] = []

    def at_step_6(event: Any) -> None:
        if event["type"] == "log" and event["step"] == 6:
            harm(run.folder)
        notes.append(run.note)

    run.work(at_step_6)
    assert run.step == 12, "all steps were made"
    assert run.history.series["train"].x == list(range(1, 13))
    assert run.state == state
    assert re.fullmatch(words, run.error), run.error
    if state == "failed":
        assert any(note.startswith("could not save: ") for note in notes)
    else:
        assert read_checkpoint(run.folder / "last.safetensors").step == 12
        assert [(line.state, line.resumable) for line in RunManager(manager.home.parent).past()] == [("finished", True)]


# Memory


@posix
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("held", [0, 1], ids=["as it is", "somebody keeps hold of the trainer"])
def test_a_run_for_which_there_is_not_enough_memory_says_so_and_gives_back_what_it_had(held: int, place: Path) -> None:
    found = crashes(place, "memory", held)
    assert (found["state"], found["error"]) == ("failed", "this machine ran out of memory: try a smaller batch, width or context")
    assert found["files"] == ["best.safetensors"], "what was known at step 0"
    assert found["then"] == ["finished", 6], "a small run finds room"
    assert found["freed"] == (found["kept"] < found["grew"] // 2) == (not held)


# Damaged logs


def log(step: int, loss: float = 2.0) -> dict[str, Any]:
    return {"type": "log", "step": step, "max_steps": 9, "loss": loss, "perplexity": 7.4, "lr": 0.1, "grad_norm": 1.0, "elapsed": step / 10}


def row(step: int, loss: float = 2.0) -> bytes:
    return to_line(log(step, loss)).encode() + b"\n"


GOOD = b"".join(row(step) for step in range(1, 6))
DAMAGE: dict[str, tuple[bytes, list[int], int]] = {  # the file, the steps that must come back, the lines that are bad
    "an empty file": (b"", [], 0),
    "half a last line": (GOOD + row(6)[:-25], [1, 2, 3, 4, 5], 1),
    "no newline at the end": (GOOD + row(6)[:-1], [1, 2, 3, 4, 5, 6], 0),
    "a block of zeros": (GOOD + bytes(512) + b"\n" + row(6), [1, 2, 3, 4, 5, 6], 1),
    "garbage in the middle": (GOOD + b"#!garbage\n{}\n[]\n" + row(6), [1, 2, 3, 4, 5, 6], 3),
    "a step told twice": (GOOD + row(5, 9.0) + row(6), [1, 2, 3, 4, 5, 6], 0),
    "steps that go back": (GOOD + b'{"type": "resume", "step": 2}\n' + row(3) + row(4), [1, 2, 3, 4], 0),
    "numbers that are none": (GOOD + row(6).replace(b"2.0", b"NaN") + row(7).replace(b"2.0", b"1e999"), [1, 2, 3, 4, 5], 2),
    "a line of a megabyte": (GOOD + b'{"type": "log", "junk": "' + b"x" * (1 << 20) + b'"}\n' + row(6), [1, 2, 3, 4, 5, 6], 1),
    "a mark of byte order and carriage returns": (b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + row(6), [1, 2, 3, 4, 5, 6], 0),
    "two writers in one line": (GOOD + row(6)[:-1] + row(7) + row(8), [1, 2, 3, 4, 5, 8], 1),
    "bytes of another kind of file": (GOOD + bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"") + b"\n" + row(6), [1, 2, 3, 4, 5, 6], 1),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_log_keeps_its_good_rows_and_counts_the_bad_ones(kind: str, manager: RunManager, tiny_config: Any) -> None:
    content, steps, bad = DAMAGE[kind]
    run = manager.create(tiny_config(checkpoint_dir=str(manager.home / "run")), preset="quick")
    (run.folder / "metrics.jsonl").write_bytes(content)
    found = RunManager(manager.home).run("run")
    assert found is not None
    history = found.history
    assert (history.series["train"].x, history.bad_lines) == (steps, bad)
    assert history.to_frame()["step"].tolist() == steps
    if kind == "a step told twice":
        assert history.point("train", 5) == 9.0, "the later row holds"


def test_a_log_cut_in_a_line_is_gone_on_with_from_a_line_of_its_own(manager: RunManager, tiny_config: Any) -> None:
    run = manager.create(tiny_config(), preset="quick")
    run.work(lambda event: run.ask_to_stop() if event["type"] == "log" and event["step"] == 6 else None)
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(row(7)[:30])
    again = manager.reopen(run.folder)
    again.work()
    read = read_history(run.folder / "metrics.jsonl")
    assert (read.series["train"].x, read.bad_lines) == (list(range(1, 13)), 1)


# Clocks


@pytest.mark.parametrize("jump_s", [-86_400.0, 10 * 365.25 * 86_400.0, None], ids=["a day back", "ten years on", "stands still"])
def test_a_clock_that_jumps_changes_nothing(jump_s: float | None, manager: RunManager, tiny_config: Any, tmp_path: Path) -> None:
    plain = manager.create(tiny_config(checkpoint_dir=str(tmp_path / "plain")), preset="quick")
    plain.work()
    run = manager.create(tiny_config(checkpoint_dir=str(tmp_path / "jumping")), preset="quick")
    genuine = time.time
    frozen = genuine()

    with pytest.MonkeyPatch.context() as patch:

        def jump(event: Any) -> None:
            if event["type"] == "log" and event["step"] == 6:
                patch.setattr(time, "time", (lambda: frozen) if jump_s is None else (lambda: genuine() + jump_s))

        run.work(jump)
        line = RunManager(tmp_path).run("jumping")
    assert line is not None
    assert (run.state, line.state) == ("finished", "finished")
    for name in ("train", "val", "lr"):
        assert (run.history.series[name].x, run.history.series[name].y) == (plain.history.series[name].x, plain.history.series[name].y)
    seconds = run.history.to_frame()["elapsed"].tolist()
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] <= seconds[-1] < LIMIT_S
    assert {path.name for path in run.folder.iterdir()} == {path.name for path in plain.folder.iterdir()}


# Readers


def test_five_thousand_events_that_nobody_reads_hold_up_nobody_and_are_all_there_for_a_late_reader(manager: RunManager, tiny_config: Any) -> None:
    run = manager.create(tiny_config(max_steps=10_000), preset="quick")
    threads = threading.active_count()
    for step in range(1, 5001):
        run.record(log(step, 4.0 - step / 5000))
    assert threading.active_count() == threads, "nothing waits in the background"
    late = run.history.since({})["train"]
    assert (late["x"][0], len(late["x"]) <= MAX_POINTS) == (1, True)
    assert len(run.history.to_frame()) == 5000
    assert len((run.folder / "metrics.jsonl").read_bytes().splitlines()) == 5000


def test_a_reader_in_the_middle_of_a_look_does_not_hold_up_the_trainer(manager: RunManager, tiny_config: Any) -> None:
    """A reader gets copies: it may take as long as it likes over them."""
    run = manager.create(tiny_config(max_steps=10_000), preset="quick")
    run.record(log(1))
    seen, frame = run.history.since({}), run.history.to_frame()
    run.record(log(2))
    assert (seen["train"]["x"], frame["step"].tolist()) == ([1], [1])
    assert isinstance(run.history, History)
    assert run.history.series["train"].x == [1, 2]
