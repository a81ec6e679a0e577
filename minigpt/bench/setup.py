"""What every row is given: the text, a folder, how often and how long; and how two sides take turns."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt.config import TransformerConfig
from minigpt.corpus import Corpus
from minigpt.presets import PRESETS

Pair = tuple[float, float]  # ours, the other's; NaN where there is none


@dataclass(frozen=True)
class Setup:
    """How to measure. `share` shortens every training, for a trial of the rows themselves; figures count only with 1."""

    corpus: Corpus
    folder: Path
    seeds: int = 1
    repeats: int = 3
    share: float = 1.0

    @property
    def text_path(self) -> Path:
        """The text as a file."""
        return self.folder / "text.txt"

    def steps(self, count: int) -> int:
        """Return how many steps to make where `count` are meant."""
        return max(round(count * self.share), 4)

    def config(self, preset: str, **changes: Any) -> TransformerConfig:
        """Return a preset's settings with changes, over the text, on the CPU, shortened as asked; the warm-up shrinks with the steps."""
        config = PRESETS[preset].config(data_path=str(self.text_path), checkpoint_dir=str(self.folder / "run"), device="cpu", **changes)
        config.max_steps, config.warmup_steps = self.steps(config.max_steps), round(config.warmup_steps * self.share)
        return config


def rate(step: Callable[[], object], steps: int, tokens: int) -> float:
    """Return tokens per second of a function that takes `tokens` each time, after one call to warm up."""
    step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return steps * tokens / (time.perf_counter() - start)


def take_turns(ours: Callable[[], float], other: Callable[[], float], repeats: int) -> Pair:
    """Measure both sides `repeats` times and return the median of each; they take turns in coming first, so that a drifting machine harms neither."""
    sides: tuple[tuple[Callable[[], float], list[float]], ...] = ((ours, []), (other, []))
    for turn in range(repeats):
        for measure, values in sides if turn % 2 == 0 else reversed(sides):
            values.append(measure())
    return statistics.median(sides[0][1]), statistics.median(sides[1][1])
