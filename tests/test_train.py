import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt import generate
from minigpt import train as module
from minigpt.checkpoint import read_checkpoint
from minigpt.config import TransformerConfig
from minigpt.data import TokenDataset, ValLoader, create_datasets
from minigpt.errors import ConfigError, DataError, RunStopped
from minigpt.events import CompleteEvent, DataEvent, EvalEvent, LogEvent, SampleEvent, StatusEvent, StopSignal, perplexity
from minigpt.header import our_metadata, read_header
from minigpt.model import MiniGPT
from minigpt.optim import FiniteGuard, get_lr, warm_up
from minigpt.tokenizer import TextTokenizer
from minigpt.train import Trainer, evaluate, train

Event = dict[str, Any]
Run = tuple[MiniGPT, TextTokenizer, list[Event]]

NEEDED = {
    "log": {"step", "max_steps", "loss", "perplexity", "lr", "grad_norm", "elapsed"},
    "eval": {"step", "max_steps", "val_loss", "val_perplexity", "best_val_loss", "elapsed"},
    "complete": {"step", "max_steps", "val_loss", "val_perplexity", "best_val_loss", "elapsed", "reason"},
    "status": {"phase", "message"},
    "sample": {"step", "text", "prompt"},
    "data": {"corpus", "vocab_size", "unigram_loss", "uniform_loss"},
}
DECLARED = {"log": LogEvent, "eval": EvalEvent, "complete": CompleteEvent, "status": StatusEvent, "sample": SampleEvent, "data": DataEvent}


def run(config: TransformerConfig, on_event: Callable[[Event], object] | None = None, stop: threading.Event | None = None) -> Run:
    events: list[Event] = []

    def callback(event: Any) -> None:
        events.append(dict(event))
        if on_event is not None:
            on_event(event)

    model, tokenizer = train(config, callback, stop)
    return model, tokenizer, events


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["type"] == kind]


def saved(config: TransformerConfig, name: str) -> dict[str, Any]:
    metadata = our_metadata(read_header(Path(config.checkpoint_dir) / f"{name}.safetensors"))
    assert metadata is not None
    return metadata


