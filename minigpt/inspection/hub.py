"""What a model on the Hugging Face Hub is made of, from two small requests: the header of its weights and its config.json. No weight is fetched.

Asks the Hub alone, follows it only to hosts of its own, sends no login, and bounds what it reads in bytes and in time. What came is looked at in a
child process, as an upload is.
"""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from urllib.parse import urljoin, urlsplit

import requests
from urllib3.exceptions import HTTPError

from minigpt.errors import CheckpointError
from minigpt.header import MAX_HEADER_BYTES
from minigpt.inspection.opening import inspect_parts
from minigpt.inspection.recognise import MAX_CONFIG_BYTES
from minigpt.inspection.report import Report
from minigpt.system import is_offline

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
PATIENCE_S = 5.0  # for all of it: neither a server that dribbles nor a name that is looked for in vain may keep a person waiting
MAX_REDIRECTS = 5
_STORES = re.compile(r"([a-z0-9-]+\.)*hf\.co")  # hosts on which the Hub keeps large files


def inspect_hub(name: str, hub: str = "https://huggingface.co") -> Report:
    """Report what is in `model.safetensors` of a model on the Hub such as "openai-community/gpt2", by its header alone.

    Raises:
        CheckpointError: there is no such name, no such file or no network, or the header is refused; one sentence for a person.
    """
    if not NAME.fullmatch(name):
        raise CheckpointError("A model on the Hub is called owner/name, such as openai-community/gpt2.")
    if is_offline():
        raise CheckpointError("Looking at the Hub needs the network, which MINIGPT_OFFLINE switches off.")
    files: Future[tuple[tuple[bytes, int], bytes]] = Future()  # the beginning of the weights and their whole size; config.json
    # On a thread, which ends by itself, as nothing else bounds how long the system looks for a host: without a network that took 20 s.
    threading.Thread(target=_fetch_both, args=(name, hub, files), name="hub", daemon=True).start()
    try:
        (found, size), beside = files.result(PATIENCE_S)
    except (TimeoutError, requests.RequestException, HTTPError, ValueError) as error:
        raise CheckpointError(f"The Hub could not be reached ({type(error).__name__}); try again, or open a downloaded file.") from None
    return inspect_parts("model.safetensors", size, {0: found}, beside)


def _fetch_both(name: str, hub: str, files: "Future[tuple[tuple[bytes, int], bytes]]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    try:
        with requests.Session() as session:
            session.auth = lambda request: request  # else requests would send what a netrc file holds for this host
            weights = _fetch(session, hub, f"/{name}/resolve/main/model.safetensors", 8 + MAX_HEADER_BYTES, deadline, _has_header)
            if weights is None:
                raise CheckpointError("This model has no model.safetensors: its weights are split into several files, or are in another format.")
            beside = _fetch(session, hub, f"/{name}/resolve/main/config.json", MAX_CONFIG_BYTES + 1, deadline)
        files.set_result((weights, beside[0] if beside else b""))
    except Exception as error:  # noqa: BLE001  raised again where the result is waited for
        files.set_exception(error)


def _has_header(data: bytearray) -> bool:
    length = int.from_bytes(data[:8], "little")
    return len(data) >= 8 + (length if length <= MAX_HEADER_BYTES else 0)  # more is refused whatever follows


def _fetch(
    session: requests.Session, hub: str, path: str, most: int, deadline: float, is_enough: Callable[[bytearray], bool] = lambda _: False
) -> tuple[bytes, int] | None:
    """Return the beginning of a file, at most `most` bytes, and its whole size; None if there is no such file."""
    url, headers = hub + path, {"Range": f"bytes=0-{most - 1}", "Accept-Encoding": "identity"}
    for _ in range(MAX_REDIRECTS):
        there = urlsplit(url)
        if not url.startswith(hub + "/") and not (there.scheme == "https" and _STORES.fullmatch(there.netloc)):
            raise CheckpointError("The Hub sent on to a host that is not its own; it was not followed.")
        with session.get(url, headers=headers, timeout=PATIENCE_S, stream=True, allow_redirects=False) as answer:
            if answer.is_redirect:
                url = urljoin(url, answer.headers["Location"])
                continue
            if answer.status_code == requests.codes.not_found and answer.headers.get("X-Error-Code") != "RepoNotFound":
                return None
            if answer.status_code in (401, 403, 404):
                raise CheckpointError("There is no public model of this name on the Hub: it is missing, private, or asks for a login.")
            answer.raise_for_status()
            data = bytearray()
            while chunk := answer.raw.read1(1 << 16, decode_content=False):  # whatever has come, so that the deadline is looked at
                data += chunk
                if time.monotonic() > deadline:
                    raise requests.Timeout
                if len(data) >= most or is_enough(data):
                    break
            told = answer.headers.get("Content-Range", "").rpartition("/")[2] or answer.headers.get("Content-Length", "")
            return bytes(data[:most]), int(told)
    raise requests.TooManyRedirects
