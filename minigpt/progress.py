"""How things read in a terminal: a run's moving line, the plain lines of its log, its closing summary, and what is in a checkpoint.

Only makes text; who prints it, and where, is the command line's business. Knows no torch.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.events import AnyEvent, perplexity
from minigpt.header import clean
from minigpt.inspection.report import Report
from minigpt.ui.words import checkpoint_verdict, duration, figure

if TYPE_CHECKING:
    from minigpt.inspection.statistics import TensorStatistics

MIN_BAR = 8
REASONS = {
    "finished": "finished",
    "stopped": "stopped",
    "early": "finished early, for lack of progress",
    "diverged": "diverged: the loss was no longer a finite number, so training ended",
}


def moving_line(last: Mapping[str, AnyEvent], columns: int) -> str:
    """Return the one line that a terminal shows of a run at work.

    Args:
        last: the latest event of each kind, as `History.last` has it.
        columns: the terminal's width; the line is shorter by one, so that the cursor never wraps.
    """
    log = last.get("log")
    status = last.get("status", {})
    ended = "complete" in last
    if log is None or log["loss"] is None or status.get("phase") == "preparing" or (status.get("phase") == "evaluating" and not ended):
        return str(status.get("message", "starting"))[: columns - 1]
    step, total = int(log["step"]), max(int(log["max_steps"]), 1)
    left = float(log["elapsed"]) / max(step, 1) * (total - step)
    words = [f"step {step:,}/{total:,}", f"loss {log['loss']:.3f}"]
    if last.get("eval", {}).get("val_loss") is not None:
        words.append(f"validation {last['eval']['val_loss']:.3f}")
    words += [f"{log.get('tokens_per_s', 0.0):,.0f} tokens/s", duration(last["complete"]["elapsed"]) if ended else f"{duration(left)} left"]
    text = "  ".join(words)
    room = min(columns - len(text) - 5, 40)
    bar = ""
    if room >= MIN_BAR:
        done = round(room * step / total)
        bar = f"[{'#' * done}{'-' * (room - done)}]  "
    return (bar + text)[: columns - 1]


def plain_line(event: AnyEvent, last: Mapping[str, AnyEvent]) -> str | None:
    """Return the line that a log file gets for an event, or None for the many that would only fill it."""
    kind = event["type"]
    if kind == "status":
        return str(event["message"])
    if kind == "data":
        threads = "1 thread" if event["threads"] == 1 else f"{event['threads']:,} threads"
        return (
            f"{event['parameters']:,} parameters on {event['device']} with {threads}; {event['characters']:,} characters, "
            f"{event['vocab_size']:,} tokens known, {event['unknown_share']:.1%} of the text is outside the vocabulary"
        )
    if kind != "eval":
        return None
    words = [f"step {event['step']:,} of {event['max_steps']:,}", f"validation loss {loss(event['val_loss'])}{part(event)}"]
    if (log := last.get("log")) is not None:
        words += [f"training loss {log['loss']:.3f}", f"{log.get('tokens_per_s', 0.0):,.0f} tokens/s"]
    return ", ".join([*words, duration(event["elapsed"])])


def part(event: AnyEvent) -> str:
    """Say of how much of the validation text a loss is, if not of all of it."""
    scored, of = event.get("val_tokens", 0), event.get("val_tokens_total", 0)
    return f" on {scored:,} of {of:,} tokens" if 0 < scored < of else ""


def loss(value: object) -> str:
    """Write a loss in nats with its perplexity, or say that there is none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "not measured"
    return f"{value:.4g} (perplexity {perplexity(value):.4g})"


def summary(last: Mapping[str, Mapping[str, Any]], files: Sequence[Path]) -> list[str]:
    """Return the closing lines of a run: how it ended, how good it is, where it lies, what to do next.

    Args:
        last: the latest event of each kind.
        files: the checkpoints that exist, the best one first.
    """
    end, data = last.get("complete"), last.get("data", {})
    if end is None:
        lines = ["stopped before the first step"]
    else:
        lines = [
            f"{REASONS[end['reason']]} after {end['step']:,} of {end['max_steps']:,} steps in {duration(end['elapsed'])}",
            f"final validation loss {loss(end['val_loss'])}{part(end)}",
            f"best validation loss {loss(end['best_val_loss'])} at step {end.get('best_step', 0):,}",
        ]
    if data:
        lines.append(f"text: {data['corpus']}")
    if not files:
        return [*lines, "no checkpoint was written"]
    best = shlex.quote(str(files[0]))
    prompt = str(last.get("sample", {}).get("prompt", "")).strip()
    return [
        *lines,
        *(f"checkpoint: {path}" for path in files),
        f"look inside: python -m minigpt inspect {best}",
        f"let it write: python -m minigpt generate {best}" + (f" --prompt {shlex.quote(prompt)}" if prompt else ""),
    ]


def description(report: Report) -> list[str]:
    """Return what is in a checkpoint file: a verdict, the settings, the parameters by block, and what is odd."""
    checked = "every value read" if report.checked else "values not checked"
    blocks = {name: f"{count:,}" for name, count in report.parameters_by_block.items()}
    return [
        checkpoint_verdict(report.step, report.val_loss if report.val_loss is not None else report.best_val_loss, report.metadata),
        f"format: {report.format}, {report.made_by}, {report.size_bytes:,} bytes, {checked}",
        *_section("settings", {name: _with_origin(value, report.origins[name]) for name, value in report.config.items()}),
        *_section(f"parameters: {report.parameters:,}, shape {report.fingerprint}", blocks),
        *([""] if report.warnings or report.notes else []),
        *(f"warning: {text}" for text in report.warnings),
        *(f"note: {text}" for text in report.notes),
    ]


def _with_origin(value: object, origin: str) -> str:
    return origin if origin == "unknown" else clean(value) if origin == "stored" else f"{clean(value)}  ({origin})"


def tensor_lines(report: Report, found: Iterable["TensorStatistics"]) -> Iterator[str]:
    """Yield a table of what the values of each tensor are like, each line once it is known."""
    shapes = {tensor.name: " x ".join(map(str, tensor.shape)) for tensor in report.tensors}
    names, sizes = max(6, *(len(clean(name, 60)) for name in shapes)), max(5, *map(len, shapes.values()))
    row = f"{{:<{names}}}  {{:<{sizes}}}" + "{:>12}" * 4 + "{:>11}{:>7}{:>5}"
    yield ""
    yield row.format("tensor", "shape", "min", "max", "mean", "std", "zeros", "NaN", "inf")
    for tensor in found:
        numbers = ["" if value is None else figure(value) for value in (tensor.minimum, tensor.maximum, tensor.mean, tensor.std)]
        line = row.format(clean(tensor.name, 60), shapes.get(tensor.name, ""), *numbers, f"{tensor.zeros:,}", tensor.nan, tensor.infinite)
        yield f"{clean(tensor.name, 60)}: {tensor.remark}" if tensor.remark else line


def _section(title: str, content: Mapping[str, str]) -> list[str]:
    width = max((len(name) for name in content), default=0)
    return ["", title if content else f"{title}: none recorded", *(f"  {clean(name):<{width}}  {value}" for name, value in content.items())]
