"""What a run has said so far: thinned series for charts, full columns for tables, samples, and the log file on disk.

Fed with events in order; knows nothing of the trainer or the page. All methods of `History` may be called from any thread.
"""

import json
import math
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pandas as pd

from minigpt.events import AnyEvent, Event, finite
from minigpt.header import is_text, number

MAX_POINTS = 2000
MAX_SAMPLES = 200  # in a checkpoint
SMOOTHING = 0.8
EPOCHS = 1000  # of a series at most, until a resume
COLUMNS = ("step", "loss", "lr", "grad_norm", "tokens_per_s", "val_loss", "elapsed")
SERIES_NAMES = ("train", "smoothed", "val", "lr", "grad_norm", "tokens_per_s")
SERIES = {"train": "loss", "lr": "lr", "grad_norm": "grad_norm", "tokens_per_s": "tokens_per_s"}  # series by the key of a log event


class Series:
    """An append-only curve of at most `cap` points, of which every bucket's lowest and highest are kept.

    When it is full, buckets double and `epoch` goes up: a reader who counts points then takes everything once more. A value that is not
    finite is kept as None.
    """

    def __init__(self, cap: int = MAX_POINTS) -> None:
        self.cap = cap
        self.epoch = 0
        self.x: list[int] = []
        self.y: list[float | None] = []
        self._bucket = 1  # raw points that become one or two drawn ones
        self._pending: list[tuple[int, float | None]] = []

    def add(self, x: int, y: float | None) -> None:
        """Append one point."""
        self._pending.append((x, finite(y)))
        if len(self._pending) < self._bucket:
            return
        self._extend(_extremes(self._pending))
        self._pending = []
        if len(self.x) >= self.cap:
            points = list(zip(self.x, self.y, strict=True))
            self.x, self.y = [], []
            for start in range(0, len(points), 4):
                self._extend(_extremes(points[start : start + 4]))
            self._bucket = 4 if self._bucket == 1 else 2 * self._bucket
            self.epoch += 1

    def flush(self) -> None:
        """Draw what still waits for its bucket to fill: the end of the curve."""
        self._extend(_extremes(self._pending, last=True))
        self._pending = []

    def _extend(self, points: Iterable[tuple[int, float | None]]) -> None:
        for x, y in points:
            self.x.append(x)
            self.y.append(y)

    def since(self, epoch: int, count: int) -> dict[str, Any]:
        """Return what a reader lacks who has `count` points of `epoch`: epoch `e`, first index `i`, lists `x` and `y`."""
        first = count if epoch == self.epoch and 0 <= count <= len(self.x) else 0
        return {"e": self.epoch, "i": first, "x": self.x[first:], "y": [_short(y) for y in self.y[first:]]}


