import asyncio
import errno
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import gradio as gr
import orjson
import pytest
import torch
from gradio.state_holder import SessionState
from safetensors.torch import save_file

from minigpt import foreign
from minigpt.checkpoint import save_checkpoint
from minigpt.cli import Parser
from minigpt.cli_flags import parse_train
from minigpt.config import TransformerConfig, extra, fields
from minigpt.data import MAX_TEXT
from minigpt.errors import CheckpointError, ConfigError, DataError, MiniGPTError
from minigpt.foreign import open_any
from minigpt.history import MAX_POINTS, History
from minigpt.model import MiniGPT
from minigpt.optim import get_lr
from minigpt.past import open_run
from minigpt.presets import PRESETS
from minigpt.runs import Run, RunManager
from minigpt.tokenizer import WordTokenizer
from minigpt.ui import charts, checkpoint_tab, feed, form, page, pages, runs_list, shelf, train_tab, words
from minigpt.ui.api import Api
from minigpt.ui.refusals import LABELS, markup, refusing, sentence

LIMIT_S = 60.0
TINY: dict[str, Any] = {
    "vocab_size": 60, "max_seq_len": 8, "d_model": 8, "n_heads": 2, "n_layers": 1, "d_ff": 16, "batch_size": 2, "warmup_steps": 1,
    "max_steps": 12, "log_interval": 1, "eval_interval": 5, "device": "cpu", "threads": 1,
}  # fmt: skip
MARKUP = '<img src=x onerror="alert(1)">'
SCRIPT = (Path(feed.__file__).parent / "feed.js").read_text(encoding="utf-8")
DATA = {
    "type": "data", "corpus": "plays", "characters": 12_000, "vocab_size": 2000, "unknown_share": 0.043,
    "uniform_loss": math.log(2000), "unigram_loss": 5.5,
}  # fmt: skip
SPEECHES = "ROMEO:\nlove\n\nFIRST CITIZEN:\nnight\n"
NAN, INF = math.nan, math.inf


@pytest.fixture
def run(manager: RunManager, tiny_text: str) -> Iterator[Run]:
    """Return a run that trains nothing: the tests tell it what happened."""
    made = manager._latest = manager.create(PRESETS["quick"].config(**TINY), preset="quick", text=tiny_text)
    yield made
    made.ended.set()  # nothing is left to wait for


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> RunManager:
    """Return a manager whose latest run has really trained."""
    manager = RunManager(tmp_path_factory.mktemp("trained"))
    manager._latest = manager.create(PRESETS["quick"].config(**TINY), preset="quick", text=tiny_text)
    manager.latest.work()
    assert manager.latest.state == "finished"
    return manager


def log(step: int, loss: float | None = 3.0, **more: Any) -> dict[str, Any]:
    return {
        "type": "log",
        "step": step,
        "max_steps": 12,
        "loss": loss,
        "lr": 0.1,
        "grad_norm": 1.5,
        "elapsed": step / 10,
        "tokens_per_s": 900.0,
        **more,
    }


def evaluation(step: int, val_loss: float | None = 3.5, **more: Any) -> dict[str, Any]:
    return {
        "type": "eval",
        "step": step,
        "max_steps": 12,
        "val_loss": val_loss,
        "best_val_loss": 3.0,
        "best_step": step,
        "elapsed": step / 10,
        **more,
    }


def complete(step: int = 12, val_loss: float | None = 3.25, **more: Any) -> dict[str, Any]:
    return {**evaluation(step, val_loss), "type": "complete", "reason": "finished", **more}


def end(run: Run, **more: Any) -> None:
    run.record(complete(**more))
    run.ended.set()


def tags(text: str) -> set[str]:
    """Return the names of the elements that a browser would make of a text."""
    found: set[str] = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _attributes: found.add(tag)  # type: ignore[method-assign]
    parser.feed(text)
    return found


# Words


@pytest.mark.parametrize(
    ("loss", "worse", "samples", "said"),
    [
        (None, 9.0, [SPEECHES], "The loss is not a number any more."),
        (20.0, 0.0, [], "It is worse than guessing at random: the learning rate may be too high."),
        (7.76, 0.0, [], "It is worse than guessing at random: the learning rate may be too high."),
        (7.74, 0.0, [], "It is guessing at random: surprise 7.6 = ln 2,000, every one of 2,000 words equally likely."),
        (7.46, 0.0, [], "It is guessing at random: surprise 7.6 = ln 2,000, every one of 2,000 words equally likely."),
        (7.44, 0.0, [SPEECHES], "It is finding out which words are common."),
        (5.56, 0.0, [], "It is finding out which words are common."),
        (5.54, 0.0, [], "It knows which words are common, and little else."),
        (5.16, 0.0, [SPEECHES], "It knows which words are common, and little else."),
        (5.14, 0.0, ["x", SPEECHES, "y"], "It knows that a name in capitals is followed by a colon and a new line."),
        (5.14, 0.0, ["ROMEO:\nlove\n", "JULIET:\nlove\n"], "It has learned which words follow which."),
        (5.14, 0.0, ["Romeo: love. JULIET: night"], "It has learned which words follow which."),
        (0.0, 0.49, [], "It has learned which words follow which."),
    ],
)
def test_every_rung_of_the_ladder_has_its_sentence(loss: float | None, worse: float, samples: list[str], said: str) -> None:
    assert words.milestone(loss, worse, DATA, samples, "words") == said


def test_a_validation_loss_that_rises_again_tells_of_learning_by_heart() -> None:
    assert words.milestone(1.0, 0.51, DATA, [SPEECHES], "words").startswith("It is learning this text by heart")


def test_the_verdict_keeps_what_was_said_of_learning_by_heart() -> None:
    told = words.verdict(
        "finished", complete(val_loss=8.78, best_val_loss=4.5, best_step=0), {**DATA, "vocab_size": 81, "uniform_loss": 4.394}, "words"
    )
    assert told == (
        "Done in 1 s. Of the part kept for validation it never knew more than a guess among 81 words. By the end it knew this text by heart, which "
        "does not help with the part kept for validation. A longer text would help."
    )
    assert "by heart" not in words.verdict("finished", complete(val_loss=3.4), DATA, "words")


@pytest.mark.parametrize(
    ("loss", "said"), [(8.78, "worse than guessing at random"), (4.5, "chooses among about 81 words"), (3.0, "chooses among about 20 words")]
)
def test_no_loss_is_said_to_choose_among_more_words_than_there_are(loss: float, said: str) -> None:
    small = {**DATA, "vocab_size": 81, "uniform_loss": math.log(81)}
    assert f"validation {loss:.2f} ({said})" in words.numbers({"eval": evaluation(5, loss)}, small, "words")


def test_a_milestone_needs_nothing_but_a_loss() -> None:
    assert words.milestone(3.0, 0.0, {}, [], "characters") == "It has learned which characters follow which."


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-1, "0 s"), (0, "0 s"), (0.4, "0 s"), (9.6, "10 s"), (89, "89 s"), (90, "2 min"), (200, "3 min"), (5399, "90 min"), (5400, "1.5 h")],
)
def test_times_are_written_as_a_person_says_them(seconds: float, said: str) -> None:
    assert words.duration(seconds) == said


@pytest.mark.parametrize(("loss", "said"), [(0.0, "1.0"), (1.0, "2.7"), (2.31, "10"), (7.6, "1,998"), (20.0, "485,165,195"), (1e300, "485,165,195")])
def test_a_loss_is_told_as_a_number_of_choices_that_never_overflows(loss: float, said: str) -> None:
    assert words.choices(loss) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "0"), (0.00031234, "0.0003123"), (-2.5, "-2.5"), (999.94, "999.9"), (1234.5, "1,234"), (-5000.0, "-5,000")]
)
def test_numbers_of_a_table_have_few_digits(value: float, said: str) -> None:
    assert words.figure(value) == said


@pytest.mark.parametrize(
    ("state", "message", "left", "said"),
    [
        ("preparing", "reading the text", None, "reading the text"),
        ("preparing", "", None, "getting ready"),
        ("training", "x", 12.0, "training · step 1,200 of 5,000 · about 12 s left"),
        ("training", "x", None, "training · step 1,200 of 5,000"),
        ("stopping", "x", 12.0, "stopping at step 1,200 of 5,000: saving, then one last look at the validation text"),
        ("finished", "x", None, "finished · step 1,200 of 5,000"),
        ("failed", "x", None, "failed · step 1,200 of 5,000"),
    ],
)
def test_the_status_says_where_a_run_stands(state: str, message: str, left: float | None, said: str) -> None:
    assert words.status(state, message, 1200, 5000, left) == said


