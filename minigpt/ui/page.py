"""The whole page: header, feed, tabs; and how it is served."""

import contextlib
import functools
import logging
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import gradio as gr

from minigpt import system
from minigpt.inspection.opening import MAX_UPLOAD_MB
from minigpt.runs import RunManager
from minigpt.ui import api, checkpoint_tab, memory, runs_list, shelf, train_tab
from minigpt.ui.feed import server_functions
from minigpt.ui.refusals import warning

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
UPLOAD_LIVES_S = 3600
UPLOAD = re.compile("[0-9a-f]{64}")  # the folder that gradio makes for each upload, called by its sha256
INTRO = """<header><h1>MiniGPT <span>watch a language model learn</span></h1>
<p>A small language model learns to write, here, in about ten seconds. It starts knowing nothing.</p></header>"""


def theme() -> gr.themes.Base:
    """Return a plain theme with the system's own fonts (nothing is fetched) and a button dark enough for its white text."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.indigo,
        neutral_hue=gr.themes.colors.slate,
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    ).set(
        button_primary_background_fill="#4338ca",
        button_primary_background_fill_hover="#3730a3",
        button_primary_background_fill_dark="#4f46e5",
        button_primary_background_fill_hover_dark="#4338ca",
        button_primary_text_color="white",
    )


def build(manager: RunManager) -> gr.Blocks:
    """Build the page over a run manager; nothing is served yet."""
    demo: gr.Blocks
    with gr.Blocks(title="MiniGPT", analytics_enabled=False, delete_cache=(600, UPLOAD_LIVES_S)) as demo:
        gr.HTML(INTRO, elem_id="intro")
        feed = gr.HTML(
            "",
            html_template="",
            js_on_load=(HERE / "feed.js").read_text(encoding="utf-8"),
            server_functions=[*server_functions(manager), *runs_list.server_functions(manager)],
            elem_id="feed",
        )
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Train", id="train"):
                train = train_tab.build(manager, feed)
                with train.under_chart:
                    runs_list.build(manager, train)
            with gr.Tab("Checkpoint", id="checkpoint") as tab:
                listing, parts = checkpoint_tab.build(manager, tab)

        def show_run(run_id: str) -> list[Any]:
            """Open a run's checkpoint in the Checkpoint tab, or say that there is none and stay."""
            with warning("Nothing to open"):
                return [gr.Tabs(selected="checkpoint"), shelf.listed(manager), *checkpoint_tab.open_best(manager, run_id)]
            return [gr.skip()] * len(opened)

        opened = [tabs, listing, *parts]
        shown: dict[str, Any] = {"js": "() => [window.minigpt.view.run]", "show_progress": "hidden", "api_visibility": "private"}
        run_id = gr.Textbox(visible=False)
        train.look_inside.click(show_run, run_id, opened, **shown)
        writing = train.write_with.click(show_run, run_id, opened, **shown)
        writing.then(None, js="() => setTimeout(() => document.querySelector('#prompt textarea')?.focus(), 100)", api_visibility="private")
        arrive = functools.partial(train_tab.arrive, manager)
        arrived = demo.load(arrive, [train.link, *train.form[:2]], train.form, js=memory.ARRIVE, **train_tab.WARNING)
        arrived.then(None, train.link, None, js=memory.REMEMBER, api_visibility="private")
        api.expose(manager)
    return demo


def sweep_uploads() -> None:
    """Remove what earlier visitors uploaded and a killed server left; gradio removes only what it remembers.

    A person may have chosen a folder with things of their own in it, or somebody else's: only what has gradio's form goes, and only of ours.
    """
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    for entry in folder.iterdir() if system.is_own_folder(folder) else ():
        with contextlib.suppress(OSError):
            if UPLOAD.fullmatch(entry.name) and system.is_own_folder(entry) and time.time() - entry.stat().st_mtime > UPLOAD_LIVES_S:
                shutil.rmtree(entry)


def serve(demo: gr.Blocks, manager: RunManager) -> None:
    """Serve the page until Ctrl-C or SIGTERM; then stop and save the run at work and leave with status 0."""
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # without a network it warns at length of what `corpus` tells in one line
    manager.prepare()
    sweep_uploads()
    asked: list[bool] = []  # not an Event: a signal's handler may interrupt the very wait whose lock it would need
    demo.queue(max_size=32)
    try:
        demo.launch(
            theme=theme(),
            css_paths=[HERE / "style.css"],
            max_file_size=f"{MAX_UPLOAD_MB}mb",
            max_threads=64,
            ssr_mode=False,
            run_history=False,
            enable_monitoring=False,
            show_error=False,
            footer_links=["api"],
            share=False,
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:  # gradio's own, of ports, has no number
        where = os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"), os.environ.get("GRADIO_SERVER_PORT", "7860")
        why = f" ({error.strerror})" if error.errno else ""
        log.error("no page can be served at %r from port %s on%s: look at GRADIO_SERVER_NAME and GRADIO_SERVER_PORT in the environment", *where, why)
        os._exit(2)  # the libraries may still be waking on another thread
    log.info("MiniGPT is at %s; Ctrl-C ends it", demo.local_url)
    system.on_termination(lambda: asked.append(True))
    while not asked:
        time.sleep(0.2)
    if manager.active is not None:
        log.info("stopping and saving the run that is training")
    manager.shutdown()
    sys.stdout.flush()
    os._exit(0)  # demo.close() would wait five seconds for open pages
