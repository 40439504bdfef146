"""The emulated AMX tiles against their definition, and against the CPU's own tiles if it has them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend.native import compiler
from tests.backend.levels import AMX, LEVELS_OF_THIS_CPU, emulated_amx, multiply_tiles
from tests.backend.native.libraries import compiled

if not {"avx512", AMX} & {*LEVELS_OF_THIS_CPU}:
    pytest.skip("tiles are emulated with AVX-512, which this CPU does not have", allow_module_level=True)

pytestmark = pytest.mark.slow(seconds=0)  # the emulation takes a compiler half a minute

Bits = NDArray[np.uint32]
Floats = NDArray[np.float32]

SMALLEST = np.float32(2.0**-126)  # the smallest normal float
ROWS = [1, 5, 16]
INFINITE_OR_NAN = {0.0: 0.6, -1.0: 0.34, np.inf: 0.02, -np.inf: 0.02, np.nan: 0.02}  # value: probability
NUMBERS = {
    "like a model's": lambda rng, shape: rng.standard_normal(shape),
    "of every magnitude": lambda rng, shape: rng.standard_normal(shape) * 2.0 ** rng.integers(-140, 120, shape),
    "with tiny products": lambda rng, shape: rng.standard_normal(shape) * 2.0 ** rng.integers(-66, -60, shape),
    "infinite or NaN": lambda rng, shape: rng.choice([*INFINITE_OR_NAN], shape, p=[*INFINITE_OR_NAN.values()]),
}


def without_tiny(x: Floats) -> Floats:
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def fused(x: Floats, y: Floats, z: Floats) -> Floats:
    """x y + z, rounded once.

    In double precision, the product is exact. The sum is rounded to odd, so that rounding it again to float32 gives the
    correctly rounded result. A result that is subnormal before rounding becomes zero.
    """
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    towards = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    is_even = total.view(np.uint64) & 1 == 0
    odd = np.where(np.isfinite(total) & (error != 0) & is_even, towards, total)
    unbounded = (np.where(np.abs(odd) < 1, odd, 1) * 2.0**64).astype(np.float32)
    is_tiny = np.abs(unbounded) < SMALLEST * np.float32(2.0**64)
    return np.where(is_tiny, np.copysign(np.float32(0), odd), odd).astype(np.float32)


def halves(words: Bits) -> tuple[Floats, Floats]:
    """The even and the odd elements of pairs of bfloat16."""
    even, odd = (words << np.uint32(16)).view(np.float32), (words & np.uint32(0xFFFF0000)).view(np.float32)
    return without_tiny(even), without_tiny(odd)


def product_of_bfloat16(sums: Floats, a: Bits, b: Bits) -> Floats:
    (even_a, odd_a), (even_b, odd_b) = halves(a), halves(b)
    even, odd = np.zeros_like(sums), np.zeros_like(sums)
    for k in range(16):
        even = fused(even_a[:, k, None], even_b[None, k], even)
        odd = fused(odd_a[:, k, None], odd_b[None, k], odd)
    one = np.ones((), np.float32)
    return fused(without_tiny(sums), one, fused(even, one, odd))


def words(rng: np.random.Generator, shape: tuple[int, int], numbers: str) -> Bits:
    made = NUMBERS[numbers](rng, (*shape, 2)).astype(np.float32)
    return np.ascontiguousarray((made.view(np.uint32) >> np.uint32(16)).astype(np.uint16)).view(np.uint32)[..., 0]


def multiplied(function: ctypes._NamedFuncPointer, sums: NDArray[Any], a: Bits, b: Bits) -> NDArray[Any]:
    out = sums.copy()
    function(sums.dtype == np.int32, len(sums), *(array.ctypes.data for array in (out, a, b)))
    return out


def assert_the_same(ours: Floats, theirs: Floats) -> None:
    """Bitwise equality, except for the payload of NaNs."""
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    number = ~np.isnan(ours)
    assert np.array_equal(ours.view(np.uint32)[number], theirs.view(np.uint32)[number])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_products_of_bfloat16(rows: int, numbers: str) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = words(rng, (rows, 16), numbers), words(rng, (16, 16), numbers)
        sums = NUMBERS[numbers](rng, (rows, 16)).astype(np.float32) if seed % 3 else np.zeros((rows, 16), np.float32)
        with np.errstate(all="ignore"):
            expected = product_of_bfloat16(sums, a, b)
        assert_the_same(multiplied(emulated_amx().multiply_tiles, sums, a, b), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_products_of_int8(rows: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (count, 16, 4), dtype=np.int8) for count in (rows, 16))
    sums = rng.integers(-(2**31), 2**31, (rows, 16), dtype=np.int64)
    exact = sums + np.einsum("mkj,knj->mn", a.astype(np.int64), b.astype(np.int64))
    ours = multiplied(emulated_amx().multiply_tiles, sums.astype(np.int32), a.view(np.uint32), b.view(np.uint32))
    assert np.array_equal(ours, exact.astype(np.int32)), "it wraps around"


@pytest.mark.parametrize("rows", [0, 17])
def test_invalid_tile_sizes_are_rejected(rows: int) -> None:
    none = np.zeros((17, 16), np.uint32)
    with pytest.raises(AssertionError):
        emulated_amx().multiply_tiles(0, rows, *[none.ctypes.data] * 3)
    emulated_amx().multiply_tiles(0, 16, *[none.ctypes.data] * 3)


@pytest.mark.skipif(AMX not in LEVELS_OF_THIS_CPU, reason="this CPU has no tiles of its own")
def test_emulated_tiles_match_the_cpus_own(tmp_path: Path) -> None:
    source = Path(__file__).with_name("tile_products.cpp")
    flags = (*compiler.FLAGS, "-fvisibility=default", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
    real = multiply_tiles(ctypes.CDLL(str(compiled((source,), tmp_path, *flags))))
    for seed in range(100):
        rng = np.random.default_rng(seed)
        for numbers in NUMBERS:
            a, b = words(rng, (16, 16), numbers), words(rng, (16, 16), numbers)
            sums = NUMBERS[numbers](rng, (16, 16)).astype(np.float32)
            assert_the_same(*(multiplied(tiles, sums, a, b) for tiles in (real, emulated_amx().multiply_tiles)))
            whole = rng.integers(-(2**31), 2**31, (16, 16), dtype=np.int64).astype(np.int32)
            ours, theirs = (multiplied(tiles, whole, a, b) for tiles in (real, emulated_amx().multiply_tiles))
            assert np.array_equal(ours, theirs)