@pytest.mark.parametrize(
    ("state", "end_event", "said"),
    [
        ("finished", complete(), "Done in 1 s. From 2,000 possible next words to about 20; best at step 12, saved."),
        ("finished", complete(reason="early"), "Stopped early after 1 s: the validation loss no longer fell. From 2,000"),
        (
            "stopped",
            complete(1500, best_step=1000),
            "Stopped after 2 min. From 2,000 possible next words to about 20; best at step 1,000, saved.",
        ),
        ("stopped", complete(best_val_loss=None), "Stopped after 1 s and saved."),
        ("stopped", {}, "Stopped before there was a model; nothing was saved."),
        (
            "diverged",
            complete(1233),
            "The loss stopped being a number at step 1,234. The last finite weights are saved. Try a learning rate of 0.0083, a third.",
        ),
        ("diverged", complete(0, best_val_loss=None), "The loss stopped being a number at step 1."),
        ("failed", {}, "The run could not go on: no text"),
        ("failed", complete(), "The run could not go on: no text"),
        ("example", complete(), "This one was done in 1 s. From 2,000"),
        ("preparing", {}, ""),
    ],
)
def test_every_ending_has_its_verdict(state: str, end_event: dict[str, Any], said: str) -> None:
    told = words.verdict(state, end_event, DATA, "words", "no text", 0.025)
    assert told.startswith(said)
    assert bool(told) == bool(said)


@pytest.mark.parametrize(
    ("step", "loss", "metadata", "said"),
    [
        (None, None, {}, "step not recorded · validation loss not recorded"),
        (1200, 3.0, {}, "step 1,200 · validation loss 3.00 · perplexity 20"),
        (
            1200,
            3.0,
            {"val_step": 1200, "best_step": 1200, "best_val_loss": 3.0},
            "step 1,200 · validation loss 3.00 · perplexity 20 · best of its run",
        ),
        (1200, 3.0, {"val_step": 1000}, "step 1,200 · validation loss 3.00 (measured at step 1,000) · perplexity 20"),
        (1200, None, {"best_step": 800, "best_val_loss": 2.5}, "step 1,200 · validation loss not recorded · its run's best is step 800 with 2.50"),
        (1200, None, {"best_step": 800, "best_val_loss": None}, "step 1,200 · validation loss not recorded · its run's best is step 800"),
        (None, 3.0, {"best_step": 800, "best_val_loss": 2.5}, "step not recorded · validation loss 3.00 · perplexity 20"),
        (7, 3.0, {"val_step": "x", "best_step": "y", "best_val_loss": "z"}, "step 7 · validation loss 3.00 · perplexity 20"),
        (7, 3.0, {"best_step": [8], "best_val_loss": {}}, "step 7 · validation loss 3.00 · perplexity 20"),
    ],
)
def test_a_checkpoint_s_worth_is_told_in_one_line(step: int | None, loss: float | None, metadata: dict[str, Any], said: str) -> None:
    assert words.checkpoint_verdict(step, loss, metadata) == said


def test_a_sample_s_tag_says_when_it_was_written() -> None:
    assert words.tag({"step": 1200, "elapsed": 8.2, "loss": 3.04}) == "step 1,200 · 8 s · surprise 3.0"
    assert words.tag({"step": 0, "elapsed": 0.0, "loss": None}) == "step 0 · 0 s"
    assert words.tag({"step": 0, "elapsed": 0.0}) == "step 0 · 0 s"


def test_what_was_read_is_told_once_it_is_known() -> None:
    assert words.coverage({}, "words") == ""
    assert words.coverage(DATA, "words") == "Read 12,000 characters of plays: 2,000 words known; 4.3 % of it is words outside the vocabulary."


def test_the_figures_of_the_moment_stand_beside_words() -> None:
    assert words.numbers({}, {}, "words") == ""
    assert words.numbers({"log": log(1, None)}, {}, "words") == ""
    assert words.numbers({"log": log(1)}, {}, "words") == "loss 3.00 · perplexity 20"
    measured = evaluation(5, 3.5, val_tokens=100, val_tokens_total=2000)
    assert words.numbers({"eval": measured}, DATA, "words") == (
        "validation 3.50 (chooses among about 33 words, on 100 of 2,000 tokens) · best 3.00 at step 5 · "
        "plays: 4.3 % of it is words outside the vocabulary"
    )
    assert "plays: all its characters are in the vocabulary" in words.numbers({}, DATA | {"unknown_share": 0.0}, "characters")
    assert "plays: 0.4 % of it is words outside the vocabulary" in words.numbers({}, DATA | {"unknown_share": 0.004}, "words")
    assert words.numbers({"eval": measured, "complete": complete()}, {}, "words").startswith("validation 3.25 (chooses among about 26 words) · best")
    assert words.numbers({"eval": measured, "complete": complete(val_loss=None)}, {}, "words").startswith("validation 3.50")


@pytest.mark.parametrize("loss", [NAN, INF])
def test_a_loss_that_is_not_a_number_is_not_written_as_one(loss: float) -> None:
    assert words.numbers({"log": log(5, loss), "eval": evaluation(5)}, {}, "words").startswith("validation 3.50")


# The form


@pytest.mark.parametrize("name", [*fields("model"), *fields("training")])
def test_every_setting_of_model_and_training_has_its_control(name: str) -> None:
    field = TransformerConfig.model_fields[name]
    made = form.control(name)
    assert name in form.NAMES
    assert (made.label, made.elem_id) == (field.title, f"setting-{name}")
    assert made.info == (field.description if name not in form.OPTIONAL else field.description.replace("empty means", "0 means"))
    assert made.value == dict(zip(form.NAMES, form.values_of(PRESETS["quick"].config()), strict=True))[name]
    if isinstance(made, gr.Radio):
        assert [value for _, value in made.choices] == list(get_args(field.annotation))
    elif extra(field)["slider"]:
        assert isinstance(made, gr.Slider)
        assert [made.minimum, made.maximum, made.step] == extra(field)["slider"]
    else:
        assert isinstance(made, gr.Number)


def test_the_form_has_nothing_but_settings_of_model_and_training() -> None:
    assert [*fields("model"), *fields("training")] == form.NAMES
    assert not set(form.NAMES) & set(fields("files"))


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_controls_pass_on_is_the_preset_they_were_set_to(preset: str) -> None:
    sent = json.loads(json.dumps(form.values_of(PRESETS[preset].config())))
    passed = [form.control(name).preprocess(value) for name, value in zip(form.NAMES, sent, strict=True)]
    assert form.read(preset, passed) == PRESETS[preset].config()


def test_an_optional_setting_is_empty_at_0_which_a_browser_makes_of_an_empty_number() -> None:
    for value in (0, None):
        values = [
            value if name in form.OPTIONAL else known for name, known in zip(form.NAMES, form.values_of(PRESETS["quick"].config()), strict=True)
        ]
        assert form.read("quick", values).max_epochs is None
    values = [3 if name in form.OPTIONAL else known for name, known in zip(form.NAMES, form.values_of(PRESETS["quick"].config()), strict=True)]
    assert form.read("quick", values).max_epochs == 3


NUMBERS = [name for name in form.NAMES if not isinstance(form.control(name), gr.Radio)]


@pytest.mark.parametrize("value", [10**12, -1, None])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_value_beyond_its_range_or_none_reaches_the_config_s_sentence(name: str, value: float | None) -> None:
    passed = form.control(name).preprocess(value)
    values = [passed if other == name else known for other, known in zip(form.NAMES, form.values_of(PRESETS["quick"].config()), strict=True)]
    if value is None and name in form.OPTIONAL:
        assert getattr(form.read("quick", values), name) is None
        return
    found = "empty" if value is None else str(value)
    with pytest.raises(ConfigError, match=f"^{name} is {found}; it must be "):
        form.read("quick", values)


@pytest.mark.parametrize("name", ["data_path", "checkpoint_dir", "checkpoint_path", "vocab_path", "nonsense", "", "__class__", "x" * 1000])
def test_only_what_stands_on_the_form_may_be_set(name: str) -> None:
    with pytest.raises(ConfigError, match="no such setting; the settings are arch, ") as refusal:
        form.checked("quick", {name: "x", "d_model": 64})
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("preset", [None, 5, True, "", "nope", "QUICK", ["quick"], {"quick": 1}, "x" * 1000])
def test_a_preset_that_does_not_exist_is_refused_with_those_that_do(preset: Any) -> None:
    for ask in (lambda: form.checked(preset, {}), lambda: form.read(preset, form.values_of(PRESETS["quick"].config()))):
        with pytest.raises(ConfigError, match="it must be one of quick, chars, classic, small: try quick") as refusal:
            ask()
        assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "value", ["64", True, 64.5, NAN, INF, [64], {}, None, 10**5000], ids=lambda value: str(value)[:10] if value != 10**5000 else "huge"
)
def test_a_setting_of_a_wrong_type_is_refused_and_never_converted(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"d_model is .*; it must be a whole number from 2 to 8,192"):
        form.checked("quick", {"d_model": value})


def test_a_device_that_is_not_there_is_told_while_the_form_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, there in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        monkeypatch.setattr(there, "is_available", lambda: False)
        told, *_ = train_tab._planned("quick", *form.values_of(PRESETS["quick"].config(device=name)))
        assert told == f'<span class="wrong">Device is {name}; this machine has cpu: try cpu</span>'


@pytest.mark.parametrize(
    "control",
    [control for control in (form.control(name) for name in form.NAMES) if isinstance(control, gr.Slider)],
    ids=lambda control: control.elem_id,
)
def test_a_slider_that_gradio_made_anew_for_a_visitor_still_passes_on_what_lies_outside_its_range(control: gr.Slider) -> None:
    anew = type(control)(**control.constructor_args, render=False)
    assert (anew.preprocess(10**6), anew.preprocess(None)) == (10**6, None)


