"""Reads the package's source: what could execute a file's content must not be in it, whatever a test exercises."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minigpt"
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"torch.load", "torch.hub.load", "numpy.load", "np.load", "pandas.read_pickle", "pd.read_pickle", "os.system", "os.popen"}
FLAGS = {"allow_pickle", "shell"}


def faults(source: str) -> Iterator[str]:
    """Yield each forbidden construct as "line: what"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {module.split(".")[0]} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            names = {called} if called in CALLS | {"eval", "exec"} else set()
            names |= {called} if called.endswith((".extractall", ".extract")) else set()
            names |= {f"{word.arg}=True" for word in node.keywords if word.arg in FLAGS and not is_false(word.value)}
            yield from (f"{node.lineno}: {name}" for name in names)
            continue
        else:
            continue
        yield from (f"{node.lineno}: {name}" for name in names & (UNPICKLERS | CALLS))


def is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_can_execute_the_content_of_a_file(path: Path) -> None:
    assert list(faults(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(f, weights_only=True)",
        "from torch import load",
        "eval(text)",
        "exec(text)",
        "archive.extractall(folder)",
        "numpy.load(f)",
        "read(f, allow_pickle=True)",
        "subprocess.run(c, shell=flag)",
    ],
)
def test_the_check_sees_each_way_it_forbids(source: str) -> None:
    assert list(faults(source))


def test_the_check_lets_evaluation_mode_and_pickletools_pass() -> None:
    assert list(faults("import pickletools\nmodel.eval()\nrun(shell=False)")) == []
