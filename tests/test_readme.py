"""The README says what is true: its tables are made from the settings, its commands and its code work, the files it names are there.

`python tests/test_readme.py --write` renews the tables.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the run as a program; pytest's own comes from conftest

from minigpt.cli_flags import parse_bench, parse_export, parse_generate, parse_train  # noqa: E402
from minigpt.config import TransformerConfig, number  # noqa: E402
from minigpt.presets import DEFAULT_PRESET, PRESETS  # noqa: E402

README = ROOT / "README.md"
BEGIN, END = "<!-- settings -->", "<!-- /settings -->"


def tables() -> str:
    """Make the README's tables of settings and presets."""
    lines = ["| flag | default | range | meaning |", "|---|---|---|---|"]
    for name, field in TransformerConfig.model_fields.items():
        low = next((found.ge for found in field.metadata if getattr(found, "ge", None) is not None), None)
        high = next((found.le for found in field.metadata if getattr(found, "le", None) is not None), None)
        choices = [str(choice) for choice in getattr(field.annotation, "__args__", ()) if isinstance(choice, str)]
        legal = ", ".join(choices) if choices else f"{number(low)} to {number(high)}" if low is not None else "text"
        default = "none" if field.default is None else f"`{field.default}`" if field.default != "" else "empty"
        meaning = re.sub(r" \([^()]* to [^()]*\)$", "", field.description or "").replace("|", "\\|")
        lines.append(f"| `--{name.replace('_', '-')}` | {default} | {legal} | {meaning} |")
    lines += ["", "| preset | on the page | what | differs from `classic` in |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        changes = ", ".join(f"{key} {value}" for key, value in preset.settings.items()) or "nothing"
        lines.append(f"| `{name}`{' (default)' if name == DEFAULT_PRESET else ''} | {preset.label} | {preset.sentence} | {changes} |")
    return "\n".join(lines)


def renewed(text: str) -> str:
    """Return the README's text with the tables made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


def readme() -> str:
    return README.read_text(encoding="utf-8")


def front_matter() -> dict[str, str]:
    _, block, _ = readme().split("---\n", 2)
    return {name: value.strip().strip('"') for name, value in (line.split(":", 1) for line in block.splitlines())}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", readme(), re.DOTALL | re.MULTILINE)


def commands(name: str) -> list[list[str]]:
    """Return the arguments of each `python -m minigpt NAME` that the README shows."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line.split(f"minigpt {name}", 1)[1]) for line in lines if f"python -m minigpt {name}" in line]


def test_the_tables_are_those_of_the_settings() -> None:
    assert readme() == renewed(readme()), "run: python tests/test_readme.py --write"


def test_the_front_matter_agrees_with_the_requirements() -> None:
    facts = front_matter()
    pins = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)
    assert facts["sdk"] == "gradio"
    assert facts["sdk_version"] == pins["gradio"]
    assert facts["license"] == "mit"
    assert (ROOT / facts["app_file"]).is_file()
    assert len(facts["short_description"]) <= 60  # the Hub refuses more
    assert f"torch=={pins['torch']}" in readme()


def test_the_files_it_names_are_there() -> None:
    text = readme()
    named = set(re.findall(r"`((?:assets|tests|minigpt)/[\w./]+\.\w+|app\.py|LICENSE|requirements\.txt)`", text))
    named |= set(re.findall(r"\]\(([^)]+)\)", text))
    named |= {word for line in blocks("sh") for word in line.split() if word.startswith(("tests/", "assets/"))}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_presets_it_names_exist() -> None:
    named = {arguments[arguments.index("--preset") + 1] for arguments in commands("train") if "--preset" in arguments}
    assert named
    assert named <= PRESETS.keys()
    assert f"`{DEFAULT_PRESET}` if none is named" in readme()


def test_its_commands_are_understood() -> None:
    assert len(commands("train")) > 2
    assert len(commands("generate")) > 1
    for arguments in commands("train"):
        parse_train(argparse.ArgumentParser(allow_abbrev=False), arguments)
    for arguments in commands("generate"):
        parse_generate(argparse.ArgumentParser(), arguments)
    for arguments in commands("export"):
        parse_export(argparse.ArgumentParser(), arguments)
    assert all(parse_bench(argparse.ArgumentParser(), arguments).only for arguments in commands("bench"))
    assert {arguments[0] for arguments in commands("inspect")} == {"assets/example.safetensors"}


def test_it_is_short_enough_to_be_read() -> None:
    assert len(readme().splitlines()) <= 270


@pytest.mark.slow
def test_its_code_runs(tmp_path: Path) -> None:
    code = next(block for block in blocks("python") if "minigpt.train" in block)
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "My lord," in done.stdout
    assert (tmp_path / "runs" / "from-code" / "best.safetensors").is_file()


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    README.write_text(renewed(readme()), encoding="utf-8")