def test_all_problems_of_a_form_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        form.checked("quick", {"d_model": 1, "dropout": 2.0, "seed": None})
    assert [line.split()[0] for line in str(refusal.value).splitlines()] == ["d_model", "dropout", "seed"]


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("quick", {}),
    ("classic", {}),
    ("quick", {"max_steps": 100, "warmup_steps": 0}),
    ("classic", {"learning_rate": 1e-5, "min_lr": 1e-8, "weight_decay": 0.0}),
    ("chars", {"tokenizer": "word", "vocab_size": 300, "arch": "gpt2", "optimizer": "adamw", "device": "cpu"}),
    ("small", {"max_epochs": 3, "patience": 2, "seed": 2**32 - 1, "dropout": 0.05, "grad_clip": 0.0}),
]


@pytest.mark.parametrize(("preset", "changes"), CHANGES)
def test_what_differs_from_the_preset_is_told_and_nothing_else(preset: str, changes: dict[str, Any]) -> None:
    config = form.checked(preset, changes)
    assert form.differing(preset, config) == changes
    line = form.summary(preset, config)
    most = "up to " if config.tokenizer == "char" else ""
    assert re.match(most + r"[\d,]+ k parameters · about [\d.]+ (s|min|h) · ", line)
    assert PRESETS[preset].sentence in line
    if changes:
        count = "1 setting differs" if len(changes) == 1 else f"{len(changes)} settings differ"
        assert line.partition(f" · {count} from {PRESETS[preset].label}: ")[2].split(", ") == [LABELS[name] for name in form.NAMES if name in changes]
    else:
        assert "differ" not in line


def test_one_setting_that_differs_is_one() -> None:
    assert form.summary("quick", form.checked("quick", {"seed": 1})).endswith(" · 1 setting differs from Quick: Seed")


@pytest.mark.parametrize(("preset", "changes"), CHANGES)
def test_the_command_starts_this_very_run(preset: str, changes: dict[str, Any]) -> None:
    config = form.checked(preset, changes)
    program, flags = (line := shlex.split(form.command(preset, config)))[:4], line[4:]
    assert program == ["python", "-m", "minigpt", "train"]
    request = parse_train(Parser(allow_abbrev=False), flags)
    assert (request.config, request.preset) == (config, preset)
    assert len(flags) == 2 + 2 * len(changes)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_s_label_says_how_long_it_takes(preset: str) -> None:
    assert form.label(preset) == f"{PRESETS[preset].label} · {words.duration(PRESETS[preset].seconds)}"


def test_a_vocabulary_that_holds_the_whole_text_is_no_change_of_a_setting() -> None:
    whole, part = {"unknown_share": 0.0}, {"unknown_share": 0.1}
    config = form.checked("chars", {"vocab_size": 65})
    assert form.differing("chars", form.as_asked("chars", config, whole)) == {}
    for data in (part, {}):
        assert form.differing("chars", form.as_asked("chars", config, data)) == {"vocab_size": 65}
    larger = form.checked("quick", {"vocab_size": 3000})
    assert form.as_asked("quick", larger, whole) is larger


def test_a_page_that_finds_a_live_run_says_nothing_of_its_real_vocabulary(run: Run, manager: RunManager) -> None:
    run.config.vocab_size = 37
    run.record({**DATA, "vocab_size": 37, "unknown_share": 0.0})  # type: ignore[arg-type,misc]
    filled = train_tab.arrive(manager, "", train_tab.SHAKESPEARE, "")
    assert filled[4 + form.NAMES.index("vocab_size")] == PRESETS["quick"].config().vocab_size


# Charts


