"""Measures the values of any file's tensors in a child process: progress as it goes, and an end whenever the caller has had enough.

Not imported by the package itself, as it needs numpy.
"""

import contextlib
import functools
import math
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np

from minigpt.errors import CheckpointError
from minigpt.header import open_regular
from minigpt.inspection.meaning import bare_name
from minigpt.inspection.sandbox import CPU_S, NO_ANSWER, SPACE_BYTES, TOO_MUCH, WALL_S, limit_this_child, parsed, start_child, tell, turn
from minigpt.inspection.statistics import TensorStatistics, measure
from minigpt.inspection.values import open_values, values_of

BYTES_PER_S = 8 << 20  # how slowly values may be read before it is taken for an attack


def measure_safely(path: Path, name: str = "") -> Generator[tuple[float, TensorStatistics | None], None, None]:
    """Measure the values of all tensors or of the one called `name`, of this one with a picture, in a child process.

    Yields:
        The share of the work that is done, and whatever tensor has just been finished. Whoever closes the iterator ends the work.

    Raises:
        CheckpointError: see `inspect_safely`.
    """
    with open_regular(path) as file, turn(), start_child(file, [__name__, "answer", path.name, name]) as child:
        assert child.stdout is not None
        for line in child.stdout:
            told = parsed(line)
            try:
                yield float(told["share"]), TensorStatistics(**told["tensor"]) if told["tensor"] else None
            except (TypeError, KeyError):
                raise CheckpointError(NO_ANSWER) from None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if child.wait(WALL_S) == 0:
                return
        raise CheckpointError(TOO_MUCH)


def answer(name: str, wanted: str) -> None:
    """Be the child: write a line of JSON for each piece that was read."""
    limit_this_child(CPU_S + sys.stdin.buffer.seek(0, os.SEEK_END) // BYTES_PER_S, SPACE_BYTES)
    found = _measured(name, wanted)
    while tell(lambda: next(found, None)):
        pass


def _measured(name: str, wanted: str) -> Iterator[dict[str, object]]:
    values = values_of(sys.stdin.buffer, name)
    names = [shown for shown in values.distinct if wanted in ("", shown)]
    done, total = 0, 2 * sum(math.prod(values.shapes[shown]) for shown in names) or 1
    for shown in names:
        for told in measure(shown, values.shapes[shown], functools.partial(values.chunks, shown), picture=bool(wanted)):
            if isinstance(told, int):
                done += told
            yield {"share": done / total, "tensor": None if isinstance(told, int) else vars(told)}


def relative_changes(first: Path, second: Path) -> Iterator[tuple[str, float | None]]:
    """Yield ‖a − b‖ / ‖b‖ (Frobenius norms) of each tensor that both files have, in one shape and but for prefixes by one name.

    It is None where one of the two is not read: its kind of number, its strides, or a file cut short. Both files are read in this
    process: look at each with `inspect_safely` before.
    """
    with open_values(first) as a, open_values(second) as b:
        partners = {bare_name(name): name for name in b.distinct}
        for name in a.distinct:
            partner = partners.get(bare_name(name))
            if partner is not None and a.shapes[name] == b.shapes[partner]:
                apart = size = 0.0
                try:
                    for x, y in zip(a.chunks(name), b.chunks(partner), strict=True):
                        wide = y.astype(np.float64)
                        apart, size = apart + float(np.square(x - wide).sum()), size + float(np.square(wide).sum())
                except CheckpointError:
                    yield name, None
                else:
                    yield name, math.sqrt(apart / size) if size else math.inf if apart else 0.0
