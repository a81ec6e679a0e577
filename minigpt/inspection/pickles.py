"""A pickle read as data: what it would build is written down, never built.

A pickle is a program for a small stack machine whose steps may call anything. Here the steps are interpreted on an own stack: a name stays a
name, a call becomes a record of the call, a dict becomes a list of pairs, and no value from the file is imported, called, compared by content
or hashed. The few calls that honest checkpoints make (rebuild a tensor, make an ordered dict) are known by name; any other is refused.
"""

import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import clean
from minigpt.inspection.calls import (
    KNOWN_CALLS,
    REFUSED_TENSORS,
    TELLING_CALLS,
    TENSOR_CALLS,
    GlobalName,
    NumpyType,
    PickledDict,
    Record,
    contents,
    text,
    whole_number,
)
from minigpt.inspection.tensors import STORAGE_KINDS, Storage

MAX_PICKLE_BYTES = 16 << 20
MAX_STEPS = 500_000
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError, RecursionError, struct.error)
"""What reading damaged bytes can raise, here and in the containers around."""


class PickleReader:
    """Interprets the pickles of one file under one budget; keeps what was met on the way."""

    def __init__(self) -> None:
        self.classes: set[str] = set()
        self.calls: set[str] = set()
        self.storages: dict[str, Storage] = {}
        self._steps_left = MAX_STEPS
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def read(self, file: BinaryIO, what: str) -> object:
        """Interpret one pickle and leave `file` just behind it.

        Args:
            file: The pickle, in memory.
            what: What it is to the reader of an error, such as "index".

        Raises:
            CheckpointError: The pickle asks for a call that is not known, is damaged, or is larger than the budget.
        """
        value, refusal = None, None
        try:
            value = self._interpret(file)
        except CheckpointError as error:
            refusal = error
        except DAMAGE:
            refusal = CheckpointError(f"This file's {what} is damaged or cut short.")
        if self.calls:  # said first, whatever else is wrong: a payload often comes before broken bytes
            name = min(self.calls, key=lambda call: (not TELLING_CALLS.match(call), call))
            raise CheckpointError(
                f"This file asks to run code ({clean(name, 60)}) when opened. It was not run; MiniGPT only opens files that hold plain data."
            )
        if refusal is not None:
            raise refusal
        return value

    def _interpret(self, file: BinaryIO) -> object:
        self._stack, self._memo = [], {}
        for opcode, argument, _ in pickletools.genops(file):
            self._spend(1)
            if opcode.name == "STOP":
                return self._stack.pop()
            if opcode.name in _LITERALS:
                self._stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name])
            else:
                _STEPS[opcode.name](self, argument)
        raise ValueError("the pickle has no end")

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise CheckpointError(f"This file's index has too many entries (more than {MAX_STEPS:,}); it was not opened.")

    def _pop_to_mark(self) -> list[object]:
        values: list[object] = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values

    def _remember(self, argument: object) -> None:
        self._memo[whole_number(argument)] = self._stack[-1]

    def _memoize(self, _: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _recall(self, argument: object) -> None:
        self._stack.append(self._memo[whole_number(argument)])

    def _global(self, argument: object) -> None:
        module, _, name = text(argument).partition(" ")
        self._stack.append(_global_name(module, name))

    def _stack_global(self, _: object) -> None:
        name, module = text(self._stack.pop()), text(self._stack.pop())
        self._stack.append(_global_name(module, name))

    def _tuple(self, _: object) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def _tuple_of(self, size: int) -> None:
        if len(self._stack) < size:
            raise IndexError("a tuple of more than there is")
        self._stack[-size:] = [tuple(self._stack[-size:])]

    def _list(self, _: object) -> None:
        self._stack.append(self._pop_to_mark())

    def _dict(self, _: object) -> None:
        values = self._pop_to_mark()
        self._stack.append(PickledDict(_pairs(values)))

    def _set_item(self, _: object) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._target().pairs.append((key, value))

    def _set_items(self, _: object) -> None:
        values = self._pop_to_mark()
        self._target().pairs.extend(_pairs(values))

    def _target(self) -> PickledDict | Record:
        target = self._stack[-1]
        if not isinstance(target, (PickledDict, Record)):
            raise TypeError("items set on something that has none")
        return target

    def _append(self, _: object) -> None:
        value = self._stack.pop()
        self._sequence().append(value)

    def _append_all(self, _: object) -> None:
        values = self._pop_to_mark()
        self._sequence().extend(values)

    def _sequence(self) -> list[object]:
        target = self._stack[-1]
        if isinstance(target, list):
            return target
        if isinstance(target, Record):
            return target.items
        raise TypeError("appended to something that is no list")

    def _reduce(self, _: object) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._call(function, arguments))

    def _call(self, function: object, arguments: object) -> object:
        name = function.full if isinstance(function, GlobalName) else "something that is not named"
        if not isinstance(arguments, tuple):
            raise TypeError("arguments")
        if name == "torch._tensor._rebuild_from_type_v2" and isinstance(arguments[0], GlobalName) and arguments[0].full in TENSOR_CALLS:
            return self._call(arguments[0], arguments[2])  # a parameter with attributes of its own; one level, as the inner call is another
        if name in KNOWN_CALLS:
            # A known call may copy its arguments, and one list can be handed to many calls: pay for its length each time.
            self._spend(sum(len(contents(argument)) for argument in arguments))
            result = KNOWN_CALLS[name](arguments)
            if isinstance(result, Record):
                self.classes.add(result.class_name)
            return result
        kind = REFUSED_TENSORS.match(name)
        if kind:
            raise CheckpointError(f"This file holds a tensor of a kind MiniGPT does not open ({clean(kind[1].split('_tensor')[0], 20)}).")
        self.calls.add(name)
        return Record(name)

    def _new(self, _: object) -> None:
        arguments, class_name = self._stack.pop(), self._stack.pop()
        self._stack.append(self._instance(class_name, arguments))

    def _new_with_keywords(self, _: object) -> None:
        self._stack.pop()
        self._new(None)

    def _instance(self, kind: object, arguments: object) -> object:
        name = kind.full if isinstance(kind, GlobalName) else "?"
        if name == "collections.OrderedDict":
            return PickledDict()
        self.classes.add(name)
        return Record(name, arguments if isinstance(arguments, tuple) else ())

    def _old_style(self, argument: object) -> None:  # INST and OBJ call a class outright; nothing has written them for twenty years
        self._pop_to_mark()
        self.calls.add(text(argument).replace(" ", ".")[:99] if isinstance(argument, str) else "an old-style class")
        self._stack.append(None)

    def _build(self, _: object) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif isinstance(target, NumpyType) and isinstance(state, tuple) and state[1] == ">":
            target.byte_order = ">"

    def _persistent(self, _: object) -> None:
        reference = self._stack.pop()
        if not isinstance(reference, tuple) or len(reference) < 5 or reference[0] not in ("storage", b"storage"):
            raise ValueError("not a reference to a storage")
        kind = reference[1].full.rsplit(".", 1)[-1] if isinstance(reference[1], GlobalName) else "?"
        key = reference[2] if isinstance(reference[2], str) else str(whole_number(reference[2]))
        numel = whole_number(reference[4])
        if kind not in STORAGE_KINDS or numel < 0:
            raise CheckpointError(f"This file holds a tensor of a kind MiniGPT does not open ({clean(kind, 40)}).")
        storage = Storage(STORAGE_KINDS[kind], key, numel)
        self.storages.setdefault(key, storage)
        self._stack.append(storage)


