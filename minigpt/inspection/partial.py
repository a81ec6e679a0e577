"""A file of which only some parts are here, such as its header; the rest lies on somebody else's disk."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class PartialFile(io.RawIOBase):
    """Reads as a file of `size` bytes that holds `parts`, each at the place where it starts, and zeros elsewhere."""

    def __init__(self, size: int, parts: Sequence[tuple[int, bytes]]) -> None:
        self._size, self._parts, self._at = size, parts, 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that any place in it can be gone to."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, counted from the start, from here or from the end."""
        self._at = offset + (0, self._at, self._size)[whence]
        if self._at < 0:
            raise ValueError("before the start of the file")
        return self._at

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Fill the buffer as far as the file goes; return how many bytes were put there."""
        target = memoryview(buffer).cast("B")
        end = min(self._at + len(target), self._size)
        target[: max(end - self._at, 0)] = bytes(max(end - self._at, 0))
        for start, data in self._parts:
            first, last = max(start, self._at), min(start + len(data), end)
            if first < last:
                target[first - self._at : last - self._at] = data[first - start : last - start]
        count, self._at = max(end - self._at, 0), max(end, self._at)
        return count
