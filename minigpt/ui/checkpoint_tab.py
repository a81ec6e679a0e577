"""The Checkpoint tab: a list of saved models and a drop zone; what is inside the chosen one; text written by it.

Files are looked at in a child process by `inspection`, never run; only checkpoints of our own format are put into a model.
"""

import html
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from minigpt.checkpoint import Checkpoint, read_checkpoint
from minigpt.config import UNK, TransformerConfig
from minigpt.errors import CheckpointError
from minigpt.generate import usual_prompt, write
from minigpt.header import clean
from minigpt.history import curves
from minigpt.inspection import Report, inspect_safely
from minigpt.runs import RunManager
from minigpt.saved import SavedCheckpoint, describe
from minigpt.ui import charts, feed, words

UPLOADED = "upload"
MAX_NEW_TOKENS = 400
DETAILS = 11  # components that a chosen file fills
FIRST_TEXT_TOKENS, FIRST_TEXT_S = 60, 1.5
SHOWN: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private"}
LIST_COLUMNS = ["run", "kind", "step", "val. loss", "size", "saved"]


@dataclass
class CheckpointTab:
    """The components that other parts of the page fill: the list, and what is shown of a chosen file, in the order of `shown_details`."""

    listing: gr.Dataframe
    details: list[gr.components.Component]


def build(manager: RunManager, tab: gr.Tab) -> CheckpointTab:
    """Lay out the tab inside the current gr.Tab and wire its events."""
    gr.HTML("<p>Look inside a saved model: what it is, how it was trained, what it writes. Files are looked at, never run.</p>", elem_classes="lead")
    with gr.Row():
        with gr.Column(scale=5, min_width=260):
            widths = ["250px", "80px", "80px", "100px", "85px", "170px"]
            listing = _table(listed(manager), "Saved checkpoints: choose one", max_height=260, elem_id="checkpoints", column_widths=widths)
        with gr.Column(scale=2, min_width=260):
            upload = gr.File(label="or drop a .safetensors, .pt or .ckpt", height=180, elem_id="upload")
            gr.HTML("<p>At most 64 MB. An upload replaces nothing and is removed after an hour.</p>", elem_classes="small")
    chosen = gr.Textbox("", visible=False)
    verdict = gr.HTML("", elem_id="verdict")
    with gr.Column(visible=False) as inside:
        with gr.Row():
            with gr.Column(scale=4, min_width=260):
                widths = ["135px", "115px", "155px", "85px"]
                config = _table(_settings({}), "Settings", max_height=420, elem_id="config", wrap=True, column_widths=widths)
            with gr.Column(scale=5, min_width=260):
                curve = gr.Plot(charts.as_plot(charts.loss_figure({}, {})), show_label=False, elem_id="curve")
        writing, prompt, text = _writing(manager, chosen, upload)
        with gr.Accordion("Parameters by block", open=False, elem_id="parts"):
            parts = _table(_parts(None), "Parameters by block")
        with gr.Accordion("Samples kept in the file", open=False, elem_id="kept"):
            kept = _table(_kept({}), "Samples", wrap=True, max_height=420)
        with gr.Accordion("Tensors", open=False, elem_id="tensors"):
            tensors = _table(_tensors(None), "Tensors", max_height=420)
    details = [chosen, verdict, inside, config, curve, parts, kept, tensors, writing, prompt, text]

    def choose(event: gr.SelectData) -> list[Any]:
        """Open the row that was clicked."""
        return open_id(manager, f"{event.row_value[0]}/{event.row_value[1]}")

    def arrive(current: str) -> list[Any]:
        """Fill the list, and show the newest checkpoint to a visitor who has chosen none."""
        return [listed(manager), *([gr.skip()] * len(details) if current else open_newest(manager))]

    listing.select(choose, None, details, trigger_mode="multiple", **SHOWN)  # always_last would open the first of two quick clicks again
    tab.select(arrive, chosen, [listing, *details], **SHOWN)
    upload.upload(open_upload, upload, details, **SHOWN)
    return CheckpointTab(listing, details)


def _table(content: pd.DataFrame, label: str, **more: Any) -> gr.Dataframe:
    """Make a table to look at; its cells are text, never markup."""
    return gr.Dataframe(content, label=label, interactive=False, datatype="str", buttons=[], **more)


