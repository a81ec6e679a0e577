"""Write text with a model, one token at a time. Draws from an own generator, so that it never disturbs a run's randomness."""

import bisect
import re
import threading
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from minigpt.checkpoint import Checkpoint
from minigpt.config import BOS, EOS, PAD, TEMPERATURE, TOP_K, UNK
from minigpt.errors import CheckpointError
from minigpt.header import clean
from minigpt.model import Cache, MiniGPT
from minigpt.tokenizer import TextTokenizer

NEVER_WRITTEN = (PAD, UNK, BOS, EOS)
MAX_NAME = 40
_BEFORE_COLON = re.compile(rf"^[^\W\d_](?:[^\W\d_]| ){{1,{MAX_NAME - 3}}}[^\W\d_]:", re.MULTILINE)
TEXT_LOOKED_AT = 1 << 20  # characters
SAMPLE_TOKENS = {"word": 48, "char": 180}
SAMPLE_TIMES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # then every minute


@torch.inference_mode()
def generate(
    model: MiniGPT,
    ids: list[int],
    max_tokens: int,
    *,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    generator: torch.Generator | None = None,
    never: tuple[int, ...] = NEVER_WRITTEN,
) -> Iterator[int]:
    """Yield up to `max_tokens` new ids after `ids`, which must not be empty.

    Args:
        model: left in the mode it was in.
        ids: the prompt; the model sees the last `max_seq_len` of prompt and text at most, and half of that at least: when its window is full,
            it starts anew from the last half, for moving every token by one place would cost a whole pass each time.
        max_tokens: how many to write.
        temperature: 0 takes the likeliest token each time; higher is bolder.
        top_k: draw from this many likeliest tokens; 0 means from all.
        generator: a CPU generator; one seeded with 0 if none is given.
        never: ids that are not written, which are our special tokens; the vocabularies of others have none in their place.
    """
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    device = model.embedding.weight.device
    context, longest = list(ids), model.config.max_seq_len
    unread, cache = context[-longest:], Cache()
    for _ in range(max_tokens):
        was_training = model.training
        model.eval()
        try:
            if cache.length + len(unread) > longest:
                unread, cache = context[-max(longest // 2, 1) :], Cache()
            logits = model.logits(model.hidden(torch.tensor([unread], device=device), cache)[0, -1])  # (V,)
        finally:
            model.train(was_training)
        index = _draw(logits.float().cpu(), temperature, top_k, generator, never)
        context.append(index)
        unread = [index]
        yield index


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator, never: tuple[int, ...]) -> int:
    """Draw an id from logits (V,)."""
    logits = logits.clone()
    logits[list(never)] = -torch.inf
    if temperature < 1e-6:  # below that the division overflows, and the likeliest has all the probability anyway
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))


def write(
    model: MiniGPT,
    tokenizer: TextTokenizer | None,
    prompt: str,
    max_tokens: int,
    *,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the text so far after each new token: the prompt as it was given, then what follows. An empty prompt starts from a line break.

    Without a tokenizer prompt and text are ids of tokens, apart by spaces.

    Raises:
        CheckpointError: the prompt is no list of ids where one is needed.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokenizer is None:
        ids = _ids_in(prompt or "0", model.config.vocab_size)
        for index in generate(model, ids, max_tokens, temperature=temperature, top_k=top_k, generator=generator, never=()):
            ids.append(index)
            yield " ".join(map(str, ids))
        return
    prompt = prompt.encode("utf-8", "replace").decode()  # half a character cannot be read
    ids = tokenizer.encode(prompt) or [first_id(tokenizer)]
    length, never = len(ids), tokenizer.never_written
    for index in generate(model, ids, max_tokens, temperature=temperature, top_k=top_k, generator=generator, never=never):
        ids.append(index)
        yield continued(tokenizer, prompt, ids, length)


def continued(tokenizer: TextTokenizer, prompt: str, ids: list[int], length: int) -> str:
    """Return the prompt, of which a word that the vocabulary lacks is read as unknown, as it was typed, and what follows its `length` ids."""
    return prompt.rstrip() + tokenizer.decode(ids)[len(tokenizer.decode(ids[:length]).rstrip()) :]


def _ids_in(prompt: str, vocab_size: int) -> list[int]:
    ids = [int(word) if word.isdecimal() else -1 for word in re.split(r"[\s,]+", prompt.strip())]
    if not all(0 <= index < vocab_size for index in ids):
        raise CheckpointError(f"the prompt must be ids from 0 to {vocab_size - 1:,}, such as 1 2 3, because this file holds no vocabulary")
    return ids


def unknown(tokenizer: TextTokenizer, ids: list[int]) -> str:
    """Say how much of a prompt is not in the vocabulary, if anything is."""
    count = ids.count(UNK) if UNK in tokenizer.never_written else 0
    return f"{count} of the prompt's {len(ids)} tokens are not in this model's vocabulary; it reads them as <unk>" if count else ""


def sample(model: MiniGPT, tokenizer: TextTokenizer, prompt: str, seed: int, stop_event: threading.Event | None = None) -> str | None:
    """Return what a run shows at a moment of its training, or None if the stop event is set meanwhile."""
    text = prompt
    for text in write(model, tokenizer, prompt, SAMPLE_TOKENS[tokenizer.kind], seed=seed):  # noqa: B007
        if stop_event is not None and stop_event.is_set():
            return None
    return text


def sample_time(index: int) -> float:
    """Return the second of a run at which its sample number `index`, counted from 0, is due."""
    last = len(SAMPLE_TIMES_S) - 1
    return SAMPLE_TIMES_S[index] if index <= last else SAMPLE_TIMES_S[last] + 60.0 * (index - last)


def samples_by(second: float) -> int:
    """Return how many samples of a run are due by a second of it."""
    return bisect.bisect_right(SAMPLE_TIMES_S, second) + max(int((second - SAMPLE_TIMES_S[-1]) // 60.0), 0)


def first_id(tokenizer: TextTokenizer) -> int:
    """Return the id to start from when there is no prompt: the line break, else the first ordinary token."""
    found = tokenizer.id_of("\n")
    return found if found is not None else min(len(NEVER_WRITTEN), tokenizer.vocab_size - 1)


def usual_prompt(tokenizer: TextTokenizer, text: str | None = None) -> str:
    """Return what is written from when nobody said: "ROMEO:", or a line break where a vocabulary cannot spell that.

    With the `text` that a model learns from it is "ROMEO:" if somebody is called so there, else the name in capitals that begins most lines.
    """
    prompt = "ROMEO:"
    if text is not None and prompt not in text:
        names = Counter(filter(str.isupper, _BEFORE_COLON.findall(text, 0, TEXT_LOOKED_AT))).most_common(1)
        prompt = names[0][0] if names else "\n"
    ids = tokenizer.encode(prompt)
    return prompt if ids and UNK not in ids else "\n"


def first_prompt(checkpoint: Checkpoint) -> str:
    """Return what to write from when nobody said: as in the samples of its run, if it has any; an id where there is no vocabulary."""
    if checkpoint.tokenizer is None:
        return "0"
    samples = checkpoint.metadata.get("samples")
    latest = samples[-1] if isinstance(samples, list) and samples else None
    prompt = latest.get("prompt") if isinstance(latest, dict) else None
    return prompt if isinstance(prompt, str) and clean(prompt, MAX_NAME, lines=True) == prompt else usual_prompt(checkpoint.tokenizer)
