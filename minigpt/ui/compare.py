"""Two files side by side: their settings, how far their weights are apart, both curves on one axis, what both write from one prompt."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from minigpt.errors import CheckpointError
from minigpt.foreign import open_any
from minigpt.header import clean
from minigpt.history import curves
from minigpt.inspection import Report, inspect_safely
from minigpt.inspection.measuring import relative_changes
from minigpt.runs import RunManager
from minigpt.ui import charts, pages, shelf, xray_charts
from minigpt.ui.refusals import refusing
from minigpt.ui.xray import SHOWN


def build(manager: RunManager, chosen: gr.Textbox, upload: gr.File, writing: list[gr.components.Component]) -> gr.Accordion:
    """Lay out the comparison of the chosen file with another; `writing` holds prompt, length, temperature and seed.

    Returns:
        the whole, to be folded when another file is chosen.
    """
    part: gr.Accordion
    with gr.Accordion("Compare with another", open=False, elem_id="compare-part") as part:
        with gr.Row():
            other = gr.Dropdown([], label="Another saved checkpoint", allow_custom_value=True, elem_id="other")
            other_upload = gr.File(label="or drop a file", height=120, elem_id="other-upload")
        go = gr.Button("Compare", elem_id="compare")
        with gr.Column(visible=False, elem_id="compared") as result:
            with gr.Row():
                settings = gr.HTML(elem_id="differences")  # gradio's own table stays empty when its column is shown with it
                changes = gr.HTML(elem_id="changes")
            curve = gr.Plot(show_label=False, visible=False, elem_id="both-curves")
            with gr.Row():
                texts = [gr.Textbox(label="Text", lines=6, interactive=False, elem_id=f"text-{name}") for name in "ab"]

    def compare(
        chosen: str, upload: str | None, other: str | None, other_upload: str | None, prompt: str, length: int, temperature: float, seed: int | None
    ) -> Iterator[list[Any]]:
        """Yield what differs, then the texts as both write them."""
        options = (prompt or "", length, temperature, seed or 0)
        with refusing("Cannot compare"):
            shelf.check_wish(*options)
            if not (second := shelf.UPLOADED if other_upload else other):
                raise CheckpointError("choose another saved checkpoint to compare with, or drop a file")
            paths = shelf.path_of(manager, chosen, upload), shelf.path_of(manager, second, other_upload)
            names = [shelf.title(manager, id) for id in (chosen, second)]
            reports = [inspect_safely(path) for path in paths]
            drawn = {f"{mark}: {name}": curves(report.metadata.get("series")) for mark, name, report in zip("ab", names, reports, strict=True)}
            yield [
                gr.Column(visible=True),
                _as_html(heading(*reports), differences(*map(facts, reports)), "nothing"),
                _as_html("Change of each tensor, ‖a − b‖ / ‖b‖", changes_table(relative_changes(*paths)), "no name and shape is in both"),
                gr.Plot(charts.as_plot(xray_charts.two_runs_figure(drawn)), visible=any(drawn.values())),
                *(gr.Textbox("", label=label) for label in drawn),
            ]
            pair = itertools.zip_longest(*(_text(path, *options) for path in paths))
            last = ["", ""]
            for count, grown in enumerate(pair):
                last = [new if new is not None else old for new, old in zip(grown, last, strict=True)]
                if count % 8 == 0:
                    yield [*[gr.skip()] * 4, *last]
            yield [*[gr.skip()] * 4, *last]

    # Gradio's list fails when it gets shorter while it is open: nobody may open it between the question and the answer.
    asked = part.expand(None, None, other, js="() => ({ __type__: 'update', interactive: false })", api_visibility="private")
    asked.then(lambda: gr.Dropdown([(item.title, item.id) for item in shelf.saved(manager)], interactive=True), None, other, **SHOWN)
    inputs = [chosen, upload, other, other_upload, *writing]
    go.click(pages.while_shown(compare), inputs, [result, settings, changes, curve, *texts], trigger_mode="always_last", concurrency_limit=1, **SHOWN)
    return part


def _as_html(title: str, frame: pd.DataFrame, none: str) -> str:
    return f"<p>{title}: {none}</p>" if frame.empty else f"<p>{title}</p>{frame.to_html(index=False, border=0, escape=True)}"


def _text(path: Path, *options: Any) -> Iterator[str]:
    """Yield what a file's model writes, or why it cannot; the other one's text is worth showing all the same."""
    try:
        yield from shelf.written(open_any(path), *options)
    except CheckpointError as error:
        yield f"({error})"


def facts(report: Report) -> dict[str, object]:
    """Return what two files can differ in beside their weights: how far each got, its size, its settings."""
    loss = None if report.val_loss is None else f"{report.val_loss:.3f}"
    corpus = report.metadata.get("corpus")
    text = corpus.get("name") if isinstance(corpus, dict) else None
    return {"step": report.step, "validation loss": loss, "text": text, "parameters": f"{report.parameters:,}", **report.config}


def heading(a: Report, b: Report) -> str:
    """Return what stands over the differences."""
    corpora = [corpus for report in (a, b) if isinstance(corpus := report.metadata.get("corpus"), dict) and "sha256" in corpus]
    differ = len(corpora) == 2 and corpora[0]["sha256"] != corpora[1]["sha256"]
    return "What differs" + (": losses on different texts cannot be compared" if differ else "")


def differences(a: dict[str, object], b: dict[str, object]) -> pd.DataFrame:
    """Return what is not the same in both."""
    rows = [
        [clean(name, 60), *(clean(str(config[name]), 100) if config.get(name) is not None else "" for config in (a, b))]
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    ]
    return pd.DataFrame(rows, columns=["", "a", "b"])


def changes_table(changes: Any) -> pd.DataFrame:
    """Return how far each tensor is from the other file's, the largest first, before them what is no number or was not read."""
    ranked = sorted(changes, key=lambda change: -math.inf if change[1] is None or math.isnan(change[1]) else -change[1])
    return pd.DataFrame([[name, "not read" if value is None else f"{value:.4g}"] for name, value in ranked], columns=["tensor", "relative change"])
