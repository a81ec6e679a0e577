"""The flags of `train`, made from the declared settings by pydantic-settings, and those of `generate`, `export` and `bench`.

Knows no torch, so that help and mistakes are instant.
"""

import argparse
import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from minigpt.config import TEMPERATURE, TOP_K, TransformerConfig, sentences
from minigpt.errors import ConfigError
from minigpt.presets import DEFAULT_PRESET, PRESETS
from minigpt.system import stray

NEVER_EMPTY = ("--checkpoint-dir", "--resume", "--weights")  # places: an empty one would mean the folder where one stands


class _Flags(TransformerConfig, BaseSettings):
    """The settings as flags. What neither flag nor preset gives stays unset, so that the run's folder can tell a chosen one from a default."""

    model_config = SettingsConfigDict(cli_kebab_case=True, cli_hide_none_type=True, cli_avoid_json=True)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Flags and preset alone: left as it is, the library would also take a variable `seed` of the environment.
        return (init_settings,)


@dataclass(frozen=True)
class TrainRequest:
    """What a person asked `train` to do."""

    config: TransformerConfig
    preset: str
    weights: Path | None
    resume: Path | None = None
    max_steps: int | None = None  # of a resumed run


def parse_train(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> TrainRequest:
    """Read the flags of `train`; an unset one has its preset's value.

    Args:
        parser: an empty parser without abbreviations, which receives the flags.
        arguments: what stands behind `train`.

    Raises:
        ConfigError: with every problem, one sentence a line.
        SystemExit: help was asked for, and printed.
    """
    parser.usage = f"{parser.prog} [--preset NAME] [--FLAG VALUE ...] [--weights FILE]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Train a model, from a preset's settings or your own."
    parser.epilog = _presets_as_text()
    parser.add_argument("--preset", default=DEFAULT_PRESET, metavar="NAME", help=f"where the settings start from: {', '.join(PRESETS)}")
    parser.add_argument("--weights", metavar="FILE", help="also write the best model to FILE, without what only a resume needs")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run: its folder, or one of its checkpoints; only --max-steps may be new")
    source = CliSettingsSource[Any](_Flags, root_parser=parser)
    flags, problems = split_flags(arguments)
    values, unknown = parser.parse_known_args(flags)
    known = [f"--{name.replace('_', '-')}" for name in ("preset", "weights", "resume", *TransformerConfig.model_fields)]
    problems += [f"{name} is not a flag of train: {suggestion(name, known)}" for name in (flag.partition("=")[0] for flag in unknown)]
    if values.preset not in PRESETS:
        problems.append(f"preset is {values.preset!r}; it must be one of {', '.join(PRESETS)}: {suggestion(values.preset, PRESETS)}")
    weights = Path(values.weights) if values.weights is not None else None
    given = {name.removeprefix("--"): value for name, _, value in (flag.partition("=") for flag in flags)}
    outputs = {name: Path(path) for name in ("weights", "vocab_path", "checkpoint_path") if (path := given.get(name.replace("_", "-")))}
    problems += filter(None, itertools.starmap(_unwritable, outputs.items()))
    if values.resume is not None:
        return _parse_resume(given, weights, problems)
    start = PRESETS[values.preset].settings if values.preset in PRESETS else {}
    try:
        flagged = CliApp.run(_Flags, cli_args=values, cli_settings_source=source, **start)
    except ValidationError as error:
        raise ConfigError("\n".join([*problems, *sentences(error)])) from None
    config = TransformerConfig(**flagged.model_dump(exclude_unset=True))
    if problems := [*problems, *config.problems()]:
        raise ConfigError("\n".join(problems))
    return TrainRequest(config, values.preset, weights)


def _parse_resume(given: Mapping[str, str], weights: Path | None, problems: list[str]) -> TrainRequest:
    others = given.keys() - {"resume", "max-steps", "weights"}
    problems += [
        f"--{name} cannot stand beside --resume, whose checkpoint has the settings; --max-steps and --weights can" for name in sorted(others)
    ]
    steps = given.get("max-steps", "1")
    if not (steps.isascii() and steps.isdecimal() and len(steps) < 10):
        problems.append(f"max_steps is {steps[:40]!r}; it must be a whole number, above the steps that the run has made")
    if problems:
        raise ConfigError("\n".join(problems))
    return TrainRequest(TransformerConfig(), "", weights, Path(given["resume"]), int(steps) if "max-steps" in given else None)


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Bring arguments into the form `--some-flag=value`, so that underscores and negative numbers are taken too; collect what is no flag.

    Returns:
        The flags, and a sentence for each argument that is none.
    """
    flags: list[str] = []
    problems: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word in ("-h", "--help"):
            return ["--help"], []
        name, given, value = word.partition("=")
        name = name.replace("_", "-")
        if not name.startswith("--") or len(name) == 2:
            problems.append(f"{word[:40]!r} stands alone; settings are given as --flag value")
            continue
        if not given and waiting and not waiting[0].startswith("--"):
            given, value = "=", waiting.pop(0)
        if given and (value or name not in NEVER_EMPTY):
            flags.append(f"{name}={value}")
        else:
            problems.append(f"{name} has no value; give it one: {name} VALUE")
    return flags, problems


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return what to try instead of a misspelt word."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else "--help lists what there is"


def _unwritable(name: str, path: Path) -> str | None:
    """Say why a file cannot be written, before a run is spent on it; None if it can. Tried with the longest name that would be made there."""
    try:
        if path.is_dir():
            return f"{name} is {str(path)!r}, a folder; give the name of a file in it, such as {path / 'model.safetensors'}"
        nearest = next(parent for parent in path.absolute().parents if parent.exists())
        trial = stray(nearest / max(path.absolute().relative_to(nearest).parts, key=len))
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        return f"{name} is {str(path)!r}, which cannot be written ({error.strerror}): choose another place"
    return None


def _presets_as_text() -> str:
    """List the presets and what each changes of the defaults, for the end of the help."""
    lines = ["Defaults shown are those of the preset classic. The presets:"]
    for name, preset in PRESETS.items():
        changes = ", ".join(f"{key} {value}" for key, value in preset.settings.items())
        lines += [f"  {name}: {preset.sentence}", *([f"    {changes}"] if changes else [])]
    return "\n".join(lines)


# name, kind, default, lowest, highest, help
WRITING: tuple[tuple[str, type[int] | type[float], float, float, float | None, str], ...] = (
    ("seed", int, 0, 0, 2**32 - 1, "same seed, same text"),
    ("temperature", float, TEMPERATURE, 0, 5, "0 takes the likeliest token each time; higher is bolder"),
    ("top_k", int, TOP_K, 0, None, "draw from this many likeliest tokens; 0 means from all"),
    ("max_tokens", int, 200, 1, 10_000, "how many tokens to write"),
)


@dataclass(frozen=True)
class WriteRequest:
    """What a person asked `generate` to do; without a prompt or ids, the model's usual prompt is taken."""

    checkpoint: Path
    prompt: str | None
    ids: tuple[int, ...]
    seed: int
    temperature: float
    top_k: int
    max_tokens: int


def parse_generate(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> WriteRequest:
    """Read the arguments of `generate`.

    Raises:
        ConfigError: with every number that is out of its range, one sentence a line, or with what argparse found.
        SystemExit: help was asked for, and printed.
    """
    parser.description = "Let a checkpoint's model write."
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint, the folder of a run, or of other weights")
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with")
    parser.add_argument("--ids", metavar="IDS", help='or the numbers of tokens that it begins with, such as "50256 11 464"; then numbers are written')
    for name, kind, default, low, high, text in WRITING:
        flag = f"--{name.replace('_', '-')}"
        spellings = [flag] if flag[2:] == name else [flag, f"--{name}"]
        parser.add_argument(*spellings, default=str(default), metavar=kind.__name__, help=f"{text} ({_span(low, high)}; default {default})")
    options = parser.parse_args(arguments)
    chosen: dict[str, Any] = {}
    problems = []
    ids = re.split(r"[\s,]+", options.ids.strip()) if options.ids is not None else []
    if not all(re.fullmatch(r"[0-9]{1,9}", index) for index in ids):
        problems.append(f'ids is {options.ids[:40]!r}; it must be whole numbers from 0 up: try "50256 11 464"')
    if ids and options.prompt is not None:
        problems.append("prompt and ids are two ways to begin: give one of them")
    for name, kind, default, low, high, _ in WRITING:
        given = getattr(options, name)
        try:
            chosen[name] = kind(given)
            fits = low <= chosen[name] and (high is None or chosen[name] <= high)
        except ValueError:
            fits = False
        if not fits:
            what = "a whole number" if kind is int else "a number"
            problems.append(f"{name} is {given[:40]!r}; it must be {what}, {_span(low, high)}: try {default}")
    if problems:
        raise ConfigError("\n".join(problems))
    return WriteRequest(options.checkpoint, options.prompt, tuple(map(int, ids)), **chosen)


def parse_export(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of `export`: checkpoint, folder, to.

    Raises:
        ConfigError: with what argparse found.
        SystemExit: help was asked for, and printed.
    """
    parser.description = "Write a checkpoint's model and tokenizer in a form that others read."
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint of MiniGPT, or the folder of a run")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to: a new folder, or an empty one")
    kinds = ("transformers", "safetensors")
    parser.add_argument("--to", choices=kinds, default=kinds[0], help="for from_pretrained, or under MiniGPT's own names (default transformers)")
    return parser.parse_args(arguments)


def parse_bench(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the flags of `bench`: json, only, seeds, data.

    Raises:
        ConfigError: what argparse found, or a number of seeds that makes no sense.
        SystemExit: help was asked for, and printed.
    """
    parser.description = "Measure speed and learning beside other ways to do the same: about half an hour in all."
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="measure these rows alone")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="repeat the rows that train to a loss with N seeds (default 1)")
    parser.add_argument("--data", default="", metavar="PATH", help="text to train on; without it Tiny Shakespeare, else the built-in plays")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        raise ConfigError(f"seeds is {options.seeds}; it must be 1 or more: try 5")
    return options


def _span(low: float, high: float | None) -> str:
    return f"{low:,} or more" if high is None else f"{low:,} to {high:,}"
