# SPDX-License-Identifier: MIT
"""Caches of keys and values in the daemon's keeping, which outlive the processes that fill them and are shared between them.

    with fmha.pool.Pool("llama", (2, 16, 8, 128), "float16", pages=4096, layout="llama-8b layer 0") as pool:
        keys = fmha.pool.chain_keys(tokens, page_size=16, cause="llama-8b, rope 10000")
        known = pool.find(keys)                  # pages of the longest prefix that somebody has computed
        mine = pool.lease(8)                     # pages to write: pool.pages[mine[0]][...] = ...
        pool.seal(mine[:1], keys[len(known):len(known) + 1])   # from now on others find it
        pool.give_back(known)                    # read no more
"""
from __future__ import annotations

import hashlib
import math
import operator
from typing import Iterable, Sequence

import numpy as np

from . import _arrays, _check
from ._lib import check, ffi, invalid, lib, new_error
from ._service import Client, _Owner
from ._start import default_client

KEY_BYTES, SHARE_BYTES = lib.FMHA_POOL_KEY_BYTES, lib.FMHA_POOL_SHARE_BYTES
_PAGE_UNIT = 4096


def chain_keys(tokens: Sequence[int], page_size: int, cause: str | bytes, after: bytes | None = None) -> list[bytes]:
    """A key for each whole page of @tokens: SHA-256 of @cause and of all tokens up to the page's end.

    Args:
        cause: whatever else the contents depend on: model and revision, layout, position scheme, adapters.
        after: the key of the page before @tokens, which then need not come again.
    """
    _check.count(page_size, "page_size")
    if page_size == 0:
        raise invalid("page_size is 0: tokens of a page", "page_size")
    if after is not None:
        _keys([after])
    key = after or hashlib.sha256(b"fmha pool\0" + (cause.encode() if isinstance(cause, str) else bytes(cause))).digest()
    numbers, keys = np.asarray(tokens), []
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise invalid(f"tokens are {numbers.dtype} {list(numbers.shape)}: whole numbers of one sequence", "tokens")
    if numbers.size and numbers.max() >= 1 << 63:
        raise invalid(f"token {numbers.max()}: below 2^63", "tokens")
    numbers = numbers.astype("<i8")
    for start in range(0, len(numbers) // page_size * page_size, page_size):
        key = hashlib.sha256(key + numbers[start:start + page_size].tobytes()).digest()
        keys.append(key)
    return keys


def _page_numbers(pages: Iterable[int]):
    numbers = list(pages)
    for page in numbers:
        _check.whole(page, "pages")
    numbers = [operator.index(page) for page in numbers]
    if any(not 0 <= page < 1 << 32 for page in numbers):
        raise invalid("a page's number is 0 or more", "pages")
    return ffi.new("uint32_t[]", numbers)


def _word(word: str, name: str) -> bytes:
    """For C, where a zero would end it: what is left could name another pool."""
    if not isinstance(word, str) or "\0" in word:
        raise invalid(f"{name} is {word!r}: a string without zeros", name)
    return word.encode()


def _keys(keys: Iterable[bytes]):
    keys = list(keys)
    if any(not isinstance(key, (bytes, bytearray, memoryview)) or len(key) != KEY_BYTES for key in keys):
        raise invalid(f"a key has {KEY_BYTES} bytes", "keys")
    return ffi.new(f"uint8_t[][{KEY_BYTES}]", max(1, len(keys))), keys


class _Card:
    """The GPU that a pool lies on, by PyTorch."""

    def __init__(self, device, code: int):
        import torch

        from .torch import _mapped

        self._torch, self._mapped = torch, _mapped
        self._dtype = next((dtype for dtype in _mapped.DLPACK_TYPES if _arrays.CODES.get(str(dtype).removeprefix("torch.")) == code), None)
        if self._dtype is None:
            raise invalid("pages of a GPU are of float32, float16, bfloat16 or uint8", "dtype")
        if torch.device(device).type != "cuda":
            raise invalid(f"device {device!r}: a GPU of PyTorch's, or None", "device")
        index = torch.device(device).index
        self.index = torch.cuda.current_device() if index is None else index
        with torch.cuda.device(self.index):
            torch.cuda.current_stream().query()  # the context exists
            self.device = _mapped.device_at(self.index)

    def map(self, handle, n_pages: int, page_bytes: int, shape: tuple):
        """[n_pages, *shape]. It keeps the memory, not the pool."""
        from . import _view

        memory, error = ffi.new("struct fmha_memory *"), new_error()
        check(lib.fmha_pool_memory(handle, memory, error), error)
        with self._torch.cuda.device(self.index):
            view = _view.View([_view.Part(memory.fd, memory.size)])
        elements = page_bytes // self._dtype.itemsize
        whole = self._mapped.tensor_on(view, None, (n_pages, elements), self._dtype, self.index)
        return whole[:, :math.prod(shape)].unflatten(1, shape)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self.index)


