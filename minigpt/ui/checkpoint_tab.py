"""The Checkpoint tab: saved models, a drop zone, files that stay where they are; what is inside the chosen one; text written by it.

Files are looked at in a child process by `inspection`, never run; only weights that fit our model are put into one.
"""

import base64
import html
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from minigpt.checkpoint import Checkpoint
from minigpt.config import TEMPERATURE
from minigpt.errors import CheckpointError, MiniGPTError
from minigpt.foreign import open_any
from minigpt.generate import first_prompt, unknown
from minigpt.header import clean, number
from minigpt.history import curves
from minigpt.inspection import Report, inspect_parts, inspect_safely
from minigpt.inspection.hub import inspect_hub
from minigpt.inspection.opening import MAX_UPLOAD_MB
from minigpt.runs import KINDS, RunManager
from minigpt.ui import charts, compare, feed, pages, shelf, takeaway, words, xray, xray_charts
from minigpt.ui.form import unjudged
from minigpt.ui.refusals import refusing, warning
from minigpt.ui.shelf import MAX_NEW_TOKENS, MAX_PROMPT, UPLOADED, USUAL_LENGTH, id_of, listed, path_of, saved, written
from minigpt.ui.xray import SHOWN, parts_table, settings_table, table, tensors_table

DETAILS = 21  # components that a chosen file fills
FIRST_TEXT_S = 1.5
MAX_SENT = 64 << 20  # characters that the page's script may send of a file that stays where it is
ANY_FILE = """<label for="any-file">or look at a file of any size; its weights stay on your disk</label><input type="file" id="any-file">"""
NO_VOCABULARY = "It holds no vocabulary: its prompt is ids of tokens, such as 1 2 3, and so is its text."

UNTRAINED = "These are the words of step 0, before it learnt anything. If that was the best of its run by validation, the run's last knows its text."


def build(manager: RunManager, tab: gr.Tab) -> tuple[gr.Dataframe, list[gr.components.Component]]:
    """Lay out the tab inside the current gr.Tab and wire its events.

    Returns:
        what other parts of the page fill: the list, and what is shown of a chosen file, in the order of `shown`.
    """
    gr.HTML("<p>Look inside a saved model: what it is, how it was trained, what it writes. Files are looked at, never run.</p>", elem_classes="lead")
    with gr.Row():
        with gr.Column(scale=5, min_width=260):
            widths = ["236px", "78px", "62px", "98px", "72px", "122px"]
            listing = table(listed(manager), "Saved checkpoints: choose one", max_height=260, elem_id="checkpoints", column_widths=widths)
            with gr.Row():
                hub = gr.Textbox(
                    label="or a model's name on the Hugging Face Hub", placeholder="openai-community/gpt2", max_lines=1, elem_id="hub", scale=4
                )
                ask = gr.Button("Look it up", elem_id="ask-hub", scale=1, min_width=110)
        with gr.Column(scale=2, min_width=260):
            upload = gr.File(label="or drop a .safetensors, .pt or .ckpt", height=180, elem_id="upload")
            gr.HTML(f"<p>At most {MAX_UPLOAD_MB} MB. An upload is looked at only, and removed after an hour.</p>", elem_classes="small")
            script = (Path(__file__).parent / "peek.js").read_text(encoding="utf-8")
            peek = gr.HTML("", html_template=ANY_FILE, js_on_load=script, elem_id="peek", elem_classes="small")
    chosen = gr.Textbox("", visible=False)
    verdict = gr.HTML("", elem_id="verdict")
    with gr.Column(visible=False) as inside:
        with gr.Row():
            with gr.Column(scale=4, min_width=260):
                widths = ["126px", "78px", "128px", "86px"]
                config = table(settings_table(None), "Settings", max_height=420, elem_id="config", wrap=True, column_widths=widths)
            with gr.Column(scale=5, min_width=260):
                curve = gr.Plot(charts.as_plot(charts.loss_figure({}, {})), show_label=False, elem_id="curve")
        writing, asked, text, writes = _writing(manager, chosen, upload)
        with gr.Accordion("Parameters by block", open=False, elem_id="parts"):
            blocks = gr.Plot(show_label=False, elem_id="blocks")
            parts = table(parts_table(None), "Parameters by block")
        with gr.Accordion("Samples kept in the file", open=False, elem_id="kept"):
            kept = table(_kept({}), "Samples", wrap=True, max_height=420)
        with gr.Accordion("Tensors", open=False, elem_id="tensors"):
            tensors, measuring, work = xray.build_values(manager, chosen, upload)
        with gr.Column() as with_file:
            compared = compare.build(manager, chosen, upload, asked)
            ready, doomed, prepares = takeaway.build(manager, chosen, upload)
    told = [chosen, verdict, inside, config, curve, parts, kept, tensors, writing, asked[0], text, blocks]
    details = [*told, *measuring, with_file, compared, ready, doomed]

    def choose(event: gr.SelectData) -> list[Any]:
        """Open the row that was clicked."""
        return open_id(manager, id_of(manager, *event.row_value[:2]))

    def arrive(current: str) -> list[Any]:
        """Fill the list, and show the newest checkpoint to a visitor who has chosen none."""
        return [listed(manager), *([gr.skip()] * len(details) if current else open_newest(manager))]

    # Multiple: always_last would open the first of two quick clicks again, and once would drop the second.
    latest: dict[str, Any] = {"trigger_mode": "multiple", "cancels": [work, writes, prepares], **SHOWN}
    listing.select(choose, None, details, **latest)
    tab.select(arrive, chosen, [listing, *details], **SHOWN)
    upload.upload(open_upload, upload, details, **latest)
    peek.submit(lambda sent: ["", *open_parts(sent)], peek, [peek, *details], **latest)
    gr.on([ask.click, hub.submit], open_hub, hub, details, **latest)
    doomed.click(lambda id: [*delete(manager, id), listed(manager)], chosen, [*details, listing], js=takeaway.CONFIRM, **latest)
    return listing, details


