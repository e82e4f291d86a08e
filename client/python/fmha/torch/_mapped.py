# SPDX-License-Identifier: MIT
"""Memory of a GPU that workers have made, as tensors of this process."""
from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import _arrays, _local, _view
from .._lib import not_supported

DLPACK_TYPES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.uint8: (1, 8), torch.int8: (0, 8)}
_CUDA = 2


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h, version 0."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_kept: dict[int, tuple] = {}  # what tensors stand on, by the address of their description


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _drop(address):
    _kept.pop(address, None)


def tensor_on(view: _view.View, owner: object, shape: tuple, dtype: torch.dtype, device: int) -> Tensor:
    """A tensor over @view, which ends, and @owner with it, with the last that shows a part of it.

    By DLPack, whose word is taken for the device: the driver would say of a pointer where its page lies.
    """
    managed = _Managed(view.pointer, _CUDA, device, len(shape), *DLPACK_TYPES[dtype], 1, (ctypes.c_int64 * len(shape))(*shape),
                       None, 0, None, ctypes.cast(_drop, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _kept[address] = (managed, view, owner)
    return torch.from_dlpack(_capsule(address, b"dltensor", None))


def device_at(index: int):
    """The daemon's device for this very GPU: memory is to be its own."""
    device = _local._device((_arrays._torch_runtime(), index))
    at = _local.address_of(torch.cuda.get_device_properties(index))
    if at and device.info.pci not in ("", at):
        raise not_supported(f"the daemon at {device.client.path} does not serve the GPU at {at}", "device")
    return device
