"""The inside of a chosen file: settings, parameters by block, tensors, and what the values of a tensor are like."""

import html
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from minigpt.errors import CheckpointError
from minigpt.header import clean
from minigpt.inspection import Report, inspect_safely
from minigpt.inspection.measuring import measure_safely
from minigpt.inspection.statistics import TensorStatistics
from minigpt.runs import RunManager
from minigpt.ui import charts, pages, words, xray_charts
from minigpt.ui.refusals import LABELS, refusing
from minigpt.ui.shelf import path_of

SHOWN: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private"}
MAX_ROWS = 1000
LOOK_S = 0.25  # between two looks at how far the measuring is
COLUMNS = ["tensor", "shape", "type", "min", "max", "mean", "std", "zeros", "NaN, inf"]


def table(content: pd.DataFrame, label: str, **more: Any) -> gr.Dataframe:
    """Make a table to look at; its cells are text, never markup."""
    return gr.Dataframe(content, label=label, interactive=False, datatype="str", buttons=[], **more)


def build_values(manager: RunManager, chosen: gr.Textbox, upload: gr.File) -> tuple[gr.Dataframe, list[gr.components.Component], Any]:
    """Lay out the tensors with the buttons that read their values, and wire these.

    Returns:
        the table, what `cleared` fills for another file, and the event that another choice ends.
    """
    with gr.Row():
        measure = gr.Button("Measure the values", elem_id="measure", size="sm")
        stop = gr.Button("Stop measuring", elem_id="stop-measuring", size="sm", visible=False)
    note = gr.HTML("", elem_id="measured", elem_classes="small")
    tensors = table(tensors_table(None), "Tensors: choose one to see its values", max_height=420)
    with gr.Row():
        with gr.Column(min_width=280):
            histogram = gr.Plot(visible=False, show_label=False, elem_id="histogram")
        with gr.Column(min_width=280):
            picture = gr.Plot(visible=False, show_label=False, elem_id="picture")

    def measured(chosen: str, upload: str | None) -> Iterator[list[Any]]:
        """Yield how far the measuring is, and the table as it fills."""
        yield [_note("Reading…"), gr.skip(), gr.Button(visible=True)]  # at once: what has not yielded yet cannot be cancelled
        with refusing("Cannot measure"):
            try:
                yield from _measured(path_of(manager, chosen, upload))
            except (CheckpointError, OSError):
                yield [_note(""), gr.skip(), gr.Button(visible=False)]
                raise

    def show(chosen: str, upload: str | None, event: gr.SelectData) -> Iterator[list[Any]]:
        """Draw the values of the tensor whose row was clicked."""
        with refusing("Cannot measure"), closing(measure_safely(path_of(manager, chosen, upload), str(event.row_value[0]))) as work:
            found = next((tensor for _, tensor in work if tensor), None)
        if found is None or not found.histogram:
            why = "it shares its data with another tensor" if found is None else found.remark or "it has no finite values"
            yield [_note(f"{event.row_value[0]} cannot be drawn: {why}."), gr.Plot(visible=False), gr.Plot(visible=False)]
        else:
            figures = xray_charts.histogram_figure(found), xray_charts.picture_figure(found)
            yield [_note(_in_words(found)), *(gr.Plot(charts.as_plot(figure), visible=True) for figure in figures)]

    work = measure.click(pages.while_shown(measured), [chosen, upload], [note, tensors, stop], concurrency_limit=2, **SHOWN)
    stop.click(lambda: [_note("Stopped."), gr.Button(visible=False)], None, [note, stop], cancels=[work], **SHOWN)
    tensors.select(pages.while_shown(show), [chosen, upload], [note, histogram, picture], trigger_mode="multiple", **SHOWN)
    return tensors, [measure, stop, note, histogram, picture], work


def _measured(path: Path) -> Iterator[list[Any]]:
    report, found, looked = inspect_safely(path, scan=False), dict[str, TensorStatistics](), time.monotonic()
    with closing(measure_safely(path)) as work:
        for share, tensor in work:
            found |= {tensor.name: tensor} if tensor else {}
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                yield [_note(f"Measured {100 * share:.0f} %."), tensors_table(report, found), gr.skip()]
    yield [_note(_summary(found)), tensors_table(report, found), gr.Button(visible=False)]


def cleared(*, is_here: bool) -> list[Any]:
    """Return what the buttons and plots show of a file just chosen; only one whose values are here can be measured."""
    note = "" if is_here else "Only the header is here: the values cannot be measured."
    return [gr.Button(visible=is_here), gr.Button(visible=False), _note(note), gr.Plot(visible=False), gr.Plot(visible=False)]


def _note(text: str) -> str:
    return f"<p>{html.escape(clean(text, 300))}</p>"


def _summary(found: dict[str, TensorStatistics]) -> str:
    odd = sum(tensor.nan + tensor.infinite for tensor in found.values())
    unread = sum(bool(tensor.remark) for tensor in found.values())
    parts = [f"{len(found):,} tensors measured", "all values are finite" if not odd else f"{odd:,} values are not finite"]
    return " · ".join([*parts, *([f"{unread:,} of a kind that is not read"] if unread else [])])


def _in_words(it: TensorStatistics) -> str:
    low, high, mean, std = (words.figure(value or 0.0) for value in (it.minimum, it.maximum, it.mean, it.std))
    return f"{it.name}: from {low} to {high}, mean {mean}, standard deviation {std}, {it.zeros:,} zeros, {it.nan + it.infinite:,} not finite"


def tensors_table(report: Report | None, found: dict[str, TensorStatistics] | None = None) -> pd.DataFrame:
    """Return the tensors of a file, with what was found of their values as far as it is known."""
    rows = []
    for tensor in report.tensors[:MAX_ROWS] if report else []:
        known = (found or {}).get(tensor.name)
        values = [] if known is None else [known.minimum, known.maximum, known.mean, known.std]
        counts = [] if known is None or known.remark else [f"{known.zeros:,}", f"{known.nan:,}, {known.infinite:,}"]
        cells = [*("" if value is None else words.figure(value) for value in values), *counts]
        rows.append([tensor.name, " × ".join(map(str, tensor.shape)), tensor.dtype, *cells, *[""] * (6 - len(cells))])
    return pd.DataFrame(rows, columns=COLUMNS)


def settings_table(report: Report | None) -> pd.DataFrame:
    """Return the settings, each with where it comes from."""
    config, origins = (report.config, report.origins) if report else ({}, {})
    rows = [
        [clean(name, 60), "" if value is None else clean(str(value), 200), LABELS.get(name, ""), origins.get(name, "")]
        for name, value in config.items()
    ]
    return pd.DataFrame(rows, columns=["setting", "value", "in words", "origin"])


def parts_table(report: Report | None) -> pd.DataFrame:
    """Return the parameters by block."""
    blocks = report.parameters_by_block if report else {}
    total = sum(blocks.values()) or 1
    rows = [[clean(name, 60), f"{count:,}", f"{100 * count / total:.1f} %"] for name, count in blocks.items()]
    return pd.DataFrame(rows, columns=["block", "parameters", "share"])
