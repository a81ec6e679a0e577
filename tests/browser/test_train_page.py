"""The Train tab in a real browser: what a visitor sees before, during and after a run, and what survives reloads, strangers and mistakes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Locator, Page, expect

from browser.conftest import (
    ENDED,
    EXAMPLE,
    LONG,
    QUICK_STEPS,
    TINY,
    Faults,
    Server,
    TabFactory,
    VisitorFactory,
    cells,
    open_part,
    paste_text,
    press_train,
    reload,
    set_number,
    trace,
    train_with,
    wait_points,
    wait_state,
    wait_until,
)
from minigpt.header import our_metadata, read_header

TRAIN, VAL, UNIFORM, UNIGRAM = 0, 2, 4, 5  # traces of the loss chart
# Presses Train it; tells where it and Stop lie on the whole page, before and right after: left, top, width, height.
PRESS = """() => {
    const places = () => ['train', 'stop'].map(id => {
        const r = document.getElementById(id).getBoundingClientRect();
        return r.width ? [r.x, r.y + scrollY, r.width, r.height] : null;
    });
    const before = places();
    document.getElementById('train').click();
    return [before, places()];
}"""
# Holds the answers to the first polls, which were sent when there was no chart yet, until there is one.
HOLD = """const genuine = window.fetch;
window.fetch = async (...given) => {
    const answer = await genuine(...given), mounted = () => document.querySelector('#loss .js-plotly-plot')?._fullLayout;
    while (String(given[0]).includes('component_server') && !mounted()) await new Promise(requestAnimationFrame);
    return answer;
};"""
DETAILS = ("lr", "grad_norm", "tokens_per_s")
RATE = {"max_steps": 60, "log_interval": 1, "eval_interval": 20}


def story(page: Page) -> Locator:
    return page.locator("#status .story")


def toast(page: Page) -> Locator:
    return page.get_by_test_id("toast-body").last


def short(value: float | None) -> float | None:
    """A number as the feed sends it: six significant digits."""
    return None if value is None else float(f"{value:.6g}")


def expected_curves(events: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float | None]]]:
    """The curves that a run's events ask for, worked out apart from the program's own history."""
    logs = [event for event in events if event["type"] == "log"]
    steps = [event["step"] for event in logs]
    curves = {name: (steps, [short(event[name]) for event in logs]) for name in ("loss", *DETAILS)}
    average, smoothed = 0.0, []
    for count, event in enumerate(logs, start=1):
        average = 0.8 * average + 0.2 * event["loss"]
        smoothed.append(short(average / (1 - 0.8**count)))
    curves["smoothed"] = steps, smoothed
    evaluations = {event["step"]: short(event["val_loss"]) for event in reversed(events) if event["type"] in ("eval", "complete")}
    first = {event["step"]: short(event["val_loss"]) for event in events if event["type"] == "eval"}
    curves["val"] = sorted(evaluations), [{**evaluations, **first}[step] for step in sorted(evaluations)]
    return curves


def remove(folder: Path) -> None:
    """Remove the folder of a run that is at work and may be writing into it."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_until(gone, "the folder to go")


def test_the_page_is_alive_before_any_click(untouched: Server, tab: TabFactory) -> None:
    example = our_metadata(read_header(EXAMPLE))
    samples = [sample["text"].lstrip("\n") for sample in example["samples"]]
    served = json.loads(json.dumps(requests.get(untouched.url + "config", timeout=10).json()))
    values = " ".join(str(part["props"].get("value")) for part in served["components"])
    assert samples[-1].split("\n")[1] in values
    assert "an example, trained before you came" in values

    page = tab(untouched)
    assert page.locator("#before").text_content() == samples[0]
    assert page.locator("#after").text_content() == samples[-1]
    assert page.locator("#age").get_attribute("max") == str(len(samples) - 1)
    assert page.locator("#status .state").inner_text().startswith("an example")
    assert story(page).inner_text().startswith("This one was done in")
    for part in ("#status .numbers", "#about", "#before-tag", "#after-tag", "#intro h1"):
        assert page.locator(part).inner_text().strip(), part
    x, y = trace(page, "loss", VAL)
    assert x[-1] == example["step"]
    assert y[-1] < y[0]
    assert len(trace(page, "loss", TRAIN)[0]) > 10
    assert trace(page, "loss", UNIFORM)[1] == [example["data"]["uniform_loss"]] * 2
    assert page.locator("#train").is_visible()
    assert page.locator("#stop").is_hidden()
    assert page.title() == "MiniGPT"


