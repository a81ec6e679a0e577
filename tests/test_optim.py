import itertools
import json
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minigpt.config import TransformerConfig
from minigpt.model import MiniGPT
from minigpt.optim import MUON_MOMENTUM, AnyOptimizer, FiniteGuard, Muon, MuonWithAdamW, configure_optimizer, get_lr, orthogonalise

KINDS: list[Any] = ["adamw", "muon"]


def tiny(arch: str = "gpt2", **changes: Any) -> MiniGPT:
    torch.manual_seed(0)
    settings = {"vocab_size": 50, "max_seq_len": 12, "d_model": 16, "n_heads": 2, "n_layers": 2, "d_ff": 32, "dropout": 0.0}
    return MiniGPT(TransformerConfig(arch=arch, **{**settings, **changes}))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(50, (4, 13), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def step(model: MiniGPT, optimizer: AnyOptimizer, seed: int = 0) -> float:
    loss = model.loss(*batch(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# Schedule


def test_the_rate_climbs_from_0_and_falls_along_a_cosine() -> None:
    rates = [get_lr(n, 10, 110, 1.0, 0.1) for n in range(130)]
    assert rates[:11] == pytest.approx([n / 10 for n in range(11)])
    assert rates[60] == pytest.approx(0.1 + 0.9 / 2)
    assert rates[35] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))
    assert all(a > b for a, b in itertools.pairwise(rates[10:111]))
    assert rates[110:] == [0.1] * 20


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ((0, 0, 100, 1.0, 0.1), 1.0),
        ((0, 10, 100, 1.0, 0.1), 0.0),
        ((0, 0, 0, 1.0, 0.1), 0.1),
        ((0, 10, 0, 1.0, 0.1), 0.1),
        ((5, 10, 10, 1.0, 0.1), 0.5),
        ((10, 10, 10, 1.0, 0.1), 0.1),
        ((5, 20, 10, 1.0, 0.1), 0.25),
        ((10, 20, 10, 1.0, 0.1), 0.1),
        ((1000, 10, 100, 1.0, 0.1), 0.1),
        ((99, 0, 100, 1.0, 0.0), 0.5 * (1 + math.cos(math.pi * 0.99))),
    ],
)
def test_the_rate_at_the_edges(arguments: tuple[int, int, int, float, float], rate: float) -> None:
    assert get_lr(*arguments) == pytest.approx(rate)


def test_no_input_divides_by_zero_and_no_rate_leaves_its_range() -> None:
    for n, warmup, steps in itertools.product(range(-2, 8), range(6), range(6)):
        rate = get_lr(n, warmup, steps, 1.0, 0.1)
        if n >= 0:
            assert 0.0 <= rate <= 1.0, (n, warmup, steps)


# Groups


def test_matrices_decay_and_biases_and_norms_do_not(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    with caplog.at_level(logging.INFO, logger="minigpt"):
        optimizer = configure_optimizer(model, 1e-3, 0.1)
    assert isinstance(optimizer, torch.optim.AdamW)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))
    counts = [sum(p.numel() for p in group["params"]) for group in (decayed, plain)]
    assert sum(counts) == model.count_parameters()
    for count in counts:
        assert f"{count:,} " in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_every_parameter_is_in_exactly_one_group(arch: str, kind: Any) -> None:
    model = tiny(arch)
    optimizer = configure_optimizer(model, 1e-3, 0.1, kind)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny(arch)
    with caplog.at_level(logging.INFO, logger="minigpt"):
        optimizer = configure_optimizer(model, 1e-3, 0.1, "muon")
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(p): name for name, p in model.named_parameters()}
    muon = {names[id(p)] for group in optimizer.muon.param_groups for p in group["params"]}
    adamw = {names[id(p)] for group in optimizer.adamw.param_groups for p in group["params"]}
    assert muon == {name for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}
    assert adamw == set(names.values()) - muon
    assert f"{sum(p.numel() for p in model.parameters() if p.dim() >= 2):,} " in caplog.text
    for group in optimizer.param_groups:
        assert all(p.dim() >= 2 for p in group["params"]) or group["weight_decay"] == 0.0


def test_frozen_parameters_are_left_alone() -> None:
    model = tiny()
    model.embedding.weight.requires_grad_(False)
    optimizer = configure_optimizer(model, 1e-3, 0.1)
    assert id(model.embedding.weight) not in {id(p) for group in optimizer.param_groups for p in group["params"]}


def test_decay_pulls_matrices_alone() -> None:
    model = nn.Linear(4, 4)
    nn.init.ones_(model.bias)
    before = model.weight.detach().clone()
    optimizer = configure_optimizer(model, 0.1, 0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias.detach(), torch.ones(4))


# Muon


@pytest.mark.parametrize("shape", [(1, 16, 16), (1, 48, 16), (1, 16, 64), (5, 32, 16), (3, 1, 8), (2, 8, 1)])
def test_orthogonalising_brings_all_singular_values_near_1(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[0])[:, None, None]
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min().item() > 0.6
    assert values.max().item() < 1.3


