import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minigpt import run as one_run
from minigpt import runs, system
from minigpt import train as trainer
from minigpt.config import TransformerConfig
from minigpt.data import MAX_TEXT
from minigpt.errors import ConfigError, DataError, MiniGPTError
from minigpt.events import Event
from minigpt.export import export
from minigpt.header import our_metadata, read_header
from minigpt.history import read_history, to_line
from minigpt.runs import RunBusy, RunManager
from minigpt.stopper import Stopper

LIMIT_S = 60.0
EXAMPLE = Path(__file__).parent.parent / "assets" / "example.safetensors"
LONG = {"max_steps": 1_000_000, "log_interval": 1, "eval_interval": 1_000_000}
TRAINING: Event = {"type": "status", "phase": "training", "message": "training"}


def tiny(**changes: Any) -> TransformerConfig:
    """Make settings whose run takes a few hundredths of a second; unlike `tiny_config`'s they choose no folder."""
    settings: dict[str, Any] = {
        "vocab_size": 60, "max_seq_len": 8, "d_model": 8, "n_heads": 2, "n_layers": 1, "d_ff": 16, "dropout": 0.0,
        "batch_size": 2, "learning_rate": 0.01, "min_lr": 0.0, "warmup_steps": 1, "max_steps": 6, "log_interval": 1, "eval_interval": 3,
        "device": "cpu", "threads": 1,
    }  # fmt: skip
    return TransformerConfig(**{**settings, **changes})


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def complete(reason: str = "finished", step: int = 6) -> dict[str, Any]:
    return {"type": "complete", "step": step, "max_steps": 6, "val_loss": 3.0, "best_val_loss": 3.0, "elapsed": 1.0, "reason": reason}


def state_on_disk(folder: Path) -> dict[str, Any]:
    state = json.loads((folder / "state.json").read_bytes())
    assert isinstance(state, dict)
    return state


def metadata_of(path: Path) -> dict[str, Any]:
    metadata = our_metadata(read_header(path))
    assert metadata is not None
    return metadata


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# From start to end


