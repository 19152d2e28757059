"""Models for tests: name -> () -> (model, maker of inputs)."""

import opacus.layers
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D


def floats(*shape):
    """A maker of n examples of `shape`."""
    return lambda n: torch.randn(n, *shape)


def ids(vocabulary, *shape):
    """A maker of n examples of token ids."""
    return lambda n: torch.randint(vocabulary, (n, *shape))


# Small models, each for one way of using parameters.


class Of(nn.Module):
    """A model with the given children and parameters, whose forward pass is a function of itself and the input."""

    def __init__(self, forward, **members):
        super().__init__()
        self.function = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


def cnn():
    convs = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*convs, nn.Conv2d(4, 4, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3))


def scaled():
    return nn.Sequential(timm.layers.ScaledStdConv2d(2, 4, 3), nn.Tanh(), timm.layers.ScaledStdConv2d(4, 2, 2))


def train_only(model, keep):
    """`model` with the parameters whose name `keep` accepts trained, the others frozen."""
    for name, p in model.named_parameters():
        p.requires_grad_(keep(name))
    return model


def tokens(dropout=0.0):
    """Class token, position embedding, layer scale, a temperature, and windows folded into the batch."""

    def forward(m, x):
        x = torch.cat([m.cls_token.expand(len(x), -1, -1), m.embed(x)], 1) + m.pos_embed
        windows = m.drop(m.mix(x.reshape(-1, 2, 4)).view_as(x))
        return m.head((x + m.gamma * windows)[:, 0] / m.temperature)

    bare = {
        "cls_token": parameter(1, 1, 4),
        "pos_embed": parameter(1, 6, 4),
        "gamma": parameter(4),
        "temperature": parameter(),
    }
    return Of(
        forward, **bare, embed=nn.Linear(3, 4), mix=nn.Linear(4, 4), drop=nn.Dropout(dropout), head=nn.Linear(4, 2)
    ), floats(5, 3)


def tied_language_model(positions, width):
    """Embedding and head share a weight; `positions` looks up the same ids for the whole batch."""

    def forward(m, x):
        return m.head(torch.tanh(m.mix(m.wte(x) + m.wpe(positions))))

    tables = {"wte": nn.Embedding(7, width), "wpe": nn.Embedding(5, width)}
    model = Of(forward, **tables, mix=nn.Linear(width, width), head=nn.Linear(width, 7, bias=False))
    model.head.weight = model.wte.weight
    return model, ids(7, 3)


def tied_across_kinds():
    """One weight as Linear's, as the transformers' Conv1D's (which is the transpose) and as a table."""

    def forward(m, x):
        return m.linear(torch.tanh(m.conv(m.table(x))))

    model = Of(forward, linear=nn.Linear(6, 6), conv=Conv1D(6, 6), table=nn.Embedding(6, 6))
    model.conv.weight = model.table.weight = model.linear.weight
    return model, ids(6, 2)


def tied_convolutions(standardised):
    """Two geometries for one kernel."""
    first, second = {"stride": 2, "padding": 1}, {"padding": 2, "dilation": 2, "bias": False}
    kind = timm.layers.StdConv2d if standardised else nn.Conv2d
    model = nn.Sequential(kind(4, 4, 3, **first), nn.Tanh(), kind(4, 4, 3, **second))
    model[2].weight = model[0].weight
    return model, floats(4, 4, 3)


def frames():
    """Images folded into the batch dimension: several rows of every layer belong to one example."""
    convs = nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), timm.layers.StdConv2d(4, 4, 2), nn.InstanceNorm2d(4, affine=True)
    rest = nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 8)
    body = nn.Sequential(*convs, nn.Tanh(), *rest)
    return Of(lambda m, x: m.body(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1), body=body), floats(2, 2, 4, 4)


def calls_one_layer_twice(layer, inputs):
    return Of(lambda m, x: m.layer(torch.tanh(m.layer(x) + m.layer(2 * x))), layer=layer), inputs


