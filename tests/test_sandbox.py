import os
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from minigpt import header, system
from minigpt.errors import CheckpointError
from minigpt.inspection import inspect_safely, opening, sandbox
from minigpt.inspection.sandbox import run_child
from minigpt.system import limit_this_process

ONLY_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="the limits are POSIX's")
LIMITED = "import sys; sys.path.insert(0, sys.argv[1]); from minigpt.system import limit_this_process; "


@pytest.fixture
def good(tmp_path: Path) -> Path:
    torch.save({"wte.weight": torch.zeros(4, 2)}, tmp_path / "good.pt")
    return tmp_path / "good.pt"


def run(path: Path, program: str, wall_s: float = 30.0) -> bytes:
    with path.open("rb") as file:
        return run_child(file, [], wall_s, program)


def test_the_child_imports_neither_torch_nor_numpy_and_knows_no_environment(good: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from minigpt.inspection.opening import answer; "
        f"answer({good.name!r}, '1', '1000000'); import os; heavy = {{'torch', 'numpy', 'pydantic', 'pickle5'}} & set(sys.modules); "
        "print(sorted(heavy), sorted(set(os.environ) - {'LC_CTYPE', 'SYSTEMROOT', 'OPENBLAS_NUM_THREADS'}))"
    )
    assert run(good, program).decode().endswith("[] []\n")


def test_a_child_that_never_ends_is_killed_at_the_wall_clock_limit(good: Path) -> None:
    with pytest.raises(CheckpointError, match="longer than"):
        run(good, "while True: pass", wall_s=0.5)
    assert inspect_safely(good).parameters == 8


@ONLY_POSIX
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(LIMITED + "limit_this_process(768 << 20, 768 << 20, 1, 32)\nwhile True: pass", id="too much processor time"),
        pytest.param(LIMITED + "limit_this_process(768 << 20, 4 << 30, 5, 32); bytearray(2 << 30)", id="too much address space"),
        pytest.param(LIMITED + "limit_this_process(4 << 30, 72 << 20, 5, 32); bytearray(100 << 20)", id="too much memory"),
        pytest.param("import os; os.abort()", id="an abort"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", id="a segmentation fault"),
        pytest.param("raise SystemExit(3)", id="an exit with an error"),
    ],
)
def test_a_child_that_breaks_a_limit_or_dies_gives_one_sentence_and_the_next_file_is_answered(good: Path, program: str) -> None:
    with pytest.raises(CheckpointError, match="was not opened") as caught:
        run(good, program)
    assert len(str(caught.value).splitlines()) == 1
    assert inspect_safely(good).parameters == 8


@ONLY_POSIX
def test_a_limited_child_can_write_no_file(good: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was not opened"):
        run(
            good,
            LIMITED
            + f"limit_this_process(768 << 20, 72 << 20, 5, 32); file = open({str(tmp_path / 'out')!r}, 'wb'); file.write(b'x' * 100); file.close()",
        )
    assert not (tmp_path / "out").exists() or (tmp_path / "out").stat().st_size == 0


@pytest.mark.parametrize("reply", [b"", b"junk", b"[]", b"{}", b'{"report": {}}', b'{"report": 5}', b"[" * 100_000])
def test_an_answer_that_is_none_gives_one_sentence(good: Path, monkeypatch: pytest.MonkeyPatch, reply: bytes) -> None:
    monkeypatch.setattr(opening, "run_child", lambda *_: reply)
    with pytest.raises(CheckpointError, match="no usable answer"):
        inspect_safely(good)


def test_the_sentence_of_the_child_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="unknown file type"):
        inspect_safely(tmp_path / "x.pt")


def test_a_file_with_a_name_that_is_no_text_is_opened(good: Path) -> None:
    odd = good.with_name(os.fsdecode(b"-rf \xff\n.pt"))
    odd.write_bytes(good.read_bytes())
    assert inspect_safely(odd).parameters == 8


def test_two_files_are_looked_at_at_a_time_and_the_others_wait(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, gate = [0], [0], threading.Event()
    lock = threading.Lock()

    def child(*_: object) -> bytes:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate.wait(30)
        with lock:
            running[0] -= 1
        return b'{"refused": "no"}'

    def visit() -> None:
        with pytest.raises(CheckpointError, match="no"):
            inspect_safely(good)

    monkeypatch.setattr(opening, "run_child", child)
    visitors = [threading.Thread(target=visit) for _ in range(6)]
    for visitor in visitors:
        visitor.start()
    deadline = time.monotonic() + 30
    while running[0] < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    gate.set()
    for visitor in visitors:
        visitor.join(30)
    assert (most[0], running[0]) == (2, 0)


def test_who_waits_too_long_for_a_turn_is_told_to_try_again(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_slots", threading.BoundedSemaphore(1))
    monkeypatch.setattr(sandbox, "PATIENCE_S", 0.01)
    with sandbox._slots, pytest.raises(CheckpointError, match="try again"):
        inspect_safely(good)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be bounded to what it may write to")
@pytest.mark.parametrize("unit", [b"[]", b"{}", b"1", b'"0123456789"'])
def test_a_header_that_would_fill_hundreds_of_megabytes_is_refused_within_its_limit(tmp_path: Path, unit: bytes) -> None:
    listed = b",".join([unit] * (header.MAX_HEADER_BYTES // (len(unit) + 1) - 100))
    declared = b'{"w":[' + listed + b"]}"
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(declared)) + declared)
    with pytest.raises(CheckpointError, match="needs more memory to be read than is allowed"):
        inspect_safely(tmp_path / "x.safetensors")


def test_without_the_resource_module_the_limits_are_skipped_and_the_child_still_answers(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "resource", None)
    limit_this_process(1, 1, 1, 1)
    program = "import sys; sys.modules['resource'] = None; " + sandbox.PROGRAM
    with good.open("rb") as file:
        reply = run_child(file, ["minigpt.inspection.opening", "answer", "x", "1"], 30.0, program)
    assert reply.startswith(b'{"report"')