def test_a_run_goes_from_preparing_through_training_to_finished(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    states = [run.state]
    on_disk = [state_on_disk(run.folder)["state"]]

    def watch(_event: Event) -> None:
        states.append(run.state)
        on_disk.append(state_on_disk(run.folder)["state"])

    run.work(watch)
    assert list(dict.fromkeys(states)) == ["preparing", "training", "finished"]
    assert on_disk == states
    assert not run.is_live
    assert (run.step, run.max_steps, run.error, run.note) == (6, 6, "", "")


def test_a_finished_run_leaves_settings_events_state_and_both_checkpoints(manager: RunManager, tiny_text: str) -> None:
    events: list[Any] = []
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    run.work(events.append)
    assert names(run.folder) == {
        "config.json",
        "metrics.jsonl",
        "state.json",
        "own text.txt",
        "best.safetensors",
        "last.safetensors",
        "previous.safetensors",
    }
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines == [to_line(event) for event in events]
    assert read_history(run.folder / "metrics.jsonl").since({}) == run.history.since({})
    state = state_on_disk(run.folder)
    assert (state["state"], state["pid"], state["preset"], state["error"], state["step"]) == ("finished", os.getpid(), "quick", "", 6)
    assert metadata_of(run.folder / "last.safetensors")["step"] == 6
    assert metadata_of(run.folder / "best.safetensors")["val_loss"] == pytest.approx(run.history.last["complete"]["best_val_loss"])


def test_the_settings_are_kept_as_they_were_asked_for(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(seed=5), preset="quick", text=tiny_text)
    kept = TransformerConfig.model_validate_json((run.folder / "config.json").read_bytes())
    assert kept == tiny(seed=5, checkpoint_dir=str(run.folder), data_path=str(run.folder / "own text.txt"))
    assert (run.folder / "own text.txt").read_text(encoding="utf-8") == tiny_text


def test_a_run_trains_on_a_thread_of_its_own(manager: RunManager, tiny_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def train(*arguments: Any, **named: Any) -> object:
        threads.append(threading.current_thread())
        return trainer.train(*arguments, **named)

    monkeypatch.setattr(one_run, "train", train)
    run = manager.start(tiny(), preset="quick", text=tiny_text)
    assert manager.latest is run
    assert run.ended.wait(LIMIT_S)
    assert (run.state, run.is_live, manager.active) == ("finished", False, None)
    assert [thread.name for thread in threads] == [f"run-{run.id}"]


def test_a_second_start_is_told_which_run_is_live(manager: RunManager, tiny_text: str) -> None:
    first = manager.start(tiny(**LONG), preset="quick", text=tiny_text)
    until(lambda: first.step)
    with pytest.raises(RunBusy, match=first.id) as busy:
        manager.start(tiny(), preset="quick", text=tiny_text)
    assert busy.value.run is first
    assert manager.active is first
    assert names(manager.home) == {first.id}


def test_a_run_can_be_started_when_the_one_before_has_ended(manager: RunManager, tiny_text: str) -> None:
    first = manager.start(tiny(**LONG), preset="quick", text=tiny_text)
    first.ask_to_stop()
    assert first.ended.wait(LIMIT_S)
    second = manager.start(tiny(), preset="quick", text=tiny_text)
    assert second.ended.wait(LIMIT_S)
    assert (second.state, manager.latest) == ("finished", second)
    assert second.folder != first.folder


def test_a_run_for_which_there_is_no_thread_does_not_block_the_next(manager: RunManager, tiny_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(MiniGPTError, match="thread"):
            manager.start(tiny(), preset="quick", text=tiny_text)
    assert manager.active is None
    assert manager.start(tiny(), preset="quick", text=tiny_text).ended.wait(LIMIT_S)


def test_a_preset_s_name_never_leads_out_of_the_home(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="../../Über all/", text=tiny_text)
    assert run.folder.parent == manager.home
    assert run.folder.resolve().parent == manager.home.resolve()


# Stop


@pytest.mark.parametrize("asked", [1, 5])
def test_a_stop_ends_as_stopped_with_both_checkpoints_however_often_it_is_asked(asked: int, manager: RunManager, tiny_text: str) -> None:
    run = manager.start(tiny(**LONG), preset="quick", text=tiny_text)
    until(lambda: run.step > 2)
    for _ in range(asked):
        run.ask_to_stop()
    assert run.state in ("stopping", "stopped")
    assert run.ended.wait(LIMIT_S)
    run.ask_to_stop()
    end = run.history.last["complete"]
    assert (run.state, run.error, end["reason"]) == ("stopped", "", "stopped")
    assert state_on_disk(run.folder)["state"] == "stopped"
    assert metadata_of(run.folder / "last.safetensors")["step"] == end["step"] == run.step
    assert metadata_of(run.folder / "best.safetensors")["val_loss"] is not None
    kinds = [json.loads(line)["type"] for line in (run.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert kinds.count("complete") == 1
    assert kinds[-1] == "complete"


def test_a_stop_while_preparing_leaves_nothing(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    run.ask_to_stop()
    run.work()
    assert (run.state, run.error, run.is_live) == ("stopped", "", False)
    assert list(manager.home.iterdir()) == []


def test_a_stop_that_comes_after_the_end_does_not_change_it(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)

    def stop_late(event: Event) -> None:
        if event["type"] == "complete":
            assert run.is_live
            run.ask_to_stop()

    run.work(stop_late)
    assert run.stop.is_set()
    assert run.state == "finished"
    assert state_on_disk(run.folder)["state"] == "finished"


def test_a_run_that_stops_does_not_go_back_to_training(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    run.ask_to_stop()
    run.record(TRAINING)
    assert run.state == "stopping"
    assert state_on_disk(run.folder)["state"] == "stopping"
    run.record(complete("stopped"))
    run.record(TRAINING)
    assert run.state == "stopped"
    assert state_on_disk(run.folder)["state"] == "stopped"


def test_the_file_tells_the_ending_even_if_a_stop_is_being_written_meanwhile(
    manager: RunManager, tiny_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    writing, go_on = threading.Event(), threading.Event()
    write = system.write_atomically

    def slow_write(path: Path, data: bytes) -> None:
        if b'"stopping"' in data:
            writing.set()
            assert go_on.wait(LIMIT_S)
        write(path, data)

    monkeypatch.setattr(system, "write_atomically", slow_write)
    stopper = threading.Thread(target=run.ask_to_stop)
    trainer = threading.Thread(target=run.record, args=(complete(),))
    stopper.start()
    assert writing.wait(LIMIT_S)
    trainer.start()
    trainer.join(0.2)  # it has to wait for the other; one that does not is done long before
    go_on.set()
    for thread in (stopper, trainer):
        thread.join(LIMIT_S)
    assert run.state == "finished"
    assert state_on_disk(run.folder)["state"] == "finished"


@pytest.mark.parametrize("event", [TRAINING, complete()], ids=["beginning", "ending"])
def test_a_signal_while_the_state_is_being_written_stops_the_run(
    event: Event, manager: RunManager, tiny_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the command line, where the handler interrupts the thread that trains."""
    run, stopper = manager.create(tiny(), preset="quick", text=tiny_text), Stopper()
    stopper.watch(run)
    write = system.write_atomically
    monkeypatch.setattr(system, "write_atomically", lambda path, data: (stopper.ask(), write(path, data)))
    trainer = threading.Thread(target=run.record, args=(event,), daemon=True)
    trainer.start()
    trainer.join(LIMIT_S)
    assert not trainer.is_alive()
    assert run.stop.is_set()
    assert state_on_disk(run.folder)["state"] == run.state


@pytest.mark.parametrize(("reason", "state"), [("finished", "finished"), ("early", "finished"), ("stopped", "stopped"), ("diverged", "diverged")])
def test_every_reason_to_end_has_its_state(reason: str, state: str, manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    run.record(TRAINING)
    run.record(complete(reason))
    assert run.state == state
    assert state_on_disk(run.folder)["state"] == state


def test_shutting_down_saves_the_live_run(manager: RunManager, tiny_text: str) -> None:
    run = manager.start(tiny(**LONG), preset="quick", text=tiny_text)
    until(lambda: run.step > 2)
    manager.shutdown(LIMIT_S)
    assert (run.is_live, run.state, manager.active) == (False, "stopped", None)
    assert run.stop.hurry.is_set()
    assert metadata_of(run.folder / "last.safetensors")["step"] == run.history.last["complete"]["step"] > 2
    assert state_on_disk(run.folder)["state"] == "stopped"
    manager.shutdown(LIMIT_S)


def test_once_the_program_is_being_ended_nothing_starts(manager: RunManager, tiny_text: str) -> None:
    run = manager.start(tiny(), preset="quick", text=tiny_text)
    assert run.ended.wait(LIMIT_S)
    manager.shutdown(LIMIT_S)
    for act in (lambda: manager.start(tiny(), preset="quick", text=tiny_text), lambda: manager.resume(run.id, max_steps=9)):
        with pytest.raises(MiniGPTError, match="the program is being ended: start again when it is back"):
            act()
    assert [path.name for path in manager.home.iterdir()] == [run.id]


# What goes wrong


@pytest.fixture
def short_text(tmp_path: Path) -> str:
    """Return the path of a text that turns out to be too short only when it is read."""
    path = tmp_path / "text.txt"
    path.write_text("ROMEO: love")
    return str(path)


def test_a_text_that_is_too_short_fails_with_the_reason_and_leaves_no_folder(manager: RunManager, short_text: str) -> None:
    run = manager.start(tiny(data_path=short_text), preset="quick")
    assert run.ended.wait(LIMIT_S)
    assert run.state == "failed"
    assert "use a longer text" in run.error
    assert list(manager.home.iterdir()) == []


def test_a_chosen_folder_loses_only_what_the_failed_run_wrote_and_can_be_used_again(
    manager: RunManager, tmp_path: Path, tiny_text: str, short_text: str
) -> None:
    folder = tmp_path / "chosen"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    run = manager.start(tiny(checkpoint_dir=str(folder), data_path=short_text), preset="quick")
    assert run.ended.wait(LIMIT_S)
    assert run.state == "failed"
    assert names(folder) == {"notes.txt"}
    again = manager.start(tiny(checkpoint_dir=str(folder)), preset="quick", text=tiny_text)
    assert again.ended.wait(LIMIT_S)
    assert again.state == "finished"
    assert (folder / "notes.txt").read_text() == "mine"
    assert {"best.safetensors", "last.safetensors", "config.json"} <= names(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there_is_refused_before_a_folder_is_made(manager: RunManager, tiny_text: str) -> None:
    with pytest.raises(ConfigError, match="device is cuda; this machine has cpu"):
        manager.start(tiny(device="cuda"), preset="quick", text=tiny_text)
    assert not list(manager.home.glob("*"))


@pytest.mark.parametrize("name", ["own text.txt", "metrics.jsonl", "state.json"])
def test_a_person_s_file_survives_a_failed_run_even_if_it_has_one_of_our_names(
    name: str, manager: RunManager, tmp_path: Path, short_text: str
) -> None:
    folder = tmp_path / "chosen"
    folder.mkdir()
    (folder / name).write_text("mine")
    try:
        run = manager.create(tiny(checkpoint_dir=str(folder), data_path=short_text), preset="quick")
    except ConfigError:
        pass  # refused before anything was touched
    else:
        run.work()
        assert run.state == "failed"
    assert (folder / name).is_file()
    assert (folder / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "best.safetensors", "last.safetensors", "other.safetensors"])
def test_a_chosen_folder_that_holds_a_run_is_refused_and_stays_as_it_is(name: str, manager: RunManager, tmp_path: Path, tiny_text: str) -> None:
    folder = tmp_path / "chosen"
    folder.mkdir()
    (folder / name).write_bytes(b"kept")
    with pytest.raises(ConfigError, match=r"'chosen' holds a run already.*choose a new folder"):
        manager.start(tiny(checkpoint_dir=str(folder)), preset="quick", text=tiny_text)
    assert names(folder) == {name}
    assert (folder / name).read_bytes() == b"kept"
    assert manager.latest is None


@pytest.mark.skipif(sys.platform == "win32", reason="no file locks there")
def test_of_two_who_begin_in_one_folder_at_once_the_second_is_refused(
    manager: RunManager, tmp_path: Path, short_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused, made = one_run.Run.write_config, list[ConfigError](), list[one_run.Run]()

    def begin(seed: int) -> None:
        try:
            made.append(RunManager(manager.home).create(tiny(checkpoint_dir=str(tmp_path / "chosen"), data_path=short_text, seed=seed), preset="x"))
        except ConfigError as error:
            refused.append(error)

    second, exclusive, tried = threading.Thread(target=begin, args=(2,)), system.exclusive, threading.Event()

    def knock(folder: Path) -> AbstractContextManager[None]:
        tried.set()
        return exclusive(folder)

    def write_late(run: one_run.Run) -> None:
        if run.config.seed == 1:
            tried.clear()
            second.start()
            until(lambda: tried.is_set() or not second.is_alive())  # the other waits, or is done
        write(run)

    monkeypatch.setattr(system, "exclusive", knock)
    monkeypatch.setattr(one_run.Run, "write_config", write_late)
    begin(1)
    second.join(LIMIT_S)
    assert [run.config.seed for run in made] == [1]
    assert "holds a run already" in str(refused[0])
    assert json.loads((tmp_path / "chosen" / "config.json").read_bytes())["seed"] == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("boom"), "the training broke off (ZeroDivisionError: boom)"),
        (KeyError("best"), "the training broke off (KeyError: 'best')"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1099511627776 bytes."), "this machine ran out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), "this machine ran out of memory"),
        (MemoryError(), "this machine ran out of memory"),
        (OSError(28, "No space left on device"), "the disk refused (No space left on device)"),
        (PermissionError(13, "Permission denied"), "the disk refused (Permission denied)"),
        (OSError(), "the disk refused (OSError)"),
        (DataError("the text has 3 tokens: use a longer text"), "the text has 3 tokens: use a longer text"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_whatever_breaks_the_trainer_ends_the_run_as_failed_with_words(
    error: Exception, words: str, manager: RunManager, tiny_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(one_run, "train", broken)
    run = manager.start(tiny(), preset="quick", text=tiny_text)
    assert run.ended.wait(LIMIT_S)
    assert run.state == "failed"
    assert run.error.startswith(words)
    assert "unharmed" not in run.error  # nothing had been saved
    assert manager.active is None
    assert list(manager.home.iterdir()) == []


def test_a_run_that_fails_on_the_way_keeps_what_it_saved_and_says_so_in_its_state(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)

    def broken(event: Event) -> None:
        if event["type"] == "log" and event["step"] == 5:
            raise ValueError("x" * 1000)

    run.work(broken)
    assert run.state == "failed"
    assert "ValueError" in run.error
    assert len(run.error) < 300
    state = state_on_disk(run.folder)
    assert (state["state"], state["error"], state["step"]) == ("failed", run.error, 5)
    assert [saved.kind for saved in manager.checkpoints()] == ["best"]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the folder", "elsewhere"])
def test_a_disk_that_refuses_leaves_what_was_saved_and_the_run_says_so(
    elsewhere: bool, manager: RunManager, tmp_path: Path, tiny_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = tmp_path / "best.safetensors"

    def broken(config: TransformerConfig, *_: object, **__: object) -> None:
        Path(config.checkpoint_path).write_bytes(b"saved")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(one_run, "train", broken)
    run = manager.create(tiny(**{"checkpoint_path": str(best)} if elsewhere else {}), preset="quick", text=tiny_text)
    run.work()
    assert run.error == "the disk refused (No space left on device); what was saved before is unharmed"


def test_metrics_that_cannot_be_written_do_not_end_the_run(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    (run.folder / "metrics.jsonl").mkdir()
    run.work()
    assert (run.state, run.error) == ("finished", "")
    assert run.note.startswith("the metrics could not be written: ")
    assert run.history.series["train"].x == [1, 2, 3, 4, 5, 6]
    assert [saved.kind for saved in manager.checkpoints()] == ["best", "last"]


def test_a_state_that_cannot_be_written_does_not_end_the_run(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    (run.folder / "state.json").unlink()
    (run.folder / "state.json").mkdir()
    run.work()
    assert run.state == "finished"
    assert {"best.safetensors", "last.safetensors"} <= names(run.folder)


def test_a_checkpoint_that_could_not_be_saved_is_noted_until_training_says_something_new(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    run.record(TRAINING)
    run.record({"type": "status", "phase": "saving", "message": "could not save"})
    assert (run.state, run.message, run.note) == ("training", "training", "could not save")
    run.record({"type": "status", "phase": "evaluating", "message": "saved"})
    assert (run.state, run.message, run.note) == ("training", "saved", "")


# What is refused before there is a run


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ROMEO: love", "the text has 3 tokens, .* use a longer text"),
        ("", "the text is empty"),
        (" \n\t ", "the text is empty"),
        ("x" * (MAX_TEXT + 1), "the text has 20,000,001 characters; at most 20,000,000"),
        ("\N{PERFORMING ARTS}" * 18_000_000, "the text has 69 MB; at most 64 MB can be read: use a part of it"),
        ("ROMEO: love\n" * 100 + "\0", "the text holds zero bytes, so it is a binary file"),
    ],
    ids=["short", "empty", "blank", "long", "wide", "binary"],
)
def test_a_text_that_cannot_be_trained_on_is_refused_before_a_folder_is_made(text: str, words: str, manager: RunManager) -> None:
    with pytest.raises(DataError, match=words):
        manager.start(tiny(), preset="quick", text=text)
    assert not manager.home.exists()
    assert manager.latest is None


def test_settings_that_do_not_fit_are_refused_before_a_folder_is_made(manager: RunManager, tiny_text: str) -> None:
    with pytest.raises(ConfigError, match="n_heads is 3"):
        manager.start(tiny(n_heads=3), preset="quick", text=tiny_text)
    assert not manager.home.exists()


@pytest.mark.parametrize("inside", [".", "runs", "a/b"])
def test_a_home_that_cannot_be_written_is_refused_with_what_to_do(inside: str, tmp_path: Path, tiny_text: str) -> None:
    (tmp_path / "file").write_text("in the way")
    manager = RunManager(tmp_path / "file" / inside)
    with pytest.raises(ConfigError, match=r"cannot be made .* set MINIGPT_HOME to a folder that can be written"):
        manager.start(tiny(), preset="quick", text=tiny_text)
    assert manager.latest is None


@pytest.mark.parametrize("name", ["file", "file/inside", "x" * 300], ids=["a file", "inside a file", "too long"])
def test_a_chosen_folder_that_cannot_be_made_is_refused_in_words(name: str, manager: RunManager, tmp_path: Path, tiny_text: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError) as refused:
        manager.start(tiny(checkpoint_dir=str(tmp_path / name)), preset="quick", text=tiny_text)
    assert re.fullmatch(f"checkpoint_dir is {str(tmp_path / name)!r}, which cannot be a run's folder \\(.+\\): choose another", str(refused.value))
    assert (tmp_path / "file").read_text() == "in the way"


# The list of checkpoints


def folder_of(home: Path, name: str, age_s: float = 0.0, **files: dict[str, Any] | bytes | None) -> Path:
    """Make a run's folder; a file is its metadata, other bytes, or None for a safetensors file of somebody else."""
    folder = home / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"checkpoint_dir": "where it was made"}')
    for kind, content in files.items():
        path = folder / f"{kind}.safetensors"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            save_file({"a": torch.zeros(2)}, path, metadata={} if content is None else {"minigpt": json.dumps(content)})
    os.utime(folder / "config.json", (1e9 - age_s, 1e9 - age_s))
    return folder


def test_checkpoints_are_listed_newest_run_first_and_best_before_last(manager: RunManager) -> None:
    facts = {"step": 7, "val_loss": 3.5}
    folder_of(manager.home, "zebra", 300, last=facts, best=facts)
    folder_of(manager.home, "apple", 100, last=facts, best=facts, previous=facts)
    folder_of(manager.home, "mango", 200, last=facts)
    found = manager.checkpoints()
    assert [saved.id for saved in found] == ["apple/best", "apple/last", "mango/last", "zebra/best", "zebra/last"]
    assert all((saved.step, saved.val_loss) == (7, 3.5) for saved in found)
    assert all(saved.path == manager.home / saved.run / f"{saved.kind}.safetensors" for saved in found)
    assert all((saved.size_bytes, saved.saved_at) == (saved.path.stat().st_size, saved.path.stat().st_mtime) for saved in found)
    for limit in range(7):
        assert manager.checkpoints(limit) == found[:limit]


def test_files_that_are_no_readable_checkpoints_of_ours_are_left_out(manager: RunManager) -> None:
    good = {"step": 7, "val_loss": 3.5}
    folder_of(manager.home, "foreign", best=None, last=good)
    folder_of(manager.home, "damaged", best=b"garbage", last=b"")
    cut = folder_of(manager.home, "cut", best=good) / "best.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (folder_of(manager.home, "folder") / "best.safetensors").mkdir()
    save_file({"a": torch.zeros(2)}, folder_of(manager.home, "words") / "best.safetensors", metadata={"minigpt": "not JSON"})
    (folder_of(manager.home, "no run", best=good) / "config.json").unlink()
    (manager.home / "config.json").write_text("{}")
    assert [saved.id for saved in manager.checkpoints()] == ["foreign/last"]


@pytest.mark.parametrize(("value", "step", "loss"), [("7", None, None), (True, None, None), (None, None, None), ([7], None, None), (7, 7, 7.0)])
def test_facts_of_a_wrong_type_are_listed_as_not_recorded(value: Any, step: int | None, loss: float | None, manager: RunManager) -> None:
    folder_of(manager.home, "run", best={"step": value, "val_loss": value})
    (saved,) = manager.checkpoints()
    assert (saved.step, saved.val_loss) == (step, loss)
    assert type(saved.val_loss) in (float, type(None))


def test_a_folder_of_another_program_or_of_an_export_is_no_run_and_is_left_alone(manager: RunManager) -> None:
    theirs, ours = manager.home / "gpt2", manager.home / "exported"
    theirs.mkdir(parents=True)
    (theirs / "config.json").write_text('{"model_type": "gpt2"}')
    (theirs / "model.safetensors").write_bytes(b"weights")
    export(EXAMPLE, ours, "safetensors")
    export(EXAMPLE, manager.home / "for transformers")
    before = {path: path.read_bytes() for path in manager.home.rglob("*") if path.is_file()}
    manager.prepare()
    assert (manager.past(), manager.checkpoints()) == ([], [])
    for act in (lambda: manager.rename("gpt2", "mine"), lambda: manager.delete("gpt2"), lambda: manager.delete("exported")):
        with pytest.raises(MiniGPTError, match="there is no such run"):
            act()
    assert {path: path.read_bytes() for path in manager.home.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lost", [{"state.json"}, {"state.json", "metrics.jsonl"}, set()], ids=["state", "state and curves", "settings damaged"])
def test_a_run_that_lost_one_of_its_own_files_is_still_found(lost: set[str], manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    run.work()
    for name in lost:
        (run.folder / name).unlink()
    if not lost:
        (run.folder / "config.json").write_text("{")
    assert [line.id for line in RunManager(manager.home).past()] == [run.id]


def test_a_home_that_is_not_there_has_no_checkpoints(manager: RunManager) -> None:
    assert manager.checkpoints() == []


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        ("..", "best"), (".", "best"), ("", "best"), ("../outside", "best"), ("run/../../outside", "best"), ("run/", "best"), ("run/.", "best"),
        ("/etc", "best"), ("*", "best"), ("r?n", "best"), ("run\0", "best"), ("RUN", "best"), ("run", "../../outside/best"), ("run", "../run/best"),
        ("run", "previous"), ("run", "best.safetensors"), ("run", ""), ("run", "example"), ("run", "*"), ("outside", "best"),
    ],
)  # fmt: skip
def test_names_of_a_checkpoint_are_never_used_as_a_path(run: str, kind: str, manager: RunManager, tmp_path: Path) -> None:
    facts = {"step": 7, "val_loss": 3.5}
    folder_of(manager.home, "run", best=facts, previous=facts)
    outside = folder_of(tmp_path, "outside", best=facts)
    assert manager.checkpoint("run", "best") is not None
    assert manager.checkpoint(run, kind) is None
    assert manager.checkpoint(str(outside), kind) is None
    assert manager.checkpoint(str(manager.home / "run"), kind) is None


# After a process that died


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Return the number of a process that lives as long as the test."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    yield child.pid
    child.communicate(b"\n")


@pytest.fixture(scope="module")
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def with_state(home: Path, name: str, content: object) -> Path:
    path = folder_of(home, name) / "state.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.mark.parametrize("state", ["preparing", "training", "stopping"])
def test_a_run_whose_process_died_is_marked_as_interrupted(state: str, manager: RunManager, dead_pid: int) -> None:
    path = with_state(manager.home, "run", {"state": state, "pid": dead_pid, "preset": "quick", "step": 5})
    manager.prepare()
    assert json.loads(path.read_bytes()) == {"state": "interrupted", "pid": dead_pid, "preset": "quick", "step": 5}


def test_a_run_of_another_process_that_lives_stays_as_it_is(manager: RunManager, sleeper: int) -> None:
    path = with_state(manager.home, "run", {"state": "training", "pid": sleeper})
    manager.prepare()
    assert json.loads(path.read_bytes())["state"] == "training"


def test_our_own_number_counts_as_dead_because_a_restarted_container_gives_it_out_again(manager: RunManager) -> None:
    path = with_state(manager.home, "run", {"state": "training", "pid": os.getpid()})
    manager.prepare()
    assert json.loads(path.read_bytes())["state"] == "interrupted"


class Door:
    """A lock that tells when somebody wants in."""

    def __init__(self) -> None:
        self.lock, self.tried = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        self.tried.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_run_that_is_being_made_never_looks_interrupted(manager: RunManager, tiny_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    asking = threading.Thread(target=lambda: told.extend(line.state for line in manager.past(1)))
    write, door = one_run.Run.write_config, Door()

    def write_and_be_asked(run: one_run.Run) -> None:
        write(run)
        door.tried.clear()
        asking.start()
        until(lambda: door.tried.is_set() or told)  # who asks now waits, or has been answered

    monkeypatch.setattr(manager, "_lock", door)

    monkeypatch.setattr(one_run.Run, "write_config", write_and_be_asked)
    manager.start(tiny(**LONG), preset="quick", text=tiny_text)
    asking.join(LIMIT_S)
    assert told
    assert set(told) <= {"preparing", "training"}


@pytest.mark.parametrize("state", ["finished", "stopped", "diverged", "failed", "interrupted"])
def test_a_run_that_has_ended_stays_as_it_is(state: str, manager: RunManager, dead_pid: int) -> None:
    path = with_state(manager.home, "run", {"state": state, "pid": dead_pid})
    before = path.read_bytes()
    manager.prepare()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"", b"not JSON", b'{"state": "training", "pi', b"\x80\xff", b"null", b"3", b'"training"', b'["training"]', b"[" * 100_000,
        b'{"state": ["training"]}',
        b'{"state": "training", "pid": "abc"}', b'{"state": "training", "pid": null}', b'{"state": "training", "pid": [1]}',
        b'{"state": "training", "pid": 1e400}', b'{"state": "training", "pid": NaN}', b'{"state": "training", "pid": -1}',
        b'{"state": "training", "pid": 99999999999999999999999}', b'{"state": "training", "pid": 1' + b"0" * 5000 + b"}", None,
    ],
    ids=lambda content: "missing" if content is None else content[:40].decode(errors="replace"),
)  # fmt: skip
def test_a_damaged_state_stops_nothing_and_costs_no_other_run_anything(content: bytes | None, manager: RunManager, dead_pid: int) -> None:
    damaged = with_state(manager.home, "damaged", content or b"")
    if content is None:
        damaged.unlink()
    os.utime(damaged.parent / "config.json", (2e9, 2e9))  # it comes first
    other = with_state(manager.home, "other", {"state": "training", "pid": dead_pid})
    manager.prepare()
    assert json.loads(other.read_bytes())["state"] == "interrupted"


def test_strays_of_dead_processes_are_swept_and_those_of_live_ones_kept(manager: RunManager, sleeper: int, dead_pid: int) -> None:
    folder = folder_of(manager.home, "run")
    kept = {f".last.safetensors.{sleeper}.0123abcd.tmp", "notes.tmp", "config.json"}
    swept = {f".last.safetensors.{dead_pid}.0123abcd.tmp", f".state.json.{os.getpid()}.0123abcd.tmp", f".x.{10**30}.0123abcd.tmp"}
    for name in (kept | swept) - {"config.json"}:
        (folder / name).write_text("half")
    manager.prepare()
    assert names(folder) == kept


def test_what_a_person_called_temporary_is_not_swept(manager: RunManager, dead_pid: int) -> None:
    folder = folder_of(manager.home, "run")
    kept = {".x.tmp", ".notes.tmp", f".{dead_pid}.0123abcd.tmp", f".a.{dead_pid}.0123ABCD.tmp", f".a.{dead_pid}.0123abcd1.tmp", ".a.b.0123abcd.tmp"}
    for name in kept:
        (folder / name).write_text("mine")
    (folder / ".draft.tmp").mkdir()
    manager.prepare()
    assert names(folder) == kept | {".draft.tmp", "config.json"}


def test_preparing_a_home_that_is_not_there_makes_nothing(manager: RunManager) -> None:
    manager.prepare()
    assert not manager.home.exists()


def test_preparing_wakes_the_trainer_in_the_background(manager: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[str] = []
    done = threading.Event()

    def wake() -> None:
        woken.append(threading.current_thread().name)
        done.set()

    monkeypatch.setattr(runs, "_warm_up", wake)
    manager.prepare()
    assert done.wait(LIMIT_S)
    assert woken == ["warm-up"]


def test_a_run_is_at_step_0_of_its_plan_until_the_trainer_says_otherwise(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(tiny(), preset="quick", text=tiny_text)
    assert (run.step, run.max_steps) == (0, 6)
    run.record({"type": "eval", "step": 3, "max_steps": 4, "val_loss": 3.0, "val_perplexity": 20.0, "best_val_loss": 3.0, "elapsed": 1.0})
    assert (run.step, run.max_steps) == (3, 4)
