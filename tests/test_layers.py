"""Holds who may import whom, who may start threads and print, and how large everything may grow."""

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sizes

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minigpt"
LAYERS = {  # from the lowest up; a module imports its own layer and those below. A package's modules stand where the package does.
    "words": ("config", "presets", "events", "errors", "system"),
    "parts": (
        "tokenizer",
        "corpus",
        "data",
        "model",
        "loss",
        "optim",
        "device",
        "compilation",
        "evaluation",
        "generate",
        "checkpoint",
        "header",
        "history",
    ),
    "loop": ("train", "resume", "distributed"),
    "above": ("inspection", "export", "foreign", "bench"),
    "runs": ("saved", "run", "past", "runs", "outputs"),
    "faces": ("ui", "cli", "cli_flags", "progress", "stopper", "__main__"),
}
RANK = {name: rank for rank, names in enumerate(LAYERS.values()) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE, MAX_FUNCTION = 330, 66


def name_of(path: Path) -> str:
    """Return a module's name below the package: "ui.feed", or "" for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of everything a file imports, anywhere in it; `from minigpt import system` gives "minigpt.system"."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            assert node.module
            if node.module.startswith("minigpt"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def ours(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, by their name at the top: "ui", "config"."""
    tops = {name.split(".")[1] for name in imports(path) if name.startswith("minigpt.")}
    return {top for top in tops if (PACKAGE / f"{top}.py").exists() or (PACKAGE / top).is_dir()}


def foreign(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - {"minigpt"} - set(sys.stdlib_module_names)


def calls(path: Path) -> Iterator[str]:
    """Yield what a file calls, as far as it is a plain dotted name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def top(path: Path) -> str:
    return name_of(path).split(".")[0]


def in_package(*names: str) -> list[Path]:
    return [path for path in FILES if top(path) in names]


each_module = pytest.mark.parametrize("path", [path for path in FILES if name_of(path)], ids=name_of)


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 15
    assert "minigpt.config" in set(imports(PACKAGE / "train.py"))
    assert "torch" in foreign(PACKAGE / "model.py")


@each_module
def test_a_module_imports_its_own_layer_and_those_below(path: Path) -> None:
    assert top(path) in RANK, f"say in LAYERS where {top(path)} belongs"
    above = {name for name in ours(path) if RANK[name] > RANK[top(path)]}
    assert not above, f"{name_of(path)} imports {', '.join(sorted(above))} from a layer above its own"


@pytest.mark.parametrize("path", in_package(*LAYERS["words"]), ids=name_of)
def test_words_need_nothing_but_python_and_pydantic(path: Path) -> None:
    assert foreign(path) <= {"pydantic"}


@pytest.mark.parametrize("path", in_package("inspection"), ids=name_of)
def test_looking_at_a_file_never_imports_torch(path: Path) -> None:
    assert "torch" not in foreign(path)
    assert ours(path) <= {*LAYERS["words"], "header", "inspection"}


def test_the_header_reader_knows_no_torch_and_only_words() -> None:
    assert foreign(PACKAGE / "header.py") == set()
    assert ours(PACKAGE / "header.py") <= set(LAYERS["words"])


@pytest.mark.parametrize(("library", "places"), [("gradio", ("ui",)), ("plotly", ("ui",)), ("pydantic_settings", ("cli", "cli_flags"))])
def test_a_library_stays_in_its_place(library: str, places: tuple[str, ...]) -> None:
    assert [name_of(path) for path in FILES if library in foreign(path) and top(path) not in places] == []


def test_the_network_is_known_to_the_corpus_the_bench_of_the_page_and_at_most_one_module_of_inspection() -> None:
    clients = {"requests", "urllib3", "httpx", "aiohttp", "http", "urllib", "socket", "huggingface_hub"}
    asked = {path: {name.split(".")[0] for name in imports(path) if not name.startswith("urllib.parse")} for path in FILES}  # which only reads text
    users = [name_of(path) for path, names in asked.items() if names & clients]
    assert [name for name in users if name not in ("corpus", "bench.page") and not name.startswith("inspection.")] == []
    assert len([name for name in users if name.startswith("inspection.")]) <= 1


@each_module
def test_threads_are_started_by_the_runs_the_compilation_and_the_hub_s_lookup_alone(path: Path) -> None:
    started = {name for name in calls(path) if name.split(".")[-1] in ("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "to_thread")}
    assert not started or name_of(path) in ("runs", "compilation", "inspection.hub")


@each_module
def test_only_the_command_line_prints(path: Path) -> None:
    assert "print" not in set(calls(path)) or name_of(path) == "cli"


def test_the_package_stays_small() -> None:
    assert sum(map(sizes.code_lines, FILES)) <= sizes.MAX_CODE_LINES


def test_the_page_s_script_stays_small() -> None:
    assert sum(map(sizes.all_lines, PACKAGE.rglob("*.js"))) <= sizes.MAX_SCRIPT_LINES


@each_module
def test_a_module_fits_a_few_screens_and_a_function_one(path: Path) -> None:
    assert sizes.all_lines(path) <= MAX_MODULE
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert {node.name: size for node in functions if (size := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION} == {}


@each_module
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


# What really happens in a fresh process

WATCH = """
import os, sys
class Watch:
    seen = []
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not self.seen:
            self.seen.append(os.environ.get("OMP_WAIT_POLICY"))
sys.meta_path.insert(0, Watch())
"""


def fresh(code: str, home: Path) -> str:
    unset = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "SPACE_ID")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {"MINIGPT_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("names", ["minigpt.config, minigpt.presets, minigpt.events, minigpt.errors, minigpt.system", "minigpt.inspection"])
def test_words_and_inspection_load_no_heavy_library(names: str, tmp_path: Path) -> None:
    heavy = ("torch", "gradio", "pandas", "plotly", "numpy", "tokenizers", "requests")
    out = fresh(f"import sys, {names}; print([name for name in {heavy!r} if name in sys.modules])", tmp_path)
    assert out.strip() == "[]"


@pytest.mark.slow
def test_the_page_sets_the_environment_before_torch_is_imported(tmp_path: Path) -> None:
    out = fresh(f"{WATCH}\nimport app\nprint(Watch.seen, 'torch' in sys.modules)", tmp_path)
    assert out.splitlines()[-1] == "['PASSIVE'] True"


def test_help_on_the_command_line_needs_no_torch(tmp_path: Path) -> None:
    code = f"""{WATCH}
import runpy
sys.argv = ["minigpt", "--help"]
try:
    runpy.run_module("minigpt", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(os.environ.get("OMP_WAIT_POLICY"), Watch.seen)
"""
    out = fresh(code, tmp_path)
    assert "train" in out
    assert out.splitlines()[-1] == "PASSIVE []"


def test_the_command_line_sets_the_environment_before_anything_that_could_import_torch() -> None:
    nodes = list(ast.walk(tree_of(PACKAGE / "__main__.py")))
    line = next(node.lineno for node in nodes if isinstance(node, ast.Call) and ast.unparse(node) == "prepare_environment()")
    before = {ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno < line}
    assert before == {"import os", "import signal", "from minigpt.system import prepare_environment"}
