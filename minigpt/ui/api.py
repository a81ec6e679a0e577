"""What programs may call over the page's API: the same engine as the page, with plain JSON in and out.

Every function has a return annotation; gradio sends nothing from one that has none.
"""

from collections.abc import Iterator
from typing import Any

import gradio as gr
from gradio.events import api as gradio_api

from minigpt.config import TEMPERATURE
from minigpt.errors import ConfigError, DataError, MiniGPTError
from minigpt.foreign import open_any
from minigpt.presets import DEFAULT_PRESET
from minigpt.runs import RunManager
from minigpt.ui import feed, form, shelf, train_tab
from minigpt.ui.refusals import sentence
from minigpt.ui.shelf import USUAL_LENGTH


def refusal(error: MiniGPTError | OSError) -> gr.Error:
    """Turn an error into the API's answer, for programs: unlike on the page, nothing renders it."""
    return gr.Error(sentence(error), print_exception=False)


class Api:
    """The page's functions for programs."""

    def __init__(self, manager: RunManager) -> None:
        self._manager = manager

    def train(self, preset: str = DEFAULT_PRESET, settings: dict[str, Any] | None = None, text: str = "") -> Iterator[dict[str, Any]]:
        """Start a run and yield what is new about it until it ends; closing the stream does not stop the run.

        Args:
            preset: quick, chars, classic or small.
            settings: settings that differ from the preset, by name.
            text: a text of your own; empty means Shakespeare.
        """
        try:
            if settings is not None and not isinstance(settings, dict):
                raise ConfigError(f'settings is {str(settings)[:40]}; it must be an object of settings by name: try {{"max_steps": 100}}')
            if not isinstance(text, str):
                raise DataError(f"text is {str(text)[:40]}; it must be text: leave it empty for Shakespeare")
            own = train_tab.own_text(train_tab.OWN, text, None) if text else None
            run = self._manager.start(form.checked(preset, settings or {}), preset=preset, text=own)
        except MiniGPTError as error:
            raise refusal(error) from None
        yield from feed.follow(run, lambda: train_tab.PAUSE_S)

    def stop(self) -> dict[str, Any]:
        """Ask the live run to stop; asked again, it skips its final evaluation."""
        run = self._manager.active
        if run is not None:
            run.ask_to_stop()
        return {"run": run.id if run else None, "state": run.state if run else "idle"}

    def status(self) -> dict[str, Any]:
        """Return all that is known of the latest run, or of the example."""
        return feed.view(self._manager, {})

    def checkpoints(self) -> list[dict[str, Any]]:
        """List saved checkpoints, newest run first."""
        return [
            {"id": item.id, "run": item.run, "kind": item.kind, "step": item.step, "val_loss": item.val_loss, "size_bytes": item.size_bytes}
            for item in shelf.saved(self._manager)
        ]

    def generate(self, checkpoint: str, prompt: str = "", max_tokens: int = USUAL_LENGTH, temperature: float = TEMPERATURE, seed: int = 0) -> str:
        """Return text written by a listed checkpoint from a prompt.

        Args:
            checkpoint: an id from `checkpoints`.
            prompt: empty starts as the run's own samples do.
            max_tokens: 1 to 400.
            temperature: 0 to 5; 0 takes the likeliest token each time.
            seed: same seed, same text.
        """
        try:
            opened = open_any(shelf.path_of(self._manager, str(checkpoint), None))
            *_, text = shelf.written(opened, prompt, max_tokens, temperature, seed)
        except (MiniGPTError, OSError) as error:
            raise refusal(error) from None
        return text


def expose(manager: RunManager) -> None:
    """Add the functions to the page being built, as /train, /stop, /status, /checkpoints and /generate."""
    api = Api(manager)
    gradio_api(api.train, api_name="train", concurrency_limit=8)
    gradio_api(api.stop, api_name="stop", queue=False)
    gradio_api(api.status, api_name="status", queue=False)
    gradio_api(api.checkpoints, api_name="checkpoints")
    gradio_api(api.generate, api_name="generate", concurrency_limit=2)
