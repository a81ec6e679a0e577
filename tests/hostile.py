"""Writes 128 small checkpoint files, valid, broken and hostile, with a manifest of what a reader must make of each.

    python tests/hostile.py OUT          # a few seconds, about 15 MB

Harmless by construction: the only thing a payload can do is create an empty file OUT/MARKER-<name>, which the tests assert never appears.
manifest.json holds [{file, group, what, expect, say}], where `expect` is
    reject   the reader refuses with one sentence that matches `say`
    warn     the reader opens the file and warns with a sentence that matches `say`
    accept   the reader opens the file
"""

import collections
import contextlib
import dataclasses
import io
import json
import os
import pickle
import struct
import sys
import tarfile
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

MB = 1 << 20
BOMB_BYTES = 32 * MB  # a thousand times what it takes on disk, and twice what an index may be
V, DIM = 65, 8
CONFIG: dict[str, object] = {"vocab_size": V, "context_length": 16, "d_model": DIM, "n_heads": 2, "n_layers": 1, "dropout": 0.0}


class Corpus:
    """The folder that is being filled and its manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: list[dict[str, str]] = []

    def note(self, file: str, group: str, what: str, expect: str, *, say: str = "") -> None:
        self.manifest.append({"file": file, "group": group, "what": what, "expect": expect, "say": say})

    def put(self, file: str, data: bytes, group: str, what: str, expect: str, *, say: str = "") -> None:
        (self.folder / file).write_bytes(data)
        self.note(file, group, what, expect, say=say)

    def marker(self, name: str) -> str:
        return str(self.folder / f"MARKER-{name}")


# A small pickle assembler: protocol 2, the opcodes that torch's own reader knows.
def text(value: str | bytes) -> bytes:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def decimal(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def name_of(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def numbers(values: list[int]) -> bytes:
    return tuple_of(*map(number, values))


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return name_of(module, name) + tuple_of(*arguments) + b"R"


def dict_of(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def program(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


FALSE = b"\x89"
ORDERED_DICT = call("collections", "OrderedDict")


def storage(key: str, numel: int, kind: str = "FloatStorage") -> bytes:
    return tuple_of(text("storage"), name_of("torch", kind), text(key), text("cpu"), number(numel)) + b"Q"


def tensor(data: bytes, shape: list[int], stride: list[int], offset: int = 0) -> bytes:
    return call("torch._utils", "_rebuild_tensor_v2", data, number(offset), numbers(shape), numbers(stride), FALSE, ORDERED_DICT)


def floats(count: int) -> bytes:
    return struct.pack("<f", 0.5) * count


def model(state: bytes, *more: tuple[bytes, bytes]) -> bytes:
    return program(dict_of((text("model"), state), (text("iter_num"), number(5)), *more))


def weight(numel: int, shape: list[int], stride: list[int], offset: int = 0) -> bytes:
    """A checkpoint with the one tensor "w" over a storage of `numel` floats."""
    return model(dict_of((text("w"), tensor(storage("0", numel), shape, stride, offset))))


def only_model(value: bytes) -> bytes:
    return program(dict_of((text("model"), value)))


def torch_zip(
    index: bytes,
    records: Mapping[str, bytes] | None = None,
    *,
    extra: list[tuple[str | zipfile.ZipInfo, bytes]] | None = None,
    deflate: str = "",
    with_format: bool = False,
) -> bytes:
    buffer = io.BytesIO()
    entries = {"data.pkl": index, "byteorder": b"little"}
    entries |= {".format_version": b"1"} if with_format else {}
    entries |= {f"data/{key}": value for key, value in (records or {}).items()} | {"version": b"3\n"}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data, zipfile.ZIP_DEFLATED if name == deflate else zipfile.ZIP_STORED)
        for info, data in extra or []:
            archive.writestr(info, data)
    return buffer.getvalue()


# Valid files, written by the libraries themselves.
def tiny_state() -> "collections.OrderedDict[str, Any]":
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    block = {"attn.qkv": (3 * DIM, DIM), "attn.proj": (DIM, DIM), "mlp.fc": (4 * DIM, DIM), "mlp.proj": (DIM, 4 * DIM)}
    state: collections.OrderedDict[str, Any] = collections.OrderedDict()
    state["tok_emb.weight"], state["pos_emb.weight"] = random(V, DIM), random(16, DIM)
    state.update({f"blocks.0.{name}.weight": random(*shape) for name, shape in block.items()})
    state.update({f"blocks.0.{name}.weight": torch.ones(DIM) for name in ("ln1", "ln2")})
    state["head.weight"] = state["tok_emb.weight"]  # tied, as in GPT-2
    return state


@contextlib.contextmanager
def pickled_classes() -> Iterator[tuple[Any, Any]]:
    """Classes from modules that no reader has: config.TransformerConfig, a dataclass, and Lightning's AttributeDict, a dict."""
    config_class = dataclasses.make_dataclass("TransformerConfig", [(name, type(value), value) for name, value in CONFIG.items()])
    attribute_dict = type("AttributeDict", (dict,), {})
    before = dict(sys.modules)
    for cls, module in ((config_class, "config"), (attribute_dict, "lightning.fabric.utilities.data")):
        cls.__module__ = module
        for depth in range(1, module.count(".") + 2):
            sys.modules[".".join(module.split(".")[:depth])] = types.ModuleType(module)
        setattr(sys.modules[module], cls.__name__, cls)
    try:
        yield config_class, attribute_dict
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("config", "lightning"):
                del sys.modules[name]
        sys.modules.update(before)


