"""The figures by which MiniGPT measures itself: rows with a target each, ours beside what people would otherwise use.

Wall time on the CPU. Both sides of a row take turns, so that whatever else the machine does hits both; where it is cheap a row is repeated and the
median taken. Knows nothing of flags or terminals.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.bench import learning, page, speed
from minigpt.bench.setup import Pair, Setup
from minigpt.corpus import load_corpus
from minigpt.errors import ConfigError

FIRST_SEED = 1337


@dataclass(frozen=True)
class Row:
    """One figure: `value` is made of `ours` and `other` and held against `target`. None is what could not be measured or has no peer."""

    name: str
    ours: float | None
    other: float | None
    unit: str
    value: float | None
    target: float
    at_least: bool
    text: str  # what was trained on
    spread: float | None = None  # standard deviation of the value over seeds

    @property
    def met(self) -> bool | None:
        """Tell whether the target is reached; None without a value."""
        return None if self.value is None else (self.value >= self.target if self.at_least else self.value <= self.target)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; the spread only where there is one."""
        return {key: value for key, value in asdict(self).items() if key != "spread" or value is not None}

    def line(self) -> str:
        """Return the row as a line of the table."""
        target = f"{'at least' if self.at_least else 'at most'} {self.target:g}"
        value = _figure(self.value) + ("" if self.spread is None else f" ±{_figure(self.spread)}")
        met = {True: "yes", False: "no", None: "no figure"}[self.met]
        return _line(self.name, _figure(self.ours), _figure(self.other), self.unit, value, target, met)


def ratio(ours: float, other: float) -> float:
    """Return how many times ours is the other."""
    return ours / other


def sooner(ours: float, other: float) -> float:
    """Return how many times ours fits into the other."""
    return other / ours


def below(ours: float, other: float) -> float:
    """Return by how much ours is less."""
    return other - ours


class Kind(NamedTuple):
    """What a row is: how it is measured, what its value is made of (None: ours alone), and its target."""

    measure: Callable[[Setup, int], Pair]
    value: Callable[[float, float], float] | None
    unit: str
    target: float
    at_least: bool = True
    seeded: bool = False  # worth repeating with other seeds


KINDS = {
    "words-time": Kind(learning.words_time, sooner, "s", 60, seeded=True),
    "words-loss": Kind(learning.words_loss, below, "nats", 0.20, seeded=True),
    "chars-time": Kind(learning.chars_time, sooner, "s", 6, seeded=True),
    "throughput-plain": Kind(speed.against_plain, ratio, "tokens/s", 1.5),
    "throughput-transformers": Kind(speed.against_transformers, ratio, "tokens/s", 1.5),
    "page-1": Kind(page.watched_by_one, ratio, "tokens/s", 0.95),
    "page-5": Kind(page.watched_by_five, ratio, "tokens/s", 0.90),
    "busy-core": Kind(speed.beside_a_busy_core, ratio, "tokens/s", 0.40),
    "long-run": Kind(speed.late_step, ratio, "ms/step", 1.05, at_least=False),
    "evaluation-share": Kind(speed.evaluation_share, None, "share", 0.10, at_least=False),
    "start": Kind(page.start, None, "s", 6, at_least=False),
    "click": Kind(page.click, None, "s", 1, at_least=False),
    "generate": Kind(speed.writing, None, "tokens/s", 500),
}


def report(only: Iterable[str], data_path: str, *, as_json: bool, **options: Any) -> Iterator[str]:
    """Measure rows and yield the lines of a table, each as soon as it is known, or one JSON list at the end; see `chosen` and `prepared`."""
    names, rows = chosen(only), []
    with prepared(data_path, **options) as setup:
        if not as_json:
            yield f"trained on {setup.corpus.name}"
            yield _line("row", "ours", "other", "unit", "value", "target", "met")
        for name in names:
            rows.append(measure(name, setup))
            if not as_json:
                yield rows[-1].line()
    if as_json:
        yield json.dumps([row.to_dict() for row in rows], indent=1)


def _line(*words: str) -> str:
    return "{:<24}{:>10}{:>10} {:<9}{:>8}  {:<16}{}".format(*words)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def chosen(names: Iterable[str]) -> list[str]:
    """Return the rows asked for, in the table's order; all if none is named.

    Raises:
        ConfigError: a name is not a row's.
    """
    asked = list(names)
    if unknown := [name for name in asked if name not in KINDS]:
        raise ConfigError(f"{unknown[0][:40]!r} is not a row; the rows are {', '.join(KINDS)}")
    return [name for name in KINDS if name in asked or not asked]


@contextmanager
def prepared(data_path: str = "", **options: Any) -> Iterator[Setup]:
    """Yield a setup over the text at `data_path`, else Tiny Shakespeare, else the built-in plays; its folder of runs is removed at the end.

    Raises:
        DataError: the text cannot be read.
    """
    corpus = load_corpus(data_path)
    with tempfile.TemporaryDirectory(prefix="minigpt-bench-", ignore_cleanup_errors=True) as folder:
        setup = Setup(corpus, Path(folder), **options)
        setup.text_path.write_text(corpus.text, encoding="utf-8")
        yield setup


def measure(name: str, setup: Setup) -> Row:
    """Measure one row, a seeded one with each seed; figures are means over seeds."""
    kind = KINDS[name]
    pairs = [kind.measure(setup, FIRST_SEED + number) for number in range(setup.seeds if kind.seeded else 1)]
    return row(name, pairs, setup.corpus.name)


def row(name: str, pairs: list[Pair], text: str) -> Row:
    """Make a row of what was measured, (ours, other) for each seed; a mean over which one is missing is missing."""
    kind = KINDS[name]
    ours, other = (_mean([pair[side] for pair in pairs]) for side in (0, 1))
    values = [_value(kind, *pair) for pair in pairs]
    known = [value for value in values if value is not None]
    spread = statistics.stdev(known) if len(known) == len(values) > 1 else None
    return Row(name, ours, other, kind.unit, _mean(values), kind.target, kind.at_least, text, spread)


def _value(kind: Kind, ours: float | None, other: float | None) -> float | None:
    if ours is None or kind.value is None:
        return ours
    return None if other is None else kind.value(ours, other)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