def _writing(manager: RunManager, chosen: gr.Textbox, upload: gr.File) -> tuple[gr.Accordion, list[gr.components.Component], gr.Textbox, Any]:
    """Lay out what makes the chosen model write; return the whole, what it asks for (the prompt first), the text, and the event that writes."""
    with gr.Accordion("Write with it", open=True, elem_id="write-part") as writing:
        prompt = gr.Textbox(label="Prompt", placeholder="the start of a text; empty takes the model's usual one", lines=2, elem_id="prompt")
        with gr.Row():
            length = unjudged(gr.Slider(10, MAX_NEW_TOKENS, USUAL_LENGTH, step=10, label="Length", info="Tokens to write.", elem_id="length"))
            boldness = "Temperature: 0 takes the likeliest each time."
            temperature = unjudged(gr.Slider(0, 1.5, TEMPERATURE, step=0.1, label="Boldness", info=boldness, elem_id="temperature"))
            seed = unjudged(gr.Number(0, label="Seed", info="Same seed, same text.", elem_id="seed"))
        go = gr.Button("Write", variant="primary", elem_id="write")
        text = gr.Textbox(label="Text", lines=8, max_lines=16, interactive=False, buttons=["copy"], elem_id="text")
    asked: list[gr.components.Component] = [prompt, length, temperature, seed]

    def write_text(chosen: str, upload: str | None, prompt: str, length: int, temperature: float, seed: int | None) -> Iterator[str]:
        """Yield the text as it grows."""
        yield prompt or ""  # at once: what has not yielded yet cannot be cancelled
        with refusing("Cannot write"):
            checkpoint = open_any(path_of(manager, chosen, upload))
            text = written(checkpoint, prompt or "", length, temperature, seed or 0)
            ids = checkpoint.tokenizer.encode((prompt or "")[:MAX_PROMPT]) if checkpoint.tokenizer else []
            if checkpoint.tokenizer and (remark := unknown(checkpoint.tokenizer, ids)):
                gr.Info(f"{html.escape(remark)}.")
            for count, grown in enumerate(text, start=1):
                if count % 4 == 0 or count == length:
                    yield grown

    writes = go.click(pages.while_shown(write_text), [chosen, upload, *asked], text, concurrency_limit=2, **SHOWN)
    return writing, asked, text, writes


