"""The bench: every row can be measured, and its arithmetic and direction are right. Trainings are cut to a few steps; no figure is judged."""

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minigpt import bench
from minigpt.bench import learning, peers
from minigpt.bench.setup import Pair, Setup, take_turns
from minigpt.cli import main
from minigpt.config import parameter_count
from minigpt.model import MiniGPT

HEAVY = ["words-time", "words-loss", "chars-time", "throughput-transformers", "long-run"]
PAGE = ["page-1", "page-5", "start", "click"]
TARGETS = {
    "words-time": 60, "words-loss": 0.2, "chars-time": 6, "throughput-plain": 1.5, "throughput-transformers": 1.5, "page-1": 0.95, "page-5": 0.9,
    "busy-core": 0.4, "long-run": 1.05, "evaluation-share": 0.1, "start": 6, "click": 1, "generate": 500,
}  # fmt: skip
NONE = math.nan
AT_MOST = {"long-run", "evaluation-share", "start", "click"}
KEYS = {"name", "ours", "other", "unit", "value", "target", "at_least", "text"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("bench") / "verse.txt"
    path.write_text(tiny_text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def setup(corpus: Path) -> Iterator[Setup]:
    with bench.prepared(str(corpus), repeats=1, share=0.002) as setup:
        yield setup


def check_measured(row: bench.Row) -> None:
    assert set(row) == KEYS
    assert row["text"] == "verse.txt"
    assert row["target"] == TARGETS[row["name"]]
    assert row["at_least"] == (row["name"] not in AT_MOST)
    assert all(math.isfinite(row[key]) for key in ("ours", "other", "value") if row[key] is not None)
    assert bench.line(row).startswith(row["name"])


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in TARGETS if name not in PAGE])
def test_a_row_of_training_can_be_measured(name: str, setup: Setup) -> None:
    check_measured(bench.measure(name, setup))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["page-1", "click"])  # page-5 is page-1 with another number; both wait for the start
def test_a_row_of_the_page_can_be_measured(name: str, setup: Setup) -> None:
    row = bench.measure(name, setup)
    check_measured(row)
    assert row["ours"] > 0
    assert (row["other"] is None) == (name != "page-1")


def test_every_row_has_the_target_it_was_given() -> None:
    assert {name: kind.target for name, kind in bench.KINDS.items()} == TARGETS
    assert {name for name, kind in bench.KINDS.items() if not kind.at_least} == AT_MOST


@pytest.mark.parametrize(
    ("name", "pair", "value", "met"),
    [
        ("words-time", (2.0, 120.0), 60.0, True),
        ("words-time", (2.0, 119.0), 59.5, False),
        ("words-loss", (4.0, 4.25), 0.25, True),
        ("words-loss", (4.25, 4.0), -0.25, False),
        ("throughput-plain", (300.0, 200.0), 1.5, True),
        ("throughput-plain", (200.0, 300.0), 2 / 3, False),
        ("long-run", (21.0, 20.0), 1.05, True),
        ("long-run", (22.0, 20.0), 1.1, False),
        ("start", (5.0, NONE), 5.0, True),
        ("start", (7.0, NONE), 7.0, False),
        ("generate", (499.0, NONE), 499.0, False),
        ("words-time", (NONE, 100.0), None, None),
        ("throughput-transformers", (100.0, NONE), None, None),
    ],
)
def test_a_value_is_made_of_both_sides_and_held_against_its_target(name: str, pair: Pair, value: float | None, met: bool | None) -> None:
    row = bench.row(name, [pair], "x")
    assert row["value"] == (value if value is None else pytest.approx(value))
    assert bench.is_met(row) is met
    assert [row["ours"], row["other"]] == [None if math.isnan(side) else side for side in pair]
    assert bench.line(row).endswith({True: " yes", False: " no", None: " no figure"}[met])


def test_seeds_give_means_of_each_side_and_of_the_ratios_with_their_spread() -> None:
    row = bench.row("words-time", [(1.0, 50.0), (2.0, 140.0)], "x")
    assert (row["ours"], row["other"], row["value"]) == (1.5, 95.0, 60.0)
    assert row["spread"] == pytest.approx(math.sqrt(200))
    assert "±14" in bench.line(row)
    assert bench.row("words-time", [(1.0, 50.0), (NONE, 140.0)], "x")["value"] is None