@pytest.mark.parametrize("most", [20, 500])
@pytest.mark.parametrize("count", [0, 1, 2, 19, 20, 21, 499, 500, 501, 1999, 2000])
def test_thinning_keeps_extremes_gaps_and_the_last_point_and_no_more_than_asked(count: int, most: int) -> None:
    values: list[float | None] = [value * 0.5 for value in range(count)]
    odd: dict[int, float | None] = {count // 3: None, count // 2: 9999.0, count // 2 + 1: -9999.0} if count > 2 else {}
    for place, value in odd.items():
        values[place] = value
    x, y = charts.thin({"train": (list(range(count)), values)}, most)["train"]
    assert len(x) == len(y) <= most
    assert len(x) >= min(count, most // 4)
    assert x[-1:] == [*range(count)][-1:]
    assert y == [values[step] for step in x]
    assert odd.keys() <= set(x)
    assert x == sorted(set(x))


def script_numbers(name: str) -> list[int]:
    """Read the numbers of a destructured constant of the page's script, such as `const [A, B] = [3, 4];`."""
    found = re.search(rf"const \[([^\]]*\b{name}\b[^\]]*)\] = \[([^\]]*)\]", SCRIPT)
    assert found is not None
    assert [part.strip() for part in found[1].split(",")] == ["BEST", "UNIFORM", "UNIGRAM", "BAD"]
    return [int(part) for part in found[2].split(",")]


def script_charts() -> dict[str, list[str]]:
    """Read which series the page's script appends to which chart, in the order of the traces."""
    found = re.search(r"const CHARTS = \{(.*)\};", SCRIPT)
    assert found is not None
    return {chart: re.findall(r"'(\w+)'", series) for chart, series in re.findall(r"(\w+): \[(.*?)\]", found[1])}


def series_named(*wanted: str) -> dict[str, tuple[list[int], list[float | None]]]:
    return {name: ([number], [number + 0.5]) for number, name in enumerate(wanted, start=10)}


def test_the_script_appends_to_the_traces_that_the_loss_chart_has() -> None:
    series = script_charts()["loss"]
    curves = series_named(*series)
    figure = charts.loss_figure(curves, {"uniform": 7.5, "unigram": 5.5}, (40, 2.5), 99)
    assert [(list(figure.data[place].x), list(figure.data[place].y)) for place in range(3)] == [curves[name] for name in series]
    best, uniform, unigram, bad = script_numbers("BEST")
    assert f"OVERLAYS = {len(figure.data)};" in SCRIPT
    assert (list(figure.data[best].x), list(figure.data[best].y)) == ([40], [2.5])
    assert (list(figure.data[uniform].x), list(figure.data[uniform].y)) == ([0, 99], [7.5, 7.5])
    assert (list(figure.data[unigram].x), list(figure.data[unigram].y)) == ([0, 99], [5.5, 5.5])
    assert (figure.data[bad].name, list(figure.data[bad].x)) == ("not a number", [])
    assert [trace.name for trace in figure.data] == [
        "training", "training, smoothed", "validation", "best", "knows nothing", "knows frequencies", "not a number"
    ]  # fmt: skip
    assert len(figure.data) == len({best, uniform, unigram, bad}) + len(series)


def test_the_script_appends_to_the_traces_that_the_details_chart_has() -> None:
    series = script_charts()["details"]
    curves = series_named(*series)
    figure = charts.details_figure(curves)
    assert [(list(trace.x), list(trace.y)) for trace in figure.data] == [curves[name] for name in series]
    assert [trace.name for trace in figure.data] == ["learning rate", "gradient norm", "tokens per second"]


def test_the_script_knows_every_series_of_a_run(run: Run) -> None:
    assert {name for names in script_charts().values() for name in names} == set(run.history.series)


@pytest.mark.parametrize(
    ("warmup_steps", "max_steps"), [(0, 1), (0, 2), (1, 2), (8, 400), (199, 200), (200, 5000), (1000, 100_000), (9_999_999 // 10, 10_000_000)]
)
def test_the_planned_schedule_is_the_one_that_training_follows(warmup_steps: int, max_steps: int) -> None:
    config = TransformerConfig(warmup_steps=warmup_steps, max_steps=max_steps, learning_rate=0.02, min_lr=0.001)
    (trace,) = charts.schedule_figure(config).data
    assert list(trace.y) == pytest.approx([get_lr(step, warmup_steps, max_steps, 0.02, 0.001) for step in trace.x])
    assert {0, warmup_steps, max_steps} <= set(trace.x)
    assert list(trace.x) == sorted(set(trace.x))
    assert len(trace.x) <= 500


def test_an_extension_is_drawn_behind_the_rates_that_the_run_really_had() -> None:
    plan = TransformerConfig(warmup_steps=2, max_steps=20, learning_rate=0.02, min_lr=0.0)
    had: charts.Curve = ([1, 2, 3, 10], [0.0, 0.01, 0.02, 0.0])
    (trace,) = charts.schedule_figure(plan, 10, had).data
    assert list(zip(trace.x, trace.y, strict=True))[:5] == [(1, 0.0), (2, 0.01), (3, 0.02), (10, 0.0), (10, get_lr(10, 2, 20, 0.02, 0.0))]
    assert list(trace.x)[5:] == list(range(11, 21))


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_figures_are_json_without_numbers_that_are_none(run: Run) -> None:
    for step in range(1, 6):
        run.record(log(step, 3.0 if step % 2 else NAN, grad_norm=INF))
    run.record(evaluation(5, None))
    curves = charts.curves_of(run.history)
    for figure in (
        charts.loss_figure(curves, {"uniform": 7.6, "unigram": None}, (3, 3.0), 5),
        charts.loss_figure({}, {}),
        charts.details_figure(curves),
        charts.details_figure({}),
        charts.schedule_figure(run.config),
    ):
        plot = charts.as_plot(figure)
        assert plot.type == "plotly"
        content = strict(plot.plot)
        assert {"data", "layout", "config"} <= set(content)
        assert content["config"]["displaylogo"] is False


def test_what_is_not_known_is_not_drawn() -> None:
    figure = charts.loss_figure({}, {"uniform": None})
    assert all(len(trace.x) == len(trace.y) == 0 for trace in figure.data)


# The feed


class Reader:
    """What a page holds, taking in views as the script does."""

    def __init__(self) -> None:
        self.run: str | None = None
        self.counts: dict[str, list[int]] = {}
        self.curves: dict[str, tuple[list[int], list[float | None]]] = {}
        self.samples: list[dict[str, Any]] = []
        self.received = 0

    @property
    def have(self) -> dict[str, Any]:
        return {"run": self.run, "series": {name: self.counts.get(name, [-1, 0]) for name in History().series}, "samples": len(self.samples)}

    def take(self, view: Mapping[str, Any]) -> None:
        view = strict(json.dumps(dict(view)))
        if view["run"] != self.run:
            self.run, self.counts, self.curves, self.samples = view["run"], {}, {}, []
        assert view["first"] <= len(self.samples), "a gap among the samples"
        self.samples[view["first"] :] = view["samples"]
        for name, part in view["series"].items():
            epoch, had = self.counts.get(name, [-1, 0])
            if epoch != part["e"]:
                assert part["i"] == 0, "a new epoch that does not start at its beginning"
                self.curves[name], had = ([], []), 0
            assert part["i"] <= had, "a gap in a curve"
            x, y = self.curves[name]
            x[part["i"] :], y[part["i"] :] = part["x"], part["y"]
            self.counts[name] = [part["e"], len(x)]
            self.received += len(part["x"])


def as_drawn(run: Run) -> dict[str, tuple[list[int], list[float | None]]]:
    return {name: (part["x"], part["y"]) for name, part in run.history.since({}).items()}


def test_a_page_that_applies_the_indices_holds_exactly_the_curves_across_thinnings(run: Run) -> None:
    pulled, pushed = Reader(), Reader()
    seen: dict[str, Any] | None = None
    epochs = set()
    for step in range(1, 2 * MAX_POINTS + 500):
        run.history.append(log(step, 3 + math.sin(step)))
        if step % 10 == 0:
            run.history.append(evaluation(step))
        if step % 61 == 0:
            if step % 183 == 0:
                run.history.append({"type": "sample", "step": step, "elapsed": 1.0, "loss": None, "prompt": "", "text": f"\n\ntext {step}\n"})
            pulled.take(feed.run_view(run, strict(json.dumps(pulled.have))))
            seen = feed.run_view(run, feed.after(seen) if seen else {})
            pushed.take(seen)
            assert pulled.curves == pushed.curves == as_drawn(run)
            assert pulled.have == pushed.have
            epochs.add(pulled.counts["train"][0])
    assert len(epochs) > 1
    assert [sample["text"] for sample in pulled.samples] == [f"text {step}\n" for step in range(183, 2 * MAX_POINTS + 500, 183)]
    assert pulled.received < 5 * sum(len(x) for x, _ in as_drawn(run).values())  # pieces, not everything each time


def test_pushed_and_pulled_views_mix_in_any_order(run: Run) -> None:
    reader = Reader()
    late: list[tuple[dict[str, Any], int]] = []
    for step in range(1, 200):
        run.history.append(log(step))
        late.append((feed.run_view(run, reader.have), step))
        if step % 3 == 0:
            for view, _ in reversed(late):
                reader.take(view)
            reader.take(late[-1][0])
            late = []
            assert reader.curves["train"][0] == list(range(1, step + 1))


def test_a_page_that_looks_again_gets_nothing_twice(run: Run) -> None:
    for step in range(1, 50):
        run.history.append(log(step))
    reader = Reader()
    reader.take(feed.run_view(run, {}))
    again = feed.run_view(run, reader.have)
    assert again["first"] == len(reader.samples)
    assert all(part["x"] == part["y"] == [] for part in again["series"].values())


def test_a_page_that_holds_another_run_gets_everything(run: Run) -> None:
    run.history.append(log(1))
    view = feed.run_view(run, {"run": "example", "series": {"train": [0, 1]}, "samples": 0})
    assert view["series"] == feed.run_view(run, {})["series"]


GARBAGE_COUNTS: list[Any] = [
    0, "train", True, [], {}, [0], [0, 1, 2], ["0", "1"], [0.0, 1.0], [True, False], [0, -1], [0, 10**30],
    [-1, 1], [1, 1], [0, None], [[0], [1]], {"e": 0, "i": 1},
]  # fmt: skip


@pytest.mark.parametrize("pair", GARBAGE_COUNTS, ids=str)
def test_a_count_that_cannot_be_gives_the_whole_curve(pair: Any, run: Run) -> None:
    for step in range(1, 6):
        run.history.append(log(step))
    view = feed.run_view(run, {"run": run.id, "series": {"train": pair, "lr": [0, 5], "other": pair}})
    assert view["series"]["train"] == {"e": 0, "i": 0, "x": [1, 2, 3, 4, 5], "y": [3.0] * 5}
    assert view["series"]["lr"]["x"] == []
    assert "other" not in view["series"]


@pytest.mark.parametrize("count", [-1, 3, 10**30, 1.0, "1", True, None, [1], {}], ids=str)
def test_a_count_of_samples_that_cannot_be_gives_all_of_them(count: Any, run: Run) -> None:
    for step in range(2):
        run.history.append({"type": "sample", "step": step, "elapsed": 1.0, "loss": 2.0, "prompt": "", "text": "x"})
    view = feed.run_view(run, {"run": run.id, "samples": count})
    assert (view["first"], len(view["samples"])) == (0, 2)
    assert feed.run_view(run, {"run": run.id, "samples": 1})["first"] == 1


@pytest.mark.parametrize("series", [None, 5, "train", [], [["train", [0, 1]]], True], ids=str)
def test_counts_of_a_wrong_kind_give_everything(series: Any, run: Run) -> None:
    run.history.append(log(1))
    assert feed.run_view(run, {"run": run.id, "series": series})["series"] == feed.run_view(run, {})["series"]


@pytest.mark.parametrize(
    "have",
    [None, 5, True, [], {}, {"run": 1}, "", "not JSON", "null", "5", "[1]", '"x"', "[" * 9_000, "x" * 20_000, "1" * 9_000,
     '{"run": NaN}', '{"run": ["x"]}',
     '{"run": {"run": 1}, "series": {"train": [0, 1]}, "samples": 1}', '{"run": "RUN", "series": {"train": [1e400, 0]}, "samples": NaN}',
     '{"run": "RUN", "series": ' + "[" * 500 + "]" * 500 + "}", '{"run": "RUN", "series": {"train": [0, 1]}' + " " * 10_000 + "}", "\ud800"],
    ids=lambda have: ascii(have)[:40],
)  # fmt: skip
def test_nothing_that_a_page_may_send_breaks_the_poll(have: Any, run: Run, manager: RunManager) -> None:
    run.record(log(1))
    poll, log_table, csv = feed.server_functions(manager)
    view = strict(poll(have.replace("RUN", run.id) if isinstance(have, str) else have))
    assert view["series"] == feed.run_view(run, {})["series"]
    assert log_table(have).startswith("<table")
    assert csv(have).startswith("step,loss,")


def test_a_folded_chart_s_series_are_left_out(run: Run) -> None:
    run.history.append(log(1))
    view = feed.run_view(run, {"run": run.id, "series": {"train": None, "val": None, "lr": [-1, 0]}})
    assert set(view["series"]) == set(run.history.series) - {"train", "val"}
    assert set(feed.example_view({"run": "x", "series": {"train": None}})["series"]) == set(feed.example_view({})["series"]) - {"train"}


def test_without_a_run_the_page_shows_the_example(manager: RunManager) -> None:
    poll, log_table, csv = feed.server_functions(manager)
    view = strict(poll(None))
    assert (view["run"], view["live"], view["state"]) == ("example", False, "example")
    assert view["series"]["train"]["x"]
    assert view["samples"]
    assert view["story"].startswith("This one was done in ")
    assert "No run yet" in log_table()
    assert csv() == ""
    best = view["best"]
    assert best[0] in view["series"]["val"]["x"]


@pytest.mark.parametrize("state", ["stopped", "finished", "interrupted"])
def test_after_a_restart_the_page_shows_the_latest_run_of_its_home(state: str, run: Run, manager: RunManager) -> None:
    run.state = state
    run.write_state()
    again = RunManager(manager.home)
    view = feed.view(again, {})
    assert (view["run"], view["state"], view["live"]) == (run.id, state, False)
    assert again.latest is None


def test_of_the_example_a_page_gets_only_what_it_lacks() -> None:
    whole = feed.example_view({})
    count, samples = len(whole["series"]["train"]["x"]), len(whole["samples"])
    known = feed.example_view({"run": "example", "series": {"train": [0, count - 1]}, "samples": samples})
    assert known["series"]["train"] == {"e": 0, "i": count - 1, "x": whole["series"]["train"]["x"][-1:], "y": whole["series"]["train"]["y"][-1:]}
    assert (known["first"], known["samples"]) == (samples, [])
    assert known["series"]["val"] == whole["series"]["val"]
    reader = Reader()
    reader.take(whole)
    reader.take(feed.example_view(reader.have))
    assert reader.curves["train"][0] == whole["series"]["train"]["x"]


@pytest.mark.parametrize("pair", [*GARBAGE_COUNTS, [0, 10**6]], ids=str)
def test_a_count_of_the_example_that_cannot_be_gives_everything(pair: Any) -> None:
    whole = feed.example_view({})
    view = feed.example_view({"run": "example", "series": {"train": pair}, "samples": pair})
    assert (view["series"], view["first"]) == (whole["series"], 0)
    assert feed.example_view({"run": "other", "series": {"train": [0, 1]}, "samples": 1})["series"] == whole["series"]


def test_a_live_run_s_view_says_what_its_model_knows(run: Run) -> None:
    run.record(DATA)
    assert feed.run_view(run, {})["story"].startswith("Read 12,000 characters of plays")
    run.record({"type": "status", "phase": "training", "message": "training"})
    run.record(log(1, 7.2))
    run.record(log(3, 7.0))
    run.record(evaluation(3, 7.1, best_val_loss=7.1))
    view = feed.run_view(run, {})
    assert (view["live"], view["state"], view["step"], view["max_steps"], view["share"]) == (True, "training", 3, 12, 0.25)
    assert view["status"] == "training · step 3 of 12 · about 1 s left"
    assert view["story"].startswith("It is finding out which words are common.")
    assert view["lines"] == {"uniform": math.log(2000), "unigram": 5.5}
    assert not view["empty"]
    run.note = "the metrics could not be written: no space"
    assert feed.run_view(run, {})["status"].endswith(" · the metrics could not be written: no space")


def test_a_run_that_diverged_is_told_with_the_step_and_in_json(run: Run) -> None:
    run.record(log(1))
    run.record(log(2, NAN, grad_norm=NAN))
    end(run, step=1, val_loss=None, best_val_loss=None, reason="diverged")
    view = strict(json.dumps(feed.run_view(run, {})))
    assert (view["live"], view["state"], view["bad"], view["empty"]) == (False, "diverged", 2, False)
    assert "at step 2." in view["story"]
    assert "Try a learning rate of 0.01" in view["story"]
    assert "nan" not in view["numbers"]


def test_the_keys_that_an_event_may_lack_are_not_needed(run: Run) -> None:
    optional = {"tokens_per_s", "best_step", "val_tokens", "val_tokens_total"}
    for event in (log(5), evaluation(5), complete()):
        run.record({key: value for key, value in event.items() if key not in optional})
        assert feed.run_view(run, {})["numbers"].startswith("loss 3.00")


def test_a_run_that_came_to_nothing_is_told_as_empty(run: Run) -> None:
    run.state, run.error = "failed", "no text"
    run.ended.set()
    view = feed.run_view(run, {})
    assert (view["empty"], view["story"], view["best"]) == (True, "The run could not go on: no text", None)


def test_following_ends_with_a_view_that_is_not_live_and_has_told_everything(run: Run) -> None:
    looks = 0

    def pause() -> float:
        nonlocal looks
        looks += 1
        run.record(log(looks))
        if looks == 5:
            end(run, step=5)
        return 0.0

    reader = Reader()
    live = []
    for view in feed.follow(run, pause):
        reader.take(view)
        live.append(view["live"])
    assert live == [True] * 5 + [False]
    assert reader.curves == as_drawn(run)
    assert reader.received == sum(len(x) for x, _ in reader.curves.values())


def test_following_a_run_that_has_ended_gives_one_view_that_is_not_live(trained: RunManager) -> None:
    assert trained.latest is not None
    (view,) = feed.follow(trained.latest, lambda: pytest.fail("there is nothing to wait for"))
    assert (view["live"], view["state"]) == (False, "finished")
    assert view["series"]["train"]["x"] == list(range(1, 13))


def test_the_end_of_a_run_cuts_the_wait_for_it_short(run: Run) -> None:
    views = feed.follow(run, lambda: end(run) or 1e6)
    assert [view["live"] for view in views] == [True, False]


def test_the_best_point_lies_on_the_curve(trained: RunManager, run: Run) -> None:
    assert trained.latest is not None
    x, y = charts.curves_of(trained.latest.history)["val"]
    assert feed.best_point(trained.latest) in [(step, pytest.approx(loss, rel=1e-5)) for step, loss in zip(x, y, strict=True)]
    assert feed.best_point(run) is None
    for step, loss in ((0, 7.0), (5, 3.25), (10, 3.5)):
        run.record(evaluation(step, loss, best_step=min(step, 5), best_val_loss=min(loss, 3.25)))
    assert feed.best_point(run) == (5, 3.25)
    end(run, best_step=5, best_val_loss=3.0)  # measured on all of the text, unlike the curve
    assert feed.best_point(run) == (5, 3.25)


def test_the_best_point_stays_on_the_curve_when_it_is_thinned(run: Run) -> None:
    best: tuple[float, int] = (9.0, 0)
    for step in range(3 * MAX_POINTS):
        best = min(best, (4 + math.sin(step / 500) + math.cos(step * 1.7), step))
        run.history.append(evaluation(step, 4 + math.sin(step / 500) + math.cos(step * 1.7), best_step=best[1], best_val_loss=best[0]))
    run.history.append(complete(3 * MAX_POINTS - 1, best_step=best[1], best_val_loss=best[0]))
    x, y = run.history.series["val"].x, run.history.series["val"].y
    assert feed.best_point(run) in zip(x, y, strict=True)


def test_a_run_of_other_tokens_laid_over_the_chart_says_so(trained: RunManager, tiny_text: str) -> None:
    letters = trained.create(PRESETS["chars"].config(**TINY), preset="chars", text=tiny_text)
    letters.work()
    assert letters.state == "finished", letters.error
    words, other = trained.latest.id, letters.id
    assert [trace["name"] for trace in runs_list.traces(trained, [other], words)] == [f"{other}, in characters", f"{other}, in characters, training"]
    assert [trace["name"] for trace in runs_list.traces(trained, [words], other)] == [f"{words}, in words", f"{words}, in words, training"]
    assert {trace["name"] for trace in runs_list.traces(trained, [words], "example")} == {words, f"{words}, training"}
    trained.delete(other)


def test_a_size_is_told_in_a_unit_that_fits() -> None:
    assert [words.size(count) for count in (0, 1, 999, 1001, 405_000, 1_023_456, 6_440_000)] == [
        "0 kB", "1 kB", "1 kB", "2 kB", "405 kB", "1.0 MB", "6.4 MB",
    ]  # fmt: skip


# The Train tab


def test_the_text_of_a_person_is_taken_from_the_box_or_the_file() -> None:
    assert train_tab.own_text(train_tab.SHAKESPEARE, "ignored", b"\xff") is None
    assert train_tab.own_text(train_tab.OWN, "a", None) == "a"
    assert train_tab.own_text(train_tab.OWN, "box", b"file") == "file"
    assert train_tab.own_text(train_tab.OWN, None, "é".encode("utf-16")) == "é"


@pytest.mark.parametrize(
    ("text", "file", "said"),
    [("", None, "empty"), (" \n", None, "empty"), (None, b"", "empty"), ("x", b"\xff\xff", "not UTF-8"), (None, b"a\0", "binary")],
)
def test_a_text_that_is_none_is_refused_in_words(manager: RunManager, text: str | None, file: bytes | None, said: str) -> None:
    with pytest.raises(DataError, match=said):
        manager.start(TransformerConfig(), preset="quick", text=train_tab.own_text(train_tab.OWN, text, file))
    assert not manager.past()


def test_what_the_system_refuses_is_told_in_its_words() -> None:
    assert sentence(OSError(errno.ENOSPC, "No space left on device", "/secret/place")) == "the system refused: No space left on device"
    assert sentence(shutil.Error("/secret/place")) == "the system refused: Error"


def test_a_refusal_shows_what_was_typed_as_text() -> None:
    with pytest.raises(gr.Error) as shown, refusing("Not started"):
        raise ConfigError(f"d_model is {MARKUP}\nsecond line")
    assert (tags(shown.value.message), shown.value.title) == ({"br"}, "Not started")
    assert not shown.value.print_exception


def test_watching_yields_the_figure_first_and_last_and_only_news_in_between(trained: RunManager) -> None:
    assert trained.latest is not None
    ((loss, details, value),) = train_tab.watch(trained.latest)
    assert strict(loss.plot)["data"][0]["name"] == "training"
    assert details == gr.skip()
    assert not strict(value)["live"]
    ((loss, details, value),) = train_tab.watch(trained.latest, whole_figures=True)
    assert len(strict(details.plot)["data"]) == 3
    assert not strict(value)["live"]


# The API


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((5,), "preset is '5'; it must be one of quick"),
        ((None,), "preset is 'None'"),
        ((["quick"],), "preset is"),
        (("nope",), "preset is 'nope'"),
        (("quick", [1]), r"settings is \[1\]; it must be an object"),
        (("quick", "x"), "settings is x; it must be an object"),
        (("quick", 0), "settings is 0; it must be an object"),
        (("quick", False), "settings is False; it must be an object"),
        (("quick", {"d_model": "64"}), "d_model is '64'; it must be a whole number"),
        (("quick", {"d_model": None}), "d_model is empty"),
        (("quick", {"dropout": NAN}), "dropout is nan; it must be a number"),
        (("quick", {"n_heads": 3}), "n_heads is 3; it must divide d_model"),
        (("quick", {"data_path": "/etc/passwd"}), "data_path: no such setting"),
        (("quick", {"checkpoint_dir": "/tmp"}), "checkpoint_dir: no such setting"),
        (("quick", {}, 5), "text is 5; it must be text"),
        (("quick", {}, None), "text is None; it must be text"),
        (("quick", {}, ["a"]), "text is .*; it must be text"),
        (("quick", {}, {"a": 1}), "text is .*; it must be text"),
        (("quick", {}, " \n"), "the text is empty"),
        (("quick", {}, "x" * (MAX_TEXT + 1)), "the text has 20,000,001 characters"),
    ],
    ids=lambda value: ascii(value)[:40] if isinstance(value, tuple) else "",
)
def test_a_program_that_asks_for_what_cannot_be_trained_gets_a_sentence(arguments: tuple[Any, ...], said: str, manager: RunManager) -> None:
    with pytest.raises(gr.Error, match=said) as refusal:
        next(Api(manager).train(*arguments))
    assert not refusal.value.print_exception
    assert manager.latest is None
    assert not manager.home.exists()


def test_a_program_follows_a_run_to_its_end_and_writes_with_what_came_of_it(manager: RunManager, tiny_text: str) -> None:
    api = Api(manager)
    assert api.stop() == {"run": None, "state": "idle"}
    reader = Reader()
    views = []
    for view in api.train("quick", TINY, tiny_text):
        reader.take(view)
        views.append(view)
    assert (views[-1]["live"], views[-1]["state"]) == (False, "finished")
    assert reader.curves["train"][0] == list(range(1, 13))
    assert manager.latest is not None
    assert reader.curves == as_drawn(manager.latest)
    assert api.status()["run"] == manager.latest.id
    assert api.stop() == {"run": None, "state": "idle"}
    found = api.checkpoints()
    assert [item["id"] for item in found[:2]] == [f"{manager.latest.id}/best", f"{manager.latest.id}/last"]
    json.dumps(found, allow_nan=False)
    text = api.generate(found[0]["id"], "ROMEO:", 20, 0.8, 1)
    assert text.startswith("ROMEO:")
    assert text == api.generate(found[0]["id"], "ROMEO:", 20, 0.8, 1) != api.generate(found[0]["id"], "ROMEO:", 20, 0.8, 2)


def test_a_program_is_told_which_run_is_live_and_can_stop_it(manager: RunManager, tiny_text: str) -> None:
    api = Api(manager)
    views = api.train("quick", {**TINY, "max_steps": 1_000_000}, tiny_text)
    assert next(views)["live"]
    live = manager.active
    assert live is not None
    with pytest.raises(gr.Error, match=live.id):
        next(api.train("quick", TINY, tiny_text))
    answer = api.stop()
    assert answer["run"] == live.id
    assert answer["state"] in ("stopping", "stopped")
    *_, last = views
    assert (last["live"], last["state"]) == (False, "stopped")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("",), "choose a checkpoint"),
        ((None,), "no longer there"),
        ((5,), "no longer there"),
        (("upload",), "the upload is gone"),
        (("../x/best",), "no longer there"),
        (("example/best",), "no longer there"),
        (("example/example", "", 0), "max_tokens is 0; it must be a whole number from 1 to 400"),
        (("example/example", "", 401), "max_tokens is 401"),
        (("example/example", "", 2.0), "max_tokens is 2.0"),
        (("example/example", "", "80"), "max_tokens is 80"),
        (("example/example", "", True), "max_tokens is True"),
        (("example/example", "", None), "max_tokens is None"),
        (("example/example", "", 10**3000), "max_tokens is 1000"),
        (("example/example", "", 9, -0.1), "temperature is -0.1; it must be a number from 0 to 5"),
        (("example/example", "", 9, NAN), "temperature is nan"),
        (("example/example", "", 9, INF), "temperature is inf"),
        (("example/example", "", 9, "hot"), "temperature is hot"),
        (("example/example", "", 9, 0.8, -1), "seed is -1; it must be a whole number from 0 to 4,294,967,295"),
        (("example/example", "", 9, 0.8, 2**32), "seed is 4294967296"),
        (("example/example", "", 9, 0.8, 1.5), "seed is 1.5"),
        (("example/example", "", 9, 0.8, [1]), r"seed is \[1\]"),
    ],
    ids=lambda value: ascii(value)[:50] if isinstance(value, tuple) else "",
)
def test_a_program_that_asks_for_what_cannot_be_written_gets_a_sentence(arguments: tuple[Any, ...], said: str, manager: RunManager) -> None:
    with pytest.raises(gr.Error, match=said) as refusal:
        Api(manager).generate(*arguments)
    assert not refusal.value.print_exception