def classic(config: object) -> dict[str, object]:
    """What small trainers save: weights, optimizer, settings and progress in one dict."""
    optimizer = {
        "state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.zeros(V, DIM), "exp_avg_sq": torch.zeros(V, DIM)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}],
    }
    return {"model_state_dict": tiny_state(), "optimizer_state_dict": optimizer, "config": config, "step": 500, "val_loss": 1.83}


def write_valid(corpus: Corpus) -> None:

    def save(file: str, value: object, what: str, **options: Any) -> None:
        torch.save(value, corpus.folder / file, **options)
        corpus.note(file, "valid", what, "accept")

    state = tiny_state()
    nano = {"n_layer": 1, "n_head": 2, "n_embd": DIM, "block_size": 16, "bias": False, "vocab_size": V, "dropout": 0.0}
    with pickled_classes() as (config_class, attribute_dict):
        seed = classic(config_class(**CONFIG))
        save("ok_seed.pt", seed, "config is a pickled dataclass, config.TransformerConfig")
        save("ok_legacy.pt", seed, "the legacy stream of torch.save", _use_new_zipfile_serialization=False)
        lightning = {"epoch": 1, "global_step": 500, "pytorch-lightning_version": "2.5.0", "hyper_parameters": attribute_dict(CONFIG)}
        lightning |= {"state_dict": {f"model.{key}": value for key, value in state.items()}, "optimizer_states": [seed["optimizer_state_dict"]]}
        save("ok_lightning.ckpt", lightning | {"loops": {}, "callbacks": {}, "lr_schedulers": [], "hparams_name": "kwargs"}, "Lightning")
    nanogpt = {"model": state, "optimizer": seed["optimizer_state_dict"], "model_args": nano, "iter_num": 500}
    save("ok_nanogpt.pt", nanogpt | {"best_val_loss": torch.tensor(1.83), "config": {"dataset": "shakespeare_char"}}, "nanoGPT, loss a 0-d tensor")
    save("ok_state_dict.pth", state, "bare state dict")
    save("ok_bf16.pth", {key: value.bfloat16() for key, value in state.items()}, "bare bf16 state dict")
    save("ok_proto4.pt", {"model": state, "iter_num": 1}, "pickle protocol 4", pickle_protocol=4)
    save("ok_numpy_scalar.pt", {"model": state, "iter_num": np.int64(500), "best_val_loss": np.float64(1.83)}, "numpy scalars as step and loss")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))
        traced.save(str(corpus.folder / "torchscript.pt"))
    corpus.note("torchscript.pt", "pickle", "a real TorchScript archive renamed .pt", "reject", say="TorchScript")
    write_safetensors(corpus, "ok_hf.safetensors", untied(state))
    corpus.note("ok_hf.safetensors", "valid", "safetensors as transformers writes it", "accept")
    write_safetensors(corpus, "ok_minigpt.safetensors", untied(state), ours())
    corpus.note("ok_minigpt.safetensors", "valid", "MiniGPT's own metadata", "accept")


def untied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() for key, value in state.items() if key != "head.weight"}


