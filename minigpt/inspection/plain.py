"""Settings of any make as plain JSON values of bounded size, for showing. Reads pickled records and parsed JSON alike."""

import math
from dataclasses import dataclass

from minigpt.header import clean
from minigpt.inspection.calls import PickledDict, Record

MAX_DEPTH = 16
MAX_WIDTH = 1_000
MAX_TEXT = 4_096


@dataclass
class Budget:
    """What may still be shown; without it, a list that holds itself twice, forty times over, would be written out for ever."""

    values: int = 20_000
    characters: int = 2_000_000


def plain(value: object, budget: Budget, depth: int = 0) -> object:
    """Return `value` as None, bool, int, finite float, clean text, list or dict of these.

    What is too deep, too wide, too large or of an unknown kind is replaced by a remark in round brackets.
    """
    budget.values -= 1
    if budget.values < 0 or budget.characters < 0:
        return "(too many values to show)"
    if isinstance(value, Record):
        value = fields(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return _scalar(value, budget)
    if depth > MAX_DEPTH:
        return "(nested too deep)"
    if isinstance(value, (list, tuple)):
        return [plain(item, budget, depth + 1) for item in value[:MAX_WIDTH]]
    pairs = list(value.items()) if isinstance(value, dict) else value.pairs if isinstance(value, PickledDict) else None
    if pairs is not None:
        return {_key(key, budget): plain(item, budget, depth + 1) for key, item in pairs[:MAX_WIDTH]}
    return f"({len(value):,} bytes)" if isinstance(value, bytes) else f"({clean(type(value).__name__.lower())})"


def fields(record: Record) -> object:
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
    if record.pairs:
        return PickledDict(record.pairs)
    return record.items or record.arguments or f"({clean(record.class_name, 80)})"


def _scalar(value: bool | int | float | str | None, budget: Budget) -> object:
    if isinstance(value, str):
        shown = clean(value, MAX_TEXT, lines=True)
        budget.characters -= len(shown)
        return shown
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        return "(a very large number)"
    return value


def _key(key: object, budget: Budget) -> str:
    shown = clean(key)
    budget.characters -= len(shown)
    return shown
