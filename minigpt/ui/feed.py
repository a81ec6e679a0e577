"""What a page is told: one JSON view of a run, holding only what that page lacks. The page's half is `feed.js`.

The same view is pushed by the generator of the page that started the run and pulled by every other page, so both kinds may mix and gaps heal.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minigpt.checkpoint import FORMAT
from minigpt.header import told
from minigpt.history import curves, reached
from minigpt.run import ENDED
from minigpt.runs import Run, RunManager
from minigpt.ui import words

EXAMPLE = Path(__file__).parent.parent.parent / "assets" / "example.safetensors"
LOG_ROWS = 20
HEADERS = {"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_s": "tokens/s", "val_loss": "validation loss", "elapsed": "seconds"}

Have = Mapping[str, Any]  # {"want": id, "run": id, "life": token, "series": {name: [epoch, count]}, "samples": count}


def view(manager: RunManager, have: Have) -> dict[str, Any]:
    """Return what a page lacks of the run it wants, else of this process's latest, else of the newest that has ended, else the example."""
    run = find_run(manager, have.get("want")) or manager.latest
    if run is None and (newest := manager.past(1)) and newest[0].state in ENDED:
        run = manager.run(newest[0].id)
    return example_view(have) if run is None else run_view(run, have)


def find_run(manager: RunManager, run_id: object) -> Run | None:
    """Return a run by what a page gave as its id, from memory or from its folder."""
    return manager.run(run_id) if isinstance(run_id, str) and run_id else None


