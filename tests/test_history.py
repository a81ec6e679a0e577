import itertools
import json
import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from minigpt.history import COLUMNS, MAX_POINTS, MAX_SAMPLES, SMOOTHING, History, Series, curves, read_history, replay, to_line

NAMES = {"train", "smoothed", "val", "lr", "grad_norm", "tokens_per_s"}
NAN, INF = math.nan, math.inf


def log(step: int, loss: float | None = 3.0, **more: Any) -> dict[str, Any]:
    return {
        "type": "log",
        "step": step,
        "max_steps": 100,
        "loss": loss,
        "perplexity": 20.0,
        "lr": 0.1,
        "grad_norm": 1.5,
        "elapsed": step / 10,
        **more,
    }


def evaluation(step: int, val_loss: float | None = 3.5) -> dict[str, Any]:
    return {"type": "eval", "step": step, "max_steps": 100, "val_loss": val_loss, "val_perplexity": 33.0, "best_val_loss": 3.0, "elapsed": step / 10}


def complete(step: int, val_loss: float | None = 3.25, reason: str = "finished") -> dict[str, Any]:
    return {**evaluation(step, val_loss), "type": "complete", "reason": reason}


def sample(step: int, text: str = "ROMEO:\nO") -> dict[str, Any]:
    return {"type": "sample", "step": step, "elapsed": 0.5, "loss": 3.0, "prompt": "ROMEO:", "text": text}


def told(*events: dict[str, Any]) -> History:
    history = History()
    for event in events:
        history.append(event)
    return history


# Series


def test_a_short_series_is_kept_as_it_came() -> None:
    series = Series()
    for x in range(100):
        series.add(x, x * x)
    assert series.x == list(range(100))
    assert series.y == [x * x for x in range(100)]
    assert series.epoch == 0


@pytest.mark.parametrize("cap", [20, 200, MAX_POINTS])
def test_a_long_series_keeps_its_extremes_in_few_points(cap: int) -> None:
    draw = random.Random(cap)
    values = [draw.gauss(0.0, 1.0) for _ in range(20_000)]
    values[7_777], values[13_001] = 50.0, -50.0
    series = Series(cap)
    for x, y in enumerate(values):
        series.add(x, y)
        assert len(series.x) == len(series.y) <= cap
    assert series.x == sorted(set(series.x))
    assert len(series.x) >= cap // 3
    assert {(7_777, 50.0), (13_001, -50.0)} <= set(zip(series.x, series.y, strict=True))
    assert all(values[x] == y for x, y in zip(series.x, series.y, strict=True))
    assert series.x[0] < 20_000 / cap * 4


@pytest.mark.parametrize("bad", [NAN, INF, -INF, None])
def test_a_value_that_is_not_finite_is_kept_as_none(bad: float | None) -> None:
    series = Series()
    for x, y in enumerate([1.0, bad, 2.0]):
        series.add(x, y)
    assert series.y == [1.0, None, 2.0]
    json.dumps(series.since(0, 0), allow_nan=False)


def test_a_reader_gets_only_what_it_lacks() -> None:
    series = Series()
    for x in range(5):
        series.add(x, float(x))
    assert series.since(0, 3) == {"e": 0, "i": 3, "x": [3, 4], "y": [3.0, 4.0]}
    assert series.since(0, 5) == {"e": 0, "i": 5, "x": [], "y": []}


@pytest.mark.parametrize(("epoch", "count"), [(-1, 0), (1, 2), (0, 99), (0, -3)])
def test_a_reader_who_is_out_of_step_gets_everything(epoch: int, count: int) -> None:
    series = Series()
    for x in range(5):
        series.add(x, float(x))
    assert series.since(epoch, count) == {"e": 0, "i": 0, "x": [0, 1, 2, 3, 4], "y": [0.0, 1.0, 2.0, 3.0, 4.0]}