def test_a_program_is_not_told_where_a_file_that_vanished_had_been(manager: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished(path: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(foreign, "read_checkpoint", vanished)
    with pytest.raises(gr.Error, match="No such file or directory") as refusal:
        Api(manager).generate("example/example")
    assert "/" not in refusal.value.message


# The Checkpoint tab


def saved_model(folder: Path, text: str, *, with_words: bool = True, **facts: Any) -> Path:
    """Save a model that was never trained, beside a config.json as a run has it."""
    tokenizer = WordTokenizer()
    tokenizer.build_vocab(text, 60)
    config = TransformerConfig(**{**TINY, "vocab_size": tokenizer.vocab_size, "checkpoint_dir": str(folder)})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"checkpoint_dir": "where it was made"}')
    return save_checkpoint(MiniGPT(config), None, config, 7, 3.5, tokenizer=tokenizer if with_words else None, facts=facts)


def test_a_file_of_ours_is_shown_with_all_that_is_in_it(manager: RunManager, tmp_path: Path, tiny_text: str) -> None:
    facts = {
        "best_step": 5, "best_val_loss": 3.25, "data": {"uniform_loss": 4.0, "unigram_loss": "no number"},
        "series": {"train": {"x": [1, 2], "y": [4.0, 3.0]}}, "samples": [{"step": 0, "text": f"{MARKUP}\nlove\x1b"}],
    }  # fmt: skip
    path = saved_model(tmp_path / "home" / "run", tiny_text, **facts)
    shown = checkpoint_tab.shown_details("run/best", path, "run/best")
    assert len(shown) == checkpoint_tab.DETAILS
    chosen, verdict, inside, config, curve, parts, kept, tensors, writing, prompt, text, *_ = shown
    assert chosen == "run/best"
    assert "step 7 · validation loss 3.50 · perplexity 33 · its run&#x27;s best is step 5 with 3.25" in verdict
    assert "made by MiniGPT" in verdict
    assert (inside.visible, curve.visible, writing.visible) == (True, True, True)
    assert dict(zip(config["setting"], config["value"], strict=True))["d_model"] == "8"
    loss, *_ = strict(curve.value.plot if hasattr(curve.value, "plot") else curve.value["plot"])["data"]
    assert loss["x"] == [1, 2]
    assert list(parts["block"]) == ["embedding", "block 0", "head and final norm"]
    assert kept.values.tolist() == [["0", f"{MARKUP}\nlove\ufffd"]]
    assert "embedding.weight" in set(tensors["tensor"])
    assert prompt == "ROMEO:"
    assert text.startswith("ROMEO:")
    assert text != prompt


def test_names_with_markup_are_shown_as_text(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({MARKUP: torch.zeros(2, 2), "wte.weight": torch.zeros(4, 2)}, path)
    _, verdict, inside, _, curve, _, _, tensors, writing, _, text, *_ = checkpoint_tab.shown_details(shelf.UPLOADED, path, "your upload")
    assert "odd tensor name &lt;img" in verdict
    assert tags(verdict) == {"p", "ul", "li"}
    assert "it can be looked at but not made to write" in verdict
    assert (inside.visible, curve.visible, writing.visible, text) == (True, False, False, "")
    assert MARKUP in set(tensors["tensor"])  # the table shows cells as text


def test_a_name_in_our_own_metadata_is_shown_as_text_too(manager: RunManager, tmp_path: Path, tiny_text: str) -> None:
    path = tmp_path / "ours.safetensors"
    source = saved_model(tmp_path / "run", tiny_text, with_words=False)
    raw = source.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"]["minigpt"] = json.dumps({**json.loads(header["__metadata__"]["minigpt"]), "tied": {MARKUP: MARKUP}})
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])
    _, verdict, _, _, _, _, _, _, writing, _, text, *_ = checkpoint_tab.shown_details(shelf.UPLOADED, path, "your upload")
    assert "&lt;img" in verdict
    assert tags(verdict) == {"p", "ul", "li"}
    assert "It holds no vocabulary: its prompt is ids of tokens" in verdict
    assert writing.visible
    assert text.startswith("0 ")
    assert all(word.isdecimal() for word in text.split())


