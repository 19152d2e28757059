"""DP-Muon: Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) on the private gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dpopt.clipping.rules import Abadi
from dpopt.fields import Decay, Positive, Range
from dpopt.optimizers.base import Configured, descend, ema, ema_square, is_matrix, scalar
from dpopt.optimizers.dp_adam import State
from dpopt.types import ClipRule, Oracle, Part, Vector

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Muon's: five rounds take singular values from about 0.01 to 1 near 1 (0.7 to 1.2), and smaller ones towards it."""
_ADAM_SIZE = 0.2
"""The root mean square of an update of Adam, to which a matrix's is scaled (Liu et al. 2025, section 2.2)."""


@dataclass(frozen=True)
class DPMuon(Configured):
    r"""Momentum of the private gradient G_t of a matrix W with p rows and q columns, orthogonalised:

        M_t = momentum M_{t-1} + G_t,      U_t = G_t + momentum M_t
        W_t = W_{t-1} - lr 0.2 sqrt(max(p, q)) NS(U_t)

    NS(X) makes singular values nearly 1: X <- X/|X| once, then X <- a X + b (X X^T) X + c (X X^T)^2 X, with Muon's
    a, b, c. The kernel of a convolution is a matrix [out, rest]. Embeddings, vectors, and matrices of one row or column
    take Adam's step with the same lr:

        m_t = beta1 m_{t-1} + (1 - beta1) g_t,    v_t = beta2 v_{t-1} + (1 - beta2) g_t^2
        w_t = w_{t-1} - lr mhat_t / (sqrt(vhat_t) + eps),   mhat_t = m_t / (1 - beta1^t),  vhat_t = v_t / (1 - beta2^t)

    The state is Adam's; M_t stands in m, and v is 0 for matrices. One draw a step, one gradient over all parameters;
    `clip: by_group` clips each layer by itself.

    Args:
        lr, clip: see `Direction`.
        momentum: mu of Muon.
        betas, eps: of Adam.
        rounds: of NS, at most 100: each is traced too, and five of them do what it is for.
        adam: pieces of the names of further parameters for Adam's step, such as "head.": Muon's authors leave the
            output layer to it, and nothing here tells which one that is.

    Deviations from Muon, which is its authors' description of it: NS is computed in theta's type, not in bfloat16; the
    scale of Liu et al. 2025 (arXiv 2502.16982) in place of sqrt(max(1, p/q)), so that one lr serves all; no weight
    decay. Of DP-Muon's paper (Kim and Fan 2026, arXiv 2605.12994) the abstract was read, and a summary by others of its
    update: it clips each matrix by its own norm, steps along NS(M_t) without the second use of momentum and without a
    scale, and its NS has the Taylor polynomial of an inverse root where Muon has a, b, c. Its bias-corrected form,
    DP-MuonBC, is not here, as its formula was not found.
    """

    lr: Positive = 1e-2
    clip: ClipRule = Abadi(1.0)
    momentum: Decay = 0.95
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Positive = 1e-8
    rounds: Annotated[int, Range(1, 100, "[]")] = 5
    adam: tuple[str, ...] | None = None

    def init(self, theta: Vector) -> State:
        return State(theta, torch.zeros_like(theta), torch.zeros_like(theta), scalar(theta))

    def step(self, state: State, oracle: Oracle) -> State:
        with oracle.draw() as batch:
            gradient = batch.gradient(state.theta, self.clip).value
        t, (beta1, beta2) = state.t + 1, self.betas
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in oracle.layout:
            g, m, v = (vector[part.slice] for vector in (gradient, state.m, state.v))
            if self._is_orthogonalised(part):
                m = torch.add(g, m, alpha=self.momentum)
                matrix = torch.add(g, m, alpha=self.momentum).view(part.shape[0], -1)
                direction = orthogonal(matrix, self.rounds).mul_(_ADAM_SIZE * max(matrix.shape) ** 0.5).view(-1)
            else:
                m, v = ema(m, g, beta1), ema_square(v, g, beta2)
                direction = (m / (1 - beta1**t)).div_((v / (1 - beta2**t)).sqrt_().add_(self.eps))
            parts.append((direction, m, v))
        direction, m, v = map(torch.cat, zip(*parts, strict=True))
        return State(descend(state.theta, direction, scalar(state.theta, self.lr)), m, v, t)

    def _is_orthogonalised(self, part: Part) -> bool:
        return is_matrix(part) and not any(piece in part.name for piece in self.adam or ())


def orthogonal(matrix: Tensor, rounds: int) -> Tensor:
    """Muon's Newton-Schulz iteration: U V^T, roughly, for `matrix` = U S V^T [p, q]; a new tensor, zero for zero."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T.contiguous() if is_tall else x
