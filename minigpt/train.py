"""The training loop, top to bottom: text, vocabulary, model, optimizer, steps, evaluation, checkpoints.

Speaks only through the callback and the log; knows nothing of pages, run lists or threads.
"""

import logging
import math
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from minigpt.checkpoint import anything_saved, load_checkpoint, read_checkpoint, restate_checkpoint, save_checkpoint
from minigpt.compilation import Compilation, is_wanted
from minigpt.config import TransformerConfig
from minigpt.data import ValLoader, prepare_text
from minigpt.device import choose_device, choose_precision, choose_threads
from minigpt.errors import CheckpointError
from minigpt.evaluation import evaluate
from minigpt.events import Callback, CompleteEvent, DataEvent, EvalEvent, Event, Reason, StopSignal, finite, perplexity
from minigpt.generate import sample, sample_time, samples_by, usual_prompt
from minigpt.history import History
from minigpt.model import MiniGPT
from minigpt.optim import FiniteGuard, configure_optimizer, get_lr
from minigpt.resume import restore
from minigpt.system import keep_freed_memory
from minigpt.tokenizer import TextTokenizer

__all__ = ["configure_optimizer", "evaluate", "get_lr", "load_checkpoint", "save_checkpoint", "train"]

log = logging.getLogger(__name__)

SAVE_EVERY_S, SAVE_BETWEEN_S = 5.0, 60.0  # at evaluations, and between those that are further apart
SAVE_SHARE = 0.02  # of the time, at most, between evaluations
# Forward alone costs about a third of a training step, so this share of an interval's tokens costs about 3 % of its time; 5 % are allowed.
EVALUATED_SHARE = 0.1
STOP_EVALUATION_S = 0.8  # the final evaluation after a stop may take a second; some of it is left for saving


def train(
    config: TransformerConfig, callback: Callback | None = None, stop_event: threading.Event | None = None, *, resume: Path | None = None
) -> tuple[MiniGPT, TextTokenizer]:
    """Train as `config` says and return the model as it is at the end, with its tokenizer.

    `config.vocab_size` becomes the size of the real vocabulary, in place. `best.safetensors` and `last.safetensors` are kept in
    `config.checkpoint_dir`. The callback is called on this thread with the events of `minigpt.events`; what it raises ends the run. The stop
    event is looked at in every phase; a `StopSignal` asked twice also skips the final evaluation. On a CPU equal settings give equal runs,
    as long as nothing else in the process draws from torch's global generator.

    With `resume`, one of our checkpoints, the run goes on from there; `config` then is what `resume.resumed_config` made of it. On a CPU such
    a run equals one that never stopped, bit for bit.

    Raises:
        CheckpointError: the checkpoint lacks what a resume needs.
        ConfigError: the settings do not fit each other or this machine.
        DataError: the text cannot be read, is too short, or is not the one that the checkpoint learned from.
        RunStopped: the stop event was set before there was a model.
    """
    config.check()
    return Trainer(config, callback or (lambda _event: None), stop_event or threading.Event(), resume).run()


