# SPDX-License-Identifier: MIT
"""A client for fmhad in plain Python: the stock msgpack package and sockets, nothing of libfmha_client.

Written from proto/PROTOCOL.md; its section numbers are quoted below.

    client = Client.connect()                      # the usual places, or a path
    device = client.open_device(0)
    o = device.forward(q, k, v, mask="top_left", window_right=0)

bfloat16 and fp8 arrays travel as numpy uint16 and uint8 with dtype="bf16" and so on.
"""
import mmap
import os
import select
import socket
import struct
import time

import msgpack

MAX_FRAME = 65536
PROTOCOL_VERSION = 1

# Section 5: descriptors that come with a result.
FDS_OUT = {
    "registry_get": 1,
    "census": 1,
    "status": 1,
    "open_device": 1,
    "buffer_create": 1,
    "pool_open": 1,
    "explain": 1,
    "registry_export": 1,
    "code": 1,
    "trace": 1,
}
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "i32": 4, "u8": 1, "i64": 8, "i8": 1}
NUMPY_TYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "uint16",
    "e4m3": "uint8",
    "e5m2": "uint8",
    "i32": "int32",
    "u8": "uint8",
    "i64": "int64",
    "i8": "int8",
}


class WireError(Exception):
    """The daemon answered with an error (section 6)."""

    def __init__(self, error):
        super().__init__(f"{error.get('name', error['code'])}: {error.get('message', '')}")
        self.code = error["code"]
        self.name = error.get("name", "")
        self.field = error.get("field", "")
        self.message = error.get("message", "")


class Disconnected(Exception):
    """The other side hung up."""


def frame(message):
    """The bytes of one message in its frame (section 2)."""
    return msgpack.packb(msgpack.packb(message, use_bin_type=True), use_bin_type=True)


def socket_paths(path=None):
    """Where the daemon may listen, in the order of section 1."""
    if path:
        return [path]
    paths = []
    if os.environ.get("FMHAD_SOCKET"):
        paths.append(os.environ["FMHAD_SOCKET"])
    if os.environ.get("XDG_RUNTIME_DIR"):
        paths.append(os.path.join(os.environ["XDG_RUNTIME_DIR"], "fmhad.sock"))
    return paths + ["/run/fmhad/fmhad.sock"]


