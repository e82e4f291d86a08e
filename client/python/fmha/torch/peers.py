# SPDX-License-Identifier: MIT
"""A paged cache whose pages lie on several GPUs of one host, as one tensor on each of them."""
from __future__ import annotations

import ctypes
import math
import os
import socket
from typing import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _arrays, _local, _view
from .._check import extents
from .._lib import invalid, not_supported
from .._service import Buffer

GRANULE = 2 << 20  # bytes: what drivers map is a multiple of it

_DLPACK_TYPES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.uint8: (1, 8), torch.int8: (0, 8)}
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


def _tensor_on(view: _view.View, buffer: Buffer, shape: tuple, dtype: torch.dtype, device: int) -> Tensor:
    """A tensor over @view, which ends, and this rank's @buffer with it, with the last that shows a part of it.

    By DLPack, whose word is taken for the device: the driver would say of a pointer where its page lies.
    """
    managed = _Managed(view.pointer, _CUDA, device, len(shape), *_DLPACK_TYPES[dtype], 1, (ctypes.c_int64 * len(shape))(*shape),
                       None, 0, None, ctypes.cast(_drop, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _kept[address] = (managed, view, buffer)
    return torch.from_dlpack(_capsule(address, b"dltensor", None))


def _device_at(index: int):
    """The daemon's device for this very GPU: memory is to be its own."""
    device = _local._device((_arrays._torch_runtime(), index))
    at = _local.address_of(torch.cuda.get_device_properties(index))
    if at and device.info.pci not in ("", at):
        raise not_supported(f"the daemon at {device.client.path} does not serve the GPU at {at}", "device")
    return device


def _whole_pages(pages: int, page_bytes: int) -> int:
    """@pages or more, so that they fill granules."""
    step = GRANULE // math.gcd(GRANULE, page_bytes)
    return -(-pages // step) * step


class PeerPages:
    """Pages of keys or values on several GPUs of a host. A table of pages may name any of them, whichever card has it.

    A collective call of @group, one GPU a rank. The daemon's workers allocate the memory: each rank's user pays for its own part,
    and it stays while any rank has it. Reading another card's page takes NVLink's rate or PCIe's instead of the memory's.

    Args:
        pages: how many each rank has at least; the same for all.
        shape: of a page, such as (page size, KV heads, head dim).
        dtype: of the elements; float32, float16, bfloat16, int8 or uint8 (a view of fp8).
        group: torch's ProcessGroup of ranks on one host; None: the default one, or this process alone where there is none.
        device: this rank's GPU; None: the current one.

    Attributes:
        tensor: [ranks * pages_of_a_rank, *shape] on this rank's GPU: all pages of all ranks. It starts as zeros.
        own: the numbers of this rank's pages, a range.

    Raises:
        NotSupportedError: the cards cannot reach each other. InvalidError: ranks of several hosts, or of different arguments.
    """

    def __init__(self, pages: int, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, *, group=None,
                 device: torch.device | int | None = None):
        shape = extents(shape, "shape")
        if dtype not in _DLPACK_TYPES:
            raise invalid(f"pages of {dtype}: float32, float16, bfloat16, int8 and uint8 are there", "dtype")
        if pages < 1 or 0 in shape:
            raise invalid("a rank has one page or more, of one element or more", "pages")
        if device is None:
            device = torch.cuda.current_device()
        index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index
        page_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        pages = _whole_pages(pages, page_bytes)
        alone = group is None and not dist.is_initialized()
        rank, size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))

        def gather(thing):
            if alone:
                return [thing]
            found = [None] * size
            dist.all_gather_object(found, thing, group=group)
            return found

        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            mine = (file.read(), os.getuid(), pages, shape, str(dtype))
        if any(other != mine for other in gather(mine)):
            raise invalid(f"{socket.gethostname()}: all ranks have to be one user's, on one host, with equal pages, shape and dtype", "group")
        with torch.cuda.device(index):
            torch.cuda.current_stream().query()  # the context exists
            buffer = Buffer(_device_at(index), pages * page_bytes)
            part = _view.part_of(buffer)
            parts = _view.exchange(part, rank, size, gather)
            try:
                view = _view.View(parts)
            finally:
                for r, other in enumerate(parts):
                    if r != rank:
                        os.close(other.fd)
        if view.bytes != size * pages * page_bytes:
            raise invalid(f"the worker's allocation of {part.bytes} bytes is no whole number of pages of {page_bytes}", "shape")
        self.tensor = _tensor_on(view, buffer, (size * pages, *shape), dtype, index)
        self.own = range(rank * pages, (rank + 1) * pages)

    def near(self, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """(copies of the pages that a table names in this GPU's memory, the table of these), on torch's stream; may be captured.

        For many rows, which read each page again and again: what is the other card's comes over the link each time, and once here.
        """
        copies = self.tensor.index_select(0, block_table.flatten())
        return copies, torch.arange(block_table.numel(), dtype=torch.int32, device=block_table.device).view(block_table.shape)
