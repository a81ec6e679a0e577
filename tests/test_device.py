import threading
from typing import Any

import pytest
import torch

from minigpt import device as module
from minigpt.config import TransformerConfig
from minigpt.device import choose_device, choose_precision, choose_threads
from minigpt.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("has_units", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch, has_units: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_units})
    assert choose_precision(TransformerConfig(), CPU) == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_precision_asked_for_is_taken(precision: Any) -> None:
    assert choose_precision(TransformerConfig(precision=precision), CPU) == precision


def test_a_stop_ends_the_trial_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_device", lambda _: ["cpu", "meta"])
    monkeypatch.setattr(module, "_timed", lambda *_: pytest.fail("a pass was made"))
    stop = threading.Event()
    stop.set()
    assert choose_device(TransformerConfig(vocab_size=60, d_model=8), stop).type in ("cpu", "meta")


def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device is cuda; this machine has cpu.*: try cpu"):
        choose_device(TransformerConfig(device="cuda"))


@pytest.mark.parametrize(("one", "two", "expected"), [(1.3, 1.0, 2), (1.2, 1.0, 1)])
def test_a_second_thread_must_be_worth_it(monkeypatch: pytest.MonkeyPatch, one: float, two: float, expected: int) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(module, "_trial", lambda *_: one if torch.get_num_threads() == 1 else two)
    assert choose_threads(TransformerConfig(d_model=256, d_ff=1024, n_layers=4), CPU) == expected
    assert torch.get_num_threads() == expected


def test_a_small_model_takes_one_thread_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_trial", lambda *_: pytest.fail("tried"))
    assert choose_threads(TransformerConfig(batch_size=16), CPU) == 1


def test_the_trial_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    assert choose_threads(TransformerConfig(d_model=256, d_ff=1024, n_layers=2, batch_size=8, vocab_size=500), CPU) in (1, 2)
    assert torch.equal(torch.get_rng_state(), state)
