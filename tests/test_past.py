"""The list of runs: what it says of each, and that names from a page reach nothing but the runs that are listed."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from minigpt import system
from minigpt.config import TransformerConfig
from minigpt.errors import MiniGPTError
from minigpt.runs import PastRun, Run, RunBusy, RunManager

LIMIT_S = 60.0


@pytest.fixture
def settings(tiny_config: Any, tmp_path: Path) -> Any:
    def make(name: str = "run", **changes: Any) -> TransformerConfig:
        return tiny_config(**{"checkpoint_dir": str(tmp_path / "home" / name), **changes})

    return make


def done(manager: RunManager, config: TransformerConfig, cut: int | None = None) -> Run:
    run = manager.create(config, preset="quick")
    run.work(lambda event: run.ask_to_stop() if event["type"] == "log" and event["step"] == cut else None)
    return run


def endless(manager: RunManager, settings: Any) -> Run:
    """Start a run that goes on until it is stopped, and wait for its first checkpoint."""
    run = manager.start(settings("live", max_steps=1_000_000, eval_interval=1_000_000), preset="quick")
    deadline = time.monotonic() + LIMIT_S
    while not (run.folder / "best.safetensors").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return run


def test_a_line_of_the_list_tells_what_the_run_came_to(manager: RunManager, settings: Any) -> None:
    run = done(manager, settings(), cut=6)
    end = run.history.last["complete"]
    expected = PastRun(
        id="run",
        name="run",
        preset="quick",
        state="stopped",
        step=6,
        max_steps=12,
        val_loss=end["val_loss"],
        best_val_loss=end["best_val_loss"],
        started_at=run.started_at,
        error="",
        resumable=True,
        parameters=run.history.last["data"]["parameters"],
        tokenizer="word",
    )
    assert manager.past() == [expected]
    assert RunManager(manager.home).past() == [expected]


def test_the_newest_come_first_and_only_as_many_as_asked_for(manager: RunManager, settings: Any) -> None:
    for number, name in enumerate("abc"):
        manager.create(settings(name), preset="quick")
        os.utime(manager.home / name / "config.json", (number, number))
    assert [run.id for run in manager.past()] == ["c", "b", "a"]
    assert [run.id for run in manager.past(limit=2)] == ["c", "b"]
    assert [run.resumable for run in manager.past()] == [False] * 3


def test_the_run_at_work_is_told_as_it_is_now(manager: RunManager, settings: Any) -> None:
    run = endless(manager, settings)
    line = manager.past()[0]
    assert (line.id, line.state, line.max_steps, line.resumable) == ("live", "training", 1_000_000, False)
    assert line.val_loss == run.history.last["eval"]["val_loss"]
    assert json.loads((run.folder / "state.json").read_text())["step"] <= line.step <= run.step


def test_a_run_whose_process_died_is_listed_as_interrupted_and_can_be_gone_on_with(manager: RunManager, settings: Any) -> None:
    folder = done(manager, settings(), cut=6).folder
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "state": "training", "step": 4}))
    line = RunManager(manager.home).past()[0]
    assert (line.state, line.step, line.resumable) == ("interrupted", 6, True)
    manager._latest = None
    again = manager.resume("run")
    assert again.ended.wait(LIMIT_S)
    assert manager.past()[0].state == "finished"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"state": 3, "step": "x", "started_at": [], "max_steps": 1e400}', b'{"state": "nonsense"}', None])
def test_a_damaged_state_costs_the_list_nothing(content: bytes | None, manager: RunManager, settings: Any) -> None:
    folder = done(manager, settings(), cut=6).folder
    (folder / "state.json").unlink() if content is None else (folder / "state.json").write_bytes(content)
    (folder / "config.json").write_bytes(b"{")
    line = RunManager(manager.home).past()[0]
    assert (line.state, line.step, line.name, line.resumable) == ("interrupted", 6, "run", True)
    opened = RunManager(manager.home).run("run")
    assert opened is not None
    assert (opened.state, opened.step, opened.max_steps) == ("interrupted", 6, 12)


def test_a_run_of_the_past_is_opened_with_its_curves(manager: RunManager, settings: Any) -> None:
    run = done(manager, settings(), cut=6)
    other = RunManager(manager.home)
    opened = other.run("run")
    assert opened is not None
    assert (opened.id, opened.state, opened.step, opened.max_steps, opened.is_live) == ("run", "stopped", 6, 12, False)
    assert opened.config == run.config
    assert opened.history.series["train"].y == run.history.series["train"].y
    assert other.run("run") is opened, "an unchanged folder is read once"
    (run.folder / "metrics.jsonl").write_bytes((run.folder / "metrics.jsonl").read_bytes() + b"{half a li")
    os.utime(run.folder / "metrics.jsonl", (1, 1))
    again = other.run("run")
    assert again is not None
    assert again.history.bad_lines == 1
    assert other.run("nothing") is None


def test_the_latest_run_is_itself(manager: RunManager, settings: Any) -> None:
    run = endless(manager, settings)
    assert manager.run("live") is run


HOSTILE = ["", ".", "..", "../run", "run/../run", "/etc", "run/", "*", "no such run", "run\x00", "x" * 5000]


def test_an_id_is_never_used_as_a_path(manager: RunManager, settings: Any, tmp_path: Path) -> None:
    folder = done(manager, settings(), cut=6).folder
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for run_id in HOSTILE:
        assert manager.run(run_id) is None, run_id
        for act in (manager.delete, manager.resume, lambda name: manager.rename(name, "new")):
            with pytest.raises(MiniGPTError, match="there is no such run; it may have been deleted"):
                act(run_id)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before, run_id
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("given", "name"),
    [("first try", "first try"), ("  a \n\t b ", "a b"), ("x" * 100, "x" * 60), ("\u202eevil\x07", "\ufffdevil\ufffd"), ("", "run"), (" \n", "run")],
)
def test_a_name_is_cleaned_kept_and_survives_a_resume(given: str, name: str, manager: RunManager, settings: Any) -> None:
    done(manager, settings(), cut=6)
    manager.rename("run", given)
    assert manager.past()[0].name == name
    again = manager.resume("run")
    assert again.ended.wait(LIMIT_S)
    assert (manager.past()[0].name, manager.past()[0].state) == (name, "finished")


@pytest.mark.parametrize("given", ["first", " first ", "second"], ids=["its name", "its name with spaces", "its folder"])
def test_a_name_that_another_run_has_is_refused(given: str, manager: RunManager, settings: Any) -> None:
    for folder in ("one", "second"):
        done(manager, settings(folder), cut=6)
    manager.rename("second", "first")
    with pytest.raises(MiniGPTError, match=f"another run is called “{given.strip()}” already: choose a different name"):
        manager.rename("one", given)
    manager.rename("second", "first")  # its own
    assert {line.id: line.name for line in manager.past()} == {"one": "one", "second": "first"}


def test_a_run_at_work_can_be_renamed_but_neither_deleted_nor_resumed(manager: RunManager, settings: Any) -> None:
    done(manager, settings("old"), cut=6)
    run = endless(manager, settings)
    manager.rename("live", "my run")
    assert {line.id: line.name for line in manager.past()} == {"live": "my run", "old": "old"}
    for start in (lambda: manager.resume("live"), lambda: manager.resume("old")):
        with pytest.raises(RunBusy) as refused:
            start()
        assert refused.value.run is run
    saved = manager.checkpoint("live", "best")
    assert saved is not None
    for remove in (lambda: manager.delete("live"), lambda: manager.delete_checkpoint(saved)):
        with pytest.raises(MiniGPTError, match="run live is training: stop it first"):
            remove()
    assert saved.path.exists()
    manager.delete("old")
    manager.shutdown(LIMIT_S)
    assert [(line.id, line.name, line.state) for line in manager.past()] == [("live", "my run", "stopped")]


def test_a_run_of_another_process_is_only_looked_at(manager: RunManager, settings: Any) -> None:
    folder = done(manager, settings(), cut=6).folder
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "state": "training", "pid": os.getppid(), "born": system.process_birth(os.getppid())}))
    assert (manager.past()[0].state, manager.past()[0].resumable) == ("training", False)
    saved = manager.checkpoints()[0]
    acts: list[Any] = [
        lambda: manager.resume("run"), lambda: manager.delete("run"), lambda: manager.rename("run", "x"), lambda: manager.delete_checkpoint(saved),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(MiniGPTError, match="run run is training in another process: stop it there first"):
            act()
    assert saved.path.exists()


def test_a_process_to_which_a_dead_one_s_number_was_given_again_is_not_taken_for_it(manager: RunManager, settings: Any) -> None:
    folder = done(manager, settings(), cut=6).folder
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "state": "training", "pid": os.getppid(), "born": "12"}))
    assert (manager.past()[0].state, manager.past()[0].resumable) == ("interrupted", True)
    manager.rename("run", "free again")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells a dead process from a living one before its parent asks")
def test_a_dead_process_that_its_parent_has_not_asked_about_does_not_train(manager: RunManager, settings: Any) -> None:
    folder = done(manager, settings(), cut=6).folder
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        state = json.loads((folder / "state.json").read_text())
        born = system.process_birth(process.pid)
        (folder / "state.json").write_text(json.dumps({**state, "state": "training", "pid": process.pid, "born": born}))
        assert manager.past()[0].state == "training"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert system.process_birth(process.pid) == born
        assert (manager.past()[0].state, manager.past()[0].resumable) == ("interrupted", True)


def test_a_run_that_ended_here_and_trains_elsewhere_is_not_renamed_or_deleted(manager: RunManager, settings: Any) -> None:
    run = manager._latest = done(manager, settings(), cut=6)
    state = {**json.loads((run.folder / "state.json").read_text()), "state": "training", "pid": os.getppid()}
    (run.folder / "state.json").write_text(json.dumps({**state, "born": system.process_birth(os.getppid())}))
    before = (run.folder / "state.json").read_bytes()
    for act in (lambda: manager.rename("run", "hello"), lambda: manager.delete("run")):
        with pytest.raises(MiniGPTError, match="is training in another process"):
            act()
    assert (run.folder / "state.json").read_bytes() == before


def test_a_run_that_ended_here_and_was_gone_on_with_elsewhere_is_told_as_its_folder_tells_it(manager: RunManager, settings: Any) -> None:
    run = manager._latest = done(manager, settings(), cut=6)
    assert manager.latest is run
    assert manager.run("run") is run
    elsewhere = RunManager(manager.home).reopen(run.folder, max_steps=20)
    elsewhere.work()
    told = [manager.latest, manager.run("run")]
    assert [(seen and (seen.state, seen.step, seen.max_steps)) for seen in told] == [("finished", 20, 20)] * 2
    state = {**json.loads((run.folder / "state.json").read_text()), "state": "training", "pid": os.getppid()}
    (run.folder / "state.json").write_text(json.dumps({**state, "born": system.process_birth(os.getppid())}))
    system.append_line(run.folder / "metrics.jsonl", json.dumps({"type": "log", "step": 21, "max_steps": 30, "loss": 3.0}))
    assert manager.latest is not None
    assert (manager.latest.state, manager.latest.step, manager.latest.max_steps) == ("training", 21, 30)
    (run.folder / "state.json").write_text(json.dumps({**state, "state": "stopped"}))
    assert manager.latest is manager.latest, "it is not read again while nobody writes"
    assert manager.active is None
    manager.delete("run")
    assert manager.latest is None


def test_a_run_of_this_process_is_told_from_memory_whatever_it_writes_itself(manager: RunManager, settings: Any) -> None:
    run = endless(manager, settings)
    manager.rename("live", "my run")
    assert manager.latest is run
    manager.shutdown(LIMIT_S)
    assert manager.latest is run
    manager.rename("live", "my other run")
    assert manager.latest is run
    assert run.name == "my other run"
    run.folder.rename(run.folder.with_name("gone"))
    assert manager.latest is run


def test_deleting_takes_the_folder_and_nothing_else(manager: RunManager, settings: Any, tmp_path: Path) -> None:
    run = done(manager, settings(), cut=6)
    manager._latest = run
    done(manager, settings("other"), cut=6)
    manager.delete("run")
    assert not run.folder.exists()
    assert manager.latest is None
    assert [line.id for line in manager.past()] == ["other"]


def test_a_link_to_a_folder_elsewhere_is_not_followed_by_a_deletion(manager: RunManager, settings: Any, tmp_path: Path) -> None:
    outside = done(manager, settings("x", checkpoint_dir=str(tmp_path / "outside")), cut=6).folder
    manager.home.mkdir(exist_ok=True)
    try:
        (manager.home / "link").symlink_to(outside)
    except OSError:
        pytest.skip("no links here")
    with pytest.raises(MiniGPTError, match="run link cannot be deleted"):
        manager.delete("link")
    assert (outside / "last.safetensors").is_file()


def test_two_resumes_at_once_start_one_run(manager: RunManager, settings: Any) -> None:
    run = done(manager, settings(max_steps=100_000), cut=2)
    outcomes: list[object] = []

    def click() -> None:
        try:
            outcomes.append(manager.resume(run.id))
        except RunBusy as busy:
            outcomes.append(busy)

    clicks = [threading.Thread(target=click) for _ in range(4)]
    for thread in clicks:
        thread.start()
    for thread in clicks:
        thread.join(LIMIT_S)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Run", "RunBusy", "RunBusy", "RunBusy"]