def test_a_chart_that_mounts_while_its_page_asks_for_the_first_time_keeps_its_curve(untouched: Server, tab: TabFactory) -> None:
    page = tab(untouched, script=HOLD)
    curve = trace(page, "loss", VAL)
    assert curve[0]
    page.wait_for_function("window.minigpt.polls > 2")
    assert trace(page, "loss", VAL) == curve


def test_a_run_turns_the_button_into_stop_and_ends_with_a_verdict_and_a_look_inside(page: Page, server: Server) -> None:
    open_part(page, "settings-training")
    set_number(page, "max_steps", 100)
    (place, hidden), after = page.evaluate(PRESS)
    assert place
    assert hidden is None
    assert after == [None, place]
    page.wait_for_function("window.minigpt.view.live")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#status .state")).to_have_text(re.compile(r"^training · step \d+ of 100"))
    some = wait_points(page, 1)
    page.wait_for_function("window.minigpt.samples.length > 1")
    slider = int(page.locator("#age").get_attribute("max") or 0)
    assert wait_points(page, some) > some
    view = wait_state(page, *ENDED)

    assert view["state"] == "finished"
    (data,) = (event for event in server.metrics(view["run"]) if event["type"] == "data")
    assert data["uniform_loss"] == pytest.approx(7.6009, abs=1e-3)
    assert trace(page, "loss", UNIFORM) == ([0, 100], [data["uniform_loss"]] * 2)
    assert trace(page, "loss", UNIGRAM) == ([0, 100], [data["unigram_loss"]] * 2)
    expect(story(page)).to_have_text(re.compile(r"^Done in \d+ s\. From 2,000 possible next words to about \d+; best at step \d+, saved\.$"))
    assert page.title() == "✓ MiniGPT"
    expect(page.locator("#train")).to_be_visible()
    page.wait_for_function("slider => Number(document.querySelector('#age').max) > slider", arg=slider)
    assert page.locator("#after").text_content() == page.evaluate("window.minigpt.samples.at(-1).text")

    page.locator("#look-inside").click()
    expect(page.locator("#verdict .line")).to_contain_text(re.compile(r"step \d+ · validation loss"))
    assert cells(page, "checkpoints")[0][:2] == [view["run"], "best"]
    assert page.get_by_role("tab", name="Checkpoint").get_attribute("aria-selected") == "true"


def test_the_curves_equal_the_callbacks_events(page: Page, server: Server, tab: TabFactory, short_text: str) -> None:
    view = train_with(page, short_text, **RATE)
    wait_points(page, 3)
    open_part(page, "more")
    watcher = tab()
    wait_state(page, "finished")
    wait_state(watcher, "finished")
    open_part(watcher, "more")
    expected = expected_curves(server.metrics(view["run"]))
    assert len(expected["loss"][0]) == 60
    for who in (page, watcher):
        who.wait_for_function("document.querySelector('#details .js-plotly-plot')?.data?.[0].x.length >= 60")
        for number, name in enumerate(("loss", "smoothed", "val")):
            assert trace(who, "loss", number) == tuple(expected[name]), name
        for number, name in enumerate(DETAILS):
            assert trace(who, "details", number) == tuple(expected[name]), name


def test_zoom_survives_new_points(page: Page, short_text: str) -> None:
    train_with(page, short_text, max_steps=5000, log_interval=1)
    page.wait_for_function("window.minigpt.view.state === 'training'")
    count = wait_points(page, 2)
    page.evaluate("Plotly.relayout(document.querySelector('#loss .js-plotly-plot'), {'xaxis.range': [2, 9]})")
    node = page.locator("#loss .js-plotly-plot").element_handle()
    wait_points(page, count + 10)
    assert page.evaluate("window.minigpt.view.live")
    assert page.evaluate("document.querySelector('#loss .js-plotly-plot').layout.xaxis.range") == [2, 9]
    assert page.evaluate("node => node.isConnected", node)