def follow(run: Run, pause: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Yield views of a run, each with what is new since the last, until the one that says that it has ended.

    Args:
        run: the run.
        pause: gives the seconds to wait before each look; the end of the run cuts a wait short.
    """
    seen = run_view(run, {})
    yield seen
    while seen["live"]:
        run.ended.wait(pause())
        seen = run_view(run, after(seen))
        yield seen


def run_view(run: Run, have: Have) -> dict[str, Any]:
    """Return what a page lacks of a run."""
    known = have if have.get("run") == run.id and have.get("life", run.life) == run.life else {}
    history = run.history
    live, state, last = run.is_live, run.state, history.last  # live first: if it is false, the rest is final
    samples = list(history.samples)
    data, complete = last.get("data", {}), last.get("complete", {})
    unit = words.UNITS[run.config.tokenizer]
    validated = last.get("eval", {})
    if live:
        val_loss = validated.get("val_loss")
        loss = val_loss if history.smoothed_loss is None else history.smoothed_loss
        texts = [sample["text"] for sample in samples]
        worse = (val_loss or 0.0) - (validated.get("best_val_loss") or 0.0)
        story = words.milestone(loss, worse, data, texts, unit) if validated else words.coverage(data, unit)
    else:
        story = words.verdict(state, complete, data, unit, run.error, run.config.learning_rate, run.saved_step)
    step, most = run.step, run.max_steps
    left = history.seconds_left(most) if state == "training" else None
    return {
        "run": run.id,
        "life": run.life,
        "live": live,
        "state": state,
        "step": step,
        "max_steps": most,
        "status": words.status(state, run.message, step, most, left) + (f" · {run.note}" if live and run.note else ""),
        "numbers": words.numbers(last, data, unit),
        "story": story,
        "empty": not live and not complete and not any(run.folder.glob("*.safetensors")),
        "share": min(step / max(most, 1), 1.0),
        "lines": baselines(data),
        "best": best_point(run),
        "bad": last["log"]["step"] if state == "diverged" and "log" in last else None,
        "series": _wanted(have, history.since(_counts(known))),
        **_samples(samples, known),
    }


def baselines(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the two losses that need no learning, as the chart names them."""
    return {name: data.get(f"{name}_loss") for name in ("uniform", "unigram")}


def best_point(run: Run) -> tuple[int, float] | None:
    """Return step and loss of the best validation as a point of the drawn curve, whose values come from a part of the text until the end."""
    last = run.history.last
    best = last.get("complete") if last.get("complete", {}).get("best_val_loss") is not None else last.get("eval")
    if not best:
        return None
    step = best.get("best_step", best["step"])
    loss = run.history.point("val", step) or best.get("best_val_loss")
    return None if loss is None else (step, loss)


def _samples(samples: list[dict[str, Any]], known: Have) -> dict[str, Any]:
    first = _first(known.get("samples"), len(samples))
    return {"first": first, "samples": [_shown(sample) for sample in samples[first:]]}


def _first(count: object, length: int) -> int:
    """Return where to start for a reader who says that it has `count` of `length` things; 0 if that cannot be."""
    return count if type(count) is int and 0 <= count <= length else 0


def _shown(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": sample["step"], "text": str(sample["text"]).lstrip("\n"), "tag": words.tag(sample)}


def _counts(known: Have) -> dict[str, tuple[int, int]]:
    """Read a page's counts, of which nothing is trusted."""
    series = known.get("series")
    pairs = series.items() if isinstance(series, dict) else ()
    return {name: (pair[0], pair[1]) for name, pair in pairs if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)}


def _wanted(have: Have, series: dict[str, Any]) -> dict[str, Any]:
    """Leave out the series that a page says null for: their chart is folded away."""
    asked = have.get("series")
    return {name: part for name, part in series.items() if not isinstance(asked, dict) or asked.get(name, ()) is not None}


def after(seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader has after it took in a view; for readers on the server's side."""
    return {"run": seen["run"], "life": seen["life"], "series": reached(seen["series"]), "samples": seen["first"] + len(seen["samples"])}


@functools.cache
def example() -> dict[str, Any]:
    """Read the header of the example checkpoint; {} if the file is not there or not readable."""
    metadata = told(EXAMPLE)
    return metadata if metadata.get("format") == FORMAT else {}


def example_view(have: Have) -> dict[str, Any]:
    """Return the example checkpoint as if it were a run that has ended."""
    stored = example()
    known = have if have.get("run") == "example" else {}
    counts = _counts(known)
    data = stored.get("data", {})
    unit = words.UNITS[stored.get("config", {}).get("tokenizer", "word")]
    complete = {"elapsed": 0.0, "step": 0, "best_val_loss": None, "best_step": 0, **stored}
    series = {}
    for name, (x, y) in curves(stored.get("series")).items():
        epoch, count = counts.get(name, (-1, 0))
        first = _first(count, len(x)) if epoch == 0 else 0
        series[name] = {"e": 0, "i": first, "x": x[first:], "y": y[first:]}
    last = complete["step"]
    return {
        "run": "example",
        "life": "example",
        "live": False,
        "state": "example",
        "step": last,
        "max_steps": last,
        "status": "an example, trained before you came · press Train it to make your own" if stored else "no run yet · press Train it",
        "numbers": words.numbers({"eval": complete}, data, unit) if stored else "",
        "story": words.verdict("example", complete, data, unit) if stored else "",
        "share": 0.0,
        "lines": baselines(data),
        "best": [complete["best_step"], complete["best_val_loss"]] if complete["best_val_loss"] is not None else None,
        "bad": None,
        "series": _wanted(have, series),
        **_samples(stored.get("samples", []), known),
    }


def server_functions(manager: RunManager) -> list[Callable[..., str]]:
    """Return the functions that a page's script calls by name. They only read, and trust nothing of what they are given."""

    def poll(have: object = None) -> str:
        """Return the view as JSON for a page that has `have`, itself JSON."""
        return json.dumps(view(manager, parsed(have)))

    def log_table(wanted: object = None) -> str:
        """Return the last rows of a run's log, or of the latest's, as an HTML table, newest first."""
        if (run := find_run(manager, wanted) or manager.latest) is None:
            return "<p>No run yet: the log of your run will appear here.</p>"
        rows = run.history.to_frame(LOG_ROWS).iloc[::-1]
        return rows.rename(columns=HEADERS).to_html(index=False, border=0, na_rep="", float_format=words.figure, classes="log")

    def csv(wanted: object = None) -> str:
        """Return the whole log of a run, or of the latest, as CSV."""
        run = find_run(manager, wanted) or manager.latest
        return "" if run is None else run.history.to_frame().to_csv(index=False)

    return [poll, log_table, csv]


def parsed(have: object) -> Have:
    """Read what a page's script sent, of which nothing is trusted."""
    if not isinstance(have, str) or len(have) > 10_000:
        return {}
    try:
        parsed = json.loads(have)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
