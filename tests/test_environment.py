"""What the environment asks for that cannot be, whose folder the uploads are in, and Ctrl-C before there is a page."""

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from minigpt import system
from minigpt.ui import page

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 100
UPLOAD = "0123456789abcdef" * 4
posix = pytest.mark.skipif(sys.platform == "win32", reason="no owners and no links there")


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of uploads that is taken where nobody chose one; it is not there yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("GRADIO_TEMP_DIR")
    (tmp_path / "tmp").mkdir()
    system.prepare_environment()
    return Path(os.environ["GRADIO_TEMP_DIR"])


def uploads() -> Path:
    return Path(os.environ["GRADIO_TEMP_DIR"])


def aged(path: Path) -> Path:
    """Let a folder be two hours old, with a file in it."""
    path.mkdir(parents=True)
    (path / "file.txt").write_text("content")
    os.utime(path, (time.time() - 7200,) * 2)
    return path


# The folder of uploads


def test_uploads_that_a_killed_server_left_are_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    old = aged(tmp_path / UPLOAD)
    fresh = aged(tmp_path / UPLOAD.replace("0", "1"))
    os.utime(fresh)
    theirs = [aged(tmp_path / name) for name in ("thesis", UPLOAD[:-1], UPLOAD.upper(), UPLOAD + "0")]
    file = tmp_path / UPLOAD.replace("0", "2")
    file.write_text("mine")
    os.utime(file, (1e9, 1e9))
    page.sweep_uploads()
    assert not old.exists()
    assert all((path / "file.txt").read_text() == "content" for path in (fresh, *theirs))
    assert file.read_text() == "mine"


@posix
def test_nothing_is_removed_through_a_link_or_from_another_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = aged(tmp_path / "real" / UPLOAD)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / UPLOAD).symlink_to(kept)
    for name in ("link", "own"):
        monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / name))
        page.sweep_uploads()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "real"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        page.sweep_uploads()
    assert (kept / "file.txt").read_text() == "content"
    assert (tmp_path / "own" / UPLOAD).is_symlink()


@posix
def test_the_usual_folder_of_uploads_is_closed_to_others(usual: Path) -> None:
    system.prepare_page()
    assert (uploads(), usual.stat().st_mode & 0o777) == (usual, 0o700)
    usual.chmod(0o755)
    system.prepare_page()
    assert (uploads(), usual.stat().st_mode & 0o777) == (usual, 0o700)


@posix
@pytest.mark.parametrize("taken_by", ["a link", "a file", "somebody else"])
def test_a_usual_folder_that_is_not_ours_is_not_used(
    taken_by: str, usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if taken_by == "a link":
        usual.symlink_to(tmp_path)
    elif taken_by == "a file":
        usual.write_text("in the way")
    else:
        usual.mkdir(mode=0o755)
        uid = os.getuid()
        monkeypatch.setattr(system, "is_own_folder", lambda path: path != usual and path.stat().st_uid == uid)
    before = usual.lstat().st_mode
    with pytest.raises(SystemExit, match="2"):
        system.prepare_page()
    assert capsys.readouterr().err == (
        f"GRADIO_TEMP_DIR is {str(usual)!r}; it must be a folder that can be made, or is your own and no link: change it in the environment\n"
    )
    assert usual.lstat().st_mode == before


def test_a_folder_that_a_person_chose_is_taken_and_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "mine"))
    system.prepare_page()
    assert uploads() == tmp_path / "mine"
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o755


def test_an_empty_choice_is_none(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    system.prepare_environment()
    assert uploads() == usual


# What cannot be


@pytest.mark.parametrize("name", ["MINIGPT_HOME", "GRADIO_TEMP_DIR"])
@pytest.mark.parametrize("value", ["file", "file/inside", "x" * 300], ids=["a file", "inside a file", "too long"])
def test_a_place_that_can_be_no_folder_is_told_in_a_sentence(name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    place = str(tmp_path / value)
    environment = {**os.environ, "MINIGPT_HOME": str(tmp_path / "home"), name: place}
    done = subprocess.run(
        [sys.executable, str(ROOT / "app.py")], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name} is {place!r}; it must be a folder, or a new name for one (")
    assert done.stderr.endswith("): change it in the environment\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_address_that_is_none_is_told_in_a_sentence(tmp_path: Path) -> None:
    environment = {**os.environ, "GRADIO_SERVER_NAME": "256.1.1.1", "GRADIO_SERVER_PORT": "7999", "GRADIO_TEMP_DIR": str(tmp_path / "uploads")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "app.py")], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "no page can be served at '256.1.1.1' from port 7999 on: look at GRADIO_SERVER_NAME and GRADIO_SERVER_PORT in the environment"
    )
    assert "Traceback" not in done.stderr


@posix
@pytest.mark.slow
def test_ctrl_c_while_the_libraries_load_ends_quietly(tmp_path: Path) -> None:
    environment = {**os.environ, "MINIGPT_HOME": str(tmp_path / "home"), "GRADIO_TEMP_DIR": str(tmp_path / "uploads")}
    command = [sys.executable, "-X", "importtime", str(ROOT / "app.py")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "pydantic" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stderr if not line.startswith("import time:")]
    assert process.returncode == 130
    assert said == []


INTERRUPTED = """
import runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *rest):
        if name == "minigpt.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["minigpt", "--help"]
runpy.run_module("minigpt", run_name="__main__")
"""


def test_ctrl_c_before_the_command_line_is_loaded_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


TAKE_AND_FREE = """
import resource, sys
from minigpt import system

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        held = [b"x" * (8 << 20) for _ in range(6)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
first = faults()
system.keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no other C library can be asked")
def test_memory_that_a_step_frees_is_taken_again_by_the_next() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TAKE_AND_FREE],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    before, after = map(int, done.stdout.split())
    assert after < 100 < before / 100