def test_five_clicks_on_stop_are_one_which_saves_and_the_next_run_needs_no_reload(page: Page, server: Server) -> None:
    view = train_with(page, max_steps=5000)
    wait_points(page, 2)
    page.evaluate("for (let i = 0; i < 5; i++) document.querySelector('#stop').click()")
    ended = wait_state(page, *ENDED)
    assert ended["state"] == "stopped"
    assert ended["run"] == view["run"]
    expect(story(page)).to_have_text(re.compile(r"^Stopped after \d+ s\. From 2,000 possible next words to about "))
    for name in ("last", "best"):
        metadata = our_metadata(read_header(server.home / view["run"] / f"{name}.safetensors"))
        assert metadata["val_loss"] > 0
    assert metadata["step"] <= ended["step"]
    assert server.state(view["run"])["state"] == "stopped"
    assert [event["type"] for event in server.metrics(view["run"])].count("complete") == 1

    page.evaluate("document.querySelector('#stop').click()")
    again = press_train(page)
    assert again["run"] != view["run"]
    expect(page.locator("#stop")).to_be_visible()
    page.wait_for_function("window.minigpt.view.state === 'training'")
    assert wait_points(page, 1) > 1
    assert trace(page, "loss", TRAIN)[0][0] == 1


def test_a_second_visitor_sees_the_run_and_a_second_start_joins_it(page: Page, server: Server, visitor: VisitorFactory, short_text: str) -> None:
    second = visitor()
    view = train_with(page, short_text, max_steps=5000, log_interval=1)
    second.wait_for_function("run => window.minigpt.view.run === run", arg=view["run"])
    wait_points(second, 5)
    folders = server.folders()
    second.evaluate("document.querySelector('#train').click()")  # hidden by now: as if pressed before this page had heard of the run
    expect(toast(second)).to_contain_text(re.compile(rf"{view['run']} is training \(step \d+ of 5,000\).* Meanwhile you are watching it"))
    count = len(trace(second, "loss", TRAIN)[0])
    wait_points(second, count + 5)
    assert second.evaluate("window.minigpt.view.run") == view["run"]
    assert server.folders() == folders
    second.locator("#stop").click()
    assert wait_state(page, *ENDED)["state"] == "stopped"


