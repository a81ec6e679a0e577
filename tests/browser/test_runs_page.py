"""What of a run and of its form outlives the page: reloads, cut connections, other tabs, links; and the list of runs under the chart."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from browser.conftest import (
    LONG,
    QUICK_STEPS,
    TINY,
    Faults,
    Server,
    ServerFactory,
    TabFactory,
    VisitorFactory,
    open_part,
    paste_text,
    press_train,
    ready,
    reload,
    set_number,
    trace,
    train_with,
    wait_points,
    wait_state,
    wait_until,
)
from minigpt.resume import find_checkpoint

TRAIN, SMOOTHED, VAL, OWN_TRACES = 0, 1, 2, 7
CUT = "AbortError|Connection errored|network error|Failed to (fetch|load resource)|ERR_INTERNET_DISCONNECTED|ERR_NETWORK"
# Notes the last step that the dashed lines reach, in every frame in which the loss chart can be seen: each run here has a length of its own.
WATCH_THE_CHART = """window.lengths = new Set();
(function look() {
    const node = document.querySelector('#loss .js-plotly-plot');
    if (node?.data?.[4] && getComputedStyle(node).visibility === 'visible') window.lengths.add(node.data[4].x[1]);
    requestAnimationFrame(look);
})();"""


def run_to_end(server: Server, text: str, steps: int, **settings: Any) -> str:
    """Make a tiny run of so many steps; return its id."""
    server.run({**TINY, "max_steps": steps, "log_interval": 1, "eval_interval": 10, **settings}, text)
    view = wait_until(lambda: not (view := server.view())["live"] and view, "the end of the run")
    assert view["state"] == "finished"
    return str(view["run"])


def run_to_stop(server: Server, text: str) -> str:
    """Make a tiny run and stop it on its way; return its id."""
    server.run({**TINY, **LONG}, text)
    server.wait_for_step(20)
    return str(server.end_run()["run"])


def visit(page: Page, faults: Faults, url: str) -> None:
    """Open an address; what gradio's own script says of a stream that this cuts is no fault."""
    known = len(faults)
    page.goto(url)
    ready(page)
    faults[known:] = [fault for fault in faults[known:] if not re.search(CUT, fault)]


def show(page: Page, run: str) -> None:
    """Open a run from the list and wait until its buttons are there."""
    page.locator(f"#runs-table a[data-run='{run}']").click()
    page.wait_for_function(
        "run => window.minigpt.view.run === run && document.querySelector('#runs-table [aria-current] [data-run]')?.dataset.run === run", arg=run
    )


def wait_traces(page: Page, count: int) -> None:
    """Wait until the loss chart has so many traces."""
    page.wait_for_function("count => document.querySelector('#loss .js-plotly-plot')?.data?.length === count", arg=count)


def setting(page: Page, name: str) -> Any:
    return page.locator(f"#setting-{name} input[type=number]")


def test_a_reload_finds_the_run_its_texts_and_its_settings_and_never_shows_another_curve(page: Page, faults: Faults, short_text: str) -> None:
    view = train_with(page, short_text, max_steps=4711, log_interval=1, seed=7)
    count = wait_points(page, 5)
    page.wait_for_function("window.minigpt.samples.length > 1")
    samples = page.evaluate("window.minigpt.samples.length")
    page.add_init_script(WATCH_THE_CHART)
    reload(page, faults)
    assert page.evaluate("window.minigpt.view.run") == view["run"]
    more = wait_points(page, count)
    assert trace(page, "loss", TRAIN)[0][:more] == list(range(1, more + 1))
    assert page.evaluate("window.minigpt.samples.length") >= samples
    expect(page.locator("#stop")).to_be_visible()
    page.wait_for_function("text => document.querySelector('#own-text textarea')?.value === text", arg=short_text)
    expect(page.locator("#about")).to_contain_text("Steps, Log every, Seed")
    open_part(page, "settings-training")
    expect(setting(page, "max_steps")).to_have_value("4711")
    page.wait_for_function("window.lengths.size > 0")
    assert page.evaluate("[...window.lengths]") == [4711]
    wait_points(page, more + 3)


