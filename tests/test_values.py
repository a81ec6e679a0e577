from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minigpt.checkpoint import save_checkpoint
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError
from minigpt.inspection import inspect_file
from minigpt.inspection.values import CHUNK_ITEMS, open_values
from minigpt.model import MiniGPT


def expect(path: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare every value of a file with the tensors that were put into it."""
    with open_values(path) as values:
        assert set(values.shapes) == set(wanted) == {tensor.name for tensor in inspect_file(path).tensors}
        for name, tensor in wanted.items():
            chunks = list(values.chunks(name))
            assert {(chunk.dtype.name, chunk.ndim) for chunk in chunks} <= {("float32", 1)}
            assert all(chunk.size <= CHUNK_ITEMS for chunk in chunks)
            found = np.concatenate(chunks) if chunks else np.empty(0)
            assert values.shapes[name] == tuple(tensor.shape)
            assert np.array_equal(found, tensor.float().flatten().numpy(), equal_nan=True), name


def kinds() -> dict[str, torch.Tensor]:
    """One tensor of each kind of number, one of no number, one of several pieces, one with what is not finite."""
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    floats = {str(kind): values.to(kind) for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    others = {str(kind): torch.arange(2, 9).to(kind) for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}
    odd = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "odd": torch.tensor([torch.nan, torch.inf, -0.0])}
    return floats | others | odd | {"large": torch.arange(2 * CHUNK_ITEMS + 7, dtype=torch.float32)}


@pytest.mark.parametrize("legacy", [False, True])
def test_values_of_a_torch_file_are_those_that_were_saved(tmp_path: Path, legacy: bool) -> None:
    torch.save(kinds(), tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    expect(tmp_path / "a.pt", kinds())


def test_values_of_a_safetensors_file_are_those_that_were_saved(tmp_path: Path) -> None:
    save_file(kinds(), tmp_path / "a.safetensors")
    expect(tmp_path / "a.safetensors", kinds())


@pytest.mark.parametrize("legacy", [False, True])
def test_views_into_a_storage_are_read_in_their_own_order(tmp_path: Path, legacy: bool) -> None:
    whole = torch.arange(4000.0).view(40, 100)
    views = {
        "whole": whole, "transposed": whole.T, "later": whole[3:7], "column": whole[:, 5:6], "every_third": whole[::3, 1::7],
        "turned": whole.view(10, 4, 100).permute(2, 0, 1), "tall": torch.zeros(700, 500).add(torch.arange(500.0)).T,
    }  # fmt: skip
    torch.save({"state_dict": views}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    expect(tmp_path / "a.pt", views)


def test_two_tensors_can_be_read_in_turns(tmp_path: Path) -> None:
    save_file({"a": torch.arange(CHUNK_ITEMS + 1.0), "b": -torch.arange(CHUNK_ITEMS + 1.0)}, tmp_path / "a.safetensors")
    with open_values(tmp_path / "a.safetensors") as values:
        for a, b in zip(values.chunks("a"), values.chunks("b"), strict=True):
            assert np.array_equal(a, -b)


def test_a_file_of_ours_gives_the_model_alone(tmp_path: Path) -> None:
    config = TransformerConfig(vocab_size=9, max_seq_len=4, d_model=8, n_heads=2, n_layers=1, d_ff=8)
    model = MiniGPT(config)
    expect(save_checkpoint(model, torch.optim.AdamW(model.parameters()), config, 0, None, path=tmp_path / "a.safetensors"), model.state_dict())


def test_numbers_of_a_kind_that_numpy_lacks_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"small": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with open_values(tmp_path / "a.safetensors") as values, pytest.raises(CheckpointError, match=r"small holds numbers .* \(F8_E4M3\)"):
        list(values.chunks("small"))


def test_a_tensor_out_of_order_is_refused_when_it_is_too_large_to_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.inspection.values.MAX_STRIDED_BYTES", 100)
    torch.save({"a": torch.zeros(6, 6).T}, tmp_path / "a.pt")
    with open_values(tmp_path / "a.pt") as values, pytest.raises(CheckpointError, match="stored out of order"):
        list(values.chunks("a"))


def test_a_file_cut_short_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(CHUNK_ITEMS * 2)}, path)
    with open_values(path) as values:
        path.write_bytes(path.read_bytes()[:CHUNK_ITEMS])
        with pytest.raises(CheckpointError, match="cut short"):
            list(values.chunks("a"))
