"""How large the project is: lines of code, which are neither blank nor comment nor docstring, and all lines beside them.

Documentation is not counted against the budget, so that nobody saves a docstring to meet it.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "minigpt"
MAX_CODE_LINES, MAX_SCRIPT_LINES = 6905, 250
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def all_lines(path: Path) -> int:
    """Count every line of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def code_lines(path: Path) -> int:
    """Count the lines of a Python file that hold code."""
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None]
    docstrings = {line for node in nodes for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in NOT_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def main() -> None:
    """Print the sizes beside their budgets."""
    modules, scripts = list(PACKAGE.rglob("*.py")), list(PACKAGE.rglob("*.js"))
    sys.stdout.write(
        f"== sizes: the package has {sum(map(code_lines, modules)):,} of {MAX_CODE_LINES:,} lines of code ({sum(map(all_lines, modules)):,} with "
        f"documentation and blank lines), the page's script {sum(map(all_lines, scripts))} of {MAX_SCRIPT_LINES}\n"
    )


if __name__ == "__main__":
    main()