@pytest.mark.parametrize(
    "error",
    [CheckpointError(f"tensor {MARKUP} has no data"), PermissionError(13, "Permission denied", "/secret/place/x.safetensors")],
    ids=["ours", "system"],
)
def test_a_refused_file_shows_one_sentence_and_hides_the_inside(error: CheckpointError | OSError) -> None:
    shown = checkpoint_tab.refused(error)
    chosen, verdict, inside, *rest = shown
    assert len(shown) == checkpoint_tab.DETAILS
    assert (chosen, inside.visible) == ("", False)
    assert all(part == gr.skip() for part in rest)
    assert tags(verdict) == {"p"}
    assert "secret" not in verdict
    assert ("Tensor &lt;img" in verdict) or ("This file cannot be read: Permission denied." in verdict)


def test_an_upload_that_is_no_checkpoint_is_refused_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "page.pt").write_text("<!doctype html>")
    for path in (tmp_path / "page.pt", tmp_path / "gone.safetensors"):
        chosen, verdict, inside, *_ = checkpoint_tab.open_upload(str(path))
        assert (chosen, inside.visible) == ("", False)
        assert str(tmp_path) not in verdict
    assert checkpoint_tab.open_upload(None) == [gr.skip()] * checkpoint_tab.DETAILS


def test_an_id_is_never_used_as_a_path(manager: RunManager, tmp_path: Path, tiny_text: str) -> None:
    inside = saved_model(manager.home / "run", tiny_text)
    outside = saved_model(tmp_path / "outside", tiny_text)
    assert shelf.find(manager, "run/best").path == inside
    assert shelf.find(manager, "example/example").path == feed.EXAMPLE
    ids = [
        str(outside),
        str(inside),
        str(outside.with_suffix("")),
        "../outside/best",
        "run/../../outside/best",
        "/best",
        "best",
        "run/",
        "/",
        "",
        ".",
        "run/best/",
    ]
    for chosen in [*ids, "run/best.safetensors", "run/previous", "example/best", "run/example", "example", "run\0/best"]:
        with pytest.raises(CheckpointError, match="no longer there"):
            shelf.find(manager, chosen)
        _, verdict, shown, *_ = checkpoint_tab.open_id(manager, chosen)
        assert not shown.visible
        assert "no longer there" in verdict


