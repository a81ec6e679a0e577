import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from minigpt.config import MAX_PARAMETERS, TransformerConfig, extra, fields, parameter_count, parse_config
from minigpt.errors import ConfigError
from minigpt.model import MiniGPT
from minigpt.presets import DEFAULT_PRESET, PRESETS, expected_seconds

FIELDS = TransformerConfig.model_fields
NUMERIC = [name for name, field in FIELDS.items() if any(getattr(m, "ge", None) is not None for m in field.metadata)]
WHOLE = [name for name in NUMERIC if FIELDS[name].annotation is not float]
CHOICES = ["arch", "tokenizer", "optimizer", "device"]
# What each single field may join others in: large or small enough that only the field under test can be at fault.
ROOMY: dict[str, Any] = {"d_model": 128, "n_heads": 1, "warmup_steps": 0, "min_lr": 0.0, "max_steps": 10_000_000, "learning_rate": 10.0}


def bounds(name: str) -> tuple[float, float]:
    limits = {key: getattr(m, key) for m in FIELDS[name].metadata for key in ("ge", "le") if getattr(m, key, None) is not None}
    return limits["ge"], limits["le"]


def refusal(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    return str(caught.value).splitlines()


def advice(sentence: str, name: str) -> Any:
    found = re.search(r": try (?:(\w+) )?([-+.,\de]+)$", sentence)
    assert found, f"no number to try in {sentence!r}"
    text = found[2].replace(",", "")
    target = found[1] or name
    return target, int(text) if FIELDS[target].annotation is not float else float(text)


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_label_a_help_sentence_and_a_group(name: str) -> None:
    field = FIELDS[name]
    assert field.title
    assert field.description
    assert extra(field)["group"] in ("model", "training", "files")
    assert name in fields(extra(field)["group"])


@pytest.mark.parametrize("name", NUMERIC)
def test_the_help_of_a_number_states_its_range_and_sliders_stay_inside_it(name: str) -> None:
    low, high = bounds(name)
    assert re.search(r"\(\S+ to \S+\)$", FIELDS[name].description or "")
    slider = extra(FIELDS[name])["slider"]
    if slider is not None:
        assert low <= slider[0] < slider[1] <= high
        assert slider[0] <= FIELDS[name].default <= slider[1]


def test_the_groups_together_hold_every_setting_once_in_order() -> None:
    assert [*fields("model"), *fields("training"), *fields("files")] == list(FIELDS)


def test_the_defaults_are_the_textbook_recipe() -> None:
    c = TransformerConfig()
    assert (c.arch, c.tokenizer, c.optimizer) == ("gpt2", "word", "adamw")
    assert (c.d_model, c.n_layers, c.n_heads, c.d_ff, c.max_seq_len, c.vocab_size, c.dropout) == (32, 2, 4, 128, 64, 2000, 0.1)
    assert (c.batch_size, c.learning_rate, c.min_lr, c.weight_decay, c.grad_clip) == (64, 3e-4, 3e-5, 0.1, 1.0)
    assert (c.warmup_steps, c.max_steps, c.max_epochs, c.log_interval, c.eval_interval) == (200, 5000, None, 50, 500)
    assert c.vocab_path == c.data_path == ""
    assert PRESETS["classic"].config() == c


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_trained_and_fits_its_sliders(name: str) -> None:
    config = PRESETS[name].config()
    assert config.problems() == []
    assert parse_config(config.model_dump()) == config
    assert expected_seconds(name, config) == pytest.approx(PRESETS[name].seconds)
    assert expected_seconds(name, PRESETS[name].config(max_steps=2 * config.max_steps)) == pytest.approx(2 * PRESETS[name].seconds)
    for field_name, field in FIELDS.items():
        if slider := extra(field)["slider"]:
            assert slider[0] <= getattr(config, field_name) <= slider[1], field_name


def test_page_and_command_line_start_at_a_preset_that_exists() -> None:
    assert DEFAULT_PRESET == "quick"
    assert DEFAULT_PRESET in PRESETS


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_the_parameter_count_is_the_model_s_own(name: str, arch: str) -> None:
    config = PRESETS[name].config(arch=arch)
    assert parameter_count(config) == MiniGPT(config).count_parameters()


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("value", [None, True, 2.5, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), "", "9", -1, 10**12, [], {}])
def test_a_value_that_is_not_allowed_is_refused_with_a_number_that_works(name: str, value: Any) -> None:
    low, high = bounds(name)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    legal = plain and low <= value <= high and (name not in WHOLE or isinstance(value, int))
    if legal or (value is None and name == "max_epochs"):
        assert getattr(parse_config({**ROOMY, name: value}), name) == value
        return
    sentences = refusal({**ROOMY, name: value})
    assert len(sentences) == 1
    assert sentences[0].startswith(f"{name} is ")
    found = "empty" if value is None or value == "" else repr(value) if isinstance(value, str) else str(value)[:40]
    assert found in sentences[0]
    target, number = advice(sentences[0], name)
    assert target == name
    assert getattr(parse_config({**ROOMY, name: number}), name) == number


@pytest.mark.parametrize("name", NUMERIC)
def test_both_ends_of_a_range_are_legal_and_a_step_beyond_is_not(name: str) -> None:
    for end, step in zip(bounds(name), (-1, 1), strict=True):
        value = int(end) if name in WHOLE else float(end)
        TransformerConfig.model_validate({name: value}, strict=True)
        beyond = value + step if name in WHOLE else value + step * max(abs(value), 1.0) * 1e-6
        with pytest.raises(ValidationError):
            TransformerConfig.model_validate({name: beyond}, strict=True)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["GPT2", "", None, 3, ["gpt2"]])
