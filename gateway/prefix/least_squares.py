"""Least squares of two or three terms, kept as running sums: seconds = first * a + second * b (+ third * c).

The sums of several measurements are the measurements' sums added up, so that old ones can be made to count less, and
those of several deployments can be put together.
"""

from __future__ import annotations

import msgspec

SINGULAR = 1e-9  # of the product of a matrix' diagonal: with a smaller determinant, many fits are equally good
THIRD_EXPLAINS = 0.3


class Sums(msgspec.Struct, frozen=True, gc=False):
    """The weighted sums of products of the first term (a), the second (b) and the seconds (s)."""

    aa: float
    ab: float
    bb: float
    as_: float
    bs: float
    seconds: float  # measured in all: how much these sums are worth

    def plus(self, other: Sums, factor: float = 1.0) -> Sums:
        """Both together, `other` counting `factor` times."""
        return Sums(
            self.aa + factor * other.aa, self.ab + factor * other.ab, self.bb + factor * other.bb,
            self.as_ + factor * other.as_, self.bs + factor * other.bs, self.seconds + factor * other.seconds,
        )  # fmt: skip

    def fit(self) -> tuple[float, float]:
        """Seconds per unit of the first and of the second term. Neither is negative; 0 if there are no measurements."""
        determinant = self.aa * self.bb - self.ab * self.ab
        if determinant > SINGULAR * self.aa * self.bb:
            first = (self.as_ * self.bb - self.bs * self.ab) / determinant
            second = (self.bs * self.aa - self.as_ * self.ab) / determinant
            if first >= 0 and second >= 0:
                return first, second
            if second < 0:
                return self.as_ / self.aa, 0.0
        return 0.0, self.slope_without_constant()

    def slope_without_constant(self) -> float:
        """Seconds per unit of the second term if the first one costs nothing."""
        return self.bs / self.bb if self.bb else 0.0


NOTHING = Sums(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def measurement(first: float, second: float, seconds: float) -> Sums:
    """One measurement, weighted by 1 / seconds: the longer it is, the larger the error that is expected."""
    weight = 1 / seconds
    return Sums(first * first * weight, first * second * weight, second * second * weight, first, second, seconds)


class ThreeSums(msgspec.Struct, frozen=True, gc=False):
    """The same for three terms. The products with the seconds are weighted by 1 / seconds: `as_`, `bs` and `cs` are
    the sums of the terms themselves.
    """

    aa: float
    ab: float
    ac: float
    bb: float
    bc: float
    cc: float
    as_: float
    bs: float
    cs: float
    seconds: float

    def plus(self, other: ThreeSums, factor: float = 1.0) -> ThreeSums:
        """Both together, `other` counting `factor` times."""
        return ThreeSums(
            self.aa + factor * other.aa, self.ab + factor * other.ab, self.ac + factor * other.ac,
            self.bb + factor * other.bb, self.bc + factor * other.bc, self.cc + factor * other.cc,
            self.as_ + factor * other.as_, self.bs + factor * other.bs, self.cs + factor * other.cs,
            self.seconds + factor * other.seconds,
        )  # fmt: skip

    def fit(self, third_max: float) -> tuple[float, float, float]:
        """Seconds per unit of each term. None is negative.

        The second one is positive if anything was measured, and the third one at most `third_max` times as large. The
        third one is 0 unless it explains `THIRD_EXPLAINS` of what the other two leave unexplained: errors alone would
        give it some value.
        """
        aa, ab, ac, bb, bc, cc = self.aa, self.ab, self.ac, self.bb, self.bc, self.cc
        as_, bs, cs = self.as_, self.bs, self.cs
        first, second = _two(aa, ab, bb, as_, bs)
        explained = first * as_ + second * bs
        least, best = explained + THIRD_EXPLAINS * (self.seconds - explained), (first, second, 0.0)
        # Cofactors of the symmetric matrix: the fit by Cramer's rule.
        bb_cc, ab_cc, ab_bc = bb * cc - bc * bc, ab * cc - ac * bc, ab * bc - ac * bb
        determinant = aa * bb_cc - ab * ab_cc + ac * ab_bc
        if determinant > SINGULAR * aa * bb * cc:
            first = (as_ * bb_cc - bs * ab_cc + cs * ab_bc) / determinant
            second = (bs * (aa * cc - ac * ac) - as_ * ab_cc - cs * (aa * bc - ab * ac)) / determinant
            third = (as_ * ab_bc - bs * (aa * bc - ab * ac) + cs * (aa * bb - ab * ab)) / determinant
            if first >= 0 and second > 0 and 0 <= third <= third_max * second:
                is_clear = first * as_ + second * bs + third * cs > least
                return (first, second, third) if is_clear else best
        # The best of the fits at the limits, by how much they explain.
        third, second = _two(cc, bc, bb, cs, bs)
        if third <= third_max * second and (explained := third * cs + second * bs) > least:
            best, least = (0.0, second, third), explained
        m = third_max
        first, second = _two(aa, ab + m * ac, bb + 2 * m * bc + m * m * cc, as_, bs + m * cs)
        if first * as_ + second * (bs + m * cs) > least:
            best = first, second, m * second
        return best


NOTHING_OF_THREE = ThreeSums(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def three_terms(first: float, second: float, third: float, seconds: float) -> ThreeSums:
    """One measurement of three terms, weighted as that of two."""
    weight = 1 / seconds
    return ThreeSums(
        first * first * weight, first * second * weight, first * third * weight, second * second * weight,
        second * third * weight, third * third * weight, first, second, third, seconds,
    )  # fmt: skip


def _two(xx: float, xb: float, bb: float, xs: float, bs: float) -> tuple[float, float]:
    """Seconds per unit of a term x, not negative, and of the second one, which is positive."""
    determinant = xx * bb - xb * xb
    if determinant > SINGULAR * xx * bb:
        x, second = (xs * bb - bs * xb) / determinant, (bs * xx - xs * xb) / determinant
        if x >= 0 and second > 0:
            return x, second
    return 0.0, bs / bb if bb else 0.0
