import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from minigpt.checkpoint import Checkpoint
from minigpt.config import TransformerConfig
from minigpt.generate import NEVER_WRITTEN, first_id, first_prompt, generate, sample_time, samples_by, usual_prompt, write
from minigpt.model import MiniGPT
from minigpt.tokenizer import CharTokenizer, TextTokenizer, WordTokenizer

Made = tuple[MiniGPT, TextTokenizer]
LENGTH = 8


def tiny(text: str, kind: type[WordTokenizer] | type[CharTokenizer] = WordTokenizer, **changes: Any) -> Made:
    tokenizer = kind()
    tokenizer.build_vocab(text, 60)
    settings = {"max_seq_len": LENGTH, "d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 32}
    torch.manual_seed(0)
    model = MiniGPT(TransformerConfig(vocab_size=tokenizer.vocab_size, **{**settings, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return model, tokenizer


@pytest.fixture(params=["gpt2", "modern"])
def made(request: pytest.FixtureRequest, tiny_text: str) -> Made:
    return tiny(tiny_text, arch=request.param)


def last(texts: Any) -> str:
    return list(texts)[-1]


def test_the_same_seed_writes_the_same_text(made: Made) -> None:
    texts = [last(write(*made, "ROMEO:", 30, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    again = [list(generate(made[0], [5], 30, generator=torch.Generator().manual_seed(seed))) for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_text_comes_token_by_token_and_starts_with_the_prompt(made: Made) -> None:
    texts = list(write(*made, "ROMEO:", 20))
    assert len(texts) == 20
    assert all(text.startswith("ROMEO:") for text in texts)
    assert all(b.startswith(a.rstrip()) for a, b in itertools.pairwise(texts))


@pytest.mark.parametrize("prompt", ["ROMEO:\nZyzzyva the  Qwx", "Zyzzyva ", "the\n\n", "  the"])
def test_a_prompt_is_shown_as_it_was_typed_even_where_its_words_are_unknown(made: Made, prompt: str) -> None:
    assert all(text.startswith(prompt.rstrip()) and "<unk>" not in text for text in write(*made, prompt, 20))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 100.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 10_000])
def test_special_tokens_are_never_written(made: Made, temperature: float, top_k: int) -> None:
    model, _ = made
    with torch.no_grad():  # what every hidden state likes best
        model.embedding.weight[list(NEVER_WRITTEN)] = 50.0 * model.hidden(torch.tensor([[5, 6, 7]]))[0, -1]
    ids = list(generate(model, [5, 6, 7], 40, temperature=temperature, top_k=top_k))
    assert len(ids) == 40
    assert not set(ids) & set(NEVER_WRITTEN)


def greedy(model: MiniGPT, ids: list[int], count: int) -> list[int]:
    context, window = list(ids), ids[-LENGTH:]
    for _ in range(count):
        window = window if len(window) <= LENGTH else window[-LENGTH // 2 :]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([window]))[0, -1]
        context.append(len(NEVER_WRITTEN) + int(logits[len(NEVER_WRITTEN) :].argmax()))
        window = [*window, context[-1]]
    return context[len(ids) :]


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 50), (0.0, 0), (-1.0, 50), (5.0, 1), (1e-5, 0), (1e-40, 0)])
def test_no_temperature_or_one_candidate_takes_the_likeliest_each_time(made: Made, temperature: float, top_k: int) -> None:
    model, _ = made
    assert list(generate(model, [5, 9, 7], 12, temperature=temperature, top_k=top_k)) == greedy(model, [5, 9, 7], 12)


@pytest.mark.parametrize("length", [1, 3, LENGTH, 2 * LENGTH])
def test_each_token_is_read_once_and_nothing_changes_by_it(made: Made, length: int) -> None:
    ids = [5 + n % 40 for n in range(length)]
    assert list(generate(made[0], ids, 5 * LENGTH, temperature=0.0)) == greedy(made[0], ids, 5 * LENGTH)


def test_only_the_likeliest_tokens_are_drawn_from(made: Made) -> None:
    model, _ = made
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[5]]))[0, -1]
    logits[list(NEVER_WRITTEN)] = -math.inf
    allowed = set(logits.topk(3).indices.tolist())
    drawn = {next(generate(model, [5], 1, temperature=10.0, top_k=3, generator=torch.Generator().manual_seed(seed))) for seed in range(60)}
    assert drawn == allowed


def test_draws_follow_the_model_s_probabilities(made: Made) -> None:
    model, _ = made
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[5]]))[0, -1].double()
    logits[list(NEVER_WRITTEN)] = -math.inf
    expected = (logits / 2.0).softmax(0)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros_like(expected)
    for _ in range(600):
        counts[next(generate(model, [5], 1, temperature=2.0, top_k=0, generator=generator))] += 1
    assert (counts / 600 - expected).abs().max().item() < 0.08


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_its_mode_even_between_tokens(made: Made, training: bool) -> None:
    model, tokenizer = made
    model.train(training)
    for _ in write(model, tokenizer, "ROMEO:", 3):
        assert model.training is training
    unfinished = write(model, tokenizer, "ROMEO:", 3)
    next(unfinished)
    unfinished.close()  # type: ignore[attr-defined]  a generator
    assert model.training is training


