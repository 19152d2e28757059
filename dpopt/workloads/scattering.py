"""The scattering transform of images: wavelets, moduli and local means, in which nothing is learned.

Bruna and Mallat, "Invariant scattering convolution networks" (2013), with the Morlet wavelets, the border and the order
of channels of Kymatio (Andreux et al. 2020).
"""

from __future__ import annotations

import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpopt.errors import ConfigError

_PERIODS = 2
"""Periods to each side that count where a filter is made periodic."""


class Scattering(nn.Module):
    r"""Scattering coefficients of order two of each channel: [n, c, s, s] -> [n, c k, s / 2^J, s / 2^J].

        S_0 = x * phi,   S_1 = |x * psi_a| * phi,   S_2 = ||x * psi_a| * psi_b| * phi

    a and b go through J scales and L angles, b through coarser scales than a: k = 1 + J L + L^2 J (J - 1) / 2. The
    channels are those of S_0, S_1 and S_2 in this order, a before b, scales before angles.

    Args:
        size: side s of the images, a multiple of 2^J and more than 2^J.
        scales, angles: J and L.

    Raises:
        ConfigError: another size.
    """

    def __init__(self, size: int, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        self.scales, self.border = scales, 2**scales
        if size % self.border or size == self.border:
            raise ConfigError("workload.size", size, f"expected a multiple of {self.border}, from {2 * self.border}")
        side = size + 2 * self.border
        for scale in range(scales):
            wavelets = torch.fft.fft2(_morlets(side, scale, angles)).real
            # One filter for each size that a coarser wavelet may meet: waves of a finer scale come with fewer pixels.
            for halved in range(max(1, scale)):
                low = _low(_low(wavelets, halved, -2), halved, -1)
                self.register_buffer(f"psi_{scale}_{halved}", low.float(), persistent=False)
            self.register_buffer(f"phi_{scale}", _means(side, scale, scales).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        images = F.pad(x, [self.border] * 4, mode="reflect")
        of_first_order, of_second_order = [self._mean(images, 0).unsqueeze(2)], []
        spectrum = torch.fft.fft2(images).unsqueeze(2)
        for a in range(self.scales):
            waves = self._modulus(spectrum, 0, a)
            of_first_order.append(self._mean(waves, a))
            of_waves = torch.fft.fft2(waves).unsqueeze(3)
            coarser = [self._mean(self._modulus(of_waves, a, b), b) for b in range(a + 1, self.scales)]
            of_second_order += [torch.cat(coarser, 3).flatten(2, 3)] if coarser else []
        return torch.cat(of_first_order + of_second_order, 2).flatten(1, 2)

    def _modulus(self, spectrum: Tensor, halved: int, scale: int) -> Tensor:
        """|x * psi| [..., L, m, m] for all angles of `scale`, at every 2^`scale`-th pixel of the images.

        Args:
            spectrum: of x, [..., 1, m', m'], which was halved in size so many times.
        """
        step = 2 ** (scale - halved)
        product = spectrum * (self.get_buffer(f"psi_{scale}_{halved}") / step**2)
        for dim in (-2, -1):  # to leave out pixels is to fold the spectrum; `sum` takes four times as long
            product = reduce(torch.add, product.unflatten(dim, (step, -1)).unbind(dim - 1))
        return torch.fft.ifft2(product).abs()

    def _mean(self, x: Tensor, halved: int) -> Tensor:
        rows = self.get_buffer(f"phi_{halved}")  # phi is a product of one for each dimension, so two matrices do
        return rows @ x @ rows.T


def _coordinates(side: int) -> Tensor:
    """Pixels of a line and of its periods, float64 [(2 _PERIODS + 1) side]."""
    return torch.arange(-_PERIODS * side, (_PERIODS + 1) * side, dtype=torch.float64)


def _periodic(x: Tensor, side: int, dim: int) -> Tensor:
    return x.unflatten(dim, (-1, side)).sum(dim - 1)


def _morlets(side: int, scale: int, angles: int) -> Tensor:
    """Morlet wavelets of one scale: Gaussians times a wave, with mean zero; complex [angles, side, side].

    The standard deviation is 0.8 * 2^scale along the wave and angles / 4 times as much across, its frequency
    3 pi / 4 / 2^scale.
    """
    width, slant, frequency = 0.8 * 2**scale, 4 / angles, 0.75 * math.pi / 2**scale
    theta = (angles - angles // 2 - 1 - torch.arange(angles).double()).mul(math.pi / angles).view(-1, 1, 1)
    down, right = _coordinates(side)[:, None], _coordinates(side)
    along, across = down * theta.cos() + right * theta.sin(), right * theta.cos() - down * theta.sin()
    bell = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2)) * slant / (2 * math.pi * width**2)
    wave = torch.polar(bell, frequency * along)
    bell, wave = (_periodic(_periodic(part, side, -1), side, -2) for part in (bell, wave))
    # Less the bell that makes the mean zero: a constant image must have no coefficient but its mean.
    return wave - bell * (wave.sum((-2, -1), keepdim=True) / bell.sum((-2, -1), keepdim=True))


def _means(side: int, halved: int, scales: int) -> Tensor:
    """The mean x * phi in one dimension as a matrix [side / 2^J - 2, side / 2^halved], without the border's pixels.

    phi is a Gaussian with standard deviation 0.8 * 2^(J - 1), and so a product of one for each dimension.
    """
    width = 0.8 * 2 ** (scales - 1)
    bell = torch.exp(-(_coordinates(side) ** 2) / (2 * width**2)) / (math.sqrt(2 * math.pi) * width)
    response = _low(torch.fft.fft(_periodic(bell, side, -1)).real, halved, -1)
    pixels = torch.eye(len(response), dtype=torch.float64)
    return torch.fft.ifft(torch.fft.fft(pixels) * response).real[:, :: 2 ** (scales - halved)][:, 1:-1].T


def _low(response: Tensor, halved: int, dim: int) -> Tensor:
    """The low frequencies of a filter, for images that are 2^`halved` times smaller."""
    side = response.shape[dim]
    half = side // 2 ** (halved + 1)
    kept = response.unflatten(dim, (-1, half)) if halved else response
    return torch.cat([kept.select(dim - 1, 0), kept.select(dim - 1, -1)], dim) if halved else kept
