"""Sentences for people: what a run is doing, what its model knows by now, how it ended. Numbers in, plain words out."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from minigpt.events import perplexity

SPEAKER = re.compile(r"^[A-Z][A-Z ]+:\n", re.MULTILINE)
SPEAKERS = 2
BY_HEART = 0.5  # nats that the validation loss has risen again, beyond which a text is being memorised
CHANCE = 0.15  # nats around ln V that count as guessing at random
LONGER = "A longer text would help."
UNITS = {"word": "words", "char": "characters"}


def duration(seconds: float) -> str:
    """Write a time as a person says it."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def figure(value: float) -> str:
    """Write a number for a table: four significant digits, large ones whole with thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def size(count: int) -> str:
    """Write a number of bytes."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{math.ceil(count / 1e3)} kB"


def choices(loss: float) -> str:
    """Write a loss in nats as the number of equally likely tokens it stands for."""
    count = perplexity(loss)
    return f"{count:,.0f}" if count >= 10 else f"{count:.1f}"


def chooses(loss: float, data: Mapping[str, Any], unit: str) -> str:
    """Say what a loss means beside guessing at random; never more choices than the vocabulary has."""
    uniform = data.get("uniform_loss", math.inf)
    return "worse than guessing at random" if loss > uniform + CHANCE else f"chooses among about {choices(min(loss, uniform))} {unit}"


def milestone(loss: float | None, worse: float, data: Mapping[str, Any], samples: Sequence[str], unit: str) -> str:  # noqa: PLR0911
    """Say in one sentence what a model knows by now, measured against what needs no learning; numbers stand elsewhere.

    Args:
        loss: of now, nats per token; None if it is not a number.
        worse: how far the latest validation loss lies above the best one.
        data: the run's data event.
        samples: what the model has written so far.
        unit: what a token is, in the plural.
    """
    uniform, unigram, size = data.get("uniform_loss", math.inf), data.get("unigram_loss", math.inf), data.get("vocab_size", 0)
    if loss is None:
        return "The loss is not a number any more."
    if worse > BY_HEART:
        return f"It is learning this text by heart: what it has read it knows far better than the part kept for validation. {LONGER}"
    if loss > uniform + CHANCE:
        return "It is worse than guessing at random: the learning rate may be too high."
    if loss > uniform - CHANCE:
        return f"It is guessing at random: surprise {uniform:.1f} = ln {size:,}, every one of {size:,} {unit} equally likely."
    if loss > unigram + 0.05:
        return f"It is finding out which {unit} are common."
    if loss > unigram - 0.35:
        return f"It knows which {unit} are common, and little else."
    if any(len(SPEAKER.findall(sample)) >= SPEAKERS for sample in samples):
        return "It knows that a name in capitals is followed by a colon and a new line."
    return f"It has learned which {unit} follow which."


def status(state: str, message: str, step: int, max_steps: int, seconds_left: float | None) -> str:
    """Say where a run stands."""
    if state == "preparing":
        return message or "getting ready"
    where = f"step {step:,} of {max_steps:,}"
    if state == "stopping":
        return f"stopping at {where}: saving, then one last look at the validation text"
    if state == "training":
        return f"training · {where}" + ("" if seconds_left is None else f" · about {duration(seconds_left)} left")
    return f"{state} · {where}"