def post_activation_block():
    def forward(m, x):
        identity = x = m.relu(m.norm1(m.conv1(x)))
        out = m.norm2(m.conv2(x))
        out += identity
        return m.head(m.relu(out).mean((2, 3)))

    convs = {"conv1": nn.Conv2d(2, 4, 3, bias=False), "conv2": nn.Conv2d(4, 4, 3, padding=1, bias=False)}
    norms = {"norm1": nn.GroupNorm(2, 4), "norm2": nn.GroupNorm(2, 4), "relu": nn.ReLU(inplace=True)}
    return Of(forward, **convs, **norms, head=nn.Linear(4, 3)), floats(2, 5, 4)


def lora():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["0", "3"], init_lora_weights=False, lora_alpha=3)
    return peft.get_peft_model(mlp(), config), floats(6)


def changed_in_place(m, x):
    """In-place changes of outputs, of views of them, and of a layer's view of its own output."""
    out = m.used(x)
    out[:, 0] *= 2
    out.view(-1, 4)[:, 1:].add_(m.other(x).view(-1, 4)[:, 1:].mul_(3))
    return m.table(x[..., 0].long().clamp_(0, 2)).mul_(2) + out.relu_()


def changed_layers():
    layers = {"used": nn.Linear(4, 4), "other": Conv1D(4, 4), "table": nn.Embedding(3, 4)}
    return Of(changed_in_place, **layers), floats(3, 4)


def recomputed():
    def forward(m, x):
        return m.head(checkpoint(m.body, checkpoint(m.body, x, use_reentrant=False), use_reentrant=False))

    return Of(forward, body=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)), head=nn.Linear(4, 2)), floats(4)


def both():
    return {"used": nn.Linear(4, 3), "other": nn.Linear(4, 3)}


MODELS = {
    "mlp": lambda: (mlp(), floats(6)),
    "cnn": lambda: (cnn(), floats(2, 6, 6)),
    "tokens": tokens,
    "frames": frames,
    "tied": lambda: tied_language_model(torch.arange(3)[None], 4),
    "tied_wide": lambda: tied_language_model(torch.arange(3)[None], 16),
    "tied_across_kinds": tied_across_kinds,
    "tied_convolutions": lambda: tied_convolutions(False),
    "tied_standardised": lambda: tied_convolutions(True),
    "linear_twice": lambda: calls_one_layer_twice(nn.Linear(4, 4), floats(3, 4)),
    "wide_linear_twice": lambda: calls_one_layer_twice(nn.Linear(8, 8), floats(3, 8)),
    "conv_twice": lambda: calls_one_layer_twice(nn.Conv2d(2, 2, 3, padding=1), floats(2, 3, 3)),
    "wide_conv_twice": lambda: calls_one_layer_twice(nn.Conv2d(4, 4, 3, padding=1), floats(4, 2, 2)),
    "norm_twice": lambda: calls_one_layer_twice(nn.LayerNorm(4), floats(3, 4)),
    "post_activation": post_activation_block,
    "bitfit": lambda: (train_only(cnn(), lambda name: "bias" in name), floats(2, 6, 6)),
    "film": lambda: (train_only(cnn(), lambda name: name[0] in "17"), floats(2, 6, 6)),
    "gain_alone": lambda: (train_only(scaled(), lambda name: "gain" in name), floats(2, 4, 4)),
    "kernel_alone": lambda: (train_only(scaled(), lambda name: name == "0.weight"), floats(2, 4, 4)),
    "frozen_middle": lambda: (train_only(mlp(), lambda name: name[0] != "2"), floats(6)),
    "frozen_front": lambda: (train_only(mlp(), lambda name: name[0] == "3"), floats(6)),
    "lora": lora,
    "checkpoint": recomputed,
    "unused": lambda: (Of(lambda m, x: m.used(x), **both()), floats(4)),
    "ignored": lambda: (Of(lambda m, x: m.used(x) + 0 * m.other(x.detach()).detach(), **both()), floats(4)),
    "no_grad": lambda: (Of(lambda m, x: m.head(stem(m, x)), stem=nn.Linear(4, 4), head=nn.Linear(4, 3)), floats(4)),
    "elementwise": lambda: (nn.Sequential(nn.Linear(4, 4), nn.PReLU(3), nn.PReLU(), nn.Linear(4, 2)), floats(3, 4)),
    "in_place": changed_layers,
    "strided": lambda: (Of(lambda m, x: m.used(x.transpose(1, 2)), used=nn.Linear(4, 3)), floats(4, 5)),
    "channels_last": lambda: (cnn(), lambda n: torch.randn(n, 2, 6, 6).to(memory_format=torch.channels_last)),
}


