"""The command line: train, inspect, generate, export, bench. The only module that prints.

Results go to standard output, progress of a terminal and complaints to standard error. Exit status: 0 done or stopped as asked, 1 refused,
failed or diverged, 2 a mistake in the command, 130 left at once by Ctrl-C.
"""

# ruff: noqa: PLC0415  imports wait inside the commands: help and inspect must not load torch

import argparse
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import minigpt
from minigpt import system
from minigpt.errors import CheckpointError, ConfigError, DataError, MiniGPTError, naming
from minigpt.stopper import Stopper

if TYPE_CHECKING:
    from minigpt.events import Event
    from minigpt.inspection import Report
    from minigpt.inspection.statistics import TensorStatistics
    from minigpt.runs import Run

PROGRAM = "python -m minigpt"
HELP = f"""usage: {PROGRAM} COMMAND ...

Train a small language model, look inside a checkpoint, let one write.

  train [--preset NAME] [--FLAG VALUE ...] [--weights FILE]
  train --resume RUN [--max-steps N]
  inspect FILE [--tensors] [--json]
  generate CHECKPOINT [--prompt TEXT] [--seed N] [--temperature X] [--top-k N] [--max-tokens N]
  export CHECKPOINT FOLDER [--to transformers|safetensors]
  bench [--json] [--only NAME ...] [--seeds N] [--data PATH]

{PROGRAM} COMMAND --help tells more. The page: python app.py"""
REDRAW_AFTER_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; every foreseen error becomes sentences on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # it was closed, and no other file may get its number
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may write what an old console cannot show
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        complain(str(error))
        return 2
    except MiniGPTError as error:
        complain(str(error))
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        complain(f"{error.filename or 'the system'}: {error.strerror or type(error).__name__}")
    except KeyboardInterrupt:
        complain("stopped at once")
        return 130
    return 1


def complain(text: str) -> None:
    """Write sentences to standard error, once where several processes have the same to say."""
    if system.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _dispatch(arguments: list[str]) -> int:
    if any("\udc80" <= character <= "\udcff" for word in arguments for character in word):
        raise ConfigError("an argument is not UTF-8; write it in UTF-8 and try again")
    commands = {
        "train": train_command, "inspect": inspect_command, "generate": generate_command, "export": export_command, "bench": bench_command,
    }  # fmt: skip
    if not arguments:
        complain(HELP)
        return 2
    if arguments[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if arguments[0] == "--version":
        print(f"minigpt {minigpt.__version__}")
        return 0
    if (command := commands.get(arguments[0])) is None:
        raise ConfigError(f"{arguments[0][:40]!r} is not a command; the commands are {', '.join(commands)}: try {PROGRAM} --help")
    return command(arguments[1:])


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises its findings as sentences."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}: see {self.prog} --help")

    def format_help(self) -> str:
        """Return the help without defaults that are empty."""
        return re.sub(r"\s+\(default:\s+(None)?\)", "", super().format_help())


def train_command(arguments: Sequence[str]) -> int:
    """Train as the flags say; show progress, save, say how it went. Of torchrun's processes only the first has a run to show."""
    from minigpt.cli_flags import parse_train

    request = parse_train(Parser(prog=f"{PROGRAM} train", allow_abbrev=False), arguments)
    stopper = Stopper()
    system.on_termination(stopper.ask)
    _quiet_log()
    if system.rank() > 0:
        from minigpt.distributed import lend_a_hand

        lend_a_hand(request.config, stopper.event, request.resume, request.max_steps)
        return 0
    from minigpt.outputs import check_outputs
    from minigpt.runs import RunManager

    check_outputs(request.config, request.weights, request.resume)
    runs = RunManager(system.home())
    if request.resume is not None:
        run = runs.reopen(request.resume, max_steps=request.max_steps)
    else:
        run = runs.create(request.config, preset=request.preset)
    stopper.watch(run)
    screen = Screen(run)
    run.work(screen.show)
    screen.close()
    return _close(run, request.weights)


