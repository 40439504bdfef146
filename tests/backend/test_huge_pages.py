"""Memory is in huge pages if the system has them, and ordinary memory otherwise."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend import huge_pages
from backend.engine.config import EngineConfig
from backend.engine.kv_memory import KvMemory
from backend.huge_pages import PAGE_BYTES, HugePages
from backend.native import library
from backend.ops.base import INT4_GROUP
from backend.ops.native import NativeOps

MIB = 1 << 20
SMAPS = Path("/proc/self/smaps")
PAGEMAP = Path("/proc/self/pagemap")
PRESENT = 1 << 63  # flag of a pagemap entry
THP_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LEVELS = loaded.level_names if (loaded := library.load()) else ()

needs_huge_pages = pytest.mark.skipif(
    not huge_pages._has_huge_pages() or not SMAPS.exists(), reason="this system has no huge pages of 2 MiB"
)


@pytest.fixture
def gives_huge_pages() -> None:
    if "[never]" in THP_ENABLED.read_text():
        pytest.skip("huge pages are disabled on this system")
    if re.search(r"^THP_enabled:\s+0", Path("/proc/self/status").read_text(), re.MULTILINE):
        pytest.skip("huge pages are disabled for this process")


@pytest.fixture
def page_size_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "hpage_pmd_size"
    monkeypatch.setattr(huge_pages, "PAGE_SIZE_FILE", path)
    huge_pages._has_huge_pages.cache_clear()
    yield path
    huge_pages._has_huge_pages.cache_clear()


def mapping_of(tensor: Tensor) -> str:
    """The smaps entry of the mapping in which the tensor begins."""
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE):
        begin, _, end = entry.partition(" ")[0].partition("-")
        if end and int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return entry
    raise AssertionError("the tensor is in no mapping")


def is_advised(tensor: Tensor) -> bool:
    """Whether huge pages were requested with madvise."""
    return "hg" in mapping_of(tensor).rpartition("VmFlags:")[2].split()


def huge_bytes(tensor: Tensor) -> int:
    """The bytes in huge pages of the whole mapping, which may have other tensors, too."""
    found = re.search(r"^AnonHugePages:\s+(\d+) kB$", mapping_of(tensor), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def is_allocated_by_torch(tensor: Tensor) -> bool:
    """Whether the tensor has its own memory and shares it with no other."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def resident_bytes(tensor: Tensor) -> int:
    first, count = tensor.data_ptr() // mmap.PAGESIZE, -(-tensor.nbytes // mmap.PAGESIZE)
    with PAGEMAP.open("rb") as file:
        file.seek(first * 8)
        entries: tuple[int, ...] = struct.unpack(f"{count}Q", file.read(count * 8))
    return sum(entry & PRESENT != 0 for entry in entries) * mmap.PAGESIZE


@needs_huge_pages
def test_written_memory_is_in_huge_pages(gives_huge_pages: None) -> None:
    tensor = HugePages().zeros((16, MIB), torch.uint8)
    before = huge_bytes(tensor)
    tensor.fill_(1)
    assert huge_bytes(tensor) - before == tensor.nbytes


@needs_huge_pages
def test_unwritten_memory_takes_no_pages() -> None:
    tensor = HugePages().zeros((1024, MIB), torch.uint8)
    assert resident_bytes(tensor) == 0
    tensor[512, 0] = 1
    assert 0 < resident_bytes(tensor) <= PAGE_BYTES


@needs_huge_pages
def test_small_tensors_share_a_page() -> None:
    pages = HugePages()
    tensors = [pages.zeros((number, 3), torch.bfloat16).fill_(number) for number in range(1, 50)]
    begin = tensors[0].data_ptr()
    assert begin % PAGE_BYTES == 0
    assert all(tensor.data_ptr() % huge_pages.ALIGNMENT == 0 for tensor in tensors)
    assert all(begin <= tensor.data_ptr() < begin + PAGE_BYTES for tensor in tensors)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors, 1)), "no tensor overlaps another"


@needs_huge_pages
def test_a_mapping_is_released_with_its_last_tensor() -> None:
    def resident() -> int:
        found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found
        return int(found[1]) * 1024

    before = resident()
    pages = HugePages()
    small, large = pages.zeros((4,), torch.float32), pages.zeros((48, MIB), torch.uint8).fill_(1)
    del pages, large
    assert resident() - before > 40 * MIB
    assert small.tolist() == [0.0] * 4
    del small
    assert resident() - before < 8 * MIB


