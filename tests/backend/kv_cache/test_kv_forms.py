"""Every form of the cache: how far from the truth it is, and that a row stands for itself."""

from __future__ import annotations

import pytest
import torch

from backend.kv_cache import KV_FORMATS, create_kv_format

# By form: the largest error of a number, as a share of the largest number in its vector and of itself.
ERRORS = {"auto": (0.0, 0.0), "int8": (0.5 / 127, 0.0), "fp8_e4m3": (2**-10 / 448, 2**-4)}
HEAD_DIM = 24


@pytest.fixture
def vectors() -> torch.Tensor:
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, 7)
    return torch.randn(len(sizes), 50, 2, HEAD_DIM) * sizes[:, None, None, None]


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_nearly_what_was_written(name: str, dtype: torch.dtype, vectors: torch.Tensor) -> None:
    form, vectors = create_kv_format(name), vectors.to(dtype)
    rows = form.encode(vectors)
    assert rows.dtype is form.dtype(dtype)
    assert rows.shape == (*vectors.shape[:-1], form.width(HEAD_DIM))
    read = form.decode(rows, dtype)
    assert (read.dtype, read.shape) == (dtype, vectors.shape)
    of_largest, of_itself = ERRORS[name]
    rounding = 2**-8 if dtype is torch.bfloat16 and name != "auto" else 1e-6
    largest = vectors.abs().amax(-1, keepdim=True).float()
    allowed = of_largest * largest + (of_itself + rounding) * vectors.abs().float()
    assert ((read.float() - vectors.float()).abs() <= allowed + 1e-6 * largest).all()


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_row_depends_on_its_vector_alone(name: str, vectors: torch.Tensor) -> None:
    form = create_kv_format(name)
    together = form.encode(vectors)
    assert torch.equal(together[3, 7, 1], form.encode(vectors[3, 7, 1]))
    one = form.decode(together[2:3], torch.float32)
    assert torch.equal(form.decode(together, torch.float32)[2:3], one)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_zeros_are_zeros(name: str) -> None:
    form = create_kv_format(name)
    zeros = torch.zeros(3, HEAD_DIM)
    assert torch.equal(form.decode(form.encode(zeros), torch.float32), zeros)
    blank = torch.zeros(3, form.width(HEAD_DIM), dtype=form.dtype(torch.float32))
    assert torch.equal(form.decode(blank, torch.float32), zeros)


def test_a_quantised_row_is_about_half_of_bfloat16() -> None:
    for name in ("int8", "fp8_e4m3"):
        form = create_kv_format(name)
        share = form.width(128) * form.dtype(torch.bfloat16).itemsize / (128 * 2)
        assert share == pytest.approx(0.516, abs=1e-3)