def test_a_second_tab_follows_with_the_run_s_settings_and_the_run_outlives_both(page: Page, tab: TabFactory, server: Server, short_text: str) -> None:
    view = train_with(page, short_text, max_steps=4712, log_interval=1)
    count = wait_points(page, 3)
    second = tab()
    more = wait_points(second, count)
    assert second.evaluate("window.minigpt.view.run") == view["run"]
    assert trace(second, "loss", TRAIN)[0][:more] == list(range(1, more + 1))
    expect(second.locator("#about")).to_contain_text("Steps, Log every")
    second.close()
    page.close()
    later = server.wait_for_step(server.view()["step"] + 5)
    assert later["run"] == view["run"]
    assert later["live"]


def test_the_form_survives_a_reload(page: Page, faults: Faults, short_text: str) -> None:
    paste_text(page, short_text)
    page.get_by_label("Letters").check()
    expect(page.locator("#about")).to_contain_text("Letter by letter")
    open_part(page, "settings-training")
    set_number(page, "max_steps", 321)
    expect(page.locator("#about")).to_contain_text("1 setting differs from Letters: Steps")
    reload(page, faults)
    expect(page.get_by_label("Letters")).to_be_checked()
    page.wait_for_function("text => document.querySelector('#own-text textarea')?.value === text", arg=short_text)
    expect(page.locator("#about")).to_contain_text("1 setting differs from Letters: Steps")
    open_part(page, "settings-training")
    expect(setting(page, "max_steps")).to_have_value("321")


def test_a_link_fills_the_form_and_a_wrong_one_is_refused_in_words(page: Page, server: Server, faults: Faults) -> None:
    visit(page, faults, server.url + "?preset=classic&max_steps=300&warmup_steps=10&learning_rate=0.001&dropout=0.2")
    expect(page.get_by_label("Classic")).to_be_checked()
    expect(page.locator("#about")).to_contain_text("4 settings differ from Classic: Dropout, Steps, Learning rate, Warm-up")
    open_part(page, "settings-training")
    expect(setting(page, "max_steps")).to_have_value("300")
    set_number(page, "seed", 3)
    expect(page.locator("#about")).to_contain_text("5 settings differ")
    reload(page, faults)
    expect(page.locator("#about")).to_contain_text("5 settings differ")
    page.locator("#copy-link").click()
    expect(page.locator("#copy-link")).to_have_text(re.compile("Copied|It is in the address bar"))
    expect(page.locator("#copy-link")).to_have_text("Copy link")
    assert "seed=3" in page.url
    assert "max_steps=300" in page.url
    visit(page, faults, server.url + "?preset=quick&n_heads=5")
    expect(page.get_by_test_id("toast-body").last).to_contain_text("Heads is 5; it must divide Width, 32 into even parts: try 4")
    expect(page.get_by_role("radio", name="Quick")).to_be_checked()


def test_settings_are_saved_to_a_file_and_loaded_from_it(page: Page, tmp_path: Path) -> None:
    open_part(page, "settings-training")
    set_number(page, "max_steps", 77)
    set_number(page, "warmup_steps", 5)
    expect(page.locator("#about")).to_contain_text("2 settings differ")
    open_part(page, "plan")
    with page.expect_download() as download:
        page.locator("#save-settings").click()
    content = json.loads(download.value.path().read_text())
    assert (content["preset"], content["max_steps"], content["optimizer"]) == ("quick", 77, "muon")
    assert "data_path" not in content
    page.locator("#reset").click()
    expect(setting(page, "max_steps")).to_have_value(str(QUICK_STEPS))
    chooser = page.locator("#load-settings").locator("xpath=..").locator("input[type=file]").first
    (tmp_path / "settings.json").write_text(json.dumps({**content, "seed": 12}))
    chooser.set_input_files(tmp_path / "settings.json")
    expect(setting(page, "max_steps")).to_have_value("77")
    expect(page.locator("#about")).to_contain_text("3 settings differ from Quick: Steps, Warm-up, Seed")
    (tmp_path / "other.json").write_text("[1, 2]")
    chooser.set_input_files(tmp_path / "other.json")
    expect(page.get_by_test_id("toast-body").last).to_contain_text("this file holds no settings")


