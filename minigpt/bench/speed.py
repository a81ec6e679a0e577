"""Speed of the trainer itself: against other loops, beside a busy neighbour, late in a long run; what evaluation takes; how fast it writes."""

import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import torch

from minigpt import system
from minigpt.bench.peers import has_transformers, plain_loop, transformers_rate
from minigpt.bench.setup import Pair, Setup, rate, take_turns
from minigpt.config import TransformerConfig
from minigpt.events import Event
from minigpt.generate import generate
from minigpt.history import History, to_line
from minigpt.model import MiniGPT
from minigpt.train import Trainer

LATE, EARLY, STRETCH = 100_000, 100, 100  # steps
WRITTEN = 200  # tokens


def _trainer(config: TransformerConfig) -> Trainer:
    return Trainer(config, lambda _: None, threading.Event())


def against_plain(setup: Setup, _seed: int) -> Pair:
    """Tokens per second of training the shape of `classic` without dropout on one thread, ours and a plain loop's."""
    config = setup.config("classic", dropout=0.0, threads=1)
    trainer = _trainer(config)
    step = plain_loop(config, trainer.text.train_loader.dataset.ids)
    tokens, steps = config.batch_size * config.max_seq_len, setup.steps(100)
    return take_turns(lambda: rate(trainer.make_step, steps, tokens), lambda: rate(step, steps, tokens), setup.repeats)


def against_transformers(setup: Setup, _seed: int) -> Pair:
    """The same against transformers; without it there is no other."""
    config = setup.config("classic", dropout=0.0, threads=1)
    trainer = _trainer(config)
    ids = trainer.text.train_loader.dataset.ids
    tokens, steps = config.batch_size * config.max_seq_len, setup.steps(100)
    if not has_transformers():
        return rate(trainer.make_step, steps, tokens), None
    return take_turns(lambda: rate(trainer.make_step, steps, tokens), lambda: transformers_rate(config, ids, steps, setup.folder), setup.repeats)


@contextlib.contextmanager
def _busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def beside_a_busy_core(setup: Setup, _seed: int) -> Pair:
    """Tokens per second of `quick` while another process keeps one core busy, and while none does."""
    config = setup.config("quick")
    trainer = _trainer(config)
    tokens, steps = config.batch_size * config.max_seq_len, setup.steps(200)

    def crowded() -> float:
        with _busy_core():
            return rate(trainer.make_step, steps, tokens)

    return take_turns(crowded, lambda: rate(trainer.make_step, steps, tokens), setup.repeats)


def late_step(setup: Setup, _seed: int) -> Pair:
    """Milliseconds of a step of `quick` at step 100,000 and at step 100, every step logged.

    The late run does not make its first 100,000 steps: its trainer is told as many log events, which fill history, log file and chart exactly as
    steps do, and starts from there. Each step then goes the whole way: the trainer's history, a line in metrics.jsonl, a second history as a run's
    page has it, and once a stretch what a watching page lacks of the curves.
    """
    early, late = (_LongRun(setup, setup.steps(at), name) for at, name in ((EARLY, "early"), (LATE, "late")))
    return take_turns(late.stretch_ms, early.stretch_ms, 5 * setup.repeats)


class _LongRun:
    def __init__(self, setup: Setup, told: int, name: str) -> None:
        self.path = setup.folder / f"{name}.jsonl"
        self.history = History()
        self.have: dict[str, tuple[int, int]] = {}
        self.trainer = Trainer(setup.config("quick", log_interval=1), self.record, threading.Event())
        self.trainer.max_steps = 2 * told
        for self.trainer.step in range(1, told + 1):
            self.trainer.report(self.trainer.step, 5.0, 0.01, 1.0)
        self.steps = setup.steps(STRETCH)

    def record(self, event: Event) -> None:
        system.append_line(self.path, to_line(event))
        self.history.append(event)

    def stretch_ms(self) -> float:
        start = time.perf_counter()
        for _ in range(self.steps):
            self.trainer.make_step()
        lacking = self.history.since(self.have)
        json.dumps(lacking)
        self.have = {name: (part["e"], part["i"] + len(part["x"])) for name, part in lacking.items()}
        return 1000 * (time.perf_counter() - start) / self.steps


class _Watched(Trainer):
    """A trainer that notes the seconds it spends on periodic evaluation, the saving of a new best included."""

    evaluating_s = 0.0

    def validate(self) -> None:
        start = time.perf_counter()
        super().validate()
        self.evaluating_s += time.perf_counter() - start


def evaluation_share(setup: Setup, _seed: int) -> Pair:
    """Share of the time of a `quick` run's loop that periodic evaluation takes."""
    trainer = _Watched(setup.config("quick"), lambda _: None, threading.Event())
    start = time.perf_counter()
    trainer.loop()
    return trainer.evaluating_s / (time.perf_counter() - start), None


def writing(setup: Setup, _seed: int) -> Pair:
    """Tokens per second of writing 200 tokens with a model of the shape of `quick`."""
    torch.set_num_threads(1)
    model = MiniGPT(setup.config("quick"))
    return statistics.median(rate(lambda: list(generate(model, [5], WRITTEN)), 1, WRITTEN) for _ in range(setup.repeats)), None