def verdict(  # noqa: PLR0911
    state: str, complete: Mapping[str, Any], data: Mapping[str, Any], unit: str, error: str = "", rate: float = 0.0, saved: int | None = None
) -> str:
    """Say how a run ended and what that means."""
    if state == "failed":
        return f"The run could not go on: {error}"
    if state == "interrupted":
        there = "Nothing was saved before." if saved is None else f"What it had saved is there: Resume goes on from step {saved:,}."
        return f"The program ended while this run was training. {there}"
    if not complete:
        return "Stopped before there was a model; nothing was saved." if state == "stopped" else ""
    took = duration(float(complete["elapsed"]))
    step, best, best_step = complete["step"], complete.get("best_val_loss"), complete.get("best_step", 0)
    learned = ""
    if best is not None:
        known = f"{data['vocab_size']:,}" if "vocab_size" in data else "many"  # a log that lost its beginning does not say
        about = choices(min(best, data.get("uniform_loss", best)))
        learned = f"From {known} possible next {unit} to about {about}; best at step {best_step:,}, saved."
        if best >= data.get("uniform_loss", math.inf):
            learned = f"Of the part kept for validation it never knew more than a guess among {known} {unit}."
        if (complete.get("val_loss") or best) - best > BY_HEART:
            learned += f" By the end it knew this text by heart, which does not help with the part kept for validation. {LONGER}"
    if state == "diverged":
        third = f"{rate / 3:.2g}"
        return f"The loss stopped being a number at step {step + 1:,}. The last finite weights are saved. Try a learning rate of {third}, a third."
    if complete.get("reason") == "early":
        return f"Stopped early after {took}: the validation loss no longer fell. {learned}"
    if state == "stopped":
        return f"Stopped after {took}. {learned}" if learned else f"Stopped after {took} and saved."
    return f"{'This one was done' if state == 'example' else 'Done'} in {took}. {learned}"


def checkpoint_verdict(step: int | None, val_loss: float | None, metadata: Mapping[str, Any]) -> str:
    """Say in one line what a checkpoint is worth."""
    parts = ["step not recorded" if step is None else f"step {step:,}"]
    if val_loss is None:
        parts.append("validation loss not recorded")
    else:
        measured = metadata.get("val_step")
        later = f" (measured at step {measured:,})" if isinstance(measured, int) and measured != step else ""
        parts += [f"validation loss {val_loss:.2f}{later}", f"perplexity {choices(val_loss)}"]
    best_step, best = metadata.get("best_step"), metadata.get("best_val_loss")
    if isinstance(best_step, int) and step is not None:
        parts.append(
            "best of its run"
            if best_step == step
            else f"its run's best is step {best_step:,}" + (f" with {best:.2f}" if isinstance(best, float) else "")
        )
    return " · ".join(parts)


def numbers(last: Mapping[str, Mapping[str, Any]], data: Mapping[str, Any], unit: str) -> str:
    """Write the figures of the moment, each beside a word."""
    parts = []
    if (log := last.get("log")) and log["loss"] is not None and math.isfinite(log["loss"]):
        parts += [f"loss {log['loss']:.2f}", f"perplexity {choices(log['loss'])}"]
    validated = last.get("complete") if last.get("complete", {}).get("val_loss") is not None else last.get("eval")
    if validated and validated.get("val_loss") is not None:
        scored = f", on {validated.get('val_tokens', 0):,} of {validated['val_tokens_total']:,} tokens" if validated.get("val_tokens_total") else ""
        parts.append(f"validation {validated['val_loss']:.2f} ({chooses(validated['val_loss'], data, unit)}{scored})")
        if validated.get("best_val_loss") is not None:
            parts.append(f"best {validated['best_val_loss']:.2f} at step {validated.get('best_step', 0):,}")
    if data:
        parts.append(f"{data['corpus']}: {_unknown(data, unit)}")
    return " · ".join(parts)


def coverage(data: Mapping[str, Any], unit: str) -> str:
    """Say what was read."""
    if not data:
        return ""
    return f"Read {data['characters']:,} characters of {data['corpus']}: {data['vocab_size']:,} {unit} known; {_unknown(data, unit)}."


def _unknown(data: Mapping[str, Any], unit: str) -> str:
    """Say how much of a text its model cannot know."""
    share = data["unknown_share"]
    return f"{100 * share:.1f} % of it is {unit} outside the vocabulary" if share else f"all its {unit} are in the vocabulary"


def tag(sample: Mapping[str, Any]) -> str:
    """Write beside a sample when it was written."""
    loss = sample.get("loss")
    return f"step {sample['step']:,} · {duration(sample['elapsed'])}" + ("" if loss is None else f" · surprise {loss:.1f}")