def _writing(manager: RunManager, chosen: gr.Textbox, upload: gr.File) -> tuple[gr.Accordion, gr.Textbox, gr.Textbox]:
    """Lay out what makes the chosen model write; return the whole, the prompt and the text."""
    with gr.Accordion("Write with it", open=True, elem_id="write-part") as writing:
        prompt = gr.Textbox(label="Prompt", placeholder="the start of a text; empty takes the model's usual one", lines=2, elem_id="prompt")
        with gr.Row():
            length = gr.Slider(10, MAX_NEW_TOKENS, 80, step=10, label="Length", info="Tokens to write.", elem_id="length")
            boldness = "Temperature: 0 takes the likeliest each time."
            temperature = gr.Slider(0, 1.5, 0.8, step=0.1, label="Boldness", info=boldness, elem_id="temperature")
            seed = gr.Number(0, label="Seed", info="Same seed, same text.", precision=0, minimum=0, maximum=2**32 - 1, elem_id="seed")
        go = gr.Button("Write", variant="primary", elem_id="write")
        text = gr.Textbox(label="Text", lines=8, max_lines=16, interactive=False, buttons=["copy"], elem_id="text")
    go.click(_writer(manager), [chosen, upload, prompt, length, temperature, seed], text, concurrency_limit=2, **SHOWN)
    return writing, prompt, text


def saved(manager: RunManager) -> list[SavedCheckpoint]:
    """List what can be chosen: all runs' checkpoints, then the example."""
    example = describe(feed.EXAMPLE, "example", "example")
    return [*manager.checkpoints(), *([example] if example else [])]


def listed(manager: RunManager) -> pd.DataFrame:
    """Return the list as a table."""
    rows = [
        [
            item.run,
            item.kind,
            "" if item.step is None else f"{item.step:,}",
            "" if item.val_loss is None else f"{item.val_loss:.3f}",
            f"{item.size_bytes / 1e6:.1f} MB",
            "" if item.kind == "example" else f"{pd.Timestamp(item.saved_at, unit='s'):%d %b %H:%M} UTC",
        ]
        for item in saved(manager)
    ]
    return pd.DataFrame(rows, columns=LIST_COLUMNS)


def find(manager: RunManager, chosen: str) -> SavedCheckpoint:
    """Return the listed checkpoint with this id; an id is never used as a path.

    Raises:
        CheckpointError: there is none.
    """
    run, _, kind = chosen.rpartition("/")
    item = describe(feed.EXAMPLE, "example", "example") if chosen == "example/example" else manager.checkpoint(run, kind)
    if item is not None:
        return item
    raise CheckpointError("this checkpoint is no longer there; choose another from the list")


def open_id(manager: RunManager, chosen: str) -> list[Any]:
    """Show a listed checkpoint."""
    try:
        return shown_details(chosen, find(manager, chosen).path)
    except (CheckpointError, OSError) as error:
        return refused(error)


def open_newest(manager: RunManager) -> list[Any]:
    """Show the best checkpoint of this process's latest run, else the newest one, else the example."""
    latest = manager.latest.id if manager.latest else ""
    items = [item for item in saved(manager) if item.run == latest] or saved(manager)
    return open_id(manager, items[0].id) if items else [gr.skip()] * DETAILS


def open_upload(path: str | None) -> list[Any]:
    """Show an uploaded file, or say in one sentence why not."""
    if not path:
        return [gr.skip()] * DETAILS
    try:
        return shown_details(UPLOADED, Path(path))
    except (CheckpointError, OSError) as error:
        return refused(error)


def refused(error: CheckpointError | OSError) -> list[Any]:
    """Say why a file was not opened, and show nothing else of it."""
    sentence = f"This file cannot be read: {error.strerror}." if isinstance(error, OSError) else str(error)
    line = f'<p class="line wrong">{html.escape(sentence[:1].upper() + sentence[1:])}</p>'
    return ["", line, gr.Column(visible=False), *[gr.skip()] * (DETAILS - 3)]


def shown_details(chosen: str, path: Path) -> list[Any]:
    """Return what the tab shows of a file, in the order of `CheckpointTab.details`.

    Raises:
        CheckpointError: the file cannot be opened.
    """
    report = inspect_safely(path)
    metadata = report.metadata
    prompt, text = gr.skip(), ""
    if report.format == "minigpt":
        checkpoint = read_checkpoint(path)  # puts the weights into a model: whoever sees the verdict knows that it can be used
        remark = "" if checkpoint.tokenizer else "This file holds no vocabulary, so it cannot write."
        if checkpoint.tokenizer:
            prompt = usual_prompt(checkpoint.tokenizer)
            text = _first_text(checkpoint, prompt)
    else:
        remark = f"Made by {report.made_by}: it can be looked at here, not written with, for its vocabulary is not in the file."
    data = metadata.get("data")
    facts = data if isinstance(data, dict) else {}
    lines = {name: facts.get(f"{name}_loss") if isinstance(facts.get(f"{name}_loss"), float) else None for name in ("uniform", "unigram")}
    step, best_step, best = report.step, metadata.get("best_step"), metadata.get("best_val_loss")
    star = (best_step, best) if isinstance(best_step, int) and isinstance(best, float) else None
    drawn = curves(metadata.get("series"))
    figure = charts.loss_figure(drawn, lines, star, max(step or 1, 1))
    return [
        chosen,
        _verdict(report, remark, "your upload" if chosen == UPLOADED else chosen),
        gr.Column(visible=True),
        _settings(report.config),
        gr.Plot(charts.as_plot(figure), visible=bool(drawn)),
        _parts(report),
        _kept(metadata),
        _tensors(report),
        gr.Accordion(visible=bool(text)),
        prompt,
        text,
    ]


