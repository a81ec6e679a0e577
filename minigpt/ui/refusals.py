"""How the page says no. Gradio renders what it shows as markup, so what a person typed or a file holds is escaped."""

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager

import gradio as gr

from minigpt.config import TransformerConfig
from minigpt.errors import MiniGPTError

LABELS = {name: str(field.title) for name, field in TransformerConfig.model_fields.items()}
SAID = {**LABELS, "prompt": "Prompt", "max_tokens": "Length", "temperature": "Boldness"}
# Where a sentence speaks of a setting: a name of several words anywhere, one that is a word of the language only as "seed is".
SETTING = re.compile("|".join(rf"\b{name}\b" if "_" in name else f"^{name}(?= is )" for name in SAID), re.MULTILINE)


def sentence(error: MiniGPTError | OSError) -> str:
    """Say what is wrong, without the place on this machine's disk."""
    return f"the system refused: {error.strerror or type(error).__name__}" if isinstance(error, OSError) else str(error)


def markup(error: MiniGPTError | OSError) -> str:
    """Say what is wrong as markup, each problem on its line, naming a setting by its label on the page."""
    return html.escape(SETTING.sub(lambda found: SAID[found[0]], sentence(error))).replace("\n", "<br>")


@contextmanager
def refusing(title: str) -> Iterator[None]:
    """Show as a message what is refused inside, and end the event."""
    try:
        yield
    except (MiniGPTError, OSError) as error:
        raise gr.Error(markup(error), duration=20, title=title, print_exception=False) from None


@contextmanager
def warning(title: str) -> Iterator[None]:
    """Show as a message what is refused inside and let the event go on: gradio writes "Error" over all that an event which failed would fill."""
    try:
        yield
    except (MiniGPTError, OSError) as error:
        gr.Warning(markup(error), duration=20, title=title)