def test_a_reader_who_follows_holds_the_same_curve_as_the_series_across_thinnings() -> None:
    series = Series(50)
    have_x: list[int] = []
    have_y: list[float | None] = []
    epoch = -1
    epochs = set()
    draw = random.Random(1)
    for x in range(3000):
        series.add(x, draw.random())
        if x % 7 == 0:
            piece = series.since(epoch, len(have_x))
            have_x, have_y, epoch = have_x[: piece["i"]] + piece["x"], have_y[: piece["i"]] + piece["y"], piece["e"]
            epochs.add(epoch)
            assert have_x == series.x
            assert have_y == pytest.approx(series.y, rel=1e-5)
    assert len(epochs) > 3


# History


def test_each_kind_of_number_has_its_series() -> None:
    history = told(log(1, 4.0, tokens_per_s=900.0), log(2, 3.0), evaluation(2, 3.5))
    assert set(history.series) == NAMES
    assert (history.series["train"].x, history.series["train"].y) == ([1, 2], [4.0, 3.0])
    assert (history.series["lr"].y, history.series["grad_norm"].y) == ([0.1, 0.1], [1.5, 1.5])
    assert history.series["tokens_per_s"].x == [1]
    assert (history.series["val"].x, history.series["val"].y) == ([2], [3.5])


def test_the_final_validation_is_on_the_curve_once() -> None:
    assert told(evaluation(10), complete(12, 3.25)).series["val"].x == [10, 12]
    assert told(evaluation(12), complete(12, 3.25)).series["val"].x == [12]
    assert told(evaluation(10), complete(12, None)).series["val"].x == [10]


def test_a_nan_is_marked_and_not_taken_for_the_last_loss() -> None:
    history = told(log(1, 4.0), log(2, NAN, grad_norm=INF))
    assert history.series["train"].y == [4.0, None]
    assert history.series["grad_norm"].y == [1.5, None]
    assert history.series["smoothed"].y == [4.0]
    json.dumps(history.since({}), allow_nan=False)
    json.dumps(history.to_dict(), allow_nan=False)


def test_the_mark_of_a_diverged_step_outlives_thinning() -> None:
    history = told(*(log(n) for n in range(1, 5000)), log(5000, NAN), complete(4999, None, "diverged"))
    assert (history.series["train"].x[-1], history.series["train"].y[-1]) == (5000, None)


def test_a_finished_curve_reaches_its_last_step() -> None:
    history = told(*(log(n, 1 + 1 / n) for n in range(1, 5004)), complete(5003))
    assert history.series["train"].x[-1] == 5003
    assert min(y for y in history.series["train"].y if y is not None) == 1 + 1 / 5003


def test_smoothing_forgets_its_start_and_follows_by_hand() -> None:
    history = told(log(1, 5.0), log(2, 1.0), log(3, 1.0))
    expected, average, weight = [], 0.0, 0.0
    for loss in (5.0, 1.0, 1.0):
        average, weight = SMOOTHING * average + (1 - SMOOTHING) * loss, SMOOTHING * weight + 1 - SMOOTHING
        expected.append(average / weight)
    assert history.series["smoothed"].y == pytest.approx(expected)
    assert expected[0] == pytest.approx(5.0)


def test_smoothing_sees_every_loss_also_those_that_are_not_drawn() -> None:
    losses = [math.sin(n) for n in range(9000)]
    history = told(*(log(n, loss) for n, loss in enumerate(losses)))
    x, y = history.series["smoothed"].x[-1], history.series["smoothed"].y[-1]
    weights = [SMOOTHING ** (x - n) for n in range(x + 1)]
    assert y == pytest.approx(sum(w * loss for w, loss in zip(weights, losses, strict=False)) / sum(weights), rel=1e-6)


def test_the_table_has_one_row_for_each_event() -> None:
    history = told(*(log(n) for n in range(1, 3001)), evaluation(3000, 3.5), sample(3000), complete(3001, 3.25))
    frame = history.to_frame()
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == 3002
    assert frame["step"].tolist() == [*range(1, 3001), 3000, 3001]
    assert frame["step"].dtype == "int64"
    assert frame["loss"].notna().sum() == 3000
    assert frame["val_loss"].dropna().tolist() == [3.5, 3.25]