def ours() -> dict[str, object]:
    return {"format": "minigpt/1", "step": 500, "val_loss": 1.83, "config": CONFIG, "tokenizer": "{}"}


def write_safetensors(corpus: Corpus, file: str, state: dict[str, Any], metadata: Mapping[str, object] | None = None) -> None:
    entries = {"format": "pt"} | ({"minigpt": json.dumps(metadata)} if metadata is not None else {})
    save_file(state, corpus.folder / file, metadata=entries)


def write_senseless(corpus: Corpus) -> None:
    """Files of torch.save that open and contradict themselves."""
    state = tiny_state()
    one = torch.zeros(1)
    odd = ["<img src=x onerror=alert(1)>", "\x1b[2Jx", "a\u202egnp", "a\nb", "s\udc80", 7, "L" * MB, "=1+1"]
    nan = {key: value.clone() for key, value in state.items()}
    nan["tok_emb.weight"][3, 3] = float("nan")
    odd_dtypes = {"tok_emb.weight": torch.zeros(V, DIM, dtype=torch.long), "pos_emb.weight": torch.zeros(16, DIM, dtype=torch.complex64)}
    blocks = {key: value for key, value in state.items() if "blocks" in key}
    changes: list[tuple[str, str, str, dict[str, object]]] = [
        ("nan_weights", "one NaN weight", "NaN|not finite", {"model_state_dict": nan}),
        ("wrong_dtype", "int64 and complex64 weights", "dtype", {"model_state_dict": state | odd_dtypes}),
        ("missing_keys", "no head, no embedding", "missing", {"model_state_dict": blocks}),
        ("extra_keys", "1000 unknown tensors", "unknown|extra", {"model_state_dict": state | {f"zzz.{i}": one for i in range(1000)}}),
        ("vocab_mismatch", "config says 100 tokens, embedding has 65", "vocab", {"config": CONFIG | {"vocab_size": 100}}),
        ("huge_config", "config asks for 10**9 layers", "config|layers", {"config": CONFIG | {"n_layers": 10**9, "d_model": 10**6}}),
        ("config_list", "config is a list", "config", {"config": [1, 2]}),
        ("step_bool", "step True, val_loss False", "step", {"step": True, "val_loss": False}),
        ("step_str", "step '500', val_loss 'low'", "step", {"step": "500", "val_loss": "low"}),
        ("step_none", "step None, val_loss None", "step", {"step": None, "val_loss": None}),
        ("step_neg", "step -5, val_loss -1", "step", {"step": -5, "val_loss": -1.0}),
        ("step_2e70", "step 2**70", "step", {"step": 2**70}),
        ("loss_inf", "val_loss inf", "loss", {"val_loss": float("inf")}),
        ("loss_nan", "val_loss NaN", "loss", {"val_loss": float("nan")}),
        ("names", "names: HTML, ANSI, right-to-left, newline, surrogate, int, 1 MB", "name", {"model_state_dict": {key: one.clone() for key in odd}}),
    ]
    for name, what, say, change in changes:
        torch.save(classic(dict(CONFIG)) | change, corpus.folder / f"sem_{name}.pt")
        corpus.note(f"sem_{name}.pt", "semantic", what, "warn", say=say)
    torch.save(classic(CONFIG) | {"model_state_dict": {}, "optimizer_state_dict": {}}, corpus.folder / "sem_no_tensors.pt")
    corpus.note("sem_no_tensors.pt", "semantic", "model_state_dict is empty", "reject", say="no tensors|no weights")