class Pool(_Owner):
    """Pages of one user, found by name; opened once for each thread that uses it.

    A page is free, leased here to be written, or sealed under a key and then only read. When this process ends, however it does,
    what it had leased is emptied and free again, and what it had sealed stays, `limits.pool_idle_s` longer than anybody has
    the pool open. A restart of the daemon ends it, but for what its file holds.

    Args:
        shape, dtype: of a page.
        pages: how many; None: the pool is there already.
        layout: what the pages hold, in your own words: all who open the pool say the same.
        spill_pages: of a new pool: pages of a file, which outlive the daemon; sealed ones are copied to it in the background.
        share: what `share()` answered the owner, another user, for this one; `name` is "" then.
        device: of PyTorch, "cuda:0": the pages lie in that GPU's memory, where neither this process's end nor a worker's takes them. No
            file, and shared with who may write or with nobody. None: the machine's memory.

    Attributes:
        pages: [pages, *shape], in memory that all processes share and the daemon's CPU device computes on without a copy; a tensor on
            @device.
        read_only: another user's, who lets this one read.
        coming: of the last `find()`.

    Raises:
        InvalidError: it is there with other pages or another layout. FmhaError with code "EQUOTA": more than this user may have.
    """

    _what = "pool"

    def __init__(self, name: str, shape: Sequence[int], dtype="float32", pages: int | None = None, *, layout: str = "",
                 spill_pages: int = 0, share: bytes | None = None, device=None, client: Client | None = None):
        _check.count(spill_pages, "spill_pages")
        if share is not None and (not isinstance(share, bytes) or len(share) != SHARE_BYTES):
            raise invalid(f"what share() answers has {SHARE_BYTES} bytes", "share")
        _check.count_or_none(pages, "pages")
        shape, code = _check.extents(shape, "shape"), _arrays.dtype_code(dtype)
        used = math.prod(shape) * _arrays.ELEMENT_BYTES[code]
        if used == 0:
            raise invalid("a page has one element or more", "shape")
        if used >= 1 << 62:
            raise invalid(f"a page of {shape} has {used} bytes", "shape")
        self.page_bytes = -(-used // _PAGE_UNIT) * _PAGE_UNIT
        self._card = None if device is None else _Card(device, code)
        self._client = client or (self._card.device.client if self._card else default_client())
        kept = [ffi.new("char[]", word) for word in (_word(name, "name"), _word(layout, "layout"))] + [ffi.new("uint8_t[]", share) if share else ffi.NULL]
        options = ffi.new("struct fmha_pool_options *", {
            "struct_size": ffi.sizeof("struct fmha_pool_options"), "n_pages": pages or 0, "page_bytes": self.page_bytes,
            "name": kept[0], "layout": kept[1], "share": kept[2], "n_spill": spill_pages,
            "device": self._card.device.handle if self._card else ffi.NULL})
        found, self._error = ffi.new("struct fmha_pool **"), new_error()
        check(lib.fmha_pool_open(self._client.handle, options, found, self._error), self._error)
        self._handle = ffi.gc(found[0], lib.fmha_pool_close)
        info = ffi.new("struct fmha_pool_info *")
        lib.fmha_pool_get_info(self._handle, info)
        if info.page_bytes != self.page_bytes:
            raise invalid(f"pool {name!r} has pages of {info.page_bytes} bytes, {shape} of {dtype} take {self.page_bytes}", "shape")
        self.coming = 0
        self.name, self.created, self.read_only = name, bool(info.created), bool(info.read_only)
        self._size = info.page_bytes * info.n_pages
        self._buffer = None
        if self._card:
            self.pages = self._card.map(self._handle, info.n_pages, self.page_bytes, shape)
            return
        self._buffer = self._known_to_the_cpu()
        data = ffi.buffer(lib.fmha_pool_data(self._handle), self._size)
        strides = (self.page_bytes, *np.empty(shape, _arrays.numpy_dtype(code)).strides)
        self.pages = np.ndarray((info.n_pages, *shape), _arrays.numpy_dtype(code), data, strides=strides)
        self.pages.flags.writeable = not self.read_only

    def _known_to_the_cpu(self):
        """The pages as a buffer of the daemon's CPU device, where it has one."""
        if self.read_only or not any(d.backend == "cpu" and d.state == "ready" for d in self._client.devices()):
            return None
        device, found = self._client.device(), ffi.new("struct fmha_buffer **")
        check(lib.fmha_pool_buffer(self._handle, device.handle, found, self._error), self._error)
        address = int(ffi.cast("uintptr_t", lib.fmha_pool_data(self._handle)))
        device._extents.add(address, self._size, int(lib.fmha_buffer_id(found[0])))

        def gone(buffer):
            device._extents.remove(address)
            lib.fmha_buffer_free(buffer)

        return ffi.gc(found[0], gone)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Gives back all that is leased and pinned here. Arrays that show `pages` must not be used any more."""
        self.pages = None
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            ffi.release(buffer)
        super().close()

    def _written(self) -> None:
        """What a GPU has been asked to write before this has been written: whoever reads a page next waits for no stream of ours."""
        if self._card:
            self._card.synchronize()

    def lease(self, n: int) -> list[int]:
        """Up to @n pages to write: free ones, then sealed ones that nobody has pinned. Their contents are whatever they are."""
        _check.count(n, "n")
        pages, got = ffi.new("uint32_t[]", max(1, n)), ffi.new("uint32_t *")
        check(lib.fmha_pool_lease(self.handle, n, pages, got, self._error), self._error)
        return list(pages[0:got[0]])

    def seal(self, pages: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Publishes leased pages that are written for good: each page itself, or another one that has its key already: then the
        leased one stays leased. What comes back is pinned here until it is given back, as by find(). Waits for all that the GPU of
        such a pool has been asked for."""
        numbers, (room, keys) = _page_numbers(pages), _keys(keys)
        if len(numbers) != len(keys):
            raise invalid(f"{len(numbers)} pages and {len(keys)} keys", "keys")
        ffi.memmove(room, b"".join(keys), len(keys) * KEY_BYTES)
        found = ffi.new("uint32_t[]", max(1, len(numbers)))
        self._written()
        check(lib.fmha_pool_seal(self.handle, len(numbers), numbers, room, found, self._error), self._error)
        return list(found[0:len(numbers)])

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the first of @keys, up to the first that nobody has; each pinned here until it is given back.

        `coming` is then how many keys behind them are being read from the pool's file: asked again a little later they are found."""
        room, keys = _keys(keys)
        ffi.memmove(room, b"".join(keys), len(keys) * KEY_BYTES)
        pages, got = ffi.new("uint32_t[]", max(1, len(keys))), ffi.new("uint32_t *")
        check(lib.fmha_pool_find(self.handle, len(keys), room, pages, got, self._error), self._error)
        info = ffi.new("struct fmha_pool_info *")
        lib.fmha_pool_get_info(self.handle, info)
        self.coming = info.coming if got[0] < len(keys) else 0
        return list(pages[0:got[0]])

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees leased pages, takes one pin off pinned ones. Waits as seal() does."""
        numbers = _page_numbers(pages)
        self._written()
        check(lib.fmha_pool_give_back(self.handle, len(numbers), numbers, self._error), self._error)


def share(name: str, uid: int, access: str = "read", *, client: Client | None = None) -> bytes:
    """Lets user @uid "read" or "write" a pool of this one's from now on; "none" ends that. Return: `Pool(share=...)` of that user,
    and of nobody else, opens it. Who reads sees all of the pool's memory as long as he has it mapped, who writes is trusted as
    one's own processes are."""
    if access not in ("none", "read", "write"):
        raise invalid(f"access {access!r}: none, read or write", "access")
    _check.whole(uid, "uid")
    if not 0 <= uid < 1 << 32:
        raise invalid(f"uid is {uid}: a user's number", "uid")
    error, found = new_error(), ffi.new("uint8_t[]", SHARE_BYTES)
    level = ("none", "read", "write").index(access)
    check(lib.fmha_pool_share((client or default_client()).handle, _word(name, "name"), uid, level, found, error), error)
    return bytes(found)


def drop(name: str, *, client: Client | None = None) -> None:
    """Ends a pool that nobody has open."""
    error = new_error()
    check(lib.fmha_pool_drop((client or default_client()).handle, _word(name, "name"), error), error)
