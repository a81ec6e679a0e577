"""Compiling beside the training, with the real compiler where there is one and with faults in its place."""

import threading
from typing import Any

import pytest
import torch
from conftest import TIMEOUT_S

from minigpt import compilation as module
from minigpt.compilation import Compilation, is_wanted
from minigpt.config import TransformerConfig
from minigpt.model import MiniGPT
from minigpt.train import Trainer, train

CPU = torch.device("cpu")


@pytest.mark.parametrize(("asked", "device", "wanted"), [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)])
def test_auto_compiles_on_a_gpu_alone(asked: Any, device: str, wanted: bool) -> None:
    assert is_wanted(TransformerConfig(compile=asked), torch.device(device)) == wanted


@pytest.mark.slow
def test_a_compiled_pass_gives_the_same_loss_and_gradients(tiny_config: Any) -> None:
    model = MiniGPT(tiny_config(arch="modern"))
    x = torch.randint(60, (4, 16))
    expected = model.loss(x, x)
    expected.backward()
    gradient, model.embedding.weight.grad = model.embedding.weight.grad, None
    compilation = Compilation(model, (4, 16))
    compilation.thread.join(TIMEOUT_S - 10)  # the C++ compiler takes half a minute of a quiet core
    if "could not compile" in compilation.news():
        pytest.skip("this machine has no compiler that torch can use")
    assert model.compiled is not None
    loss = model.loss(x, x)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.embedding.weight.grad, gradient)


def test_a_run_neither_waits_for_the_compiler_nor_changes_by_it(tiny_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    go_on = threading.Event()

    def slowly(function: Any) -> Any:
        def compiled(*values: Any) -> Any:
            go_on.wait(60)
            return function(*values)

        return compiled

    monkeypatch.setattr(module.torch, "compile", slowly)
    events: list[Any] = []
    trainer = Trainer(tiny_config(compile="on", max_steps=6), events.append, threading.Event())
    emit = trainer.emit

    def watch(event: Any) -> None:
        emit(event)
        if event["type"] == "log" and event["step"] == 3:
            assert trainer.compilation is not None  # three steps were made while the compiler was at work
            go_on.set()
            trainer.compilation.thread.join(60)

    trainer.emit = watch
    assert trainer.loop() == "finished"
    assert trainer.model.compiled is not None
    assert [event["message"] for event in events if event.get("phase") == "compiling"] == [
        "compiling meanwhile", "compiled; steps are faster from here on",
    ]  # fmt: skip
    plain: list[Any] = []
    train(tiny_config(compile="off", max_steps=6, checkpoint_dir=str(tmp_path / "plain")), plain.append)
    assert [e["loss"] for e in events if e["type"] == "log"] == [e["loss"] for e in plain if e["type"] == "log"]


@pytest.mark.parametrize("words", [(), ("no C++ compiler was found",)])
def test_a_compiler_that_fails_is_told_and_the_run_goes_on(
    words: tuple[str, ...], tiny_config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError(*words)

    monkeypatch.setattr(module.torch, "compile", lambda _: broken)
    model = MiniGPT(tiny_config())
    compilation = Compilation(model, (4, 16))
    compilation.thread.join(60)
    assert compilation.news() == "could not compile (RuntimeError); training goes on as before"
    assert "the model could not be compiled" in caplog.text
    assert model.compiled is None
