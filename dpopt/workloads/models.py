"""Models that private training is usually measured on, and which of a model's parameters are trained.

None has a layer that mixes examples. All are initialised from torch's global generator and give logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpopt._extras import optional
from dpopt.errors import ConfigError, unknown
from dpopt.workloads import language
from dpopt.workloads.base import mlp
from dpopt.workloads.scattering import Scattering

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_LORA_TARGETS = r".*\.(attn\.(qkv|proj)|mlp\.fc[12]|c_attn|c_proj|c_fc|attention\.(self\.(query|value)|[qv]_lin))"
"""The linear layers that get adapters, by name: all of timm's vision transformers and of GPT-2; of BERT and DistilBERT
those of queries and values, as in Hu et al. 2022."""


@cache
def outside() -> dict[str, EntryPoint]:
    """Models of other packages by name: the entry points "dpopt.models", of which nothing is imported yet."""
    return {point.name: point for point in entry_points(group="dpopt.models")}


def make_outside(name: str, *sizes: int) -> nn.Module:
    """The model `name` of another package, for (classes, channels, side) of images or (classes, inputs) of a table.

    Raises:
        ConfigError: there is none of that name, or its function cannot be imported or does not take these sizes.
    """
    if name not in outside():
        raise unknown("workload.architecture", name, outside(), "no package has it as an entry point dpopt.models")
    try:
        return outside()[name].load()(*sizes)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError("workload.architecture", name, f"{outside()[name].value} failed: {error}") from error


def two_conv(classes: int = 10, channels: int = 3, size: int = 32) -> nn.Sequential:
    """Two 3x3 convolutions (32 and 64 filters, same padding), each with ReLU and 2x2 max pooling, then a linear layer.

    Images are [n, channels, size, size], `size` a multiple of four.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (size // 4) ** 2, classes),
    )


def opacus_conv(classes: int = 10, channels: int = 1, size: int = 28) -> nn.Sequential:
    """The network of Opacus' example on MNIST, `SampleConvNet`; 26,010 parameters at 28 pixels."""
    return _strided(classes, channels, size, 3, nn.ReLU)


def tanh_conv(classes: int = 10, channels: int = 1, size: int = 28) -> nn.Sequential:
    """The network for MNIST of Papernot et al. 2020 and of Tramèr and Boneh 2021.

    That of `opacus_conv` with tanh, and one pixel of padding less.
    """
    return _strided(classes, channels, size, 2, nn.Tanh)


def _strided(
    classes: int, channels: int, size: int, padding: int, activation: Callable[[], nn.Module]
) -> nn.Sequential:
    side = size
    for kernel, edge in ((8, padding), (4, 0)):
        side = (side + 2 * edge - kernel) // 2
    if side < 1:
        raise ConfigError("workload.size", size, "expected larger images: nothing is left after two convolutions")
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=padding),
        activation(),
        _ChannelsLastMaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        activation(),
        _ChannelsLastMaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * side**2, 32),
        activation(),
        nn.Linear(32, classes),
    )