def test_any_shape() -> None:
    pages = HugePages()
    for shape in ((), (0,), (3, 0, 5), (7,), (2, 3, 5), (huge_pages.MIN_MAPPING_BYTES // 2, 3)):
        tensor = pages.zeros(shape, torch.float32)
        assert (tensor.shape, tensor.dtype) == (shape, torch.float32)
        assert tensor.is_contiguous()
        assert not tensor.any()


def test_a_copy_is_contiguous() -> None:
    tensor = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4).permute(2, 0, 1)
    copy = HugePages().copy(tensor)
    assert copy.is_contiguous()
    assert torch.equal(copy, tensor)


@pytest.mark.parametrize("content", [None, "", "536870912\n"])
def test_a_system_without_huge_pages_of_that_size(page_size_file: Path, content: str | None) -> None:
    if content is not None:
        page_size_file.write_text(content)
    tensor = HugePages().zeros((3, MIB), torch.float32)
    assert is_allocated_by_torch(tensor)
    assert not tensor.any()


class Refusing(mmap.mmap):
    def madvise(self, *_: int) -> None:
        raise OSError("madvise is not supported")


def no_mapping(*_: object, **__: object) -> mmap.mmap:
    raise OSError("out of memory")


@pytest.mark.parametrize("refusal", [Refusing, no_mapping])
def test_a_system_that_refuses_the_mapping(
    page_size_file: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., mmap.mmap]
) -> None:
    page_size_file.write_text(f"{PAGE_BYTES}\n")
    monkeypatch.setattr(mmap, "mmap", refusal)
    tensor = HugePages().zeros((3, MIB), torch.float32)
    assert is_allocated_by_torch(tensor)
    assert not tensor.any()


@needs_huge_pages
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outs", [64, 70])
def test_weights_are_in_huge_pages(level: str, dtype: torch.dtype, outs: int) -> None:
    """Packed weights and others."""
    ops = NativeOps(level_name=level)
    weight, int8 = torch.ones(outs, 128, dtype=dtype), torch.ones(outs, 128, dtype=torch.int8)
    int4, scales = torch.ones(outs, 64, dtype=torch.uint8), torch.ones(outs, 128 // INT4_GROUP, dtype=torch.bfloat16)
    assert is_advised(ops.pack(weight, dtype, "silu"))
    assert is_advised(ops.pack(int8, dtype))
    assert is_advised(ops.pack_int4(int4, scales, dtype))


@needs_huge_pages
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_kv_cache_is_in_huge_pages(checkpoint_dir: Callable[[str], Path], kv_cache_dtype: str) -> None:
    model_dir = checkpoint_dir("qwen3")
    config = EngineConfig(
        model_dir=model_dir, device="cpu", num_threads=1, num_blocks=16384, kv_cache_dtype=kv_cache_dtype
    )
    kv = KvMemory(config.resolve())
    kv.wait_until_populated()
    caches = [cache for layer in kv.layers for cache in (layer.key, layer.value)]
    assert all(is_advised(cache) for cache in caches)
    assert all(resident_bytes(cache) >= cache.nbytes for cache in caches), "all of it is resident from the start"
    assert not any(cache.any() for cache in caches)


@needs_huge_pages
def test_a_large_tensor_is_populated_beside_other_work() -> None:
    tensor = HugePages().zeros((80, MIB), torch.uint8)
    tensor[:, 0] = 7
    thread = huge_pages.populate(tensor)
    assert thread is not None
    tensor[70] = 9  # meanwhile
    thread.join()
    assert resident_bytes(tensor) == tensor.nbytes
    assert (tensor[70] == 9).all()
    assert tensor[:, :2].tolist() == [[9, 9] if row == 70 else [7, 0] for row in range(80)]


@needs_huge_pages
def test_a_system_that_cannot_populate_gets_zeros_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "MADV_POPULATE_WRITE", 9999)
    tensor = HugePages().zeros((66, MIB), torch.uint8)
    assert huge_pages.populate(tensor) is None
    assert resident_bytes(tensor) == tensor.nbytes