def test_a_choice_that_does_not_exist_is_refused_with_the_choices(name: str, value: Any) -> None:
    (sentence,) = refusal({name: value})
    choices = FIELDS[name].annotation.__args__  # type: ignore[union-attr]
    assert sentence.startswith(f"{name} is ")
    assert ", ".join(choices) in sentence
    assert sentence.rsplit(" ", 1)[1] in choices


def test_a_name_that_is_not_a_setting_is_refused_with_the_settings() -> None:
    (sentence,) = refusal({"n_head": 4})
    assert sentence.startswith("n_head is not a setting")
    assert "n_heads" in sentence


@pytest.mark.parametrize("digits", [400, 5000])  # too large for a float; too long for Python to write out
@pytest.mark.parametrize("name", ["n_layers", "dropout"])
def test_an_enormous_integer_is_refused_like_any_other(name: str, digits: int) -> None:
    (sentence,) = refusal({name: 10**digits})
    assert sentence.startswith(f"{name} is ")
    assert len(sentence) < 200
    parse_config({**ROOMY, name: advice(sentence, name)[1]})


def test_a_path_must_be_text() -> None:
    (sentence,) = refusal({"data_path": 3})
    assert sentence.startswith("data_path is 3; it must be text")


def test_flags_may_be_lenient_where_forms_may_not() -> None:
    assert parse_config({"max_steps": "900"}, strict=False).max_steps == 900
    assert refusal({"max_steps": "900"})


def test_all_problems_of_single_fields_are_listed_at_once() -> None:
    sentences = refusal({"n_layers": 0, "dropout": 2.0, "optimizer": "sgd", "colour": "red"})
    assert [sentence.split()[0] for sentence in sentences] == ["n_layers", "dropout", "optimizer", "colour"]


def test_all_problems_between_fields_are_listed_at_once() -> None:
    sentences = refusal(
        {"d_model": 8190, "n_heads": 4, "n_layers": 128, "warmup_steps": 5000, "max_steps": 5000, "min_lr": 0.2, "learning_rate": 0.1}
    )
    assert [sentence.split()[0] for sentence in sentences] == ["n_heads", "warmup_steps", "min_lr", "this"]
    assert "it must divide d_model, 8190" in sentences[0]
    assert "below max_steps, 5,000" in sentences[1]
    assert "must not exceed learning_rate, 0.1" in sentences[2]
    assert f"at most {MAX_PARAMETERS:,}" in sentences[3]


@pytest.mark.parametrize(
    ("values", "rounds"),
    [
        ({"d_model": 64, "n_heads": 5}, 1),
        ({"d_model": 251, "n_heads": 128}, 1),  # the nearest divisor, 251, is no legal number of heads
        ({"d_model": 30, "n_heads": 4}, 1),
        ({"arch": "modern", "d_model": 6, "n_heads": 5}, 1),  # the nearest divisor, 6, would leave heads of odd width
        ({"arch": "modern", "d_model": 24, "n_heads": 8}, 1),
        ({"arch": "modern", "d_model": 2040, "n_heads": 16, "n_layers": 1}, 1),
        ({"arch": "modern", "d_model": 9, "n_heads": 2}, 1),  # no number of heads mends an odd width
        ({"warmup_steps": 200, "max_steps": 100}, 1),
        ({"warmup_steps": 1, "max_steps": 1}, 1),
        ({"learning_rate": 1e-5, "min_lr": 3e-5}, 1),
        ({"learning_rate": 1e-8, "min_lr": 1.0}, 1),
    ],
)
def test_the_advice_between_fields_works_when_followed(values: dict[str, Any], rounds: int) -> None:
    for _ in range(rounds):
        sentence = refusal(values)[0]
        name, number = advice(sentence, sentence.split()[0])
        values = {**values, name: number}
    parse_config(values)


def test_assignments_are_checked_and_a_refused_one_changes_nothing() -> None:
    config = TransformerConfig()
    config.vocab_size = 77
    assert config.vocab_size == 77
    for name, value in [("vocab_size", 4), ("learning_rate", float("inf")), ("arch", "rnn"), ("no_such_name", 1)]:
        with pytest.raises(ValidationError):
            setattr(config, name, value)
    assert config == TransformerConfig(vocab_size=77)


def test_the_best_checkpoint_lies_in_the_run_s_folder_wherever_that_is() -> None:
    config = TransformerConfig()
    assert Path(config.checkpoint_path) == Path("checkpoints") / "best.safetensors"
    config.checkpoint_dir = "elsewhere"
    assert Path(config.checkpoint_path) == Path("elsewhere") / "best.safetensors"
    assert Path(TransformerConfig(checkpoint_dir="ü x").checkpoint_path) == Path("ü x") / "best.safetensors"


def test_a_best_checkpoint_that_was_chosen_stays_where_it_is() -> None:
    config = TransformerConfig(checkpoint_path="kept/here.safetensors")
    config.checkpoint_dir = "elsewhere"
    assert config.checkpoint_path == "kept/here.safetensors"


def test_an_empty_best_checkpoint_follows_the_folder_like_an_absent_one() -> None:
    config = TransformerConfig(checkpoint_path="", checkpoint_dir="a")
    assert Path(config.checkpoint_path) == Path("a") / "best.safetensors"
    config.checkpoint_dir = "b"
    assert Path(config.checkpoint_path) == Path("b") / "best.safetensors"


def test_settings_survive_json() -> None:
    config = TransformerConfig(learning_rate=0.1 + 0.2, max_epochs=3)
    assert TransformerConfig.model_validate_json(config.model_dump_json()) == config