def test_orthogonalising_keeps_directions_and_does_each_matrix_alone() -> None:
    matrices = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1))
    together = orthogonalise(matrices)
    torch.testing.assert_close(together, torch.cat([orthogonalise(matrix[None]) for matrix in matrices]), rtol=1e-4, atol=1e-4)
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    cosine = torch.nn.functional.cosine_similarity(together.flatten(1), (u @ vt).flatten(1))
    assert cosine.min().item() > 0.95


def test_orthogonalising_nothing_gives_nothing() -> None:
    assert torch.equal(orthogonalise(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))


@pytest.mark.parametrize("shape", [(16, 16), (32, 16), (16, 32)])
def test_muon_agrees_with_torch_s_own_on_a_separate_matrix(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([{"params": [ours]}], lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=MUON_MOMENTUM, nesterov=True, adjust_lr_fn="original")
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    moved = (theirs - start).detach()
    # torch iterates in bfloat16, which has 8 bits: a few per cent of an update; a wrong scale or momentum is off by far more.
    assert ((ours - theirs).detach().norm() / moved.norm()).item() < 0.03


def test_queries_keys_and_values_are_orthogonalised_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(24, 8, generator=generator)
    fused = nn.Parameter(torch.zeros(24, 8))
    apart = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    fused.grad = gradient
    for parameter, piece in zip(apart, gradient.chunk(3), strict=True):
        parameter.grad = piece.clone()
    Muon([{"params": [fused], "parts": 3}], lr=0.1).step()
    Muon([{"params": apart}], lr=0.1).step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in apart]))


def test_muon_leaves_alone_what_has_no_gradient() -> None:
    still, moving = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    moving.grad = torch.randn(4, 4)
    Muon([{"params": [still, moving]}], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(still.detach(), torch.ones(4, 4))
    assert not torch.equal(moving.detach(), torch.ones(4, 4))


# Both, behind one interface


def trained(kind: Any, arch: str = "gpt2", steps: int = 3) -> tuple[MiniGPT, AnyOptimizer]:
    model = tiny(arch)
    optimizer = configure_optimizer(model, 0.01, 0.1, kind)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_a_restored_optimizer_makes_the_same_next_step_to_the_bit(arch: str, kind: Any) -> None:
    model, optimizer = trained(kind, arch)
    stored = optimizer.state_dict()
    groups = json.loads(json.dumps(stored["param_groups"]))  # what a checkpoint keeps of them
    stored = {"state": {n: {k: v.clone() for k, v in entry.items()} for n, entry in stored["state"].items()}, "param_groups": groups}
    twin = tiny(arch)
    twin.load_state_dict(model.state_dict())
    other = configure_optimizer(twin, 0.5, 0.7, kind)
    other.load_state_dict(stored)
    for number in (7, 8):
        assert step(model, optimizer, number) == step(twin, other, number)
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_numbers_every_parameter_once(kind: Any) -> None:
    model, optimizer = trained(kind)
    state = optimizer.state_dict()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    assert numbers == list(range(len(list(model.parameters()))))
    assert set(state["state"]) == set(numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_set_in_the_groups_takes_effect(kind: Any) -> None:
    model, optimizer = trained(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    step(model, optimizer)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_forgets_all_gradients(kind: Any) -> None:
    model, optimizer = trained(kind)
    model.loss(*batch()).backward()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_training_reduces_the_loss(arch: str, kind: Any) -> None:
    model = tiny(arch)
    optimizer = configure_optimizer(model, 0.02, 0.0, kind)
    losses = [step(model, optimizer) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_guarded_optimizer_takes_the_very_same_steps_until_one_is_bad_and_then_none(kind: Any) -> None:
    runs = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = MiniGPT(TransformerConfig(arch="modern", vocab_size=20, max_seq_len=8, d_model=16, n_layers=1, d_ff=32, dropout=0.0))
        optimizer = configure_optimizer(model, 0.02, 0.1, kind)
        guard = FiniteGuard(optimizer, torch.device("cpu")) if guarded else None
        x = torch.arange(16).view(2, 8)
        for step in range(4 if guarded else 2):
            optimizer.zero_grad()
            loss = model.loss(x, x)
            loss.backward()
            if step == 2:
                model.embedding.weight.grad.fill_(math.nan)
                model.blocks[0].attention.qkv.weight.grad.fill_(math.inf)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if guard is not None:
                guard.judge(loss, norm)
            optimizer.step()
        runs.append((model, optimizer, guard))
    (plain, one, _), (model, other, guard) = runs
    assert guard is not None
    assert guard.steps_made() == 2
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    expected, found = (made.state_dict()["state"] for made in (one, other))
    assert all(torch.equal(value, found[number][key]) for number, entry in expected.items() for key, value in entry.items())
