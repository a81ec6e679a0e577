"""The model: token ids in, logits for the next token out. Knows nothing of text, files or training.

Dimensions: B batch, T time (tokens), C width (`d_model`), H heads, D width of a head, F inner width (`d_ff`), V vocabulary.

Two families of blocks:

- `gpt2`: learned positions, LayerNorm, biases, GELU. Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
- `modern`: RMSNorm without weights, rotary positions, QK-norm, ReLU², no biases. Source: the NanoChat model of `transformers`, whose
  conventions it follows to the letter: a norm right after the embedding, eps 1e-6, rotary before QK-norm, halves rotated.

Both tie the output head to the embedding. Weights of others may bring what ours do not have, and so have attributes, not settings: a head of their
own, a soft cap on the logits, GPT-2's first approximation of GELU, another base of the rotation.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.config import TransformerConfig
from minigpt.loss import linear_cross_entropy

RMS_EPS = 1e-6
SHORT = 256  # tokens up to which attention may be written out, for all scores are held at once
ROPE_THETA = 10_000.0
INIT_STD = 0.02


def rms_norm(x: Tensor) -> Tensor:
    """Scale x (..., C) to a root mean square of 1. Source: Zhang and Sennrich, 2019, without the learned weight."""
    return F.rms_norm(x, (x.size(-1),), eps=RMS_EPS)


def norm_of(config: TransformerConfig) -> nn.Module:
    """Make the norm of a family: LayerNorm, or for `modern` `rms_norm`."""
    modern = config.arch == "modern"
    return nn.RMSNorm(config.d_model, eps=RMS_EPS, elementwise_affine=False) if modern else nn.LayerNorm(config.d_model)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of x (B, H, T, D) by position; cos and sin are (T, D/2). Source: Su et al., "RoFormer", 2021."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)  # (B, H, T, D)


def rotary_tables(length: int, width: int, theta: float = ROPE_THETA) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotation angles, each (T, D/2) float32."""
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)  # (D/2,)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)  # (T, D/2)
    return angles.cos(), angles.sin()


class Linear(nn.Linear):
    """A matrix product that may run in bfloat16 while training, twice as fast where the hardware has it; what is added up stays float32."""

    low_precision = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., in) times the weight, (..., out)."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.low_precision and self.training):
            return super().forward(x)


class Dropout(nn.Dropout):
    """Zeros for a share of the numbers while training, the rest scaled up; on a CPU by 16 random bits each, a third of what torch's draw costs."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x, some of it zero."""
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not (self.training and self.p):
            return super().forward(x)
        drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[: x.numel()]
        kept = drawn.view(x.shape) >= round(self.p * 2**16) - 2**15
        return x * kept.to(x.dtype).div_(1 - self.p)


def written_out(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:
    """Attend causally with q, k, v (B, H, T, D): what a CPU's fused kernel is slow at, which is bfloat16, or cannot do, which is dropout."""
    B, H, T, D = q.shape
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # (BH, T, D)
    ahead = q.new_full((T, T), -math.inf).triu(1)
    weights = torch.softmax(torch.baddbmm(ahead, q, k.mT, alpha=D**-0.5), dim=-1)  # (BH, T, T)
    return torch.bmm(dropout(weights), v).view(B, H, T, D)


class Cache:
    """Keys and values of the tokens read so far, (B, H, T, D) each, one pair a block, so that writing reads each token once."""

    def __init__(self) -> None:
        self.length = 0  # T
        self.blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append to a block's keys and values; return all of them."""
        if block in self.blocks:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.blocks[block], (k, v), strict=True))
        self.blocks[block] = k, v
        return k, v


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come from one matrix."""

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.n_heads = config.n_heads
        self.dropout = Dropout(config.dropout)
        self.modern = config.arch == "modern"
        self.qkv = Linear(config.d_model, 3 * config.d_model, bias=not self.modern)
        self.out = Linear(config.d_model, config.d_model, bias=not self.modern)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Cache | None = None) -> Tensor:
        """Mix x (B, T, C) over time, each token seeing itself and what came before, also what came before x in a cache (then T is 1)."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads).permute(2, 0, 3, 1, 4)  # three times (B, H, T, D)
        if rotary is not None:
            q, k = rms_norm(rotate(q, *rotary)), rms_norm(rotate(k, *rotary))  # (B, H, T, D)
        if cache is not None:
            k, v = cache.extend(self.index, k, v)
        dropout = self.dropout.p if self.training else 0.0
        if x.device.type == "cpu" and T <= SHORT and (dropout or v.dtype == torch.bfloat16):
            mixed = written_out(q.to(v.dtype), k.to(v.dtype), v, self.dropout)  # (B, H, T, D)
        else:
            q, k, v = (part.to(x.dtype) for part in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, dropout_p=dropout)  # (B, H, T, D)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, C))  # (B, T, C)
        return out