def test_an_address_opens_a_past_run_with_its_curve_and_texts(page: Page, server: Server, faults: Faults, short_text: str) -> None:
    first = run_to_end(server, short_text, 31)
    latest = run_to_end(server, short_text, 32)
    page.add_init_script(WATCH_THE_CHART)
    visit(page, faults, f"{server.url}?run={first}")
    assert page.evaluate("window.minigpt.view.run") == first
    wait_points(page, 30)
    assert trace(page, "loss", TRAIN)[0] == list(range(1, 32))
    assert page.evaluate("window.minigpt.samples.length") >= 1
    expect(page.locator("#status .state")).to_have_text("finished · step 31 of 31")
    assert page.evaluate("[...window.lengths]") == [31]
    show(page, latest)
    assert f"run={latest}" in page.url
    wait_points(page, 31)
    assert trace(page, "loss", TRAIN)[0] == list(range(1, 33))
    press_train(page)
    wait_state(page, "training")
    assert "run=" not in page.url
    show(page, first)
    assert trace(page, "loss", TRAIN)[0] == list(range(1, 32))
    assert server.view()["live"]
    expect(page.locator("#train")).to_be_visible()


def test_an_address_of_a_run_that_is_not_there_says_so_and_shows_the_latest(page: Page, server: Server, faults: Faults, short_text: str) -> None:
    latest = run_to_end(server, short_text, 33)
    visit(page, faults, f"{server.url}?run=<b>gone</b>&preset=classic")
    expect(page.locator("#status .story")).to_contain_text("There is no run <b>gone</b>: this is the latest. Done in")
    assert page.evaluate("window.minigpt.view.run") == latest
    page.wait_for_function("location.search === '?preset=classic'")
    polls = page.evaluate("window.minigpt.polls")
    page.wait_for_function("polls => { window.minigpt.refresh(); return window.minigpt.polls > polls + 1; }", arg=polls)
    expect(page.locator("#status .story")).to_contain_text("There is no run <b>gone</b>")


def test_ticked_runs_lie_over_the_chart_and_leave_its_own_traces_alone(page: Page, server: Server, short_text: str) -> None:
    one, two, three = (run_to_end(server, short_text, steps) for steps in (41, 42, 43))
    show(page, three)
    wait_points(page, 42)
    own = [trace(page, "loss", number) for number in range(OWN_TRACES)]
    for run in (one, two):
        page.locator(f"#tick-{run}").check()
    wait_traces(page, OWN_TRACES + 4)
    assert [trace(page, "loss", number) for number in range(OWN_TRACES)] == own
    assert [trace(page, "loss", OWN_TRACES + place)[0][-1] for place in range(4)] == [41, 41, 42, 42]
    names = page.evaluate("document.querySelector('#loss .js-plotly-plot').data.slice(7).map(t => [t.name, t.line.color, t.opacity ?? 1])")
    assert [name for name, _, _ in names] == [one, f"{one}, training", two, f"{two}, training"]
    swatch = page.locator(f"tr:has(#tick-{two}) .swatch")
    expect(swatch).to_have_css("background-color", re.compile(r"rgb\(168, 85, 247\)"))
    assert names[2][1] == "#a855f7"
    assert names[3][2] < 1
    page.locator(f"#tick-{one}").uncheck()
    wait_traces(page, OWN_TRACES + 2)

    paste_text(page, short_text)
    press_train(page)  # which mounts the chart anew
    wait_points(page, 3)
    wait_traces(page, OWN_TRACES + 2)
    assert trace(page, "loss", OWN_TRACES)[0][-1] == 42
    assert trace(page, "loss", 5)[0] == [0, QUICK_STEPS]


