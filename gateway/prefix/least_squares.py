"""Least squares of two terms, kept as running sums: seconds = first * a + second * b.

The sums of several measurements are the measurements' sums added up, so that old ones can be made to count less, and
those of several deployments can be put together.
"""

from __future__ import annotations

import msgspec


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
        if determinant > 1e-9 * self.aa * self.bb:
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