def test_wrong_settings_are_refused_with_values_that_work(page: Page, server: Server, short_text: str) -> None:
    folders = server.folders()
    before = page.locator("#status .state").inner_text()
    paste_text(page, short_text)
    for part in ("model", "training"):
        open_part(page, f"settings-{part}")
    for wrong in (
        {
            "n_heads": (5, "Heads is 5; it must divide Width, 32 into even parts: try 4", 4),
            "warmup_steps": (500, f"Warm-up is 500; it must be below Steps, {QUICK_STEPS}: try {QUICK_STEPS // 10}", QUICK_STEPS // 10),
        },
        {
            "max_steps": ("", "Steps is empty; it must be a whole number from 1 to 10,000,000: try 5,000", 5000),
            "learning_rate": (-1, "Learning rate is -1; it must be a number from 1e-08 to 10: try 0.0003", 0.0003),
        },
    ):
        for name, (value, _, _) in wrong.items():
            set_number(page, name, value)
        for _, sentence, _ in wrong.values():
            expect(page.locator("#about")).to_contain_text(sentence)
        page.locator("#train").click()
        for _, sentence, _ in wrong.values():
            expect(toast(page)).to_contain_text(sentence)
        expect(page.locator("#train")).to_be_visible()
        expect(page.locator("#stop")).to_be_hidden()
        expect(page.locator("#status .state")).to_have_text(before)
        expect(story(page)).not_to_be_empty()
        for name, (_, _, works) in wrong.items():
            set_number(page, name, works)
        expect(page.locator("#about .wrong")).to_have_count(0)
    assert server.folders() == folders
    press_train(page)
    page.wait_for_function("window.minigpt.view.state === 'training'")


def test_an_empty_text_is_refused(page: Page, server: Server) -> None:
    folders = server.folders()
    paste_text(page, "  \n ")
    page.locator("#train").click()
    expect(toast(page)).to_contain_text("the text is empty; give at least a page of it, as text or as a file of at most 64 MB")
    expect(page.locator("#train")).to_be_visible()
    assert server.folders() == folders


def test_a_text_shorter_than_the_context_is_refused_with_the_length_that_fits(page: Page, server: Server) -> None:
    folders = server.folders()
    paste_text(page, "to be or not to be\n" * 5)
    page.locator("#train").click()
    expect(toast(page)).to_contain_text(re.compile(r"the text has 35 tokens, .* set Context length to 30 or less"))
    expect(page.locator("#train")).to_be_visible()
    assert server.folders() == folders

    open_part(page, "settings-model")
    set_number(page, "max_seq_len", 24)
    assert train_with(page, max_steps=20)["run"]
    assert wait_state(page, *ENDED)["state"] == "finished"


def test_a_file_in_another_encoding_is_refused_and_windows_line_ends_do_no_harm(page: Page, server: Server, short_text: str) -> None:
    folders = server.folders()
    page.get_by_label("my own text").check()
    drop = page.locator("#own-file input[type=file]")
    drop.set_input_files({"name": "poem.txt", "mimeType": "text/plain", "buffer": ("Sch\u00f6n ist die Nacht\n" * 200).encode("latin-1")})
    expect(page.locator("#own-file")).to_contain_text("poem")
    page.locator("#train").click()
    expect(toast(page)).to_contain_text("the text is not UTF-8 (byte 3 does not fit): save it as UTF-8 and try again")
    expect(page.locator("#train")).to_be_visible()
    assert server.folders() == folders

    page.locator("#own-file").get_by_label(re.compile("Clear|Remove")).first.click()
    drop.set_input_files({"name": "verse.txt", "mimeType": "text/plain", "buffer": short_text.replace("\n", "\r\n").encode()})
    expect(page.locator("#own-file")).to_contain_text("verse")
    view = train_with(page, max_steps=20)
    assert wait_state(page, *ENDED)["state"] == "finished"
    assert (server.home / view["run"] / "own text.txt").read_bytes().decode() == short_text

    page.locator("#own-file").get_by_label(re.compile("Clear|Remove")).first.click()
    view = train_with(page, short_text.replace("\n", "\r\n"))
    assert wait_state(page, *ENDED)["state"] == "finished"
    assert (server.home / view["run"] / "own text.txt").read_bytes().decode() == short_text


def test_a_run_whose_folder_was_deleted_goes_on_and_saves(page: Page, server: Server, short_text: str) -> None:
    server.run({**TINY, **LONG, "eval_interval": 5000}, short_text)  # no checkpoint on the way that would make the folder anew
    run = server.wait_for_step(20)["run"]
    remove(server.home / run)
    page.wait_for_function("run => window.minigpt.view.run === run", arg=run)
    server.wait_for_step(server.view()["step"] + 50)
    page.locator("#stop").click()
    view = wait_state(page, *ENDED)
    assert view["state"] == "stopped"
    expect(story(page)).to_contain_text("saved")
    assert our_metadata(read_header(server.home / run / "last.safetensors"))["step"] == view["step"]


def test_a_run_that_breaks_says_why_and_gives_the_button_back(page: Page, server: Server, short_text: str) -> None:
    server.run({**TINY, **LONG, "eval_interval": 5000}, short_text)
    run = server.wait_for_step(20)["run"]
    remove(server.home / run)
    (server.home / run).write_text("a file where the run's folder was")
    page.wait_for_function("run => window.minigpt.view.run === run", arg=run)
    page.locator("#stop").click()
    assert wait_state(page, *ENDED)["state"] == "failed"
    expect(story(page)).to_have_text(re.compile(r"^The run could not go on: .{10,}"))
    assert str(server.home) not in story(page).inner_text()
    expect(page.locator("#train")).to_be_visible()
    press_train(page)
    page.wait_for_function("window.minigpt.view.state === 'training'")


def test_without_plotlys_global_the_chart_still_gets_its_points(page: Page, short_text: str) -> None:
    paste_text(page, short_text)
    open_part(page, "settings-training")
    set_number(page, "max_steps", 4999)
    page.evaluate("delete window.Plotly")
    assert page.evaluate("window.Plotly") is None
    press_train(page)
    page.wait_for_function(f"document.querySelector('#loss .js-plotly-plot')?.data?.[{UNIFORM}]?.x[1] === 4999")  # not the chart of the run before
    wait_points(page, wait_points(page, 1))
    assert page.locator("#loss .main-svg").first.is_visible()
    page.locator("#stop").click()
    wait_state(page, *ENDED)
    page.wait_for_function(f"document.querySelector('#loss .js-plotly-plot')?.data?.[{VAL}]?.x.at(-1) === window.minigpt.view.step")


def test_everything_can_be_done_from_the_keyboard(page: Page, short_text: str) -> None:
    paste_text(page, short_text)
    open_part(page, "settings-training")
    set_number(page, "max_steps", 5000)
    set_number(page, "eval_interval", 20)
    before = page.evaluate("window.minigpt.view.run")
    page.locator("#train").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("before => window.minigpt.view.run !== before && window.minigpt.samples.length > 1", arg=before)
    page.locator("#age").focus()
    page.keyboard.press("Home")
    first = page.evaluate("window.minigpt.samples[0]")
    assert page.locator("#after-tag").inner_text() == first["tag"]
    assert page.locator("#after").text_content() == first["text"]
    page.keyboard.press("ArrowRight")
    assert page.locator("#after-tag").inner_text() == page.evaluate("window.minigpt.samples[1].tag")
    assert page.locator("#age").get_attribute("aria-valuetext") == page.locator("#after-tag").inner_text()
    live = page.locator("#status").get_by_role("status")
    assert live.get_attribute("aria-live") == "polite"
    expect(live).not_to_be_empty()
    page.locator("#stop").focus()
    page.keyboard.press("Space")
    assert wait_state(page, *ENDED)["state"] == "stopped"
    expect(live).to_contain_text("Stopped after")


def test_a_narrow_page_never_scrolls_sideways_and_keeps_stop_at_hand(page: Page, faults: Faults, short_text: str) -> None:
    phone = page
    device = phone.context.new_cdp_session(phone)
    device.send("Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True})
    device.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    reload(phone, faults)
    widest = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    assert phone.evaluate(widest) <= 390
    train_with(phone, short_text, max_steps=5000)
    wait_points(phone, 1)
    phone.evaluate("window.scrollTo(0, 0)")
    tops = [phone.locator(part).bounding_box()["y"] for part in ("#status .state", "#status .story", "#before", "#source")]
    assert tops == sorted(tops)
    assert tops[-2] < 700
    for place in ("0", "document.body.scrollHeight"):
        phone.evaluate(f"window.scrollTo(0, {place})")
        box = phone.locator("#stop").bounding_box()
        assert box is not None
        assert 844 - 40 <= box["y"] + box["height"] <= 844
        assert box["width"] > 300
    assert phone.evaluate(widest) <= 390
    phone.locator("#stop").click()
    wait_state(phone, *ENDED)
    assert phone.evaluate(widest) <= 390
    phone.get_by_role("tab", name="Checkpoint").click()
    expect(phone.locator("#verdict")).to_contain_text("step")
    assert phone.evaluate(widest) <= 390


def test_the_log_shows_twenty_rows_and_the_csv_has_all(page: Page, server: Server, short_text: str) -> None:
    server.run({**TINY, **RATE}, short_text)
    run = server.view()["run"]
    page.wait_for_function("run => window.minigpt.view.run === run", arg=run)
    wait_state(page, "finished")
    events = [event for event in server.metrics(run) if event["type"] in ("log", "eval")]
    open_part(page, "log-part")
    rows = page.locator("#log tbody tr")
    expect(rows).to_have_count(20)
    assert rows.first.inner_text().split()[0] == "60"
    with page.expect_download() as download:
        page.locator("#csv").click()
    assert download.value.suggested_filename == f"minigpt-{run}.csv"
    header, *lines = download.value.path().read_text().splitlines()
    assert header == "step,loss,lr,grad_norm,tokens_per_s,val_loss,elapsed"
    assert [int(line.split(",")[0]) for line in lines] == [event["step"] for event in events]
    assert len(lines) == 64
    losses = [float(line.split(",")[1]) for line in lines if line.split(",")[1]]
    assert losses == pytest.approx([event["loss"] for event in events if event["type"] == "log"])


def test_changed_settings_are_named_and_can_be_reset(page: Page) -> None:
    expect(page.locator("#reset")).to_be_hidden()
    open_part(page, "settings-training")
    steps = page.locator("#setting-max_steps input[type=number]").input_value()
    set_number(page, "max_steps", 300)
    expect(page.locator("#about")).to_contain_text("1 setting differs from Quick: Steps")
    set_number(page, "seed", 5)
    expect(page.locator("#about")).to_contain_text("2 settings differ from Quick: Steps, Seed")
    open_part(page, "plan")
    expect(page.locator("#command textarea")).to_have_value("python -m minigpt train --preset quick --max-steps 300 --seed 5")
    page.locator("#reset").click()
    expect(page.locator("#setting-max_steps input[type=number]")).to_have_value(steps)
    expect(page.locator("#setting-seed input[type=number]")).to_have_value("1337")
    expect(page.locator("#about")).not_to_contain_text("differ")
    expect(page.locator("#reset")).to_be_hidden()
    page.get_by_label("Letters").check()
    expect(page.locator("#about")).to_contain_text("Letter by letter")
    expect(page.locator("#setting-max_steps input[type=number]")).to_have_value("320")
