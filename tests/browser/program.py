"""The real program as a process that need not import torch and gradio, which takes three seconds of a core: it is forked from one that has them."""

import multiprocessing
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import forks
from conftest import ROOT


def start(environment: dict[str, str], log: Path, *, afresh: bool) -> BaseProcess:
    """Start it in the folder of its log. `afresh`: as `python app.py`, with nothing imported before."""
    processes = forks.server() if sys.platform == "linux" else multiprocessing.get_context("spawn")  # a fork is not safe everywhere
    process = processes.Process(target=_run, args=(environment, log, afresh), daemon=True)
    process.start()
    return process


def _run(environment: dict[str, str], log: Path, afresh: bool) -> None:
    os.chdir(log.parent)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    command = [sys.executable, str(ROOT / "app.py")]
    if afresh:
        os.execve(sys.executable, command, environment)
    os.environ.clear()
    os.environ.update(environment)
    from gradio import http_server

    http_server.INITIAL_PORT_VALUE = int(environment["GRADIO_SERVER_PORT"])  # gradio reads this one when it is imported
    sys.argv = command[1:]
    runpy.run_path(command[1], run_name="__main__")
