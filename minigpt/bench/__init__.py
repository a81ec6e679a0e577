"""The figures by which MiniGPT measures itself: rows with a target each, ours beside what people would otherwise use.

Wall time on the CPU. Both sides of a row take turns, so that whatever else the machine does hits both; where it is cheap a row is repeated and the
median taken. Knows nothing of flags or terminals.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.bench import learning, page, speed
from minigpt.bench.peers import plain_loop, transformers_loop
from minigpt.bench.setup import Pair, Setup
from minigpt.corpus import load_corpus
from minigpt.errors import ConfigError

FIRST_SEED = 1337
Row = dict[str, Any]  # name, ours, other, unit, value, target, at_least, text, and spread where there is one; None is what has no figure


class Kind(NamedTuple):
    """How a row is measured, how its value is made of ours and the other's, and what it must reach."""

    measure: Callable[[Setup, int], Pair]
    value: str
    unit: str
    target: float
    at_least: bool = True
    seeded: bool = False  # worth repeating with other seeds


VALUES: dict[str, Callable[[float, float], float]] = {
    "ours": lambda ours, _: ours,
    "ratio": lambda ours, other: ours / other,
    "sooner": lambda ours, other: other / ours,
    "below": lambda ours, other: other - ours,
}
KINDS = {
    "words-time": Kind(learning.words_time, "sooner", "s", 60, seeded=True),
    "words-loss": Kind(learning.words_loss, "below", "nats", 0.20, seeded=True),
    "chars-time": Kind(learning.chars_time, "sooner", "s", 6, seeded=True),
    "throughput-plain": Kind(partial(speed.throughput, peer=plain_loop), "ratio", "tokens/s", 1.5),
    "throughput-transformers": Kind(partial(speed.throughput, peer=transformers_loop), "ratio", "tokens/s", 1.5),
    "page-1": Kind(partial(page.watched, watchers=1), "ratio", "tokens/s", 0.95),
    "page-5": Kind(partial(page.watched, watchers=5), "ratio", "tokens/s", 0.90),
    "busy-core": Kind(speed.beside_a_busy_core, "ratio", "tokens/s", 0.40),
    "long-run": Kind(speed.late_step, "ratio", "ms/step", 1.05, at_least=False),
    "evaluation-share": Kind(speed.evaluation_share, "ours", "share", 0.10, at_least=False),
    "start": Kind(page.start, "ours", "s", 6, at_least=False),
    "click": Kind(page.click, "ours", "s", 1, at_least=False),
    "generate": Kind(speed.writing, "ours", "tokens/s", 500),
}


def report(only: Iterable[str], data_path: str, *, as_json: bool, seeds: int = 1) -> Iterator[str]:
    """Measure the rows named, all if none is, and yield the lines of a table, each as soon as it is known, or one JSON list at the end.

    Raises:
        ConfigError: a name is not a row's.
        DataError: the text cannot be read.
    """
    names, rows = list(only) or list(KINDS), []
    if unknown := [name for name in names if name not in KINDS]:
        raise ConfigError(f"{unknown[0][:40]!r} is not a row; the rows are {', '.join(KINDS)}")
    with prepared(data_path, seeds=seeds) as setup:
        if not as_json:
            yield from (f"trained on {setup.corpus.name}", LINE.format("row", "ours", "other", "unit", "value", "target", "met"))
        for name in names:
            rows.append(measure(name, setup))
            if not as_json:
                yield line(rows[-1])
    if as_json:
        yield json.dumps(rows, indent=1)


@contextmanager
def prepared(data_path: str = "", **options: Any) -> Iterator[Setup]:
    """Yield a setup over the text at `data_path`, else Tiny Shakespeare, else the built-in plays; its folder of runs is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="minigpt-bench-", ignore_cleanup_errors=True) as folder:
        setup = Setup(load_corpus(data_path), Path(folder), **options)
        setup.text_path.write_text(setup.corpus.text, encoding="utf-8")
        yield setup


def measure(name: str, setup: Setup) -> Row:
    """Measure one row, a seeded one with each seed."""
    seeds = range(setup.seeds if KINDS[name].seeded else 1)
    return row(name, [KINDS[name].measure(setup, FIRST_SEED + number) for number in seeds], setup.corpus.name)


def row(name: str, pairs: list[Pair], text: str) -> Row:
    """Make a row of what was measured with each seed: means, and the standard deviation of the value."""
    _, value, unit, target, at_least, _ = KINDS[name]
    values = [VALUES[value](*pair) for pair in pairs]
    ours, other, mean = (_known(statistics.fmean(column)) for column in (*zip(*pairs, strict=True), values))
    made = {"name": name, "ours": ours, "other": other, "unit": unit, "value": mean, "target": target, "at_least": at_least, "text": text}
    return made if len(pairs) == 1 or mean is None else {**made, "spread": statistics.stdev(values)}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def is_met(row: Row) -> bool | None:
    """Tell whether a row's target is reached; None without a value."""
    return None if row["value"] is None else bool(row["value"] >= row["target"] if row["at_least"] else row["value"] <= row["target"])


LINE = "{:<24}{:>10}{:>10} {:<9}{:>14}  {:<14}{}"


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    ours, other, value = (_figure(row[key]) for key in ("ours", "other", "value"))
    value += f" ±{_figure(row['spread'])}" if "spread" in row else ""
    target = f"{'at least' if row['at_least'] else 'at most'} {row['target']:g}"
    return LINE.format(row["name"], ours, other, row["unit"], value, target, {True: "yes", False: "no", None: "no figure"}[is_met(row)])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
