"""Start the page. Run `python app.py`, or let a Hugging Face Space do it."""

import os
import signal

from minigpt.system import home, prepare_environment, prepare_page

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the page is served there is nothing to save

prepare_environment()  # first: torch and gradio read the environment when they are imported
prepare_page()

from minigpt.runs import RunManager  # noqa: E402
from minigpt.ui.page import build, serve  # noqa: E402

manager = RunManager(home())
demo = build(manager)

if __name__ == "__main__":
    serve(demo, manager)