class FeedForward(nn.Module):
    """Two matrices with a bend between them: GELU, or ReLU squared for `modern`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.modern = config.arch == "modern"
        self.approximate = "none"  # or "tanh"
        self.up = Linear(config.d_model, config.d_ff, bias=not self.modern)
        self.down = Linear(config.d_ff, config.d_model, bias=not self.modern)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token of x (B, T, C) alone."""
        hidden = self.up(x)  # (B, T, F)
        hidden = F.relu(hidden).square() if self.modern else F.gelu(hidden, approximate=self.approximate)
        out: Tensor = self.down(hidden)  # (B, T, C)
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each added to what came in after a norm of its own (pre-norm)."""

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, index)
        self.feed_forward_norm = norm_of(config)
        self.feed_forward = FeedForward(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Cache | None = None) -> Tensor:
        """Refine x (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary, cache))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class MiniGPT(nn.Module):
    """A decoder-only transformer of the size that `config` declares."""

    cos: Tensor
    sin: Tensor
    head: nn.Parameter | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config.model_copy()
        self.modern = config.arch == "modern"
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = None if self.modern else nn.Embedding(config.max_seq_len, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))
        self.norm = norm_of(config)
        self.register_parameter("head", None)  # (V, C), where it is not the embedding
        self.softcap: float | None = None
        self.compiled: Callable[[MiniGPT, Tensor], Tensor] | None = None  # `hidden` for training, once there is a faster form of it
        cos, sin = rotary_tables(config.max_seq_len, config.d_model // config.n_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()
        self.low_precision = config.precision == "bfloat16"
        for module in self.modules():
            if isinstance(module, Linear):
                module.low_precision = self.low_precision

    def _initialise(self) -> None:
        """Draw normal weights. What writes into the residual stream starts small, or at zero for `modern`, so that depth adds no noise.

        Source: the scale 1/sqrt(2 n_layers) is GPT-2's; zero projections are Zhang et al., "Fixup", 2019.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif name.endswith(("attention.out.weight", "feed_forward.down.weight")):
                nn.init.normal_(parameter, std=0.0 if self.modern else INIT_STD / math.sqrt(2 * self.config.n_layers))
            elif self.modern and name.startswith("blocks."):
                nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)
            else:
                nn.init.normal_(parameter, std=INIT_STD)

    def hidden(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Turn ids x (B, T) int64 into the last hidden states (B, T, C).

        With what a cache holds T is at most `max_seq_len`; a cache that holds something takes one more token at a time.
        """
        start = cache.length if cache is not None else 0
        end = start + x.size(1)
        h = self.embedding(x)  # (B, T, C)
        rotary = None
        if self.positions is None:
            h, rotary = rms_norm(h), (self.cos[start:end], self.sin[start:end])
        else:
            h = h + self.positions.weight[start:end]
        h = self.dropout(h)
        for block in self.blocks:
            h = block(h, rotary, cache)
        if cache is not None:
            cache.length = end
        last: Tensor = self.norm(h)
        return last

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, V) for the token after each of x (B, T) int64."""
        return self.logits(self.hidden(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn last hidden states (..., C) into logits (..., V)."""
        logits = F.linear(hidden, self.embedding.weight if self.head is None else self.head)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per token, of predicting y (B, T) from x (B, T)."""
        if self.head is not None or self.softcap is not None:
            return F.cross_entropy(self(x).flatten(0, 1), y.flatten())
        hidden = self.compiled(self, x) if self.compiled is not None and torch.is_grad_enabled() else self.hidden(x)
        dtype = torch.bfloat16 if self.low_precision and self.training else None
        return linear_cross_entropy(hidden.flatten(0, 1), self.embedding.weight, y.flatten(), dtype)

    def count_parameters(self) -> int:
        """Count the trainable numbers; the tied head is the embedding and counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
