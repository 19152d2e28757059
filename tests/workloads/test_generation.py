"""The E2E workload on a few sentences, and beam search against exhaustive search."""

import itertools
import math
import os

import pytest
import torch

from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.workloads import generation, generation_metrics
from dpopt.workloads.generation import E2E, IGNORED, generate, log_likelihood

NAMES = ["The Mill", "Aromi", "The Vaults", "Zizzi"]
REAL_DATA = os.environ.get("DPOPT_DATA")


def pairs(names, food):
    """Two references for each meaning representation."""
    sources = [f"name[{name}], food[{food}]" for name in names for _ in range(2)]
    references = [text for name in names for text in (f"{name} serves {food} food.", f"{food} food: {name}.")]
    return sources, references


@pytest.fixture(autouse=True)
def restaurants(own_texts):
    splits = {"train": pairs(NAMES, "French"), "validation": pairs(NAMES, "Thai"), "test": pairs(NAMES[:3], "Greek")}
    return own_texts("e2e_nlg", **splits)


@pytest.fixture
def no_java(monkeypatch):
    monkeypatch.setattr(generation_metrics.shutil, "which", lambda name: None)


def tiny(**changes):
    return E2E(**{"width": 16, "heads": 2, "layers": 1, "vocabulary": 300, "length": 40, "validation": 2} | changes)


def test_sequences():
    """Meaning representation, end token, sentence, end tokens; targets are the sentence and its end."""
    workload = tiny()
    tokenizer, end = workload.tokenizer()
    (x, y), (sources, references) = workload.tokens("train"), pairs(NAMES, "French")
    assert x.dtype == torch.int32
    assert y.dtype == torch.int64
    for ids, targets, source, reference in zip(x.tolist(), y.tolist(), sources, references, strict=True):
        first = ids.index(end)
        last = ids.index(end, first + 1)
        assert tokenizer.decode(ids[:first]).strip() == source
        assert tokenizer.decode(ids[first:last]).strip() == reference
        expected = [IGNORED] * len(ids)
        expected[first + 1 : last + 1] = ids[first + 1 : last + 1]
        assert targets == expected
        assert set(ids[last:]) == {end}
    for length in (4, 12):  # long ones are cut but keep a target
        x, y = tiny(length=length).tokens("train")
        assert x.shape[1] == length
        assert (y != IGNORED).any(1).all()


def test_the_vocabulary_does_not_look_at_training_or_test_records(own_texts):
    before = tiny().tokenizer()[0].get_vocab()
    splits = {"train": pairs(["Somewhere", "Elsewhere"], "fried"), "test": pairs(["Nowhere"], "no")}
    own_texts("e2e_nlg", **splits, validation=pairs(NAMES, "Thai"))
    assert tiny().tokenizer()[0].get_vocab() == before
    own_texts("e2e_nlg", **splits, validation=pairs(["Somewhere", "Elsewhere"], "fried"))
    assert tiny().tokenizer()[0].get_vocab() != before


def test_loss_is_the_mean_over_a_sentences_tokens():
    logits = torch.randn(2, 5, 7, dtype=torch.double)
    targets = torch.tensor([[IGNORED, IGNORED, 3, 4, IGNORED], [IGNORED, 1, IGNORED, IGNORED, IGNORED]])
    chances = logits.softmax(-1)
    by_hand = [(chances[0, 1, 3].log() + chances[0, 2, 4].log()) / 2, chances[1, 0, 1].log()]
    torch.testing.assert_close(log_likelihood(logits, targets), torch.stack(by_hand))
    torch.testing.assert_close(tiny().loss(logits, targets), -torch.stack(by_hand))
    torch.testing.assert_close(tiny().metric(logits, targets), torch.stack(by_hand))


