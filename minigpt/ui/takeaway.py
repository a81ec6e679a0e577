"""What can be done with a chosen file: download it, also in forms that others read, and delete one of ours."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from minigpt.export import export
from minigpt.runs import RunManager
from minigpt.ui import pages
from minigpt.ui.refusals import refusing
from minigpt.ui.shelf import path_of
from minigpt.ui.xray import SHOWN

FORMS = [
    ("the file as it is", ""),
    ("a folder for transformers (zip)", "transformers"),
    ("plain safetensors, config, tokenizer (zip)", "safetensors"),
]
# The browser's own question, which no script of the page can answer for the visitor.
CONFIRM = "chosen => confirm(`Delete ${chosen} for good?`) ? chosen : ''"


def build(manager: RunManager, chosen: gr.Textbox, upload: gr.File) -> tuple[gr.File, gr.Button, Any]:
    """Lay out the part and wire the downloads; return the file to download, the button that deletes, whose click is the tab's business, and the
    event that prepares."""
    with gr.Accordion("Take it with you", open=False, elem_id="take-part"):
        form = gr.Radio(FORMS, value="", label="Format", elem_id="form")
        with gr.Row():
            go = gr.Button("Prepare the download", elem_id="prepare")
            delete = gr.Button("Delete this checkpoint…", variant="stop", elem_id="delete-file")
        ready = gr.File(label="Download", interactive=False, visible=False, elem_id="ready")

    def prepare(chosen: str, upload: str | None, form: str) -> Iterator[Any]:
        """Yield the file to download; gradio keeps a copy, so that ours is gone at once."""
        yield gr.skip()  # at once: what has not yielded yet cannot be cancelled
        with refusing("Cannot be written in this form"), tempfile.TemporaryDirectory() as place:
            yield gr.File(str(packed(path_of(manager, chosen, upload), chosen, form, Path(place))), visible=True)

    preparing = go.click(pages.while_shown(prepare), [chosen, upload, form], ready, concurrency_limit=1, **SHOWN)
    return ready, delete, preparing


def packed(path: Path, chosen: str, form: str, place: Path) -> Path:
    """Write what is to be downloaded into a folder, under a name that tells what it is.

    Raises:
        CheckpointError: the file cannot be written in this form.
    """
    name = re.sub(r"\W+", "-", chosen)
    if form not in ("transformers", "safetensors"):
        return Path(shutil.copy(path, place / f"{name}{path.suffix}"))
    export(path, place / name, "transformers" if form == "transformers" else "safetensors")
    return Path(shutil.make_archive(str(place / f"{name}-{form}"), "zip", place, name))
