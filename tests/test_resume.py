"""A run that was cut and gone on with equals one that was never cut, and what cannot be gone on with is refused in words."""

import itertools
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minigpt import cli, cli_flags, system
from minigpt import train as module
from minigpt.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError, ConfigError, DataError, MiniGPTError
from minigpt.history import read_history, replay
from minigpt.model import MiniGPT
from minigpt.optim import get_lr
from minigpt.resume import find_checkpoint, resumed_config
from minigpt.runs import Run, RunManager
from minigpt.train import Trainer, train

Event = dict[str, Any]
LIMIT_S = 60.0
STEPS = 12


class Crash(Exception):
    """Ends a run with nothing tidied up."""


def sitting(config: TransformerConfig, *, cut: int | None = None, crash: int | None = None, resume: Path | None = None) -> list[Event]:
    """Train until step `cut` was logged, or to the end, and return the events. `crash` ends it there and then, with nothing saved."""
    stop = threading.Event()
    events: list[Event] = []

    def callback(event: Any) -> None:
        events.append(dict(event))
        if event["type"] == "log" and event["step"] == crash:
            raise Crash
        if event["type"] == "log" and event["step"] == cut:
            stop.set()

    try:
        train(config, callback, stop, resume=resume)
    except Crash:
        assert crash is not None
    return events


def go_on(config: TransformerConfig, **named: Any) -> list[Event]:
    """Go on with the run in the folder of `config`."""
    folder = Path(config.checkpoint_dir)
    found = find_checkpoint(folder)
    (folder / "config.json").write_text(config.model_dump_json())
    return sitting(resumed_config(found, folder), resume=found.path, **named)


def told(events: list[Event]) -> dict[tuple[str, int], tuple[float, ...]]:
    """Return every number of the curves that must not depend on cuts, by kind and step."""
    names = {"log": ("loss", "lr", "grad_norm"), "eval": ("val_loss", "best_val_loss", "best_step")}
    return {(event["type"], event["step"]): tuple(event[name] for name in names[event["type"]]) for event in events if event["type"] in names}


def same(one: Path, other: Path) -> bool:
    """Tell whether two checkpoints agree in every bit of weights, optimizer and random states."""
    a, b = read_checkpoint(one), read_checkpoint(other)
    first, second = a.model.state_dict() | a.state, b.model.state_dict() | b.state
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.fixture
def config(tiny_config: Any, tmp_path: Path) -> Callable[..., TransformerConfig]:
    def make(name: str = "run", **changes: Any) -> TransformerConfig:
        return tiny_config(**{"dropout": 0.1, "max_steps": STEPS, "checkpoint_dir": str(tmp_path / name), **changes})

    return make


def last(config: TransformerConfig) -> Path:
    return Path(config.checkpoint_dir) / "last.safetensors"


# Bit for bit


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)], ids="threads {}".format)
@pytest.mark.parametrize(("optimizer", "arch"), [("adamw", "gpt2"), ("muon", "modern")])
def test_a_run_that_was_cut_equals_one_that_never_was(optimizer: str, arch: str, threads: int, config: Any) -> None:
    settings = {"optimizer": optimizer, "arch": arch, "threads": threads, "max_seq_len": 32, "d_model": 64}  # wide enough for bfloat16
    whole = sitting(config("whole", **settings))
    for cut in (1, 6, 10, STEPS - 1):
        name = f"cut at {cut}"
        first = sitting(config(name, **settings), cut=cut)
        assert max(event["step"] for event in first if event["type"] == "log") == cut
        second = go_on(config(name, **settings))
        assert min(event["step"] for event in second if event["type"] == "log") == cut + 1
        assert told(first) | told(second) == told(whole), name
        assert not told(first).keys() & told(second).keys(), f"{name}: something was measured twice"
        assert same(last(config(name)), last(config("whole"))), name


