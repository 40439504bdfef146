"""Every KV cache format: its error, and that rows are independent."""

from __future__ import annotations

import pytest
import torch

from backend.kv_cache import KV_FORMATS, create_kv_format

# By format: the largest error of a number, relative to the largest number in its vector and to itself.
ERRORS = {"auto": (0.0, 0.0), "int8": (0.5 / 127, 0.0), "fp8_e4m3": (2**-10 / 448, 2**-4)}
HEAD_DIM = 24


@pytest.fixture
def vectors() -> torch.Tensor:
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, 7)
    return torch.randn(len(sizes), 50, 2, HEAD_DIM) * sizes[:, None, None, None]


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_close_to_what_was_encoded(name: str, dtype: torch.dtype, vectors: torch.Tensor) -> None:
    kv_format, vectors = create_kv_format(name), vectors.to(dtype)
    rows = kv_format.encode(vectors)
    assert rows.dtype is kv_format.dtype(dtype)
    assert rows.shape == (*vectors.shape[:-1], kv_format.width(HEAD_DIM))
    decoded = kv_format.decode(rows, dtype)
    assert (decoded.dtype, decoded.shape) == (dtype, vectors.shape)
    to_largest, to_itself = ERRORS[name]
    rounding = 2**-8 if dtype is torch.bfloat16 and name != "auto" else 1e-6
    largest = vectors.abs().amax(-1, keepdim=True).float()
    allowed = to_largest * largest + (to_itself + rounding) * vectors.abs().float()
    assert ((decoded.float() - vectors.float()).abs() <= allowed + 1e-6 * largest).all()


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_row_depends_on_its_vector_only(name: str, vectors: torch.Tensor) -> None:
    kv_format = create_kv_format(name)
    together = kv_format.encode(vectors)
    assert torch.equal(together[3, 7, 1], kv_format.encode(vectors[3, 7, 1]))
    one = kv_format.decode(together[2:3], torch.float32)
    assert torch.equal(kv_format.decode(together, torch.float32)[2:3], one)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_zeros_stay_zeros(name: str) -> None:
    kv_format = create_kv_format(name)
    zeros = torch.zeros(3, HEAD_DIM)
    assert torch.equal(kv_format.decode(kv_format.encode(zeros), torch.float32), zeros)
    zero_rows = torch.zeros(3, kv_format.width(HEAD_DIM), dtype=kv_format.dtype(torch.float32))
    assert torch.equal(kv_format.decode(zero_rows, torch.float32), zeros)


def test_a_quantised_row_has_about_half_the_size_of_bfloat16() -> None:
    for name in ("int8", "fp8_e4m3"):
        kv_format = create_kv_format(name)
        share = kv_format.width(128) * kv_format.dtype(torch.bfloat16).itemsize / (128 * 2)
        assert share == pytest.approx(0.516, abs=1e-3)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("scales_apart", [False, True])
def test_what_is_stored_in_slots_is_loaded_with_their_blocks(
    name: str, scales_apart: bool, vectors: torch.Tensor
) -> None:
    """In both layouts, a block is independent of the others, and blocks can be copied."""
    kv_format, block_size, heads = create_kv_format(name, scales_apart=scales_apart), 4, vectors.shape[2]
    vectors = vectors.flatten(0, 1)[:30]
    shape = (10, block_size, heads, kv_format.width(HEAD_DIM))
    cache = torch.zeros(shape, dtype=kv_format.dtype(torch.float32))
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:30]
    kv_format.store(vectors, cache, slots)
    loaded = kv_format.load(cache, torch.arange(10), torch.float32)
    expected = torch.zeros(40, heads, HEAD_DIM)
    expected[slots] = kv_format.decode(kv_format.encode(vectors), torch.float32)
    assert torch.equal(loaded, expected)
    copied = torch.zeros_like(cache)
    copied[2] = cache[7]
    assert torch.equal(kv_format.load(copied, torch.tensor([2]), torch.float32), expected[28:32])


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_rows_with_their_scales_apart_are_aligned(name: str) -> None:
    """A GPU reads 16 bytes at once."""
    kv_format, vectors = create_kv_format(name, scales_apart=True), torch.ones(16, 8, 128)
    cache = torch.zeros(1, 16, 8, kv_format.width(128), dtype=torch.int8)
    kv_format.store(vectors, cache, torch.arange(16))
    values, scales = torch.split(cache.flatten(), [16 * 8 * 128, 16 * 8 * 4])
    largest = kv_format.encode(torch.ones(1))[0]
    assert (values == largest).all()
    assert torch.equal(scales.view(torch.float32), torch.full((128,), 1 / kv_format.limit))
