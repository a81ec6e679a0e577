"""The command line as a person meets it: real processes, tiny models, no network; a fresh process where it is not about refusals alone."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest

from minigpt import system
from minigpt.cli import main
from minigpt.config import TransformerConfig
from minigpt.foreign import open_any
from minigpt.generate import write
from minigpt.outputs import check_outputs
from minigpt.presets import PRESETS

ROOT = Path(__file__).parent.parent
LIMIT_S = 60
TINY = ["--max-steps", "30", "--warmup-steps", "3", "--eval-interval", "10", "--log-interval", "5", "--batch-size", "4", "--device", "cpu"]
ENDLESS = ["--max-steps", "1000000", *TINY[2:]]


class Place:
    """A folder of runs with a text to learn from, in which commands are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "runs"
        self.text = folder / "plays.txt"
        self.text.write_text((ROOT / "assets" / "shakespeare.txt").read_text(encoding="utf-8")[:60_000], encoding="utf-8")
        self.environment = {**os.environ, "MINIGPT_HOME": str(self.home), "MINIGPT_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "minigpt", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._finished(self.command(*arguments))

    def python(self, program: str) -> subprocess.CompletedProcess[str]:
        return self._finished([sys.executable, "-c", program])

    def _finished(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def train(self, *arguments: str) -> list[str]:
        return self.command("train", "--data-path", str(self.text), *arguments)

    def latest(self) -> Path:
        return max(self.home.iterdir(), key=lambda folder: folder.stat().st_mtime)

    def inspect(self, path: Path) -> dict[str, object]:
        report: dict[str, object] = json.loads(self.run("inspect", str(path), "--json").stdout)
        return report


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("cli"))


class Trained:
    """A run trained in this process; that a fresh one trains too is seen where it is stopped or nobody reads."""

    def __init__(self, place: Place) -> None:
        self.weights = place.folder / "weights.safetensors"
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.chdir(place.folder)
            patch.setenv("MINIGPT_HOME", str(place.home))
            patch.setattr(system, "on_termination", lambda _: None)  # the signals stay pytest's
            code = main(["train", "--data-path", str(place.text), *TINY, "--weights", str(self.weights)])
        self.stdout, self.stderr = out.getvalue(), err.getvalue()
        assert code == 0, self.stderr
        self.folder = place.latest()


@pytest.fixture(scope="module")
def trained(place: Place) -> Trained:
    return Trained(place)


def no_traceback(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr


# --- train


def test_a_run_trains_to_its_end_and_leaves_readable_checkpoints(place: Place, trained: Trained) -> None:
    assert {"best.safetensors", "last.safetensors", "config.json", "metrics.jsonl"} <= {path.name for path in trained.folder.iterdir()}
    assert place.inspect(trained.folder / "last.safetensors")["step"] == 30
    assert json.loads((trained.folder / "state.json").read_text())["state"] == "finished"


def test_without_a_terminal_each_evaluation_is_a_plain_line(trained: Trained) -> None:
    lines = trained.stdout.splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("step ")] == [f"step {step} of 30" for step in (0, 10, 20, 30)]
    assert any("parameters on cpu" in line for line in lines)
    assert "\r" not in trained.stdout + trained.stderr


def test_the_summary_says_how_it_went_and_what_to_do_next(place: Place, trained: Trained) -> None:
    text = trained.stdout
    assert re.search(r"finished after 30 of 30 steps in \S+ s\n", text)
    assert re.search(r"final validation loss \d\.\d+ \(perplexity \d+", text)
    assert re.search(r"best validation loss \d\.\d+ \(perplexity .*\) at step \d+\n", text)
    assert "text: plays.txt" in text
    assert f"checkpoint: {trained.folder / 'best.safetensors'}" in text
    suggested = re.search(r"look inside: python -m minigpt (.*)", text)
    assert suggested is not None
    assert place.run(*suggested[1].split()).returncode == 0


def test_the_preset_is_quick_unless_another_is_named_and_flags_win_over_it(trained: Trained) -> None:
    config = json.loads((trained.folder / "config.json").read_text())
    assert config["arch"] == "modern"
    assert config["learning_rate"] == PRESETS["quick"].settings["learning_rate"]
    assert (config["batch_size"], config["max_steps"]) == (4, 30)
    assert trained.folder.name.split("-")[2] == "quick"


def test_another_preset_can_be_chosen_and_its_settings_changed(place: Place) -> None:
    program = (
        "from minigpt.cli import Parser; from minigpt.cli_flags import parse_train\n"
        "r = parse_train(Parser(allow_abbrev=False), ['--preset', 'chars', '--d_model', '64', '--min-lr', '0.001', '--max-epochs=3'])\n"
        "print(r.preset, r.config.tokenizer, r.config.d_model, r.config.min_lr, r.config.max_epochs, sorted(r.config.model_fields_set))"
    )
    done = place.python(program)
    assert done.stdout.startswith("chars char 64 0.001 3 "), done.stderr
    assert "checkpoint_dir" not in done.stdout  # or the run's folder would count as chosen


def test_a_variable_of_the_environment_is_no_setting(place: Place) -> None:
    program = (
        "import os; os.environ.update(seed='7', SEED='7', max_steps='9')\n"
        "from minigpt.cli import Parser; from minigpt.cli_flags import parse_train\n"
        "c = parse_train(Parser(), []).config; print(c.seed, c.max_steps)"
    )
    assert place.python(program).stdout.split() == ["1337", str(PRESETS["quick"].settings["max_steps"])]


def test_the_weights_file_opens_and_is_small(place: Place, trained: Trained) -> None:
    whole, weights = place.inspect(trained.folder / "best.safetensors"), place.inspect(trained.weights)
    assert trained.weights.stat().st_size <= 1_000_000
    assert trained.weights.stat().st_size < (trained.folder / "best.safetensors").stat().st_size
    assert weights["warnings"] == []
    for key in ("step", "val_loss", "best_val_loss", "config", "parameters", "tensors"):
        assert weights[key] == whole[key], key
    metadata = weights["metadata"]
    assert isinstance(metadata, dict)
    assert {"series", "samples", "data", "corpus", "elapsed", "best_step", "val_step", "tokenizer"} <= metadata.keys()
    assert "optimizer_groups" not in metadata


def test_mistakes_are_told_all_at_once_in_sentences(place: Place) -> None:
    wrong = ("--preset", "quik", "--max-stepz", "3", "--dropout", "7", "--d_model", "x", "--arch", "gpt9", "--seed", "-1", "stray", "--min-lr")
    done = place.run("train", *wrong)
    lines = no_traceback(done).splitlines()
    assert done.returncode == 2
    assert done.stdout == ""
    assert sorted(lines) == sorted(
        [
            "'stray' stands alone; settings are given as --flag value",
            "--min-lr has no value; give it one: --min-lr VALUE",
            "--max-stepz is not a flag of train: did you mean --max-steps?",
            "preset is 'quik'; it must be one of quick, chars, classic, small: did you mean quick?",
            "arch is 'gpt9'; it must be one of gpt2, modern: try gpt2",
            "d_model is 'x'; it must be a whole number from 2 to 8,192: try 32",
            "dropout is '7'; it must be a number from 0 to 0.9: try 0.1",
            next(line for line in lines if line.startswith("seed is '-1'; it must be a whole number from 0 to 4,294,967,295")),
        ]
    )


def test_settings_that_do_not_fit_each_other_are_refused(place: Place, tmp_path: Path) -> None:
    done = place.run("train", "--n-heads", "5", "--max-steps", "4", "--weights", str(tmp_path))
    lines = no_traceback(done).splitlines()
    assert done.returncode == 2
    assert lines[0].startswith(f"weights is {str(tmp_path)!r}, a folder")
    assert "n_heads is 5; it must divide d_model, 32 into even parts: try 4" in lines
    assert "warmup_steps is 8; it must be below max_steps, 4: try 0" in lines


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--vocab-path", "plays.txt"], "vocab_path is 'plays.txt', which is there already and would be replaced: name a new file"),
        (["--checkpoint-path", "plays.txt"], "checkpoint_path is 'plays.txt', which is there already"),
        (["--weights", "plays.txt"], "weights is 'plays.txt', which is there already"),
        (["--weights", "best"], "which is there already"),
        (["--checkpoint-path", "best"], "which is there already"),
        (["--vocab-path", "weights.safetensors"], "which is there already"),
        (["--checkpoint-dir", "new", "--vocab-path", "new/last.safetensors"], "in the run's own folder: choose a place outside of it"),
        (["--checkpoint-dir", "new", "--checkpoint-path", "new/config.json"], "in the run's own folder"),
        (["--checkpoint-dir", "new", "--weights", "./new/../new/best.safetensors"], "in the run's own folder"),
        (["--vocab-path", "one", "--checkpoint-path", "./one"], "checkpoint_path is './one', the same file as vocab_path: give each its own"),
    ],
)
def test_an_output_that_would_replace_a_file_is_refused_before_training(
    flags: list[str], said: str, place: Place, trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("MINIGPT_HOME", str(place.home))
    best = trained.folder / "best.safetensors"
    files = [place.text, best, trained.weights]
    before, runs = [file.read_bytes() for file in files], set(place.home.iterdir())
    assert main(["train", "--data-path", str(place.text), *TINY, *(str(best) if flag == "best" else flag for flag in flags)]) == 2
    assert said in capsys.readouterr().err
    assert [file.read_bytes() for file in files] == before
    assert set(place.home.iterdir()) == runs
    assert not (place.folder / "new").exists()


def test_weights_alone_may_replace_weights_of_ours(trained: Trained) -> None:
    check_outputs(TransformerConfig(), trained.weights)
    check_outputs(TransformerConfig(checkpoint_dir="new", checkpoint_path="new/best.safetensors"), None)


def test_a_text_that_cannot_be_read_fails_the_run_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert main(["train", "--data-path", "loop"]) == 1
    assert "the text file 'loop' cannot be read" in capsys.readouterr().err
    for flag in ("--weights", "--vocab-path", "--checkpoint-path"):
        assert main(["train", "--data-path", "nowhere.txt", flag, "loop"]) == 2
        assert f"{flag[2:].replace('-', '_')} is 'loop', which is there already" in capsys.readouterr().err
    assert main(["train", "--data-path", "nowhere.txt"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "the run failed: the text file 'nowhere.txt' cannot be read (No such file or directory); give the path of a UTF-8 text file"
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="no shell of this kind there")
def test_a_run_whose_error_stream_is_closed_is_trained_all_the_same(place: Place) -> None:
    folder = place.folder / "closed"
    command = shlex.join([*place.train("--checkpoint-dir", str(folder), *TINY)])
    assert subprocess.run(["sh", "-c", f"{command} 2>&-"], cwd=place.folder, env=place.environment, timeout=LIMIT_S, check=False).returncode == 0
    assert place.inspect(folder / "last.safetensors")["format"] == "minigpt"


@pytest.mark.skipif(sys.platform == "win32", reason="no shell of this kind there")
def test_a_job_that_was_started_with_ctrl_c_ignored_goes_on_ignoring_it(place: Place) -> None:
    script = f"trap '' INT; {shlex.join(place.command('--help'))} & job=$!; while kill -INT $job; do :; done 2>&-; wait $job"
    done = subprocess.run(["sh", "-c", script], env=place.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, "bench" in done.stdout) == (0, True)


def test_help_lists_every_setting_and_loads_no_torch(place: Place) -> None:
    program = (
        "import sys\nfrom minigpt.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit as end:\n    print('exit', end.code, 'torch' in sys.modules, 'pandas' in sys.modules)"
    )
    text = place.python(program).stdout
    assert text.endswith("exit 0 False False\n")
    for name, field in TransformerConfig.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert str(field.description).split()[0] in text
    for name in PRESETS:
        assert f"  {name}: " in text
    assert "(1 to 10,000,000)" in text
    assert "--weights FILE" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [([], 2, "usage: python -m minigpt COMMAND"), (["trian"], 2, "'trian' is not a command; the commands are train, inspect, generate")],
)
def test_a_missing_or_unknown_command_is_answered(place: Place, arguments: list[str], code: int, words: str) -> None:
    done = place.run(*arguments)
    assert done.returncode == code
    assert words in no_traceback(done)


# --- stopping


def text_until(process: subprocess.Popen[bytes] | forks.Forked, descriptor: int, wanted: str) -> Iterator[str]:
    """Yield once, when `wanted` has been written, and then again at the end; always with all text so far. Nothing is waited for without limit."""
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    text, found = b"", False
    try:
        while piece := read_some(descriptor):
            text += piece
            if not found and wanted.encode() in text:
                found = True
                yield text.decode()
        assert found, text.decode()
        yield text.decode()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # a pseudo-terminal whose other side has ended
        return b""


def exit_code(process: subprocess.Popen[bytes] | forks.Forked) -> int:
    return process.wait(LIMIT_S)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_sigterm_stops_gracefully_and_the_checkpoint_holds_that_step(place: Place) -> None:
    process = subprocess.Popen(place.train(*ENDLESS), cwd=place.folder, env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    reading = text_until(process, process.stdout.fileno(), "\nstep 20 of 1,000,000")
    next(reading)
    process.send_signal(signal.SIGTERM)
    text = next(reading)
    assert exit_code(process) == 0
    stopped = re.search(r"stopped after (\d+) of 1,000,000 steps", text)
    assert stopped is not None, text
    report = place.inspect(place.latest() / "last.safetensors")
    assert report["step"] == int(stopped[1]) >= 20
    assert isinstance(report["val_loss"], float)
    assert b"stopping and saving" in process.stderr.read()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_on_a_terminal_one_line_moves_and_ctrl_c_stops_gracefully(place: Place) -> None:
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {name: value for name, value in place.environment.items() if name != "COLUMNS"}
    process = forks.Forked(main, ["train", "--data-path", str(place.text), *ENDLESS], cwd=place.folder, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    reading = text_until(process, ours, "validation")
    next(reading)
    process.send_signal(signal.SIGINT)
    text = next(reading)
    os.close(ours)
    assert exit_code(process) == 0
    frames = re.findall(r"\r(\[[#-]+\]  step [\d,]+/1,000,000  loss \d.\d{3}.*?)(?=\r)", text)
    assert frames
    assert "tokens/s" in frames[-1]
    assert all(len(frame) <= 99 for frame in frames)
    stopped = re.search(r"stopped after (\d+) of 1,000,000 steps", text)
    assert stopped is not None, text
    report = place.inspect(place.latest() / "last.safetensors")
    assert report["step"] == int(stopped[1])
    assert isinstance(report["metadata"], dict)
    samples = [sample["text"] for sample in report["metadata"]["samples"]]
    assert samples
    assert not any(sample[:20] in text for sample in samples)  # they are for the page
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_a_stop_before_the_first_step_ends_well_and_leaves_nothing(place: Place) -> None:
    place.home.mkdir(exist_ok=True)
    before = set(place.home.iterdir())
    process = subprocess.Popen(place.train(*ENDLESS), cwd=place.folder, env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + LIMIT_S
    while set(place.home.iterdir()) == before:
        assert time.monotonic() < deadline, "no folder was made"
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert b"stopped" in out
    assert b"Traceback" not in err
    assert set(place.home.iterdir()) == before


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_run(place: Place) -> None:
    process = subprocess.Popen(place.train(*TINY), cwd=place.folder, env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=LIMIT_S)
    assert b"Traceback" not in err
    assert place.inspect(place.latest() / "last.safetensors")["step"] == 30


# --- inspect


def test_inspect_prints_everything_as_json(place: Place, trained: Trained) -> None:
    report = place.inspect(trained.folder / "best.safetensors")
    assert report.keys() >= {
        "format",
        "step",
        "val_loss",
        "best_val_loss",
        "config",
        "parameters",
        "parameters_by_block",
        "warnings",
        "notes",
        "checked",
    }
    assert report["format"] == "minigpt"
    assert type(report["parameters"]) is int
    config = report["config"]
    assert isinstance(config, dict)
    assert report["parameters"] == 32 * config["vocab_size"] + 2 * 12 * 32 * 32  # the tied head once
    assert config["arch"] == "modern"


def test_inspect_begins_with_a_verdict_in_words(place: Place, trained: Trained) -> None:
    done = place.run("inspect", str(trained.folder / "best.safetensors"))
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert re.fullmatch(r"step \d+ · validation loss \d\.\d+ · perplexity [\d.]+ · best of its run", lines[0])
    assert lines[1].startswith("format: minigpt")
    assert any(re.fullmatch(r"  arch +modern", line) for line in lines)
    assert any(re.fullmatch(r"parameters: [\d,]+, shape [0-9a-f]{12}", line) for line in lines)


@pytest.mark.parametrize("content", [None, b"", b"hello, this is no checkpoint"])
def test_what_is_no_checkpoint_is_refused_in_one_sentence(place: Place, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "other.pt"
    if content is not None:
        path.write_bytes(content)
    done = place.run("inspect", str(path), "--json")
    lines = no_traceback(done).splitlines()
    assert done.returncode == 1
    assert len(lines) == 1
    assert lines[0] == f"{path}: {json.loads(done.stdout)['error']}"


def test_inspect_loads_no_torch(place: Place, trained: Trained) -> None:
    program = f"import sys; from minigpt.cli import main; main(['inspect', {str(trained.weights)!r}]); print('torch' in sys.modules)"
    assert place.python(program).stdout.endswith("\nFalse\n")


# --- generate


@pytest.mark.slow
def test_the_same_seed_writes_the_same_text_and_nothing_else(place: Place, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "ORLANDO:", "--max-tokens", "20", "--temperature", "1.5", "--top-k", "0", "--seed"]
    done = place.run("generate", str(trained.folder), *arguments, "1")  # a run's folder means its best checkpoint, of which the weights are a copy
    assert (done.returncode, done.stderr) == (0, f"reading {trained.folder / 'best.safetensors'}\n")
    assert done.stdout.startswith("ORLANDO:")
    texts = []
    for seed in "12":
        assert main(["generate", str(trained.weights), *arguments, seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == done.stdout
    assert texts[1] != done.stdout


def test_numbers_out_of_range_are_told_all_at_once(place: Place) -> None:
    done = place.run("generate", "nowhere", "--seed", "-1", "--temperature", "5.1", "--top_k", "-4", "--max-tokens", "10001")
    assert done.returncode == 2
    assert no_traceback(done).splitlines() == [
        "seed is '-1'; it must be a whole number, 0 to 4,294,967,295: try 0",
        "temperature is '5.1'; it must be a number, 0 to 5: try 0.8",
        "top_k is '-4'; it must be a whole number, 0 or more: try 50",
        "max_tokens is '10001'; it must be a whole number, 1 to 10,000: try 200",
    ]
    assert place.run("generate", "nowhere", "--temperature", "nan").returncode == 2


def test_generate_refuses_what_is_no_checkpoint(place: Place) -> None:
    missing = place.run("generate", "nowhere.safetensors")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert no_traceback(missing) == "nowhere.safetensors: There is no such file; it may have been moved or deleted.\n"
    other = place.run("generate", str(place.text))
    assert (other.returncode, other.stdout) == (1, "")
    assert no_traceback(other).count("\n") == 1


def test_words_that_the_model_does_not_know_are_told_and_stand_there_as_they_were_typed(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(trained.weights), "--prompt", " Xyzzy  the", "--max-tokens", "20"]) == 0
    said = capsys.readouterr()
    assert said.err == "1 of the prompt's 2 tokens are not in this model's vocabulary; it reads them as <unk>\n"
    assert said.out.startswith(" Xyzzy  the")
    opened = open_any(trained.weights)
    *_, page = write(opened.model, opened.tokenizer, " Xyzzy  the", 20)
    assert said.out == page + "\n", "as on the page"


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [("GRADIO_SERVER_PORT", "abc", "app.py"), ("GRADIO_SERVER_PORT", "99999", "app.py"), ("GRADIO_SERVER_PORT", "", "app.py"), ("RANK", "abc", "-m")],
)
def test_a_number_in_the_environment_that_is_none_is_told_in_a_sentence(name: str, value: str, what: str, place: Place) -> None:
    command = [sys.executable, *(["-m", "minigpt"] if what == "-m" else [str(ROOT / what)])]
    environment = {**place.environment, "WORLD_SIZE": "2", name: value}
    done = subprocess.run(command, cwd=place.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name} is {value!r}; it must be a whole number from ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder here that nobody can write to")
def test_an_export_that_cannot_be_written_names_the_folder_asked_for(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained.folder), "/proc/x"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("/proc/x: ")
