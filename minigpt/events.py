"""The words in which a running trainer speaks: one TypedDict per kind of event, told apart by `type`.

Events are plain dicts of JSON values. Readers ignore keys and kinds they do not know, so new ones may be added freely. Losses are in nats per
token, times in seconds since the loop began, learning rates as the optimizer sees them.
"""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, NotRequired, TypedDict

Reason = Literal["finished", "stopped", "early", "diverged"]


class _Progress(TypedDict):
    step: int
    max_steps: int
    elapsed: float


class _Scores(_Progress):
    val_loss: float | None
    val_perplexity: float | None
    best_val_loss: float | None
    best_step: NotRequired[int]
    val_tokens: NotRequired[int]
    val_tokens_total: NotRequired[int]


class LogEvent(_Progress):
    """One line of the training log: the loss of the batch that made update `step`, before that update."""

    type: Literal["log"]
    loss: float
    perplexity: float
    lr: float
    grad_norm: float
    tokens_per_s: NotRequired[float]


class EvalEvent(_Scores):
    """A validation result after `step` updates; `val_tokens` of `val_tokens_total` targets were scored."""

    type: Literal["eval"]


class CompleteEvent(_Scores):
    """The last event of a run. `val_loss` is None when a second stop skipped the final evaluation."""

    type: Literal["complete"]
    reason: Reason


class StatusEvent(TypedDict):
    """What the trainer is busy with, in words."""

    type: Literal["status"]
    phase: Literal["preparing", "training", "compiling", "saving", "evaluating"]
    message: str


class DataEvent(TypedDict):
    """What is known once the text has been read: its size, its vocabulary and the two losses that need no learning."""

    type: Literal["data"]
    corpus: str
    characters: int
    train_tokens: int
    val_tokens: int
    vocab_size: int
    unknown_share: float
    uniform_loss: float
    unigram_loss: float
    parameters: int
    device: str
    threads: int
    precision: str


class SampleEvent(TypedDict):
    """What the model writes after `step` updates, from `prompt`."""

    type: Literal["sample"]
    step: int
    elapsed: float
    loss: float | None
    prompt: str
    text: str


class ResumeEvent(_Progress):
    """A run goes on from a checkpoint of `step` updates; what was said of later steps no longer holds."""

    type: Literal["resume"]


Event = LogEvent | EvalEvent | CompleteEvent | StatusEvent | DataEvent | SampleEvent | ResumeEvent
Callback = Callable[[Event], None]
AnyEvent = Mapping[str, Any]  # an event read back from a file, whose kind is not yet known


def perplexity(loss: float) -> float:
    """Turn a loss in nats into the number of equally likely choices it stands for, capped so that it never overflows."""
    return math.exp(min(loss, 20.0))


def finite(value: float | None) -> float | None:
    """Return a number as JSON can say it: None if it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


class StopSignal(threading.Event):
    """A stop event with a second stage: asked once, the run saves and evaluates; asked again, it skips the evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.hurry = threading.Event()

    def ask(self) -> None:
        """Ask for a stop; a second call asks to hurry."""
        if self.is_set():
            self.hurry.set()
        self.set()