def _global_name(module: str, name: str) -> GlobalName:
    # The older protocols keep Python 2's names of these two modules.
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    return GlobalName(f"{module[:99]}.{name[:99]}")


def _pairs(values: list[object]) -> list[tuple[object, object]]:
    return list(zip(values[::2], values[1::2], strict=True))


_MARK = GlobalName("mark")
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_TEXTS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_LITERALS = frozenset(_NUMBERS | _TEXTS | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"})
_CONSTANTS: Mapping[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_STEPS: Mapping[str, Callable[[PickleReader, object], object]] = {
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), PickleReader._remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), PickleReader._recall),
    "MEMOIZE": PickleReader._memoize,
    "GLOBAL": PickleReader._global,
    "STACK_GLOBAL": PickleReader._stack_global,
    "TUPLE": PickleReader._tuple,
    "TUPLE1": lambda reader, _: reader._tuple_of(1),
    "TUPLE2": lambda reader, _: reader._tuple_of(2),
    "TUPLE3": lambda reader, _: reader._tuple_of(3),
    "LIST": PickleReader._list,
    "FROZENSET": PickleReader._list,
    "DICT": PickleReader._dict,
    "EMPTY_DICT": lambda reader, _: reader._stack.append(PickledDict()),
    "EMPTY_LIST": lambda reader, _: reader._stack.append([]),
    "EMPTY_SET": lambda reader, _: reader._stack.append([]),
    "SETITEM": PickleReader._set_item,
    "SETITEMS": PickleReader._set_items,
    "APPEND": PickleReader._append,
    "APPENDS": PickleReader._append_all,
    "ADDITEMS": PickleReader._append_all,
    "REDUCE": PickleReader._reduce,
    "NEWOBJ": PickleReader._new,
    "NEWOBJ_EX": PickleReader._new_with_keywords,
    "INST": PickleReader._old_style,
    "OBJ": PickleReader._old_style,
    "BUILD": PickleReader._build,
    "BINPERSID": PickleReader._persistent,
    "POP": lambda reader, _: reader._stack.pop(),
    "POP_MARK": lambda reader, _: reader._pop_to_mark(),
    "DUP": lambda reader, _: reader._stack.append(reader._stack[-1]),
    "PROTO": lambda *_: None,
    "FRAME": lambda *_: None,
}
