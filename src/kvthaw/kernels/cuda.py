"""CUDA C++ compiled where it runs, by the NVRTC that torch brings, and launched through the driver: for what Triton cannot say."""

from __future__ import annotations

import ctypes
import functools
import glob
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvthaw.errors import CacheError

_SHARED, _LARGE_CLUSTERS = 8, 14
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES and CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_DEPENDENT = _Attribute(6, 0, (ctypes.c_int * 16)(1))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: see chain.py


def _nvrtc(version: str) -> ctypes.CDLL:
    """The library of this major version: as the system finds it, else of a package beside torch."""
    name = f"libnvrtc.so.{version.partition('.')[0]}"
    found = (path for folder in sys.path for path in sorted(glob.glob(f"{folder}/nvidia/*/lib/{name}")))
    for path in (name, *found):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CacheError(f"{name} was not found; it comes with torch for CUDA")


@functools.cache
def available() -> bool:
    """Whether torch is for CUDA and its compiler is found."""
    try:
        return torch.version.cuda is not None and bool(_nvrtc(torch.version.cuda))
    except CacheError:
        return False


def compiled(files: tuple[str, ...], constants: Mapping[str, int], target: str, version: str) -> bytes:
    """Machine code for a target such as sm_90 of files of this folder, one after the other. version: of CUDA."""
    given = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    source = given + "".join((Path(__file__).parent / file).read_text(encoding="utf-8") for file in files)
    lib, program, size = _nvrtc(version), ctypes.c_void_p(), ctypes.c_size_t()

    def text(kind: str) -> ctypes.Array[ctypes.c_char]:
        getattr(lib, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(lib, f"nvrtcGet{kind}")(program, buffer)
        return buffer

    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), files[-1].encode(), 0, None, None)
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={target}".encode(), b"--std=c++17")
    try:
        if lib.nvrtcCompileProgram(program, len(options), options):
            raise CacheError(f"{files[-1]} was not compiled for {target}: {text('ProgramLog').value.decode()}")
        return text("CUBIN").raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _must(result: int, what: str) -> None:
    if result:
        why = ctypes.c_char_p()
        ctypes.CDLL("libcuda.so.1").cuGetErrorString(result, ctypes.byref(why))
        raise CacheError(f"{what}: {(why.value or b'unknown error').decode()}")


def loaded(code: bytes, name: str, shared: int) -> Callable[..., None]:
    """A kernel of machine code, on the current device, which torch uses already. shared: most bytes of shared memory of a block.

    Called with grid, threads of a block, bytes of shared memory, and arguments: tensors, or ctypes' numbers. It may start before
    the previous kernel ends, and waits for that itself.
    """
    driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    _must(driver.cuModuleLoadData(ctypes.byref(module), code), f"{name} was not loaded")
    _must(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"{name} was not found")
    for attribute, value in ((_SHARED, shared), (_LARGE_CLUSTERS, 1)):
        _must(driver.cuFuncSetAttribute(function, attribute, value), f"{name}: attribute {attribute}")

    def launch(grid: tuple[int, int, int], threads: int, shared: int, *given: Any) -> None:
        values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in given]
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config(grid, (threads, 1, 1), shared, stream, ctypes.pointer(_DEPENDENT), 1)
        _must(driver.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None), f"{name} was not launched")

    return launch