def test_what_cannot_write_is_refused_before_it_is_asked_to(manager: RunManager, tmp_path: Path, tiny_text: str) -> None:
    upload = saved_model(tmp_path / "upload", tiny_text)
    assert open_any(shelf.path_of(manager, shelf.UPLOADED, str(upload))).step == 7
    upload.unlink()
    saved_model(manager.home / "silent", tiny_text, with_words=False)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"wte.weight": torch.zeros(4, 2)}, foreign)
    for chosen, path, said in (
        ("", None, "choose a checkpoint"),
        (shelf.UPLOADED, None, "the upload is gone; drop the file again"),
        (shelf.UPLOADED, "", "the upload is gone; drop the file again"),
        (shelf.UPLOADED, str(upload), "no such file"),
        ("silent/last", None, "no longer there"),
        (shelf.UPLOADED, str(foreign), "not shaped like"),
    ):
        with pytest.raises(MiniGPTError, match=said):
            open_any(shelf.path_of(manager, chosen, path))


EXAMPLE = "example/example"


@pytest.mark.parametrize(
    ("handler", "data", "said"),
    [
        ("write_text", [EXAMPLE, None, "a", 80, 0.8, -1], "Seed is -1; it must be a whole number from 0 to 4,294,967,295"),
        ("write_text", [EXAMPLE, None, "a", 80, 0.8, 1e20], "Seed is 1e[+]20; it must be a whole number"),
        ("write_text", [EXAMPLE, None, "a", 80, 0.8, 1.5], "Seed is 1.5; it must be a whole number"),
        ("write_text", [EXAMPLE, None, "a", 80, 0.8, "x"], "Seed is x"),
        ("write_text", [EXAMPLE, None, "a", NAN, 0.8, 0], "Length is nan; it must be a whole number from 1 to 400"),
        ("write_text", [EXAMPLE, None, "a", -5, 0.8, 0], "Length is -5"),
        ("write_text", [EXAMPLE, None, "a", None, 0.8, 0], "Length is None"),
        ("write_text", [EXAMPLE, None, "a", 80, NAN, 0], "Boldness is nan; it must be a number from 0 to 5"),
        ("compare", [EXAMPLE, None, [EXAMPLE], None, "a", 20, 0.8, 0], "no longer there"),
        ("compare", [EXAMPLE, None, 5, None, "a", 20, 0.8, 0], "no longer there"),
        ("compare", [EXAMPLE, None, EXAMPLE, None, "a", 20, 0.8, -1], "Seed is -1"),
        ("_choose", ["nope"], "preset is &#x27;nope&#x27;; it must be one of quick"),
        ("_save", ["quick", *[[]] * len(form.NAMES)], "Architecture is .*; it must be"),
        ("_choose", [None], "preset is &#x27;None&#x27;; it must be one of quick"),
    ],
)
def test_what_no_control_of_the_page_would_send_gets_a_sentence(handler: str, data: list[Any], said: str, manager: RunManager) -> None:
    pages.opened(EXAMPLE)  # by the page without a session, which is that of every test
    demo = page.build(manager)
    function = next(function for function in demo.fns.values() if function.name == handler)

    async def ask() -> None:
        answer: dict[str, Any] = {"is_generating": True}
        while answer["is_generating"]:
            answer = await demo.process_api(function, data, state=SessionState(demo), iterator=answer.get("iterator"))

    with pytest.raises(gr.Error, match=said) as refusal:
        asyncio.run(ask())
    assert not refusal.value.print_exception


def test_a_link_or_a_file_of_settings_that_is_none_is_taken_for_an_empty_one(manager: RunManager) -> None:
    assert train_tab.arrive(manager, None, train_tab.SHAKESPEARE, "")[3:] == train_tab.FORM_AS_IT_IS
    with pytest.raises(ConfigError, match="this file holds no settings"):
        form.from_json(None)


def test_a_run_without_a_checkpoint_opens_nothing_and_no_other_run_s(trained: RunManager) -> None:
    assert trained.latest is not None
    assert checkpoint_tab.open_best(trained, trained.latest.id)[0] == f"{trained.latest.id}/best"
    assert checkpoint_tab.open_best(trained, "example")[0] == EXAMPLE
    for run_id in ("20260101-000000-quick-0000", "", None):
        with pytest.raises(CheckpointError, match="has no checkpoint, or none any more"):
            checkpoint_tab.open_best(trained, run_id)


def test_a_file_without_a_vocabulary_reads_and_writes_ids(manager: RunManager, tiny_text: str) -> None:
    checkpoint = open_any(saved_model(manager.home / "silent", tiny_text, with_words=False))
    *_, text = shelf.written(checkpoint, "5, 6\n7", 4, seed=1)
    assert text.startswith("5 6 7 ")
    assert all(0 <= int(word) < checkpoint.config.vocab_size for word in text.split())
    assert len(text.split()) == 7
    for prompt in ("love", "1 -2", "1.5", str(checkpoint.config.vocab_size), "1,,b"):
        with pytest.raises(CheckpointError, match="the prompt must be ids from 0 to"):
            list(shelf.written(checkpoint, prompt, 4))
    assert Api(manager).generate("silent/best", "5", 3).startswith("5 ")


def test_the_list_ends_with_the_example_and_an_empty_one_is_only_that(manager: RunManager, tiny_text: str) -> None:
    assert shelf.listed(manager).values.tolist()[0][:2] == ["example", "example"]
    saved_model(manager.home / "run", tiny_text)
    table = shelf.listed(manager)
    assert list(table.columns) == shelf.LIST_COLUMNS
    assert table.values.tolist()[0][:4] == ["run", "best", "7", "3.500"]
    assert len(table) == 2


def test_a_visitor_sees_the_best_of_the_latest_run_first(trained: RunManager) -> None:
    assert trained.latest is not None
    chosen, verdict, inside, *_ = checkpoint_tab.open_newest(trained)
    assert chosen == f"{trained.latest.id}/best"
    assert "best of its run" in verdict
    assert inside.visible


def test_a_run_whose_best_is_step_0_is_opened_at_its_last_and_the_best_says_why(manager: RunManager, tiny_text: str) -> None:
    manager._latest = manager.create(PRESETS["quick"].config(**TINY, learning_rate=1.0, min_lr=1.0), preset="quick", text=tiny_text)
    manager.latest.work()
    run = manager.latest.id
    best = manager.checkpoint(run, "best")
    assert best is not None
    assert best.step == 0
    assert checkpoint_tab.open_newest(manager)[0] == f"{run}/last"
    assert "the words of step 0" in checkpoint_tab.open_id(manager, f"{run}/best")[1]
    assert "the words of step 0" not in checkpoint_tab.open_id(manager, f"{run}/last")[1]