def stem(m, x):
    with torch.no_grad():
        return m.stem(x)


# Uses in which a layer's rows are not the examples', or its parameters are read by others.


class Power(nn.Module):
    """A layer with an argument that is no tensor."""

    def __init__(self):
        super().__init__()
        self.scale = parameter(4)

    def forward(self, x, power=1):
        return (x * self.scale).tanh() ** power


class Standardising(nn.Conv1d):
    """A convolution that changes its kernel without a `forward` of its own."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


def from_outside(read):
    return Of(read, linear=nn.Linear(4, 4), head=nn.Linear(4, 3)), floats(3, 4)


def attention(layer):
    def forward(m, x):
        return m.layer(x, x, x, need_weights=False)[0] if isinstance(m.layer, nn.MultiheadAttention) else m.layer(x)

    return Of(forward, layer=layer), floats(3, 4)


def encoder(**options):
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, **options)


def prompted(m, x):
    return m.head(torch.cat([m.project(m.prompt).expand(len(x), 3, 4), x], 1))


def bag():
    return Of(lambda m, x: m.head(m.layer(x)), layer=nn.EmbeddingBag(5, 4), head=nn.Linear(4, 2)), ids(5, 3)


def prompts():
    return Of(prompted, prompt=parameter(3, 4), project=nn.Linear(4, 4), head=nn.Linear(4, 2)), floats(2, 4)


def hooked():
    """A hook of the user's own changes the layer's output."""
    model, inputs = from_outside(lambda m, x: m.head(m.linear(x)))
    model.linear.register_forward_hook(lambda module, inputs, output: 3 * output)
    return model, inputs


def one_row(function, *shape, inputs=(3, 4)):
    """A bare parameter whose first dimension of size one is not the batch's."""
    return Of(function, row=parameter(*shape), head=nn.Linear(4, 2)), floats(*inputs)


def two_halves():
    """A module that returns two tensors."""
    halves = Of(lambda m, x: (x * m.scale).chunk(2, -1), scale=parameter(4))
    return Of(lambda m, x: m.halves(x)[0] * m.halves(x)[1], halves=halves), floats(3, 4)


def tied_to_a_bare_parameter():
    model, inputs = from_outside(lambda m, x: m.head(torch.tanh(m.linear(x)) @ m.weight))
    model.weight = model.linear.weight
    return model, inputs


def weight_norm():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(4, 2)), floats(3, 4)


def time_major(m, x):
    """Rows of the layer are (time, example)."""
    return m.head(torch.tanh(m.linear(x.transpose(0, 1)))).transpose(0, 1)


def folded_time_major(m, x):
    return m.linear(x.transpose(0, 1).reshape(-1, 4)).view(3, -1, 4).transpose(0, 1)


