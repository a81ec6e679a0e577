"""The Train tab: choose, train, watch, stop. Lays out the controls and turns clicks into calls of the run manager; training is not done here."""

import functools
import html
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from minigpt.config import TransformerConfig, fields
from minigpt.corpus import decode_text
from minigpt.device import check_device
from minigpt.errors import MiniGPTError
from minigpt.presets import DEFAULT_PRESET, PRESETS
from minigpt.runs import Run, RunBusy, RunManager
from minigpt.ui import charts, feed, form, memory
from minigpt.ui.refusals import markup, refusing, warning

log = logging.getLogger(__name__)

SHAKESPEARE, OWN = "Shakespeare", "my own text"
FIRST_SECONDS, FIRST_PAUSE_S, PAUSE_S, FALLBACK_PAUSE_S = 3.0, 0.15, 0.5, 1.0
FALLBACK_POINTS = 500
DOUBLE_CLICK_S = 1.0
# Told by the page at the click: without plotly's global the script cannot append points, and whole figures must be sent instead. It arrives a
# second or two after the page, so an early click waits for it.
TELL_PLOTLY = """async (...values) => {
    for (let tries = 0; tries < 20 && !window.Plotly; tries++) await new Promise(done => setTimeout(done, 100));
    return [...values.slice(0, -1), Boolean(window.Plotly)];
}"""
CHART_CONTROLS = """<label>Smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0.8"></label>
<label><input id="log-axis" type="checkbox"> Log axis</label>"""
FORM_AS_IT_IS = [gr.skip()] * (1 + len(form.NAMES) + 5)  # preset, controls, and what `_planned` fills
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
WARNING: dict[str, Any] = {**QUIET, "queue": True}  # a warning reaches the page through the queue alone
WATCHED: dict[str, Any] = {"concurrency_limit": 8, "show_progress": "hidden", "api_visibility": "private"}  # what goes on as long as a run
REFUSED: dict[str, Any] = {"js": "() => window.minigpt.refused()", "api_visibility": "private"}


@dataclass
class TrainTab:
    """The components that other parts of the page refer to."""

    look_inside: gr.Button
    write_with: gr.Button
    restart: gr.Button  # beside the verdict of a run that diverged
    under_chart: gr.Column  # where the list of runs goes
    charts: list[gr.components.Component]  # what `watch` yields for
    link: gr.Textbox  # the form as the query of an address
    form: list[gr.components.Component]  # what `arrive` fills


def build(manager: RunManager, feed_component: gr.HTML) -> TrainTab:
    """Lay out the tab inside the current gr.Tab and wire its events."""
    start_view = feed.view(manager, {})
    with gr.Row(elem_id="train-row"):
        with gr.Column(scale=0, min_width=300, elem_id="left"):
            source = gr.Radio([SHAKESPEARE, OWN], value=SHAKESPEARE, label="Text", elem_id="source")
            with gr.Group(visible=False) as own:
                text = gr.Textbox(
                    label="Paste a text", lines=5, max_lines=8, elem_id="own-text", placeholder="At least a page; the longer, the better."
                )
                file = gr.File(label="or drop a text file (UTF-8) instead", type="binary", height=150, elem_id="own-file")
            choices = [(form.label(name), name) for name in PRESETS]
            preset = form.unjudged(gr.Radio(choices, value=DEFAULT_PRESET, label="Run", elem_id="preset"))
            train = gr.Button("Train it", variant="primary", size="lg", elem_id="train")
            stop = gr.Button("Stop", variant="stop", size="lg", elem_id="stop")
            about = gr.HTML(html.escape(form.summary(DEFAULT_PRESET, PRESETS[DEFAULT_PRESET].config())), elem_id="about")
            reset = gr.Button("Reset the settings to the preset", size="sm", visible=False, elem_id="reset")
            controls, schedule, command, save, load = _folded()
        with gr.Column(scale=1, min_width=300, elem_id="right"):
            gr.HTML(_status_html(start_view), elem_id="status")
            gr.HTML(_sample_html(start_view), elem_id="sample")
            with gr.Row(elem_id="next", equal_height=True):
                look_inside = gr.Button("Look inside", size="sm", elem_id="look-inside")
                write_with = gr.Button("Write with it", size="sm", elem_id="write-with")
                restart = gr.Button("Restart at a third of the rate", size="sm", variant="primary", elem_id="restart-now")
            loss = gr.Plot(charts.as_plot(_first_figure(start_view)), show_label=False, elem_id="loss")
            with gr.Row(elem_id="chart-controls"):
                gr.HTML(CHART_CONTROLS)
                copy = gr.Button("Copy link", size="sm", elem_id="copy-link")
            under_chart = gr.Column(elem_id="runs")
            with gr.Accordion("Learning rate, gradient, speed", open=False, elem_id="more"):
                details = gr.Plot(charts.as_plot(charts.details_figure({})), show_label=False, elem_id="details")
            with gr.Accordion("Log table, CSV", open=False, elem_id="log-part"):
                gr.HTML('<div class="rows"></div><button id="csv" type="button">Download all rows as CSV</button>', elem_id="log")
    has_plotly, link = gr.Checkbox(True, visible=False), gr.Textbox(form.link(DEFAULT_PRESET, PRESETS[DEFAULT_PRESET].config()), visible=False)
    source.input(lambda chosen: gr.Group(visible=chosen == OWN), source, own, **QUIET)
    gr.on([source.input, text.change], None, [source, text], None, js=memory.REMEMBER_TEXT, api_visibility="private")
    after = [about, reset, schedule, command, link]
    edits = [getattr(control, "input") for control in controls]  # noqa: B009  gradio adds events at run time
    for planned in (
        gr.on([preset.input, reset.click], _choose, preset, [*controls, *after], **QUIET),
        gr.on(edits, _planned, [preset, *controls], after, trigger_mode="always_last", **QUIET),
        load.upload(_load, load, [preset, *controls, *after], **WARNING),
    ):
        planned.then(None, link, None, js=memory.REMEMBER, api_visibility="private")
    copied = copy.click(None, link, copy, js=memory.COPY_LINK, api_visibility="private")
    copied.then(None, None, copy, js=f"() => new Promise(done => setTimeout(() => done('{copy.value}'), 2000))", api_visibility="private")
    file_text = gr.Textbox(visible=False)
    saved = save.click(_save, [preset, *controls], file_text, **QUIET)
    saved.success(None, file_text, None, js=memory.DOWNLOAD, api_visibility="private")
    started = train.click(
        functools.partial(_start, manager),
        [source, text, file, preset, *controls, has_plotly],
        [loss, details, feed_component],
        js=TELL_PLOTLY,
        **WATCHED,
    )
    started.failure(None, **REFUSED)
    stop.click(functools.partial(_stop, manager), None, None, api_name="page_stop", **QUIET)
    form_parts = [source, text, own, preset, *controls, *after]
    return TrainTab(look_inside, write_with, restart, under_chart, [loss, details, feed_component], link, form_parts)


