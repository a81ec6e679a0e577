"""What the page costs and how fast it answers: the real program as a process of its own, asked over HTTP as the page's script asks."""

import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from minigpt.bench.setup import Pair, Setup, take_turns
from minigpt.config import TransformerConfig
from minigpt.errors import DataError
from minigpt.events import AnyEvent
from minigpt.history import reached
from minigpt.train import train

ROOT = Path(__file__).parent.parent.parent
POLL_S, LOOK_S, LIMIT_S = 0.5, 0.02, 120.0  # a page asks twice a second while a run is live
FIRST_POINT = re.compile(rb'\\"train\\": \{\\"e\\": \d+, \\"i\\": \d+, \\"x\\": \[\d')


class Page:
    """What pages ask of a server, once it answers."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.config = self.ask("/config")
        self.ids = {part["props"].get("elem_id"): part["id"] for part in self.config["components"]}

    def open(self, path: str, body: object = None) -> HTTPResponse:
        """Get `path`, or post `body` to it as JSON; the answer is open."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def ask(self, path: str, body: object = None) -> Any:
        """Return the answer's JSON."""
        with closing(self.open(path, body)) as answer:
            return json.loads(answer.read())

    def poll(self, have: dict[str, Any]) -> dict[str, Any]:
        """Return what a page that has `have` lacks."""
        call = {"session_hash": "bench", "component_id": self.ids["feed"], "fn_name": "poll", "data": json.dumps(have)}
        return dict(json.loads(self.ask("/gradio_api/component_server/", call)))

    def press_train(self) -> HTTPResponse:
        """Do what the button does, with the form as it stands; return the open stream of answers."""
        values = {part["id"]: part["props"].get("value") for part in self.config["components"]}
        pressed = [self.ids["train"], "click"]
        number, inputs = next((i, part["inputs"]) for i, part in enumerate(self.config["dependencies"]) if pressed in part["targets"])
        call = {"data": [*(values[i] for i in inputs[:-1]), True], "fn_index": number, "session_hash": "bench"}
        self.ask("/gradio_api/queue/join", call)
        return self.open("/gradio_api/queue/data?session_hash=bench")


@contextmanager
def serving(setup: Setup) -> Iterator[tuple[Page, float]]:
    """Start `app.py` on a free port; yield it, once its page can be had, with the seconds that took.

    Raises:
        DataError: the program is not there or does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"MINIGPT_HOME": str(setup.folder / "runs"), "GRADIO_SERVER_PORT": str(port), "GRADIO_SERVER_NAME": "127.0.0.1"}
    begun = time.perf_counter()
    command = [sys.executable, str(ROOT / "app.py")]
    with subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.DEVNULL) as process:  # noqa: S603  our own program
        try:
            while (page := _answering(port)) is None:
                if process.poll() is not None or time.perf_counter() - begun > LIMIT_S:
                    raise DataError(f"{ROOT / 'app.py'} does not start: run it by itself to see why")
                time.sleep(LOOK_S)
            yield page, time.perf_counter() - begun
        finally:
            process.kill()


def _answering(port: int) -> Page | None:
    try:
        return Page(port)
    except OSError:
        return None


def start(setup: Setup, _seed: int) -> Pair:
    """Seconds from starting the program to its page."""
    times = []
    for _ in range(setup.repeats):
        with serving(setup) as (_, seconds):
            times.append(seconds)
    return statistics.median(times), math.nan


def click(setup: Setup, _seed: int) -> Pair:
    """Seconds from the click to the answer that holds the first training point, on a server that has trained before. Drawing it is not counted."""
    times = []
    with serving(setup) as (page, _):
        for _ in range(setup.repeats + 1):
            begun = time.perf_counter()
            with closing(page.press_train()) as stream:
                next(line for line in stream if FIRST_POINT.search(line))
                times.append(time.perf_counter() - begun)
            for _ in range(2):  # the second skips the final evaluation
                page.ask("/gradio_api/call/stop", {"data": []})
            while page.poll({})["live"]:
                time.sleep(LOOK_S)
    return statistics.median(times[1:]), math.nan


def watched(setup: Setup, _seed: int, watchers: int) -> Pair:
    """Tokens per second of `quick` started over the page's API, which pushes all the while, with watchers that poll in turn; and without a page."""
    config = setup.config("quick")
    changes = {"max_steps": config.max_steps, "warmup_steps": config.warmup_steps, "device": "cpu"}

    def here() -> float:
        view = page.poll({})
        before, have = view["run"], [_after(view)] * watchers
        page.ask("/gradio_api/call/train", {"data": ["quick", changes, setup.corpus.text]})
        while view["live"] or view["run"] == before:
            for watcher in range(watchers):
                view = page.poll(have[watcher])
                have[watcher] = _after(view)
                time.sleep(POLL_S / watchers)
        lines = (setup.folder / "runs" / view["run"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return _pace(map(json.loads, lines), config)

    def alone() -> float:
        events: list[AnyEvent] = []
        train(config.model_copy(), events.append)
        return _pace(events, config)

    with serving(setup) as (page, _):
        return take_turns(here, alone, 2 * setup.repeats)  # the difference is smaller than the noise of a single run


def _after(view: dict[str, Any]) -> dict[str, Any]:
    """Return what a page has once it took in a view, as the page's script counts."""
    return {"run": view["run"], "series": reached(view["series"]), "samples": view["first"] + len(view["samples"])}


def _pace(events: Iterable[AnyEvent], config: TransformerConfig) -> float:
    """Return tokens per second between the first and the last log event of a run, everything in between included."""
    first, *_, last = (event for event in events if event["type"] == "log")
    return float((last["step"] - first["step"]) * config.batch_size * config.max_seq_len / (last["elapsed"] - first["elapsed"]))