class Connection:
    """Frames and file descriptors over one socket, with a deadline on everything."""

    def __init__(self, sock, timeout=30.0):
        self.sock = sock
        self.timeout = timeout
        self.next_id = 1
        self.received = bytearray()
        self.fds = []  # arrived, not taken by an answer yet
        self.answers = {}  # id -> (error, result), read while looking for another one
        self.methods = {}  # id -> method of requests without answer

    def close(self):
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- bytes ----

    def send_bytes(self, data, fds=()):
        """Sends raw bytes, descriptors with the first of them."""
        self.sock.settimeout(self.timeout)
        try:
            sent = socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)
            while sent < len(data):
                sent += self.sock.send(data[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Disconnected(str(error)) from error

    def _receive_some(self, deadline):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer before the deadline")
        self.sock.settimeout(left)
        try:
            data, fds, flags, _ = socket.recv_fds(self.sock, MAX_FRAME, 16)
        except ConnectionResetError as error:
            raise Disconnected(str(error)) from error
        self.fds += fds
        if flags & socket.MSG_CTRUNC:
            raise Disconnected("descriptors were cut off")
        if not data:
            raise Disconnected("end of file")
        self.received += data

    def _payload_if_complete(self):
        data = self.received
        if not data:
            return None
        lengths = {0xC4: (2, ">B"), 0xC5: (3, ">H")}
        if data[0] not in lengths:
            raise Disconnected(f"byte {data[0]:#x} does not start a frame")
        header, form = lengths[data[0]]
        if len(data) < header:
            return None
        (length,) = struct.unpack(form, data[1:header])
        if len(data) < header + length:
            return None
        payload = bytes(data[header : header + length])
        del data[: header + length]
        return payload

    def receive(self, deadline=None):
        """The next message, whatever it is."""
        deadline = deadline or time.monotonic() + self.timeout
        while True:
            payload = self._payload_if_complete()
            if payload is not None:
                return msgpack.unpackb(payload, raw=False)
            self._receive_some(deadline)

    # ---- requests ----

    def submit(self, method, params=None, fds=()):
        """Sends a request and returns its id."""
        number = self.next_id
        self.next_id += 1
        self.methods[number] = method
        self.send_bytes(frame([0, number, method, params or {}]), fds)
        return number

    def is_answered(self, number):
        """Whether the answer has come, as far as can be seen without waiting for it."""
        while number not in self.answers:
            payload = self._payload_if_complete()
            if payload is not None:
                self._take(*msgpack.unpackb(payload, raw=False))
            elif select.select([self.sock], [], [], 0)[0]:
                self._receive_some(time.monotonic() + self.timeout)
            else:
                break
        return number in self.answers

    def wait(self, number, timeout=None):
        """The result of a request, and the descriptors that came with it."""
        deadline = time.monotonic() + (timeout or self.timeout)
        while number not in self.answers:
            self._take(*self.receive(deadline))
        error, result, fds = self.answers.pop(number)
        if error is not None:
            raise WireError(error)
        return result, fds

    def _take(self, kind, answered, error, result):
        if kind != 1:
            raise Disconnected(f"message of type {kind}, not an answer")
        # Descriptors belong to answers in the order of their frames.
        taken = 0 if error else FDS_OUT.get(self.methods.pop(answered, ""), 0)
        if len(self.fds) < taken:
            raise Disconnected("an answer without its descriptor")
        fds, self.fds = self.fds[:taken], self.fds[taken:]
        self.answers[answered] = (error, result, fds)

    def call_with_fds(self, method, params=None, fds=(), timeout=None):
        return self.wait(self.submit(method, params, fds), timeout)

    def call(self, method, params=None, fds=(), timeout=None):
        result, received = self.call_with_fds(method, params, fds, timeout)
        for fd in received:
            os.close(fd)
        return result

    def call_with_text(self, method, text, **params):
        """A call that hands a document over, in memory of its own."""
        fd = os.memfd_create("document")
        try:
            os.write(fd, text.encode())
            return self.call(method, params, [fd])
        finally:
            os.close(fd)

    def call_json(self, method, params=None):
        """The text of a json_result's document."""
        result, (fd,) = self.call_with_fds(method, params)
        try:
            return os.pread(fd, result["size"], 0).decode()
        finally:
            os.close(fd)

    def ping(self, timeout=None):
        return self.call("ping", timeout=timeout)


class Client(Connection):
    """A connection to the front."""

    @classmethod
    def connect(cls, path=None, name="fmha_wire.py", timeout=30.0):
        last = None
        for candidate in socket_paths(path):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(candidate)
            except OSError as error:
                sock.close()
                last = error
                continue
            client = cls(sock, timeout)
            try:
                client.server = client.call(
                    "hello", {"version": PROTOCOL_VERSION, "client": name}
                )
            except BaseException:
                client.close()
                raise
            return client
        raise last

    def devices(self):
        return self.call("devices")["devices"]

    def status(self):
        return self.call_json("status")

    def open_device(self, index=0):
        result, (fd,) = self.call_with_fds("open_device", {"device": index})
        return Device(socket.socket(fileno=fd), result, self.timeout)


class Buffer:
    """Memory that both sides map."""

    def __init__(self, device, number, fd, size):
        self.device = device
        self.id = number
        self.size = size
        self.fd = fd
        self.map = mmap.mmap(fd, size)

    def array(self, dtype, shape, offset=0):
        """A numpy view of the memory: writing to it writes to the buffer."""
        import numpy

        count = 1
        for extent in shape:
            count *= extent
        return numpy.frombuffer(
            self.map, dtype=NUMPY_TYPES[dtype], count=count, offset=offset
        ).reshape(shape)

    def release(self):
        """Ends the registration. The mapping stays as long as arrays use it."""
        self.device.call("buffer_release", {"buffer": self.id})
        os.close(self.fd)


class Device(Connection):
    """A direct connection to a device's worker."""

    def __init__(self, sock, opened, timeout):
        super().__init__(sock, timeout)
        self.info = opened["device"]
        self.worker_pid = opened["worker_pid"]

    def buffer_create(self, size):
        result, (fd,) = self.call_with_fds("buffer_create", {"size": size})
        return Buffer(self, result["buffer"], fd, result["size"])

    def buffer_import(self, fd, size):
        """Registers a memfd of ours. The caller keeps its descriptor."""
        result = self.call("buffer_import", {"kind": "memfd", "size": size}, [fd])
        return Buffer(self, result["buffer"], os.dup(fd), size)

    def plan(self, problem):
        return self.call("plan", {"problem": problem})

    def explain(self, problem):
        return self.call_json("explain", {"problem": problem})

    def run(self, plan, timeout=None, **params):
        return self.call("run", {"plan": plan, **params}, timeout=timeout)

    def forward(self, q, k, v, dtype=None, lse=False, **options):
        """O = softmax(scale Q K^T) V of numpy arrays [batch, seqlen, heads, hdim], in one go.

        options: fields of a problem (PROTOCOL.md section 7). Returns O, or (O, LSE) with lse=True.
        """
        import numpy

        dtype = dtype or {numpy.dtype("float32"): "f32", numpy.dtype("float16"): "f16"}[q.dtype]
        batch, seqlen_q, nhead_q, hdim_q = q.shape
        _, seqlen_k, nhead_k, hdim_v = v.shape
        layout = {"q": (dtype, q.shape), "k": (dtype, k.shape), "v": (dtype, v.shape)}
        layout["o"] = (dtype, (batch, seqlen_q, nhead_q, hdim_v))
        if lse:
            layout["lse"] = ("f32", (batch, nhead_q, seqlen_q))
        offsets, size = {}, 0
        for role, (kind, shape) in layout.items():
            offsets[role] = size
            count = 1
            for extent in shape:
                count *= extent
            size += -(-count * ELEMENT_BYTES[kind] // 256) * 256
        buffer = self.buffer_create(max(size, 256))
        views = {r: buffer.array(kind, shape, offsets[r]) for r, (kind, shape) in layout.items()}
        views["q"][...], views["k"][...], views["v"][...] = q, k, v
        planned = self.plan(
            {
                "batch": batch,
                "nhead_q": nhead_q,
                "nhead_k": nhead_k,
                "seqlen_q": seqlen_q,
                "seqlen_k": seqlen_k,
                "hdim_q": hdim_q,
                "hdim_v": hdim_v,
                **options,
                "tensors": {
                    role: {"buffer": buffer.id, "offset": offsets[role], "dtype": kind}
                    for role, (kind, _) in layout.items()
                },
            }
        )
        self.last_plan = planned
        self.last_run = self.run(planned["plan"])
        result = views["o"].copy()
        row_sums = views["lse"].copy() if lse else None
        self.call("plan_release", {"plan": planned["plan"]})
        buffer.release()
        return (result, row_sums) if lse else result