def _folded() -> tuple[list[gr.components.Component], gr.Plot, gr.Textbox, gr.Button, gr.UploadButton]:
    """Lay out what stays folded away on the left: the settings' controls, the planned schedule, the command line, saving and loading."""
    config = PRESETS[DEFAULT_PRESET].config()
    with gr.Accordion("Settings: model", open=False, elem_id="settings-model"):
        controls = [form.control(name) for name in fields("model")]
    with gr.Accordion("Settings: training", open=False, elem_id="settings-training"):
        controls += [form.control(name) for name in fields("training")]
    with gr.Accordion("Schedule, command, file", open=False, elem_id="plan"):
        schedule = gr.Plot(charts.as_plot(charts.schedule_figure(config)), show_label=False, elem_id="schedule")
        label = "The same settings from the command line"
        command = gr.Textbox(form.command(DEFAULT_PRESET, config), label=label, buttons=["copy"], lines=2, elem_id="command")
        with gr.Row():
            save = gr.Button("Save settings", size="sm", elem_id="save-settings")
            load = gr.UploadButton("Load settings", size="sm", file_types=[".json"], type="binary", elem_id="load-settings")
    return controls, schedule, command, save, load


def _status_html(view: dict[str, Any]) -> str:
    """Paint the status as the script will keep it; the story alone is announced to screen readers."""
    return (
        f'<p class="state">{html.escape(view["status"])}</p><div class="bar"><div class="fill"></div></div>'
        f'<p class="story" role="status" aria-live="polite">{html.escape(view["story"])}</p><p class="numbers">{html.escape(view["numbers"])}</p>'
    )


def _sample_html(view: dict[str, Any]) -> str:
    """Paint the two boxes, before and after, with the slider over all moments."""
    samples = view["samples"] or [{"text": "", "tag": ""}]
    first, last = ({key: html.escape(str(sample[key])) for key in ("text", "tag")} for sample in (samples[0], samples[-1]))
    most = len(samples) - 1
    return (
        f'<div class="pages">{_box("before", "Before training", first)}{_box("after", "What it writes", last)}</div>'
        f'<label class="age"><span>first</span><input id="age" type="range" min="0" max="{most}" value="{most}" '
        'aria-label="Moment of training"><span>latest</span></label>'
    )


def _box(name: str, title: str, sample: dict[str, str]) -> str:
    caption = f'<figcaption>{title} <small id="{name}-tag">{sample["tag"]}</small></figcaption>'
    return f'<figure>{caption}<pre id="{name}" tabindex="0">{sample["text"]}</pre></figure>'


def _first_figure(view: dict[str, Any]) -> Any:
    curves = {name: (part["x"], part["y"]) for name, part in view["series"].items()}
    best = tuple(view["best"]) if view["best"] else None
    return charts.loss_figure(curves, view["lines"], best, max(view["max_steps"], 1))