def _extremes(points: list[tuple[int, float | None]], *, last: bool = False) -> list[tuple[int, float | None]]:
    """Return the lowest and the highest of a few points in their order, or the single point."""
    finite = [(y, index) for index, (_, y) in enumerate(points) if y is not None]
    if len(points) == 1 or not finite:
        return points[:1]
    gap = next((index for index, (_, y) in enumerate(points) if y is None), None)
    kept = {min(finite)[1], max(finite)[1]} | ({len(points) - 1} if last else set()) | (set() if gap is None else {gap})
    return [points[index] for index in sorted(kept)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


class History:
    """Everything a page, a table or a checkpoint shows of a run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.series = {name: Series() for name in SERIES_NAMES}
        self.samples: list[dict[str, Any]] = []
        self.last: dict[str, dict[str, Any]] = {}  # the latest event of each kind
        self.bad_lines = 0
        self._columns = {name: array("d") for name in COLUMNS}
        self._average = self._weight = 0.0
        self._first = self._latest = (0, 0.0)  # step and seconds of the first and the latest log event

    def append(self, event: AnyEvent) -> None:
        """Take in one event; kinds that are not known are ignored."""
        with self._lock:
            kind = str(event.get("type"))
            self.last[kind] = dict(event)
            if kind == "log":
                self._log(event)
            elif kind == "eval" or self._is_news(event):
                self.series["val"].add(event["step"], event["val_loss"])
                self._row(event)
            elif kind == "sample":
                self.samples.append(dict(event))
            if kind == "complete":
                for series in self.series.values():
                    series.flush()

    def _is_news(self, event: AnyEvent) -> bool:
        """Tell whether this is the end of a run at a step that has no validation point yet."""
        return event.get("type") == "complete" and event.get("val_loss") is not None and event["step"] not in self.series["val"].x[-1:]

    def _log(self, event: AnyEvent) -> None:
        self._latest = (event["step"], event.get("elapsed") or 0.0)
        self._first = self._first if self._first[0] else self._latest
        for name, key in SERIES.items():
            if (value := event.get(key)) is not None or name == "train":
                self.series[name].add(event["step"], value)
        loss = event["loss"]
        if loss is not None and math.isfinite(loss):  # a mean that forgets, without the pull of its start (as Adam's bias correction)
            self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
            self.series["smoothed"].add(event["step"], self._average / self._weight)
        self._row(event)

    def _row(self, event: AnyEvent) -> None:
        for name, column in self._columns.items():
            value = event.get(name)
            column.append(math.nan if value is None else value)

    def seconds_left(self, max_steps: int) -> float | None:
        """Estimate the seconds to `max_steps` from the pace between the first and the latest log event; None before there are two."""
        with self._lock:
            (first, began), (latest, now) = self._first, self._latest
        if first == latest:
            return None
        return (now - began) / (latest - first) * max(max_steps - latest, 0)

    @property
    def smoothed_loss(self) -> float | None:
        """The smoothed training loss of now; None before the first log event."""
        with self._lock:
            return self._average / self._weight if self._weight else None

    def point(self, name: str, step: int) -> float | None:
        """Return a series' drawn value at a step, or None."""
        with self._lock:
            series = self.series[name]
            return series.y[series.x.index(step)] if step in series.x else None

    def since(self, have: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return what a reader lacks of each series, given its (epoch, count) by name."""
        with self._lock:
            return {name: series.since(*have.get(name, (-1, 0))) for name, series in self.series.items()}

    def to_frame(self, last: int = 0) -> pd.DataFrame:
        """Return the rows of the log, one a log or validation event, or its `last` ones; what an event did not say is NaN."""
        with self._lock:
            frame = pd.DataFrame({name: list(column[-last:]) for name, column in self._columns.items()})
        return frame.astype({"step": "int64"})

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the drawn points, samples from the first to the latest, the facts of the data. Plain JSON values."""
        with self._lock:
            apart = max((len(self.samples) - 1) / (MAX_SAMPLES - 1), 1.0)
            chosen = [self.samples[round(index * apart)] for index in range(min(len(self.samples), MAX_SAMPLES))]
            return {
                "series": {name: {"x": list(series.x), "y": [_short(y) for y in series.y]} for name, series in self.series.items()},
                "samples": [dict(sample) for sample in chosen],
                "data": dict(self.last.get("data", {})),
            }


def reached(series: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return [epoch, count] of each series for a reader who took in what `History.since` returned."""
    return {name: [part["e"], part["i"] + len(part["x"])] for name, part in series.items()}


def curves(stored: object) -> dict[str, tuple[list[int], list[float | None]]]:
    """Read the curves of a checkpoint's `series`, of which nothing is trusted: wrong shapes and types are dropped."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    if not isinstance(stored, dict):
        return found
    for name in SERIES_NAMES:
        curve = stored.get(name)
        x, y = (curve.get("x"), curve.get("y")) if isinstance(curve, dict) else (None, None)
        if isinstance(x, list) and isinstance(y, list) and len(x) == len(y) <= 2 * MAX_POINTS and None not in map(number, x):
            found[name] = ([int(v) for v in x], list(map(number, y)))
    return found


def replay(stored: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Turn what `to_dict` returned, read back from a checkpoint, into events by which a history goes on from there.

    A loss measured at the end of the run is left out: it is of more text than the `checks` on the way, and would be a jag in the curve.
    """
    checks = stored.get("checks")
    checked = number(checks.get("val_step")) if isinstance(checks, dict) else None
    points = {name: dict(zip(*curve, strict=True)) for name, curve in curves(stored.get("series")).items()}
    rows = [("log", step, {key: points[name].get(step) for name, key in SERIES.items() if name in points}) for step in points.get("train", {})]
    rows += [("eval", step, {"val_loss": loss}) for step, loss in points.get("val", {}).items() if checked is None or step <= checked]
    yield from ({"type": kind, "step": step, **values} for kind, step, values in sorted(rows, key=lambda row: row[1]))
    samples = stored.get("samples")
    for sample in samples if isinstance(samples, list) else ():
        if isinstance(sample, dict) and sample.keys() >= {"step", "elapsed", "prompt", "text"} and all(_fits(*item) for item in sample.items()):
            yield {**sample, "type": "sample"}


def to_line(event: AnyEvent) -> str:
    """Write an event as one line of JSON; numbers that are not finite become null, which JSON can say."""
    safe = {key: finite(value) if isinstance(value, float) else value for key, value in event.items()}
    return json.dumps(safe, ensure_ascii=False, allow_nan=False)


NEEDED = {  # without which a reader can do nothing with an event
    "log": ("step", "loss"), "eval": ("step", "val_loss"), "complete": ("step", "val_loss", "elapsed", "reason"),
    "sample": ("step", "elapsed", "text"), "data": ("corpus", "characters", "vocab_size", "unknown_share"),
}  # fmt: skip
NEVER_NULL = {"elapsed", "unknown_share", "uniform_loss", "unigram_loss"}  # the other numbers are null where they were not finite
DECLARED = {name: hint for event in get_args(Event) for name, hint in get_type_hints(event).items()}  # a name means the same in all events


def _fits(name: str, value: object) -> bool:
    """Tell whether a value that a file gives is of its name's declared type; of a name that is not known everything is."""
    hint = DECLARED.get(name)
    if hint is int:
        return type(value) is int and 0 <= value < 2**63
    if hint in (float, float | None):
        return number(value) is not None or (value is None and name not in NEVER_NULL)
    return hint is None or is_text(value)


def read_history(path: Path) -> History:
    """Read a `metrics.jsonl` back. Lines that are damaged are counted in `bad_lines` and skipped.

    After a resume at step N, what the file has of steps beyond N is dropped: it was made again, and the curves count as new ones for a reader
    who follows them. Of two rows of a kind for one step the later holds.
    """
    events: dict[tuple[str, int], dict[str, Any]] = {}
    bad = resumes = 0
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            event = json.loads(line)
            kind, step = event["type"], event.get("step", 0)
            if not all(_fits(*item) for item in event.items()) or any(name not in event for name in NEEDED.get(kind, ())):
                raise ValueError(kind)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            bad += 1
            continue
        if kind == "resume":
            events = {key: kept for key, kept in events.items() if key[1] <= step and key[0] != "complete"}
            resumes += 1
        else:
            events[kind, step] = event
    history = History()
    history.bad_lines = bad
    for series in history.series.values():
        series.epoch = resumes * EPOCHS
    for event in events.values():
        try:
            history.append(event)
        except (KeyError, TypeError, ValueError):
            history.bad_lines += 1
    return history