def losses(events: list[Event]) -> list[tuple[float, float]]:
    return [(event["loss"], event["grad_norm"]) for event in of(events, "log")]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let evaluation answer with the numbers given; the last one for ever."""

    def script(*numbers: float) -> None:
        left = list(numbers)

        def answer(*_: Any, **__: Any) -> float:
            return left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(module, "evaluate", answer)

    return script


@pytest.fixture
def spoiled_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[MiniGPT, Tensor], Tensor]], None]:
    """Let the loss of one training step pass through a function of the test."""
    genuine = MiniGPT.loss

    def spoil(number: int, change: Callable[[MiniGPT, Tensor], Tensor]) -> None:
        seen = 0

        def loss(self: MiniGPT, x: Tensor, y: Tensor) -> Tensor:
            nonlocal seen
            seen += self.training
            value = genuine(self, x, y)
            return change(self, value) if self.training and seen == number else value

        monkeypatch.setattr(MiniGPT, "loss", loss)

    return spoil


# What the callback hears


def test_events_are_plain_dicts_with_the_keys_promised(tiny_config: Any) -> None:
    _, _, events = run(tiny_config())
    assert {event["type"] for event in events} == set(NEEDED)
    for event in events:
        kind = event["type"]
        assert NEEDED[kind] <= set(event) <= set(get_type_hints(DECLARED[kind])), kind
        json.dumps(event, allow_nan=False)
        for key, value in event.items():
            assert type(value) in (str, int, float), (kind, key)
            if key.endswith("perplexity"):
                assert value == pytest.approx(math.exp(min(event["loss" if kind == "log" else "val_loss"], 20.0)))


def test_events_come_in_order_and_the_end_comes_last_and_once(tiny_config: Any) -> None:
    _, _, events = run(tiny_config())
    kinds = [event["type"] for event in events]
    assert kinds[0] == "status"
    assert kinds.index("data") < kinds.index("eval") < kinds.index("sample") < kinds.index("log")
    assert kinds.count("complete") == 1
    assert kinds[-1] == "complete"
    times = [event["elapsed"] for event in events if "elapsed" in event]
    assert times == sorted(times)
    assert {event["phase"] for event in of(events, "status")} >= {"preparing", "training", "evaluating"}


def test_logs_and_evaluations_come_at_their_intervals_and_at_both_ends(tiny_config: Any) -> None:
    _, _, events = run(tiny_config(max_steps=12, log_interval=5, eval_interval=5))
    assert [event["step"] for event in of(events, "log")] == [1, 5, 10, 12]
    assert [event["step"] for event in of(events, "eval")] == [0, 5, 10, 12]
    assert of(events, "sample")[0]["step"] == 0
    assert of(events, "sample")[-1]["step"] == 12
    assert {event["max_steps"] for event in events if "max_steps" in event} == {12}


def test_the_curve_starts_at_guessing(tiny_config: Any) -> None:
    _, _, events = run(tiny_config())
    data = of(events, "data")[0]
    assert of(events, "eval")[0]["val_loss"] == pytest.approx(data["uniform_loss"], abs=0.15)
    assert data["uniform_loss"] == pytest.approx(math.log(data["vocab_size"]))
    assert data["unigram_loss"] < data["uniform_loss"]


def test_the_rate_logged_is_the_one_of_the_update(tiny_config: Any) -> None:
    config = tiny_config(warmup_steps=4, min_lr=0.001)
    _, _, events = run(config)
    expected = [get_lr(n, 4, config.max_steps, config.learning_rate, config.min_lr) for n in range(config.max_steps)]
    assert [event["lr"] for event in of(events, "log")] == pytest.approx(expected)
    assert expected[0] == 0.0


def test_the_gradient_norm_logged_is_the_one_before_clipping_and_0_clips_nothing(tiny_config: Any) -> None:
    free, loose, clipped = (losses(run(tiny_config(grad_clip=clip))[2]) for clip in (0.0, 1000.0, 1e-3))
    assert clipped[0] == free[0]
    assert clipped[0][1] > 1e-3
    assert free == loose != clipped


def test_samples_start_with_their_prompt(tiny_config: Any) -> None:
    _, _, events = run(tiny_config())
    for event in of(events, "sample"):
        assert event["prompt"] == "ROMEO:"
        assert event["text"].startswith("ROMEO:")
        assert len(event["text"]) > len("ROMEO:") + 20


def test_a_run_without_a_callback_is_a_run(tiny_config: Any) -> None:
    config = tiny_config(max_steps=3)
    train(config)
    assert saved(config, "last")["step"] == 3


def test_what_the_callback_raises_ends_the_run(tiny_config: Any) -> None:
    def fail(event: Event) -> None:
        if event["type"] == "log" and event["step"] == 3:
            raise ZeroDivisionError("from the page")

    with pytest.raises(ZeroDivisionError, match="from the page"):
        run(tiny_config(), fail)


# What a run does


@pytest.mark.parametrize("tokenizer", ["word", "char"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_every_combination_learns(arch: str, optimizer: str, tokenizer: str, tiny_config: Any) -> None:
    config = tiny_config(arch=arch, optimizer=optimizer, tokenizer=tokenizer, max_steps=30, eval_interval=100, learning_rate=0.02)
    model, made, events = run(config)
    first, last = of(events, "eval")[0]["val_loss"], of(events, "complete")[0]["val_loss"]
    assert last < first - 0.3
    assert made.vocab_size == config.vocab_size == model.config.vocab_size
    assert read_checkpoint(config.checkpoint_path).config.arch == arch


def test_the_same_settings_give_the_same_run(tiny_config: Any, tmp_path: Path) -> None:
    first, second, other = (
        run(tiny_config(dropout=0.2, checkpoint_dir=str(tmp_path / name), seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert losses(first[2]) == losses(second[2])
    assert [event["val_loss"] for event in of(first[2], "eval")] == [event["val_loss"] for event in of(second[2], "eval")]
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True))
    assert losses(first[2]) != losses(other[2])


def test_sampling_and_evaluating_do_not_disturb_the_run(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = losses(run(tiny_config(dropout=0.2, eval_interval=100))[2])
    monkeypatch.setattr(generate, "SAMPLE_TIMES_S", tuple(n / 1000 for n in range(100_000)))
    _, _, events = run(tiny_config(dropout=0.2, eval_interval=1))
    assert len(of(events, "eval")) == 13
    assert len(of(events, "sample")) > 3
    assert losses(events) == quiet


def test_the_vocabulary_size_becomes_the_real_one_in_place(tiny_config: Any) -> None:
    config = tiny_config(vocab_size=5000)
    _, tokenizer, events = run(config)
    assert config.vocab_size == tokenizer.vocab_size == of(events, "data")[0]["vocab_size"] < 100
    assert saved(config, "last")["config"]["vocab_size"] == config.vocab_size


def test_the_vocabulary_is_written_apart_only_when_asked(tiny_config: Any, tmp_path: Path) -> None:
    config = tiny_config(max_steps=3)
    run(config)
    assert {path.name for path in Path(config.checkpoint_dir).iterdir()} <= {"best.safetensors", "last.safetensors", "previous.safetensors"}
    run(tiny_config(max_steps=3, vocab_path=str(tmp_path / "vocabulary.json")))
    assert json.loads((tmp_path / "vocabulary.json").read_text(encoding="utf-8"))["model"]["vocab"]["<unk>"] == 1


def test_epochs_limit_the_run(tiny_config: Any) -> None:
    config = tiny_config(max_epochs=2, max_steps=1000, batch_size=16)
    _, _, events = run(config)
    tokens = of(events, "data")[0]["train_tokens"]
    steps = 2 * math.ceil(tokens / (16 * 16))
    assert 10 < steps < 100
    assert of(events, "complete")[0]["step"] == of(events, "complete")[0]["max_steps"] == steps
    assert of(events, "log")[-1]["lr"] == pytest.approx(get_lr(steps - 1, 2, steps, config.learning_rate, 0.0))


def test_epochs_that_leave_no_room_for_the_warm_up_are_refused_with_a_number_that_works(tiny_config: Any) -> None:
    settings = {"max_epochs": 1, "max_steps": 1000, "batch_size": 64}
    with pytest.raises(ConfigError, match=r"warmup_steps is 500.*try \d+") as caught:
        run(tiny_config(warmup_steps=500, **settings))
    run(tiny_config(warmup_steps=int(str(caught.value).rsplit(" ", 1)[1]), **settings))


def test_patience_ends_a_run_that_no_longer_improves(tiny_config: Any, scripted: Any) -> None:
    scripted(4.0, 3.0, 3.5, 3.0, 9.0)
    config = tiny_config(eval_interval=2, patience=2, max_steps=100)
    _, _, events = run(config)
    complete = of(events, "complete")[0]
    assert (complete["reason"], complete["step"]) == ("early", 6)
    assert saved(config, "last")["step"] == 6


def test_no_patience_means_no_early_end(tiny_config: Any, scripted: Any) -> None:
    scripted(4.0, 5.0)
    assert of(run(tiny_config(eval_interval=1, patience=0))[2], "complete")[0]["reason"] == "finished"


def test_the_threads_asked_for_are_used(tiny_config: Any) -> None:
    _, _, events = run(tiny_config(threads=2, max_steps=3))
    assert torch.get_num_threads() == of(events, "data")[0]["threads"] == 2


def test_warming_up_touches_no_random_state() -> None:
    state = torch.get_rng_state()
    warm_up()
    assert torch.equal(torch.get_rng_state(), state)


# Best and last


def test_best_and_last_are_two_things(tiny_config: Any, scripted: Any) -> None:
    scripted(9.0, 3.0, 2.0, 4.0, 4.0, 2.0)
    config = tiny_config(max_steps=15, eval_interval=5)
    _, _, events = run(config)
    assert [event["best_val_loss"] for event in of(events, "eval")] == [9.0, 3.0, 2.0, 2.0]
    assert (saved(config, "best")["step"], saved(config, "best")["val_loss"]) == (10, 2.0)
    assert (saved(config, "last")["step"], saved(config, "last")["val_loss"]) == (15, 4.0)
    complete = of(events, "complete")[0]
    assert (complete["val_loss"], complete["best_val_loss"], complete["best_step"]) == (4.0, 2.0, 10)


def test_the_best_file_tells_the_loss_that_the_end_tells(tiny_config: Any, scripted: Any) -> None:
    # Along the way a sample of the validation text is measured, at the end all of it.
    scripted(9.0, 3.0, 2.0, 4.0, 4.5, 2.5)
    config = tiny_config(max_steps=15, eval_interval=5)
    _, _, events = run(config)
    best = read_checkpoint(config.checkpoint_path)
    assert (best.step, best.val_loss) == (10, 2.5)
    assert (events[-1]["best_step"], events[-1]["best_val_loss"]) == (10, 2.5)
    assert saved(config, "last")["best_val_loss"] == 2.5


def test_a_last_step_that_is_the_best_is_both(tiny_config: Any, scripted: Any) -> None:
    scripted(9.0, 4.0, 3.0, 2.0, 1.0)
    config = tiny_config(max_steps=15, eval_interval=5)
    _, _, events = run(config)
    assert saved(config, "best")["step"] == saved(config, "last")["step"] == 15
    assert of(events, "complete")[0]["best_val_loss"] == 1.0


def test_the_best_loss_at_the_end_is_the_least_of_all(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVALUATED_SHARE", 1000.0)  # every evaluation covers all of the validation text
    config = tiny_config(max_steps=30, eval_interval=3, learning_rate=0.3, optimizer="adamw")
    _, _, events = run(config)
    measured = [event["val_loss"] for event in [*of(events, "eval"), *of(events, "complete")]]
    assert of(events, "complete")[0]["best_val_loss"] == pytest.approx(min(measured))
    assert saved(config, "best")["val_loss"] == pytest.approx(min(measured))


def test_the_end_is_measured_on_all_of_the_validation_text(tiny_config: Any, tiny_text: str) -> None:
    config = tiny_config(eval_interval=2)
    model, tokenizer, events = run(config)
    complete = of(events, "complete")[0]
    _, val = create_datasets(tiny_text, tokenizer, config.max_seq_len)
    assert complete["val_tokens"] == complete["val_tokens_total"] == val.targets
    assert of(events, "eval")[0]["val_tokens"] < val.targets
    assert complete["val_loss"] == pytest.approx(evaluate(model, ValLoader(val, 7), "cpu"), rel=1e-5)
    best = evaluate(read_checkpoint(config.checkpoint_path).model, ValLoader(val, 7), "cpu")
    assert complete["best_val_loss"] == pytest.approx(best, rel=1e-5)
    assert complete["best_val_loss"] <= complete["val_loss"]


def test_a_run_shorter_than_its_evaluation_interval_still_leaves_both_files(tiny_config: Any) -> None:
    config = tiny_config(max_steps=3, eval_interval=2000)
    run(config)
    for name in ("best", "last"):
        assert saved(config, name)["step"] == 3
        assert saved(config, name)["val_loss"] > 0.0


def test_last_is_also_written_along_the_way(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY_S", 0.0)
    config = tiny_config(eval_interval=5)
    found: list[int] = []
    run(config, lambda event: found.append(saved(config, "last")["step"]) if event["type"] == "log" and event["step"] in (6, 11) else None)
    assert found == [5, 10]


def test_the_file_tells_the_story_of_the_run(tiny_config: Any) -> None:
    config = tiny_config()
    _, _, events = run(config)
    last = saved(config, "last")
    assert last["series"]["train"]["x"] == [event["step"] for event in of(events, "log")]
    assert last["val_step"] == 12
    assert last["corpus"]["name"] == "corpus.txt"
    assert last["samples"][0]["step"] == 0
    assert last["data"]["vocab_size"] == config.vocab_size
    assert last["max_steps"] == 12


def test_the_chosen_place_of_the_best_is_used(tiny_config: Any, tmp_path: Path) -> None:
    config = tiny_config(checkpoint_path=str(tmp_path / "chosen" / "mine.safetensors"), max_steps=3)
    run(config)
    assert read_checkpoint(tmp_path / "chosen" / "mine.safetensors").step == 3


def test_a_folder_can_be_used_again(tiny_config: Any) -> None:
    run(tiny_config(max_steps=9))
    config = tiny_config(max_steps=4, tokenizer="char")
    run(config)
    for name in ("best", "last"):
        assert saved(config, name)["config"]["tokenizer"] == "char"


# Stopping


def test_a_stop_before_the_start_ends_before_there_is_a_model(tiny_config: Any) -> None:
    stop = threading.Event()
    stop.set()
    config = tiny_config()
    with pytest.raises(RunStopped):
        run(config, stop=stop)
    assert not Path(config.checkpoint_dir).exists()


@pytest.mark.parametrize("number", [1, 2])
def test_a_stop_while_preparing_ends_before_there_is_a_model(number: int, tiny_config: Any) -> None:
    stop, seen = threading.Event(), []

    def stop_early(event: Event) -> None:
        seen.append(event["type"])
        if len(seen) == number:
            stop.set()

    with pytest.raises(RunStopped):
        run(tiny_config(), stop_early, stop)
    assert set(seen) == {"status"}


@pytest.mark.parametrize(
    ("kind", "number", "step"), [("data", 1, 0), ("eval", 1, 0), ("sample", 1, 0), ("log", 1, 1), ("log", 3, 3), ("eval", 2, 5), ("eval", 3, 10)]
)
def test_a_stop_at_any_event_leaves_a_checkpoint_of_that_step(kind: str, number: int, step: int, tiny_config: Any) -> None:
    stop, seen = threading.Event(), 0

    def stop_at(event: Event) -> None:
        nonlocal seen
        seen += event["type"] == kind
        if seen == number:
            stop.set()

    config = tiny_config()
    model, _, events = run(config, stop_at, stop)
    complete = events[-1]
    assert (complete["type"], complete["reason"], complete["step"]) == ("complete", "stopped", step)
    assert complete["val_loss"] > 0.0
    last = read_checkpoint(Path(config.checkpoint_dir) / "last.safetensors")
    assert (last.step, last.val_loss) == (step, complete["val_loss"])
    assert last.metadata["val_step"] == step
    assert all(torch.equal(value, last.model.state_dict()[name]) for name, value in model.state_dict().items())
    assert max((event["step"] for event in of(events, "log")), default=0) == step
    assert saved(config, "best")["val_loss"] is not None


def test_a_stop_ends_an_evaluation_at_once(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, batches = threading.Event(), 0
    genuine = MiniGPT.loss
    monkeypatch.setattr(module, "EVALUATED_SHARE", 1000.0)

    def loss(self: MiniGPT, x: Tensor, y: Tensor) -> Tensor:
        nonlocal batches
        if not self.training and trained and not stop.is_set():
            batches += 1
            if batches == 2:
                stop.set()
        return genuine(self, x, y)

    trained: list[int] = []
    monkeypatch.setattr(MiniGPT, "loss", loss)
    config = tiny_config(batch_size=1)
    _, _, events = run(config, lambda event: trained.append(1) if event["type"] == "log" else None, stop)
    assert batches == 2
    assert [event["step"] for event in of(events, "eval")] == [0]
    assert (events[-1]["reason"], events[-1]["step"]) == ("stopped", 5)
    assert saved(config, "last")["step"] == 5


def test_the_checkpoint_is_there_before_the_final_evaluation_begins(tiny_config: Any) -> None:
    stop = threading.Event()
    config = tiny_config()
    found: list[int] = []

    def follow(event: Event) -> None:
        if event["type"] == "log" and event["step"] == 3:
            stop.set()
        if event["type"] == "status" and event["phase"] == "evaluating":
            found.append(saved(config, "last")["step"])

    run(config, follow, stop)
    assert found == [3]


def test_a_second_stop_skips_the_final_evaluation(tiny_config: Any) -> None:
    stop = StopSignal()

    def ask_twice(event: Event) -> None:
        if (event["type"] == "log" and event["step"] == 6) or (event["type"] == "status" and event["phase"] == "evaluating"):
            stop.ask()

    config = tiny_config()
    _, _, events = run(config, ask_twice, stop)
    complete = events[-1]
    assert (complete["reason"], complete["step"], complete["val_loss"], complete["val_perplexity"]) == ("stopped", 6, None, None)
    assert complete["val_tokens"] == 0
    last, evaluated = saved(config, "last"), of(events, "eval")[-1]
    assert last["step"] == 6
    assert (last["val_loss"], last["val_step"]) == (evaluated["val_loss"], 5)


def test_two_stops_during_the_final_evaluation_cut_it_short(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopSignal()
    genuine = MiniGPT.loss
    final: list[int] = []

    def loss(self: MiniGPT, x: Tensor, y: Tensor) -> Tensor:
        if final:
            final.append(1)
            stop.ask()
        return genuine(self, x, y)

    monkeypatch.setattr(MiniGPT, "loss", loss)
    config = tiny_config(batch_size=1)
    _, _, events = run(config, lambda event: final.append(0) if event["type"] == "status" and event["phase"] == "evaluating" else None, stop)
    assert len(final) == 1 + 2
    assert events[-1]["val_loss"] is None
    assert saved(config, "last")["step"] == 12


def test_a_stop_signal_asked_once_is_not_in_a_hurry() -> None:
    stop = StopSignal()
    stop.ask()
    assert stop.is_set()
    assert not stop.hurry.is_set()
    stop.ask()
    assert stop.hurry.is_set()


def test_a_stopped_run_can_be_started_again_at_once(tiny_config: Any) -> None:
    stop = threading.Event()
    run(tiny_config(), lambda event: stop.set() if event["type"] == "log" else None, stop)
    assert run(tiny_config())[2][-1]["reason"] == "finished"


def test_the_model_comes_back_in_training_order_whatever_ended_the_run(tiny_config: Any) -> None:
    stop = threading.Event()
    model, _, _ = run(tiny_config(), lambda event: stop.set() if event["type"] == "sample" else None, stop)
    assert model.training


# Numbers that go wrong


def not_a_number(_: MiniGPT, value: Tensor) -> Tensor:
    return value * math.nan


def infinite(_: MiniGPT, value: Tensor) -> Tensor:
    return value + math.inf


def wild_gradient(model: MiniGPT, value: Tensor) -> Tensor:
    """Leave the loss as it is and make its gradient infinite."""
    hidden = model.embedding.weight.sum()
    hidden.register_hook(lambda gradient: gradient * math.inf)
    return value + (hidden - hidden.detach())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("change", [not_a_number, infinite, wild_gradient])
def test_a_number_that_is_not_finite_ends_the_run_with_the_last_good_weights(
    change: Any, optimizer: str, tiny_config: Any, spoiled_step: Any
) -> None:
    spoiled_step(4, change)
    config = tiny_config(optimizer=optimizer, log_interval=100)
    model, _, events = run(config)
    complete, log = events[-1], of(events, "log")[-1]
    assert (complete["reason"], complete["step"]) == ("diverged", 3)
    assert complete["val_loss"] > 0.0
    assert log["step"] == 4
    assert not (math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"]))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    last = read_checkpoint(Path(config.checkpoint_dir) / "last.safetensors")
    assert last.step == 3
    assert all(value.isfinite().all() for name, value in last.state.items() if name.startswith("optim."))


def test_a_loss_that_never_was_finite_still_leaves_a_checkpoint(tiny_config: Any, spoiled_step: Any) -> None:
    spoiled_step(1, not_a_number)
    config = tiny_config()
    _, _, events = run(config)
    assert (events[-1]["reason"], events[-1]["step"]) == ("diverged", 0)
    assert saved(config, "last")["step"] == 0


def test_an_absurd_rate_ends_in_words_and_not_in_an_error(tiny_config: Any) -> None:
    config = tiny_config(learning_rate=10.0, grad_clip=0.0, weight_decay=0.0, warmup_steps=0, optimizer="adamw", max_steps=30)
    _, _, events = run(config)
    assert events[-1]["reason"] in ("finished", "diverged")
    assert all(event["perplexity"] <= math.exp(20.0) for event in of(events, "log") if math.isfinite(event["loss"]))


def test_perplexity_never_overflows() -> None:
    assert perplexity(2.0) == pytest.approx(math.exp(2.0))
    assert perplexity(1000.0) == perplexity(math.inf) == math.exp(20.0)
    assert math.isnan(perplexity(math.nan))


# Disks that refuse


def refusing(monkeypatch: pytest.MonkeyPatch, refuse: Callable[[str, int], bool]) -> None:
    genuine = module.save_checkpoint

    def save(model: Any, optimizer: Any, config: Any, step: int, *rest: Any, path: Any, **more: Any) -> Any:
        if refuse(Path(path).stem, step):
            raise OSError(28, "No space left on device")
        return genuine(model, optimizer, config, step, *rest, path=path, **more)

    monkeypatch.setattr(module, "save_checkpoint", save)


def test_a_disk_that_refuses_for_a_while_does_not_end_the_run(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY_S", 0.0)
    refusing(monkeypatch, lambda _, step: step < 12)
    config = tiny_config()
    _, _, events = run(config)
    said = [event["message"] for event in of(events, "status") if event["phase"] == "saving"]
    assert set(said) == {"could not save: No space left on device; nothing is saved so far, training goes on"}
    assert events[-1]["reason"] == "finished"
    assert saved(config, "last")["step"] == 12


def test_a_name_that_is_too_long_for_the_disk_is_told_and_the_run_goes_on_to_its_end(tiny_config: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    with pytest.raises(OSError, match="File name too long"):
        run(tiny_config(checkpoint_path=str(tmp_path / f"{'x' * 300}.safetensors")), lambda event: events.append(dict(event)))
    assert "could not save: File name too long; nothing is saved so far, training goes on" in {event["message"] for event in of(events, "status")}
    assert [event["step"] for event in of(events, "log")][-1] == 12


def test_the_older_checkpoint_is_spoken_of_once_there_is_one(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, lambda _, step: 0 < step < 12)
    _, _, events = run(tiny_config())
    said = {event["message"] for event in of(events, "status") if event["phase"] == "saving"}
    assert said == {"could not save: No space left on device; the older checkpoint is unharmed, training goes on"}


def test_a_disk_that_refuses_to_the_end_is_an_error(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, lambda *_: True)
    events: list[Event] = []
    with pytest.raises(OSError, match="No space left"):
        run(tiny_config(), lambda event: events.append(dict(event)))
    assert not of(events, "complete")


def test_the_best_step_told_at_the_end_is_that_of_the_file(tiny_config: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(9.0, 3.0, 2.0, 4.0, 4.0, 3.0)
    refusing(monkeypatch, lambda _, step: step == 10)
    config = tiny_config(max_steps=15, eval_interval=5)
    _, _, events = run(config)
    assert saved(config, "best")["step"] == 5
    assert (events[-1]["best_step"], events[-1]["best_val_loss"]) == (5, 3.0)


def test_a_best_file_spoiled_meanwhile_does_not_cost_the_run_its_end(tiny_config: Any, scripted: Any) -> None:
    scripted(9.0, 3.0, 2.0, 4.0, 4.0)
    config = tiny_config(max_steps=15, eval_interval=5)

    def spoil(event: Event) -> None:
        if event["type"] == "log" and event["step"] == 12:
            os.truncate(config.checkpoint_path, 100)

    _, _, events = run(config, spoil)
    assert events[-1]["reason"] == "finished"
    assert read_checkpoint(config.checkpoint_path).step == 15


# Refusals


@pytest.mark.parametrize("tokenizer", ["word", "char"])
@pytest.mark.parametrize("text", ["", " ", "\n", "one", "one two three"])
def test_a_text_without_enough_in_it_is_refused_in_words(text: str, tokenizer: str, tiny_config: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"use a longer text|set max_seq_len"):
        run(tiny_config(data_path=str(tmp_path / "empty.txt"), tokenizer=tokenizer))


def test_a_missing_text_is_refused(tiny_config: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'poems\.txt' cannot be read"):
        run(tiny_config(data_path=str(tmp_path / "poems.txt")))


def test_settings_that_do_not_fit_are_refused_before_anything_is_done(tiny_config: Any) -> None:
    events: list[Event] = []
    with pytest.raises(ConfigError, match="n_heads is 3"):
        run(tiny_config(n_heads=3), events.append)
    assert events == []


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_with_one_that_is(device: str, tiny_config: Any) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ConfigError, match=f"device is {device}; this machine has cpu: try cpu"):
        run(tiny_config(device=device))


def test_the_smallest_settings_there_are_can_be_trained_with(tiny_config: Any) -> None:
    _, _, events = run(
        tiny_config(batch_size=1, eval_interval=1, max_steps=1, warmup_steps=0, max_seq_len=2, vocab_size=5, d_model=2, n_heads=1, d_ff=1)
    )
    assert events[-1]["reason"] == "finished"


# Evaluation


def ragged(length: int = 21, batch_size: int = 2) -> tuple[MiniGPT, ValLoader]:
    torch.manual_seed(0)
    model = MiniGPT(TransformerConfig(vocab_size=50, max_seq_len=8, d_model=16, n_heads=2, n_layers=1, d_ff=32, dropout=0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    ids = torch.randint(50, (length,), generator=torch.Generator().manual_seed(1))
    return model, ValLoader(TokenDataset(ids, 8), batch_size)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_every_token_weighs_the_same_in_an_evaluation(batch_size: int) -> None:
    model, loader = ragged(batch_size=batch_size)
    model.eval()
    with torch.no_grad():
        sums = [F.cross_entropy(model(x[None])[0], y, reduction="sum").item() for x, y in (loader.dataset[i] for i in range(3))]
    by_hand = sum(sums) / 20
    assert evaluate(model, loader, "cpu") == pytest.approx(by_hand, rel=1e-5)
    assert by_hand != pytest.approx((sums[0] / 8 + sums[1] / 8 + sums[2] / 4) / 3, rel=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_uses_no_dropout_and_restores_the_mode(training: bool) -> None:
    model, loader = ragged()
    model.train(training)
    assert evaluate(model, loader, "cpu") == evaluate(model, loader, torch.device("cpu"))
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_restores_the_mode_even_when_the_model_fails(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loader = ragged()
    model.train(training)

    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(model, "loss", fail)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(model, loader, "cpu")
    assert model.training is training


def test_an_evaluation_that_is_stopped_or_has_nothing_to_measure_gives_no_number() -> None:
    model, loader = ragged()
    stop = threading.Event()
    stop.set()
    assert math.isnan(evaluate(model, loader, "cpu", stop))
    assert math.isnan(evaluate(model, ragged(length=1)[1], "cpu"))
    assert math.isfinite(evaluate(model, loader, "cpu", threading.Event()))


def test_an_evaluation_leaves_the_weights_trainable() -> None:
    model, loader = ragged()
    evaluate(model, loader, "cpu")
    x = torch.randint(50, (2, 8))
    model.loss(x, x).backward()
    assert all(parameter.grad is not None for parameter in nn.ModuleList([model]).parameters())


def test_a_run_ends_soon_after_a_stop_from_another_thread(tiny_config: Any) -> None:
    stop, started = threading.Event(), threading.Event()
    config = tiny_config(max_steps=100_000)
    events: list[Event] = []

    def follow(event: Event) -> None:
        events.append(dict(event))
        if event["type"] == "log":
            started.set()

    thread = threading.Thread(target=run, args=(config, follow, stop))
    thread.start()
    assert started.wait(60)
    stop.set()
    asked = time.monotonic()
    thread.join(60)
    assert not thread.is_alive(), f"still running {time.monotonic() - asked:.0f} s after the stop"
    assert events[-1]["reason"] == "stopped"
    assert saved(config, "last")["step"] == events[-1]["step"] < 100_000


def spoiling(trainer: Trainer, spoiled: list[int]) -> Any:
    """Return a trainer's backward pass whose twelfth gradient is not a number; it counts its calls in `spoiled`."""
    genuine = trainer.backward

    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = genuine(x, y)
        if len(spoiled) == 11:
            trainer.model.embedding.weight.grad.fill_(math.nan)  # type: ignore[operator]
        spoiled.append(1)
        return loss

    return backward


def test_a_device_that_is_not_asked_at_each_step_diverges_with_the_last_finite_weights_too(tiny_config: Any, tmp_path: Path) -> None:
    ends = []
    for guarded in (False, True):
        config = tiny_config(max_steps=30, log_interval=5, eval_interval=7, checkpoint_dir=str(tmp_path / str(guarded)))
        events: list[Any] = []
        trainer = Trainer(config, events.append, threading.Event())
        trainer.guard = FiniteGuard(trainer.optimizer, trainer.device) if guarded else None
        spoiled: list[int] = []
        trainer.backward = spoiling(trainer, spoiled)  # type: ignore[method-assign]
        assert trainer.loop() == "diverged"
        last = [event for event in events if event["type"] == "log"][-1]
        ends.append((trainer.step, last["step"], [p.clone() for p in trainer.model.parameters()]))
        assert len(spoiled) == (14 if guarded else 12)  # found at the evaluation
    assert ends[0][:2] == ends[1][:2] == (11, 12)
    assert all(torch.equal(a, b) for a, b in zip(ends[0][2], ends[1][2], strict=True))
