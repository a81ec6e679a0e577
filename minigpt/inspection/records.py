"""What a pickle is made of once nothing in it may act, and how that is shown: as plain JSON values of bounded size."""

import math
from dataclasses import dataclass, field

from minigpt.header import clean

MAX_DEPTH, MAX_WIDTH, MAX_TEXT = 16, 1_000, 4_096  # of what is shown
Pair = tuple[object, object]


@dataclass(slots=True, eq=False, repr=False)
class GlobalName:
    """A class or function that the file names; only ever a name here."""

    full: str


@dataclass(slots=True, eq=False, repr=False)
class PickledDict:
    """A dict as its pairs, in order and unhashed: a key may be anything, and may come twice."""

    pairs: list[Pair] = field(default_factory=list)

    def get(self, key: str) -> object:
        """Return the last value stored under the text `key`, as a dict would have it, or None."""
        return next((value for name, value in reversed(self.pairs) if isinstance(name, str) and name == key), None)


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """An object of any class, as the plain data it would have been filled with."""

    class_name: str
    arguments: object = ()
    pairs: list[Pair] = field(default_factory=list)
    items: list[object] = field(default_factory=list)
    state: object = None


@dataclass(slots=True, eq=False, repr=False)
class Storage:
    """Numbers that stand elsewhere in the file, under `key`; `numel` is what the pickle says of their count."""

    dtype: str
    key: str
    numel: int


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """A tensor as declared: of whole numbers, but whether they make sense is not known here."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def plain(value: object) -> object:
    """Return records or parsed JSON as None, bool, int, finite float, clean text, list or dict of these.

    What is too deep, too wide, too large or of an unknown kind is replaced by a remark in round brackets.
    """
    # A budget in characters, where each value costs 100: else a list that holds itself twice, forty times over, would be written out for ever.
    left = 2_000_000

    def show(value: object, depth: int) -> object:
        nonlocal left
        left -= 100
        if left < 0:
            return "(too many values to show)"
        if isinstance(value, Record):
            value = _fields(value)
        if value is None or (isinstance(value, int) and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, (list, tuple, dict, PickledDict)) and depth > MAX_DEPTH:
            return "(nested too deep)"
        if isinstance(value, (list, tuple)):
            return [show(item, depth + 1) for item in value[:MAX_WIDTH]]
        if isinstance(value, (dict, PickledDict)):
            pairs = list(value.items()) if isinstance(value, dict) else value.pairs
            return {clean(key): show(item, depth + 1) for key, item in pairs[:MAX_WIDTH]}
        shown = f"({len(value):,} bytes)" if isinstance(value, bytes) else clean(value, MAX_TEXT, lines=True)
        left -= len(shown)
        return shown

    return show(value, 0)


def _fields(record: Record) -> object:
    """Return what the object was made of: its attributes, else its items, else what its class was called with, else its class's name."""
    state = record.state
    # No more than is shown: the same object may be met thousands of times, and must not be copied or searched in full each time.
    if isinstance(state, tuple) and len(state) == 2:  # (attributes, slots)
        state = PickledDict([pair for part in state if isinstance(part, PickledDict) for pair in part.pairs[:MAX_WIDTH]])
    if isinstance(state, PickledDict):
        attributes = PickledDict(state.pairs[:MAX_WIDTH]).get("__dict__")  # where pydantic keeps the fields
        return attributes if isinstance(attributes, PickledDict) else state
    if isinstance(state, (list, tuple)):
        return state
    return (PickledDict(record.pairs) if record.pairs else record.items or record.arguments) or f"({clean(record.class_name, 80)})"