def open_id(manager: RunManager, chosen: str) -> list[Any]:
    """Show a listed checkpoint."""
    return _or_refusal(chosen, lambda: shown_details(chosen, shelf.find(manager, chosen).path, shelf.title(manager, chosen)))


def open_best(manager: RunManager, run_id: str) -> list[Any]:
    """Show a run's best checkpoint, or its last one if the best has learnt nothing.

    Raises:
        CheckpointError: it has none.
    """
    if run_id == "example":
        return open_id(manager, "example/example")
    if items := [item for kind in KINDS if (item := manager.checkpoint(run_id, kind))]:
        return open_id(manager, shelf.first(items).id)
    raise CheckpointError(f"run {clean(run_id, 60)} has no checkpoint, or none any more: choose one from the list")


def open_newest(manager: RunManager) -> list[Any]:
    """Show the best checkpoint of this process's latest run, else the newest one, else the example."""
    latest = manager.latest.id if manager.latest else ""
    items = [item for item in saved(manager) if item.run == latest] or saved(manager)
    return open_id(manager, shelf.first(items).id) if items else [gr.skip()] * DETAILS


def open_upload(path: str | None) -> list[Any]:
    """Show an uploaded file, or say in one sentence why not."""
    return _or_refusal(path, lambda: shown_details(UPLOADED, Path(path), "your upload")) if path else [gr.skip()] * DETAILS


def open_parts(sent: str | None) -> list[Any]:
    """Show a file that stays on the visitor's disk, from those of its bytes that the page's script has sent."""
    try:
        told = json.loads(sent if sent and len(sent) <= MAX_SENT else "")
        name, size = clean(str(told["name"])), int(told["size"])
        parts = {int(start): base64.b64decode(data, validate=True) for start, data in told["parts"]}
        if not all(0 <= place < 2**53 for place in (size, *parts)):
            raise ValueError("out of bounds")
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return refused(CheckpointError("the page could not read this file: choose it again, or use python -m minigpt inspect FILE"))
    return _or_refusal("", lambda: shown(inspect_parts(name, size, parts), f"{name}, which stayed on your disk"))


def open_hub(name: str | None) -> list[Any]:
    """Show what a model on the Hub is, from its header alone."""
    wanted = (name or "").strip()[:200]
    return _or_refusal("", lambda: shown(inspect_hub(wanted), f"{wanted}, on the Hub"))


def _or_refusal(file: str, show: Callable[[], list[Any]]) -> list[Any]:
    pages.opened(file)  # from now on nothing that is made of another is sent
    try:
        return show()
    except (MiniGPTError, OSError) as error:
        return refused(error)


def delete(manager: RunManager, chosen: str) -> list[Any]:
    """Delete a listed checkpoint and say so; an empty id is that of a visitor who changed their mind."""
    with warning("Cannot delete"):
        if chosen:
            shelf.delete(manager, chosen)
            pages.opened("")
            return _hidden(f'<p class="line">{html.escape(chosen)} was deleted.</p>')
    return [gr.skip()] * DETAILS


def refused(error: MiniGPTError | OSError) -> list[Any]:
    """Say why a file was not opened, and show nothing else of it."""
    said = f"This file cannot be read: {error.strerror or type(error).__name__}." if isinstance(error, OSError) else str(error)
    return _hidden(f'<p class="line wrong">{html.escape(said[:1].upper() + said[1:])}</p>')


def _hidden(line: str) -> list[Any]:
    return ["", line, gr.Column(visible=False), *[gr.skip()] * (DETAILS - 3)]


