# SPDX-License-Identifier: MIT
"""A paged cache whose pages lie on several GPUs of one host, as one tensor on each of them."""
from __future__ import annotations

import math
import os
import socket
from typing import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _view
from .._check import extents
from .._lib import invalid
from .._service import Buffer
from ._mapped import DLPACK_TYPES, device_at, tensor_on

GRANULE = 2 << 20  # bytes: what drivers map is a multiple of it


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
        if dtype not in DLPACK_TYPES:
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
            buffer = Buffer(device_at(index), pages * page_bytes)
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
        self.tensor = tensor_on(view, buffer, (size * pages, *shape), dtype, index)
        self.own = range(rank * pages, (rank + 1) * pages)

    def near(self, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """(copies of the pages that a table names in this GPU's memory, the table of these), on torch's stream; may be captured.

        For many rows, which read each page again and again: what is the other card's comes over the link each time, and once here.
        """
        copies = self.tensor.index_select(0, block_table.flatten())
        return copies, torch.arange(block_table.numel(), dtype=torch.int32, device=block_table.device).view(block_table.shape)
