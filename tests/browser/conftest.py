"""What the browser tests share: real servers, a Chromium without a network, visitors with a browser context each, and runs that end with the test."""

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
from conftest import ROOT, verse  # noqa: E402
from gradio_client import Client  # noqa: E402
from playwright.sync_api import Browser, BrowserContext, Locator, Page  # noqa: E402

from browser import program  # noqa: E402
from minigpt.presets import PRESETS  # noqa: E402

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--process-per-site",  # all pages of a context share what the first one compiled
]  # fmt: skip
LIMIT_S = 30.0
playwright.expect.set_options(timeout=1000 * LIMIT_S)
QUICK_STEPS = PRESETS["quick"].config().max_steps
LONG = {"max_steps": 5000, "batch_size": 128, "warmup_steps": 8, "eval_interval": 40, "log_interval": 1}  # ended by a stop, before curves are thinned
ENDED = ("finished", "stopped", "failed", "diverged")
EXAMPLE = ROOT / "assets" / "example.safetensors"
TINY = {"vocab_size": 100, "max_seq_len": 16, "d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 32, "batch_size": 4, "warmup_steps": 2}
HERE = Path(__file__).parent

Settings = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.flaky(reruns=1))  # a machine that is busy elsewhere can starve a browser past every limit
    items.sort(key=lambda item: "untouched" not in getattr(item, "fixturenames", ()))  # these first, while the shared server has had no run


def wait_until(told: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Ask again and again until `told` is true; return what it said."""
    end = time.monotonic() + limit_s
    while not (answer := told()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:.0f} s in vain for: {what}")
        time.sleep(0.05)
    return answer


class Server:
    """The real program as a process of its own, over a home of its own."""

    def __init__(self, home: Path, *, afresh: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{port}/"
        self.log = home.parent / f"server-{port}.log"
        environment = {name: value for name, value in os.environ.items() if name not in ("SPACE_ID", "SYSTEM")}
        environment |= {
            "MINIGPT_OFFLINE": "1",
            "MINIGPT_HOME": str(home),
            "GRADIO_TEMP_DIR": str(home.parent / f"uploads-{port}"),
            "GRADIO_SERVER_PORT": str(port),
            "GRADIO_SERVER_NAME": "127.0.0.1",
        }
        self.process = program.start(environment, self.log, afresh=afresh)
        self._client: Client | None = None
        try:
            wait_until(self._answers, "the server's first answer", 60)
        except BaseException:
            self.process.kill()
            raise

    def _answers(self) -> bool:
        if not self.process.is_alive():
            raise AssertionError("the server did not start:\n" + self.log.read_text(errors="replace"))
        try:
            return requests.get(self.url + "config", timeout=2).ok
        except requests.RequestException:
            return False

    @property
    def client(self) -> Client:
        """A program's way in, over the page's API."""
        if self._client is None:
            self._client = Client(self.url, verbose=False)
        return self._client

    def call(self, name: str, *values: Any) -> Any:
        """Call a public function and return its last answer."""
        return self.client.predict(*values, api_name=f"/{name}")

    def run(self, settings: Settings, text: str = "") -> Any:
        """Start a run and return the job whose outputs are the views of it, once the run is there."""
        before = self.view()["run"]
        job = self.client.submit("quick", settings, text, api_name="/train")
        wait_until(lambda: job.done() or self.view()["run"] != before, "the new run")
        return job

    def view(self) -> dict[str, Any]:
        """What the server tells of its latest run."""
        return dict(self.call("status"))

    def wait_for_step(self, step: int) -> dict[str, Any]:
        """Wait until the live run has made this many steps."""
        return dict(wait_until(lambda: (view := self.view())["step"] >= step and view, f"step {step}"))

    def folders(self) -> set[str]:
        """The names of all run folders."""
        return {path.parent.name for path in self.home.glob("*/config.json")}

    def state(self, run: str) -> dict[str, Any]:
        """A run's state.json."""
        return dict(json.loads((self.home / run / "state.json").read_bytes()))

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """A run's events as the trainer's callback got them."""
        return [json.loads(line) for line in (self.home / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def end_run(self) -> dict[str, Any]:
        """Stop the run that is live, if one is, in a hurry: told twice, it skips its final evaluation."""
        if self.view()["live"]:
            for _ in range(2):
                requests.post(self.url + "gradio_api/call/stop", json={"data": []}, timeout=LIMIT_S).raise_for_status()
        return dict(wait_until(lambda: not (view := self.view())["live"] and view, "the end of the run"))


ServerFactory = Callable[..., Server]
VisitorFactory = Callable[..., Page]
TabFactory = Callable[..., Page]


@pytest.fixture(scope="session")
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Return a factory of servers, each over a new home or over the one given."""
    made: list[Server] = []

    def make(home: Path | None = None, *, afresh: bool = False) -> Server:
        made.append(Server(home or tmp_path_factory.mktemp("server") / "runs", afresh=afresh))
        return made[-1]

    yield make
    for server in made:
        if server.process.is_alive():
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(10)


@pytest.fixture(scope="session")
def shared_server(make_server: ServerFactory) -> Server:
    return make_server()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Return the server that most tests share; what a test leaves running is ended."""
    yield shared_server
    shared_server.end_run()


@pytest.fixture
def untouched(shared_server: Server, make_server: ServerFactory) -> Iterator[Server]:
    """Return a server on which no run was started, nor is one by the test."""
    server = make_server() if shared_server.folders() else shared_server
    yield server
    assert not server.folders()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("no Chromium is installed; set CHROMIUM to its program")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield chromium
        chromium.close()


Faults = list[str]


@pytest.fixture
def faults() -> Iterator[Faults]:
    """Collect what went wrong on the pages of a test: hosts asked that are not ours, errors. None may be left at the end."""
    found: Faults = []
    yield found
    assert not found


@pytest.fixture
def visitor(browser: Browser, request: pytest.FixtureRequest, faults: Faults) -> Iterator[VisitorFactory]:
    """Return a factory of visitors: each a page in a browser context of its own, whose script has drawn the first view."""
    contexts = []

    def visit(target: Server | None = None) -> Page:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}))
        return arrive(contexts[-1], (target or request.getfixturevalue("server")).url, faults)

    yield visit
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def regular(browser: Browser, shared_server: Server) -> Iterator[BrowserContext]:
    """Return the context of a visitor who comes again and again, whose browser has the page's scripts compiled already.

    A tab stays open on an address of the server that does nothing: it keeps the browser's process, which costs half of what opening the page does.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = arrive(context, shared_server.url, [])
    tab.goto(shared_server.url + "theme.css")
    yield context
    context.close()


@pytest.fixture
def tab(regular: BrowserContext, request: pytest.FixtureRequest, faults: Faults) -> Iterator[TabFactory]:
    """Return a factory of the regular visitor's tabs. To the server each is a visitor of its own: the page keeps nothing beyond its tab."""
    tabs = []

    def open_tab(target: Server | None = None, *, script: str = "") -> Page:
        tabs.append(arrive(regular, (target or request.getfixturevalue("server")).url, faults, script))
        return tabs[-1]

    yield open_tab
    for page in tabs:
        page.close()


