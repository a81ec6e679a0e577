"""Which file each open page shows, so that what was made of another one is not shown beside it.

A page may ask for something that takes a while, and open another file before it is there; gradio cannot take back what it has not begun.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gradio.context import LocalContext

from minigpt.ui.shelf import UPLOADED

MAX_PAGES = 1000  # that are remembered
_shown: dict[str, str] = {}  # by the session of the page
_lock = threading.Lock()


def opened(file: str) -> None:
    """Note that the page whose event is being handled now shows this file: its id, or the path of an upload."""
    with _lock:
        _shown[_page()] = file
        if len(_shown) > MAX_PAGES:
            del _shown[next(iter(_shown))]


def while_shown(make: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Let a handler, whose first inputs are the chosen file and the upload, yield only for as long as its page shows that file."""

    @functools.wraps(make)
    def handler(chosen: str, upload: str | None, *more: Any) -> Iterator[Any]:
        page, file = _page(), upload if chosen == UPLOADED else chosen
        yield from itertools.takewhile(lambda _: _shown.get(page, file) == file, make(chosen, upload, *more))

    return handler


def _page() -> str:
    return getattr(LocalContext.request.get(None), "session_hash", None) or ""
