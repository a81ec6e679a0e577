"""The list of runs under the chart: open one, lay up to four over the chart, go on with one, rename it, delete it.

What the buttons act on is the run that the page shows; its id comes from the page's script. Which buttons fit that run stands in its row.
"""

import functools
import html
import json
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from minigpt.errors import ConfigError, MiniGPTError
from minigpt.past import MAX_NAME
from minigpt.presets import DEFAULT_PRESET, PRESETS
from minigpt.run import LIVE
from minigpt.runs import PastRun, Run, RunManager
from minigpt.ui import charts, feed, train_tab, words
from minigpt.ui.refusals import warning

OVERLAY_POINTS = 500
MORE_STEPS = 400
NONE_YET = "<p>Your runs will appear here: each can be opened again, resumed, and laid over another one's chart.</p>"
COLUMNS = ("overlay", "run", "step", "best val. loss", "state")
PER = {"word": " a word", "char": " a letter"}  # losses of the two cannot be held against each other
# The page tells which run it shows; `null` takes the place of a component that has no part in it.
SHOWN = "(_, ...values) => [window.minigpt.view.run, ...values]"


def build(manager: RunManager, tab: train_tab.TrainTab) -> None:
    """Lay out the list inside the current column and wire its events; `tab` holds the charts that a run which goes on is drawn in."""
    gr.HTML(f'<div class="rows">{rows(manager, [], None)}</div>', elem_id="runs-table")
    shown, has_plotly = gr.Textbox(visible=False), gr.Checkbox(True, visible=False)
    with gr.Row(elem_id="go-on"):
        resume = gr.Button("Resume", size="sm", elem_id="resume")
        restart = gr.Button("Restart at a third of the rate", size="sm", elem_id="restart")
    with gr.Accordion("Extend, rename, delete", open=False, elem_id="manage") as manage:
        with gr.Row(elem_id="extend-row"):
            steps = gr.Number(MORE_STEPS, label="Steps to add", elem_id="more-steps")
            extend = gr.Button("Extend", size="sm", elem_id="extend")
        plan = gr.Plot(charts.as_plot(charts.schedule_figure(PRESETS[DEFAULT_PRESET].config())), show_label=False, elem_id="extension")
        _naming_and_deleting(manager, shown)
    for clicks, change in (
        ([resume.click], lambda run, _: {}),
        ([restart.click, tab.restart.click], lambda run, _: {"learning_rate": third(run)}),
        ([extend.click], lambda run, more: {"max_steps": longer(run, more)}),
    ):
        going = gr.on(
            clicks,
            functools.partial(_go_on, manager, change),
            [shown, steps, has_plotly],
            tab.charts,
            js="async (_, steps) => [window.minigpt.view.run, steps, Boolean(window.Plotly)]",
            **train_tab.WATCHED,
        )
        going.failure(None, **train_tab.REFUSED)

    def planned(run_id: str, more: Any) -> Any:
        """Draw the schedule that an extension would follow."""
        try:
            run = known(manager, run_id)
            had = charts.thin(charts.curves_of(run.history), OVERLAY_POINTS).get("lr", charts.EMPTY)
            return charts.as_plot(charts.schedule_figure(run.config.model_copy(update={"max_steps": longer(run, more)}), run.step, had))
        except MiniGPTError:
            return gr.skip()

    gr.on([manage.expand, steps.input], planned, [shown, steps], plan, js=SHOWN, **train_tab.QUIET)


def _naming_and_deleting(manager: RunManager, shown: gr.Textbox) -> None:
    """Lay out and wire what changes a run's name or removes it, the latter only when confirmed."""
    with gr.Row(elem_id="rename-row"):
        name = gr.Textbox(label="New name", max_lines=1, max_length=MAX_NAME, elem_id="new-name")
        rename = gr.Button("Rename", size="sm", elem_id="rename")
    delete = gr.Button("Delete this run…", size="sm", elem_id="delete")
    doomed = gr.Textbox(visible=False)  # the run that was asked about, whatever the page shows by then
    with gr.Group(visible=False) as sure:
        question = gr.HTML("", elem_id="delete-question", padding=True)
        with gr.Row():
            yes = gr.Button("Delete it for good", variant="stop", size="sm", elem_id="delete-yes")
            no = gr.Button("Keep it", size="sm", elem_id="delete-no")

    def renamed(run_id: str, new: str) -> str:
        """Give the run a name, or say why not."""
        with warning("Not renamed"):
            manager.rename(run_id, new)
        return ""

    def asked(run_id: str) -> tuple[Any, str, str]:
        """Ask whether the run shall go, by its name."""
        run = feed.find_run(manager, run_id)
        sentence = f"Delete {run.name} with its checkpoints, curves and samples? This cannot be undone." if run else "This run is gone already."
        return gr.Group(visible=True), html.escape(sentence), run_id

    def deleted(run_id: str) -> Any:
        """Delete the run, or say why not."""
        with warning("Not deleted"):
            manager.delete(run_id)
        return gr.Group(visible=False)

    refresh: dict[str, Any] = {"js": "() => window.minigpt.refresh()", "api_visibility": "private"}
    rename.click(renamed, [shown, name], name, js=SHOWN, **train_tab.WARNING).then(None, **refresh)
    delete.click(asked, shown, [sure, question, doomed], js=SHOWN, **train_tab.QUIET)
    yes.click(deleted, doomed, sure, js="run => window.minigpt.deleted = run", **train_tab.WARNING).then(None, **refresh)
    no.click(lambda: gr.Group(visible=False), None, sure, **train_tab.QUIET)


