"""The real program as a process that need not import torch and gradio, which takes three seconds of a core: it is forked from one that has them."""

import os
import runpy
import sys
from pathlib import Path

import forks
from conftest import ROOT

APP = str(ROOT / "app.py")


def start(environment: dict[str, str], log: Path, *, afresh: bool) -> forks.Forked:
    """Start it in the folder of its log. `afresh`: as `python app.py`, with nothing imported before."""
    work, arguments = (os.execve, (sys.executable, [sys.executable, APP], environment)) if afresh else (_run, ())
    with log.open("wb") as file:
        return forks.Forked(work, *arguments, cwd=log.parent, env=environment, stdout=file.fileno(), stderr=file.fileno())


def _run() -> None:
    from gradio import http_server

    http_server.INITIAL_PORT_VALUE = int(os.environ["GRADIO_SERVER_PORT"])  # gradio reads this one when it is imported
    sys.argv = [APP]
    runpy.run_path(APP, run_name="__main__")