def write_broken(corpus: Corpus) -> None:
    """Files broken by accident."""
    good = (corpus.folder / "ok_seed.pt").read_bytes()
    flipped = bytearray((corpus.folder / "ok_nanogpt.pt").read_bytes())
    flipped[flipped.index(b"PK", flipped.index(b"data/0")) - 200] ^= 0x40
    document = io.BytesIO()
    with zipfile.ZipFile(document, "w") as archive:
        archive.writestr("word/document.xml", "<x/>")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 548105171\n"
    page = b"<!DOCTYPE html><html><head><title>403 Forbidden</title></head></html>"
    files: list[tuple[str, bytes, str, str]] = [
        ("empty.pt", b"", "0 bytes", "empty"),
        ("text.pt", b"hello, this is not a model\n" * 3, "text file", "not a checkpoint"),
        ("html_error.pt", page, "web error page saved as .pt", "web page|HTML"),
        ("git_lfs_pointer.pt", pointer, "git-lfs pointer", "LFS"),
        ("json.pt", b'{"model": "gpt"}', "JSON file", "not a checkpoint|JSON"),
        ("png.pt", b"\x89PNG\r\n\x1a\n" + bytes(64), "PNG renamed", "not a checkpoint"),
        ("random.pt", bytes((i * 197 + 31) % 256 for i in range(4096)), "noise", "not a checkpoint"),
        ("truncated_half.pt", good[: len(good) // 2], "first half of a valid zip", "cut short|truncated|incomplete"),
        ("truncated_tail.pt", good[:-100], "last 100 bytes missing", "cut short|truncated|incomplete"),
        ("bitflip_storage.pt", bytes(flipped), "one bit flipped inside a tensor", "checksum|CRC|damaged"),
        ("not_torch.zip.pt", document.getvalue(), "a zip like a .docx", "data.pkl|not a checkpoint"),
        ("pickle_trunc.pt", torch_zip(only_model(dict_of())[:-4]), "data.pkl cut short", "cut short|damaged|pickle"),
        ("missing_record.pt", torch_zip(weight(4, [4], [1])), "tensor whose record is not in the zip", "missing"),
    ]
    for file, data, what, say in files:
        corpus.put(file, data, "broken", what, "reject", say=say)


class Command:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def write_payloads(corpus: Corpus) -> None:
    """Files that try to run code when they are unpickled."""

    def evil(name: str) -> bytes:
        return call("builtins", "eval", text(f"open({corpus.marker(name)!r}, 'w').close()"))

    def system(name: str) -> bytes:
        return call("posix", "system", text("touch " + corpus.marker(name)))

    w = (text("model"), dict_of((text("w"), tensor(storage("0", 4), [4], [1]))))
    hidden = program(dict_of(w, (text("config"), evil("in_config")), (text("step"), number(5))))
    fallback = program(dict_of((text("a"), call("collections", "deque")), (text("b"), evil("fallback"))))
    junk = dict_of((text("n_layers"), number(10**9)), (text("__class__"), text("x")), (text("d_model"), text("8; rm")))
    stuffed = program(dict_of(w, (text("config"), name_of("config", "TransformerConfig") + b")\x81" + junk + b"b"), (text("step"), number(1))))
    shadow = ORDERED_DICT + dict_of((text("items"), name_of("builtins", "bytearray")), (text("keys"), number(3))) + b"b"
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(program(system("tar")))
            archive.addfile(member, io.BytesIO(program(system("tar"))))
    bare = pickle.dumps(Command(os.system, "touch " + corpus.marker("legacy")), 2)
    gadget = call("torch.hub", "load_state_dict_from_url", text("file:///nonexistent"))
    files: list[tuple[str, bytes, str, str, str]] = [
        ("rce_os_system.pt", torch_zip(program(system("os_system"))), "posix.system on load", "reject", "posix.system|code"),
        ("rce_eval.pt", torch_zip(program(evil("eval"))), "builtins.eval on load", "reject", "eval|code"),
        ("rce_in_config.pt", torch_zip(hidden, {"0": floats(4)}), "looks valid; config is an eval call", "reject", "eval|code"),
        ("rce_legacy.pt", bare, "bare pickle, no zip", "reject", "system|code"),
        ("rce_before_garbage.pt", program(evil("before"))[:-1] + b"\xff" * 32, "payload, then a broken stream", "reject", "eval|code"),
        ("rce_torch_gadget.pt", torch_zip(program(gadget)), "torch's own unsafe loader", "reject", "torch.hub|code"),
        ("rce_safe_then_unsafe.pt", torch_zip(fallback), "catches readers that fall back to the unsafe way", "reject", "eval|code"),
        ("seed_config_state.pt", torch_zip(stuffed, {"0": floats(4)}), "BUILD stuffs junk into a dataclass", "warn", "config"),
        ("legacy_tar.pt", tar.getvalue(), "legacy tar format carrying a pickle", "reject", "tar"),
        ("odict_shadow.pt", torch_zip(only_model(shadow)), "OrderedDict with .items replaced", "reject", "no tensors|not a checkpoint|damaged"),
    ]
    for file, data, what, expect, say in files:
        corpus.put(file, data, "pickle", what, expect, say=say)


def doubled(times: int) -> bytes:
    """A tuple that holds the one before twice, `times` times over: any walk or hash of it takes 2**times steps."""
    return text("x") + b"q\x00" + b"h\x00\x86q\x00" * times


def write_false_shapes(corpus: Corpus) -> None:
    """Tensors that claim more than their data, or are of a kind whose claims cannot be checked."""
    larger = "larger|outside|shape"
    lies: list[tuple[str, bytes, int, str, str]] = [
        ("shape_stride0", weight(1, [2**40], [0]), 1, "shape 2**40 with stride 0 over 4 bytes", "stride|larger|shape"),
        ("shape_resize_1g", weight(1, [2**28], [1]), 1, "1 GiB shape over a 4-byte storage", larger),
        ("shape_resize_4t", weight(1, [2**40], [1]), 1, "4 TiB shape over a 4-byte storage", larger),
        ("shape_negative", weight(4, [-4], [1]), 4, "negative shape", "shape|negative"),
        ("stride_negative", weight(4, [4], [-1], 3), 4, "negative stride", "stride"),
        ("offset_outside", weight(4, [4], [1], 2**40), 4, "storage offset 2**40", "outside|larger"),
        ("shape_overflow", weight(4, [2**62, 2**62], [1, 1]), 4, "shape product overflows int64", "shape|larger"),
        ("storage_4t", weight(2**40, [2**40], [1]), 1, "4 TiB declared, record holds 4 bytes", "size|record|larger"),
    ]
    for name, index, held, what, say in lies:
        corpus.put(f"{name}.pt", torch_zip(index, {"0": floats(held)}), "resource", what, "reject", say=say)
    lying = torch_zip(weight(64, [64], [1]), {"0": floats(4)}, with_format=True)
    corpus.put("storage_lies.pt", lying, "resource", "64 floats declared, record holds 4", "reject", say="size|record|larger")
    over = dict_of((text("a"), tensor(storage("0", 8), [4], [1])), (text("b"), tensor(storage("0", 8), [2, 4], [1, 1])))
    corpus.put("overlap_ok.pt", torch_zip(model(over), {"0": floats(8)}), "resource", "two tensors over one storage", "warn", say="missing")

    def longs(key: str, shape: list[int]) -> bytes:
        numel, stride = (shape[0] * shape[1], [shape[1], 1]) if len(shape) == 2 else (shape[0], [1])
        return tensor(storage(key, numel, "LongStorage"), shape, stride)

    def sparse(shape: list[int]) -> bytes:
        parts = tuple_of(longs("0", [2, 1]), tensor(storage("1", 1), [1], [1]), call("torch", "Size", numbers(shape)))
        return call("torch._utils", "_rebuild_sparse_tensor", call("torch.serialization", "_get_layout", text("torch.sparse_coo")), parts)

    meta = call("torch._utils", "_rebuild_meta_tensor_no_storage", name_of("torch", "float32"), numbers([2**40]), numbers([1]), FALSE)
    scheme = tuple_of(name_of("torch", "per_tensor_affine"), decimal(0.1), number(0))
    quantized = call(
        "torch._utils", "_rebuild_qtensor", storage("0", 4, "QInt8Storage"), number(0), numbers([4]), numbers([1]), scheme, FALSE, ORDERED_DICT
    )
    nested = call(
        "torch._utils", "_rebuild_nested_tensor", tensor(storage("0", 4), [4], [1]), longs("1", [1, 2]), longs("2", [1, 2]), longs("3", [1])
    )
    pairs = {"0": floats(4), "1": struct.pack("<qq", 1024, 1024), "2": struct.pack("<qq", 1024, 1), "3": struct.pack("<q", 0)}
    kinds: list[tuple[str, bytes, dict[str, bytes], str, str]] = [
        ("sparse_10g", sparse([50000, 50000]), {"0": struct.pack("<qq", 1, 1), "1": floats(1)}, "sparse, 10 GB once dense", "sparse"),
        ("sparse_oob", sparse([4, 4]), {"0": struct.pack("<qq", 2**40, 1), "1": floats(1)}, "sparse, index outside its shape", "sparse"),
        ("meta_tensor", meta, {}, "meta tensor of 2**40 elements", "meta|no data|not allowed"),
        ("quantized", quantized, {"0": bytes(4)}, "quantized tensor", "quantized|kind|not allowed"),
        ("nested_oob", nested, pairs, "nested tensor larger than its buffer", "nested|not allowed"),
    ]
    for name, value, records, what, say in kinds:
        corpus.put(f"{name}.pt", torch_zip(model(dict_of((text("w"), value))), records), "resource", what, "reject", say=say)


def write_floods(corpus: Corpus) -> None:
    """Indexes and containers that cost their reader far more than they weigh."""
    bomb = model(dict_of((text("w"), tensor(storage("0", BOMB_BYTES // 4), [BOMB_BYTES // 4], [1]))))
    zeros = torch_zip(bomb, {"0": bytes(BOMB_BYTES)}, deflate="data/0")
    letters = torch_zip(only_model(text(b"a" * BOMB_BYTES)), deflate="data.pkl")
    corpus.put("bomb_pickle.pt", letters, "resource", "data.pkl deflated 1000:1", "reject", say="compressed|bomb|too large")
    corpus.put("bomb_storage.pt", zeros, "resource", "tensor record deflated 1000:1", "reject", say="compressed|bomb")
    chinese = "".join(chr(0x4E00 + (i * 7919) % 20000) for i in range(30000))
    floods: list[tuple[str, bytes, str, str]] = [
        ("ctor_tensor_8g", only_model(call("torch", "Tensor", number(2**31))), "torch.Tensor(2**31)", "torch.Tensor|not allowed|call"),
        ("ctor_bytearray_4g", only_model(call("builtins", "bytearray", number(2**32))), "bytearray(2**32)", "bytearray|not allowed|call"),
        (
            "encode_punycode",
            only_model(call("_codecs", "encode", text(chinese), text("punycode"))),
            "a quadratic codec",
            "encode|not allowed|call|no tensors",
        ),
        ("hash_bomb", program(dict_of((doubled(64), number(1)))), "64 doubled tuples as a dict key", "key|no tensors"),
        ("laughs", only_model(doubled(64)), "64 doubled tuples as a value", "too many|nested|no tensors"),
        ("deep_list_10k", only_model(b"]" * 10000 + b"a" * 9999), "list nested 10 000 deep", "nested|deep|no tensors"),
        (
            "deep_tuple_key",
            program(dict_of((text("x") + b"\x85" * 1_000_000, number(1)))),
            "tuple nested 1 000 000 deep as a dict key",
            "nested|deep|too many",
        ),
        ("reduce_flood", only_model(b"](" + ORDERED_DICT * 20000 + b"e"), "20 000 OrderedDict() calls", "too many|no tensors"),
        ("int_flood", only_model(b"](" + b"K\x01" * 2_000_000 + b"e"), "list of 2 000 000 ints", "too many|no tensors"),
        ("memo_gap", only_model(text("x") + b"r\xff\xff\xff\x7f"), "memo index 2**31", "no tensors|memo|damaged"),
    ]
    for name, index, what, say in floods:
        corpus.put(f"{name}.pt", torch_zip(index), "resource", what, "reject", say=say)
    twice = dict_of((text("w"), tensor(storage("0", 4), [4], [1])), (text("w"), number(3)))
    index = program(dict_of((text("model"), twice), (text("step"), number(1)), (text("step"), number(2))))
    corpus.put("dup_keys.pt", torch_zip(index, {"0": floats(4)}), "resource", "the same key twice", "warn", say="twice|duplicate")
    for name, numel, what in (("legacy_2g", 2**29, "2 GiB"), ("legacy_4t", 2**40, "4 TiB")):
        corpus.put(f"{name}.pt", legacy(numel), "resource", f"legacy, {what} declared, 16 bytes present", "reject", say="size|larger|cut short")


def legacy(numel: int) -> bytes:
    """A legacy stream whose one storage declares `numel` floats and holds four."""
    reference = tuple_of(text("storage"), name_of("torch", "FloatStorage"), text("0"), text("cpu"), number(numel), b"N") + b"Q"
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    headers = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, machine)]
    index = only_model(dict_of((text("w"), tensor(reference, [4], [1]))))
    return b"".join(headers) + index + pickle.dumps(["0"], 2) + struct.pack("<q", 4) + floats(4)


def write_zips(corpus: Corpus) -> None:
    """Zip directories that lie."""
    w, record = weight(4, [4], [1]), {"0": floats(4)}
    link = zipfile.ZipInfo("archive/data/1")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    outside: list[tuple[str | zipfile.ZipInfo, bytes]] = [("../../evil.txt", b"x"), ("/tmp/abs.txt", b"x"), ("C:\\evil.txt", b"x")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second = torch_zip(w, record, extra=[("archive/data.pkl", program(call("builtins", "eval", text("1"))))])
    lie = bytearray(torch_zip(w, record))
    struct.pack_into("<I", lie, lie.index(b"PK\x01\x02") + 24, 2**31)
    many = torch_zip(w, record, extra=[(f"archive/x/{i}", b"") for i in range(20000)])
    files: list[tuple[str, bytes, str, str, str]] = [
        ("zip_traversal.pt", torch_zip(w, record, extra=outside), "entries outside the folder", "warn", "name|unexpected"),
        ("zip_symlink.pt", torch_zip(w, record, extra=[(link, b"/etc/passwd")]), "a symlink entry", "warn", "symlink|unexpected"),
        ("zip_dup_pickle.pt", second, "two data.pkl entries", "reject", "twice|duplicate"),
        ("zip_20k_entries.pt", many, "20 000 empty entries", "reject", "too many|entries|unexpected"),
        ("zip_prefixed.pt", b"MZ" + bytes(62) + torch_zip(w, record), "64 foreign bytes in front", "reject", "not a checkpoint|damaged"),
        ("zip_size_lie.pt", bytes(lie), "directory says data.pkl unpacks to 2 GiB", "reject", "size|damaged|too large"),
    ]
    for file, data, what, expect, say in files:
        corpus.put(file, data, "resource", what, expect, say=say)


def safetensors_bytes(header: bytes | Mapping[str, object], body: bytes = b"", length: int | None = None) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(data) if length is None else length) + data + body


def entry(dtype: str = "F32", shape: list[int] | None = None, begin: int = 0, end: int = 16) -> dict[str, object]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}


def write_headers(corpus: Corpus) -> None:
    """Safetensors headers that break the format or say nonsense."""
    x16, one = bytes(16), {"w": entry()}
    same = b'"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
    tag, rtl, long = "<img src=x onerror=alert(1)>", "a\u202egnp", "L" * MB
    names = {name: entry(shape=[1], begin=4 * i, end=4 * i + 4) for i, name in enumerate((tag, rtl, long))}
    many = {f"t{i}": entry(shape=[0], end=0) for i in range(60000)}

    def meta(value: object) -> dict[str, object]:
        return {"__metadata__": value, **one}

    nan_literal = '{"step": 1, "val_loss": NaN, "config": null}'
    files: list[tuple[str, bytes, str, str]] = [
        ("empty", b"", "0 bytes", "empty"),
        ("7bytes", bytes(7), "7 bytes", "cut short|too short|header"),
        ("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 1\n", "git-lfs pointer", "LFS"),
        ("len_2e63", safetensors_bytes(b"{}", length=2**63), "header length 2**63", "header"),
        ("len_101mb", safetensors_bytes(b"{}", length=101 * MB), "header length 101 MB, file 10 bytes", "header"),
        ("len_gt_file", safetensors_bytes(b"{}", length=5000), "header longer than file", "header"),
        ("not_json", safetensors_bytes(b"{nope}"), "header is not JSON", "header"),
        ("not_utf8", safetensors_bytes(b'{"\xff\xfe":{}}'), "header not UTF-8", "header"),
        ("list", safetensors_bytes(b"[1]    "), "header is a list", "header"),
        ("dup", safetensors_bytes(b"{" + same + b"," + same + b"}", x16), "duplicate tensor name", "twice|duplicate"),
        ("overlap", safetensors_bytes({**one, "v": entry(begin=8, end=24)}, bytes(24)), "overlapping offsets", "offset|overlap"),
        ("hole", safetensors_bytes({**one, "v": entry(begin=32, end=48)}, bytes(48)), "hole between tensors", "offset|hole"),
        ("past_end", safetensors_bytes(one, bytes(8)), "offsets past the end", "cut short|offset|incomplete"),
        ("trailing", safetensors_bytes(one, bytes(116)), "100 trailing bytes", "trailing|offset|incomplete"),
        ("negative", safetensors_bytes({"w": entry(shape=[-4])}, x16), "negative shape", "header|shape"),
        ("overflow", safetensors_bytes({"w": entry(shape=[2**63, 2**63])}, x16), "shape overflows", "shape|overflow|header"),
        ("shape_lie", safetensors_bytes({"w": entry(shape=[2**40])}, x16), "4 TiB shape over 16 bytes", "shape|offset"),
        ("dtype", safetensors_bytes({"w": entry("F33")}, x16), "unknown dtype", "dtype|header"),
        ("meta_int", safetensors_bytes(meta({"step": 5}), x16), "metadata value not a string", "header|metadata"),
        ("hdr_deep", safetensors_bytes(b'{"__metadata__":' + b"[" * 100000), "JSON header nested 100 000 deep", "header|nested"),
        ("60k_tensors", safetensors_bytes(many), "60 000 empty tensors", "too many|tensors"),
        ("is_pickle", (corpus.folder / "rce_eval.pt").read_bytes(), "a malicious .pt renamed", "header|pickle|eval"),
    ]
    for name, data, what, say in files:
        corpus.put(f"st_{name}.safetensors", data, "safetensors", what, "reject", say=say)
    odd: list[tuple[str, bytes, str, str]] = [
        ("zero_dim_huge", safetensors_bytes({"w": entry(shape=[2**40, 0], end=0)}), "shape [2**40, 0]: legal, no bytes", "empty|shape"),
        ("meta_deep", safetensors_bytes(meta({"minigpt": "[" * 100000 + "]" * 100000}), x16), "our JSON nested 100 000 deep", "metadata|nested"),
        ("meta_bigint", safetensors_bytes(meta({"minigpt": '{"step": ' + "9" * 10000 + "}"}), x16), "step of 10 000 digits", "step|metadata"),
        ("meta_nan", safetensors_bytes(meta({"minigpt": nan_literal}), x16), "NaN literal in our JSON", "loss|metadata"),
        ("names", safetensors_bytes(names, bytes(12)), "hostile tensor names", "name"),
    ]
    for name, data, what, say in odd:
        corpus.put(f"st_{name}.safetensors", data, "safetensors", what, "warn", say=say)
    nan = untied(tiny_state())
    nan["tok_emb.weight"].fill_(float("nan"))
    write_safetensors(corpus, "st_nan.safetensors", nan, ours())
    corpus.note("st_nan.safetensors", "safetensors", "NaN weights", "warn", say="NaN|not finite")
    corpus.put("pt_is_st.pt", (corpus.folder / "ok_hf.safetensors").read_bytes(), "safetensors", "safetensors renamed .pt", "accept")


def write_names(corpus: Corpus) -> None:
    """One good file under awkward names."""
    good = (corpus.folder / "ok_seed.pt").read_bytes()
    cyrillic = "\u0442\u0435\u0441\u0442 \U0001f600.pt"
    awkward = ["rtl_\u202etp.exe.pt", "L" * 250 + ".pt", cyrillic, "-rf.pt", "a\nb\tc.pt", "<img src=x onerror=alert(1)>.pt", "..pt", "con.pt"]
    for name in [*awkward, "%2e%2e%2fetc.pt", "NOEXT", "UPPER.PT", os.fsdecode(b"bad_\xff\xfe.pt")]:
        corpus.put(name, good, "filename", "an awkward name", "accept")
    corpus.put("a.pt.safetensors", good, "filename", "two extensions, content is .pt", "warn", say="named")


def write_corpus(folder: Path) -> list[dict[str, str]]:
    """Fill `folder`, write manifest.json into it and return its entries."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(folder)
    writers = (write_valid, write_senseless, write_broken, write_payloads, write_false_shapes, write_floods, write_zips, write_headers, write_names)
    for write in writers:
        write(corpus)
    (folder / "manifest.json").write_text(json.dumps(corpus.manifest, indent=0))
    return corpus.manifest


if __name__ == "__main__":
    found = write_corpus(Path(sys.argv[1] if len(sys.argv) > 1 else "hostile").absolute())
    print(f"{len(found)} files: {dict(collections.Counter(item['expect'] for item in found))}")
