"""What a page does while its server cannot be reached, and once it can again."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from browser.conftest import LONG, TINY, Faults, Server, TabFactory, arrive, ready, trace, train_with, wait_points, wait_until

CUT = "AbortError|Connection errored|network error|Failed to (fetch|load resource)|ERR_"
NOTE_CALLS = """window.calls = [];
const genuine = window.fetch;
window.fetch = (...given) => { if (String(given[0]).includes('component_server')) calls.push(performance.now()); return genuine(...given); };"""


class Wire:
    """What lies between a page and its server, and can be cut: it passes bytes on. Unlike a browser told to be offline, it also ends the streams
    that are under way."""

    def __init__(self, server: Server) -> None:
        self._behind = ("127.0.0.1", urlsplit(server.url).port)
        self._place = ("127.0.0.1", 0)
        self.mend()
        self._place = self._door.getsockname()
        self.url = f"http://127.0.0.1:{self._place[1]}/"

    def mend(self) -> None:
        """Let connections through, from now on."""
        self._ends: list[socket.socket] = []
        self._door = socket.create_server(self._place)
        self._porter = threading.Thread(target=self._welcome, daemon=True)
        self._porter.start()

    def cut(self) -> None:
        """End all connections and refuse new ones."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._porter.join()
        self._door.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(self._behind)
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def line(shared_server: Server, browser: Browser) -> Iterator[tuple[Wire, BrowserContext]]:
    """Return a wire to the shared server, and a browser context that has compiled what comes over it once the first test is through."""
    wire, context = Wire(shared_server), browser.new_context(viewport={"width": 1280, "height": 900})
    yield wire, context
    wire.cut()
    context.close()


@pytest.fixture
def visit(line: tuple[Wire, BrowserContext], server: Server, faults: Faults) -> Iterator[TabFactory]:
    """Return a factory of pages at the end of the wire; what a browser says of calls that come to nothing is no fault."""
    wire, context = line
    wire.cut()
    wire.mend()
    pages = []

    def open_page(script: str = "") -> Page:
        pages.append(arrive(context, wire.url, faults, script))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()
    faults[:] = [fault for fault in faults if not re.search(CUT, fault)]


@pytest.fixture
def wire(line: tuple[Wire, BrowserContext]) -> Wire:
    return line[0]


def lost(page: Page) -> None:
    """Wait until the page says that nobody answers."""
    expect(page.locator("#status .state")).to_contain_text("connection lost")


def wait_whole_curve(page: Page, server: Server, count: int) -> int:
    """Wait until the training curve has all of the run's points so far and more than `count`, as no other curve has; return how many."""

    def points() -> int:
        x = trace(page, "loss", 0)[0]
        return len(x) if len(x) > count and x == server.view()["series"]["train"]["x"][: len(x)] else 0

    return int(wait_until(points, f"the run's curve with more than {count} points"))


def test_after_a_cut_both_who_started_a_run_and_who_watches_it_have_all_of_it_and_follow(
    wire: Wire, server: Server, visit: TabFactory, short_text: str
) -> None:
    starter, watcher = visit(), visit()
    view = train_with(starter, short_text, max_steps=100_000, log_interval=10)
    pages = (starter, watcher)
    counts = [wait_points(page, 5) for page in pages]
    wire.cut()
    expect(starter.get_by_test_id("toast-body")).to_contain_text("Connection to the server was lost")  # gradio's word for a stream that broke
    for page in pages:
        lost(page)
    samples = len(server.wait_for_step(server.view()["step"] + 100)["samples"])
    with starter.expect_navigation():  # gradio loads such a page anew
        wire.mend()
    ready(starter)
    for page, before in zip(pages, counts, strict=True):
        count = wait_whole_curve(page, server, before + 10)
        assert page.evaluate("window.minigpt.view.run") == view["run"]
        page.wait_for_function("count => window.minigpt.samples.length >= count", arg=samples)
        told = [sample["text"] for sample in server.view()["samples"]]
        shown = page.evaluate("window.minigpt.samples.map(sample => sample.text)")
        assert shown == told[: len(shown)]
        expect(page.locator("#status .state")).to_contain_text("training · step")
        expect(page.locator("#stop")).to_be_visible()
        wait_points(page, count)


def test_a_server_that_does_not_answer_is_asked_ever_more_rarely(wire: Wire, visit: TabFactory, server: Server, short_text: str) -> None:
    page = visit(NOTE_CALLS)
    server.run({**TINY, **LONG}, short_text)
    page.wait_for_function("window.minigpt.view.live")
    wire.cut()
    lost(page)
    known = page.evaluate("calls.length")
    server.end_run()
    page.wait_for_function("known => calls.length > known + 1", arg=known)
    first, second = page.evaluate("known => [known, known + 1].map(index => calls[index] - calls[index - 1])", known)
    assert (first >= 2000, second >= 4000) == (True, True), "twice as long each time, however slow the machine"
    assert page.get_by_test_id("toast-body").count() == 0, "it is said once, in the status"
