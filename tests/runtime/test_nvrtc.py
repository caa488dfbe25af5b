"""Compiling at run time, and the cache of compiled kernels on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ahead import without_nvrtc
from fp8kit.runtime import nvrtc

EMPTY = 'extern "C" __global__ void empty() {}'
COMPILER = pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))


@COMPILER
def test_an_image_is_compiled_once_and_anew_if_damaged(cache_dir: Path) -> None:
    image = nvrtc.cubin(EMPTY, "sm_90a")
    (stored,) = (cache_dir / "cubin").iterdir()
    written = stored.stat()
    assert nvrtc.cubin(EMPTY, "sm_90a") == image
    assert (stored.stat().st_ino, stored.stat().st_mtime_ns) == (
        written.st_ino,
        written.st_mtime_ns,
    )
    whole = stored.read_bytes()
    assert whole.endswith(image)
    zeroed = whole[: len(whole) // 2].ljust(len(whole), b"\0")
    for damaged in (b"", whole[: len(whole) // 2], zeroed, image):
        stored.write_bytes(damaged)
        assert nvrtc.cubin(EMPTY, "sm_90a") == image
        assert stored.read_bytes() == whole
    assert nvrtc.cubin(EMPTY, "sm_100a") != image
    assert len(list((cache_dir / "cubin").iterdir())) == 2


@COMPILER
def test_an_empty_log_is_written_into_memory_of_its_own() -> None:
    assert nvrtc.compiled(EMPTY, "sm_90a")[1] == ""
    assert [bytes([code])[0] for code in range(256)] == list(range(256))


@COMPILER
def test_an_image_needs_no_place_to_be_kept(cache_dir: Path) -> None:
    cache_dir.rmdir()
    cache_dir.touch()
    assert nvrtc.cubin(EMPTY, "sm_90a").startswith(b"\x7fELF")


@COMPILER
def test_a_source_that_does_not_compile_is_not_kept(cache_dir: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"could not compile for sm_90a:\n.*\"vod\" is undefined"
    ):
        nvrtc.cubin(EMPTY.replace("void", "vod"), "sm_90a")
    assert list(cache_dir.iterdir()) == []


def test_a_missing_compiler_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, faked_cuda: Callable[..., None]
) -> None:
    def broken() -> None:
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcVersion", broken)
    assert without_nvrtc() == (
        "NVRTC is not installed (`pip install nvidia-cuda-nvrtc`): libnvrtc.so not found"
    )
    faked_cuda()
    nvrtc.missing.cache_clear()
    try:
        assert nvrtc.missing() == "NVRTC is not usable: libnvrtc.so not found"
    finally:
        nvrtc.missing.cache_clear()
