"""Where to compute: the device and the number of CPU threads, chosen by timing a few real steps."""

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Literal

import torch

from minigpt.config import TransformerConfig, parameter_count
from minigpt.errors import ConfigError
from minigpt.model import MiniGPT
from minigpt.optim import gains_by_bfloat16

WORTH_IT = 1.3  # a second thread must speed a step up by this much, for it is taken from the page and from everybody else
TOO_SMALL_FOR_TWO = 2e8  # parameters times tokens of a step, below which a second thread has never helped


def check_device(config: TransformerConfig) -> list[str]:
    """Return the devices of this machine.

    Raises:
        ConfigError: the one asked for is not among them.
    """
    present = ["cpu", *(name for name, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())) if there)]
    if config.device not in ("auto", *present):
        raise ConfigError(f"device is {config.device}; this machine has {', '.join(present)}: try cpu")
    return present


def choose_device(config: TransformerConfig, stop_event: threading.Event | None = None) -> torch.device:
    """Return the device asked for, or with `auto` the one on which three steps of this very model take least time.

    The trial ends at once when the stop event is set.

    Raises:
        ConfigError: see `check_device`.
    """
    present = check_device(config)
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device(min(present, key=lambda name: _trial(config, name, 3, stop_event)) if len(present) > 1 else "cpu")


def choose_precision(config: TransformerConfig, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return the type of matrix products asked for, or with `auto` the faster one."""
    if config.precision != "auto":
        return config.precision
    return "bfloat16" if gains_by_bfloat16(device) else "float32"


def choose_threads(config: TransformerConfig, device: torch.device, stop_event: threading.Event | None = None) -> int:
    """Set and return the number of CPU threads for this thread of execution: as asked for, else one, or two where a trial says so.

    The trial ends at once when the stop event is set.
    """
    threads = config.threads or 1
    tokens = config.batch_size * config.max_seq_len
    if not config.threads and device.type == "cpu" and (os.cpu_count() or 1) > 1 and tokens * parameter_count(config) > TOO_SMALL_FOR_TWO:
        seconds = {}
        for count in (1, 2):
            torch.set_num_threads(count)
            seconds[count] = _trial(config, "cpu", 2, stop_event)
        threads = 2 if seconds[1] >= WORTH_IT * seconds[2] else 1
    torch.set_num_threads(threads)
    return threads


def _trial(config: TransformerConfig, device: str, steps: int, stop_event: threading.Event | None = None) -> float:
    """Return the seconds of the fastest of a few forward and backward passes, after one to warm up; the CPU's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        model = MiniGPT(config).to(device)
        x = torch.randint(config.vocab_size, (config.batch_size, config.max_seq_len), device=device)
        times = [_timed(model, x) for _ in range(steps + 1) if stop_event is None or not stop_event.is_set()]
        return min(times[1:], default=math.inf)


def _timed(model: MiniGPT, x: torch.Tensor) -> float:
    synchronise: Callable[[], object] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(x.device.type, lambda: None)
    start = time.perf_counter()
    model.loss(x, x).backward()
    synchronise()
    return time.perf_counter() - start