def shown_details(chosen: str, path: Path, name: str) -> list[Any]:
    """Return what the tab shows of a file that is here and has this name on the page, in the order of what `build` returns.

    Raises:
        CheckpointError: the file cannot be opened, or is one of ours and cannot be used.
    """
    report = inspect_safely(path)
    try:
        checkpoint = open_any(path)  # puts the weights into a model: whoever sees the verdict knows that it can be used
    except CheckpointError as error:
        if report.format == "minigpt":
            raise
        remark = f"Made by {report.made_by}: it can be looked at but not made to write: {error}"
        return shown(report, name, chosen, remark)
    remarks = [*([UNTRAINED] if report.step == 0 else []), *([] if checkpoint.tokenizer else [NO_VOCABULARY]), *checkpoint.notes]
    prompt = first_prompt(checkpoint)
    return shown(report, name, chosen, *remarks, prompt=prompt, text=_first_text(checkpoint, prompt))


def shown(report: Report, name: str, chosen: str = "", *remarks: str, prompt: str = "", text: str = "") -> list[Any]:
    """Return what the tab shows of a report, in the order of what `build` returns.

    Args:
        report: what was found.
        name: what the file is called on the page.
        chosen: its id if the file is here.
        remarks: what more there is to say.
        prompt: what its model wrote from.
        text: what its model wrote; nothing hides the part that writes.
    """
    metadata: dict[str, Any] = report.metadata
    lines = {name: number(loss) for name, loss in feed.baselines(metadata.get("data") or {}).items()}
    step, best_step, best = report.step, metadata.get("best_step"), metadata.get("best_val_loss")
    star = (best_step, best) if isinstance(best_step, int) and isinstance(best, float) else None
    drawn = curves(metadata.get("series"))
    figure = charts.loss_figure(drawn, lines, star, max(step or 1, 1))
    return [
        chosen,
        _verdict(report, remarks, name),
        gr.Column(visible=True),
        settings_table(report),
        gr.Plot(charts.as_plot(figure), visible=bool(drawn)),
        parts_table(report),
        _kept(metadata),
        tensors_table(report),
        gr.Accordion(visible=bool(text)),
        prompt if text else gr.skip(),
        text,
        charts.as_plot(xray_charts.blocks_figure(report.parameters_by_block)),
        *xray.cleared(is_here=bool(chosen)),
        gr.Column(visible=bool(chosen)),
        gr.Accordion(open=False),
        gr.File(None, visible=False),
        gr.Button(visible=chosen not in ("", UPLOADED, "example/example")),
    ]


def _first_text(checkpoint: Checkpoint, prompt: str) -> str:
    """Write a few lines with a model just opened, for at most a moment if it is a large one."""
    began = time.monotonic()
    grown = written(checkpoint, prompt, USUAL_LENGTH)
    *_, text = prompt, *itertools.takewhile(lambda _: time.monotonic() - began < FIRST_TEXT_S, grown)
    return text


def _verdict(report: Report, remarks: tuple[str, ...], name: str) -> str:
    loss = report.val_loss if report.val_loss is not None else report.best_val_loss
    verdict = words.checkpoint_verdict(report.step, loss, report.metadata)
    size = f"{report.parameters:,} parameters · {words.size(report.size_bytes)} · shape {report.fingerprint}"
    small = f"{name} · made by {report.made_by} · {size}"
    rows = "".join(f"<li>{html.escape(clean(line, 300))}</li>" for line in (*report.warnings, *report.notes, *remarks))
    return f'<p class="line">{html.escape(verdict)}</p><p class="small">{html.escape(small)}</p>' + (f'<ul class="small">{rows}</ul>' if rows else "")


def _kept(metadata: dict[str, Any]) -> pd.DataFrame:
    rows = [[str(sample.get("step", ""))[:12], clean(str(sample.get("text", "")), 1000, lines=True)] for sample in metadata.get("samples") or []]
    return pd.DataFrame(rows, columns=["step", "text"])
