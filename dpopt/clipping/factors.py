"""Per-example gradients of one parameter in the form in which a layer leaves them, mostly without materialising them.

A linear layer's gradient for one example is sum_t left_t right_t^T, with its output gradients on the left and its
inputs on the right. The squared norm of such a sum needs two T x T Gram matrices (the "ghost" norm of Li et al. 2022,
Eq. 4), and the weighted sum over examples is one matrix product (book-keeping, Bu et al. 2023, section 3). Where
p q <= 2 T^2 the p x q gradient itself is cheaper (layer by layer, section 4 there) and is what is kept.

A norm that is a sum of large terms of both signs loses digits, and a record could be such that its norm comes out
far too small, and its clipped gradient far too large. So where terms cancel, a norm is taken at the upper end of its
rounding error (`_MARGIN`, `_NEGLIGIBLE`). For the same reason `_lost` is added, the most that is lost where a square is
too small for its type: an output gradient of 1e-23 squares to zero, and beside inputs of 1e18 its gradient would seem
to be zero.

In all shapes n is the number of examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import combinations

import torch
from torch import Tensor

BLOCK, DEVICE_BLOCK = 2**19, 2**25
"""Values of Gram matrices or unfolded inputs that are held at once. On a CPU far more would leave its caches; an
accelerator has little to do in a block of that size, and every block costs it several launches."""
_ALL = slice(None)


_MARGIN = 16
"""Rounding error of a sum of T^2 products, in units of machine epsilon times the sum of its T diagonal ones."""
_NEGLIGIBLE = 1e-4
"""Rounding errors up to this share of a squared norm (half as much of the norm) are tolerated."""


class Factor:
    """The gradients of n examples with respect to one parameter."""

    @property
    def examples(self) -> int:
        """Number n of examples."""
        raise NotImplementedError

    def squared_norm(self) -> tuple[Tensor, Tensor | None]:
        """Squared L2 norms [n] and a bound on their rounding errors [n]; None stands for a few machine epsilon."""
        raise NotImplementedError

    def weighted_sum(self, weights: Tensor, out: Tensor, is_first: bool) -> None:
        """Add sum_i weights_i gradient_i to `out`, of the parameter's shape; write it there if it `is_first`."""
        raise NotImplementedError

    def sanitized(self, keep: Tensor) -> Factor:
        """The same with zeros for the examples that `keep`, bool [n], leaves out."""
        raise NotImplementedError

    def dense(self, rows: slice = _ALL) -> Tensor:
        """The gradients of the examples `rows`, shape [n, numel]."""
        raise NotImplementedError


class OuterProducts(Factor):
    """Factors sum_t left_t right_t^T for each example and group; `is_transposed`: the parameter is stored as [q, p]."""

    is_transposed: bool = False

    @property
    def device(self) -> torch.device:
        """The device of left and right."""
        raise NotImplementedError

    @property
    def gram_size(self) -> tuple[int, int]:
        """Groups, and T."""
        raise NotImplementedError

    def pair(self, rows: slice = _ALL) -> tuple[Tensor, Tensor]:
        """Left [n, groups, T, p] and right [n, groups, T, q] of the examples `rows`."""
        raise NotImplementedError

    def squared_norm(self) -> tuple[Tensor, Tensor | None]:
        squares, errors = [], []
        groups, length = self.gram_size
        if length == 1:
            left, right = (_vecnorm(side).add_(math.sqrt(side.shape[3] * _lost(side.dtype))) for side in self.pair())
            square = left.mul_(right).square_()
            return square.view(-1) if groups == 1 else square.flatten(1).sum(1), None
        for part in blocks(self.examples, groups * length**2, self.device):
            left, right = self.pair(part)
            gram, other = left @ left.mT, right @ right.mT
            # What underflows in one Gram matrix could be large times the other one.
            error = length * _lost(gram.dtype) * (left.shape[3] * _trace(other) + right.shape[3] * _trace(gram))
            gram.mul_(other)
            squares.append(gram.sum((1, 2, 3)))
            errors.append(error + rounding(_trace(gram)))
        return torch.cat(squares), torch.cat(errors)


def merged(factors: Sequence[Factor]) -> list[Factor]:
    """The same sum with all materialised gradients, and all looked-up rows, in one factor each."""
    if len(factors) < 2:
        return list(factors)
    dense = [factor.dense() for factor in factors if isinstance(factor, Dense)]  # of one shape, whatever a layer left
    rows = [factor for factor in factors if isinstance(factor, Rows)]
    rest = [factor for factor in factors if not isinstance(factor, Dense | Rows)]
    if dense:
        rest.append(Dense(reduce(torch.add, dense)))
    if rows:
        ids, values = (torch.cat(parts, 1) for parts in zip(*((row.ids, row.values) for row in rows), strict=True))
        rest.append(Rows(ids, values, rows[0].shape))
    return rest


