"""Every architecture of the zoo: the engine that `auto` takes is exact, or refuses; and leaves the model alone."""

import pytest
import torch
from loop import ONE, RULES, TWO, assert_unchanged, check, everything, squared
from zoo import MODELS, ODD, OTHERS

from dpopt.clipping import Abadi, engine
from dpopt.errors import ConfigError

N = 6
ZOO = MODELS | ODD | OTHERS
REFUSED = {"instance_norm_tracking", "batch_norm_training", "batch_norm_untracked", "spectral_norm_training"}
REFUSED |= {"embedding_max_norm", "embedding_sparse", "changed_after_use", "by_value"}
"""Those that no engine can follow, or at too high a cost, and those that cannot be trained privately."""
SAMPLE = [*REFUSED, "batch_norm2d", "batch_norm_frozen", "spectral_norm", "opacus_gru", "by_value", "experts"]
SAMPLE += ["checkpoint_reentrant", "shared_module", "embedding_padding", "attention_causal"]
SLOW = {*OTHERS} - {*SAMPLE}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(ZOO)])
def test_every_architecture_equals_a_loop_or_is_refused(name):
    """Book-keeping follows all of `MODELS`, in float64 to 1e-10. Of the others, at three examples a layer's rows could
    be taken for examples, as there are three positions or time steps."""
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    dtype = torch.float64 if name in MODELS else torch.float32
    model = model.to(dtype)

    def batch(n):
        x = inputs(n)
        return x.to(dtype) if x.is_floating_point() else x, torch.randn(n, dtype=dtype)

    (x, y), before = batch(N), everything(model)
    try:
        made = engine(model, squared, "bookkeeping" if name in MODELS else "auto", sample=(x[:3], y[:3]), batch=N)
        made.clipped_sum([(1.0, made.theta)], x, y, torch.ones(N, dtype=torch.bool), Abadi(0.3))
    except ConfigError:
        assert name in REFUSED
        return
    finally:
        assert_unchanged(model, before)
    assert name not in REFUSED
    for n, weights, clip in zip([3, 0, 5, 1], [ONE, TWO, TWO, ONE], RULES, strict=True):
        check(model, made, *batch(n), weights=weights, clip=clip, mask=torch.arange(n) != 1)


@pytest.mark.parametrize("name", sorted(ODD))
def test_without_a_sample_the_first_batch_decides(name):
    """Each size comes to book-keeping first once, and to the engine that it leaves the model to."""
    torch.manual_seed(0)
    model, inputs = ODD[name]()
    for sizes in ((3, 2), (1, 3)):
        made = engine(model, squared, "auto")
        for n in sizes:
            check(model, made, inputs(n), torch.randn(n), weights=TWO)