def test_a_stopped_run_is_resumed_from_the_page(page: Page, server: Server, short_text: str) -> None:
    run = run_to_stop(server, short_text)
    show(page, run)
    ended = page.evaluate("window.minigpt.view.step")
    page.locator("#resume").click()
    page.wait_for_function("window.minigpt.view.live")
    expect(page.locator("#stop")).to_be_visible()
    page.wait_for_function("step => window.minigpt.view.step > step + 20", arg=ended)
    assert page.evaluate("window.minigpt.view.run") == run
    count = wait_points(page, ended + 10)
    assert trace(page, "loss", TRAIN)[0][:count] == list(range(1, count + 1))
    page.locator("#stop").click()
    assert wait_state(page, "stopped")["step"] > ended
    assert server.view()["run"] == run
    page.locator("#resume").click()
    page.wait_for_function("window.minigpt.view.live")
    page.locator("#stop").click()
    shown = "window.minigpt.view.live ? '' : `${document.querySelector('#tabs').dataset.run} ${document.querySelector('#status .state').innerText}`"
    assert str(page.wait_for_function(shown).json_value()).startswith("done stopped")  # with the first view of the end


def test_a_finished_run_is_extended_and_its_schedule_drawn_first(page: Page, server: Server, short_text: str) -> None:
    run = run_to_end(server, short_text, 50)
    show(page, run)
    expect(page.locator("#resume")).to_be_hidden()
    open_part(page, "manage")
    steps = page.locator("#more-steps input")
    steps.fill("0")
    page.locator("#extend").click()
    expect(page.get_by_test_id("toast-body").last).to_contain_text("the steps to add are 0; they must be a whole number from 1")
    expect(page.locator("#train")).to_be_visible()
    steps.fill("25")
    page.wait_for_function("document.querySelector('#extension .js-plotly-plot')?.data?.[0].x.at(-1) === 75")
    page.locator("#extend").click()
    view = wait_state(page, "finished") if page.evaluate("window.minigpt.view.live") else None
    page.wait_for_function("window.minigpt.view.step === 75 && window.minigpt.view.state === 'finished'")
    assert view is None or view["run"] == run
    wait_points(page, 74)
    assert trace(page, "loss", TRAIN)[0] == list(range(1, 76))


def test_a_diverged_run_is_offered_a_third_of_its_rate(page: Page, server: Server, short_text: str) -> None:
    run = run_to_stop(server, short_text)
    run_to_end(server, short_text, 30)
    (server.home / run / "state.json").write_text(json.dumps({**server.state(run), "state": "diverged"}))
    show(page, run)
    expect(page.locator("#restart")).to_be_visible()
    rate = json.loads((server.home / run / "config.json").read_text())["learning_rate"]
    page.locator("#restart-now").click()
    page.wait_for_function("window.minigpt.view.live")
    assert json.loads((server.home / run / "config.json").read_text())["learning_rate"] == pytest.approx(rate / 3, rel=0.05)


def test_a_run_is_renamed_and_deleted_only_when_confirmed(page: Page, server: Server, short_text: str) -> None:
    other = run_to_end(server, short_text, 29)
    run = run_to_end(server, short_text, 30)
    state = server.home / other / "state.json"
    state.write_text(json.dumps({**server.state(other), "name": "taken"}))
    show(page, run)
    open_part(page, "manage")
    page.locator("#new-name input, #new-name textarea").fill("my <b>first</b> verse")
    page.locator("#rename").click()
    expect(page.locator(f"#runs-table a[data-run='{run}']")).to_have_text("my <b>first</b> verse")
    page.locator("#delete").click()
    expect(page.locator("#delete-question")).to_contain_text("Delete my <b>first</b> verse with its checkpoints")
    page.locator("#delete-no").click()
    expect(page.locator("#delete-question")).to_be_hidden()
    assert (server.home / run).is_dir()
    page.locator("#new-name input, #new-name textarea").fill("taken")
    page.locator("#rename").click()
    expect(page.get_by_test_id("toast-body").last).to_contain_text("another run is called “taken” already: choose a different name")
    page.locator("#delete").click()
    page.locator("#delete-yes").click()
    expect(page.locator(f"#runs-table a[data-run='{run}']")).to_have_count(0)
    assert not (server.home / run).exists()
    page.wait_for_function("run => window.minigpt.view.run !== run", arg=run)
    assert page.locator("#after").inner_text().strip()
    expect(page.locator("#status .story")).to_contain_text("Deleted: this is the latest. Done in")
    assert page.evaluate("window.minigpt.view.run") == other
    page.wait_for_function("!location.search.includes('run=')")


