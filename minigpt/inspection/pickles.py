"""A pickle read as data: what it would build is written down, never built.

A pickle is a program for a small stack machine whose steps may call anything. Here they are interpreted on an own stack: a name stays a name, a
dict becomes a list of pairs, and no value of the file is imported, called or hashed. The few calls that honest checkpoints make (rebuild a
tensor, make an ordered dict) are known by name and answered with a record; any other is refused.
"""

import pickletools
import re
import struct
from collections.abc import Callable, Mapping
from typing import BinaryIO

from minigpt.errors import CheckpointError
from minigpt.header import TORCH_NAMES, clean, whole_numbers
from minigpt.inspection.records import GlobalName, Pair, PickledDict, Record, Storage, Tensor

MAX_PICKLE_BYTES, MAX_STEPS = 16 << 20, 500_000
# What reading damaged bytes can raise, here and in the containers around.
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError, RecursionError, struct.error)
Values = list[object]
Arguments = tuple[object, ...]


class PickleReader:
    """Interprets the pickles of one file under one budget; keeps what was met on the way."""

    def __init__(self) -> None:
        self.classes: set[str] = set()
        self.calls: set[str] = set()
        self.storages: dict[str, Storage] = {}
        self._steps_left = MAX_STEPS
        self._makers = {
            **_MAKERS,
            "REDUCE": (2, lambda values: self._call(*values)),
            "OBJ": (_TO_MARK, lambda values: self._call(values[0], tuple(values[1:]))),
            "INST": (_TO_MARK, lambda values: self._call(_global_name(values[-1:]), tuple(values[:-1]))),
            "NEWOBJ": (2, lambda values: self._instance(*values)),
            "NEWOBJ_EX": (3, lambda values: self._instance(*values[:2])),
            "BINPERSID": (1, lambda values: self._storage(*values)),
        }

    def read(self, file: BinaryIO, what: str) -> object:
        """Interpret one pickle and leave `file`, which is in memory, just behind it. A refusal of damage calls it `what`."""
        try:
            return self._interpret(file)
        except DAMAGE:
            raise CheckpointError(f"This file's {what} is damaged or cut short.") from None
        finally:
            if self.calls:  # said first, whatever else is wrong: a payload often comes before broken bytes
                names = clean(", ".join(sorted(self.calls)[:3]), 90)
                refusal = f"This file asks to run code ({names}) when opened. It was not run; MiniGPT only opens files that hold plain data."
                raise CheckpointError(refusal) from None

    def _interpret(self, file: BinaryIO) -> object:
        stack: Values = []
        memo: dict[object, object] = {}  # by the number of a slot, never by a value
        for opcode, argument, _ in pickletools.genops(file):
            self._spend(1)
            name = opcode.name
            if name == "STOP":
                return stack.pop()
            if name in _LITERALS:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in self._makers:
                count, make = self._makers[name]
                values = _take(stack, count)
                stack.append(make(values if argument is None else [*values, argument]))
            elif name in _FILLERS:
                count, fill = _FILLERS[name]
                values = _take(stack, count)
                fill(stack[-1], values)
            elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "DUP":
                stack.append(stack[-1])
            else:
                _take(stack, _DROPS[name])
        raise ValueError("the pickle has no end")

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise CheckpointError(f"This file's index has too many entries (more than {MAX_STEPS:,}); it was not opened.")

    def _call(self, function: object, arguments: object) -> object:
        name = _name_of(function)
        if name == "torch._tensor._rebuild_from_type_v2" and isinstance(arguments, tuple):
            name, arguments = _name_of(arguments[0]), arguments[2]  # a parameter with attributes of its own: (function, type, arguments, state)
        if not isinstance(arguments, tuple):
            raise TypeError("arguments")
        if name in _KNOWN_CALLS:
            # A known call may copy its arguments, and one list can be handed to many calls: pay for its length each time.
            self._spend(sum(len(_members(argument)) for argument in arguments))
            result = _KNOWN_CALLS[name](arguments)
            if isinstance(result, Record):
                self.classes.add(result.class_name)
            return result
        if kind := _REFUSED_TENSORS.match(name):
            raise CheckpointError(f"This file holds a tensor of a kind MiniGPT does not open ({clean(kind[1].split('_tensor')[0], 20)}).")
        self.calls.add(name)
        return Record(name)

    def _instance(self, kind: object, arguments: object) -> object:
        class_name = _name_of(kind)
        if class_name == "collections.OrderedDict":
            return PickledDict()
        self.classes.add(class_name)
        return Record(class_name, arguments if isinstance(arguments, tuple) else ())

    def _storage(self, reference: object) -> Storage:
        if not isinstance(reference, tuple):
            raise TypeError("not a reference to a storage")
        tag, class_, key, _, numel = reference[:5]
        if tag not in ("storage", b"storage") or not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 2**63:
            raise ValueError("not a storage")
        kind = _name_of(class_).rsplit(".", 1)[-1]
        if kind not in _STORAGE_KINDS:
            raise CheckpointError(f"This file holds a tensor of a kind MiniGPT does not open ({clean(kind, 40)}).")
        storage = Storage(_STORAGE_KINDS[kind], key, numel)
        self.storages.setdefault(key, storage)
        return storage


def _name_of(value: object) -> str:
    return value.full if isinstance(value, GlobalName) else "something that is not named"


def _members(value: object) -> Values | Arguments | list[Pair]:
    if isinstance(value, PickledDict):
        return value.pairs
    return value if isinstance(value, (list, tuple)) else ()


# The steps of the machine. Most take some values off the stack: a maker puts back what it makes of them and of the step's own argument, a filler
# adds them to the value below.
_MARK = GlobalName("mark")
_TO_MARK = -1


