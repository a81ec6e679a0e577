"""Places named on the command line are tried before a run is spent on them."""

import sys
from pathlib import Path

import pytest

from minigpt import cli, system
from minigpt.cli_flags import TrainRequest, parse_train
from minigpt.errors import ConfigError


def parsed(*arguments: str) -> TrainRequest:
    return parse_train(cli.Parser(prog="minigpt train", allow_abbrev=False), arguments)


@pytest.mark.skipif(sys.platform == "win32", reason="other limits there")
@pytest.mark.parametrize("name", ["weights", "vocab_path", "checkpoint_path"])
@pytest.mark.parametrize(
    "place",
    ["file/w", "x" * 240, "x" * 300 + "/w", pytest.param("/proc/w", marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc"))],
    ids=["inside a file", "too long", "on a way too long", "where nothing can be made"],
)
def test_an_output_that_cannot_be_written_is_refused_before_training(name: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    impossible = tmp_path / place
    before = list(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as refused:
        parsed(f"--{name.replace('_', '-')}", str(impossible), "--n-layers", "0")
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"{name} is {str(impossible)!r}, which cannot be written (")
    assert first.endswith("): choose another place")
    assert second.startswith("n_layers is")
    assert list(tmp_path.rglob("*")) == before


def test_outputs_that_can_be_written_are_tried_and_leave_nothing(tmp_path: Path) -> None:
    request = parsed(*(f"--{name}={tmp_path / 'new' / 'deep' / name}" for name in ("weights", "vocab-path", "checkpoint-path")))
    assert request.weights == tmp_path / "new" / "deep" / "weights"
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_told_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError) as refused:
        system.write_atomically(tmp_path / "taken", b"x")
    assert refused.value.filename == str(tmp_path / "taken")
