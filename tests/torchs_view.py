"""What torch and safetensors make of files, asked in a process of its own: a damaged file can kill torch by a fault, hang it, or take all memory.

Only for files that a test has made itself.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STALL_S = 20  # after which a file counts as one that hangs its reader
MORE_BYTES = 1 << 30  # of address space, beside what torch has taken when it is imported
Shapes = dict[str, list[int]]


def views(paths: Sequence[Path]) -> list[list[Shapes] | None]:
    """Return of each file the named tensors of its outermost dict and of each dict in it; None where the library refuses the file or dies of it."""
    found: list[list[Shapes] | None] = []
    while len(found) < len(paths):
        rest = "\n".join(map(str, paths[len(found) :]))
        child = subprocess.run([sys.executable, __file__], input=rest, capture_output=True, text=True, check=False)
        found += map(json.loads, child.stdout.splitlines())
        if child.returncode > 0:
            raise RuntimeError(child.stderr)
        if child.returncode < 0:  # by a signal, at the next file
            found.append(None)
    return found


def main() -> None:
    """Be the child: read paths from standard input and write a line for each."""
    import resource
    import signal
    import warnings

    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with suppress(OSError, ValueError):  # a system that has no such limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, used + MORE_BYTES))
    for path in sys.stdin.read().splitlines():
        signal.alarm(STALL_S)  # ends the process whatever it is at
        try:
            top = load_file(path) if path.endswith(".safetensors") else torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001  damage shows as any kind of error
            print("null", flush=True)
            continue
        dicts = [value for value in (top, *(top.values() if isinstance(top, dict) else ())) if isinstance(value, dict)]
        shapes = [{str(name): list(value.shape) for name, value in part.items() if isinstance(value, torch.Tensor)} for part in dicts]
        print(json.dumps(shapes), flush=True)


if __name__ == "__main__":
    main()