@pytest.fixture
def page(tab: TabFactory) -> Page:
    """Return a new page of the regular visitor on the shared server."""
    return tab()


def arrive(context: BrowserContext, url: str, faults: Faults, script: str = "") -> Page:
    """Open the page, in which `script` runs first, and note its faults."""
    page = context.new_page()
    page.set_default_timeout(1000 * LIMIT_S)
    own = (url, "data:", f"blob:{url}")
    page.on("request", lambda asked: None if asked.url.startswith(own) else faults.append(f"asked {asked.url}"))
    page.on("pageerror", lambda error: faults.append(f"page error: {error.stack or error}"))
    page.on("console", lambda message: faults.append(f"console: {message.text}") if message.type == "error" else None)
    if script:
        page.add_init_script(script)
    page.goto(url)
    ready(page)
    return page


def ready(page: Page) -> None:
    """Wait until the page has its first view and its chart."""
    page.wait_for_function("window.minigpt?.view.run && window.Plotly && document.querySelector('#loss .js-plotly-plot')?._fullLayout")


def reload(page: Page, faults: Faults) -> None:
    """Load the page anew; what gradio's own script says of the stream that this cuts is no fault."""
    known = len(faults)
    page.reload()
    ready(page)
    faults[known:] = [fault for fault in faults[known:] if not re.search("AbortError|Connection errored|network error", fault)]


def wait_points(page: Page, count: int) -> int:
    """Wait until the training curve has more than `count` points of the run on the page; return how many it has."""
    page.wait_for_function(
        """count => {
            const x = document.querySelector('#loss .js-plotly-plot')?.data?.[0].x ?? [];
            return x.length > count && x[x.length - 1] <= window.minigpt.view.step;  // beyond: the curve drawn before the page knew its run
        }""",
        arg=count,
    )
    return len(trace(page, "loss", 0)[0])


def cells(page: Page, table: str) -> list[list[str]]:
    """The texts of a table's rows."""
    rows = page.locator(f"#{table} .virtual-row").all()
    return [[cell.strip() for cell in row.get_by_role("gridcell").all_inner_texts()] for row in rows]


@contextmanager
def opening(page: Page) -> Iterator[None]:
    """Wait until the file that is asked for inside has been opened."""
    with page.expect_response(lambda answer: "queue/join" in answer.url):
        yield
    playwright.expect(page.locator("#verdict").get_by_test_id("status-tracker")).to_have_class(re.compile(r"\bhide\b"))