def test_the_list_shows_a_run_by_its_name_and_finds_its_files_by_that(manager: RunManager, tiny_text: str) -> None:
    saved_model(manager.home / "run", tiny_text)
    manager.rename("run", "my verse")
    assert [row[:2] for row in shelf.listed(manager).values.tolist()] == [["my verse", "best"], ["example", "example"]]
    assert shelf.id_of(manager, "my verse", "best") == "run/best"
    assert shelf.id_of(manager, "example", "example") == "example/example"
    with pytest.raises(CheckpointError, match="no longer there"):
        shelf.find(manager, shelf.id_of(manager, "your verse", "best"))
    assert "my verse/best · made by MiniGPT" in checkpoint_tab.open_id(manager, "run/best")[1]


@pytest.mark.parametrize(("tokenizer", "unit"), [("word", "a word"), ("char", "a letter")])
def test_the_list_of_runs_says_of_what_its_losses_are(tokenizer: str, unit: str, manager: RunManager, tiny_text: str) -> None:
    run = manager.create(PRESETS["quick"].config(**TINY | {"tokenizer": tokenizer}), preset="quick", text=tiny_text)
    run.work()
    assert f"<td>{run.history.last['complete']['best_val_loss']:.3f} {unit}</td>" in runs_list.rows(manager, [], None)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("n_heads is 5; it must divide d_model, 32 into even parts: try 4", "Heads is 5; it must divide Width, 32 into even parts: try 4"),
        (
            "dropout is 2; it must be a number\nseed is 'x'; it must be a whole number",
            "Dropout is 2; it must be a number<br>Seed is &#x27;x&#x27;; it must be",
        ),
        ("warmup_steps is 9; it must be below max_steps, 9: try 0", "Warm-up is 9; it must be below Steps, 9: try 0"),
        ("this file holds no tokenizer, whose seed is not known", "this file holds no tokenizer, whose seed is not known"),
    ],
)
def test_a_page_names_a_setting_by_the_label_that_stands_on_it(said: str, shown: str) -> None:
    assert markup(ConfigError(said)).startswith(shown)
    assert sentence(ConfigError(said)) == said, "for programs it keeps its name"


def test_the_list_of_runs_trusts_no_tick_and_a_run_that_is_gone_leaves_its_place(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(PRESETS["quick"].config(**TINY), preset="quick", text=tiny_text)
    (runs,) = runs_list.server_functions(manager)
    answer = json.loads(runs(json.dumps({"slots": [[1], {"a": 1}, None, 7], "draw": True, "run": [1]})))
    assert run.id in answer["rows"]
    assert "disabled" not in answer["rows"]
    assert answer["traces"] == []
    gone = json.loads(runs(json.dumps({"slots": ["a", "b", "c", "d"]})))
    assert "disabled" not in gone["rows"]


def test_runs_of_one_name_are_told_apart_by_their_folders(manager: RunManager, tiny_text: str) -> None:
    folders = ["run", "copy", "long" * 15 + "-a", "long" * 15 + "-b"]
    for folder in folders:
        saved_model(manager.home / folder, tiny_text)
    manager.rename("run", "my verse")
    shutil.copy(manager.home / "run" / "state.json", manager.home / "copy")
    rows = [row[:2] for row in shelf.listed(manager).values.tolist()]
    assert ["my verse (copy)", "best"] in rows
    assert {shelf.id_of(manager, *row) for row in rows} == {*(f"{folder}/best" for folder in folders), "example/example"}


@pytest.mark.parametrize("more", [None, 0, 2.7, "3", True, NAN, INF, 1e9])
def test_steps_to_add_that_are_no_whole_number_are_refused(more: Any, run: Run) -> None:
    with pytest.raises(ConfigError, match="they must be a whole number from 1 to 10,000,000"):
        runs_list.longer(run, more)
    assert runs_list.longer(run, 3.0) == run.max_steps + 3


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file names are text there")
def test_a_folder_whose_name_is_no_text_is_left_out_and_texts_that_are_none_are_shown_cleaned(manager: RunManager) -> None:
    for name, content in ((b"odd-\xff", "{}"), (b"told", '{"state": "failed", "name": "a\\ud800", "error": "\\udfff", "preset": "\\ud800"}')):
        folder = manager.home / os.fsdecode(name)
        folder.mkdir(parents=True)
        for file in ("config.json", "state.json"):
            (folder / file).write_text(content)
        shutil.copy(feed.EXAMPLE, folder / "best.safetensors")
    (item,) = manager.past()
    assert (item.id, item.name, item.error) == ("told", "a\ufffd", "\ufffd")
    opened = feed.find_run(manager, "told")
    assert opened is not None
    shown = [runs_list.rows(manager, [], None), feed.run_view(opened, {}), Api(manager).checkpoints(), shelf.listed(manager).to_dict("list")]
    orjson.dumps(shown)  # which is how the page sends them


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
@pytest.mark.parametrize("name", ["config.json", "state.json", "metrics.jsonl", "last.safetensors", "best.safetensors"])
def test_a_pipe_among_a_run_s_files_keeps_nobody_waiting(name: str, manager: RunManager) -> None:
    folder = manager.home / "piped"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"checkpoint_dir": "where it was made"}')
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    manager.prepare()
    assert [item.id for item in manager.past()] == ([] if name == "config.json" else ["piped"])
    assert feed.view(manager, {"want": "piped"})["run"] == ("example" if name == "config.json" else "piped")
    assert [item.id for item in shelf.saved(manager)] == ["example/example"]
    with pytest.raises(MiniGPTError):
        manager.reopen(folder)


WHOLE = [  # every kind of event with every name that it may have
    {**DATA, "train_tokens": 9, "val_tokens": 1, "parameters": 5, "device": "cpu", "threads": 1, "precision": "float32"},
    log(3, tokens_per_s=5.0),
    evaluation(3, best_step=3, val_tokens=5, val_tokens_total=50),
    {"type": "sample", "step": 3, "elapsed": 0.5, "loss": 3.0, "prompt": "ROMEO:", "text": "O"},
    complete(5, reason="finished", best_step=3, val_tokens=5, val_tokens_total=50),
]


@pytest.mark.parametrize(("kind", "name"), [(event["type"], name) for event in WHOLE for name in event])
def test_whatever_one_line_of_the_log_says_the_page_is_told_of_the_run(kind: str, name: str, manager: RunManager) -> None:
    folder = manager.home / "odd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "state.json").write_text('{"state": "finished"}')
    for odd in ("", "null", '"x"', '"\\ud800"', "[]", "{}", "true", "-1", "1e400", "NaN", "0.5", "1" * 30):
        lines = [
            [f'"{key}": {odd if (event["type"], key) == (kind, name) else json.dumps(value)}' for key, value in event.items()] for event in WHOLE
        ]
        kept = [[part for part in line if not part.endswith(": ")] for line in lines]  # with "" the name itself is left out
        (folder / "metrics.jsonl").write_text("".join(f"{{{', '.join(line)}}}\n" for line in kept))
        for state in ("finished", "stopped", "diverged", "interrupted"):
            (folder / "state.json").write_text(json.dumps({"state": state}))
            orjson.dumps(feed.run_view(open_run(folder), {}))
        opened = open_run(folder)
        train_tab.figure_of(opened)
        opened.history.to_frame()
        opened.ended.clear()  # as a live one, which is told of in other words
        opened.state = "training"
        orjson.dumps(feed.run_view(opened, {}))
        (folder / "metrics.jsonl").unlink()


@pytest.mark.parametrize("state", ["interrupted", "failed"])
def test_an_ended_run_is_opened_if_something_of_it_is_saved(state: str, manager: RunManager, tiny_text: str) -> None:
    run = manager.create(PRESETS["quick"].config(**TINY), preset="quick", text=tiny_text)
    run.work()
    (run.folder / "metrics.jsonl").unlink()
    (run.folder / "state.json").write_text(json.dumps({"state": state}))
    saved = feed.run_view(open_run(run.folder), {})
    for path in run.folder.glob("*.safetensors"):
        path.unlink()
    nothing = feed.run_view(open_run(run.folder), {})
    assert (saved["state"], saved["empty"], nothing["empty"]) == (state, False, True)
    if state == "interrupted":
        assert saved["story"].endswith("What it had saved is there: Resume goes on from step 12.")
        assert nothing["story"] == "The program ended while this run was training. Nothing was saved before."


def test_a_note_on_a_run_at_work_is_gone_with_its_end(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(PRESETS["quick"].config(**TINY), preset="quick", text=tiny_text)
    run.note = "could not save; training goes on"
    assert feed.run_view(run, {})["status"].endswith(run.note)
    run.work()
    run.note = "could not save; training goes on"
    assert "training goes on" not in feed.run_view(run, {})["status"]


def test_a_run_whose_folder_was_deleted_meanwhile_is_told_of_by_what_came_after(manager: RunManager, tiny_text: str) -> None:
    run = manager.create(PRESETS["quick"].config(**TINY), preset="quick", text=tiny_text)
    run.work(lambda event: shutil.rmtree(run.folder) if event["type"] == "log" and event["step"] == 7 else None)
    again = RunManager(manager.home)
    again.prepare()
    (item,) = again.past()
    assert (item.state, item.step, item.resumable) == ("finished", 12, True)
    view = feed.view(again, {"want": run.id})
    assert view["story"].startswith("Done in ")
    assert "From many possible next words to about " in view["story"]
    assert view["step"] == 12
    assert "tick-" in runs_list.rows(again, [], None)
