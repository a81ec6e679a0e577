"""Speed of the trainer itself: against other loops, beside a busy neighbour, late in a long run; what evaluation takes; how fast it writes."""

import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch

from minigpt import system
from minigpt.bench.peers import Peer
from minigpt.bench.setup import Pair, Setup, rate, take_turns
from minigpt.generate import generate
from minigpt.history import reached, to_line
from minigpt.model import MiniGPT
from minigpt.train import Trainer

EARLY, LATE, STRETCH = 100, 100_000, 100  # steps
WRITTEN = 200  # tokens


def throughput(setup: Setup, _seed: int, peer: Peer) -> Pair:
    """Tokens per second of training the shape of `classic` without dropout on one thread: ours, all settings as they come, and a peer's."""
    config, steps = setup.config("classic", dropout=0.0, threads=1), setup.steps(100)
    trainer = Trainer(config, lambda _: None, threading.Event())
    other = peer(config, trainer.text.train_loader.dataset.ids, steps)
    return take_turns(lambda: rate(trainer.make_step, steps, config.batch_size * config.max_seq_len), other, setup.repeats)


def beside_a_busy_core(setup: Setup, _seed: int) -> Pair:
    """Tokens per second of `quick` while another process keeps one core busy, and while none does."""
    config = setup.config("quick")
    trainer = Trainer(config, lambda _: None, threading.Event())

    def free() -> float:
        return rate(trainer.make_step, setup.steps(200), config.batch_size * config.max_seq_len)

    def crowded() -> float:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
            try:
                return free()
            finally:
                neighbour.kill()

    return take_turns(crowded, free, setup.repeats)


def late_step(setup: Setup, _seed: int) -> Pair:
    """Milliseconds of a step of `quick` at step 100,000 and at step 100, every step logged.

    The late run does not make its first 100,000 steps: its trainer is told as many log events, which fill history, log file and chart exactly as
    steps do, and starts from there. Each step then goes the whole way: the history, a line of metrics, and once a stretch what a watching page
    lacks of the curves.
    """
    late, early = (_long_run(setup, setup.steps(told)) for told in (LATE, EARLY))
    return take_turns(late, early, 5 * setup.repeats)


def _long_run(setup: Setup, told: int) -> Callable[[], float]:
    path, steps = setup.folder / f"{told}.jsonl", setup.steps(STRETCH)
    trainer = Trainer(setup.config("quick", log_interval=1), lambda event: system.append_line(path, to_line(event)), threading.Event())
    trainer.max_steps = 2 * told
    for trainer.step in range(1, told + 1):
        trainer.report(trainer.step, 5.0, 0.01, 1.0)
    have: dict[str, list[int]] = {}

    def stretch_ms() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            trainer.make_step()
        lacking = trainer.history.since(have)
        json.dumps(lacking)
        have.update(reached(lacking))
        return 1000 * (time.perf_counter() - start) / steps

    return stretch_ms


class _Watched(Trainer):
    evaluating_s = 0.0

    def validate(self) -> None:
        start = time.perf_counter()
        super().validate()
        self.evaluating_s += time.perf_counter() - start


def evaluation_share(setup: Setup, _seed: int) -> Pair:
    """Share of the time of a `quick` run's loop that periodic evaluation takes, the saving of each new best included."""
    trainer = _Watched(setup.config("quick"), lambda _: None, threading.Event())
    start = time.perf_counter()
    trainer.loop()
    return trainer.evaluating_s / (time.perf_counter() - start), math.nan


def writing(setup: Setup, _seed: int) -> Pair:
    """Tokens per second of writing 200 tokens with a model of the shape of `quick` on one thread."""
    torch.set_num_threads(1)
    model = MiniGPT(setup.config("quick"))
    return statistics.median(rate(lambda: list(generate(model, [5], WRITTEN)), 1, WRITTEN) for _ in range(setup.repeats)), math.nan
