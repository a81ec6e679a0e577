import functools
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minigpt.checkpoint import save_checkpoint
from minigpt.config import TransformerConfig
from minigpt.errors import CheckpointError
from minigpt.inspection import inspect_safely, sandbox
from minigpt.inspection.measuring import measure_safely
from minigpt.inspection.statistics import BINS, MAP_SIDE, Floats, TensorStatistics, measure
from minigpt.model import MiniGPT


def measured(values: torch.Tensor, piece: int = 7, *, picture: bool = False) -> TensorStatistics:
    """Measure a tensor that comes in pieces of this size."""
    flat = values.flatten().float().numpy()
    *counts, found = measure("w", tuple(values.shape), lambda: (flat[i : i + piece] for i in range(0, flat.size, piece)), picture=picture)
    assert isinstance(found, TensorStatistics)
    assert sum(count for count in counts if isinstance(count, int)) in (flat.size, 2 * flat.size)
    return found


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_what_is_found_in_pieces_is_what_torch_finds_in_the_whole(piece: int) -> None:
    values = torch.randn(37, 11, generator=torch.Generator().manual_seed(1)) * 0.02 + 3
    values[3, 4] = values[20, 1] = 0.0
    found = measured(values, piece)
    assert (found.minimum, found.maximum) == (float(values.min()), float(values.max()))
    assert found.mean == pytest.approx(float(values.double().mean()), rel=1e-12)
    assert found.std == pytest.approx(float(values.double().std(correction=0)), rel=1e-12)
    assert (found.zeros, found.nan, found.infinite) == (2, 0, 0)
    assert found.histogram == torch.histogram(values.double(), BINS).hist.int().tolist()


def test_a_small_spread_about_a_large_mean_is_not_lost() -> None:
    values = torch.arange(20_000).remainder(2).float() + 2.0**23  # float32 just tells these apart; the square of the sum would drown them
    assert measured(values, 999).std == pytest.approx(0.5, rel=1e-9)


def test_what_is_not_finite_is_counted_and_left_out_of_the_rest() -> None:
    found = measured(torch.tensor([1.0, math.nan, math.inf, 3.0, -math.inf, math.nan, 0.0]), 2)
    assert (found.nan, found.infinite, found.zeros) == (2, 2, 1)
    assert (found.minimum, found.maximum, found.mean) == (0.0, 3.0, pytest.approx(4 / 3))
    assert sum(found.histogram) == 3
    nothing = measured(torch.full((3,), math.nan), picture=True)
    assert (nothing.minimum, nothing.mean, nothing.std, nothing.histogram, nothing.nan) == (None, None, None, [], 3)
    assert measured(torch.zeros(0, 4), picture=True).minimum is None


def test_the_picture_is_made_of_the_means_of_equal_blocks() -> None:
    values = torch.arange(128.0).repeat(256, 1)
    picture = torch.tensor(measured(values, 1000, picture=True).picture)
    assert picture.shape == (MAP_SIDE, MAP_SIDE)
    assert torch.equal(picture, values.view(64, 4, 64, 2).mean((1, 3)))
    assert measured(torch.tensor([[1.0, math.nan], [math.inf, 4.0]]), picture=True).picture == [[1.0, None], [None, 4.0]]
    sizes = {shape: np.shape(measured(torch.ones(shape), 50, picture=True).picture) for shape in ((5,), (300,), (3, 100), (70, 2, 40), (65, 1), ())}
    assert sizes == {(5,): (1, 5), (300,): (1, 64), (3, 100): (3, 64), (70, 2, 40): (64, 64), (65, 1): (64, 1), (): (1, 1)}


def test_the_memory_does_not_grow_with_the_tensor() -> None:
    piece = np.ones(1 << 16, np.float32)

    def chunks(count: int) -> Iterator[Floats]:
        return iter([piece] * count)

    peaks = []
    for count in (4, 64):
        tracemalloc.start()
        list(measure("w", (count, piece.size), functools.partial(chunks, count), picture=True))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def finished(path: Path, name: str = "") -> dict[str, TensorStatistics]:
    return {found.name: found for _, found in measure_safely(path, name) if found}


def test_a_child_measures_every_tensor_of_a_file_of_ours_under_its_shown_name(tmp_path: Path) -> None:
    config = TransformerConfig(vocab_size=30, max_seq_len=8, d_model=8, n_heads=2, n_layers=1, d_ff=16)
    model = MiniGPT(config)
    path = save_checkpoint(model, torch.optim.AdamW(model.parameters()), config, 0, None, path=tmp_path / "a.safetensors")
    found = finished(path)
    assert set(found) == {tensor.name for tensor in inspect_safely(path).tensors}
    for name, value in model.state_dict().items():
        assert found[name].std == pytest.approx(float(value.double().std(correction=0)), rel=1e-9), name
    shares = [share for share, _ in measure_safely(path)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_tied_weights_are_measured_once_and_one_tensor_can_be_asked_for_alone(tmp_path: Path) -> None:
    weight = torch.randn(10, 4)
    torch.save({"model": {"wte.weight": weight, "ln.weight": torch.ones(4), "lm_head.weight": weight}}, tmp_path / "a.pt")
    assert list(finished(tmp_path / "a.pt")) == ["wte.weight", "ln.weight"]
    assert not finished(tmp_path / "a.pt")["wte.weight"].picture
    alone = finished(tmp_path / "a.pt", "ln.weight")
    assert list(alone) == ["ln.weight"]
    assert alone["ln.weight"].picture == [[1.0] * 4]


def test_numbers_of_a_kind_that_is_not_read_get_a_remark_and_the_others_are_measured(tmp_path: Path) -> None:
    save_file({"odd": torch.zeros(4).to(torch.float8_e4m3fn), "plain": torch.ones(4)}, tmp_path / "a.safetensors")
    found = finished(tmp_path / "a.safetensors")
    assert "F8_E4M3" in found["odd"].remark
    assert found["plain"].mean == 1.0


def test_whoever_has_seen_enough_ends_the_child_and_the_next_file_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_slots", sandbox.threading.BoundedSemaphore(1))
    monkeypatch.setattr(sandbox, "PATIENCE_S", 0.0)
    save_file({"a": torch.ones(1 << 21), "b": torch.ones(1 << 21)}, tmp_path / "a.safetensors")
    work = measure_safely(tmp_path / "a.safetensors")
    assert 0 < next(work)[0] < 1
    with pytest.raises(CheckpointError, match="try again"):
        finished(tmp_path / "a.safetensors")
    work.close()
    assert set(finished(tmp_path / "a.safetensors")) == {"a", "b"}


def test_what_cannot_be_opened_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt").write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="unknown file type"):
        finished(tmp_path / "a.pt")
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
    for program, said in (("print('{\"share\": 1}')", "no usable answer"), ("print('no')", "no usable answer"), ("raise SystemExit(3)", "broke its")):
        monkeypatch.setattr(sandbox, "PROGRAM", program)
        with pytest.raises(CheckpointError, match=said):
            finished(tmp_path / "a.safetensors")