def _first_text(checkpoint: Checkpoint, prompt: str) -> str:
    """Write a few lines with a model just opened, for at most a moment if it is a large one."""
    assert checkpoint.tokenizer is not None
    began = time.monotonic()
    grown = write(checkpoint.model, checkpoint.tokenizer, prompt, FIRST_TEXT_TOKENS)
    *_, text = prompt, *itertools.takewhile(lambda _: time.monotonic() - began < FIRST_TEXT_S, grown)
    return text


def _verdict(report: Report, remark: str, name: str) -> str:
    loss = report.val_loss if report.val_loss is not None else report.best_val_loss
    verdict = words.checkpoint_verdict(report.step, loss, report.metadata)
    small = f"{name} · made by {report.made_by} · {report.parameters:,} parameters · {report.size_bytes / 1e6:.2f} MB"
    remarks = [*report.warnings, *report.notes, *([remark] if remark else [])]
    rows = "".join(f"<li>{html.escape(clean(line, 300))}</li>" for line in remarks)
    return f'<p class="line">{html.escape(verdict)}</p><p class="small">{html.escape(small)}</p>' + (f'<ul class="small">{rows}</ul>' if rows else "")


def _settings(config: dict[str, Any]) -> pd.DataFrame:
    fields = TransformerConfig.model_fields
    rows = [
        [clean(name, 60), clean(str(value), 200), (fields[name].title or "") if name in fields else "", "stored"] for name, value in config.items()
    ]
    return pd.DataFrame(rows, columns=["setting", "value", "in words", "origin"])


def _parts(report: Report | None) -> pd.DataFrame:
    blocks = report.parameters_by_block if report else {}
    total = sum(blocks.values()) or 1
    rows = [[clean(name, 60), f"{count:,}", f"{100 * count / total:.1f} %"] for name, count in blocks.items()]
    return pd.DataFrame(rows, columns=["block", "parameters", "share"])


def _kept(metadata: dict[str, Any]) -> pd.DataFrame:
    samples = metadata.get("samples")
    rows = [
        [str(sample.get("step", ""))[:12], clean(str(sample.get("text", "")), 1000, lines=True)]
        for sample in (samples if isinstance(samples, list) else [])
        if isinstance(sample, dict)
    ]
    return pd.DataFrame(rows, columns=["step", "text"])


def _tensors(report: Report | None) -> pd.DataFrame:
    rows = [
        [tensor.name, " × ".join(map(str, tensor.shape)), tensor.dtype, f"{tensor.size_bytes:,}"]
        for tensor in (report.tensors if report else [])[:1000]
    ]
    return pd.DataFrame(rows, columns=["tensor", "shape", "type", "bytes"])


def opened(manager: RunManager, chosen: str, upload: str | None) -> Checkpoint:
    """Load the chosen file for writing.

    Raises:
        CheckpointError: nothing is chosen, or the file cannot write.
    """
    if not chosen:
        raise CheckpointError("choose a checkpoint from the list first")
    if chosen == UPLOADED and not upload:
        raise CheckpointError("the upload is gone; drop the file again")
    checkpoint = read_checkpoint(Path(upload) if chosen == UPLOADED and upload else find(manager, chosen).path)
    if checkpoint.tokenizer is None:
        raise CheckpointError("this file holds no vocabulary, so it cannot write")
    return checkpoint


def _writer(manager: RunManager) -> Any:
    def write_text(chosen: str, upload: str | None, prompt: str, length: float, temperature: float, seed: float) -> Iterator[str]:
        """Yield the text as it grows."""
        try:
            checkpoint = opened(manager, chosen, upload)
        except (CheckpointError, OSError) as error:
            sentence = f"the file cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise gr.Error(html.escape(sentence), title="Cannot write", print_exception=False) from None
        assert checkpoint.tokenizer is not None
        ids = checkpoint.tokenizer.encode((prompt or "")[:2000])
        if unknown := ids.count(UNK):
            gr.Info(f"{unknown} of the prompt's {len(ids)} tokens are not in this model's vocabulary; it reads them as <unk>.".replace("<", "&lt;"))
        start = (prompt or "")[:2000] or usual_prompt(checkpoint.tokenizer)
        text = write(checkpoint.model, checkpoint.tokenizer, start, int(length or 80), temperature=float(temperature or 0.0), seed=int(seed or 0))
        for count, grown in enumerate(text, start=1):
            if count % 4 == 0 or count == int(length or 80):
                yield grown

    return write_text