def test_an_empty_history_has_an_empty_table() -> None:
    assert History().to_frame().empty
    assert History().since({}) == {name: {"e": 0, "i": 0, "x": [], "y": []} for name in NAMES}


def test_samples_data_and_the_latest_of_each_kind_are_kept() -> None:
    data = {"type": "data", "corpus": "plays", "vocab_size": 60}
    history = told(data, sample(0, "noise"), sample(5, "verse"), log(1), log(2))
    assert history.last["data"] == data
    assert [entry["text"] for entry in history.samples] == ["noise", "verse"]
    assert history.last["log"]["step"] == 2


def test_an_event_of_an_unknown_kind_is_ignored() -> None:
    history = told({"type": "weather", "sky": "blue"}, {"nothing": 1}, log(1))
    assert len(history.to_frame()) == 1


def test_a_history_can_be_read_while_it_grows() -> None:
    history = History()
    failures: list[BaseException] = []
    begun, done = threading.Event(), threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                begun.set()
                piece = history.since({})["train"]
                assert len(piece["x"]) == len(piece["y"])
                frame = history.to_frame()
                assert frame["step"].tolist() == list(range(len(frame)))
                history.to_dict()
                assert history.smoothed_loss is None or 0 < history.smoothed_loss < 10
        except BaseException as error:  # noqa: BLE001  handed to the test's own thread
            failures.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert begun.wait(60)
    try:
        for n in range(1500):
            history.append(log(n))
    finally:
        done.set()
    reader.join(60)
    assert not reader.is_alive()
    assert failures == []


# Checkpoint


def test_what_a_checkpoint_keeps_is_plain_json_and_comes_back_as_curves() -> None:
    history = told(*(log(n, 3 + 1 / n, tokens_per_s=1e5 / 3) for n in range(1, 4001)), evaluation(4000, 3.123456789), sample(4000))
    kept = json.loads(json.dumps(history.to_dict(), allow_nan=False))
    found = curves(kept["series"])
    assert set(found) == NAMES
    for name, (x, y) in found.items():
        assert x == history.series[name].x
        assert y == pytest.approx(history.series[name].y, rel=1e-5)
    assert kept["samples"] == history.samples


def test_gaps_come_back_as_gaps() -> None:
    kept = told(log(1, 4.0), log(2, NAN)).to_dict()
    assert curves(kept["series"])["train"] == ([1, 2], [4.0, None])


@pytest.mark.parametrize(
    "stored", [None, 3, "train", [], [1, 2], {}, {"train": None}, {"train": [1, 2]}, {"train": {}}, {"other": {"x": [1], "y": [1]}}]
)
def test_what_is_no_set_of_curves_gives_none(stored: object) -> None:
    assert curves(stored) == {}


@pytest.mark.parametrize(
    "curve",
    [
        {"x": [1, 2], "y": [1.0]},
        {"x": ["1"], "y": [1.0]},
        {"x": [NAN], "y": [1.0]},
        {"x": [True], "y": [1.0]},
        {"x": [None], "y": [1.0]},
        {"x": [10**400], "y": [1.0]},
        {"x": "12", "y": "12"},
        {"x": {"0": 1}, "y": [1.0]},
        {"x": list(range(100_000)), "y": [1.0] * 100_000},
    ],
    ids=["lengths", "text", "nan", "bool", "none", "huge", "strings", "dict", "long"],
)
def test_a_curve_of_wrong_shape_or_type_is_dropped_and_the_others_stay(curve: Any) -> None:
    assert curves({"train": curve, "val": {"x": [5], "y": [2.5]}}) == {"val": ([5], [2.5])}


@pytest.mark.parametrize("value", ["<b>", True, NAN, INF, [1], {}, 10**400], ids=["text", "bool", "nan", "inf", "list", "dict", "huge"])
def test_a_wrong_value_in_a_curve_becomes_a_gap(value: Any) -> None:
    assert curves({"val": {"x": [5, 6], "y": [value, 2.5]}}) == {"val": ([5, 6], [None, 2.5])}