def squared_norm(factors: Sequence[Factor], scale: Tensor | None = None) -> Tensor:
    """|s * sum_a F_a|^2 for each example, shape [n], of one parameter's factors F_a, with s of its shape or 1.

    It is rounded up where terms cancel.
    """
    if scale is not None:
        return _scaled_squared_norm(factors, scale)
    squares, errors = zip(*[factor.squared_norm() for factor in factors], strict=True)
    if errors == (None,):
        return squares[0]
    total = reduce(torch.add, squares)
    # A layer that is called twice has gradients that add up before the norm is taken.
    for first, second in combinations(factors, 2):
        total = total + 2 * _inner(first, second)
    bounds = [rounding(square) if bound is None else bound for square, bound in zip(squares, errors, strict=True)]
    error = len(factors) * reduce(torch.add, bounds)
    return torch.where(error < _NEGLIGIBLE * total, total, total.clamp(min=0) + error)


def _scaled_squared_norm(factors: Sequence[Factor], scale: Tensor) -> Tensor:
    first = factors[0]
    # One outer product needs no gradient: its scaled square is left^2 s^2 right^2.
    if len(factors) == 1 and isinstance(first, Outer) and first.gram_size == (1, 1):
        least = _lost(scale.dtype)
        left, right = (side.flatten(1).square().add_(least) for side in first.pair())
        square = scale.square().add_(least)
        return ((left @ (square.T if first.is_transposed else square)).add_(left.shape[1] * least) * right).sum(1)
    # A product by elements is none of the Gram matrices', so gradients are made, a block at a time.
    squares, sizes = [], []
    for part in blocks(first.examples, scale.numel(), scale.device):
        each = [factor.dense(part) for factor in factors]
        squares.append(_vecnorm(reduce(torch.add, each) * scale.flatten()).square())
        if len(each) > 1:
            sizes.append(sum(_vecnorm(gradients * scale.flatten()).square() for gradients in each))
    total = torch.cat(squares)
    if not sizes:
        return total
    # The weighted sum is made of each factor by itself, so where they cancel it is rounded in another way.
    error = len(factors) * rounding(torch.cat(sizes))
    return torch.where(error < _NEGLIGIBLE * total, total, total + error)


def _inner(a: Factor, b: Factor) -> Tensor:
    if isinstance(a, OuterProducts) and isinstance(b, OuterProducts) and a.is_transposed == b.is_transposed:
        return _gram_product(a, b)
    for lookup, head in ((a, b), (b, a)):
        if isinstance(lookup, Rows) and isinstance(head, Outer) and not head.is_transposed:
            return _tied(lookup, head)
    row = a.dense(slice(0, 1))
    parts = blocks(a.examples, row.shape[1], row.device)
    return torch.cat([(a.dense(part) * b.dense(part)).sum(1) for part in parts])