class Trainer:
    """One run between its first and its last step. Everything that a resume would need is an attribute."""

    def __init__(self, config: TransformerConfig, emit: Callback, stop: threading.Event, resume: Path | None = None) -> None:
        self.config, self.stop = config, stop
        self.history = History()
        self.emit = self._recorded(emit)
        self.emit({"type": "status", "phase": "preparing", "message": "reading the text"})
        self.device = choose_device(config, stop)
        self.text = prepare_text(config, self.emit, stop)
        self.tokenizer = self.text.tokenizer
        self.prompt = usual_prompt(self.tokenizer, self.text.corpus.text)
        self.check_loader = self.text.val_loader.subset(int(EVALUATED_SHARE * config.eval_interval * config.batch_size))
        self.max_steps = self.text.steps
        chosen = config.model_copy(update={"precision": choose_precision(config, self.device)})
        torch.manual_seed(config.seed)
        self.model = MiniGPT(chosen).to(self.device)
        self.optimizer = configure_optimizer(self.model, config.learning_rate, config.weight_decay, config.optimizer)
        keep_freed_memory()
        self.threads = choose_threads(chosen, self.device, stop)
        self.step = 0
        self.val_loss, self.val_step = math.nan, -1
        self.best_val_loss, self.best_step = math.inf, 0
        self.without_best = 0
        self.checks: dict[str, Any] | None = None
        self.step_seconds = 0.0
        self.next_sample = 0
        self.elapsed_before = 0.0  # in earlier sittings
        self.began = time.perf_counter()
        machine = {"device": self.device.type, "threads": self.threads, "precision": chosen.precision}
        self.emit(cast(DataEvent, {"type": "data", **self.text.facts(), "parameters": self.model.count_parameters(), **machine}))
        if resume is not None:
            restore(self, read_checkpoint(resume))
            self.emit({"type": "resume", "step": self.step, "max_steps": self.max_steps, "elapsed": self.elapsed_before})
        self.first_step, self.saved_at, self.save_seconds = self.step, self.elapsed_before, 0.0
        self.compilation: Compilation | None = None
        self.guard = FiniteGuard(self.optimizer, self.device) if self.device.type == "cuda" else None

    def _recorded(self, emit: Callback) -> Callback:
        history = self.history  # not self: a ring of references would hold model and optimizer until the garbage collector comes by

        def both(event: Event) -> None:
            history.append(event)
            emit(event)

        return both

    @property
    def elapsed(self) -> float:
        """Seconds since the loop began, those of earlier sittings included."""
        return self.elapsed_before + time.perf_counter() - self.began

    def run(self) -> tuple[MiniGPT, TextTokenizer]:
        """Train to the end; return the model as it is then, with its tokenizer."""
        self.finish(self.loop())
        return self.model, self.tokenizer

    def loop(self) -> Reason:
        """Make steps until the run is over; return why it is."""
        config = self.config
        self.began = time.perf_counter()
        self.emit({"type": "status", "phase": "training", "message": f"training on {self.text.corpus.name}"})
        if is_wanted(config, self.device):
            self.compilation = Compilation(self.model, (config.batch_size, config.max_seq_len))
            self.emit({"type": "status", "phase": "compiling", "message": "compiling meanwhile"})
        if self.val_step != self.step and self.step % config.eval_interval == 0:  # a resumed run may have it already
            self.validate()
        self.sample_when_due()
        while self.step < self.max_steps:
            if self.should_stop():
                return "stopped"
            if not self.make_step():
                return "diverged"
            self.sample_when_due()
            if self.compilation is not None and (news := self.compilation.news()):
                self.emit({"type": "status", "phase": "compiling", "message": news})
                self.compilation = None
            if self.step % config.eval_interval == 0 or self.step == self.max_steps:
                self.validate()
                if 0 < config.patience <= self.without_best:
                    return "early"
            elif self.history.last.get("log", {}).get("step") == self.step:  # where the weights are known to be finite
                self.save_last_after(max(SAVE_BETWEEN_S, self.save_seconds / SAVE_SHARE))
        return "finished"

    def should_stop(self) -> bool:
        """Tell whether a stop was asked for; looked at before each step."""
        return self.stop.is_set()

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch and leave its gradients."""
        loss = self.model.loss(x, y)
        loss.backward()
        return loss

    def measure(self, model: MiniGPT, loader: ValLoader, stop: threading.Event | None) -> float:
        """Return a model's validation loss; see `evaluate`."""
        return evaluate(model, loader, self.device, stop)

    def make_step(self) -> bool:
        """Make one update; return False, with the weights as they were, if the loss or its gradient is not finite."""
        start = time.perf_counter()
        config = self.config
        lr = get_lr(self.step, config.warmup_steps, self.max_steps, config.learning_rate, config.min_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        x, y = (batch.to(self.device) for batch in self.text.train_loader.batch())  # (B, T)
        loss = self.backward(x, y)
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip or math.inf)
        number = self.step + 1
        due = number in (1, self.max_steps) or number % config.log_interval == 0
        if self.guard is None:
            finite = math.isfinite(loss.item()) and math.isfinite(grad_norm.item())
        else:
            self.guard.judge(loss, grad_norm)
            finite = not (due or number % config.eval_interval == 0) or self.first_step + self.guard.steps_made() == number
        if finite:
            self.optimizer.step()
            self.step = number
        elif self.guard is not None:  # found out late
            self.step, loss = self.first_step + self.guard.steps_made(), loss * math.nan
        self.optimizer.zero_grad()
        self.step_seconds += time.perf_counter() - start
        if due or not finite:
            self.report(self.step if finite else self.step + 1, loss.item(), lr, grad_norm.item())
        return finite

    def report(self, step: int, loss: float, lr: float, grad_norm: float) -> None:
        """Emit a log event; tokens per second are those of the steps alone, since the last event."""
        seen = step - max(self.history.last.get("log", {}).get("step", 0), self.first_step)
        tokens_per_s = seen * self.config.batch_size * self.config.max_seq_len / max(self.step_seconds, 1e-9)
        self.step_seconds = 0.0
        self.emit({
            "type": "log", "step": step, "max_steps": self.max_steps, "loss": loss, "perplexity": perplexity(loss), "lr": lr,
            "grad_norm": grad_norm, "elapsed": self.elapsed, "tokens_per_s": tokens_per_s,
        })  # fmt: skip

    def validate(self) -> None:
        """Evaluate on the fixed subset, emit the result, keep the best, save the last."""
        loss = self.measure(self.model, self.check_loader, self.stop)
        if self.stop.is_set() and math.isnan(loss):
            return
        self.val_loss, self.val_step = loss, self.step
        if is_best := loss < self.best_val_loss:
            self.best_val_loss, self.best_step = loss, self.step
        self.without_best = 0 if is_best else self.without_best + 1
        self.emit(cast(EvalEvent, {"type": "eval", **self._scores(loss, self.check_loader)}))
        if is_best:
            self.tolerant_save("best")
        self.save_last_after(SAVE_EVERY_S)

    def save_last_after(self, seconds: float) -> None:
        """Save `last` if the one before is older than this."""
        if (began := self.elapsed) - self.saved_at >= seconds:
            self.tolerant_save("last")
            self.saved_at, self.save_seconds = self.elapsed, self.elapsed - began

    def sample_when_due(self) -> None:
        """Write a sample if one is due by time."""
        if self.elapsed >= sample_time(self.next_sample):
            self.sample(self.stop)

    def sample(self, stop: threading.Event | None) -> None:
        """Write a sample, unless stopped meanwhile."""
        self.next_sample = max(self.next_sample, samples_by(self.elapsed))
        if self.history.samples and self.history.samples[-1]["step"] == self.step:
            return
        if (text := sample(self.model, self.tokenizer, self.prompt, self.config.seed, stop)) is None:
            return
        loss = self.val_loss if self.val_step == self.step else self.history.smoothed_loss
        self.emit({"type": "sample", "step": self.step, "elapsed": self.elapsed, "loss": finite(loss), "prompt": self.prompt, "text": text})

    def save(self, name: str) -> None:
        """Write `name`.safetensors in the run's folder; the file that was `last` stays as `previous`."""
        folder = Path(self.config.checkpoint_dir)
        save_checkpoint(
            self.model, self.optimizer, self.config, self.step, self.val_loss,
            path=self.config.checkpoint_path if name == "best" else folder / f"{name}.safetensors",
            keep_as=folder / "previous.safetensors" if name == "last" else None,
            tokenizer=self.tokenizer, generators={"data": self.text.train_loader.generator}, facts=self.facts(),
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint tells beyond weights and settings."""
        return {
            "val_step": max(self.val_step, 0), "best_val_loss": finite(self.best_val_loss), "best_step": self.best_step,
            "max_steps": self.max_steps, "elapsed": self.elapsed, "threads": self.threads,
            "corpus": {"name": self.text.corpus.name, "sha256": self.text.corpus.sha256},
            "checks": self.checks or self.standing(),
            "next_sample": self.next_sample,
            **self.history.to_dict(),
        }  # fmt: skip

    def standing(self) -> dict[str, Any]:
        """Return what the checks on the way have found, by which best and patience go on after a resume."""
        found = {"val_loss": finite(self.val_loss), "best_val_loss": finite(self.best_val_loss)}
        return {**found, "val_step": self.val_step, "best_step": self.best_step, "without_best": self.without_best}

    def tolerant_save(self, name: str) -> None:
        """Save, but let the run go on if the disk refuses: an older file is unharmed, and the end of the run tries again."""
        try:
            self.save(name)
        except OSError as error:
            log.warning("%s.safetensors could not be saved (%s); training goes on", name, error.strerror)
            older = "the older checkpoint is unharmed" if anything_saved(self.config) else "nothing is saved so far"
            message = f"could not save: {error.strerror}; {older}, training goes on"
            self.emit({"type": "status", "phase": "saving", "message": message})

    def finish(self, reason: Reason) -> None:
        """Save at once, then measure the final validation loss, save with the result, say so."""
        self.checks = self.standing()  # the final losses are of more text and must not be compared with checks after a resume
        self.save("last")
        self.emit({"type": "status", "phase": "evaluating", "message": "saved; measuring the final validation loss"})
        hurry = self.stop.hurry if isinstance(self.stop, StopSignal) else None
        final, loader = self._final_loss(hurry)
        if math.isfinite(final):
            self._settle_best(final, loader, hurry)
            self.sample(hurry)
        complete = cast(CompleteEvent, {"type": "complete", "reason": reason, **self._scores(final, loader)})
        self.history.append(complete)  # so that the file's curve ends where the run's does
        self.save("last")
        if self.best_step == self.step:
            self.save("best")
        self.emit(complete)

    def _final_loss(self, hurry: threading.Event | None) -> tuple[float, ValLoader]:
        """Measure on all of the validation text; on as much as a second allows once a stop has been asked for."""
        loss = math.nan if self.stop.is_set() else self.measure(self.model, self.text.val_loader, self.stop)
        if math.isfinite(loss):
            return loss, self.text.val_loader
        speed = self.history.last.get("log", {}).get("tokens_per_s", 0.0)
        windows = int(3 * speed * STOP_EVALUATION_S / 2 / self.config.max_seq_len)  # forward alone is three times as fast; best and last are measured
        loader = self.text.val_loader.subset(max(windows, len(self.check_loader.windows)))
        return self.measure(self.model, loader, hurry), loader

    def _settle_best(self, final: float, loader: ValLoader, hurry: threading.Event | None) -> None:
        """Decide between the last weights and the best ones found on the way, both measured on the same validation text."""
        best_path = Path(self.config.checkpoint_path)
        self.val_loss, self.val_step = final, self.step
        best_loss, best_step = math.inf, self.best_step
        if self.best_step != self.step and best_path.is_file():
            try:
                best = read_checkpoint(best_path, self.device)
                best_loss, best_step = self.measure(best.model, loader, hurry), best.step
            except CheckpointError as error:
                log.warning("the best checkpoint is gone: %s", error)
        if best_loss > final:
            self.best_val_loss, self.best_step = final, self.step
        elif math.isfinite(best_loss):  # it is NaN if a second stop cut it short: then the checks on the way decide
            self.best_val_loss, self.best_step = best_loss, best_step
            restate_checkpoint(best_path, val_loss=best_loss, best_val_loss=best_loss)

    def _scores(self, loss: float, loader: ValLoader) -> dict[str, Any]:
        """Return what eval and complete events have in common; a loss that was not measured is None."""
        measured = math.isfinite(loss)
        return {
            "step": self.step, "max_steps": self.max_steps, "elapsed": self.elapsed,
            "val_loss": finite(loss), "val_perplexity": perplexity(loss) if measured else None,
            "best_val_loss": finite(self.best_val_loss), "best_step": self.best_step,
            "val_tokens": loader.targets if measured else 0, "val_tokens_total": self.text.val_loader.targets,
        }  # fmt: skip