class Screen:
    """Shows a run: one moving line where standard error is a terminal, plain lines on standard output elsewhere."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.moving = sys.stderr.isatty()
        self.silent = False
        self._drawn_at = 0.0

    def show(self, event: "Event") -> None:
        """Show an event, on the trainer's thread. A reader that has gone away does not end the run."""
        if self.silent:
            return
        try:
            self._draw(event["type"]) if self.moving else self._line(event)
        except OSError:
            self.silent = True

    def _draw(self, kind: str) -> None:
        from minigpt.progress import moving_line

        if kind == "log" and time.monotonic() - self._drawn_at < REDRAW_AFTER_S:
            return
        self._drawn_at = time.monotonic()
        columns = shutil.get_terminal_size().columns
        line = moving_line(self.run.history.last, columns)
        print(f"\r{line:<{columns - 1}}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the moving line, so that what follows starts on its own."""
        if self.moving and not self.silent:
            complain("")

    def _line(self, event: "Event") -> None:
        from minigpt.progress import plain_line

        if (line := plain_line(event, self.run.history.last)) is not None:
            print(line, flush=True)


def _quiet_log() -> None:
    """Let warnings through, but no traceback of what is told in a sentence anyway."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], OSError | MiniGPTError)))
    logging.basicConfig(format="%(message)s", handlers=[handler])
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # without a network the built-in text steps in, and the summary says so


def _close(run: "Run", weights: Path | None) -> int:
    """Say how a run ended, write the weights if they are wanted, and return the exit status."""
    from minigpt.progress import summary

    if run.state == "failed":
        complain(f"the run failed: {run.error}")
        return 1
    best = Path(run.config.checkpoint_path)
    files = [path for path in (best, run.folder / "last.safetensors") if path.is_file()]
    lines = summary(run.history.last, files)
    if weights is not None:
        from minigpt.export import write_weights

        if not files:
            raise DataError("there are no weights to write: the run was stopped before its first step")
        size = write_weights(files[0], run.folder / "last.safetensors", weights)
        lines.append(f"weights: {weights}, {size:,} bytes")
    print("\n".join(lines), flush=True)
    return 1 if run.state == "diverged" else 0


def inspect_command(arguments: Sequence[str]) -> int:
    """Tell what is in a checkpoint file, without running it."""
    parser = Parser(prog=f"{PROGRAM} inspect", description="Tell what is in a checkpoint, anybody's, without running it.")
    parser.add_argument("file", metavar="FILE", type=Path, help="a .safetensors or .pt file, or a model on the Hub, such as openai-community/gpt2")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--tensors", action="store_true", help="also read all values: extremes, mean, standard deviation, zeros of each tensor")
    options = parser.parse_args(arguments)
    from minigpt.inspection import inspect_safely
    from minigpt.inspection.recognise import weights_in
    from minigpt.progress import description, tensor_lines

    options.file = weights_in(_best_in(options.file))
    with naming(options.file):
        try:
            report = _on_the_hub(options.file) or inspect_safely(options.file)
            found: Iterable[TensorStatistics] = ()
            if options.tensors and options.file.exists():  # of a model on the Hub no values are fetched
                from minigpt.inspection.measuring import measure_safely

                found = (tensor for _, tensor in measure_safely(options.file) if tensor is not None)
            if options.json:
                print(json.dumps({**report.to_dict(), "statistics": [vars(tensor) for tensor in found]}, indent=1))
            else:
                print("\n".join(description(report)))
                for line in tensor_lines(report, found) if options.tensors else ():
                    print(line, flush=True)
        except CheckpointError as error:
            if options.json:
                print(json.dumps({"error": str(error)}))
            raise
    return 0


def _on_the_hub(path: Path) -> "Report | None":
    """Look at a model on the Hub, if that is what this is: no path of here, nor a misspelt one, but the form of a name."""
    if path.exists() or path.parent.is_dir() or path.suffix in (".safetensors", ".pt", ".pth", ".ckpt", ".bin"):
        return None
    from minigpt.inspection import hub

    return hub.inspect_hub(path.as_posix()) if hub.NAME.fullmatch(path.as_posix()) else None


def generate_command(arguments: Sequence[str]) -> int:
    """Print the prompt and what a checkpoint's model writes after it."""
    from minigpt.cli_flags import parse_generate
    from minigpt.inspection import inspect_safely

    request = parse_generate(Parser(prog=f"{PROGRAM} generate", allow_abbrev=False), arguments)
    path = _best_in(request.checkpoint)
    with naming(path):
        if not path.is_dir():
            inspect_safely(path, scan=False)  # what is no checkpoint is refused before torch is waited for
        from minigpt.foreign import open_any

        checkpoint = open_any(path)
    import torch

    from minigpt.generate import continued, first_id, first_prompt, generate, unknown

    for note in checkpoint.notes:
        complain(note)
    tokenizer, ids, known, prompt = checkpoint.tokenizer, list(request.ids), checkpoint.config.vocab_size, request.prompt
    if ids and max(ids) >= known:
        raise ConfigError(f"ids has {max(ids)}; this model knows 0 to {known - 1:,}: use smaller numbers")
    if not ids and tokenizer is None:
        raise CheckpointError(f'{path}: it holds no tokenizer, so its model reads and writes numbers of tokens: try --ids "{known - 1}"')
    if not ids and tokenizer is not None:
        prompt = first_prompt(checkpoint) if prompt is None else prompt
        ids = tokenizer.encode(prompt) or [first_id(tokenizer)]
        if remark := unknown(tokenizer, ids):
            complain(remark)
    never = tokenizer.never_written if tokenizer is not None else ()
    draw, length = torch.Generator().manual_seed(request.seed), len(ids)
    ids += generate(checkpoint.model, ids, request.max_tokens, temperature=request.temperature, top_k=request.top_k, generator=draw, never=never)
    print(" ".join(map(str, ids)) if prompt is None or tokenizer is None else continued(tokenizer, prompt, ids, length))
    return 0


def _leave() -> NoReturn:
    raise KeyboardInterrupt


def bench_command(arguments: Sequence[str]) -> int:
    """Measure speed and learning beside other ways to do the same, and print each row as it is known."""
    from minigpt.cli_flags import parse_bench

    request = parse_bench(Parser(prog=f"{PROGRAM} bench", allow_abbrev=False), arguments)
    system.on_termination(_leave)  # so that the servers and folders that it made go with it
    from minigpt import bench

    for line in bench.report(request.only, request.data, as_json=request.json, seeds=request.seeds):
        print(line, flush=True)
    return 0


def export_command(arguments: Sequence[str]) -> int:
    """Write a checkpoint's model and tokenizer in a form that others read, and print the files."""
    from minigpt.cli_flags import parse_export

    options = parse_export(Parser(prog=f"{PROGRAM} export"), arguments)
    from minigpt.export import export

    path = _best_in(options.checkpoint)
    with naming(path):
        files = export(path, options.folder, options.to)
    print("\n".join(map(str, files)))
    return 0


def _best_in(path: Path) -> Path:
    """Return a run's best checkpoint, and say so, if this is the folder of a run, else what was given."""
    best = path / "best.safetensors"
    if not best.is_file():
        return path
    complain(f"reading {best}")
    return best
