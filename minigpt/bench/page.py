"""What the page costs and how fast it answers: the real program as a process of its own, asked over HTTP as the page's script asks."""

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from minigpt.bench.setup import Pair, Setup, take_turns
from minigpt.errors import DataError

ROOT = Path(__file__).parent.parent.parent
POLL_S, LOOK_S, LIMIT_S = 0.5, 0.02, 120.0  # a page asks twice a second while a run is live
FIRST_POINT = re.compile(r'\\"train\\": \{\\"e\\": \d+, \\"i\\": \d+, \\"x\\": \[\d')


class Page:
    """A server and what pages ask of it."""

    def __init__(self, port: int) -> None:
        self.port = port

    def open(self, path: str, body: object = None) -> HTTPResponse:
        """Get `path`, or post `body` to it as JSON; the answer is open."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data, {"Content-Type": "application/json"})
        return connection.getresponse()

    def ask(self, path: str, body: object = None) -> Any:
        """Return the answer's JSON."""
        with closing(self.open(path, body)) as answer:
            return json.loads(answer.read())

    def answers(self) -> bool:
        """Tell whether the page can be had."""
        try:
            with closing(self.open("/")) as answer:
                return answer.status == 200
        except OSError:
            return False

    def component(self, name: str) -> int:
        """Return the number of a component by its name on the page."""
        return int(next(part["id"] for part in self.ask("/config")["components"] if part["props"].get("elem_id") == name))

    def poll(self, feed: int, have: dict[str, Any]) -> dict[str, Any]:
        """Return what a page that has `have` lacks."""
        call = {"session_hash": "bench", "component_id": feed, "fn_name": "poll", "data": json.dumps(have)}
        view: dict[str, Any] = json.loads(self.ask("/gradio_api/component_server/", call))
        return view

    def press_train(self) -> HTTPResponse:
        """Do what the button does, with the form as it stands; return the open stream of answers."""
        config, button = self.ask("/config"), self.component("train")
        values = {part["id"]: part["props"].get("value") for part in config["components"]}
        number, inputs = next((i, part["inputs"]) for i, part in enumerate(config["dependencies"]) if [button, "click"] in part["targets"])
        call = {"data": [*(values[i] for i in inputs[:-1]), True], "fn_index": number, "session_hash": "bench"}
        self.ask("/gradio_api/queue/join", call)
        return self.open("/gradio_api/queue/data?session_hash=bench")

    def stop_run(self, feed: int) -> None:
        """Stop the live run without its final evaluation and wait until it has ended."""
        for _ in range(2):
            self.ask("/gradio_api/call/stop", {"data": []})
        while self.poll(feed, {})["live"]:
            time.sleep(LOOK_S)


def after(view: dict[str, Any]) -> dict[str, Any]:
    """Return what a page has once it took in a view, as the page's script counts."""
    counts = {name: [part["e"], part["i"] + len(part["x"])] for name, part in view["series"].items()}
    return {"run": view["run"], "series": counts, "samples": view["first"] + len(view["samples"])}


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
    with (setup.folder / "server.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  our own program
            [sys.executable, str(ROOT / "app.py")], cwd=setup.folder, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        page = Page(port)
        while not page.answers():
            if process.poll() is not None or time.perf_counter() - begun > LIMIT_S:
                raise DataError(f"{ROOT / 'app.py'} did not start: {(setup.folder / 'server.log').read_text(errors='replace')[-500:]}")
            time.sleep(LOOK_S)
        yield page, time.perf_counter() - begun
    finally:
        process.kill()
        process.wait()


def start(setup: Setup, _seed: int) -> Pair:
    """Seconds from starting the program to its page."""
    times = []
    for _ in range(setup.repeats):
        with serving(setup) as (_page, seconds):
            times.append(seconds)
    return statistics.median(times), None


def click(setup: Setup, _seed: int) -> Pair:
    """Seconds from the click to the answer that holds the first training point, on a server that has trained before. Drawing it is not counted."""
    times = []
    with serving(setup) as (page, _):
        feed = page.component("feed")
        for _ in range(setup.repeats + 1):
            begun = time.perf_counter()
            with closing(page.press_train()) as stream:
                next(line for line in stream if FIRST_POINT.search(line.decode()))
                times.append(time.perf_counter() - begun)
            page.stop_run(feed)
    return statistics.median(times[1:]), None


def watched_by_one(setup: Setup, _seed: int) -> Pair:
    """Tokens per second of `quick` with one page watching, and without any page."""
    return _watched(setup, 1)


def watched_by_five(setup: Setup, _seed: int) -> Pair:
    """The same with five pages."""
    return _watched(setup, 5)


def _watched(setup: Setup, watchers: int) -> Pair:
    """Train over the page's API while watchers poll in turn, and from the command line; the API's own stream is pushed all the while, too."""
    config = setup.config("quick")
    changes = {"max_steps": config.max_steps, "warmup_steps": config.warmup_steps, "device": "cpu"}
    tokens = config.batch_size * config.max_seq_len

    def watched() -> float:
        view = page.poll(feed, {})
        before, have = view["run"], [after(view)] * watchers
        page.ask("/gradio_api/call/train", {"data": ["quick", changes, setup.corpus.text]})
        while view["live"] or view["run"] == before:
            for watcher in range(watchers):
                view = page.poll(feed, have[watcher])
                have[watcher] = after(view)
                time.sleep(POLL_S / watchers)
        return _pace(setup.folder / "runs" / view["run"], tokens)

    def alone() -> float:
        folder = setup.folder / f"alone-{time.monotonic_ns()}"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**changes, "data_path": setup.text_path, "checkpoint_dir": folder}.items()]
        command = [sys.executable, "-m", "minigpt", "train", "--preset", "quick", *flags]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  our own program
        return _pace(folder, tokens)

    with serving(setup) as (page, _):
        feed = page.component("feed")
        return take_turns(watched, alone, setup.repeats)


def _pace(folder: Path, tokens: int) -> float:
    """Return tokens per second between the first and the last log event of a run, everything in between included."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    first, *_, last = (event for event in events if event["type"] == "log")
    return float((last["step"] - first["step"]) * tokens / (last["elapsed"] - first["elapsed"]))
