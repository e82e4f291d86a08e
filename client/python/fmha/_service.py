# SPDX-License-Identifier: MIT
"""The daemon as Python objects: Client, Device, Buffer, Plan."""
from __future__ import annotations

import bisect
import os
import threading
from typing import NamedTuple

import numpy as np

from . import _arrays, _check
from ._lib import check, ffi, invalid, lib, new_error, text


class DeviceInfo(NamedTuple):
    """One device of the daemon; `backend` is "cpu", "cuda" or "hip", `state` "ready", "starting", ..."""

    index: int
    name: str
    arch: str
    backend: str
    state: str
    compute_units: int
    memory_bytes: int
    pci: str = ""  # address on the PCI bus, "0000:1b:00.0"


def _device_info(info) -> DeviceInfo:
    return DeviceInfo(info.device, text(info.name), text(info.arch), text(info.backend), text(info.state),
                      info.compute_units, info.memory_bytes, text(info.pci))


class _OfThisProcess:
    """What is no data: a copy, or another process, would have nothing of it."""

    _what: str  # what a sentence calls it

    def __reduce__(self):
        raise TypeError(f"a {self._what} belongs to this process: it is neither pickled nor copied; make another one where it is needed")


class _Owner(_OfThisProcess):
    """Owns an object of the C library until it is closed or collected."""

    _handle: object

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            ffi.release(handle)

    @property
    def handle(self):
        if self._handle is None:
            raise invalid(f"the {self._what} was closed")
        return self._handle


class Client(_Owner):
    """A connection to the daemon; usable from any number of threads, not in a forked child.

    Args:
        path: the socket; None: $FMHAD_SOCKET, else $XDG_RUNTIME_DIR/fmhad.sock, then /run/fmhad/fmhad.sock.
        timeout: seconds that a call may take; None: 30.

    Raises:
        UnreachableError: nobody listens; the sentence names each socket that was tried.
    """

    _what = "client"

    def __init__(self, path: str | os.PathLike | None = None, *, timeout: float | None = None):
        options = ffi.new("struct fmha_client_options *", {"struct_size": ffi.sizeof("struct fmha_client_options")})
        _check.is_a(path, (str, bytes, os.PathLike), "path", "a socket's path")
        _check.number_or_none(timeout, "timeout")
        kept = ffi.new("char[]", os.fsencode(path)) if path is not None else ffi.NULL
        options.path = kept
        if timeout is not None:
            options.timeout_ms = max(1, int(timeout * 1000))
        found, error = ffi.new("struct fmha_client **"), new_error()
        check(lib.fmha_connect(options, found, error), error)
        self._handle = ffi.gc(found[0], lib.fmha_client_free)
        self._devices: dict[int | None, Device] = {}  # by what was asked for
        self._lock = threading.Lock()
        self.found: dict = {}  # devices, by where this process sees them: _local.py

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Frees the connection and its devices; what is still used by arrays ends with them."""
        with self._lock:
            devices, self._devices = list(self._devices.values()), {}
        for device in devices:
            device.close()
        super().close()

    @property
    def path(self) -> str:
        """The socket that answered."""
        return text(self._info().path)

    @property
    def server(self) -> str:
        """The daemon's name and version, "fmhad/0.1.0"."""
        return text(self._info().server)

    def _info(self):
        info, error = ffi.new("struct fmha_client_info *"), new_error()
        check(lib.fmha_client_info(self.handle, info, error), error)
        return info

    def devices(self) -> list[DeviceInfo]:
        """What the daemon serves; one round trip."""
        n, error, capacity = ffi.new("size_t *"), new_error(), 16
        while True:
            infos = ffi.new("struct fmha_device_info[]", capacity)
            check(lib.fmha_client_devices(self.handle, infos, capacity, n, error), error)
            if n[0] <= capacity:
                return [_device_info(infos[i]) for i in range(n[0])]
            capacity = n[0]

    def device(self, index: int | None = None) -> Device:
        """The device of this number, opened once; None: the CPU where there is one, else the first that is ready."""
        _check.count_or_none(index, "index")
        device = self._devices.get(index)
        if device is not None:
            return device
        number = index
        if index is None:
            cpus = [d.index for d in self.devices() if d.backend == "cpu"]
            number = cpus[0] if cpus else lib.FMHA_ANY_DEVICE
        with self._lock:
            device = self._devices.get(number) or Device(self, number)
            self._devices[number] = self._devices[index] = device
        return device


