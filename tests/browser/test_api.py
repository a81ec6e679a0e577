"""The API for programs, and what signals do to a server whose run is live."""

import contextlib
import json
import secrets
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import requests
from gradio_client import Client
from gradio_client.exceptions import AppError

from browser.conftest import LIMIT_S, LONG, TINY, Server, ServerFactory, wait_until
from minigpt.checkpoint import read_checkpoint

SMALL = {**TINY, "max_steps": 40, "log_interval": 1, "eval_interval": 20}


def refused(server: Server, *values: Any, name: str = "train") -> str:
    """The sentence with which a call is refused; no run may have come of it."""
    folders = server.folders()
    with pytest.raises((AppError, ValueError)) as error:
        server.client.submit(*values, api_name=f"/{name}").result(timeout=LIMIT_S)
    assert server.folders() == folders
    assert not server.view()["live"]
    return str(error.value)


def feed_answer(server: Server, function: str, data: Any) -> requests.Response:
    """Call one of the feed's functions as a page's script does."""
    config = requests.get(server.url + "config", timeout=LIMIT_S).json()
    (number,) = (part["id"] for part in config["components"] if part["props"].get("elem_id") == "feed")
    call = {"session_hash": "x", "component_id": number, "fn_name": function, "data": data}
    return requests.post(server.url + "gradio_api/component_server/", json=call, timeout=LIMIT_S)


def test_only_the_five_documented_functions_are_public(server: Server) -> None:
    api = Client(server.url, verbose=False).view_api(return_format="dict", print_info=False)
    assert set(api["named_endpoints"]) == {"/train", "/stop", "/status", "/checkpoints", "/generate"}
    assert not api["unnamed_endpoints"]


def test_train_streams_a_run_to_its_end(server: Server, short_text: str) -> None:
    views = list(server.run(SMALL, short_text))
    assert len(views) > 1
    assert all(isinstance(view, dict) for view in views)
    assert len({view["run"] for view in views}) == 1
    curve: list[int] = []
    for view in views:
        part = view["series"]["train"]
        assert part["i"] == len(curve)
        curve += part["x"]
    assert curve == list(range(1, 41))
    assert not views[-1]["live"]
    assert views[-1]["state"] == "finished"
    assert [sample["step"] for view in views for sample in view["samples"]][-1] == 40


def test_stop_ends_a_run_and_is_harmless_without_one(server: Server, short_text: str) -> None:
    assert server.call("stop") == {"run": None, "state": "idle"}
    job = server.run({**TINY, **LONG}, short_text)
    run = server.wait_for_step(10)["run"]
    assert server.call("stop") == {"run": run, "state": "stopping"}
    assert job.result(timeout=LIMIT_S)["run"] == run
    assert server.view()["state"] == "stopped"


def test_two_starts_at_once_make_one_run(server: Server, short_text: str) -> None:
    folders = server.folders()
    jobs = [server.client.submit("quick", {**TINY, **LONG}, short_text, api_name="/train") for _ in range(3)]
    wait_until(lambda: sum(job.done() for job in jobs) == 2, "two refusals")
    assert sum("is training (" in str(job.exception()) for job in jobs if job.done()) == 2
    assert len(server.folders() - folders) == 1
    assert server.view()["live"]


def test_closing_the_stream_does_not_stop_the_run(server: Server, short_text: str) -> None:
    job = server.run({**TINY, **LONG}, short_text)
    step = server.wait_for_step(10)["step"]
    job.cancel()
    assert server.wait_for_step(step + 100)["live"]