ODD = {
    "positions_without_batch": lambda: tied_language_model(torch.arange(3), 4),
    "projected_prompt": prompts,
    "time_major": lambda: from_outside(time_major),
    "folded_time_major": lambda: from_outside(folded_time_major),
    "one_call_per_example": lambda: from_outside(lambda m, x: torch.stack([m.linear(row) for row in x])),
    "doubled_rows": lambda: from_outside(lambda m, x: m.linear(torch.cat([x, 2 * x])).view(2, -1, 3, 4).sum(0)),
    "first_rows": lambda: from_outside(lambda m, x: m.linear(x) + F.pad(m.linear(x[:1]), (0, 0, 0, 0, 0, len(x) - 1))),
    "functional": lambda: from_outside(lambda m, x: m.head(F.linear(x, m.linear.weight))),
    "functional_and_called": lambda: from_outside(lambda m, x: m.head(F.linear(m.linear(x), m.linear.weight))),
    "weight_in_the_output": lambda: from_outside(lambda m, x: m.linear(x) + m.head.weight.sum()),
    "penalty": lambda: from_outside(lambda m, x: m.linear(x) * m.linear.weight.square().sum()),
    "attention": lambda: attention(nn.MultiheadAttention(4, 2, batch_first=True)),
    "encoder": lambda: attention(encoder(batch_first=True)),
    "weight_norm": weight_norm,
    "tied_to_a_bare_parameter": tied_to_a_bare_parameter,
    "user_hook": hooked,
    "overridden_part": lambda: (nn.Sequential(Standardising(3, 4, 2), nn.Linear(3, 2)), floats(3, 4)),
    "power": lambda: (Of(lambda m, x: m.layer(x, 2), layer=Power()), floats(3, 4)),
    "named_power": lambda: (Of(lambda m, x: m.layer(x, power=2), layer=Power()), floats(3, 4)),
    "two_halves": two_halves,
    "indexed_row": lambda: one_row(lambda m, x: m.head(x + m.row[0]), 1, 3, 4),
    "row_of_features": lambda: one_row(lambda m, x: m.head(x * m.row), 1, 4),
    "row_of_ones": lambda: one_row(lambda m, x: m.head(x * m.row), 1, 1),
    "row_as_weight": lambda: one_row(lambda m, x: F.linear(x, m.row), 1, 4),
    "row_of_examples": lambda: one_row(lambda m, x: m.head(x) * m.row.sum(), 1, 2),
    "transposed_conv": lambda: (nn.Sequential(nn.ConvTranspose2d(2, 3, 2, stride=2)), floats(2, 3, 3)),
    "bilinear": lambda: (Of(lambda m, x: m.layer(x, x.tanh()), layer=nn.Bilinear(4, 4, 3)), floats(3, 4)),
    "embedding_bag": bag,
}


# Every layer of Opacus' `tests/grad_samples`, and what else people put into models.


def transposed(dims, **options):
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    return nn.Sequential(kind(2, 4, 3, **options), nn.Tanh()), floats(2, *[4] * dims)


def after_linear(layer, *shape):
    """The layer above a linear one, so that it is not the inputs that it sees."""
    return nn.Sequential(nn.Linear(shape[-1], shape[-1]), layer, nn.Tanh()), floats(*shape)


def looked_up(layer, vocabulary=7, length=5):
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)), ids(vocabulary, length)


def attended(call, **options):
    """Attention of every kind, with a projection before it."""
    layer = nn.MultiheadAttention(4, 2, **{"batch_first": True} | options)
    return Of(call, layer=layer, project=nn.Linear(4, 4)), floats(3, 4)


def attend(m, x, **options):
    x = m.project(x)
    return m.layer(x, x, x, **options)[0]


def attend_masked(m, x):
    return attend(m, x, attn_mask=torch.ones(3, 3).triu(1).bool())


def attend_padded(m, x):
    return attend(m, x, key_padding_mask=torch.tensor([[False, False, True]]).expand(len(x), 3))


def recurrent_layer(kind, **options):
    layer = kind(4, 3, batch_first=True, **options)
    return Of(lambda m, x: m.layer(m.project(x))[0], layer=layer, project=nn.Linear(4, 4)), floats(3, 4)


def opacus_attention():
    layer = opacus.layers.DPMultiheadAttention(4, 2, add_bias_kv=True)
    return Of(lambda m, x: m.layer(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), layer=layer), floats(3, 4)


def sequence_bias():
    layer = opacus.layers.SequenceBias(4, batch_first=True)
    return Of(lambda m, x: m.layer(m.project(x)), layer=layer, project=nn.Linear(4, 4)), floats(3, 4)