class Device(_Owner):
    """One of the daemon's devices: a direct connection to its worker. Made by Client.device()."""

    _what = "device"

    def __init__(self, client: Client, index: int):
        found, error = ffi.new("struct fmha_device **"), new_error()
        check(lib.fmha_device_open(client.handle, index, found, error), error)
        self.client = client
        self._handle = ffi.gc(found[0], lib.fmha_device_free)
        self._extents = _Extents()

    @property
    def info(self) -> DeviceInfo:
        info, error = ffi.new("struct fmha_device_info *"), new_error()
        check(lib.fmha_device_info(self.handle, info, error), error)
        return _device_info(info)

    def empty(self, shape, dtype="float32") -> np.ndarray:
        """A numpy array in memory that this process and the worker share: computing on it copies nothing.

        Contents start as zeros. The memory is freed with the last array that shows a part of it.
        """
        code = _arrays.dtype_code(dtype)
        shape = _check.extents(shape, "shape")
        count = int(np.prod(shape, dtype=np.int64))
        size = max(1, count * _arrays.ELEMENT_BYTES[code])
        buffer = Buffer(self, size)
        flat = np.frombuffer(buffer.memory(), dtype=np.uint8, count=count * _arrays.ELEMENT_BYTES[code])
        return flat.view(_arrays.numpy_dtype(code)).reshape(shape)

    def locate(self, pointer: int, size: int):
        """(buffer id, offset) of memory that empty() gave out, or None."""
        return self._extents.find(pointer, size)


class Buffer(_OfThisProcess):
    """Memory that both sides map: fmha_buffer_new(). Device.empty() gives arrays in it."""

    _what = "buffer"

    def __init__(self, device: Device, size: int):
        found, error = ffi.new("struct fmha_buffer **"), new_error()
        check(lib.fmha_buffer_new(device.handle, size, found, error), error)
        self.size = size
        self.device = device
        self._handle = ffi.gc(found[0], lib.fmha_buffer_free)
        self._data = lib.fmha_buffer_data(self._handle)

    def memory(self):
        """A writable byte view; it keeps the buffer alive."""
        if self._data == ffi.NULL:
            raise _arrays.invalid("the CPU cannot see this device's memory: use arrays of its own library")
        address, extents = int(ffi.cast("uintptr_t", self._data)), self.device._extents
        extents.add(address, self.size, int(lib.fmha_buffer_id(self._handle)))
        holder, handle = self._data, self._handle

        def gone():
            extents.remove(address)
            ffi.release(handle)

        owned = ffi.gc(ffi.cast("char *", holder), lambda _: gone(), self.size)
        return ffi.buffer(owned, self.size)


class _Extents:
    """Where the live buffers of a device lie in this process."""

    def __init__(self):
        self._starts: list[int] = []
        self._found: dict[int, tuple[int, int]] = {}
        self._lock = threading.RLock()  # a collection may free a buffer in here

    def add(self, start, size, number):
        with self._lock:
            bisect.insort(self._starts, start)
            self._found[start] = (size, number)

    def remove(self, start):
        with self._lock:
            self._starts.remove(start)
            del self._found[start]

    def find(self, pointer, size):
        if not self._starts:
            return None
        with self._lock:
            i = bisect.bisect_right(self._starts, pointer) - 1
            if i < 0:
                return None
            start = self._starts[i]
            extent, number = self._found[start]
        return (number, pointer - start) if pointer + size <= start + extent else None
