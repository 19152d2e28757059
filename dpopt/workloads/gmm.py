"""A Gaussian mixture fitted by variational inference, the small problem of Koskela and Honkela 2020, section 5.5.

The method is the doubly stochastic variational inference of Jälkö, Honkela and Dikmen, "Differentially private
variational inference for non-conjugate models", UAI 2017: what is trained is an approximate posterior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpopt.fields import Count
from dpopt.workloads.base import Split, Workload

CENTRES = ((0.0, 0.0), (1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0))
"""Means of the true components, each with identity covariance and one fifth of the points."""
RECORDS, TEST = 1000, 100
_EVALUATION_SAMPLES = 100
_START = -2.0
"""Of each log scale of q: near that of the posterior of 1,000 records."""


@dataclass(frozen=True)
class GaussianMixture(Workload):
    """1,000 points in the plane from five Gaussians, and the variational posterior of a mixture of five.

        pi ~ Dir(1, ..., 1),  mu_k ~ N(0, I),  sigma_k ~ Inv-Gamma(1, 1)
        p(x | theta) = sum_k pi_k N(x; mu_k, sigma_k I)
        loss_i = -(E_q ln p(x_i | theta) - KL(q || p)/N)

    See `MixturePosterior` for q and for how the expectation is estimated. The score is the predictive
    ln E_q p(x | theta) of the test points, by 100 fixed samples.

    The paper leaves open, and the code of 2017 decides: alpha = 1, the form of q, one sample a draw, and equal shares
    of the true components. Its start, means of zero and scales of one, leaves all components alike, and they stay so;
    here q starts narrow, around means that are drawn from their prior.

    Args:
        samples: of the posterior for each draw; the same ones for all of its records and for all points at which
            gradients or losses are asked for, as they are a part of the input.
        validation: see `Workload`.
    """

    samples: Count = 1

    pool: ClassVar[int] = RECORDS
    batch_size: ClassVar[int] = 20
    epochs: ClassVar[float] = 60.0
    marks: ClassVar[int] = 160
    shares_randomness: ClassVar[bool] = True
    revision: ClassVar[int] = 2
    score: ClassVar[str] = "log_likelihood"

    def load(self) -> tuple[Split, Split]:
        # Always the same points, whatever the seed: the data are what the paper drew once.
        generator = np.random.default_rng(0)
        component = generator.integers(len(CENTRES), size=RECORDS + TEST)
        points = np.array(CENTRES)[component] + generator.standard_normal((RECORDS + TEST, 2))
        x, y = torch.from_numpy(points).float(), torch.from_numpy(component)
        return Split(x[:RECORDS], y[:RECORDS]), Split(x[RECORDS:], y[RECORDS:])

    def augment(self, x: Tensor) -> Tensor:
        noise = torch.randn(self.samples * _latent(len(CENTRES)), device=x.device, dtype=x.dtype)
        return torch.cat([x, noise.expand(len(x), -1)], dim=1)

    def model(self) -> nn.Module:
        return MixturePosterior(len(CENTRES), self.examples)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return -output[:, 0]

    def metric(self, output: Tensor, target: Tensor) -> Tensor:
        return output[:, 1].double()


class MixturePosterior(nn.Module):
    """q(theta) = N(loc, diag(exp(2 log_scale))), theta in R^(4K - 1): sticks, means and log variances of K components.

    The weights are broken off a stick, pi_k = z_k prod_{j<k} (1 - z_j), with z_k = sigmoid(theta_k - ln(K - k)), so
    that equal ones lie at the origin. Samples are loc + scale * noise; the entropy of q is in closed form, and the
    prior is taken at the samples of the likelihood. At the start the means are drawn from N(0, I), the rest of loc is
    zero.

    Input [n, 2 + S (4K - 1)]: points in the plane, each followed by the noise of S samples; of points alone, [n, 2],
    100 fixed samples are taken. Output [n, 2]: the record's share of the evidence's lower bound,
    E_q ln p(x | theta) - KL(q || p)/N, and the predictive ln E_q p(x | theta).

    Args:
        components: K.
        records: the number N of records that the bound is of.
    """

    draws: Tensor

    def __init__(self, components: int, records: int) -> None:
        super().__init__()
        size = _latent(components)
        self.components, self.records = components, records
        self.loc = nn.Parameter(torch.zeros(1, size))
        self.log_scale = nn.Parameter(torch.full((1, size), _START))
        # Means that start alike would stay alike: their gradients are the same.
        nn.init.normal_(self._parts(self.loc.data)[1])
        # Fixed samples: two evaluations of one posterior are then the same number.
        draws = torch.randn(_EVALUATION_SAMPLES * size, generator=torch.Generator().manual_seed(0))
        self.register_buffer("draws", draws, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        points, noise = x[:, :2], x[:, 2:] if x.shape[1] > 2 else self.draws.expand(len(x), -1)
        noise = noise.unflatten(1, (-1, _latent(self.components)))
        theta = self.loc.unsqueeze(1) + self.log_scale.exp().unsqueeze(1) * noise
        likelihood = self.log_likelihood(theta, points)
        minus_kl = self.entropy() + self.log_prior(theta).mean(dim=1)
        bound = likelihood.mean(dim=1) + minus_kl / self.records
        return torch.stack([bound, likelihood.logsumexp(dim=1) - math.log(likelihood.shape[1])], dim=1)

    def log_likelihood(self, theta: Tensor, points: Tensor) -> Tensor:
        """Log density ln p(x_i | theta_is) for each sample theta [n, S, 4K - 1] of each point [n, 2]; shape [n, S]."""
        sticks, means, log_variance = self._parts(theta)
        squares = (points[:, None, None] - means).square().sum(dim=-1)
        normal = -squares / 2 * (-log_variance).exp() - log_variance - math.log(2 * math.pi)
        return (self._log_weights(sticks) + normal).logsumexp(dim=-1)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Log density ln p(theta) in the coordinates of theta, [n, S, 4K - 1]; shape [n, S]."""
        sticks, means, log_variance = self._parts(theta)
        rest = self._rest(theta)
        z = sticks - rest.log()
        # Dir(1, ..., 1) breaks its sticks by z_k ~ Beta(1, K - k); each density has its change of variables in it.
        weights = (rest.log() + F.logsigmoid(z) + rest * F.logsigmoid(-z)).sum(dim=-1)
        normal = -means.square().sum(dim=(-2, -1)) / 2 - self.components * math.log(2 * math.pi)
        return weights + normal - (log_variance + (-log_variance).exp()).sum(dim=-1)

    def entropy(self) -> Tensor:
        """Of q, one value for each row of `log_scale`."""
        return self.log_scale.sum(dim=1) + self.log_scale.shape[1] / 2 * math.log(2 * math.pi * math.e)

    def _parts(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sticks [..., K - 1], means [..., K, 2] and log variances [..., K]."""
        k = self.components
        sticks, means, log_variance = theta.split((k - 1, 2 * k, k), dim=-1)
        return sticks, means.unflatten(-1, (k, 2)), log_variance

    def _rest(self, like: Tensor) -> Tensor:
        # Components that are left once the k-th has its share: K - 1, ..., 1.
        return torch.arange(self.components - 1, 0, -1, device=like.device, dtype=like.dtype)

    def _log_weights(self, sticks: Tensor) -> Tensor:
        """Logarithms of pi, [..., K], of sticks [..., K - 1]."""
        z = sticks - self._rest(sticks).log()
        left = F.pad(F.logsigmoid(-z).cumsum(dim=-1), (1, 0))
        return F.pad(F.logsigmoid(z), (0, 1)) + left


def _latent(components: int) -> int:
    """Coordinates of theta: K - 1 sticks, K means in the plane, K variances."""
    return 4 * components - 1