def test_checkpoints_lists_what_generate_can_use(server: Server, short_text: str) -> None:
    run = list(server.run(SMALL, short_text))[-1]["run"]
    found = {item["id"]: item for item in server.call("checkpoints")}
    assert {f"{run}/best", f"{run}/last", "example/example"} <= set(found)
    assert found[f"{run}/last"]["step"] == 40
    assert found[f"{run}/last"]["val_loss"] > 0
    assert set(found["example/example"]) == {"id", "run", "kind", "step", "val_loss", "size_bytes"}

    text = server.call("generate", f"{run}/best", "ROMEO:", 20, 0.8, 3)
    assert text.startswith("ROMEO:")
    assert len(text) > len("ROMEO:")
    assert server.call("generate", f"{run}/best", "ROMEO:", 20, 0.8, 3) == text
    assert server.call("generate", f"{run}/best", "ROMEO:", 20, 0.8, 4) != text
    assert server.call("generate", f"{run}/best", "ROMEO:", 20, 0, 1) == server.call("generate", f"{run}/best", "ROMEO:", 20, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("../../etc/passwd",), "no longer there"),
        (("example/example", "x", 0), "max_tokens is 0; it must be a whole number from 1 to 400"),
        (("example/example", "x", True), "max_tokens is True"),
        (("example/example", "x", 10, -1), "temperature is -1; it must be a number from 0 to 5"),
        (("example/example", "x", 10, 0.8, 2**40), "seed is"),
        (("example/example", "x", "ten"), "max_tokens is ten"),
    ],
)
def test_generate_refuses_what_it_cannot_do(server: Server, arguments: tuple[Any, ...], sentence: str) -> None:
    assert sentence in refused(server, *arguments, name="generate")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_steps": None}, "max_steps is empty; it must be a whole number from 1 to 10,000,000"),
        ({"n_layers": True}, "n_layers is True; it must be a whole number from 1 to 128"),
        ({"batch_size": 2.5}, "batch_size is 2.5; it must be a whole number from 1 to 4,096"),
        ({"learning_rate": 1e308}, "learning_rate is 1e+308; it must be a number from 1e-08 to 10"),
        ({"d_model": 10**30}, "d_model is 1000"),
        ({"d_model": "32"}, "d_model is '32'; it must be a whole number"),
        ({"seed": [1]}, "seed is [1]; it must be a whole number"),
        ({"arch": "mamba"}, "it must be one of gpt2, modern"),
        ({"nonsense": 1}, "nonsense: no such setting; the settings are arch"),
        ({"checkpoint_dir": "/tmp/elsewhere"}, "checkpoint_dir: no such setting"),
        ({"data_path": "/etc/passwd"}, "data_path: no such setting"),
        ({"<img src=x>": 1}, "<img src=x>: no such setting"),
        ({"n_heads": 5}, "n_heads is 5; it must divide d_model, 32 into even parts: try 4"),
        ({"d_model": 8192, "n_layers": 128, "n_heads": 64, "d_ff": 65536}, "parameters; at most 100,000,000 are allowed"),
    ],
)
def test_train_refuses_bad_settings_in_a_sentence(server: Server, settings: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(server, "quick", settings)


@pytest.mark.parametrize("settings", [[1, 2], "max_steps", 7, True])
def test_train_refuses_settings_that_are_no_dictionary(server: Server, settings: Any) -> None:
    assert "settings" in refused(server, "quick", settings)


def test_train_refuses_a_preset_that_does_not_exist(server: Server) -> None:
    assert "it must be one of quick, chars, classic, small: try quick" in refused(server, "huge", {})


def test_a_text_over_the_api_keeps_its_words_and_loses_its_windows_line_ends(server: Server, short_text: str) -> None:
    run = list(server.run(SMALL, short_text.replace("\n", "\r\n")))[-1]["run"]
    assert (server.home / run / "own text.txt").read_text() == short_text


@pytest.mark.parametrize(
    "have",
    [
        None, 7, "", "{", "null", "[]", '"x"', "[" * 5000, "{}" + "x" * 20000, {"run": 1}, json.dumps({"run": "example", "series": 3, "samples": -5}),
        json.dumps({"run": "example", "series": {"train": ["x", None], "val": [0, 10**12], "lr": None}, "samples": 10**9}),
        json.dumps({"run": "example", "series": {"train": [0, -3], "val": [True, True]}, "samples": True}),
        json.dumps({"run": ["example"], "series": {"train": [0, 1.5]}, "samples": "3"}), '{"samples": 1e400}',
    ],
)  # fmt: skip
def test_the_poll_copes_with_garbage(untouched: Server, have: Any) -> None:
    whole = json.loads(feed_answer(untouched, "poll", None).json())
    answer = feed_answer(untouched, "poll", have)
    assert answer.ok, answer.text[:300]
    view = json.loads(answer.json())
    assert view["run"] == "example"
    for name, part in view["series"].items():
        assert len(part["x"]) == len(part["y"]), name
        assert 0 <= part["i"] <= whole["series"][name]["i"] + len(whole["series"][name]["x"]), name


def test_the_feeds_other_functions_answer_before_any_run(untouched: Server) -> None:
    assert "No run yet" in feed_answer(untouched, "log_table", None).json()
    assert feed_answer(untouched, "csv", {"x": 1}).json() == ""
    assert not feed_answer(untouched, "view", None).ok


class Press:
    """A button of the page pressed without a page: what the server sends back is read on a thread, as the page's stream would be."""

    def __init__(self, server: Server, button: str, values: Sequence[Any] | None = None) -> None:
        """Press it with what its inputs hold on a page just loaded, or with the first `values` instead."""
        config = requests.get(server.url + "config", timeout=LIMIT_S).json()
        parts = {part["id"]: part["props"] for part in config["components"]}
        event = next(e for e in config["dependencies"] if any(parts[i].get("elem_id") == button for i, _ in e["targets"] if i in parts))
        data = [*(values or []), *[parts[number].get("value") for number in event["inputs"]][len(values or []) :]]
        call = {"data": data, "fn_index": event["id"], "session_hash": secrets.token_hex(5), "trigger_id": event["targets"][0][0]}
        requests.post(server.url + "gradio_api/queue/join", json=call, timeout=LIMIT_S).raise_for_status()
        self.messages: list[dict[str, Any]] = []
        self._address = f"{server.url}gradio_api/queue/data?session_hash={call['session_hash']}"
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(requests.RequestException), requests.get(self._address, stream=True, timeout=LIMIT_S) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data:"):
                    self.messages.append(json.loads(line[5:]))

    def wait(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait for so many messages of a kind and return them."""
        found = wait_until(lambda: len(found := [m for m in list(self.messages) if m["msg"] == kind]) >= count and found, f"{count} of {kind}")
        return list(found)


def live_at(server: Server, step: int) -> str:
    """Wait until a run is live and has made this many steps; return its id."""
    return str(wait_until(lambda: (view := server.view())["live"] and view["step"] >= step and view["run"], f"a live run at step {step}"))


def test_however_many_press_train_while_a_run_is_live_all_are_told_and_none_starts_another_later(server: Server, short_text: str) -> None:
    server.run({**TINY, **LONG}, short_text)
    run, folders = live_at(server, 10), server.folders()
    presses = [Press(server, "train") for _ in range(10)]
    for press in presses:
        assert f"run {run} is training" in press.wait("log")[0]["log"]
        assert press.wait("process_completed")[0]["success"]
    server.end_run()
    assert server.view()["run"] == run
    assert server.folders() == folders


def signalled(server: Server, first: int, *more: int) -> int:
    """Send a signal, and more of them while the run is being saved; return the exit status."""
    server.process.send_signal(first)
    for number in more:
        wait_until(lambda: "stopping and saving" in server.log.read_text(), "the shutdown")
        server.process.send_signal(number)
    return server.process.wait(5.0)


def test_a_signal_saves_the_live_run_starts_nothing_of_those_who_wait_and_ends_the_server_well(make_server: ServerFactory) -> None:
    """On one home, so that each server is also a restart, which must find the run as it was left and go on with it."""
    home, run, ended = None, "", 0
    for signals in ((signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)):
        server = make_server(home, afresh=home is None)
        home = server.home
        if run:
            assert {f"{run}/last", f"{run}/best"} <= {item["id"] for item in server.call("checkpoints")}
            Press(server, "resume", [run])
        else:
            server.run({"max_steps": 5000, "log_interval": 1, "eval_interval": 5000})
        run = live_at(server, ended + 10)
        for press in [Press(server, "train") for _ in range(2)]:
            assert f"run {run} is training" in press.wait("log")[0]["log"]
            press.wait("process_completed")
        Press(server, "write", ["example/example", None, "", 400]).wait("process_generating")
        assert signalled(server, *signals) == 0
        assert "Traceback" not in server.log.read_text()
        logged = [event["step"] for event in server.metrics(run) if event["type"] == "log"]
        saved = read_checkpoint(home / run / "last.safetensors")
        ended = saved.step
        assert ended >= logged[-1] - 1
        assert saved.val_loss is not None
        assert saved.metadata["val_step"] <= ended
        assert server.state(run)["state"] == "stopped"
        assert server.folders() == {run}
