"""What a pickle is made of once nothing in it may act, and how that is shown: as plain JSON values of bounded size."""

import math
from dataclasses import dataclass, field

from minigpt.header import clean

MAX_DEPTH = 16
MAX_WIDTH = 1_000
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


def plain(value: object) -> object:
    """Return pickled records or parsed JSON as None, bool, int, finite float, clean text, list or dict of these.

    What is too deep, too wide, too large or of an unknown kind is replaced by a remark in round brackets.
    """
    # Without a budget, a list that holds itself twice, forty times over, would be written out for ever.
    values_left, characters_left = 20_000, 2_000_000

    def text(value: object, limit: int, *, lines: bool) -> str:
        nonlocal characters_left
        shown = clean(value, limit, lines=lines)
        characters_left -= len(shown)
        return shown

    def show(value: object, depth: int) -> object:
        nonlocal values_left
        values_left -= 1
        if values_left < 0 or characters_left < 0:
            return "(too many values to show)"
        if isinstance(value, Record):
            value = _fields(value)
        if value is None or isinstance(value, (int, float, str)):
            is_large = isinstance(value, int) and abs(value) >= 2**63
            is_odd = isinstance(value, float) and not math.isfinite(value)
            return text(value, 4_096, lines=True) if is_large or is_odd or isinstance(value, str) else value
        if depth > MAX_DEPTH:
            return "(nested too deep)"
        if isinstance(value, (list, tuple)):
            return [show(item, depth + 1) for item in value[:MAX_WIDTH]]
        if isinstance(value, (dict, PickledDict)):
            pairs = list(value.items()) if isinstance(value, dict) else value.pairs
            return {text(key, 200, lines=False): show(item, depth + 1) for key, item in pairs[:MAX_WIDTH]}
        return f"({len(value):,} bytes)" if isinstance(value, bytes) else f"({type(value).__name__.lower()})"

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
    made_of = PickledDict(record.pairs) if record.pairs else record.items or record.arguments
    return made_of or f"({clean(record.class_name, 80)})"