def _take(stack: Values, count: int) -> Values:
    """Take `count` values off the stack, at most down to the last mark, which goes too; return them in the order in which they were put there."""
    values: Values = []
    while len(values) != count and (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]


def _global_name(parts: Values) -> GlobalName:
    """Return the name in ["module name"] or in [module, name]; two modules still go by their name in Python 2."""
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a name that is not text")
    module, _, name = ".".join(str(part)[:200] for part in parts).replace(" ", ".", 1).partition(".")
    return GlobalName({"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module) + "." + name)


def _pairs(values: Values) -> list[Pair]:
    return list(zip(values[::2], values[1::2], strict=True))


def _set_items(target: object, values: Values) -> None:
    if not isinstance(target, (PickledDict, Record)):
        raise TypeError("items set on something that has none")
    target.pairs.extend(_pairs(values))


def _append(target: object, values: Values) -> None:
    items = target.items if isinstance(target, Record) else target
    if not isinstance(items, list):
        raise TypeError("appended to something that is no list")
    items.extend(values)


def _set_state(target: object, values: Values) -> None:
    if isinstance(target, Record):  # no attributes are shown of a dict or a tensor
        target.state = values[0]


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_LITERALS = frozenset((*_NUMBERS, *_TEXTS, "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"))
_MAKERS: Mapping[str, tuple[int, Callable[[Values], object]]] = {
    **{f"TUPLE{size}": (size, tuple) for size in (1, 2, 3)},
    "TUPLE": (_TO_MARK, tuple),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), (0, list)),
    **dict.fromkeys(("LIST", "FROZENSET"), (_TO_MARK, list)),
    "EMPTY_DICT": (0, lambda _: PickledDict()),
    "DICT": (_TO_MARK, lambda values: PickledDict(_pairs(values))),
    "GLOBAL": (0, _global_name),
    "STACK_GLOBAL": (2, _global_name),
}
_FILLERS: Mapping[str, tuple[int, Callable[[object, Values], None]]] = {
    "SETITEM": (2, _set_items),
    "SETITEMS": (_TO_MARK, _set_items),
    "APPEND": (1, _append),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), (_TO_MARK, _append)),
    "BUILD": (1, _set_state),
}
_DROPS = {"POP": 1, "POP_MARK": _TO_MARK, "PROTO": 0, "FRAME": 0}


# The calls that honest checkpoints make. Each function takes what the file passed, trusts none of it, and returns what to keep instead.
def _tensor(arguments: Arguments) -> Tensor:
    storage, offset, shape, stride = arguments[0], arguments[1], whole_numbers(arguments[2]), whole_numbers(arguments[3])
    if not isinstance(storage, Storage) or type(offset) is not int or shape is None or stride is None or len(shape) != len(stride):
        raise TypeError("not a tensor")
    own = arguments[6] if len(arguments) > 6 else None  # the third version names its dtype, because its storage is bare bytes
    return Tensor(storage, _DTYPES[own.full] if isinstance(own, GlobalName) else storage.dtype, offset, shape, stride)


def _first(arguments: Arguments) -> object:
    return arguments[0] if arguments else ()


def _mapping(arguments: Arguments) -> object:
    source = _members(arguments[-1]) if arguments else ()
    return PickledDict([(pair[0], pair[1]) for pair in source if isinstance(pair, (list, tuple)) and len(pair) == 2])


def _encoded(arguments: Arguments) -> object:
    # How the older protocols write bytes. Only numpy's scalars matter; a longer text could be encoded thousands of times over and is only named.
    characters, encoding = arguments
    if encoding != "latin1" or not isinstance(characters, str):
        raise CheckpointError("This file asks for a text encoding that is not allowed (a call of _codecs.encode). It was not run.")
    return characters.encode("latin1") if len(characters) <= 64 else f"({len(characters):,} bytes)"


def _numpy_scalar(arguments: Arguments) -> object:
    code, data = arguments  # of a dtype only its code is kept, such as "f8": files from big-endian machines are refused anyway
    if not isinstance(code, str) or not isinstance(data, bytes) or code not in _NUMPY_CODES:
        return "(a numpy value)"
    return struct.unpack("<" + _NUMPY_CODES[code], data)[0]


_DTYPES = {name: dtype for dtype, name in TORCH_NAMES.items()}
_NUMPY_CODES = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}
# The storage classes of torch that hold plain numbers; quantized ones are left out on purpose.
_STORAGE_KINDS = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "C128", "UntypedStorage": "U8",
}  # fmt: skip
_KNOWN_CALLS: Mapping[str, Callable[[Arguments], object]] = {
    **dict.fromkeys((f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3")), _tensor),
    **dict.fromkeys(("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch.Size", "torch.device"), _first),
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict"), _mapping),
    **dict.fromkeys(("builtins.tuple", "builtins.list", "builtins.set", "builtins.frozenset", "numpy.dtype"), _first),
    **dict.fromkeys(
        (f"pathlib.{kind}Path" for kind in ("", "Posix", "Windows", "PurePosix", "PureWindows")),
        lambda arguments: "/".join(part[:200] for part in arguments[:50] if isinstance(part, str)),
    ),
    **dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), _numpy_scalar),
    "_codecs.encode": _encoded,
    "copyreg._reconstructor": lambda arguments: Record(_name_of(arguments[0])),
    "types.SimpleNamespace": lambda _: Record("types.SimpleNamespace"),
    "torch.serialization._get_layout": lambda _: None,
}
# Rebuilding calls outside _KNOWN_CALLS: sparse, nested, quantized, meta. Their contents cannot be checked by shape and stride alone.
_REFUSED_TENSORS = re.compile(r"torch\.(?:_utils|_tensor)\._rebuild_(.*)")
