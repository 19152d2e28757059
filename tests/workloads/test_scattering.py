"""The scattering transform: Kymatio's values, and what must hold whatever the wavelets are."""

import pytest
import torch
from torch import nn

from dpopt.errors import ConfigError
from dpopt.workloads import models
from dpopt.workloads.scattering import Scattering

# What kymatio 0.3.0 (numpy) gives for `image` at output pixel [0, 1], to five digits: (size, J, L) -> channels.
KYMATIO = {
    (8, 2, 8): """
0.62126 0.04939 0.04322 0.03586 0.04113 0.03599 0.0435  0.04931 0.07788 0.02178 0.0328  0.02971 0.0275  0.03078 0.03596
0.01932 0.01628 0.00426 0.00626 0.00548 0.00569 0.00394 0.00346 0.00407 0.00441 0.00154 0.00421 0.0033  0.00206 0.00153
0.00169 0.00234 0.00138 0.0027  0.00413 0.00288 0.00282 0.00312 0.00436 0.00339 0.00187 0.00594 0.0069  0.00559 0.00605
0.00623 0.00677 0.0058  0.00672 0.00389 0.00412 0.00259 0.00271 0.0031  0.0038  0.00241 0.00172 0.0025  0.00146 0.00141
0.0019  0.00366 0.00365 0.00149 0.00144 0.00342 0.00345 0.00362 0.00607 0.00591 0.0057  0.00551 0.00434 0.00515 0.00776
0.00735 0.00583 0.00673 0.00741 0.00697 0.00779
""",
    (16, 3, 2): """
0.48815 0.12296 0.14237 0.06158 0.07119 0.03355 0.07335 0.00476 0.00788 0.00426 0.00844 0.01355 0.01292 0.008   0.01088
0.01197 0.00839 0.0079  0.01453
""",
}


def image(size):
    """Pixels [1, 1, size, size] without symmetry."""
    i, j = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    return (((3 * i * i + 5 * i * j + 7 * j) % 11) / 10).view(1, 1, size, size)


@pytest.mark.parametrize(("size", "scales", "angles"), KYMATIO)
def test_coefficients_are_those_of_kymatio(size, scales, angles):
    expected = torch.tensor([float(word) for word in KYMATIO[size, scales, angles].split()])
    transform = Scattering(size, scales, angles)
    torch.testing.assert_close(transform(image(size))[0, :, 0, 1], expected, rtol=1e-4, atol=1e-5)
    assert (transform(image(size).mT)[0, :, 0, 1] - expected).abs().max() > 0.01


def test_a_constant_image_has_a_mean_and_no_waves():
    coefficients = Scattering(12)(torch.full((1, 1, 12, 12), 0.7))[0]
    torch.testing.assert_close(coefficients[0], torch.full((3, 3), 0.7), rtol=1e-4, atol=0)
    assert coefficients[1:].abs().max() < 1e-4


def test_to_move_an_image_by_four_pixels_moves_its_coefficients_by_one():
    x = torch.zeros(1, 1, 48, 48)
    x[..., 20:28, 20:28] = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    transform = Scattering(48)
    coefficients = transform(x)
    torch.testing.assert_close(transform(x.roll(4, -1)), coefficients.roll(1, -1), rtol=0, atol=1e-5)
    assert (transform(x.roll(2, -1)) - coefficients.roll(1, -1)).abs().max() > 1e-3


def test_channels_of_an_image_are_transformed_one_by_one():
    x = torch.rand(2, 3, 8, 8)
    alone = [Scattering(8)(x[:, [channel]]) for channel in range(3)]
    torch.testing.assert_close(Scattering(8)(x), torch.cat(alone, 1))


def test_sizes_that_cannot_be_halved_twice():
    for size in (4, 30):
        with pytest.raises(ConfigError, match="multiple of 4, from 8"):
            Scattering(size)


@pytest.mark.parametrize(("channels", "size", "width"), [(1, 28, 3969), (3, 32, 15552)])
def test_features_are_normalised_in_groups_of_one_image(channels, size, width):
    x = torch.rand(3, channels, size, size)
    layers = models.scatter_features(channels, size)
    coefficients = layers(x)
    assert coefficients.shape == (3, width)
    assert not list(layers.parameters())
    groups = coefficients.view(3, 27, -1)
    torch.testing.assert_close(groups.mean(-1), torch.zeros(3, 27), rtol=0, atol=1e-5)
    spread = Scattering(size)(x).view(3, 27, -1).var(-1, unbiased=False)
    torch.testing.assert_close(groups.var(-1, unbiased=False), spread / (spread + 1e-5))
    assert isinstance(layers[1], nn.GroupNorm)
    # Nothing of the other images is in an image's features.
    torch.testing.assert_close(layers(torch.cat([x[:1], 100 * x[1:]]))[0], coefficients[0], rtol=1e-4, atol=1e-5)