def known(manager: RunManager, run_id: object) -> Run:
    """Return the run that a page names.

    Raises:
        ConfigError: there is none.
    """
    if (run := feed.find_run(manager, run_id)) is None:
        raise ConfigError("this run is no longer there; choose another from the list")
    return run


def third(run: Run) -> float:
    """Return a third of a run's learning rate, as its verdict writes it."""
    return float(f"{run.config.learning_rate / 3:.2g}")


def longer(run: Run, more: Any) -> int:
    """Return the length of an extended run.

    Raises:
        ConfigError: `more` is no number of steps.
    """
    if not isinstance(more, int | float) or isinstance(more, bool) or not 1 <= more <= 10_000_000 or more % 1:
        raise ConfigError(f"the steps to add are {str(more)[:40]}; they must be a whole number from 1 to 10,000,000: try {MORE_STEPS}")
    return max(run.max_steps, run.step) + int(more)


def _go_on(manager: RunManager, change: Callable[[Run, Any], dict[str, Any]], run_id: str, more: Any, has_plotly: bool) -> Iterator[tuple[Any, ...]]:
    """Go on with a run; see `train_tab.begin_or_join`."""
    yield from train_tab.begin_or_join(lambda: manager.resume(run_id, **change(known(manager, run_id), more)), has_plotly)


def server_functions(manager: RunManager) -> list[Callable[..., str]]:
    """Return what a page's script calls by name. It only reads, and trusts nothing of what it is given."""

    def runs(asked: object = None) -> str:
        """Return the list as HTML and, if asked to draw, the traces of the ticked runs, as JSON."""
        given = feed.parsed(asked)
        slots = given.get("slots")
        listed = {item.id for item in manager.past(10)}  # a run that is gone leaves its place
        places = slots[: len(charts.OVERLAYS)] if isinstance(slots, list) else []
        ticked = [slot if isinstance(slot, str) and slot in listed else None for slot in places]
        return json.dumps({
            "rows": rows(manager, ticked, given.get("run")),
            "traces": traces(manager, ticked, given.get("run")) if given.get("draw") is True else None,
        })  # fmt: skip

    return [runs]


def traces(manager: RunManager, ticked: list[Any], shown: object) -> list[dict[str, Any]]:
    """Return the curves of the ticked runs, each in the colour of its place; the run on the page has its own already."""
    found = [(feed.find_run(manager, run_id), colour) for run_id, colour in zip(ticked, charts.OVERLAYS, strict=False) if run_id != shown]
    here = feed.find_run(manager, shown)
    unit = here.config.tokenizer if here else "word"
    names = {run.id: run.name + ("" if run.config.tokenizer == unit else f", in {words.UNITS[run.config.tokenizer]}") for run, _ in found if run}
    drawn = [(charts.thin(charts.curves_of(run.history), OVERLAY_POINTS), names[run.id], colour) for run, colour in found if run]
    overlaid = [trace for curves, name, colour in drawn for trace in charts.overlay(curves, html.escape(name), colour)]
    return [{**trace, "showlegend": False} for trace in overlaid]  # four names would push the curves out of their chart: the list is the legend


def rows(manager: RunManager, ticked: list[Any], shown: object) -> str:
    """Write the last runs as an HTML table, the ticked ones in their colours and the run on the page marked."""
    body = "".join(_row(item, ticked, shown) for item in manager.past(10))
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else NONE_YET


def _row(item: PastRun, ticked: list[Any], shown: object) -> str:
    run_id, name = html.escape(item.id), html.escape(item.name if item.name != item.id else item.id.rpartition("-")[0] or item.id)
    colour = charts.BLUE if item.id == shown else dict(zip(ticked, charts.OVERLAYS, strict=False)).get(item.id, "transparent")
    full = item.id not in ticked and None not in [*ticked, *[None] * (len(charts.OVERLAYS) - len(ticked))]
    tick = f'<input type="checkbox" id="tick-{run_id}" data-tick="{run_id}" aria-label="Lay {name} over the chart"'
    tick += f"{' checked' if item.id in ticked else ''}{' disabled' if full else ''}>"
    abilities = {"resume": item.state != "finished", "extend": True, "restart": item.state == "diverged"} if item.resumable else {}
    can = "" if item.state in LIVE else " ".join(["manage", *(ability for ability, fits in abilities.items() if fits)])
    cells = (
        f'{tick} <span class="swatch" style="background:{colour}"></span>',
        f'<a href="?run={run_id}" data-run="{run_id}" title="{run_id}">{name}</a>',
        f"{item.step:,} of {item.max_steps:,}",
        "" if item.best_val_loss is None else f"{item.best_val_loss:.3f}{PER.get(item.tokenizer, '')}",
        f'<span title="{html.escape(item.error)}">{html.escape(item.state)}</span>',
    )
    current = ' aria-current="true"' if item.id == shown else ""
    return f'<tr data-can="{can}"{current}>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