def row_of(page: Page, run: str, kind: str) -> Locator:
    """A row of the list of checkpoints, in sight: the table draws no others. The latest run stands first, the example last."""
    row = page.locator("#checkpoints .virtual-row").filter(has_text=run).filter(has_text=kind)
    if not row.count():
        end = "part.scrollHeight" if run == "example" else "0"
        page.locator("#checkpoints").evaluate(f"n => n.querySelectorAll('*').forEach(part => {{ part.scrollTop = {end}; }})")
    row.wait_for()
    return row


def choose(page: Page, run: str, kind: str) -> None:
    """Click a row of the list of checkpoints and wait until the file has been opened."""
    row = row_of(page, run, kind)
    with opening(page):
        row.locator("[role=gridcell][aria-selected=false]").first.click()  # a click on the cell that is chosen already is none


def drop(page: Page, *files: Path | dict[str, Any]) -> None:
    """Upload a file, in the place of one that was uploaded before."""
    clear = page.locator("#upload").get_by_label("Clear")
    if clear.count():
        clear.click()
    page.locator("#upload input[type=file]").set_input_files(*files)


def trace(page: Page, chart: str, number: int) -> tuple[list[float], list[float | None]]:
    """A curve as plotly holds it."""
    x, y = page.evaluate(
        "([id, n]) => { const t = document.querySelector(`#${id} .js-plotly-plot`).data[n]; return [Array.from(t.x), Array.from(t.y)]; }",
        [chart, number],
    )
    return x, y


def wait_state(page: Page, *states: str) -> dict[str, Any]:
    """Wait until the page knows its run to be in one of these states; return the view."""
    page.wait_for_function("states => states.includes(window.minigpt.view.state)", arg=list(states))
    return dict(page.evaluate("window.minigpt.view"))


def open_part(page: Page, name: str) -> None:
    """Open a folded part of the page, if it is not open."""
    button = page.locator(f"#{name} > button")
    if "open" not in (button.get_attribute("class") or "").split():
        button.click()


def set_number(page: Page, name: str, value: object) -> None:
    """Type a setting's number; its folded part must be open. A field that was mounted this moment may take back what is typed at once."""
    field = page.locator(f"#setting-{name} input[type=number]")
    shown = "field => new Promise(tell => requestAnimationFrame(() => requestAnimationFrame(() => tell(field.value))))"

    def is_kept() -> bool:
        field.fill(str(value))
        field.press("Tab")
        return bool(field.evaluate(shown) == str(value))

    wait_until(is_kept, f"{name} to be {value}")


def press_train(page: Page) -> dict[str, Any]:
    """Press Train it and wait for the new run; return the view."""
    before = page.evaluate("window.minigpt.view.run")
    page.locator("#train").click()
    page.wait_for_function("before => window.minigpt.view.run !== before", arg=before)
    return dict(page.evaluate("window.minigpt.view"))


def train_with(page: Page, text: str = "", **settings: object) -> dict[str, Any]:
    """Paste a text if one is given, set numbers of the training part, press Train it and wait for the new run; return the view."""
    if text:
        paste_text(page, text)
    open_part(page, "settings-training")
    for name, value in settings.items():
        set_number(page, name, value)
    return press_train(page)


def paste_text(page: Page, text: str) -> None:
    """Choose a text of one's own and put it into its box as one piece; typing key by key would take minutes."""
    page.get_by_label("my own text").check()
    page.locator("#own-text textarea").evaluate("(box, text) => { box.value = text; box.dispatchEvent(new Event('input', {bubbles: true})); }", text)


@pytest.fixture(scope="module")
def run(shared_server: Server, short_text: str) -> str:
    """Make a run and return its id."""
    return str(list(shared_server.run({**TINY, "max_steps": 60, "log_interval": 1, "eval_interval": 20}, short_text))[-1]["run"])


@pytest.fixture(scope="module")
def opened_tab(run: str, shared_server: Server, regular: BrowserContext) -> Iterator[tuple[Page, Faults]]:
    faults: Faults = []
    page = arrive(regular, shared_server.url, faults)
    page.get_by_role("tab", name="Checkpoint").click()
    playwright.expect(page.locator("#verdict .line")).to_contain_text("step")
    yield page, faults
    page.close()


@pytest.fixture
def shelf(opened_tab: tuple[Page, Faults]) -> Iterator[Page]:
    """Return the page with the Checkpoint tab open. All tests of a module look at the same one; it shows what the one before left there."""
    page, faults = opened_tab
    page.bring_to_front()
    yield page
    seen, faults[:] = faults[:], []  # the next test starts without them
    assert not seen


@pytest.fixture(scope="session")
def short_text() -> str:
    """Return about two pages of verse, on which a run starts at once."""
    return verse(300)