def test_a_model_that_knows_its_sentences_writes_them(no_java):
    workload = tiny(width=32, generations=2)
    torch.manual_seed(0)
    model = workload.model()
    x, y = (part[::2] for part in workload.tokens("test"))
    assert torch.equal(workload.load()[1].x, x), "the curve is about the first reference of each meaning"
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    before = workload.loss(model(x), y).mean()
    for _ in range(60):
        loss = workload.loss(model(x), y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1 < before
    with torch.no_grad():
        report = workload.report(model.eval(), workload.load()[1])
        everything = workload.loss(model(workload.tokens("test").x), workload.tokens("test").y)
    assert report["samples"] == ["The Mill serves Greek food.", "Aromi serves Greek food."]
    assert report["bleu"] == pytest.approx(1)
    assert report["nist"] > 1
    assert report["missing"].keys() == {"meteor", "rouge_l", "cider"}
    assert report["nll"] == pytest.approx(float(everything.double().mean()))
    without = tiny(width=32, generations=0)
    assert without.report(model.requires_grad_(False), without.load()[1]) == {"nll": report["nll"]}


def chain(seed, tokens=4):
    """A model whose next token depends on the last two."""
    table = torch.randn(tokens, tokens, tokens, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)

    def predict(ids):
        before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
        return table[before.long(), ids.long()]

    return predict


def likelihood(predict, prompt, text):
    logits = predict(torch.tensor([[*prompt, *text]])).log_softmax(-1)[0]
    return sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(text))


@pytest.mark.parametrize("seed", range(3))
def test_beams_find_the_likeliest_text_and_one_beam_the_likeliest_token(seed):
    """End token 0, texts of at most three tokens, the end among them."""
    predict, prompts = chain(seed), [[1], [2, 3], [3, 1]]
    texts = generate(predict, prompts, end=0, length=5, beams=64)
    for prompt, text in zip(prompts, texts, strict=True):
        room = 5 - len(prompt)
        whole = [list(t) for t in itertools.product(range(1, 4), repeat=room)]
        ended = [[*t, 0] for n in range(room) for t in itertools.product(range(1, 4), repeat=n)]
        best = max(whole + ended, key=lambda t: likelihood(predict, prompt, t))
        assert text == [token for token in best if token]
    prompts = [[1], [2, 3, 1], [3]]
    for prompt, text in zip(prompts, generate(predict, prompts, end=0, length=8), strict=True):
        expected = list(prompt)
        while len(expected) < 8:
            token = int(predict(torch.tensor([expected]))[0, -1].argmax())
            if token == 0:
                break
            expected.append(token)
        assert text == expected[len(prompt) :]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 15}, "divisor of the width"),
        ({"vocabulary": 256}, "at least 257"),
        ({"length": 3}, "at least 4"),
        ({"generations": -1}, "at least 0"),
        ({"beams": 0}, "beams"),
        ({"subset": "head"}, "subset"),
    ],
)
def test_what_cannot_be_used(fields, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**fields)


def test_the_hubs_gpt2(restaurants, monkeypatch):
    """From the folder of checkpoints: its weights without dropout, its tokenizer, and its limit."""
    import transformers
    from tokenizers import Tokenizer

    folder = restaurants / "checkpoints" / "gpt2"
    config = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 32, "vocab_size": 300}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**config)).save_pretrained(folder)
    tokenizer = Tokenizer.from_str(tiny().tokenizer()[0].to_str())
    tokenizer.save(str(folder / "tokenizer.json"))
    workload = tiny(pretrained=True, length=32)
    workload.check()
    x, y = workload.tokens("train")
    model = workload.model().train()
    assert torch.equal(model(x), model(x))
    assert workload.loss(model(x), y).shape == (8,)
    with pytest.raises(ConfigError, match="at most 32 tokens"):
        tiny(pretrained=True, length=33).check()


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA, reason="needs DPOPT_DATA")
def test_the_real_data(monkeypatch):
    monkeypatch.undo()
    workload = registry.create_workload("e2e_gpt2_random")
    train, test = workload.load()
    assert len(train.x) == 42_061
    assert len(test.x) == 630
    assert not {*generation.read("train")[0]} & {*generation.read("validation")[0]}
    torch.manual_seed(0)
    model = workload.model().eval()
    with torch.no_grad():
        loss = float(workload.loss(model(test.x[:64]), test.y[:64]).mean())
    assert loss == pytest.approx(math.log(2048), rel=0.05)
