"""An engine answers in training what was verified: for compiled and recomputed models, in other types and modes."""

import copy
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import transformers
from loop import cross_entropy
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import Of

import dpopt
from dpopt.clipping import Abadi, engine
from dpopt.clipping.flat import AsWritten
from dpopt.errors import ConfigError
from dpopt.privacy import DataOracle
from dpopt.privacy.ledger import Draw, Ledger, Plan

BOUND = 0.3


def next_token(output, ids):
    return F.cross_entropy(output[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def alone(model, loss, x, y):
    """The clipped sum by a backward pass for each record."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = 0
    for row in range(len(x)):
        model.zero_grad()
        loss(model(x[row : row + 1]), y[row : row + 1]).sum().backward()
        gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
        total = total + gradient * (BOUND / gradient.norm()).clamp(max=1)
    model.zero_grad()
    return total


def assert_right(model, loss, x, y, name="auto", plain=None, tolerance=1e-5):
    """The engine's sum, twice, is that of plain autograd on `plain`, by default the model; gives the engine."""
    made = engine(model, loss, name, sample=(x[:4], y[:4]), batch=len(x))
    expected = alone(model if plain is None else plain, loss, x, y)
    for _ in range(2):
        total = made.clipped_sum([(1.0, made.theta)], x, y, torch.ones(len(x), dtype=torch.bool), Abadi(BOUND))
        assert (total - expected).norm() <= tolerance * expected.norm()
    return made


def classes(n=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def net():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def whole(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def one_layer(model, backend):
    model[0] = torch.compile(model[0], backend=backend)
    return model


def method(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def function(model, backend):
    body = torch.compile(lambda x: model[:3](x), backend=backend)
    return Of(lambda m, x: m.head(body(x)), first=model[0], norm=model[2], head=model[3])


WAYS = [whole, in_place, one_layer, method, function]
COMPILED = [(way, "eager") for way in WAYS] + [(whole, "aot_eager"), (one_layer, "aot_eager")]
COMPILED += [pytest.param(way, "inductor", marks=pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize(("way", "backend"), COMPILED)
def test_compiled_models_are_right(way, backend):
    """In every engine, whether the model was run before or not."""
    torch.manual_seed(0)
    (x, y), plain = classes(), net()
    for was_run, name in ((False, "auto"), (True, "bookkeeping"), (True, "vmap"), (False, "loop")):
        torch.compiler.reset()
        model = way(copy.deepcopy(plain), backend)
        if was_run:
            model(x)
        made = assert_right(model, cross_entropy, x, y, name, plain)
        assert made.name == ("bookkeeping" if name == "auto" else name)


def test_two_threads_leave_compiled_code_alone_until_both_have_left():
    model, runs = torch.compile(nn.Linear(2, 2), backend=lambda graph, inputs: runs.append(1) or graph.forward), []
    with ThreadPoolExecutor(1) as other:
        mine, others = AsWritten(), AsWritten()
        other.submit(others.__enter__).result()
        mine.__enter__()
        assert not torch.backends.mha.get_fastpath_enabled()
        other.submit(others.__exit__, None, None, None).result()
        model(torch.ones(1, 2))
        assert not runs
        mine.__exit__(None, None, None)
    model(torch.ones(1, 2))
    assert runs
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_is_saved_of_a_compiled_model_loads_into_the_plain_one_and_back(tmp_path):
    x, y = classes(60)
    for number, way in enumerate((whole, one_layer, lambda model, backend: model)):
        torch.manual_seed(0)
        options = {"epsilon": 5.0, "delta": 1e-4, "epochs": 1, "batch_size": 20, "accountant": "rdp", "progress": False}
        result = dpopt.fit(way(net(), "eager"), cross_entropy, (x, y), optimizer="dp_sgd", **options)
        assert result.record["status"] == "done"
        result.save(folder := tmp_path / str(number))
        for other in (whole, one_layer, lambda model, backend: model):
            loaded = dpopt.load(folder, other(net(), "eager")).model
            assert torch.equal(loaded(x), result.model(x))


def around(m, x):
    """The head's weight, past its hooks."""
    return F.linear(m.body(x), m.head.weight, m.head.bias)


STATES = {
    "float32": lambda m, x: m.head(m.body(x)) if x.dtype == torch.float64 else around(m, x),
    "training": lambda m, x: around(m, F.dropout(x, 0.1, m.training)) if m.training else m.head(m.body(x)),
    "grad": lambda m, x: around(m, x) if torch.is_grad_enabled() and x.dtype == torch.float32 else m.head(m.body(x)),
    "autocast": lambda m, x: around(m, x) if torch.is_autocast_enabled("cpu") else m.head(m.body(x)),
}


@pytest.mark.parametrize("state", STATES)
def test_a_model_that_is_another_one_in_training_is_noticed(state):
    """It is followed in the state of verification, float64 without random numbers, and not in that of training."""
    torch.manual_seed(0)
    (x, y), model = classes(), Of(STATES[state], body=nn.Linear(5, 4), head=nn.Linear(4, 3))
    precision = "bfloat16" if state == "autocast" else "float32"
    with pytest.raises(ConfigError, match="in training the gradient"):
        engine(model, cross_entropy, "bookkeeping", sample=(x[:4], y[:4]), batch=24, precision=precision)
    chosen = "bookkeeping" if state == "autocast" else "vmap"  # without bfloat16 there is none
    assert engine(model, cross_entropy, sample=(x[:4], y[:4]), batch=24).name == chosen
    if state != "training":
        assert_right(model, cross_entropy, x, y)


def test_records_that_the_engine_cannot_follow_are_refused_before_a_draw_is_charged():
    """Those of the trial lie between 0 and 1; the branch of larger ones goes around the hooks."""
    x, y = torch.rand(40, 5), torch.randint(0, 3, (40,))
    layers = {"body": nn.Linear(5, 4), "head": nn.Linear(4, 3)}
    model = Of(lambda m, x: around(m, x) if ((x > 5) & (x < 20)).any() else m.head(m.body(x)), **layers)
    made = engine(model, cross_entropy, "bookkeeping", sample=(x[:3], y[:3]), batch=40)
    plan = Plan({"gradient": 1.0}, Ledger([Draw(1.0, (1.0,))] * 2), 1.0, 1.0, 2, made.dimension, 1e-5, "pld")
    oracle = DataOracle(made, 10 + x, y, plan, draw_seed=0, noise_seed=0)
    with pytest.raises(ConfigError, match="in training the gradient"), oracle.draw():
        raise AssertionError("it was drawn")
    assert (len(oracle.ledger), oracle.draws_left) == (0, 2)


def test_a_parameter_s_gradient_hook_is_called():
    """Also where it changes large gradients alone, which the records of the trial do not have."""
    torch.manual_seed(0)
    model, y = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randint(0, 3, (24,))
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    x = torch.randn(24, 5) * torch.where(torch.arange(24) > 3, 30.0, 0.1)[:, None]
    assert_right(model, cross_entropy, x, y)
    with pytest.raises(ConfigError, match="gradient hook"):
        engine(model, cross_entropy, "bookkeeping", sample=(x[:3], y[:3]))


@pytest.mark.parametrize("way", ["expanded", "one storage", "overlapping"])
def test_parameters_that_share_memory_are_refused(way):
    """They cannot hold the values that a vector has for each of them."""
    model, memory = nn.Linear(5, 5), torch.randn(30)
    if way == "expanded":
        model.bias = nn.Parameter(torch.zeros(1).expand(5))
    else:
        model.weight = nn.Parameter(memory[:25].view(5, 5))
        model.bias = nn.Parameter(memory[24:29] if way == "overlapping" else memory[:5])
    with pytest.raises(ConfigError, match="shares memory with"):
        engine(model, cross_entropy)
    beside = nn.Linear(5, 5)
    beside.weight, beside.bias = nn.Parameter(memory[:25].view(5, 5)), nn.Parameter(memory[25:])
    engine(beside, cross_entropy)


@pytest.mark.parametrize(
    ("kind", "name"), [(nn.LSTM, "auto"), (nn.GRU, "bookkeeping"), (nn.RNN, "vmap"), (nn.LSTMCell, "auto")]
)
def test_recurrent_layers_are_refused_with_what_replaces_them(kind, name):
    def run(m, x):
        output = m.layer(x[:, None] if isinstance(m.layer, nn.RNNBase) else x)
        output = output[0] if isinstance(output, tuple) else output
        return m.head(output[:, 0] if isinstance(m.layer, nn.RNNBase) else output)

    layer = kind(5, 4, **({"batch_first": True} if issubclass(kind, nn.RNNBase) else {}))
    x, y = classes()
    with pytest.raises(ConfigError) as error:
        engine(Of(run, layer=layer, head=nn.Linear(4, 3)), cross_entropy, name, sample=(x[:3], y[:3]))
    first = str(error.value).splitlines()[0]
    assert f"use opacus.layers.{'dp_rnn.' if 'Cell' in kind.__name__ else ''}DP{kind.__name__} in place of" in first
    assert first.index("DP") < 120


class Clamp(torch.autograd.Function):
    """Without rules for `torch.func`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0] > 0)


ALONE = {
    "own_function": lambda m, x: m.head(Clamp.apply(m.body(x)) * m.scale),
    "a_look_at_a_value": lambda m, x: m.head(m.body(x) * m.scale) * (1.0 if float(x.abs().sum()) > 0 else 2.0),
    "numpy": lambda m, x: m.head(m.body(x) * m.scale) + torch.from_numpy(x.detach().numpy().sum(1, keepdims=True)),
    "tables_of_no_batch": lambda m, x: m.head(m.body(x) * m.scale) + m.bias(torch.arange(7)).sum(0),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_neither_hooks_nor_vmap_follow_is_done_record_by_record(case, caplog):
    torch.manual_seed(0)
    x, y = classes()
    scale = nn.Parameter(torch.rand(4) + 0.5)
    model = Of(ALONE[case], body=nn.Linear(5, 4), head=nn.Linear(4, 3), scale=scale, bias=nn.Embedding(7, 3))
    with caplog.at_level(logging.WARNING):
        made = assert_right(model, cross_entropy, x, y)
    if made.name == "loop":
        assert "runs the model once for each record in training, evaluation and predict" in caplog.text
    assert made.name == ("vmap" if case == "tables_of_no_batch" else "loop")
    reasons = {}
    for name in ("bookkeeping", "vmap"):
        if name != made.name:
            with pytest.raises(ConfigError) as error:
                engine(model, cross_entropy, name, sample=(x[:4], y[:4]))
            reasons[name] = str(error.value)
            assert repr(name) in reasons[name]
    assert len(set(reasons.values())) == len(reasons)


def recomputed(is_reentrant, is_frozen):
    model = Of(
        lambda m, x: m.head(checkpoint(m.body, m.stem(x), use_reentrant=is_reentrant)),
        stem=nn.Linear(5, 4).requires_grad_(not is_frozen),
        body=nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        head=nn.Linear(4, 3),
    )
    if is_frozen:  # as `enable_input_require_grads` of Hugging Face
        model.stem.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    return model


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_are_right_or_name_their_switch(is_reentrant, is_frozen):
    torch.manual_seed(0)
    (x, y), model = classes(), recomputed(is_reentrant, is_frozen)
    assert assert_right(model, cross_entropy, x, y).name == ("loop" if is_reentrant else "bookkeeping")
    if is_reentrant:
        with pytest.raises(ConfigError, match="use_reentrant=False"):
            engine(model, cross_entropy, "bookkeeping", sample=(x[:4], y[:4]))


class Logits(nn.Module):
    """A model of Hugging Face that is called with ids alone."""

    def __init__(self, model, **also):
        super().__init__()
        self.model, self.also = model, also

    def forward(self, ids):
        return self.model(input_ids=ids, **dict.fromkeys(self.also, ids)).logits


def adapted(is_reentrant):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return Logits(model).train()


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return Logits(transformers.T5ForConditionalGeneration(config), decoder_input_ids=True)


LANGUAGE = {
    "lora_checkpointed": (lambda: adapted(False), ["bookkeeping"]),
    "lora_checkpointed_reentrant": (lambda: adapted(True), ["loop"]),
    "t5": (t5, ["vmap", "loop"]),
}


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize("case", LANGUAGE)
def test_models_of_hugging_face(case, length):
    torch.manual_seed(0)
    make, expected = LANGUAGE[case]
    ids = torch.randint(1, 50, (8, length))
    assert assert_right(make(), next_token, ids, ids, tolerance=1e-4).name in expected
    if case == "lora_checkpointed_reentrant":
        with pytest.raises(ConfigError, match="'use_reentrant': False"):
            engine(make(), next_token, "bookkeeping", sample=(ids[:3], ids[:3]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_encoder_with_a_mask_of_padding(dropout):
    def run(m, x):
        padding = x == 0
        hidden = m.encoder(m.table(x), src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        return m.head(hidden.sum(1) / (~padding).sum(1, keepdim=True))

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    model = Of(
        run, table=nn.Embedding(20, 8, padding_idx=0), encoder=nn.TransformerEncoder(layer, 1), head=nn.Linear(8, 3)
    )
    x = torch.randint(1, 20, (20, 6)) * (torch.arange(6) < torch.randint(2, 7, (20, 1)))
    assert_right(model.eval(), cross_entropy, x, torch.randint(0, 3, (20,)), tolerance=1e-4)
    engine(model.train(), cross_entropy, sample=(x[:3], torch.tensor([0, 1, 2])), batch=20)


@pytest.mark.filterwarnings("ignore:None of the inputs", "ignore:none of 24 records")
@pytest.mark.parametrize("is_hidden", [False, True])
def test_nothing_to_learn_is_said_where_autograd_agrees(is_hidden):
    """A product with zero has no gradient; a reentrant checkpoint hides it from `torch.autograd.grad` alone."""
    torch.manual_seed(0)
    model = recomputed(True, True) if is_hidden else Of(lambda m, x: m.head(x) * 0.0, head=nn.Linear(5, 3))
    if is_hidden:
        model.head.requires_grad_(False)
    options = {"epsilon": 5.0, "delta": 1e-4, "epochs": 1, "batch_size": 8, "accountant": "rdp", "progress": False}
    record = dpopt.fit(model, cross_entropy, classes(), optimizer="dp_sgd", **options).record
    assert record["status"] == ("done" if is_hidden else "no_signal")