def _choose(preset: str) -> list[Any]:
    """Set all controls to a preset and tell what that means."""
    with refusing("No such preset"):
        return _filled(preset, form.checked(preset, {}))[1:]


def _planned(preset: str, *values: Any) -> list[Any]:
    """Tell what the settings on the form will cost, or what is wrong with them."""
    try:
        config = form.read(preset, values)
        check_device(config)
    except MiniGPTError as error:
        return [f'<span class="wrong">{markup(error)}</span>', gr.Button(visible=True), *[gr.skip()] * 3]
    changed = bool(form.differing(preset, config))
    figure = charts.as_plot(charts.schedule_figure(config))
    return [html.escape(form.summary(preset, config)), gr.Button(visible=changed), figure, form.command(preset, config), form.link(preset, config)]


def _filled(preset: str, config: TransformerConfig) -> list[Any]:
    """Return the preset, its controls and what follows from them."""
    values = form.values_of(config)
    return [preset, *values, *_planned(preset, *values)]


def arrive(manager: RunManager, given: str | None, source: str, text: str) -> list[Any]:
    """Fill the form of a page just loaded: from a link's settings, else from the run that is live, else as it was; a new page is left alone."""
    texts = [source, text, gr.Group(visible=source == OWN)] if source == OWN else [gr.skip()] * 3
    filled = FORM_AS_IT_IS
    with warning("The settings in this address do not fit"):
        asked = form.from_link(given)
        if (run := manager.active) is not None and not (asked and given and given.startswith("?")):
            preset = run.preset if run.preset in PRESETS else "classic"
            asked = (preset, form.as_asked(preset, run.config, run.history.last.get("data", {})))
        filled = _filled(*asked) if asked else FORM_AS_IT_IS
    return [*texts, *filled]


def _save(preset: str, *values: Any) -> str:
    with refusing("Settings not saved"):
        return form.to_json(preset, form.read(preset, values))


def _load(content: bytes | None) -> list[Any]:
    with warning("Not loaded"):
        return _filled(*form.from_json(content))
    return FORM_AS_IT_IS


def own_text(source: str, text: str | None, file: bytes | None) -> str | None:
    """Return the text a person gave, or None for Shakespeare.

    Raises:
        DataError: the file is not text.
    """
    if source != OWN:
        return None
    if file:
        return decode_text(file)
    return text or ""


def _start(manager: RunManager, source: str, text: str, file: bytes | None, preset: str, *rest: Any) -> Iterator[tuple[Any, ...]]:
    """Start a run as the form says; see `begin_or_join`."""
    *values, has_plotly = rest
    yield from begin_or_join(lambda: manager.start(form.read(preset, values), preset=preset, text=own_text(source, text, file)), has_plotly)


def begin_or_join(begin: Callable[[], Run], has_plotly: bool) -> Iterator[tuple[Any, ...]]:
    """Begin a run and yield the trainer's updates until it ends; if another is live, say so, yield that one once and leave the rest to the polls.

    A click that stayed as long as somebody else's run would keep the next ones waiting, which would then start runs that nobody wants any more.
    """
    with refusing("Not started"):
        try:
            views = watch(begin(), whole_figures=has_plotly is False)
        except RunBusy as busy:
            gr.Info(html.escape(f"{busy}. Meanwhile you are watching it."))
            views = itertools.islice(watch(busy.run), 1)
    yield from views


def watch(run: Run, *, whole_figures: bool = False) -> Iterator[tuple[Any, ...]]:
    """Yield (loss figure, details figure, feed) for a run until it has ended: the loss first and last, in between only what is new.

    With `whole_figures` both figures come each second, thinned, for a page whose script has no plotly.
    """
    began = drawn = time.monotonic()

    def pause() -> float:
        return FIRST_PAUSE_S if time.monotonic() - began < FIRST_SECONDS else PAUSE_S

    for count, seen in enumerate(feed.follow(run, pause)):
        value = json.dumps(seen)
        if whole_figures and (time.monotonic() - drawn >= FALLBACK_PAUSE_S or not seen["live"]):
            drawn = time.monotonic()
            details = charts.details_figure(charts.thin(charts.curves_of(run.history), FALLBACK_POINTS))
            yield charts.as_plot(figure_of(run, FALLBACK_POINTS)), charts.as_plot(details), value
        elif count == 0 or not seen["live"]:
            yield charts.as_plot(figure_of(run)), gr.skip(), value
        else:
            yield gr.skip(), gr.skip(), value


def figure_of(run: Run, most: int | None = None) -> Any:
    """Draw a run's losses as they are now, with at most `most` points a curve."""
    curves = charts.curves_of(run.history)
    lines = feed.baselines(run.history.last.get("data", {}))
    return charts.loss_figure(charts.thin(curves, most) if most else curves, lines, feed.best_point(run), run.max_steps)


def _stop(manager: RunManager) -> None:
    """Set the stop event of the run at work; the run does the rest."""
    if (run := manager.active) is not None:
        run.ask_to_stop(ignore_within_s=DOUBLE_CLICK_S)