class _ChannelsLastMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` with channels last in memory: torch's CPU kernel for the other layout is several times slower.

    Opacus 1.6 has wrong gradients of a convolution above it (`docs/guide/sharp_edges.md`).
    """

    def forward(self, input: Tensor) -> Tensor:
        # what `to(memory_format=torch.channels_last)` does, which `vmap` does not follow
        return super().forward(input.movedim(-3, -1).contiguous().movedim(-1, -3))  # type: ignore[return-value]


def scatter_features(channels: int = 3, size: int = 32) -> nn.Sequential:
    """Scattering coefficients, normalised in 27 groups of channels: [n, channels, s, s] -> [n, 81 channels (s / 4)^2].

    Nothing is learned, and the normalisation looks at one image alone (Tramèr and Boneh 2021).
    """
    return nn.Sequential(Scattering(size), nn.GroupNorm(27, 81 * channels, affine=False), nn.Flatten())


class _WideBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        from timm.layers.std_conv import StdConv2d

        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, inputs), nn.GroupNorm(groups, outputs)
        self.conv1 = StdConv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.conv2 = StdConv2d(outputs, outputs, 3, padding=1)
        self.shortcut = StdConv2d(inputs, outputs, 1, stride=stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x).relu()
        skip = x if self.shortcut is None else self.shortcut(h)
        return skip + self.conv2(self.norm2(self.conv1(h)).relu())


def wide_resnet(depth: int = 16, width: int = 4, classes: int = 10, groups: int = 16) -> nn.Sequential:
    """A wide residual network for small colour images (Zagoruyko and Komodakis 2016), without batch statistics.

    As in De et al. 2022 ("Unlocking high-accuracy differentially private image classification through scale"), group
    normalisation in 16 groups stands for batch normalisation and convolutions have standardised weights. Their code
    differs in what follows from that: it normalises after the rectifier instead of before, each shortcut convolution
    has a normalisation of its own, and standardised weights have a trained gain.

    Its longest path has `depth` = 6n + 4 convolutions (else ConfigError); it is `width` times wider than a residual
    network of 16, 32 and 64 filters.
    """
    from timm.layers.std_conv import StdConv2d

    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise ConfigError("wide_resnet.depth", depth, "expected 6n + 4: 10, 16, 22, 28, 40 ...")
    layers: list[nn.Module] = [StdConv2d(3, 16, 3, padding=1)]
    channels = 16
    for stage, filters in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range(blocks):
            layers.append(_WideBlock(channels, filters, 2 if stage and not block else 1, min(groups, channels)))
            channels = filters
    pool = [nn.GroupNorm(groups, channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *pool, nn.Linear(channels, classes))


def timm_model(name: str, classes: int = 10, checkpoint: Path | None = None, **options: Any) -> nn.Module:
    """The timm model `name` with another number of classes.

    Args:
        name: as `timm.list_models(pretrained=True)` has it, such as "vit_tiny_patch16_224.augreg_in21k_ft_in1k".
        classes: number of outputs; 0 leaves the classifier out, so that the outputs are its inputs.
        checkpoint: a file of its weights, whatever their precision; the classifier's are not used. By default all
            weights are random.
        options: go to `timm.create_model`, such as `img_size`.

    Raises:
        ConfigError: timm has no such model, or none with such options or weights.
    """
    import timm

    timm_configuration(name)
    # Through timm, so that it converts what older checkpoints name or shape otherwise.
    weights = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(checkpoint)}} if checkpoint else {}
    try:
        return timm.create_model(name, num_classes=classes, **weights, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError("architecture", name, f"timm cannot make it with {options}: {error}") from error


@cache
def timm_configuration(name: str) -> Any:
    """The configuration by timm of the model `name`: input size, normalisation, where its checkpoint is."""
    import timm

    configuration = timm.get_pretrained_cfg(name)
    if configuration is None:
        near = get_close_matches(name, timm.list_models() + timm.list_models(pretrained=True), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError("architecture", name, f"{hint}timm.list_models() names those that there are")
    return configuration


def without_batch_norm(model: nn.Module) -> nn.Module:
    """`model` with what Opacus' ModuleValidator can replace replaced, batch normalisation by group normalisation.

    For random weights only: pretrained ones were made with the layer that is replaced.
    """
    from opacus.validators import ModuleValidator

    return model if ModuleValidator.is_valid(model) else ModuleValidator.fix(model)


def zero_head(model: nn.Module) -> nn.Module:
    """Set the classifier of `model` to zero, in place, so that training starts at even odds; returns the model."""
    for parameter in _head(model):
        nn.init.zeros_(parameter)
    return model


class LanguageModel(nn.Module):
    """A language model of transformers that gives nothing but its logits: ids [n, t] -> [n, t, vocabulary]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def gpt2(layers: int = 4, width: int = 256, heads: int = 4, vocabulary: int = 4096, context: int = 64) -> LanguageModel:
    """A small GPT-2 with random weights: token ids [n, t] to next-token logits [n, t, vocabulary].

    The output layer is tied to the token embedding. No dropout. `context` is the longest t.
    """
    transformers = optional("transformers")
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary, "n_positions": context}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **dropout, use_cache=False, bos_token_id=0, eos_token_id=0)
    return LanguageModel(transformers.GPT2LMHeadModel(config))


def trainable(model: nn.Module, subset: str) -> nn.Module:
    """Set which parameters of `model` are trained (`requires_grad`), in place; returns the model.

    Args:
        model: any module; "lora" needs a vision transformer of timm's, a GPT-2, a BERT or a DistilBERT.
        subset: "full"; "head": the classifier; "bitfit": all biases (Zaken et al. 2022), and the head; "film": scales
            and biases of the normalisation layers, and the head; "lora": adapters of rank 8 beside linear layers of the
            transformer (Hu et al. 2022, `_LORA_TARGETS`), and the head. A head tied to the embedding is not a head of
            its own.

    Raises:
        ConfigError: an unknown subset, or the model has no such parameters.
    """
    if subset not in SUBSETS:
        raise unknown("subset", subset, SUBSETS)
    chosen = list(SUBSETS[subset](model))
    if not chosen:
        raise ConfigError("subset", subset, f"{type(model).__name__} has no such parameters")
    model.requires_grad_(False)  # after the choice, as adapters come into being by it
    for parameter in chosen:
        parameter.requires_grad_(True)
    return model


def _head(model: nn.Module) -> Iterator[nn.Parameter]:
    # The classifier is the last linear layer where the model does not say, and nothing where it is tied.
    classifier = getattr(model, "get_classifier", None)
    layers = [classifier()] if classifier else [module for module in model.modules() if isinstance(module, nn.Linear)]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if layers and id(getattr(layers[-1], "weight", None)) not in embeddings:
        yield from layers[-1].parameters()


def _biases_and_head(model: nn.Module) -> Iterator[nn.Parameter]:
    yield from (p for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias")
    yield from _head(model)


def _norms_and_head(model: nn.Module) -> Iterator[nn.Parameter]:
    norms = [p for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters()]
    if norms:
        yield from norms
        yield from _head(model)


def _adapters_and_head(model: nn.Module) -> Iterator[nn.Parameter]:
    peft, conv1d = optional("peft"), optional("transformers.pytorch_utils").Conv1D

    targets = [module for name, module in model.named_modules() if re.fullmatch(_LORA_TARGETS, name)]
    if targets:
        head = list(_head(model))  # before there are adapters, whose linear layers might be taken for it
        is_transposed = isinstance(targets[0], conv1d)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=8, target_modules=_LORA_TARGETS, fan_in_fan_out=is_transposed), model
        )
        yield from (p for name, p in model.named_parameters() if "lora_" in name)
        yield from head


SUBSETS: dict[str, Callable[[nn.Module], Iterator[nn.Parameter]]] = {
    "full": nn.Module.parameters,
    "head": _head,
    "bitfit": _biases_and_head,
    "film": _norms_and_head,
    "lora": _adapters_and_head,
}
"""Which parameters each trainable subset holds."""
REVISIONS = {"bitfit": 2}
"""The revision of workloads that train a subset, where it is not the first: BitFit once left the head as it was."""


def parameter_counts() -> list[dict[str, int | str | None]]:
    """Numbers of parameters that the models have, and that each trainable subset trains.

    Returns:
        One row for each of `_NETWORKS`: "model", "all", and a column for each of `SUBSETS`, None where the model has no
        such parameters. Adapters ("lora") come on top of "all". Image models have 10 classes, encoders of texts 2.
    """
    rows: list[dict[str, int | str | None]] = []
    for name, make in _NETWORKS.items():
        with torch.device("meta"):  # quick, and the same counts
            model = make()
            row: dict[str, int | str | None] = {"model": name, "all": sum(p.numel() for p in model.parameters())}
            for subset in SUBSETS:  # "lora" comes last, since its adapters stay
                try:
                    parameters = trainable(model, subset).parameters()
                    row[subset] = sum(p.numel() for p in parameters if p.requires_grad)
                except ConfigError:
                    row[subset] = None
        rows.append(row)
    return rows


def _encoder(name: str) -> nn.Module:
    config = language.architecture(name)
    encoder = language.Encoder(optional("transformers").AutoModel.from_config(config), "mean")
    return nn.Sequential(encoder, nn.Linear(encoder.width, 2))


_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ViT-Ti/16": partial(timm_model, "vit_tiny_patch16_224.augreg_in21k"),
    "ViT-S/16": partial(timm_model, "vit_small_patch16_224.augreg_in21k"),
    "ViT-B/16": partial(timm_model, "vit_base_patch16_224.augreg_in21k"),
    "WRN-16-4": wide_resnet,
    "ADADP, MNIST": partial(mlp, 784, 256, 256, 256, 10, bias=False),
    "ADADP, CIFAR-10, above the convolutions": partial(mlp, 1600, 500, 500, 10, bias=False),
    "GPT-2 small": partial(gpt2, layers=12, width=768, heads=12, vocabulary=50_257, context=1024),
    "DistilBERT": partial(_encoder, "distilbert"),
    "MiniLM-L6": partial(_encoder, "minilm"),
}
"""Name -> function that makes the model; `parameter_counts` counts these."""
