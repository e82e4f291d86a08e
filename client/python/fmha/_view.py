# SPDX-License-Identifier: MIT
"""Memory of several GPUs of a host as one range of addresses: fmha_view_new(). Who has which part is passed over sockets."""
from __future__ import annotations

import array
import os
import shutil
import socket
import struct
import tempfile
import threading
from typing import NamedTuple

from ._lib import check, ffi, invalid, lib, new_error
from ._service import Buffer, _OfThisProcess

PEER_TIMEOUT_S = 60


class Part(NamedTuple):
    """An allocation; whoever has its descriptor can map it."""

    fd: int
    bytes: int


def part_of(buffer: Buffer) -> Part:
    """What a GPU's worker has allocated for @buffer, whose descriptor it stays."""
    memory, error = ffi.new("struct fmha_memory *"), new_error()
    check(lib.fmha_buffer_memory(buffer._handle, memory, error), error)
    return Part(memory.fd, memory.size)


class View(_OfThisProcess):
    """Parts one after the other, on the runtime's current device. It keeps the memory, whoever made it."""

    _what = "view"

    def __init__(self, parts):
        memory = ffi.new("struct fmha_memory[]", len(parts))
        for c, part in zip(memory, parts):
            c.struct_size = ffi.sizeof("struct fmha_memory")
            c.kind = lib.FMHA_MEMORY_VMM_FD
            c.fd, c.size = part
        found, error = ffi.new("struct fmha_view **"), new_error()
        check(lib.fmha_view_new(memory, len(parts), found, error), error)
        self._handle = ffi.gc(found[0], lib.fmha_view_free)
        self.pointer = int(ffi.cast("uintptr_t", lib.fmha_view_data(self._handle)))
        self.bytes = int(lib.fmha_view_size(self._handle))


def _uid_of(peer: socket.socket) -> int:
    return struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]


class _Door:
    """A socket in a folder that only this user may enter; gives a part to so many processes of this user."""

    def __init__(self, part: Part, peers: int):
        self._folder = tempfile.mkdtemp(prefix="fmha-")
        self.path = os.path.join(self._folder, "part")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(peers)
        self._socket.settimeout(PEER_TIMEOUT_S)
        self._thread = threading.Thread(target=self._serve, args=(part, peers), daemon=True)
        self._thread.start()

    def _serve(self, part: Part, peers: int) -> None:
        for _ in range(peers):
            try:
                peer, _address = self._socket.accept()
            except OSError:
                return  # closed, or a peer does not come: it says so itself
            with peer:
                if _uid_of(peer) == os.getuid():
                    peer.sendmsg([struct.pack("=Q", part.bytes)],
                                 [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [part.fd]))])

    def close(self) -> None:
        self._thread.join(PEER_TIMEOUT_S)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _fetch(path: str) -> Part:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(PEER_TIMEOUT_S)
        peer.connect(path)
        data, fds, _flags, _address = socket.recv_fds(peer, 8, 1)
    if len(data) != 8 or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise invalid("a peer gave no memory: it is another user's process")
    return Part(fds[0], struct.unpack("=Q", data)[0])


def exchange(part: Part, rank: int, size: int, gather) -> list[Part]:
    """Every rank's part in rising order, this one's among them. The others' descriptors are the caller's to close.

    Args:
        gather: a collective call: makes of an object the list of all ranks'.
    """
    door = _Door(part, size - 1)
    try:
        paths = gather(door.path)
        parts = [part if r == rank else _fetch(path) for r, path in enumerate(paths)]
        gather(None)  # nobody goes before all have theirs
    finally:
        door.close()
    return parts
