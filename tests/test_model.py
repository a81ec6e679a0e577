import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt import loss as loss_module
from minigpt.config import TransformerConfig
from minigpt.loss import linear_cross_entropy
from minigpt.model import Dropout, MiniGPT, rms_norm, rotary_tables, rotate, written_out

ARCHS = ["gpt2", "modern"]
V, T, B = 50, 12, 3


def tiny(arch: str, **changes: Any) -> TransformerConfig:
    settings = {"vocab_size": V, "max_seq_len": T, "d_model": 16, "n_heads": 2, "n_layers": 2, "d_ff": 32, "dropout": 0.0}
    return TransformerConfig(arch=arch, **{**settings, **changes})


def spread(model: MiniGPT, std: float = 0.3) -> MiniGPT:
    """Give every weight a size at which a wrong formula shows; at the usual initialisation blocks do next to nothing."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def tokens(seed: int = 0, length: int = T) -> Tensor:
    return torch.randint(V, (B, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("length", [1, 5, T])
def test_ids_go_in_and_logits_for_every_place_come_out(arch: str, length: int) -> None:
    model = MiniGPT(tiny(arch))
    x = tokens(length=length)
    assert model(x).shape == (B, length, V)
    assert model.hidden(x).shape == (B, length, 16)
    assert model(x).dtype == torch.float32


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("place", [1, 6, T - 1])
def test_a_later_token_changes_nothing_before_it(arch: str, place: int) -> None:
    model = spread(MiniGPT(tiny(arch)).double())
    x = tokens()
    changed = x.clone()
    changed[:, place] = (changed[:, place] + 1) % V
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.allclose(before[:, place:], after[:, place:])


@pytest.mark.parametrize("arch", ARCHS)
def test_every_earlier_token_can_change_a_later_one(arch: str) -> None:
    model = spread(MiniGPT(tiny(arch)).double())
    x = tokens()
    changed = x.clone()
    changed[:, 0] = (changed[:, 0] + 1) % V
    assert ((model(x) - model(changed)).abs().amax(-1) > 1e-9).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_the_order_of_earlier_tokens_matters(arch: str) -> None:
    model = spread(MiniGPT(tiny(arch, n_layers=1)).double())
    x = tokens()
    x[:, 0], x[:, 1] = 7, 9
    swapped = x.clone()
    swapped[:, 0], swapped[:, 1] = 9, 7
    assert not torch.allclose(model(x)[:, -1], model(swapped)[:, -1])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("chunk", [1, V * 7, 1 << 18])
def test_the_loss_and_all_its_gradients_are_those_of_plain_cross_entropy(arch: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
    model = spread(MiniGPT(tiny(arch)).double())
    x, y = tokens(1), tokens(2)
    ours = model.loss(x, y)
    ours.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    plain.backward()
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("chunk", [1, 15, 1000])
def test_the_chunked_loss_has_the_gradient_of_its_value(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.tensor([0, 4, 4, 1, 2, 3, 0])
    assert torch.autograd.gradcheck(lambda h, w: 3.0 * linear_cross_entropy(h, w, targets), (hidden, weight))


def test_the_loss_of_huge_logits_is_finite_and_right() -> None:
    hidden, weight = torch.tensor([[1000.0], [-1000.0]]), torch.tensor([[1.0], [-1.0], [0.0]])
    targets = torch.tensor([0, 0])
    assert linear_cross_entropy(hidden, weight, targets).item() == pytest.approx(1000.0)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_loss_without_gradient_is_the_same_number(arch: str) -> None:
    model = spread(MiniGPT(tiny(arch)))
    with torch.inference_mode():
        quiet = model.loss(tokens(1), tokens(2))
    assert quiet.item() == pytest.approx(model.loss(tokens(1), tokens(2)).item(), rel=1e-6)
    assert not quiet.requires_grad


def test_a_target_beyond_all_likelihood_leaves_the_loss_finite_and_the_gradient_right() -> None:
    hidden, weight = torch.tensor([[500.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1]))
    loss.backward()
    assert loss.item() == pytest.approx(87.3, abs=0.1)
    assert hidden.grad is not None
    assert hidden.grad.item() == 2.0


def test_products_in_bfloat16_give_nearly_the_same_loss_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 32, generator=generator, requires_grad=True) for size in (40, 90))
    targets = torch.randint(90, (40,), generator=generator)
    whole = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    rounded = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, torch.bfloat16), (hidden, weight))
    for expected, found in zip(whole, rounded, strict=True):
        assert found.dtype == torch.float32
        assert 0 < (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_written_out_is_that_of_the_fused_kernel(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 4, T, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(written_out(q, k, v, Dropout(0.0)), fused, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_zeroes_its_share_scales_the_rest_and_passes_gradients_alike(share: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(99_999, requires_grad=True)  # not a multiple of the four masks in a draw
    out = Dropout(share)(x)
    out.sum().backward()
    assert (out == 0).double().mean().item() == pytest.approx(share, abs=0.01)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / (1 - share)])
    assert x.grad is not None
    assert torch.equal(x.grad, out)
    assert not torch.equal(Dropout(share)(x), out)
    assert Dropout(share).eval()(x) is x


@pytest.mark.parametrize("arch", ARCHS)
def test_a_fresh_model_guesses(arch: str) -> None:
    torch.manual_seed(0)
    model = MiniGPT(tiny(arch, vocab_size=2000, d_model=32, d_ff=128))
    x, y = torch.randint(2000, (8, T)), torch.randint(2000, (8, T))
    assert model.loss(x, y).item() == pytest.approx(math.log(2000), abs=0.1)


@pytest.mark.parametrize("arch", ARCHS)
def test_head_and_embedding_are_one_matrix_and_count_once(arch: str) -> None:
    model = MiniGPT(tiny(arch))
    named = dict(model.named_parameters())
    assert model.count_parameters() == sum(p.numel() for p in named.values())
    assert [name for name, p in named.items() if V in p.shape] == ["embedding.weight"]
    x = tokens()
    x[x == 7] = 8
    with torch.no_grad():
        model.embedding.weight[7] += 100.0 * model.hidden(x)[0, -1].sign()
    assert model(x)[0, -1].argmax() == 7


def test_a_modern_model_stores_nothing_but_its_matrices() -> None:
    state = MiniGPT(tiny("modern")).state_dict()
    assert {value.dim() for value in state.values()} == {2}
    assert len(state) == 1 + 2 * 4


@pytest.mark.parametrize("arch", ARCHS)
def test_dropout_acts_only_in_training(arch: str) -> None:
    model = spread(MiniGPT(tiny(arch, dropout=0.5)))
    x = tokens()
    model.train()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("arch", ARCHS)
def test_no_dropout_means_training_and_evaluation_agree(arch: str) -> None:
    model = spread(MiniGPT(tiny(arch)))
    assert torch.equal(model.train()(tokens()), model.eval()(tokens()))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_seed_draws_the_same_weights(arch: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(11)
        states.append(MiniGPT(tiny(arch)).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("arch", ARCHS)
def test_what_writes_into_the_residual_stream_starts_small(arch: str) -> None:
    model = MiniGPT(tiny(arch, d_model=64, d_ff=256))
    for name, parameter in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            assert parameter.std().item() == pytest.approx(0.0 if arch == "modern" else 0.02 / 2, rel=0.1), name


def test_a_model_keeps_its_settings_when_the_caller_changes_them() -> None:
    config = tiny("gpt2")
    model = MiniGPT(config)
    config.max_seq_len = 5
    assert model.config.max_seq_len == T


# The modern blocks against a reference written from the published conventions of NanoChat, one head and one token pair at a time.


def reference_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def reference_rotate(x: Tensor, position: int) -> Tensor:
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = position * 10_000.0 ** (-2.0 * i / len(x))
        turned[i] = x[i] * math.cos(angle) + x[half + i] * math.sin(angle)
        turned[half + i] = x[half + i] * math.cos(angle) - x[i] * math.sin(angle)
    return turned


def reference_attention(h: Tensor, q_proj: Tensor, k_proj: Tensor, v_proj: Tensor, o_proj: Tensor, heads: int) -> Tensor:
    length, C = h.shape
    D = C // heads
    mixed = torch.zeros_like(h)
    for head in range(heads):
        rows = slice(head * D, (head + 1) * D)
        q, k, v = ([h[t] @ matrix[rows].T for t in range(length)] for matrix in (q_proj, k_proj, v_proj))
        q = [reference_norm(reference_rotate(q[t], t)) for t in range(length)]
        k = [reference_norm(reference_rotate(k[t], t)) for t in range(length)]
        for t in range(length):
            scores = torch.stack([q[t] @ k[s] / math.sqrt(D) for s in range(t + 1)])
            mixed[t, rows] = sum(weight * v[s] for s, weight in enumerate(scores.softmax(0)))  # type: ignore[assignment]
    return mixed @ o_proj.T


def reference_logits(state: dict[str, Tensor], ids: Tensor, layers: int, heads: int) -> Tensor:
    x = reference_norm(state["embedding.weight"][ids])
    for layer in range(layers):
        name = f"blocks.{layer}."
        q, k, v = state[f"{name}attention.qkv.weight"].chunk(3)
        x = x + reference_attention(reference_norm(x), q, k, v, state[f"{name}attention.out.weight"], heads)
        hidden = (reference_norm(x) @ state[f"{name}feed_forward.up.weight"].T).clamp(min=0.0) ** 2
        x = x + hidden @ state[f"{name}feed_forward.down.weight"].T
    return reference_norm(x) @ state["embedding.weight"].T


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_modern_model_follows_the_published_conventions(heads: int) -> None:
    model = spread(MiniGPT(tiny("modern", n_heads=heads)).double())
    model.cos, model.sin = (table.double() for table in rotary_tables(T, 16 // heads))
    x = tokens()[:1]
    expected = reference_logits(model.state_dict(), x[0], layers=2, heads=heads)
    # The tables of angles are made in float32, hence the tolerance; a swapped sign or another epsilon is a thousand times off.
    torch.testing.assert_close(model(x)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_classic_model_follows_gpt_2() -> None:
    model = spread(MiniGPT(tiny("gpt2", n_layers=1, n_heads=1)).double())
    state, x = model.state_dict(), tokens()[:1]

    def norm(h: Tensor, name: str) -> Tensor:
        return F.layer_norm(h, (16,), state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(h: Tensor, name: str) -> Tensor:
        return F.linear(h, state[f"blocks.0.{name}.weight"], state[f"blocks.0.{name}.bias"])

    h = state["embedding.weight"][x[0]] + state["positions.weight"]
    q, k, v = linear(norm(h, "blocks.0.attention_norm"), "attention.qkv").chunk(3, -1)
    scores = (q @ k.T / 4.0).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    h = h + linear(scores.softmax(-1) @ v, "attention.out")
    h = h + linear(F.gelu(linear(norm(h, "blocks.0.feed_forward_norm"), "feed_forward.up")), "feed_forward.down")
    torch.testing.assert_close(model(x)[0], norm(h, "norm") @ state["embedding.weight"].T, rtol=1e-10, atol=1e-10)


def test_the_norm_uses_its_own_small_epsilon() -> None:
    small = torch.full((1, 4), 1e-3, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(small), torch.full((1, 4), 1e-3 / math.sqrt(2e-6), dtype=torch.float64))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    cos, sin = (table.double() for table in rotary_tables(T, 8))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, dtype=torch.float64, generator=generator).expand(1, 1, T, 8) for _ in range(2))
    turned_q, turned_k = rotate(q, cos, sin)[0, 0], rotate(k, cos, sin)[0, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q[0, 0].norm(dim=-1))
    products = turned_q @ turned_k.T
    torch.testing.assert_close(products[5, 2], products[9, 6], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(turned_q[0], q[0, 0, 0])


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_bfloat16_products_change_a_loss_a_little_and_only_while_training(arch: str) -> None:
    models = []
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        models.append(MiniGPT(TransformerConfig(arch=arch, d_model=64, n_layers=1, max_seq_len=8, vocab_size=50, dropout=0.0, precision=precision)))
    x, y = torch.randint(50, (4, 8)), torch.randint(50, (4, 8))
    with torch.no_grad():
        models[1].blocks[0].feed_forward.down.weight.add_(0.3)
        models[0].load_state_dict(models[1].state_dict())
    whole, rounded = (model.loss(x, y) for model in models)
    assert whole.item() != rounded.item()
    assert whole.item() == pytest.approx(rounded.item(), rel=0.01)
    rounded.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in models[1].parameters() if parameter.grad is not None)
    assert torch.equal(models[0].eval()(x), models[1].eval()(x))
