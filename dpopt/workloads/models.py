"""Models that private training is usually measured on, and which of a model's parameters are trained.

None has a layer that mixes examples. All are initialised from torch's global generator and give logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from dpopt.errors import ConfigError, unknown

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
LORA_TARGETS = r".*\.(attn\.(qkv|proj)|mlp\.fc[12]|c_attn|c_proj|c_fc)"
"""The linear layers of timm's vision transformers and of GPT-2, by name."""


def two_conv(classes: int = 10, channels: int = 3, size: int = 32) -> nn.Sequential:
    """Two 3x3 convolutions (32 and 64 filters, same padding), each with ReLU and 2x2 max pooling, then a linear layer.

    Args:
        classes: number of outputs.
        channels, size: of the images, [n, channels, size, size]; `size` a multiple of four.
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


class _WideBlock(nn.Module):
    """A pre-activation block of two weight-standardised 3x3 convolutions."""

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
    normalisation stands for batch normalisation and convolutions have standardised weights.

    Args:
        depth: number of convolutions on the longest path, 6n + 4.
        width: how many times wider than a residual network of 16, 32 and 64 filters.
        classes: number of outputs.
        groups: of the group normalisation.

    Raises:
        ConfigError: no such depth.
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


def timm_model(name: str, classes: int = 10, **options: Any) -> nn.Module:
    """The timm model `name` with random weights; `options` such as `img_size` go to `timm.create_model`."""
    import timm

    return timm.create_model(name, pretrained=False, num_classes=classes, **options)


class GPT2(nn.Module):
    """A small GPT-2 with random weights: token ids [n, t] to next-token logits [n, t, vocabulary].

    The output layer is tied to the token embedding. No dropout.

    Args:
        layers, width, heads: of the transformer.
        vocabulary: number of tokens.
        context: the longest t.
    """

    def __init__(
        self, layers: int = 4, width: int = 256, heads: int = 4, vocabulary: int = 4096, context: int = 64
    ) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            vocab_size=vocabulary,
            n_positions=context,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits


def trainable(model: nn.Module, subset: str) -> nn.Module:
    """Set which parameters of `model` are trained (`requires_grad`), in place; returns the model.

    Args:
        model: any module; "lora" needs a vision transformer of timm's or a GPT-2.
        subset: "full"; "head": the classifier; "bitfit": all biases (Zaken et al. 2022); "film": scales and biases of
            the normalisation layers, and the head; "lora": adapters of rank 8 beside the transformer's linear layers
            (Hu et al. 2022), and the head. A head that is tied to the embedding is not a head of its own.

    Raises:
        ConfigError: an unknown subset, or the model has no such parameters.
    """
    if subset not in SUBSETS:
        raise unknown("subset", subset, SUBSETS)
    chosen = list(SUBSETS[subset](model))
    if not chosen:
        raise ConfigError("subset", subset, f"{type(model).__name__} has no such parameters")
    model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)
    return model


def _head(model: nn.Module) -> Iterator[nn.Parameter]:
    """The classifier, which is the last linear layer where the model does not say; nothing where it is tied."""
    known = getattr(model, "get_classifier", None)
    layers = [known()] if known else [module for module in model.modules() if isinstance(module, nn.Linear)]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if layers and id(layers[-1].weight) not in embeddings:
        yield from layers[-1].parameters()


def _biases(model: nn.Module) -> Iterator[nn.Parameter]:
    yield from (p for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias")


def _norms_and_head(model: nn.Module) -> Iterator[nn.Parameter]:
    norms = [p for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()]
    if norms:
        yield from norms
        yield from _head(model)


def _adapters_and_head(model: nn.Module) -> Iterator[nn.Parameter]:
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    targets = [module for name, module in model.named_modules() if re.fullmatch(LORA_TARGETS, name)]
    if targets:
        head = list(_head(model))
        is_transposed = isinstance(targets[0], Conv1D)
        inject_adapter_in_model(LoraConfig(r=8, target_modules=LORA_TARGETS, fan_in_fan_out=is_transposed), model)
        yield from (p for name, p in model.named_parameters() if "lora_" in name)
        yield from head


SUBSETS: dict[str, Callable[[nn.Module], Iterator[nn.Parameter]]] = {
    "full": nn.Module.parameters,
    "head": _head,
    "bitfit": _biases,
    "film": _norms_and_head,
    "lora": _adapters_and_head,
}
"""Which parameters each trainable subset holds."""
