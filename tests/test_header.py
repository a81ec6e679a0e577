import io
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from minigpt.errors import CheckpointError
from minigpt.header import MAX_TENSORS, clean, our_metadata, read_header, read_header_of, strict_json


def blob(header: object, body: bytes = b"") -> io.BytesIO:
    data = json.dumps(header).encode()
    return io.BytesIO(struct.pack("<Q", len(data)) + data + body)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes


def test_a_header_written_by_the_library_is_read_with_names_types_shapes_and_places(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16), "c": torch.zeros(0, 4), "d": torch.tensor(7)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {name: (found.dtype, found.shape) for name, found in header.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (3,)),
        "c": ("F32", (0, 4)),
        "d": ("I64", ()),
    }
    assert header.metadata == {"format": "pt"}
    assert header.size_bytes == path.stat().st_size
    begin, end = header.data_start + header.tensors["a"].begin, header.data_start + header.tensors["a"].end
    assert path.read_bytes()[begin:end] == struct.pack("<6f", *range(6))


def test_our_metadata_is_parsed_and_absent_from_other_files() -> None:
    ours = save({"w": torch.zeros(1)}, metadata={"minigpt": '{"step": 5, "val_loss": null}'})
    assert our_metadata(read_header_of(io.BytesIO(ours))) == {"step": 5, "val_loss": None}
    assert our_metadata(read_header_of(io.BytesIO(save({"w": torch.zeros(1)})))) is None


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}", "[" * 100_000])
def test_broken_metadata_of_ours_is_refused_in_a_sentence(text: str) -> None:
    data = save({"w": torch.zeros(1)}, metadata={"minigpt": text})
    with pytest.raises(CheckpointError, match="metadata"):
        our_metadata(read_header_of(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("header", "body", "sentence"),
    [
        ([], b"", "named tensors"),
        ({"w": entry(dtype="F33")}, bytes(16), "unknown dtype"),
        ({"w": entry(dtype=["F32"])}, bytes(16), "unknown dtype"),
        ({"w": entry(shape=[True] * 4)}, bytes(16), "impossible shape"),
        ({"w": entry(shape=[-4])}, bytes(16), "impossible shape"),
        ({"w": entry(shape=[1] * 9)}, bytes(16), "impossible shape"),
        ({"w": entry(shape=[5])}, bytes(16), "disagree"),
        ({"w": entry(shape=[0], data_offsets=[4, 0])}, bytes(16), "disagree"),
        ({"w": entry(), "v": entry()}, bytes(16), "hole or an overlap"),
        ({"w": entry(data_offsets=[4, 20])}, bytes(20), "hole or an overlap"),
        ({"w": entry()}, bytes(8), "cut short"),
        ({"w": entry()}, bytes(17), "trailing"),
        ({"__metadata__": {"step": 5}, "w": entry()}, bytes(16), "not text"),
        ({f"t{i}": entry(shape=[0], data_offsets=[0, 0]) for i in range(MAX_TENSORS + 1)}, b"", "too many tensors"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused_with_the_rule(header: object, body: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        read_header_of(blob(header, body))


def test_a_header_length_beyond_the_file_or_the_limit_is_refused_before_it_is_read() -> None:
    for length in (3, 17 << 20, 2**63):
        with pytest.raises(CheckpointError, match="cut short"):
            read_header_of(io.BytesIO(struct.pack("<Q", length) + b"{}"))


def test_a_missing_file_and_a_folder_are_said_without_their_path(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        assert str(tmp_path) not in str(caught.value)


def test_strict_json_keeps_what_is_plain() -> None:
    assert strict_json('{"a": [1, -2.5, null, true, "\\u00e9"]}', "header") == {"a": [1, -2.5, None, True, "é"]}


def test_text_from_a_file_is_shown_without_control_direction_or_surrogate_characters() -> None:
    assert clean("a\x1b[2J\u202eb\ud800\nc") == "a\ufffd[2J\ufffdb\ufffd\ufffdc"
    assert clean("a\nb\tc\r", lines=True) == "a\nb\tc\ufffd"
    assert clean("x" * 300) == "x" * 200 + "…"
    assert clean("naïve Ⅷ 😀") == "naïve Ⅷ 😀"
    assert [clean(value) for value in (7, None, True, 10**5000, ["a"])] == ["7", "None", "True", "(a very large number)", "(list)"]