def test_only_the_rows_that_train_to_a_loss_are_repeated_with_other_seeds(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def measure(_: Setup, seed: int) -> Pair:
        seen.append(seed)
        return 1.0, 60.0 + seed

    for name in ("words-time", "generate"):
        monkeypatch.setitem(bench.KINDS, name, bench.KINDS[name]._replace(measure=measure))
    three = Setup(setup.corpus, setup.folder, seeds=3)
    assert bench.measure("words-time", three)["spread"] == 1.0
    assert "spread" not in bench.measure("generate", three)
    assert seen == [1337, 1338, 1339, 1337]


def test_both_sides_take_turns_in_coming_first_and_the_median_counts() -> None:
    order: list[str] = []
    ours, other = iter([1.0, 9.0, 2.0]), iter([5.0, 4.0, 90.0])

    def side(name: str, values: Iterator[float]) -> float:
        order.append(name)
        return next(values)

    assert take_turns(lambda: side("a", ours), lambda: side("b", other), 3) == (2.0, 5.0)
    assert order == list("abbaab")


def test_the_time_to_a_loss_is_that_of_the_first_point_at_or_below_it() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (3.0, 4.5), (4.0, 3.0)]
    assert learning.time_to(points, 4.2) == 2.0
    assert learning.time_to(points, 4.0) == 2.0
    assert math.isnan(learning.time_to(points, 2.9))


def test_a_curve_ends_at_the_last_step_and_its_clock_never_goes_back(setup: Setup) -> None:
    config = setup.config("quick", threads=1)
    config.max_steps = 7
    points = list(learning.learn(config, 3))
    assert len(points) == 4  # stretches of two steps, the last of one
    assert [seconds for seconds, _ in points] == sorted(seconds for seconds, _ in points)
    assert points[-1][1] < points[0][1]


def test_our_models_are_not_larger_than_those_they_are_held_against(setup: Setup) -> None:
    assert parameter_count(setup.config("quick")) <= parameter_count(setup.config("classic"))
    assert parameter_count(setup.config("chars")) <= parameter_count(setup.config("chars", **learning.USUAL_CHARS))


def test_the_plain_loop_trains_the_very_same_model(tiny_config: Any) -> None:
    config = tiny_config(arch="gpt2")
    model, x = MiniGPT(config), torch.randint(60, (2, 16))
    ours = model(x)
    for block in model.blocks:
        plain = peers.PlainAttention(config, 0)
        plain.load_state_dict(block.attention.state_dict())
        block.attention = plain
    torch.testing.assert_close(model(x), ours)


def test_a_peer_that_is_not_installed_leaves_its_side_empty(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    row = bench.measure("throughput-transformers", setup)
    assert row["ours"] > 0
    assert (row["other"], row["value"], bench.is_met(row)) == (None, None, None)


def test_a_name_that_is_no_row_is_refused_with_the_names_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "generate", "speed"]) == 2
    captured = capsys.readouterr()
    assert "'speed' is not a row; the rows are words-time, words-loss, chars-time" in captured.err
    assert captured.out == ""


def test_a_number_of_seeds_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--seeds", "0"]) == 2
    assert "seeds is 0; it must be 1 or more: try 5" in capsys.readouterr().err


def test_the_command_prints_a_table_that_names_the_text(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "generate", "--data", str(corpus)]) == 0
    title, head, line = capsys.readouterr().out.splitlines()
    assert title == "trained on verse.txt"
    assert head.split() == ["row", "ours", "other", "unit", "value", "target", "met"]
    assert line.startswith("generate ")


def test_the_command_prints_json_of_one_object_a_row(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", "--only", "generate", "--data", str(corpus)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == KEYS
    assert (row["name"], row["other"], row["target"], row["at_least"]) == ("generate", None, 500, True)
    assert row["value"] == row["ours"] > 0


def test_a_text_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "generate", "--data", "/nowhere.txt"]) == 1
    assert "'nowhere.txt' cannot be read" in capsys.readouterr().err