def test_dropout_plays_no_part(made: Made, tiny_text: str) -> None:
    model, tokenizer = tiny(tiny_text, arch=made[0].config.arch, dropout=0.9)
    assert last(write(model.train(), tokenizer, "ROMEO:", 20)) == last(write(model.eval(), tokenizer, "ROMEO:", 20))


def test_the_global_random_state_is_untouched(made: Made) -> None:
    state = torch.get_rng_state()
    last(write(*made, "ROMEO:", 10))
    list(generate(made[0], [5], 10))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("length", [LENGTH - 1, LENGTH, LENGTH + 1, 5 * LENGTH])
def test_a_prompt_longer_than_the_context_works_and_its_end_decides(made: Made, length: int) -> None:
    model, tokenizer = made
    ids = [4 + n % 40 for n in range(length)]
    assert list(generate(model, ids, 10)) == list(generate(model, ids[-LENGTH:], 10))
    prompt = tokenizer.decode(ids)
    assert last(write(model, tokenizer, prompt, 5)).startswith(prompt)


@pytest.mark.parametrize(("kind", "prompt"), [(WordTokenizer, ""), (WordTokenizer, "\t "), (CharTokenizer, "")])
def test_an_empty_prompt_starts_from_a_line_break(prompt: str, kind: Any, tiny_text: str) -> None:
    model, tokenizer = tiny(tiny_text, kind)
    assert tokenizer.token_of(first_id(tokenizer)) == "\n"
    text = last(write(model, tokenizer, prompt, 10))
    assert len(text.strip()) > 0
    assert "<" not in text


def test_a_vocabulary_without_a_line_break_still_has_something_to_start_from() -> None:
    model, tokenizer = tiny("a b c")
    assert first_id(tokenizer) == 4
    assert last(write(model, tokenizer, "", 3))


def test_nothing_asked_for_is_nothing_written(made: Made) -> None:
    assert list(write(*made, "ROMEO:", 0)) == []
    assert list(generate(made[0], [5], 0)) == []


@pytest.mark.parametrize("kind", [WordTokenizer, CharTokenizer])
def test_the_usual_prompt_is_one_the_vocabulary_can_spell(kind: Any, tiny_text: str) -> None:
    letters = "ROMEO: written in the middle, PUCK:\nANN: once\nFRIAR LAWRENCE: twice\nRE: mail\n"
    for text, prompt in (
        (tiny_text, "ROMEO:"),
        ("PUCK:\nhow now\nPUCK:\nANN:\n" + tiny_text.replace("ROMEO", "PUCK")[:40], "PUCK:"),
        (letters.replace("ROMEO", "Romeo"), "ANN:"),
        (letters.replace("ROMEO", "Romeo") + "FRIAR LAWRENCE: thrice\n", "FRIAR LAWRENCE:"),
        ("ГАМЛЕТ:\nбыть или не быть\nГАМЛЕТ:\nАнна:\nАнна:\nАнна:\n", "ГАМЛЕТ:"),
        ("small words\nand nothing else\n", "\n"),
        ("R\nO\nM\nE\n:\n", "\n"),
        ("a", "\n"),
    ):
        tokenizer = kind()
        tokenizer.build_vocab(text, 200)
        assert usual_prompt(tokenizer, text) == prompt
        if prompt != "\n":
            assert not set(tokenizer.encode(prompt)) & set(NEVER_WRITTEN)


@pytest.mark.parametrize(
    ("samples", "prompt"),
    [
        ([{"prompt": "PUCK:"}, {"prompt": "ANN:"}], "ANN:"),
        ([], "ROMEO:"),
        ([{}], "ROMEO:"),
        ("odd", "ROMEO:"),
        ([{"prompt": "\ud800"}], "ROMEO:"),
        ([{"prompt": "\x1b]0;title\x07"}], "ROMEO:"),
        ([{"prompt": "A" * 41}], "ROMEO:"),
        ([{"prompt": "\n"}], "\n"),
        ([{"prompt": 7}], "ROMEO:"),
    ],
)
def test_a_model_writes_from_what_its_run_s_samples_began_with(samples: Any, prompt: str, made: Made) -> None:
    checkpoint = Checkpoint(*made, made[0].config, 1, None, {"samples": samples}, {})
    assert first_prompt(checkpoint) == prompt
    assert first_prompt(dataclasses.replace(checkpoint, tokenizer=None)) == "0"


@pytest.mark.parametrize("second", [0.0, 0.4, 0.5, 59.9, 60.0, 60.1, 119.0, 120.0, 3600.0, 1e13])
def test_as_many_samples_are_due_as_have_a_time_that_has_come(second: float) -> None:
    count = samples_by(second)
    assert sample_time(count - 1) <= second < sample_time(count)
