"""Golden loss curves: a refactor must not change what is learnt. Twenty steps of each architecture with each optimizer against recorded losses.

After a change that is meant to change them, record them anew with `python tests/test_golden.py --write` and say why in the commit.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest

from minigpt import optim
from minigpt.config import TransformerConfig
from minigpt.corpus import BUILT_IN, read_text
from minigpt.events import Event
from minigpt.train import train

RECORDED = Path(__file__).parent / "golden.json"
CASES = [f"{arch}-{optimizer}" for arch, optimizer in itertools.product(("gpt2", "modern"), ("adamw", "muon"))]
TOLERANCE = 1e-4  # relative: other processors add in another order; a real change shows in the third digit
STEPS = 20


def losses(case: str, folder: Path, *, rate: float = 0.01) -> list[float]:
    """Train one case on an excerpt of the built-in plays and return the loss of each step."""
    arch, optimizer = case.split("-")
    text = folder / "excerpt.txt"
    text.write_text(read_text(BUILT_IN)[:40_000], encoding="utf-8")
    found: list[float] = []

    def note(event: Event) -> None:
        if event["type"] == "log":
            found.append(event["loss"])

    train(
        TransformerConfig(
            arch=arch, optimizer=optimizer, vocab_size=400, max_seq_len=32, d_model=32, n_heads=4, n_layers=2, d_ff=64, dropout=0.0,
            batch_size=8, learning_rate=rate, min_lr=0.001, weight_decay=0.1, warmup_steps=4, max_steps=STEPS, log_interval=1, eval_interval=STEPS,
            seed=7, device="cpu", precision="float32", threads=1, data_path=str(text), checkpoint_dir=str(folder / "run"),
        ),
        note,
    )  # fmt: skip
    return found


def recorded(case: str) -> list[float]:
    curve: list[float] = json.loads(RECORDED.read_text())[case]
    return curve


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_give_the_losses_that_were_recorded(case: str, tmp_path: Path) -> None:
    assert losses(case, tmp_path) == pytest.approx(recorded(case), rel=TOLERANCE)


def test_the_recorded_curves_are_whole_and_fall() -> None:
    curves = json.loads(RECORDED.read_text())
    assert set(curves) == set(CASES)
    assert all(len(curve) == STEPS and curve[-1] < curve[0] for curve in curves.values())


@pytest.mark.parametrize("case", CASES)
def test_a_rate_one_percent_too_high_is_noticed(case: str, tmp_path: Path) -> None:
    assert losses(case, tmp_path, rate=0.0101) != pytest.approx(recorded(case), rel=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_another_beta_of_adam_is_noticed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "ADAM_BETAS", (0.9, 0.96))
    assert losses(case, tmp_path) != pytest.approx(recorded(case), rel=TOLERANCE)


def main() -> None:
    """Record the curves."""
    with tempfile.TemporaryDirectory() as folder:
        curves = {case: [round(loss, 6) for loss in losses(case, Path(folder))] for case in CASES}
    RECORDED.write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python tests/test_golden.py --write")
    main()
