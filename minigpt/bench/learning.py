"""How soon a loss is reached: the modern presets against the usual recipes, step for step beside each other."""

import functools
import math
import threading
import time
from collections.abc import Iterator
from itertools import zip_longest

from minigpt.bench.setup import Pair, Setup
from minigpt.config import TransformerConfig
from minigpt.evaluation import evaluate
from minigpt.train import Trainer

Points = list[tuple[float, float]]  # seconds of training so far, loss on the whole validation text
WORD_POINTS, CHAR_POINTS = 80, 40  # evaluations of a run: the more, the finer the time; letters have four times the validation tokens
# Source: the settings that nanoGPT's README gives for Shakespeare's letters on a CPU, with the rates of its train_shakespeare_char.py.
USUAL_CHARS = {
    "arch": "gpt2", "optimizer": "adamw", "learning_rate": 1e-3, "min_lr": 1e-4, "warmup_steps": 100, "weight_decay": 0.1,
    "batch_size": 12, "max_steps": 2000, "dropout": 0.0, "precision": "float32",
}  # fmt: skip


def words_time(setup: Setup, seed: int) -> Pair:
    """Seconds of `quick` and of `classic` to the loss with which `classic` ends."""
    quick, classic = words(setup, seed)
    return time_to(quick, classic[-1][1]), time_to(classic, classic[-1][1])


def words_loss(setup: Setup, seed: int) -> Pair:
    """The loss with which `quick` ends, and the best of `classic`."""
    quick, classic = words(setup, seed)
    return quick[-1][1], min(loss for _, loss in classic)


@functools.cache  # two rows are read off the same pair of runs
def words(setup: Setup, seed: int) -> tuple[Points, Points]:
    """Train `quick` and `classic` beside each other."""
    return side_by_side(setup.config("quick", seed=seed, threads=1), setup.config("classic", seed=seed, threads=1), WORD_POINTS)


def chars_time(setup: Setup, seed: int) -> Pair:
    """Seconds of `chars` and of the usual recipe of the same shape to the best loss of that recipe."""
    ours, other = (setup.config("chars", seed=seed, threads=1, **changes) for changes in ({}, USUAL_CHARS))
    chars, usual = side_by_side(ours, other, CHAR_POINTS)
    best = min(loss for _, loss in usual)
    return time_to(chars, best), time_to(usual, best)


def side_by_side(ours: TransformerConfig, other: TransformerConfig, points: int) -> tuple[Points, Points]:
    """Train both in turn, a stretch each, and return their curves."""
    both = list(zip_longest(learn(ours, points), learn(other, points)))
    return [point for point, _ in both if point is not None], [point for _, point in both if point is not None]


def learn(config: TransformerConfig, points: int) -> Iterator[tuple[float, float]]:
    """Train as a run does and yield a point after each stretch; the clock stands while the validation text is read."""
    trainer = Trainer(config, lambda _: None, threading.Event())
    stretch = max(trainer.max_steps // points, 1)
    seconds, well = 0.0, True
    while trainer.step < trainer.max_steps and well:
        start = time.perf_counter()
        well = all(trainer.make_step() for _ in range(min(stretch, trainer.max_steps - trainer.step)))
        seconds += time.perf_counter() - start
        yield seconds, evaluate(trainer.model, trainer.text.val_loader, trainer.device)


def time_to(points: Points, loss: float) -> float:
    """Return the seconds at the first point with this loss or less; NaN if there is none."""
    return next((seconds for seconds, reached in points if reached <= loss), math.nan)