def batch_norm(kind, dims, trains=True, is_eval=True, **options):
    norm = kind(4, **options).requires_grad_(trains)
    if norm.running_mean is not None:
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    front = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims](4, 4, *[1][:dims])
    return nn.Sequential(front, norm.train(not is_eval), nn.Tanh()), floats(4, *[3] * dims)


def spectral(is_eval):
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(4, 2)).train(not is_eval), floats(4)


def mixture(m, x):
    """Each row goes to one of two experts, by its index."""
    chosen = m.gate(x).argmax(-1)
    out = x.new_zeros(len(x), 3)
    for number, expert in enumerate((m.first, m.second)):
        out[chosen == number] = expert(x[chosen == number])
    return out


def experts():
    layers = {"gate": nn.Linear(4, 2), "first": nn.Linear(4, 3), "second": nn.Linear(4, 3)}
    return Of(mixture, **layers), floats(4)


def changed_after_use(m, x):
    hidden = m.first(x)
    out = m.second(hidden)
    hidden.mul_(2)
    return out + hidden


def checkpointed(is_reentrant):
    body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))
    return Of(
        lambda m, x: m.head(checkpoint(m.body, m.stem(x), use_reentrant=is_reentrant)),
        stem=nn.Linear(4, 4),
        body=body,
        head=nn.Linear(4, 2),
    ), floats(4)


def shared_module():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2)), floats(4)


def complex_product(m, x):
    return torch.fft.fft(m.linear(x)).abs()


def two_layers(forward, *shape):
    return Of(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), floats(*shape)


OTHERS = {
    "conv_transpose2d": lambda: transposed(2, stride=2, padding=1, output_padding=1),
    "instance_norm_tracking": lambda: after_linear(nn.InstanceNorm1d(4, track_running_stats=True), 4, 5),
    "embedding_padding": lambda: looked_up(nn.Embedding(7, 4, padding_idx=0)),
    "embedding_max_norm": lambda: looked_up(nn.Embedding(7, 4, max_norm=1.0)),
    "embedding_sparse": lambda: looked_up(nn.Embedding(7, 4, sparse=True)),
    "embedding_bag_mean": lambda: looked_up(nn.EmbeddingBag(7, 4, mode="mean")),
    "attention_causal": lambda: attended(attend_masked),
    "attention_padded": lambda: attended(attend_padded),
    "attention_bias_kv": lambda: attended(attend, add_bias_kv=True),
    "opacus_attention": opacus_attention,
    "sequence_bias": sequence_bias,
    "opacus_gru": lambda: recurrent_layer(opacus.layers.DPGRU),
    "opacus_lstm_bidirectional": lambda: recurrent_layer(opacus.layers.DPLSTM, bidirectional=True, num_layers=2),
    "batch_norm2d": lambda: batch_norm(nn.BatchNorm2d, 2),
    "batch_norm_frozen": lambda: batch_norm(nn.BatchNorm2d, 2, trains=False),
    "batch_norm_training": lambda: batch_norm(nn.BatchNorm2d, 2, is_eval=False),
    "batch_norm_untracked": lambda: batch_norm(nn.BatchNorm1d, 0, track_running_stats=False),
    "spectral_norm": lambda: spectral(True),
    "spectral_norm_training": lambda: spectral(False),
    "experts": experts,
    "changed_after_use": lambda: two_layers(changed_after_use, 4),
    "checkpoint_stem": lambda: checkpointed(False),
    "checkpoint_reentrant": lambda: checkpointed(True),
    "shared_module": shared_module,
    "fourier": lambda: (Of(complex_product, linear=nn.Linear(4, 4)), floats(4)),
    "einsum": lambda: two_layers(lambda m, x: torch.einsum("nti,ij->ntj", m.first(x), m.second.weight), 3, 4),
    "by_value": lambda: two_layers(lambda m, x: m.first(x) if x.sum() > 0 else m.second(x), 4),
}
