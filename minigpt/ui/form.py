"""The settings form, made from the config's declarations: one control a field, and the way back from controls to checked settings."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args
from urllib.parse import parse_qsl, urlencode

import gradio as gr

from minigpt.config import TransformerConfig, extra, fields, parameter_count, parse_config
from minigpt.errors import ConfigError
from minigpt.presets import DEFAULT_PRESET, PRESETS, expected_seconds
from minigpt.ui.refusals import LABELS
from minigpt.ui.words import duration

NAMES = [*fields("model"), *fields("training")]
OPTIONAL = ("max_epochs",)
Control = TypeVar("Control", bound=gr.components.Component)


def control(name: str) -> gr.components.Component:
    """Make the control of one setting: choices as radio buttons, slider ranges as sliders, everything else as a number field.

    No control has limits of its own, so that a wrong value is refused with the config's sentence.
    """
    field = TransformerConfig.model_fields[name]
    value = PRESETS["quick"].config().model_dump()[name]
    info = field.description
    if name in OPTIONAL:  # the browser turns an empty number into 0
        value, info = 0, str(info).replace("empty", "0")
    common: dict[str, Any] = {"value": value, "label": field.title, "info": info, "elem_id": f"setting-{name}", "interactive": True}
    if field.annotation not in (int, float) and name not in OPTIONAL:
        return unjudged(gr.Radio(list(get_args(field.annotation)), **common))
    if slider := extra(field)["slider"]:
        return unjudged(gr.Slider(slider[0], slider[1], step=slider[2], **common))
    return gr.Number(**common)


def unjudged(control: Control) -> Control:
    """Let a control pass on whatever it is given, also beyond a slider's range: what reads it judges the value, in a sentence of its own."""
    # On the class: gradio makes the object anew from it at every update of a page. A subclass would have gradio write a stub file beside its module.
    setattr(type(control), "preprocess", lambda _, payload: payload)  # noqa: B010
    return control


def values_of(config: TransformerConfig) -> list[Any]:
    """Return the controls' values for these settings, in the order of `NAMES`."""
    values = config.model_dump()
    return [0 if name in OPTIONAL and values[name] is None else values[name] for name in NAMES]


def read(preset: str, values: Sequence[Any]) -> TransformerConfig:
    """Turn the controls' values into checked settings.

    Raises:
        ConfigError: with every problem, one sentence a line.
    """
    settings = dict(zip(NAMES, values, strict=True))
    return checked(preset, {name: None if name in OPTIONAL and type(value) is int and value == 0 else value for name, value in settings.items()})


def checked(preset: str, settings: Mapping[str, Any], *, strict: bool = True) -> TransformerConfig:
    """Turn a preset and some settings by name into checked ones; only what stands on the form may be set. `strict` as in `parse_config`.

    Raises:
        ConfigError: with every problem, one sentence a line.
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"preset is {str(preset)[:40]!r}; it must be one of {', '.join(PRESETS)}: try quick")
    if foreign := [str(name)[:40] for name in settings if name not in NAMES]:
        raise ConfigError(f"{', '.join(foreign[:5])}: no such setting; the settings are {', '.join(NAMES)}")
    return parse_config({**PRESETS[preset].settings, **settings}, strict=strict)


def link(preset: str, config: TransformerConfig) -> str:
    """Return the query of an address that opens the page with these settings: the preset and what differs from it."""
    return urlencode({"preset": preset, **differing(preset, config)})


def from_link(query: str | None) -> tuple[str, TransformerConfig] | None:
    """Read the settings in an address; None if it has none. What is no setting is left to others.

    Raises:
        ConfigError: with every problem, one sentence a line.
    """
    given = {name: value for name, value in parse_qsl((query or "").removeprefix("?")[:10_000]) if name in ("preset", *NAMES)}
    preset = given.pop("preset", "" if not given else DEFAULT_PRESET)
    return (preset, checked(preset, given, strict=False)) if preset else None


def as_asked(preset: str, config: TransformerConfig, data: Mapping[str, Any]) -> TransformerConfig:
    """Return a run's settings as its form had them: where the text has fewer tokens than the preset allows, the run's are simply all of them.

    Args:
        preset: where the settings started from.
        config: those of the run, with the real size of the vocabulary.
        data: the run's data event.
    """
    allowed = PRESETS[preset].config().vocab_size
    holds_all = data.get("unknown_share") == 0 and config.vocab_size < allowed
    return config.model_copy(update={"vocab_size": allowed}) if holds_all else config


def to_json(preset: str, config: TransformerConfig) -> str:
    """Write the whole form as a file to keep."""
    values = config.model_dump()
    return json.dumps({"preset": preset, **{name: values[name] for name in NAMES}}, indent=1)


def from_json(content: bytes | None) -> tuple[str, TransformerConfig]:
    """Read a file made by `to_json`; settings that it lacks are the preset's.

    Raises:
        ConfigError: the file holds no settings, or wrong ones.
    """
    try:
        given = json.loads((content or b"")[:100_000])
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError("this file holds no settings: choose one that this page has saved")
    preset = given.pop("preset", DEFAULT_PRESET)
    return preset, checked(preset, given)


def differing(preset: str, config: TransformerConfig) -> dict[str, Any]:
    """Return the settings in which `config` differs from a preset."""
    base, now = PRESETS[preset].config().model_dump(), config.model_dump()
    return {name: now[name] for name in NAMES if now[name] != base[name]}


def summary(preset: str, config: TransformerConfig) -> str:
    """Say under the button what this run will cost and how it differs from its preset."""
    size = parameter_count(config)
    most = "up to " if config.tokenizer == "char" else ""  # a text has as many letters as it has
    line = f"{most}{size / 1000:,.0f} k parameters · about {duration(expected_seconds(preset, config))} · {PRESETS[preset].sentence}"
    if changed := differing(preset, config):
        names = ", ".join(LABELS[name] for name in changed)
        line += f" · {len(changed)} setting{'s differ' if len(changed) > 1 else ' differs'} from {PRESETS[preset].label}: {names}"
    return line


def command(preset: str, config: TransformerConfig) -> str:
    """Return the command line that starts this very run."""
    flags = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in differing(preset, config).items()]
    return " ".join(["python -m minigpt train", f"--preset {preset}", *flags])


def label(preset: str) -> str:
    """Return a preset's name on the page with its expected time."""
    return f"{PRESETS[preset].label} · {duration(PRESETS[preset].seconds)}"
