"""What the values of a tensor are like: extremes, mean, spread, zeros, a histogram, a small picture; gathered piece by piece.

Knows no file. However large a tensor is, memory is needed for one piece of it. Not imported by the package itself, as it needs numpy.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import CheckpointError

BINS = 40
MAP_SIDE = 64
Floats = NDArray[np.float32]


@dataclass
class TensorStatistics:
    """What was found in one tensor. Extremes, mean and standard deviation are those of the finite values, and None where there are none."""

    name: str
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None  # of the values as they are: divided by their count
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    histogram: list[int] = field(default_factory=list)  # counts in `BINS` equal steps from minimum to maximum
    picture: list[list[float | None]] = field(default_factory=list)  # means of blocks of the matrix; None where a block has no finite value
    remark: str = ""  # why the values could not be read


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of numbers that come piece by piece.

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979, equations 2.1.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        """Take in another piece, which must not be empty."""
        mean = float(values.mean())
        total, apart = self.count + values.size, mean - self.mean
        self.squares += float(np.square(values - mean).sum()) + apart**2 * self.count * values.size / total
        self.mean += apart * values.size / total
        self.count = total


def measure(name: str, shape: tuple[int, ...], chunks: Callable[[], Iterable[Floats]], *, picture: bool = False) -> Iterator[int | TensorStatistics]:
    """Read a tensor twice, the second time for its histogram. Yield how many values each piece had, and at last what was found.

    Args:
        name: what the tensor is called.
        shape: its sizes.
        chunks: gives its values in row-major order, flat, anew at each call.
        picture: also make the picture, of at most `MAP_SIDE` by `MAP_SIDE` blocks.
    """
    found, moments, painter = TensorStatistics(name), Moments(), Painter(shape)
    low, high = math.inf, -math.inf
    try:
        for piece in chunks():
            is_finite = np.isfinite(piece)
            if (values := piece[is_finite].astype(np.float64)).size:
                low, high = min(low, float(values.min())), max(high, float(values.max()))
                moments.add(values)
            nan = int(np.isnan(piece).sum())
            found.nan, found.infinite = found.nan + nan, found.infinite + piece.size - values.size - nan
            found.zeros += piece.size - int(np.count_nonzero(piece))
            if picture:
                painter.add(piece, is_finite)
            yield piece.size
        if moments.count:
            found.minimum, found.maximum, found.mean, found.std = low, high, moments.mean, math.sqrt(moments.squares / moments.count)
            counts = np.zeros(BINS, np.int64)
            for piece in chunks():
                counts += np.histogram(piece[np.isfinite(piece)].astype(np.float64), BINS, (low, high))[0]
                yield piece.size
            found.histogram = counts.tolist()
            found.picture = painter.means() if picture else []
    except CheckpointError as error:  # of a kind of number that is not read; the other tensors may be
        found = TensorStatistics(name, remark=str(error))
    yield found


class Painter:
    """Averages the values of a matrix over a grid of blocks. More than two dimensions are taken as rows of all the rest, one as a single row."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        rows = shape[0] if len(shape) > 1 else 1
        self._size = max(rows, 1), max(math.prod(shape) // max(rows, 1), 1)
        self._grid = min(self._size[0], MAP_SIDE), min(self._size[1], MAP_SIDE)
        self._sums, self._counts = np.zeros(math.prod(self._grid)), np.zeros(math.prod(self._grid))
        self._reached = 0

    def add(self, piece: Floats, is_finite: NDArray[np.bool_]) -> None:
        """Take in the next values of the matrix, row by row."""
        places = np.arange(self._reached, self._reached + piece.size)[is_finite]
        (rows, columns), (height, width) = self._size, self._grid
        blocks = (places // columns * height // rows) * width + places % columns * width // columns
        self._sums += np.bincount(blocks, piece[is_finite], self._sums.size)
        self._counts += np.bincount(blocks, minlength=self._sums.size)
        self._reached += piece.size

    def means(self) -> list[list[float | None]]:
        """Return the grid, row by row."""
        cells = [float(total / count) if count else None for total, count in zip(self._sums, self._counts, strict=True)]
        return [cells[first : first + self._grid[1]] for first in range(0, len(cells), self._grid[1])]
