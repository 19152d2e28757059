"""The book-keeping engine against plain autograd on models that people train."""

import peft
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers
from loop import ONE, RULES, TWO, cast, check, cross_entropy
from torch import nn

from dpopt.clipping import engine

N = 3


def images(classes=5):
    return torch.randn(N, 3, 32, 32), torch.randint(classes, (N,))


def tokens():
    x = torch.randint(50, (N, 7))
    return x, x


def next_token(logits, tokens):
    """Mean cross-entropy of each example's next tokens."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


class Logits(nn.Module):
    """A language model that returns nothing but its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(input_ids=x, use_cache=False).logits


def image_model(name, **options):
    return timm.create_model(name, num_classes=5, **options)


def vit(**options):
    return image_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, **options)


def swin():
    size = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2, 1, 1)}
    return image_model("swin_tiny_patch4_window7_224", **size, drop_path_rate=0.0)


def bit():
    """Weight-standardised convolutions, GroupNorm with its activation inside."""
    layers = {"norm_layer": timm.layers.GroupNormAct, "conv_layer": timm.layers.StdConv2d}
    return image_model("resnetv2_18", layers=(1, 1, 1, 1), channels=(32, 64, 64, 128), **layers)


def resnet():
    """Post-activation blocks: in-place ReLU after `out += identity`."""
    norm = {"norm_layer": lambda channels: nn.GroupNorm(8, channels)}
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5, **norm)


def gpt2(**options):
    size = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 50}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(size | quiet | options)))


def llama():
    size = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**size, intermediate_size=24, vocab_size=50, tie_word_embeddings=True)
    return Logits(transformers.LlamaForCausalLM(config))


def trained(model, *kept):
    """`model` with the parameters whose name contains one of `kept` trained, the others frozen."""
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in kept))
    return model


def lora(model, *targets, **options):
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def recomputed_gpt2():
    model = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Logits(model)


VISION = {
    "vit": vit,
    "vit_class_token_and_layer_scale": lambda: vit(init_values=0.1, qk_norm=True, reg_tokens=2),
    "vit_average_pool": lambda: vit(class_token=False, global_pool="avg"),
    "vit_film": lambda: trained(vit(), "norm", "head"),
    "vit_lora": lambda: lora(vit(), "qkv", "proj", "fc1", modules_to_save=["head"]),
    "resnet18": lambda: image_model("resnet18", norm_layer=timm.layers.GroupNorm),
    "convnext_atto": lambda: image_model("convnext_atto"),
    "swin": swin,
    "bit": bit,
    "post_activation": resnet,
}
LANGUAGE = {
    "gpt2": lambda: Logits(gpt2()),
    "gpt2_lora": lambda: Logits(lora(gpt2(), "c_attn", "c_fc", fan_in_fan_out=True)),
    "gpt2_recomputed": recomputed_gpt2,
    "llama": llama,
}


def models(*names):
    """The names as parameters; those that take ten seconds and more are slow."""
    large = ("resnet18", "convnext_atto", "post_activation", "vit", "vit_average_pool")
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in large)) for name in names]


FALL_BACK = {"swin"}  # a bare table of position biases, in a module with other arguments than tensors


@pytest.mark.parametrize("name", models(*VISION, *LANGUAGE))
def test_every_model_equals_a_loop(name):
    """In float64 to 1e-10, then in float32; a masked row, one point and two."""
    torch.manual_seed(0)
    model, loss = (VISION[name](), cross_entropy) if name in VISION else (LANGUAGE[name](), next_token)
    for dtype, weights, clip in ((torch.float64, TWO, RULES[0]), (torch.float32, ONE, RULES[2])):
        x, y = images() if name in VISION else tokens()
        made = engine(model.to(dtype), loss, "auto" if name in FALL_BACK else "bookkeeping")
        mask = torch.tensor([True, False, True])
        check(model, made, cast(x, dtype), y, loss=loss, weights=weights, clip=clip, mask=mask)


RANDOM = {
    "vit": lambda: vit(proj_drop_rate=0.2, drop_path_rate=0.2),
    "convnext_atto": lambda: image_model("convnext_atto", drop_path_rate=0.5),
    "gpt2": lambda: Logits(gpt2(resid_pdrop=0.2, attn_pdrop=0.2, attn_implementation="eager")),
}


@pytest.mark.parametrize("name", models(*RANDOM))
def test_random_models_train(name):
    """Dropout and stochastic depth: a function of the seed, bounded, and no surprise after the check of the model."""
    torch.manual_seed(0)
    x, y = tokens() if name in LANGUAGE else images()
    made = engine(RANDOM[name]().train(), next_token if name in LANGUAGE else cross_entropy, "auto")
    mask, points, sums = torch.ones(N).bool(), [(w, made.theta) for w in TWO], []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        sums.append(made.clipped_sum(points, x, y, mask, RULES[0]))
    assert torch.equal(sums[0], sums[1])
    assert not torch.allclose(sums[0], sums[2], rtol=1e-3)
    assert 0 < sums[0].norm() <= N * RULES[0].sensitivity * (1 + 1e-4)