def blocks(examples: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices over `examples` of at most `BLOCK` or `DEVICE_BLOCK` values, `width` for an example; at least one."""
    size = max(1, (BLOCK if device.type == "cpu" else DEVICE_BLOCK) // max(1, width))
    for start in range(0, max(1, examples), size):
        yield slice(start, start + size)


@dataclass(frozen=True)
class Dense(Factor):
    """The gradients themselves, shape [n, ...]."""

    values: Tensor

    @property
    def examples(self) -> int:
        return len(self.values)

    def squared_norm(self) -> tuple[Tensor, Tensor | None]:
        return _vecnorm(self.dense()).square(), None

    def weighted_sum(self, weights: Tensor, out: Tensor, is_first: bool) -> None:
        out.view(-1).addmv_(self.dense().T, weights, beta=not is_first)

    def sanitized(self, keep: Tensor) -> Dense:
        return Dense(zeroed(self.values, keep))

    def dense(self, rows: slice = _ALL) -> Tensor:
        values = self.values if rows == _ALL else self.values[rows]
        return values.reshape(values.shape[0], -1)


@dataclass(frozen=True)
class Outer(OuterProducts):
    """sum_t left_t right_t^T; left [n, 1, T, p], right [n, 1, T, q]."""

    left: Tensor
    right: Tensor
    is_transposed: bool = False

    @property
    def examples(self) -> int:
        return len(self.left)

    @property
    def device(self) -> torch.device:
        return self.left.device

    @property
    def gram_size(self) -> tuple[int, int]:
        return 1, self.left.shape[2]

    def pair(self, rows: slice = _ALL) -> tuple[Tensor, Tensor]:
        return (self.left, self.right) if rows == _ALL else (self.left[rows], self.right[rows])

    def weighted_sum(self, weights: Tensor, out: Tensor, is_first: bool) -> None:
        # The weights go to the narrower side, where multiplying costs less.
        is_left_narrow = self.left.shape[3] <= self.right.shape[3]
        scale = weights.view(-1, 1, 1, 1)
        left = (self.left * scale if is_left_narrow else self.left).flatten(0, 2)
        right = (self.right if is_left_narrow else self.right * scale).flatten(0, 2)
        if self.is_transposed:
            left, right = right, left
        out.addmm_(left.T, right, beta=not is_first)

    def sanitized(self, keep: Tensor) -> Outer:
        return Outer(zeroed(self.left, keep), zeroed(self.right, keep), self.is_transposed)

    def dense(self, rows: slice = _ALL) -> Tensor:
        left, right = self.pair(rows)
        return (right.mT @ left if self.is_transposed else left.mT @ right).flatten(1)


def outer(left: Tensor, right: Tensor, is_transposed: bool = False) -> Factor:
    """sum_t left_t right_t^T of each example, in the cheaper form; left [n, T, p], right [n, T, q]."""
    factor = Outer(left.unsqueeze(1), right.unsqueeze(1), is_transposed)
    _, length, p = left.shape
    return Dense(factor.dense()) if is_cheaper_dense(length, p, right.shape[2]) else factor


def is_cheaper_dense(length: int, p: int, q: int) -> bool:
    """True if p x q values are cheaper than two Gram matrices of T x T."""
    return p * q <= 2 * length**2


@dataclass(frozen=True)
class Rows(Factor):
    """sum_t onehot(ids_t) values_t^T: the rows of a table [rows, q] looked up by ids [n, T]; values [n, T, q]."""

    ids: Tensor
    values: Tensor
    shape: torch.Size

    @property
    def examples(self) -> int:
        return len(self.ids)

    def squared_norm(self) -> tuple[Tensor, Tensor | None]:
        is_same = (self.ids.unsqueeze(2) == self.ids.unsqueeze(1)).to(self.values)
        # A token that occurs twice adds to one row, so look-ups of the same row meet before they are squared.
        totals = is_same @ self.values  # of the row that t looks up, once for each of its look-ups
        square = (totals.square().sum(2) / is_same.sum(2)).sum(1)
        error = 2 * torch.finfo(square.dtype).eps * torch.linalg.vector_norm(self.values, dim=(1, 2))
        return square, (2 * square.sqrt() + error) * error

    def weighted_sum(self, weights: Tensor, out: Tensor, is_first: bool) -> None:
        if is_first:
            # Rows that nobody looked up must not keep what the memory held before.
            out.zero_()
        out.index_add_(0, self.ids.flatten(), (self.values * weights[:, None, None]).flatten(0, 1))

    def sanitized(self, keep: Tensor) -> Rows:
        return Rows(self.ids, zeroed(self.values, keep), self.shape)

    def dense(self, rows: slice = _ALL) -> Tensor:
        ids, values = self.ids[rows], self.values[rows]
        table = values.new_zeros(len(ids), *self.shape)
        return table.scatter_add_(1, ids.unsqueeze(2).expand_as(values), values).flatten(1)


def rounding(scale: Tensor) -> Tensor:
    """A bound on the rounding error of a squared norm, from the sum of its positive terms."""
    return _MARGIN * torch.finfo(scale.dtype).eps * scale


def zeroed(values: Tensor, keep: Tensor) -> Tensor:
    """`values` [n, ...] with zeros where `keep` [n] is false."""
    return torch.where(keep.view(-1, *[1] * (values.dim() - 1)), values, 0.0)


@cache
def _lost(dtype: torch.dtype) -> float:
    """The most that the square of a number may lose by being too small for its type."""
    return torch.finfo(dtype).tiny


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=2, dim2=3).sum((1, 2))


def _gram_product(first: OuterProducts, second: OuterProducts) -> Tensor:
    """sum_{s,t} (left_s . left'_t)(right_s . right'_t), shape [n]."""
    (groups, length), (_, other_length) = first.gram_size, second.gram_size
    products = []
    for part in blocks(first.examples, groups * length * other_length, first.device):
        (left, right), (left2, right2) = first.pair(part), second.pair(part)
        if length == other_length == 1:
            gram = (left * left2).sum(-1) * (right * right2).sum(-1)
        else:
            gram = (left @ left2.mT).mul_(right @ right2.mT)
        products.append(gram.flatten(1).sum(1))
    return torch.cat(products)


def _vecnorm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dim=-1)


def _tied(lookup: Rows, head: Outer) -> Tensor:
    """sum_{s,t} left_t[ids_s] (right_t . values_s), shape [n], for a table that is also the output layer's weight."""
    _, length = head.gram_size
    left = head.left[:, 0].gather(2, lookup.ids.unsqueeze(1).expand(-1, length, -1))
    return (left * (head.right[:, 0] @ lookup.values.mT)).sum((1, 2))