# File


def written(path: Path, *lines: dict[str, Any] | str | bytes) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else (line if isinstance(line, str) else to_line(line)).encode()) + b"\n" for line in lines)
    )
    return path


def test_an_event_is_one_line_of_strict_json() -> None:
    line = to_line(log(3, NAN, grad_norm=INF, note="“two\nlines” \u2028 \r end"))
    assert "\n" not in line
    assert "\r" not in line
    event = json.loads(line, parse_constant=lambda _: pytest.fail("not JSON"))
    assert (event["loss"], event["grad_norm"], event["step"]) == (None, None, 3)
    assert event["note"] == "“two\nlines” \u2028 \r end"


PLAYS = {"corpus": "plays", "characters": 100, "vocab_size": 9, "unknown_share": 0.0}


@pytest.mark.parametrize(
    "row",
    [{"type": "sample", "step": 1}, {"type": "sample", "step": 1, "text": 5}, {"type": "data"}, {"type": "complete", "step": 1, "val_loss": 2.0}],
)
def test_a_row_that_lacks_what_readers_need_is_counted_as_bad(tmp_path: Path, row: dict[str, Any]) -> None:
    read = read_history(written(tmp_path / "metrics.jsonl", log(1, 2.0), row, log(2, 1.9)))
    assert read.bad_lines == 1
    assert read.since({})["train"]["x"] == [1, 2]


def test_a_log_file_reads_back_as_it_was_told(tmp_path: Path) -> None:
    events = [{"type": "status", "phase": "preparing", "message": "…"}, {"type": "data", **PLAYS}, sample(0, "ROMEO:\n“O”\n")]
    events += [log(n, 4 - n / 100) for n in range(1, 50)] + [evaluation(49), log(50, NAN), complete(49, None, "diverged")]
    told_history = told(*events)
    read = read_history(written(tmp_path / "metrics.jsonl", *events))
    assert read.bad_lines == 0
    assert read.since({}) == told_history.since({})
    assert read.samples == told_history.samples
    assert read.last["data"] == told_history.last["data"]
    assert read.last["complete"]["reason"] == "diverged"
    assert read.to_frame().equals(told_history.to_frame())


def test_a_log_file_that_is_not_there_is_an_empty_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / "metrics.jsonl").to_frame().empty


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"   ",
        b'{"type": "log", "step": 2, "lo',
        b"\0\0\0\0\0\0",
        b"garbage",
        b"\x80\xff\xfe\x00binary\x01",
        b'{"type": "log", "step": 2, "loss": NaN}',
        b'{"type": "log", "step": 2, "loss": Infinity}',
        b'{"type": "log", "step": 2, "loss": 1e400}',
        b'{"type": "log", "step": 2, "loss": 1' + b"0" * 400 + b"}",
        b'{"type": "log", "step": 2, "loss": 1' + b"0" * 5000 + b"}",
        b'{"type": "log", "step": 2, "loss": "3"}',
        b'{"type": "log", "step": "2", "loss": 3.0}',
        b'{"type": "log", "step": 2.5, "loss": 3.0}',
        b'{"type": "log", "step": null, "loss": 3.0}',
        b'{"type": "log", "step": true, "loss": 3.0}',
        b'{"type": "log", "step": 1' + b"0" * 30 + b', "loss": 3.0}',
        b'{"type": "log", "loss": 3.0}',
        b'{"type": "log", "step": 2}',
        b'{"type": "log", "step": 2, "loss": 3.0, "lr": "x"}',
        b'{"type": "log", "step": 2, "loss": 3.0, "grad_norm": [1]}',
        b'{"type": "log", "step": 2, "loss": 3.0, "elapsed": "soon"}',
        b'{"type": "eval", "step": 2}',
        b'{"type": "sample", "step": 2, "elapsed": null, "text": "O"}',
        b'{"type": "sample", "step": 2, "elapsed": 1, "text": "\\ud800"}',
        b'{"type": "complete", "step": 3, "val_loss": 3.0, "reason": "finished", "elapsed": 1, "val_tokens_total": {}}',
        b'{"type": "eval", "step": 2, "val_loss": "low"}',
        b'{"type": "complete", "val_loss": 3.0}',
        b'{"type": ["log"], "step": 2, "loss": 3.0}',
        b'{"step": 2}',
        b"[1, 2]",
        b"3",
        b"null",
        b"[" * 100_000,
    ],
    ids=lambda line: line[:60].decode(errors="replace"),
)
def test_a_damaged_line_is_counted_and_costs_nothing_else(line: bytes, tmp_path: Path) -> None:
    read = read_history(written(tmp_path / "metrics.jsonl", log(1, 4.0), evaluation(1), line, log(3, 3.0), evaluation(3), complete(3)))
    assert read.bad_lines == 1
    undamaged = told(log(1, 4.0), evaluation(1), log(3, 3.0), evaluation(3), complete(3))
    assert read.since({}) == undamaged.since({})
    assert read.to_frame().equals(undamaged.to_frame())
    assert read.last["log"] == undamaged.last["log"]