def test_a_run_cut_at_every_step_equals_one_that_never_was(config: Any) -> None:
    whole = sitting(config("whole", optimizer="muon"))
    events = sitting(config("cut", optimizer="muon"), cut=1)
    for step in range(2, STEPS):
        events += go_on(config("cut"), cut=step)
    events += go_on(config("cut"))
    assert told(events) == told(whole)
    assert same(last(config("cut")), last(config("whole")))


def test_a_run_that_crashed_equals_one_that_never_did(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sitting(config("whole"))
    monkeypatch.setattr(module, "SAVE_EVERY_S", 0.0)
    lost = sitting(config("cut"), crash=8)
    assert read_checkpoint(last(config("cut"))).step == 5
    again = go_on(config("cut"))
    assert told(lost) | told(again) == told(whole)
    assert min(step for _, step in told(again)) == 6
    assert same(last(config("cut")), last(config("whole")))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("log_interval", "saved", "before"), [(1, 8, 7), (4, 8, 4), (5, 1, None)])
def test_a_crash_between_evaluations_goes_back_no_further_than_the_last_save_and_equals_a_run_without_it(
    log_interval: int, saved: int, before: int | None, optimizer: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved at each logged step that is not evaluated anyway; at 5 and 10 it is."""
    settings = {"optimizer": optimizer, "log_interval": log_interval}
    whole = sitting(config("whole", **settings))
    monkeypatch.setattr(module, "SAVE_BETWEEN_S", 0.0)
    monkeypatch.setattr(module, "SAVE_SHARE", torch.inf)
    lost = sitting(config("cut", **settings), crash=9 if log_interval == 1 else 12 if log_interval == 4 else 10)
    found = read_checkpoint(last(config("cut")))
    assert (found.step, found.metadata["val_step"]) == (saved, 5 if saved > 5 else 0), "the loss is told to be of the step it was measured at"
    assert found.val_loss == told(lost)["eval", found.metadata["val_step"]][0]
    previous = last(config("cut")).with_name("previous.safetensors")
    assert (read_checkpoint(previous).step if previous.exists() else None) == before
    again = go_on(config("cut"))
    assert min(step for kind, step in told(again) if kind == "log") > saved
    assert told(lost) | told(again) == told(whole)
    assert same(last(config("cut")), last(config("whole")))


@pytest.mark.parametrize(("takes_s", "saves"), [(0, 16), (1, 16), (5, 4)])
def test_between_evaluations_it_is_saved_each_minute_unless_that_would_take_more_than_its_share(
    takes_s: int, saves: int, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(config(max_steps=1000, eval_interval=1000), lambda _: None, threading.Event())
    saved: list[str] = []
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def make_step() -> bool:
        now[0] += 1
        trainer.step += 1
        trainer.report(trainer.step, 2.0, 0.1, 1.0)
        return True

    def save(name: str) -> None:
        saved.append(name)
        now[0] += takes_s if name == "last" else 0

    monkeypatch.setattr(trainer, "make_step", make_step)
    monkeypatch.setattr(trainer, "save", save)
    monkeypatch.setattr(trainer, "sample", lambda _: None)
    trainer.loop()
    assert saved.count("last") == saves + 1, "the last one at the evaluation at the end"


def test_the_best_checkpoint_can_be_gone_on_from_too(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sitting(config("whole"))
    sitting(config("cut"), crash=8)
    assert not last(config("cut")).exists(), "nothing but the best was saved yet"
    assert told(go_on(config("cut"))).items() <= told(whole).items()
    assert same(last(config("cut")), last(config("whole")))


def forget_optimizer(trainer: Trainer) -> None:
    trainer.optimizer.state.clear()  # type: ignore[union-attr]


def forget_order_of_data(trainer: Trainer) -> None:
    trainer.text.train_loader.generator.manual_seed(trainer.config.seed)


def forget_dropout(trainer: Trainer) -> None:
    torch.manual_seed(trainer.config.seed)


@pytest.mark.parametrize("forget", [None, forget_optimizer, forget_order_of_data, forget_dropout])
def test_every_part_of_the_state_is_needed(forget: Callable[[Trainer], None] | None, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = module.restore

    def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
        genuine(trainer, checkpoint)
        if forget is not None:
            forget(trainer)

    monkeypatch.setattr(module, "restore", restore)
    sitting(config("whole"))
    sitting(config("cut"), cut=6)
    go_on(config("cut"))
    assert same(last(config("cut")), last(config("whole"))) == (forget is None)


def test_the_number_of_threads_is_the_one_the_run_began_with(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.device.TOO_SMALL_FOR_TWO", 0)
    monkeypatch.setattr("minigpt.device.WORTH_IT", 0.0)
    monkeypatch.setattr("minigpt.device.os.cpu_count", lambda: 2)
    sitting(config(threads=0), cut=3)
    monkeypatch.setattr("minigpt.device.WORTH_IT", 1e9)
    assert [event["threads"] for event in go_on(config(threads=0)) if event["type"] == "data"] == [2]


def test_what_a_stop_measures_on_more_text_counts_neither_for_the_best_nor_for_patience(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(*numbers: float) -> None:
        left = list(numbers)
        monkeypatch.setattr(module, "evaluate", lambda *_, **__: left.pop(0) if len(left) > 1 else left[0])

    settings = {"patience": 3, "eval_interval": 2, "max_steps": 40}
    checks = [5.0, 4.0, 4.1, 3.5, 3.6, 3.7, 3.8]
    script(*checks)
    whole = sitting(config("whole", **settings))
    script(*checks[:3], 1.0, 2.0, *checks[3:])  # the stop measures the last weights and the best ones
    first = sitting(config("cut", **settings), cut=5)
    assert first[-1]["val_loss"] == 1.0
    second = go_on(config("cut", **settings))
    assert (whole[-1]["reason"], second[-1]["reason"]) == ("early", "early")
    assert told(first) | told(second) == told(whole)


def test_a_run_that_ended_for_lack_of_patience_gets_it_back(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: 3.0)
    first = sitting(config(patience=2, eval_interval=2))
    assert (first[-1]["reason"], first[-1]["step"]) == ("early", 4)
    second = go_on(config(patience=2, eval_interval=2))
    assert (second[-1]["reason"], second[-1]["step"]) == ("early", 8)


# One curve


def test_the_curve_goes_on_without_a_gap_a_repeat_or_a_step_back(manager: RunManager, config: Any, tiny_text: str) -> None:
    plain = config().model_dump(exclude={"checkpoint_dir", "checkpoint_path", "data_path"})
    run = manager.create(TransformerConfig(**plain), preset="quick", text=tiny_text)
    run.work(lambda event: run.ask_to_stop() if event["type"] == "log" and event["step"] == 6 else None)
    assert (run.state, run.step) == ("stopped", 6)
    before = run.history.since({})["train"]
    again = manager.resume(run.id)
    assert again.ended.wait(LIMIT_S)
    assert (again.state, again.id, again.step, again.error) == ("finished", run.id, STEPS, "")
    for history in (again.history, read_history(run.folder / "metrics.jsonl")):
        assert history.series["train"].x == list(range(1, STEPS + 1))
        assert history.series["val"].x == [0, 5, 10, 12]
        assert history.bad_lines == 0
        seconds = history.to_frame().sort_values("step", kind="stable")["elapsed"].tolist()
        assert seconds == sorted(seconds)
        assert len({sample["step"] for sample in history.samples}) == len(history.samples)
        seen = history.since({"train": (before["e"], len(before["x"]))})["train"]
        assert seen["i"] == 0, "a reader of the old curve takes the new one whole"
    stored = read_checkpoint(run.folder / "last.safetensors").metadata["series"]
    assert stored["train"]["x"] == list(range(1, STEPS + 1))
    assert stored["val"]["x"] == [0, 5, 10, 12]


def test_the_speed_after_a_resume_is_that_of_its_own_steps(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))  # every step takes a second
    sitting(config(log_interval=10), crash=10)  # the best is of step 5, and the log before it of step 1
    resumed = go_on(config(log_interval=10))
    assert next(event["step"] for event in resumed if event["type"] == "resume") == 5
    assert [(event["step"], event["tokens_per_s"]) for event in resumed if event["type"] == "log"] == [(10, 64.0), (12, 64.0)]


def test_seconds_and_sample_times_go_on_where_they_were(config: Any) -> None:
    first = sitting(config(), cut=6)
    stored = read_checkpoint(last(config())).metadata
    events = go_on(config())
    assert next(event["elapsed"] for event in events if event["type"] == "log") >= stored["elapsed"] >= first[-1]["elapsed"]
    assert not [event for event in events if event["type"] == "sample" and event["step"] == 6 and event["elapsed"] < stored["elapsed"]]


# Extending, and lower rates


def test_a_finished_run_is_extended_along_the_longer_plan(manager: RunManager, config: Any) -> None:
    run = manager.create(config(max_epochs=1, max_steps=9), preset="quick")
    run.work()
    assert run.state == "finished"
    with pytest.raises(ConfigError, match=r"max_steps is 9; the run has made 9 steps already: to go on, try max_steps 18"):
        manager.reopen(run.folder)
    with pytest.raises(ConfigError, match="max_steps is 5; the run has made 9 steps already"):
        manager.reopen(run.folder, max_steps=5)
    with pytest.raises(ConfigError, match="max_steps is 0; it must be a whole number"):
        manager.reopen(run.folder, max_steps=0)
    longer = manager.reopen(run.folder, max_steps=18)
    longer.work()
    assert (longer.state, longer.step, longer.max_steps) == ("finished", 18, 18)
    rates = [get_lr(step, 2, 9 if step < 9 else 18, 0.01, 0.0) for step in range(18)]
    assert longer.history.series["lr"].x == list(range(1, 19))
    assert longer.history.series["lr"].y == pytest.approx(rates)
    assert json.loads((run.folder / "config.json").read_text())["max_steps"] == 18


def test_a_run_that_diverged_goes_on_from_finite_weights_with_a_third_of_the_rate(
    manager: RunManager, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, seen = MiniGPT.loss, 0

    def loss(self: MiniGPT, x: Tensor, y: Tensor) -> Tensor:
        nonlocal seen
        seen += self.training
        value = genuine(self, x, y)
        return value * torch.nan if self.training and seen == 7 else value

    monkeypatch.setattr(MiniGPT, "loss", loss)
    home = manager.home / "diverging"
    run = manager.create(config(checkpoint_dir=str(home), min_lr=0.005), preset="quick")
    run.work()
    assert (run.state, run.step) == ("diverged", 7)
    kept = read_checkpoint(home / "last.safetensors")
    assert kept.step == 6
    assert all(value.isfinite().all() for value in kept.model.parameters())
    line = manager.past()[0]
    assert (line.state, line.step, line.resumable) == ("diverged", 6, True)
    again = manager.resume("diverging", learning_rate=run.config.learning_rate / 3)
    assert again.ended.wait(LIMIT_S)
    assert (again.state, again.error, again.step) == ("finished", "", STEPS)
    assert again.history.series["train"].x == list(range(1, STEPS + 1))
    assert None not in again.history.series["train"].y
    stored = replay(read_checkpoint(home / "last.safetensors").metadata)
    assert [event["step"] for event in stored if event["type"] == "log"] == list(range(1, STEPS + 1))
    assert all(math.isfinite(event["loss"] or math.nan) for event in stored if event["type"] == "log")
    assert again.history.point("lr", 7) == pytest.approx(get_lr(6, 2, STEPS, 0.01 / 3, 0.01 / 3))


# Which file


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def unfinite(path: Path) -> None:
    checkpoint = read_checkpoint(path)
    checkpoint.model.embedding.weight.data[0, 0] = torch.inf
    made = Trainer(checkpoint.config.model_copy(update={"data_path": str(path.parent.parent / "corpus.txt")}), lambda _: None, threading.Event())
    save_checkpoint(checkpoint.model, made.optimizer, checkpoint.config, 1, None, path=path, generators={"data": torch.Generator()})


@pytest.mark.parametrize("harm", [spoil, unfinite, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_file_that_cannot_be_used_is_passed_over_and_that_is_said(harm: Callable[[Path], object], config: Any, manager: RunManager) -> None:
    sitting(config(), cut=7)
    folder = last(config()).parent
    assert find_checkpoint(folder).path.name == "last.safetensors"
    harm(last(config()))
    found = find_checkpoint(folder)
    assert found.path.name == "previous.safetensors"
    assert found.skipped.startswith("last.safetensors was skipped: ") == (harm is not Path.unlink)
    harm(folder / "previous.safetensors")
    assert find_checkpoint(folder).path.name == "best.safetensors"
    (folder / "config.json").write_text(config().model_dump_json())
    run = manager.reopen(folder)
    run.work()
    assert (run.state, run.note) == ("finished", run.skipped)
    assert len(run.skipped.split("; ")) == (2 if harm is not Path.unlink else 1)
    assert ("previous.safetensors was skipped" in run.skipped) == (harm is not Path.unlink)


def test_a_folder_without_any_checkpoint_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing here"):
        with pytest.raises(CheckpointError) as refused:
            find_checkpoint(place)
        assert str(refused.value) == f"there is no checkpoint at {place.name!r}: give the folder of a run, or one of its checkpoints"


@pytest.mark.parametrize("content", [b"", b"ROMEO: love\n" * 9, bytes(99)], ids=["empty", "text", "zeros"])
def test_a_file_that_is_no_checkpoint_is_called_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "exists.txt").write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        find_checkpoint(tmp_path / "exists.txt")
    assert str(refused.value) == "'exists.txt' is no checkpoint of MiniGPT, or a damaged one: give the folder of a run, or one of its checkpoints"


def test_weights_alone_are_refused(config: Any, tmp_path: Path) -> None:
    sitting(config(), cut=2)
    kept = read_checkpoint(last(config()))
    alone = save_checkpoint(kept.model, None, kept.config, 2, None, path=tmp_path / "alone.safetensors", tokenizer=kept.tokenizer)
    with pytest.raises(CheckpointError, match="weights alone, without the states of optimizer and random generators"):
        find_checkpoint(alone)


@pytest.mark.parametrize("missing", ["corpus", "checks", "next_sample", "elapsed"])
def test_a_file_that_lacks_a_fact_is_refused_in_one_sentence(missing: str, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Trainer.facts
    monkeypatch.setattr(Trainer, "facts", lambda self: {name: value for name, value in facts(self).items() if name != missing})
    sitting(config(), cut=3)
    with pytest.raises(CheckpointError, match=r"^this file does not hold all that a resume needs \(KeyError: "):
        go_on(config())


@pytest.mark.parametrize("fact", ["next_sample", "elapsed"])
@pytest.mark.parametrize("value", [-1, -1e9, 10**30, "x", True])
def test_a_file_that_says_what_no_run_can_is_refused_in_one_sentence(fact: str, value: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Trainer.facts
    monkeypatch.setattr(Trainer, "facts", lambda self: {**facts(self), fact: value})
    sitting(config(), cut=3)
    with pytest.raises(CheckpointError, match=rf"^this file does not hold all that a resume needs \(ValueError: .* {re.escape(str(value))}"):
        go_on(config())


def test_a_file_that_says_it_trained_for_ages_is_gone_on_with_at_once(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Trainer.facts
    monkeypatch.setattr(Trainer, "facts", lambda self: {**facts(self), "elapsed": 1e13})
    sitting(config(), cut=3)
    assert go_on(config())[-1]["reason"] == "finished"


def test_an_optimizer_of_another_shape_is_refused(config: Any) -> None:
    sitting(config(), cut=3)
    found = find_checkpoint(last(config()).parent)
    found.state["optim.0.exp_avg"] = torch.zeros(3, 5)
    trainer = Trainer(config(), lambda _: None, threading.Event())
    with pytest.raises(CheckpointError, match=r"optim\.0\.exp_avg has the wrong shape"):
        module.restore(trainer, found)


def test_another_text_is_refused_and_so_is_a_missing_one(config: Any, manager: RunManager, tmp_path: Path) -> None:
    sitting(config(), cut=4)
    before = last(config()).read_bytes()
    corpus = tmp_path / "corpus.txt"
    text = corpus.read_text(encoding="utf-8")
    corpus.write_text(text.replace("love", "hate"), encoding="utf-8")
    with pytest.raises(DataError, match=r"the text 'corpus.txt' is not the one that this run learned from \('corpus.txt'\)"):
        go_on(config())
    corpus.unlink()
    run = manager.reopen(last(config()).parent)
    run.work()
    assert run.state == "failed"
    assert "cannot be read" in run.error
    assert last(config()).read_bytes() == before
    corpus.write_text(text, encoding="utf-8")
    run = manager.reopen(last(config()).parent)
    run.work()
    assert (run.state, run.error) == ("finished", "")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_trains(manager: RunManager, config: Any) -> None:
    sitting(config(), cut=4)
    (last(config()).parent / "metrics.jsonl").mkdir()
    (last(config()).parent / "config.json").write_text(config().model_dump_json())
    before = last(config()).read_bytes()
    with pytest.raises(MiniGPTError, match=r"^the run's folder cannot be written \("):
        manager.reopen(last(config()).parent)
    assert last(config()).read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
@pytest.mark.parametrize("reader", [False, True], ids=["nobody reads", "somebody reads"])
def test_a_pipe_where_the_curves_belong_is_refused_and_holds_nobody_up(reader: bool, manager: RunManager, config: Any) -> None:
    sitting(config(), cut=4)
    pipe = last(config()).parent / "metrics.jsonl"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if reader else None
    asking: list[MiniGPTError] = []

    def ask() -> None:
        with pytest.raises(MiniGPTError, match=r"^the run's folder cannot be written \(it is not a regular file\)") as refused:
            manager.reopen(pipe.parent)
        asking.append(refused.value)

    (pipe.parent / "config.json").write_text(config().model_dump_json())
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LIMIT_S / 6)
    if descriptor is not None:
        os.close(descriptor)
    assert asking


def test_a_checkpoint_beside_another_program_s_settings_begins_a_run_of_its_own(manager: RunManager, config: Any, tmp_path: Path) -> None:
    sitting(config(), cut=4)
    export = tmp_path / "export"
    export.mkdir()
    (export / "last.safetensors").write_bytes(last(config()).read_bytes())
    (export / "config.json").write_text('{"model_type": "nanochat"}')
    for place in (export / "last.safetensors", export):
        run = manager.reopen(place)
        assert run.folder.parent == manager.home
        assert {path.name for path in export.iterdir()} == {"last.safetensors", "config.json"}
    assert (export / "config.json").read_text() == '{"model_type": "nanochat"}'


def test_a_folder_that_was_moved_goes_on_in_its_new_place(manager: RunManager, config: Any, tiny_text: str, tmp_path: Path) -> None:
    plain = config().model_dump(exclude={"checkpoint_dir", "checkpoint_path", "data_path"})
    run = manager.create(TransformerConfig(**plain), preset="quick", text=tiny_text)
    run.work(lambda event: run.ask_to_stop() if event["type"] == "log" and event["step"] == 6 else None)
    moved = tmp_path / "elsewhere"
    shutil.move(run.folder, moved)
    again = manager.reopen(moved)
    again.work()
    assert (again.state, again.error, again.preset, again.folder) == ("finished", "", "quick", moved)
    assert not run.folder.exists()
    assert read_checkpoint(moved / "best.safetensors").step <= STEPS


def test_a_file_that_lies_in_no_run_begins_one_of_its_own_with_the_curve_so_far(
    manager: RunManager, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigpt.corpus.BUILT_IN", tmp_path / "corpus.txt")
    sitting(config(data_path=""), cut=6)
    alone = tmp_path / "downloads" / "model.safetensors"
    alone.parent.mkdir()
    shutil.copy(last(config()), alone)
    run = manager.reopen(alone)
    run.work()
    assert (run.state, run.error) == ("finished", "")
    assert run.folder.parent == manager.home
    assert run.history.series["train"].x == list(range(1, STEPS + 1))
    assert run.history.series["val"].x == [0, 5, 10, 12]
    assert [path.name for path in alone.parent.iterdir()] == ["model.safetensors"]


# On the command line


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, manager: RunManager) -> None:
    monkeypatch.setattr(system, "on_termination", lambda _: None)
    monkeypatch.setattr(cli, "_quiet_log", lambda: None)
    monkeypatch.setenv("MINIGPT_HOME", str(manager.home))


def test_the_command_line_goes_on_with_a_folder_and_extends_it(
    quiet: None, config: Any, capsys: pytest.CaptureFixture[str], manager: RunManager
) -> None:
    run = manager.create(config(), preset="quick")
    run.work(lambda event: run.ask_to_stop() if event["type"] == "log" and event["step"] == 6 else None)
    assert cli.main(["train", "--resume", str(run.folder)]) == 0
    assert "finished after 12 of 12 steps" in capsys.readouterr().out
    assert cli.main(["train", "--resume", str(run.folder)]) == 2
    assert "max_steps is 12; the run has made 12 steps already" in capsys.readouterr().err
    weights = run.folder.parent / "weights.safetensors"
    file = str(run.folder / "last.safetensors")
    assert cli.main(["train", f"--resume={file}", "--max-steps", "15", "--weights", str(weights)]) == 0
    assert "finished after 15 of 15 steps" in capsys.readouterr().out
    assert weights.is_file()
    assert read_history(run.folder / "metrics.jsonl").series["train"].x == list(range(1, 16))
    assert cli.main(["train", f"--resume={file}", "--max-steps", "16", "--weights", file]) == 2
    assert "in the run's own folder: choose a place outside of it" in capsys.readouterr().err
    assert read_checkpoint(file).state


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume"], "--resume has no value"),
        (["--resume", ""], "--resume has no value; give it one: --resume VALUE"),
        (["--resume="], "--resume has no value"),
        (["--resume", "x", "--weights="], "--weights has no value"),
        (["--checkpoint-dir", ""], "--checkpoint-dir has no value"),
        (["--checkpoint_dir="], "--checkpoint-dir has no value"),
        (["--resume", "x", "--seed", "3"], "--seed cannot stand beside --resume, whose checkpoint has the settings; --max-steps and --weights can"),
        (["--resume", "x", "--preset", "quick"], "--preset cannot stand beside --resume"),
        (["--resume", "x", "--max-steps", "many"], "max_steps is 'many'; it must be a whole number"),
        (["--resume", "x", "--max-steps", "-5"], "max_steps is '-5'; it must be a whole number"),
        (["--resume", "x", "--sede", "3"], "--sede is not a flag of train"),
    ],
)
def test_flags_that_do_not_go_with_a_resume_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cli_flags.parse_train(cli.Parser(prog="minigpt train", allow_abbrev=False), arguments)
    assert words in str(refused.value)


def test_a_run_that_is_not_there_is_refused_on_the_command_line(quiet: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["train", "--resume", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err == "there is no checkpoint at 'nowhere': give the folder of a run, or one of its checkpoints\n"


def test_a_resumed_run_is_known_by_its_event(config: Any) -> None:
    sitting(config(), cut=4)
    resumed = [event for event in go_on(config()) if event["type"] == "resume"]
    assert [(event["step"], event["max_steps"]) for event in resumed] == [(4, STEPS)]


def test_a_second_run_of_the_same_folder_is_the_same_run(manager: RunManager, config: Any) -> None:
    run = manager.create(config(), preset="quick")
    run.work(lambda event: run.ask_to_stop() if event["type"] == "log" and event["step"] == 3 else None)
    again = manager.reopen(run.folder)
    assert isinstance(again, Run)
    assert (again.id, again.preset, again.started_at) == (run.id, "quick", run.started_at)
