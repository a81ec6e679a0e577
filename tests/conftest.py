"""What every test shares: the environment set before torch is imported, a home of its own, tiny text, tiny settings."""

import gc
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from minigpt.system import prepare_environment  # noqa: E402  the path comes first

prepare_environment()
os.environ["MINIGPT_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores are shared by everything that runs; tests that want threads ask for them
_home = tempfile.TemporaryDirectory(prefix="minigpt-tests-")
os.environ["MINIGPT_HOME"] = _home.name

from minigpt.config import TransformerConfig  # noqa: E402  the environment comes first

if TYPE_CHECKING:
    from minigpt.runs import RunManager

TIMEOUT_S = 120.0
ConfigFactory = Callable[..., TransformerConfig]

SPEAKERS = ("ROMEO", "JULIET", "NURSE", "FRIAR")
WORDS = (
    "love", "night", "the", "a", "of", "my", "thy", "and", "in", "sweet", "rose", "moon", "sorrow", "eyes", "light", "to", "with", "grave", "hath",
    "sun", "heart", "sleep", "gentle", "death", "so", "tell", "no", "but", "for", "me", "o'er", "ne'er", "say'st", "well-fed", "true-love", "king",
    "crown", "sword", "hand", "fair", "stars", "dream",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "browser: drives a real browser")
    if config.pluginmanager.hasplugin("timeout") and config.getoption("timeout", None) is None and not os.environ.get("PYTEST_TIMEOUT"):
        config.option.timeout = TIMEOUT_S


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of libraries, which live as long as the process, need not be looked through again and again


def pytest_unconfigure() -> None:
    _home.cleanup()


def verse(lines: int, seed: int = 7) -> str:
    """Write verse-like text: speeches of a few lines under a speaker's name; frequent words come early in the list."""
    draw = random.Random(seed)
    written: list[str] = []
    while len(written) < lines:
        written.append(f"{draw.choice(SPEAKERS)}:")
        for _ in range(draw.randint(1, 4)):
            words = [WORDS[min(int(draw.expovariate(0.12)), len(WORDS) - 1)] for _ in range(draw.randint(4, 8))]
            written.append(" ".join(words).capitalize() + draw.choice([",", ".", "!", "?", ";", "--"]))
        written.append("")
    return "\n".join(written) + "\n"


@pytest.fixture(scope="session")
def tiny_text() -> str:
    """Return about 300 lines, 2,000 tokens."""
    return verse(300)


@pytest.fixture
def tiny_config(tmp_path: Path, tiny_text: str) -> ConfigFactory:
    """Return a factory of settings whose run takes a fraction of a second, in a folder of its own."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(tiny_text, encoding="utf-8")

    def make(**changes: Any) -> TransformerConfig:
        settings: dict[str, Any] = {
            "vocab_size": 60, "max_seq_len": 16, "d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 32, "dropout": 0.0,
            "batch_size": 4, "learning_rate": 0.01, "min_lr": 0.0, "warmup_steps": 2, "max_steps": 12, "log_interval": 1, "eval_interval": 5,
            "device": "cpu", "threads": 1, "data_path": str(corpus), "checkpoint_dir": str(tmp_path / "run"),
        }  # fmt: skip
        return TransformerConfig(**{**settings, **changes})

    return make


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["RunManager"]:
    """Return a manager with a home of its own, which fetches nothing and whose run is stopped at the end."""
    from minigpt import runs

    monkeypatch.setattr(runs, "_warm_up", lambda: None)
    made = runs.RunManager(tmp_path / "home")
    yield made
    made.shutdown(60.0)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Give back what a signal does, so that Ctrl-C ends the tests after one that ran a command in this process."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _global_randomness() -> Iterator[None]:
    """Give back torch's global random state and thread count, so that no test depends on the one before."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    state, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