def test_a_file_cut_in_the_middle_of_a_line_keeps_all_lines_before(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", *(log(n) for n in range(10)))
    path.write_bytes(path.read_bytes()[:-20])
    read = read_history(path)
    assert read.series["train"].x == list(range(9))
    assert read.bad_lines == 1


def test_unknown_kinds_in_a_file_are_not_damage(tmp_path: Path) -> None:
    assert read_history(written(tmp_path / "metrics.jsonl", {"type": "weather"}, log(1))).bad_lines == 0


def test_a_resume_drops_what_came_after_its_step(tmp_path: Path) -> None:
    events = [sample(0), *(log(n, 4.0) for n in range(1, 11)), evaluation(5), evaluation(10, 9.0), sample(10, "lost"), complete(10)]
    resumed = [{"type": "resume", "step": 6}, *(log(n, 2.0) for n in range(7, 9)), evaluation(8, 2.5)]
    read = read_history(written(tmp_path / "metrics.jsonl", *events, *resumed))
    assert read.series["train"].x == list(range(1, 9))
    assert read.series["train"].y == [4.0] * 6 + [2.0] * 2
    assert read.series["val"].x == [5, 8]
    assert [entry["step"] for entry in read.samples] == [0]
    assert "complete" not in read.last


def test_two_resumes_in_a_row_are_followed_in_order(tmp_path: Path) -> None:
    lines = [*(log(n, 4.0) for n in range(1, 11)), {"type": "resume", "step": 8}, log(9, 3.0), {"type": "resume", "step": 4}, log(5, 2.0)]
    read = read_history(written(tmp_path / "metrics.jsonl", *lines))
    assert read.series["train"].x == [1, 2, 3, 4, 5]
    assert read.series["train"].y == [4.0] * 4 + [2.0]


@pytest.mark.parametrize("odd", [{"step": [1]}, {"step": "x"}, {"step": None}, {"step": 10**30}, {"elapsed": "long"}, {"text": 7}])
def test_a_stored_sample_that_cannot_be_one_is_left_out(odd: dict[str, Any]) -> None:
    sample = {"step": 1, "elapsed": 1.0, "loss": 3.0, "prompt": "a", "text": "b"}
    assert list(replay({"samples": [sample, {**sample, **odd}]})) == [{**sample, "type": "sample"}]


def test_a_checkpoint_keeps_the_ends_of_a_month_of_samples_and_an_even_choice_between_them() -> None:
    history = History()
    for minute in range(30 * 24 * 60):
        history.append({"type": "sample", "step": minute, "elapsed": 60.0 * minute, "loss": 3.0, "prompt": "a", "text": "b"})
    steps = [kept["step"] for kept in history.to_dict()["samples"]]
    assert (len(steps), steps[0], steps[-1]) == (MAX_SAMPLES, 0, 30 * 24 * 60 - 1)
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert max(gaps) - min(gaps) <= 1
    assert len(history.samples) == 30 * 24 * 60, "a page still has them all"
