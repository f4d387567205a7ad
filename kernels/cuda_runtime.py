"""CUDA runtime calls that torch does not offer: plain allocations, CUDA IPC on them, pinned memory.

They bind the libcudart that torch has loaded, on the thread's current device.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

__all__ = [
    "HANDLE_BYTES",
    "CudaError",
    "allocate",
    "close_handle",
    "copy",
    "copy_all",
    "free",
    "handle_of",
    "open_handle",
    "pin",
    "unpin",
]

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegister: for all contexts; of a mapping without writes
_ANY_DIRECTION = 4  # cudaMemcpyDefault: both addresses say themselves where they lie
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BLACKWELL = 10  # its compute capability
_SAME_ADDRESSES = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_COPIES_ALL = 12_080  # the first CUDA, of torch and of the driver, with cudaMemcpyBatchAsync


class CudaError(RuntimeError):
    """A failed call of the CUDA runtime, with CUDA's own words."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Attributes(ctypes.Structure):
    """A cudaMemcpyAttributes. The hints are for managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def allocate(num_bytes: int) -> int:
    address = ctypes.c_void_p()
    _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    assert address.value is not None
    return address.value


def free(address: int) -> None:
    """Free an allocation, once all work of the device is done."""
    _call("cudaFree", ctypes.c_void_p(address))


def handle_of(address: int) -> bytes:
    handle = _Handle()
    _call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    return ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)


def open_handle(handle: bytes) -> int:
    """Map another process's allocation; return its address."""
    address = ctypes.c_void_p()
    _call(
        "cudaIpcOpenMemHandle",
        ctypes.byref(address),
        _Handle.from_buffer_copy(handle),  # by value
        ctypes.c_uint(_LAZY_PEER_ACCESS),
    )
    assert address.value is not None
    return address.value


def close_handle(address: int) -> None:
    _call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))


def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Start a copy between any two addresses on a raw stream."""
    _call(
        "cudaMemcpyAsync",
        ctypes.c_void_p(target),
        ctypes.c_void_p(source),
        ctypes.c_size_t(num_bytes),
        ctypes.c_int(_ANY_DIRECTION),
        ctypes.c_void_p(stream),
    )


def copy_all(copies: Sequence[tuple[int, int, int]], stream: int, *, pinned: bool) -> None:
    """Start copies (target, source, bytes), in any order among them, on a raw stream.

    One call for all leaves no pauses between them, and takes a tenth of the host's time. It wants
    all host memory `pinned`, and a stream that is not the default one.
    """
    if not (pinned and _can_copy_all()):
        for each in copies:
            copy(*each, stream)
        return
    many, (targets, sources, sizes) = len(copies), zip(*copies, strict=True)
    addresses, numbers = ctypes.c_void_p * many, ctypes.c_size_t * many
    # Before CUDA 13 there is a place for the number of the copy that failed.
    failed = () if _number("cudaRuntimeGetVersion") >= 13_000 else (ctypes.byref(numbers()),)
    _call(
        "cudaMemcpyBatchAsync",
        addresses(*targets),
        addresses(*sources),
        numbers(*sizes),
        ctypes.c_size_t(many),
        ctypes.byref(_Attributes(_IN_STREAM_ORDER)),
        ctypes.byref(ctypes.c_size_t(0)),  # all copies from the first on have these attributes
        ctypes.c_size_t(1),
        *failed,
        ctypes.c_void_p(stream),
    )


@functools.cache
def _can_copy_all() -> bool:
    # Blackwell's driver crashes or hangs in it (InternLM/lmdeploy#4838, vllm-project/vllm#49276). On
    # WSL it takes pinned memory's addresses for the GPU's own, and fails (sgl-project/sglang#40232).
    versions = _number("cudaRuntimeGetVersion"), _number("cudaDriverGetVersion")
    return (
        min(versions) >= _COPIES_ALL
        and torch.cuda.get_device_capability()[0] < _BLACKWELL
        and _number("cudaDeviceGetAttribute", _SAME_ADDRESSES, torch.cuda.current_device()) > 0
    )


@functools.cache
def _number(of: str, *arguments: int) -> int:
    number = ctypes.c_int()
    _call(of, ctypes.byref(number), *map(ctypes.c_int, arguments))
    return number.value


def pin(address: int, num_bytes: int, *, read_only: bool) -> None:
    """Have GPUs reach host memory without the driver's help, until `unpin`."""
    flags = _PORTABLE | (_READ_ONLY if read_only else 0)
    size = ctypes.c_size_t(num_bytes)
    _call("cudaHostRegister", ctypes.c_void_p(address), size, ctypes.c_uint(flags))


def unpin(address: int) -> None:
    _call("cudaHostUnregister", ctypes.c_void_p(address))


@functools.cache
def _library() -> ctypes.CDLL:
    # The loader hands out torch's library.
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        raise CudaError(f"torch {torch.__version__} has no CUDA runtime here: {error}") from error
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: object) -> None:
    library = _library()
    status = getattr(library, name)(*arguments)
    if status != 0:
        # else torch's next call would find the error
        library.cudaGetLastError()
        raise CudaError(
            f"{name}: {library.cudaGetErrorString(status).decode()} (CUDA error {status})"
        )