def test_smoothing_and_log_axis_change_only_what_they_say_and_leave_the_zoom(page: Page, server: Server, short_text: str) -> None:
    server.run({**TINY, **LONG}, short_text)
    page.wait_for_function("window.minigpt.view.live")
    count = wait_points(page, 20)
    page.evaluate("Plotly.relayout(document.querySelector('#loss .js-plotly-plot'), {'xaxis.range': [2, 9]})")
    page.locator("#log-axis").check()
    page.locator("#smoothing").fill("0")
    count = wait_points(page, count + 5)
    layout = page.evaluate("(({xaxis, yaxis}) => [xaxis.range, yaxis.type])(document.querySelector('#loss .js-plotly-plot').layout)")
    assert layout == [[2, 9], "log"]
    server.end_run()
    wait_state(page, "stopped")
    events = [event for event in server.metrics(server.view()["run"]) if event["type"] == "log"]
    wait_points(page, len(events) - 1)
    x, y = trace(page, "loss", TRAIN)
    assert y == pytest.approx([event["loss"] for event in events], rel=1e-5)
    assert trace(page, "loss", SMOOTHED) == (x, pytest.approx(y))  # without smoothing the two are one
    page.locator("#smoothing").fill("0.8")
    page.locator("#log-axis").uncheck()
    server_s = server.view()["series"]["smoothed"]
    page.wait_for_function("y => document.querySelector('#loss .js-plotly-plot').data[1].y.at(-1) === y", arg=server_s["y"][-1])
    assert trace(page, "loss", SMOOTHED) == (server_s["x"], server_s["y"])
    assert page.evaluate("document.querySelector('#loss .js-plotly-plot').layout.xaxis.range") == [2, 9]


def test_a_page_without_storage_or_notifications_still_trains(tab: TabFactory, short_text: str) -> None:
    page = tab(
        script="Object.defineProperty(window, 'sessionStorage', { get() { throw new DOMException('no', 'SecurityError'); } });"
        " delete window.Notification;"
    )
    assert page.evaluate("typeof Notification") == "undefined"
    assert train_with(page, short_text, max_steps=20)["run"]
    wait_state(page, "finished")


def test_the_end_of_a_run_is_notified_when_nobody_looks(page: Page, short_text: str) -> None:
    page.evaluate(
        "() => { window.said = []; window.Notification = class { static permission = 'granted'; constructor(_, { body }) { said.push(body); } }; }"
    )
    train_with(page, short_text, max_steps=5000, log_interval=1)
    wait_state(page, "training")
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")
    page.locator("#stop").click()
    page.wait_for_function("window.said.length > 0")
    (said,) = page.evaluate("window.said")
    assert said.startswith("Stopped after")


def test_a_killed_program_s_run_keeps_its_checkpoints_is_shown_as_interrupted_and_can_be_resumed(
    make_server: ServerFactory, visitor: VisitorFactory, short_text: str
) -> None:
    killed = make_server()
    killed.run({**TINY, **LONG}, short_text)
    view = killed.wait_for_step(100)
    run = view["run"]
    killed.process.send_signal(signal.SIGKILL)
    assert killed.process.wait(10) == -signal.SIGKILL
    assert killed.state(run)["state"] == "training"
    again = make_server(killed.home)
    assert again.state(run)["state"] == "interrupted"
    assert f"{run}/best" in {item["id"] for item in again.call("checkpoints")}
    assert again.call("generate", f"{run}/best", "", 5)
    assert not list((again.home / run).glob(".*.tmp"))
    saved = find_checkpoint(again.home / run).step
    page = visitor(again)
    assert page.evaluate("window.minigpt.view.run") == run
    assert page.evaluate("window.minigpt.view.state") == "interrupted"
    expect(page.locator("#status .story")).to_contain_text(f"Resume goes on from step {saved:,}.")
    page.locator("#resume").click()
    page.wait_for_function("step => window.minigpt.view.live && window.minigpt.view.step > step", arg=view["step"] + 20)
    count = wait_points(page, view["step"])
    assert trace(page, "loss", TRAIN)[0][:count] == list(range(1, count + 1))
    again.end_run()
