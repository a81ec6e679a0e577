"""Several processes training one model over gloo, with a tiny model: started by torchrun itself, or forked with the environment it gives them."""

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forks
import pytest

from minigpt import cli, distributed
from minigpt.config import TransformerConfig
from minigpt.errors import ConfigError
from minigpt.presets import PRESETS
from minigpt.runs import RunManager

ROOT = Path(__file__).parent.parent
LIMIT_S = 90
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
Done = subprocess.CompletedProcess[str]


def torchrun(folder: Path, *arguments: str) -> Done:
    """Let torchrun run the command line in two processes, and return how it went."""
    environment = {**os.environ, "MINIGPT_HOME": str(folder / "runs"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *TWO, "-m", "minigpt", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def two_of(folder: Path, work: Callable[..., object], *arguments: object) -> tuple[Done, Done]:
    """Run a function in two processes that have what torchrun gives to each, and return how they went. No agent ends one when the other fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}

    def run(rank: int) -> Done:
        environment = {**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "MINIGPT_HOME": str(folder / "runs")}
        return forks.run(work, *arguments, cwd=folder, env=environment, timeout=LIMIT_S)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(run, (0, 1))
    return first, second


def flags(config: TransformerConfig) -> list[str]:
    names = (*TransformerConfig.model_fields,)
    return [f"--{name}={value}" for name in names if name in config.model_fields_set and (value := getattr(config, name)) is not None]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in found if event["type"] == kind]


def check_that_they_learn_what_one_learns(tiny_config: Any, folder: Path, launch: Callable[[list[str]], Done], **settings: Any) -> None:
    together, alone = folder / "together", folder / "alone"
    settings |= {"precision": "float32", "max_steps": 30, "eval_interval": 10}
    two = launch(["train", *flags(tiny_config(checkpoint_dir=str(together), **settings))])
    assert two.returncode == 0, two.stderr
    config = tiny_config(checkpoint_dir=str(alone), **settings)
    same = PRESETS["quick"].config(**config.model_dump(include=config.model_fields_set))  # from which the command line starts
    RunManager(folder).create(same, preset="quick").work()
    for kind, key, count in (("log", "loss", 30), ("eval", "val_loss", 4), ("complete", "val_loss", 1)):
        expected = [event[key] for event in events(alone, kind)]
        assert len(expected) == count
        assert [event[key] for event in events(together, kind)] == pytest.approx(expected, abs=1e-5, rel=0)
    assert {path.name for path in together.iterdir()} == {path.name for path in alone.iterdir()}
    assert two.stdout.count("reading the text\n") == 1  # one of them speaks
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_two_processes_of_torchrun_learn_what_one_learns(tiny_config: Any, tmp_path: Path) -> None:
    check_that_they_learn_what_one_learns(tiny_config, tmp_path, lambda arguments: torchrun(tmp_path, *arguments), arch="modern", optimizer="muon")


@posix
@pytest.mark.slow
def test_so_they_do_with_the_other_architecture_and_optimizer(tiny_config: Any, tmp_path: Path) -> None:
    def launch(arguments: list[str]) -> Done:
        first, second = two_of(tmp_path, cli.main, arguments)
        assert (second.returncode, second.stdout) == (0, ""), second.stderr
        return first

    check_that_they_learn_what_one_learns(tiny_config, tmp_path, launch, arch="gpt2", optimizer="adamw")


PROGRAM = """
import os, sys, threading
from pathlib import Path
from minigpt import distributed
from minigpt.checkpoint import read_checkpoint
from minigpt.config import TransformerConfig

rank = int(os.environ["RANK"])
config = TransformerConfig.model_validate_json(Path("config.json").read_text())
"""
STOPPED = (
    PROGRAM
    + """
def gloo_threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))  # none where there is no /proc

class Late(threading.Event):
    asked = 0
    def is_set(self):
        self.asked += 1
        self.threads = gloo_threads()
        return super().is_set() or (rank == 1 and self.asked > 20)  # the second process alone is asked to stop

said = []
stop = Late()
model, _ = distributed.train(config, said.append, stop)
assert not distributed.dist.is_initialized()
assert gloo_threads() < stop.threads or not stop.threads  # one that is busy while the interpreter ends aborts the process
weights = float(sum(p.double().abs().sum() for p in model.parameters()))
Path(f"rank{rank}.txt").write_text(f"{weights!r} {[e['reason'] for e in said if e['type'] == 'complete']} {threading.Event.is_set(stop)}")
"""
)
BROKEN = (
    PROGRAM
    + """
def save(self, name):
    raise OSError(28, "No space left on device")

distributed.RankTrainer.save = save
distributed.RankTrainer.tolerant_save = lambda *_: None
try:
    distributed.train(config, None, None)
finally:
    Path(f"rank{rank}.txt").write_text(str(distributed.dist.is_initialized()))
"""
)


@posix
@pytest.mark.slow
def test_a_stop_asked_of_one_process_stops_all_at_the_same_step(tiny_config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(tiny_config(max_steps=100_000, eval_interval=100_000).model_dump_json())
    (tmp_path / "program.py").write_text(STOPPED)
    for done in two_of(tmp_path, runpy.run_path, "program.py"):
        assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"rank{rank}.txt").read_text().split(" ", 1) for rank in (0, 1))
    assert first[0] == second[0]  # the very same weights
    assert (first[1], second[1]) == ("['stopped'] True", "[] True")


@posix
@pytest.mark.slow
def test_when_one_process_fails_the_group_is_torn_down_and_none_waits_for_it(tiny_config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(tiny_config(max_steps=3).model_dump_json())
    (tmp_path / "program.py").write_text(BROKEN)
    first, second = two_of(tmp_path, runpy.run_path, "program.py")
    assert (first.returncode, second.returncode) == (1, 1)
    assert "No space left on device" in first.stderr
    assert (tmp_path / "rank0.txt").read_text() == "False"


def test_a_batch_that_cannot_be_split_is_refused_with_one_that_can(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="batch_size is 10; it must be a multiple of the number of processes, 4: try 12"):
        distributed.train(tiny_config(batch_size=10))


def test_without_torchrun_the_plain_trainer_is_used(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(distributed, "RankTrainer", None)
    model, _ = distributed.train(tiny_config(max_steps=3))
    assert model.count_parameters() > 0


def test_only_the_first_process_complains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["train", "--n-heads", "5"]) == 2
    assert capsys.readouterr().err.count("n_heads is 5") == 1
