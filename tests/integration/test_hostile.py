# SPDX-License-Identifier: MIT
"""What a hostile or broken client gets (DESIGN section 8, RELIABILITY 4.A to 4.C), against a real fmhad.

After every test two bystanders, one on the front and one on the worker, still get their answers, no
process has changed its pid, and the number of open descriptors is back at the baseline.
"""
import array
import contextlib
import fcntl
import itertools
import mmap
import os
import pathlib
import random
import re
import resource
import select
import socket
import struct
import threading
import time

import msgpack
import pytest

import fmha_wire
from fmhad import Daemon, find_program, loop_seconds, until

SEED = int(os.environ.get("FMHA_SEED", "20250101"))
HELLO_MS = 400
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_FRAME, MAX_FRAME_BEFORE_HELLO = 65536, 4096


def memory_grew(daemon, before):
    """KiB that the greediest process took since daemon.rss_kib() said @before.

    A sanitizer keeps what is freed for a while; then there is nothing to learn, and the answer is 0.
    """
    if b"__asan_init" in find_program("fmhad").read_bytes():
        return 0
    return max(a - b for a, b in zip(daemon.rss_kib(), before))


@pytest.fixture(scope="module")
def daemon():
    config = {
        "limits": {
            "hello_ms": HELLO_MS,
            "output_soft_bytes": 65536,
            "output_soft_ms": 300,
            "output_hard_bytes": 1 << 20,
            "memory_bytes_per_uid": 1 << 30,
        }
    }
    with Daemon(config) as running:
        yield running
        assert running.stop() == 0, "it does not end well after all this"


class Bystanders:
    """Clients that did nothing wrong; they ask all the time and remember the answer for which a loop worked longest."""

    def __init__(self, daemon):
        self.front = daemon.client(name="bystander", timeout=60)
        self.worker = self.front.open_device(0)
        self.pids = (daemon.pid, self.worker.worker_pid)
        self.slowest = 0.0

    def ping(self):
        for connection, pid in zip((self.front, self.worker), self.pids):
            before = loop_seconds(pid)
            connection.ping()
            self.slowest = max(self.slowest, loop_seconds(pid) - before)

    def close(self):
        self.worker.close()
        self.front.close()


@pytest.fixture(scope="module")
def bystanders(daemon):
    both = Bystanders(daemon)
    yield both
    both.close()


@pytest.fixture(autouse=True)
def nobody_else_suffers(daemon, bystanders):
    bystanders.ping()
    bystanders.slowest = 0.0
    pids = [daemon.pid, *daemon.children()]
    until(lambda: daemon.fd_counts() == baseline.setdefault(daemon.pid, daemon.fd_counts()), 2)
    before = daemon.fd_counts()
    yield
    bystanders.ping()
    assert [daemon.pid, *daemon.children()] == pids, daemon.log()
    assert daemon.has_no_more_than(before), (daemon.fd_counts(), before)
    # CPU time, with sanitizers too: far below what a person notices.
    assert bystanders.slowest < 1.0


baseline = {}


# ---- raw connections ----


def frame(payload):
    return msgpack.packb(payload, use_bin_type=True)


def greeting(**params):
    return fmha_wire.frame([0, 1, "hello", {"version": 1, "client": "hostile", **params}])


@contextlib.contextmanager
def connection(daemon, where):
    """A bare socket: 'fresh' (before hello), 'front' (after it), or 'worker'."""
    if where == "worker":
        with daemon.device() as device:
            yield device.sock
        return
    sock = daemon.raw()
    try:
        if where == "front":
            sock.sendall(greeting())
            assert sock.recv(4096)
        yield sock
    finally:
        sock.close()


def send(sock, data):
    """Sends as much as the other side takes before it closes."""
    try:
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass


def drained(sock, timeout=30.0):
    """All bytes until the other side closes. Fails when it does not."""
    data = b""
    deadline = time.monotonic() + timeout
    while True:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            return data
        except TimeoutError:
            pytest.fail("the connection is still open")
        if not part:
            return data
        data += part


def answer(sock, timeout=30.0):
    """The next message on a bare socket."""
    return fmha_wire.Connection(sock, timeout).receive()


EVERYWHERE = pytest.mark.parametrize("where", ["fresh", "front", "worker"])


# ---- frames (RELIABILITY 4.A) ----


def nested(depth):
    """[0, 1, "ping", {"x": [[...nil...]]}] whose innermost container is at this depth."""
    return b"\x94\x00\x01\xa4ping\x81\xa1x" + b"\x91" * (depth - 2) + b"\xc0"


def many(nodes):
    """A ping whose params hold an array, of so many nodes altogether."""
    count = nodes - 7
    return b"\x94\x00\x01\xa4ping\x81\xa1x\xdc" + struct.pack(">H", count) + b"\xc0" * count


def long_string(n):
    return b"\x94\x00\x01\xa4ping\x81\xa1x\xda" + struct.pack(">H", n) + b"y" * n


VIOLATIONS = {
    "not a frame": b"GET / HTTP/1.1\r\n\r\n",
    "a message without frame": msgpack.packb([0, 1, "ping", {}]),
    "empty payload": b"\xc4\x00",
    "length not shortest": b"\xc5\x00\x08" + msgpack.packb([0, 1, "ping", {}]),
    "bin 32": b"\xc6\x00\x00\x00\x08" + msgpack.packb([0, 1, "ping", {}]),
    "2^31 bytes": b"\xc6\x80\x00\x00\x00",
    "2^32 - 1 bytes": b"\xc6\xff\xff\xff\xff",
    "array of 2^29": frame(b"\xdd\x20\x00\x00\x00"),
    "array of 2^32 - 1": frame(b"\xdd\xff\xff\xff\xff"),
    "32 arrays of 2^29": frame(b"\xdd\x20\x00\x00\x00" * 32),
    "map of 2^31": frame(b"\xdf\x80\x00\x00\x00\xc0\xc0"),
    "string of 2^32 - 1": frame(b"\xdb\xff\xff\xff\xff"),
    "too deep": frame(nested(17)),
    "far too deep": frame(b"\x91" * 3000 + b"\xc0"),
    "ext": frame(b"\x94\x00\x01\xa4ping\x81\xa1x\xd4\x01\x00"),
    "byte c1": frame(b"\xc1"),
    "bytes behind the message": frame(msgpack.packb([0, 1, "ping", {}]) + b"\xc0"),
    "cut off message": frame(msgpack.packb([0, 1, "ping", {}])[:-1]),
    "not an array": frame(b"\x80"),
    "type 3": frame(msgpack.packb([3, 1, "ping", {}])),
    "three elements": frame(msgpack.packb([0, 1, "ping"])),
    "five elements": frame(msgpack.packb([0, 1, "ping", {}, 1])),
    "negative id": frame(msgpack.packb([0, -1, "ping", {}])),
    "id of 2^32": frame(msgpack.packb([0, 1 << 32, "ping", {}])),
    "float id": frame(msgpack.packb([0, 1.0, "ping", {}])),
    "method is a number": frame(msgpack.packb([0, 1, 7, {}])),
    "params are an array": frame(msgpack.packb([0, 1, "ping", []])),
    "an answer nobody asked for": frame(msgpack.packb([1, 1, None, {}])),
}


@EVERYWHERE
@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_closes_this_connection_only(daemon, bystanders, where, name):
    with connection(daemon, where) as sock:
        send(sock, VIOLATIONS[name])
        assert drained(sock) == b""
    bystanders.ping()


@pytest.mark.parametrize(
    "payload,accepted",
    [
        (nested(15), True),
        (nested(16), True),
        (nested(17), False),
        (many(4095), True),
        (many(4096), True),
        (many(4097), False),
        (long_string(4095), True),
        (long_string(4096), True),
        (long_string(4097), False),
        (long_string(0), True),
        (long_string(1), True),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value),
)
def test_limits_of_a_message_from_both_sides(daemon, payload, accepted):
    """What is inside the limits is answered, with the unknown field's name."""
    with connection(daemon, "worker") as sock:
        send(sock, frame(payload))
        if accepted:
            kind, number, error, result = answer(sock)
            assert (kind, number, error["name"], error["field"]) == (1, 1, "EINVAL", "x")
            assert result is None
            send(sock, fmha_wire.frame([0, 2, "ping", {}]))
            assert answer(sock) == [1, 2, None, {}]
        else:
            assert drained(sock) == b""


def padded(total):
    """A ping in a frame of exactly so many bytes."""
    payload = total - (2 if total <= 257 else 3)
    start = b"\x94\x00\x01\xa4ping\x81\xa1x\xdc"
    left = payload - len(start) - 2
    strings = []
    while left:
        size = min(left, 4000)
        size -= 1 if 0 < left - size < 3 else 0
        strings.append(b"\xda" + struct.pack(">H", size - 3) + b"y" * (size - 3) if size >= 3 else b"\xc0")
        left -= len(strings[-1])
    data = frame(start + struct.pack(">H", len(strings)) + b"".join(strings))
    assert len(data) == total
    return data


@pytest.mark.parametrize(
    "where,limit",
    [("fresh", MAX_FRAME_BEFORE_HELLO), ("front", MAX_FRAME), ("worker", MAX_FRAME)],
)
def test_frame_size_from_both_sides(daemon, where, limit):
    for total in (limit - 1, limit):
        with connection(daemon, where) as sock:
            send(sock, padded(total))
            _, _, error, _ = answer(sock)
            assert error["name"] in ("EINVAL", "EPERM")
    with connection(daemon, where) as sock:
        send(sock, padded(limit + 1))
        assert drained(sock) == b""
    with connection(daemon, where) as sock:  # the header alone is enough
        send(sock, padded(limit + 1)[:3])
        assert drained(sock) == b""


def golden_requests():
    page = (pathlib.Path(__file__).resolve().parents[2] / "proto/PROTOCOL.md").read_text()
    for method, dump in re.findall(r"```golden request (\w+)\n((?:[0-9a-f]{4}  .*\n)+)```", page):
        where = "fresh" if method == "hello" else "front" if method == "open_device" else "worker"
        yield where, b"".join(bytes.fromhex(line[6:54]) for line in dump.splitlines())


@pytest.mark.parametrize("where,data", golden_requests(), ids=lambda v: v if isinstance(v, str) else "")
def test_golden_cut_off_at_every_byte(daemon, bystanders, where, data):
    for n in range(0, len(data), 1 if len(data) < 64 else 5):
        with connection(daemon, where) as sock:
            send(sock, data[:n])
            if n % 2:
                sock.shutdown(socket.SHUT_WR)
        bystanders.ping()


@pytest.mark.parametrize("where,data", golden_requests(), ids=lambda v: v if isinstance(v, str) else "")
def test_golden_with_flipped_bits(daemon, bystanders, where, data):
    bits = list(range(len(data) * 8))
    random.Random(SEED).shuffle(bits)
    for bit in bits[:200]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with connection(daemon, where) as sock:
            send(sock, bytes(flipped))
            # An answer, the end, or a wait for more bytes: each is right for some bit.
            select.select([sock], [], [], 0.002)
        bystanders.ping()


def random_payload(rng):
    """Bytes with some resemblance to messages."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 200))
    if kind == 1:
        return bytes(rng.choice(b"\x80\x81\x90\x91\x94\xa1x\xc0\xdc\xdd\xde\xdf\x00") for _ in range(50))
    methods = ["ping", "plan", "run", "buffer_create", "buffer_release", "cancel", "nonsense", ""]
    values = [None, True, -1, 0, 1.5, 2**64 - 1, "x", b"x", [], {}, [1, 2], {"a": {"b": []}}]
    keys = ["problem", "plan", "size", "buffer", "rebinds", "request", "tensors", "x"]
    params = {rng.choice(keys): rng.choice(values) for _ in range(rng.randrange(4))}
    if kind == 2:
        params = {"problem": {rng.choice(["batch", "q", "tensors", "scale"]): rng.choice(values)}}
    return msgpack.packb([rng.choice([0, 0, 0, 1, 2]), rng.randrange(100), rng.choice(methods), params])


@EVERYWHERE
def test_random_frames(daemon, bystanders, where):
    rng = random.Random(f"{SEED} {where}")
    for _ in range(150):
        with connection(daemon, where) as sock:
            for _ in range(rng.randrange(1, 5)):
                send(sock, frame(random_payload(rng)))
            if rng.randrange(2):
                send(sock, rng.randbytes(20))
        bystanders.ping()


def test_one_hostile_frame_costs_little_memory_and_time(daemon, bystanders):
    """A frame costs at most 2 MiB of memory; bystanders do not notice a thousand of the worst ones."""
    worst = padded(MAX_FRAME)[:-1] + b"y"
    widest = frame(many(4096))
    with connection(daemon, "worker") as sock:
        for data in (worst, widest):  # what is allocated once is no cost of a frame
            send(sock, data)
            answer(sock)
        before = daemon.rss_kib()
        times = []
        for data in [worst, widest] * 250:
            start = time.monotonic()
            send(sock, data)
            answer(sock)
            times.append(time.monotonic() - start)
            bystanders.ping()
    assert memory_grew(daemon, before) <= 2048
    assert sorted(times)[len(times) // 2] < 0.005


# ---- time ----


@EVERYWHERE
def test_byte_at_a_time_sender_is_served(daemon, bystanders, where):
    with connection(daemon, where) as sock:
        data = greeting() if where == "fresh" else fmha_wire.frame([0, 1, "ping", {}])
        for i in range(len(data)):
            sock.send(data[i : i + 1])
            if i % 8 == 0:
                bystanders.ping()
        kind, number, error, _ = answer(sock)
        assert (kind, number, error) == (1, 1, None)


@pytest.mark.parametrize("drip", [b"", greeting()[:-1]], ids=["silent", "dripping"])
def test_never_hello_is_dropped_at_the_deadline(daemon, drip):
    with connection(daemon, "fresh") as sock:
        start = time.monotonic()
        for i in range(len(drip)):
            if time.monotonic() - start > HELLO_MS / 1000 - 0.1:
                break
            send(sock, drip[i : i + 1])
            time.sleep(0.02)
        assert drained(sock) == b""
        assert HELLO_MS / 1000 - 0.05 <= time.monotonic() - start


def test_many_that_never_say_hello(daemon, bystanders):
    socks = [daemon.raw() for _ in range(50)]
    for sock in socks:
        bystanders.ping()
        assert drained(sock) == b""
        sock.close()


@pytest.mark.parametrize("where", ["front", "worker"])
def test_half_closed_connections_leave_nothing(daemon, where):
    for data in (b"", fmha_wire.frame([0, 1, "ping", {}]), b"\xc4"):
        with connection(daemon, where) as sock:
            send(sock, data)
            sock.shutdown(socket.SHUT_WR)
            drained(sock)


@pytest.mark.parametrize("where,method", [("front", "devices"), ("worker", "ping")])
def test_slow_reader_is_dropped_or_held_back(daemon, bystanders, where, method):
    """It sends as fast as it can and never reads. Memory stays bounded, it loses, nobody waits."""
    before = daemon.rss_kib()
    with connection(daemon, where) as sock:
        sock.setblocking(False)
        request = fmha_wire.frame([0, 1, method, {}]) * 500
        sent, start = 0, time.monotonic()
        while time.monotonic() - start < 3:
            try:
                sent += sock.send(request)
            except BlockingIOError:
                time.sleep(0.01)
            except (BrokenPipeError, ConnectionResetError):
                break
            bystanders.ping()
        growth = memory_grew(daemon, before)
        assert growth <= 4096 + 512, f"{growth} KiB more after {sent} bytes of requests"
        sock.setblocking(True)
        drained(sock)


def test_slow_reader_is_dropped_after_the_soft_limits_time(daemon, bystanders):
    """It asks for more than the socket holds, then neither reads nor sends. Others are not affected."""
    with connection(daemon, "front") as sock:
        send(sock, fmha_wire.frame([0, 1, "devices", {}]) * 2500)
        start = time.monotonic()
        closed = select.poll()
        closed.register(sock, select.POLLRDHUP)
        while not closed.poll(10) and time.monotonic() - start < 30:
            bystanders.ping()
        assert 0.2 < time.monotonic() - start < 30
        assert drained(sock)  # what the socket held


def test_pipelined_requests_are_all_answered(daemon):
    """More than max_in_flight, all of them at once: the daemon just stops reading for a while."""
    with daemon.device() as device:
        numbers = [device.submit("ping") for _ in range(2000)]
        for number in reversed(numbers):
            assert device.wait(number) == ({}, [])


# ---- descriptors (RELIABILITY 4.B) ----


def memfd(size, seals=SEALS):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@contextlib.contextmanager
def closing(*fds):
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def send_fds(sock, data, fds):
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    try:
        return sock.sendmsg([data], control)
    except (BrokenPipeError, ConnectionResetError):
        return 0


@EVERYWHERE
@pytest.mark.parametrize("n", [1, 4, 5, 64, 253])
def test_undeclared_fds_close_the_connection(daemon, where, n):
    with closing(os.open("/dev/null", os.O_RDWR)) as (fd,), connection(daemon, where) as sock:
        message = greeting() if where == "fresh" else fmha_wire.frame([0, 1, "ping", {}])
        send_fds(sock, message, [fd] * n)
        drained(sock)


def test_undeclared_fds_with_half_a_frame(daemon):
    """They wait for the rest of the frame, which turns out not to take them."""
    data = fmha_wire.frame([0, 1, "ping", {}])
    with closing(os.open("/dev/null", os.O_RDWR)) as (fd,), connection(daemon, "worker") as sock:
        for byte in data[:3]:
            send_fds(sock, bytes([byte]), [fd])
        send(sock, data[3:])
        drained(sock)


def test_fds_pile_up_only_to_the_limit(daemon):
    """A frame that never ends, with descriptors on each of its bytes."""
    with closing(os.open("/dev/null", os.O_RDWR)) as (fd,), connection(daemon, "worker") as sock:
        send(sock, b"\xc5\xff\x00")
        for _ in range(200):
            if not send_fds(sock, b"x", [fd] * 4):
                break
            assert daemon.fd_counts()[1] < 200
        drained(sock)


def test_a_declared_fd_that_is_missing(daemon):
    message = fmha_wire.frame([0, 1, "buffer_import", {"kind": "memfd", "size": 4096}])
    with connection(daemon, "worker") as sock:
        send(sock, message)
        assert drained(sock) == b""


def test_two_fds_for_one_import(daemon):
    message = fmha_wire.frame([0, 1, "buffer_import", {"kind": "memfd", "size": 4096}])
    with closing(memfd(4096), memfd(4096)) as fds, connection(daemon, "worker") as sock:
        send_fds(sock, message, fds)
        drained(sock)


def test_pipelined_imports_take_their_own_fds(daemon):
    with daemon.device() as device, closing(memfd(4096), memfd(8192)) as fds:
        numbers = [
            device.submit("buffer_import", {"kind": "memfd", "size": size}, [fd])
            for fd, size in zip(fds, (4096, 8192))
        ]
        assert [device.wait(n)[0]["size"] for n in numbers] == [4096, 8192]


def directory_fd():
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY)


def regular_file():
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, 4096)
    return fd


def pipe_fd():
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def socket_fd():
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach()


def epoll_fd():
    with select.epoll() as epoll:
        return os.dup(epoll.fileno())


def read_only_memfd():
    fd = memfd(4096)
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return other


def huge_page_memfd():
    try:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        os.ftruncate(fd, 2 << 20)
    except OSError:
        pytest.skip("no huge pages here")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


WRONG_FDS = {
    "pipe": pipe_fd,
    "directory": directory_fd,
    "socket": socket_fd,
    "O_PATH": lambda: os.open("/dev/null", os.O_PATH),
    "/dev/null": lambda: os.open("/dev/null", os.O_RDWR),
    "epoll": epoll_fd,
    "eventfd": lambda: os.eventfd(0),
    "regular file": regular_file,
    "proc file": lambda: os.open("/proc/self/mem", os.O_RDWR),
    "smaller memfd": lambda: memfd(4095),
    "memfd without size": lambda: memfd(0),
    "read-only memfd": read_only_memfd,
    "memfd sealed against writing": lambda: memfd(4096, SEALS | 0x10),
    "huge pages": huge_page_memfd,
}


@pytest.mark.parametrize("kind", WRONG_FDS)
def test_wrong_kinds_of_fds_are_refused_by_name(daemon, kind):
    with daemon.device() as device, closing(WRONG_FDS[kind]()) as (fd,):
        with pytest.raises(fmha_wire.WireError) as caught:
            device.buffer_import(fd, 4096)
        assert caught.value.name == "EINVAL", caught.value
        assert caught.value.message
        device.ping()


def test_unsealed_memfd_is_refused_or_sealed(daemon):
    with daemon.device() as device, closing(memfd(4096, 0)) as (fd,):
        try:
            device.buffer_import(fd, 4096)
        except fmha_wire.WireError as error:
            assert error.name == "EINVAL"
        else:
            with pytest.raises(OSError):
                os.ftruncate(fd, 0)


def test_the_daemons_own_sockets_are_no_memory(daemon):
    """The worker's socket, sent to the worker itself."""
    with daemon.device() as device:
        with pytest.raises(fmha_wire.WireError) as caught:
            device.buffer_import(device.sock.fileno(), 4096)
        assert caught.value.name == "EINVAL"
        device.ping()


def test_sparse_memory_is_charged_in_full(daemon):
    """64 GiB that cost the sender nothing: refused, and nothing is allocated."""
    before = daemon.rss_kib()
    with daemon.device() as device, closing(memfd(64 << 30)) as (fd,):
        with pytest.raises(fmha_wire.WireError) as caught:
            device.buffer_import(fd, 64 << 30)
        assert caught.value.name == "EQUOTA"
        for size in (1 << 31, 1 << 46, 1 << 63, 2**64 - 1):
            with pytest.raises(fmha_wire.WireError) as caught:
                device.call("buffer_create", {"size": size})
            assert caught.value.name in ("EQUOTA", "EINVAL")
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("buffer_create", {"size": 0})
        assert caught.value.name == "EINVAL"
    assert memory_grew(daemon, before) < 4096


def test_the_memory_quota_counts_and_forgets(daemon):
    with daemon.device() as device:
        for _ in range(3):
            buffers = []
            with pytest.raises(fmha_wire.WireError) as caught:
                for _ in range(20):
                    buffers.append(device.call("buffer_create", {"size": 100 << 20})["buffer"])
            assert caught.value.name == "EQUOTA"
            assert len(buffers) == 10
            for buffer in buffers:
                device.call("buffer_release", {"buffer": buffer})


def test_holes_punched_under_a_plan(daemon):
    """Seals do not forbid them: the data turns to zero, nobody gets a signal."""
    numpy = pytest.importorskip("numpy")
    size = 1 << 20
    with daemon.device() as device, closing(memfd(size)) as (fd,):
        buffer = device.buffer_import(fd, size)
        views = {role: {"buffer": buffer.id, "offset": i << 18, "dtype": "f32"} for i, role in enumerate("qkvo")}
        sizes = {"batch": 1, "nhead_q": 4, "nhead_k": 4, "seqlen_q": 128, "seqlen_k": 128}
        plan = device.plan({**sizes, "hdim_q": 64, "hdim_v": 64, "tensors": views})["plan"]
        buffer.array("f32", (size // 4,))[:] = 1.0
        stop = threading.Event()

        def punch():
            libc = __import__("ctypes").CDLL(None, use_errno=True)
            while not stop.is_set():
                libc.fallocate64(fd, 3, __import__("ctypes").c_int64(0), __import__("ctypes").c_int64(3 << 18))

        thread = threading.Thread(target=punch)
        thread.start()
        for _ in range(30):
            device.run(plan)
        stop.set()
        thread.join()
        device.run(plan)
        assert numpy.isfinite(buffer.array("f32", (1 << 16,), 3 << 18)).all()
        buffer.map = None


def test_fd_torture(daemon, bystanders):
    """Messages with 0 to 253 descriptors in random places, on connections that come and go."""
    rng = random.Random(SEED)
    messages = [
        fmha_wire.frame([0, 1, "ping", {}]),
        fmha_wire.frame([0, 2, "buffer_import", {"kind": "memfd", "size": 4096}]),
        fmha_wire.frame([0, 3, "registry_import", {}]),
        b"\xc4\x20",
    ]
    with closing(memfd(4096), directory_fd(), os.open("/dev/null", os.O_RDWR)) as fds:
        for i in range(150):
            with connection(daemon, "worker") as sock:
                for _ in range(4):
                    data = rng.choice(messages)
                    cut = rng.randrange(len(data) + 1)
                    n = rng.choice([0, 1, 1, 1, 4, 5, 253])
                    if n and data[:cut]:
                        send_fds(sock, data[:cut], rng.choices(fds, k=n))
                    else:
                        send(sock, data[:cut])
                    send(sock, data[cut:])
            if i % 10 == 0:
                bystanders.ping()


# ---- ids ----


def small_problem(buffer, **changes):
    views = {role: {"buffer": buffer, "offset": i * 4096, "dtype": "f32"} for i, role in enumerate("qkvo")}
    sizes = {"batch": 1, "nhead_q": 2, "nhead_k": 2, "seqlen_q": 4, "seqlen_k": 4}
    return {**sizes, "hdim_q": 32, "hdim_v": 32, "tensors": views, **changes}


def refused(connection, method, params, name, field=None):
    with pytest.raises(fmha_wire.WireError) as caught:
        connection.call(method, params)
    assert caught.value.name == name, caught.value
    assert caught.value.message
    if field is not None:
        assert caught.value.field == field, caught.value
    return caught.value


def test_stale_ids(daemon):
    with daemon.device() as device:
        buffer = device.call("buffer_create", {"size": 16384})["buffer"]
        plan = device.plan(small_problem(buffer))["plan"]
        device.run(plan)
        device.call("plan_release", {"plan": plan})
        refused(device, "run", {"plan": plan}, "ENOENT", "plan")
        refused(device, "plan_release", {"plan": plan}, "ENOENT", "plan")
        device.call("buffer_release", {"buffer": buffer})
        refused(device, "buffer_release", {"buffer": buffer}, "ENOENT", "buffer")
        refused(device, "plan", {"problem": small_problem(buffer)}, "ENOENT", "tensor.q.buffer")
        # A new one is not mistaken for the old one.
        assert device.call("buffer_create", {"size": 16384})["buffer"] != buffer
        refused(device, "buffer_release", {"buffer": buffer}, "ENOENT", "buffer")


def test_a_buffer_released_under_its_plan(daemon):
    with daemon.device() as device:
        buffer = device.call("buffer_create", {"size": 16384})["buffer"]
        plan = device.plan(small_problem(buffer))["plan"]
        device.call("buffer_release", {"buffer": buffer})
        refused(device, "run", {"plan": plan}, "ENOENT")
        device.ping()


def test_foreign_ids(daemon):
    """A second client learns the ids of the first one, and has no use for them."""
    with daemon.device() as owner, daemon.device() as thief:
        buffer = owner.call("buffer_create", {"size": 16384})["buffer"]
        plan = owner.plan(small_problem(buffer))["plan"]
        # The same numbers may exist on both connections: then they name the thief's own things.
        own = thief.call("buffer_create", {"size": 16384})["buffer"]
        own_plan = thief.plan(small_problem(own))["plan"]
        if buffer != own:
            refused(thief, "buffer_release", {"buffer": buffer}, "ENOENT", "buffer")
            refused(thief, "plan", {"problem": small_problem(buffer)}, "ENOENT", "tensor.q.buffer")
            rebinds = [{"role": "k", "buffer": buffer}]
            refused(thief, "run", {"plan": own_plan, "rebinds": rebinds}, "ENOENT")
        if plan != own_plan:
            refused(thief, "run", {"plan": plan}, "ENOENT", "plan")
        owner.run(plan)


def test_guessed_ids(daemon):
    rng = random.Random(SEED)
    with daemon.device() as owner, daemon.device() as thief:
        buffers = [owner.call("buffer_create", {"size": 4096})["buffer"] for _ in range(20)]
        guesses = [*range(1, 1000), *buffers, *(rng.getrandbits(64) for _ in range(2000)), 0, 2**64 - 1]
        numbers = [thief.submit("buffer_release", {"buffer": guess}) for guess in guesses]
        for number in numbers:
            with pytest.raises(fmha_wire.WireError) as caught:
                thief.wait(number)
            assert caught.value.name == "ENOENT"


def test_cancelling_what_is_not_there(daemon):
    with daemon.device() as device:
        for request in (0, 1, 2**32 - 1):
            try:
                device.call("cancel", {"request": request})
            except fmha_wire.WireError as error:
                assert error.name == "ENOENT"


# ---- requests that are wrong, not hostile: an answer, and the connection goes on ----

K = {"buffer": 1, "dtype": "f32"}
BAD_REQUESTS = [
    ("ping", {"x": 1}, "EINVAL", "x"),
    ("nonsense", {}, "EINVAL", "method"),
    ("", {}, "EINVAL", "method"),
    ("worker_drain", {}, "EPERM", "method"),
    ("worker_status", {}, "EPERM", "method"),
    ("devices", {}, "EINVAL", "method"),
    ("hello", {"version": 1}, "EINVAL", "method"),
    ("buffer_create", {}, "EINVAL", "size"),
    ("buffer_create", {"size": -1}, "EINVAL", "size"),
    ("buffer_create", {"size": 1.0}, "EINVAL", "size"),
    ("buffer_create", {"size": "4096"}, "EINVAL", "size"),
    ("buffer_create", {"size": True}, "EINVAL", "size"),
    ("buffer_create", {"size": None}, "EINVAL", "size"),
    ("run", {"plan": 1, "rebinds": [{"role": "q"}]}, "EINVAL", "rebinds[0].buffer"),
    ("run", {"plan": 1, "rebinds": [{"role": "z", "buffer": 1}]}, "EINVAL", "rebinds[0].role"),
    ("run", {"plan": 1, "rebinds": [{"role": "q", "buffer": 1}] * 17}, "EINVAL", "rebinds"),
    ("plan", {"problem": 1}, "EINVAL", None),
    ("plan", {"problem": {"scale": float("nan")}}, "EINVAL", "scale"),
    ("plan", {"problem": {"scale": 1e39}}, "EINVAL", "scale"),
    ("plan", {"problem": {"batch": 2**31}}, "EINVAL", "batch"),
    ("plan", {"problem": {"op": "sideways"}}, "EINVAL", "op"),
    ("plan", {"problem": {"tensors": {"k": {**K, "dtype": "f64"}}}}, "EINVAL", "tensor.k.dtype"),
    ("plan", {"problem": {"tensors": {"k": {**K, "stride": [1, 1, 1]}}}}, "EINVAL", "tensor.k.stride"),
    ("plan", {"problem": {"tensors": {"k": {**K, "stride": [1, 1, 1.0, 1]}}}}, "EINVAL", "tensor.k.stride[2]"),
    ("plan", {"problem": {"tensors": {"k": {**K, "stride": [1, 1, 2**63, 1]}}}}, "EINVAL", "tensor.k.stride[2]"),
    ("plan", {"problem": {"tensors": {"z": K}}}, "EINVAL", "tensor.z"),
    ("inject", {"fault": "abort"}, None, None),
]


@pytest.mark.parametrize("method,params,name,field", BAD_REQUESTS, ids=itertools.count())
def test_bad_request_is_answered(daemon, method, params, name, field):
    with daemon.device() as device:
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call(method, params)
        assert name is None or caught.value.name == name
        assert field is None or caught.value.field == field
        assert caught.value.message
        device.ping()


def test_control_methods_are_not_for_clients(daemon):
    """Not even with the socket that worker_attach takes."""
    params = {"session": 1, "uid": 0, "gid": 0, "pid": 1, "client": "x"}
    for where in ("front", "worker"):
        with connection(daemon, where) as sock:
            ours, theirs = socket.socketpair()
            send_fds(sock, fmha_wire.frame([0, 1, "worker_attach", params]), [theirs.fileno()])
            theirs.close()
            data = drained(ours)
            assert data == b""
            ours.close()


def changed(field, value):
    return lambda problem: problem.update({field: value})


def view(role, **changes):
    return lambda problem: problem["tensors"][role].update(changes)


BAD_PROBLEMS = {
    "hdim 0": (changed("hdim_q", 0), "hdim_q"),
    "hdim 520": (changed("hdim_v", 520), "hdim_v"),
    "heads": (changed("nhead_q", 3), "nhead_q"),
    "no heads": (changed("nhead_k", 0), "nhead_k"),
    "negative length": (changed("seqlen_k", -1), "seqlen_k"),
    "huge batch": (changed("batch", 2**31 - 1), "batch"),
    "many rows": (changed("seqlen_q", 2**31 - 1), None),
    "many keys": (changed("seqlen_k", 2**31 - 1), None),
    "behind the end": (view("k", offset=16384 - 4), "tensor.k.offset"),
    "far behind the end": (view("k", offset=2**63), None),
    "offset overflows": (view("k", offset=2**64 - 4), "tensor.k.offset"),
    "misaligned": (view("k", offset=2), "tensor.k.offset"),
    "stride overflows": (view("k", stride=[2**62, 2**62, 2**62, 1]), "tensor.k"),
    "stride leaves the buffer": (view("o", stride=[1 << 20, 1 << 10, 32, 1]), "tensor.o.offset"),
    "negative stride": (view("k", stride=[1, -64, 32, 1]), "tensor.k.stride[1]"),
    "output broadcast": (view("o", stride=[0, 0, 32, 1]), "tensor.o.stride"),
    "output aliases": (view("o", offset=4096), "tensor.o"),
    "mixed types": (view("k", dtype="bf16"), None),
    "integer data": (view("k", dtype="i32"), "tensor.k.dtype"),
    "no keys at all": (lambda problem: problem["tensors"].pop("k"), "tensor.k"),
    "superfluous": (lambda problem: problem["tensors"].update(dq=K), "tensor.dq"),
}


@pytest.mark.parametrize("name", BAD_PROBLEMS)
def test_bad_problem_is_answered_with_its_field(daemon, name):
    change, field = BAD_PROBLEMS[name]
    with daemon.device() as device:
        buffer = device.call("buffer_create", {"size": 16384})["buffer"]
        problem = small_problem(buffer)
        change(problem)
        refused(device, "plan", {"problem": problem}, "EINVAL", field)
        device.run(device.plan(small_problem(buffer))["plan"])


def test_rebinding_is_judged_again(daemon):
    with daemon.device() as device:
        buffer = device.call("buffer_create", {"size": 16384})["buffer"]
        small = device.call("buffer_create", {"size": 512})["buffer"]
        plan = device.plan(small_problem(buffer))["plan"]
        for rebind in (
            {"role": "k", "buffer": small},
            {"role": "k", "buffer": buffer, "offset": 16384},
            {"role": "k", "buffer": buffer, "offset": 2**64 - 4096},
            {"role": "k", "buffer": buffer, "offset": 1},
            {"role": "o", "buffer": buffer, "offset": 4096},
            {"role": "lse", "buffer": buffer},
        ):
            with pytest.raises(fmha_wire.WireError) as caught:
                device.run(plan, rebinds=[rebind])
            assert caught.value.name in ("EINVAL", "ENOENT"), rebind
        device.run(plan)


def test_hello_twice_wrong_versions_and_none(daemon):
    with daemon.client() as client:
        assert refused(client, "hello", {"version": 1}, "EINVAL")
        client.ping()
    with connection(daemon, "fresh") as sock:
        send(sock, fmha_wire.frame([0, 1, "hello", {"version": 0}]))
        assert answer(sock)[2]["name"] == "EVERSION"
        send(sock, fmha_wire.frame([0, 2, "devices", {}]))
        assert answer(sock)[2]["name"] == "EPERM"
        send(sock, greeting(client="x" * 64))
        assert answer(sock)[2]["field"] == "client"
        send(sock, greeting(client="a\nb"))
        assert answer(sock)[2]["field"] == "client"
        send(sock, greeting())
        assert answer(sock)[2] is None


# ---- floods, with small limits ----


def test_connect_storm(bystanders):
    """Of 300 connections a user keeps 16; the rest is refused at once; early ones do not notice."""
    with Daemon({"limits": {"connections_per_uid": 16, "hello_ms": 10000}}) as small:
        with small.client() as early:
            before = small.settled_fds()
            start = time.monotonic()
            socks = []
            for _ in range(300):
                try:
                    socks.append(small.raw())
                except (ConnectionRefusedError, BlockingIOError):
                    pass
            alive = []
            for sock in socks:
                send(sock, greeting())
            early.ping()
            for sock in socks:
                sock.settimeout(5)
                try:
                    if sock.recv(4096):
                        alive.append(sock)
                except ConnectionResetError:
                    pass
            assert len(alive) == 15
            for sock in socks:
                sock.close()
            early.ping()
            assert small.has_no_more_than(before), (small.fd_counts(), before)
            for _ in range(50):  # and there is room again
                with small.client() as client:
                    client.ping()
            assert len(small.log().splitlines()) < 40


def test_session_and_table_limits():
    limits = {"sessions_per_uid": 4, "buffers_per_connection": 8, "plans_per_connection": 8}
    with Daemon({"limits": limits}) as small, small.client() as client:
        devices = [client.open_device() for _ in range(4)]
        assert refused(client, "open_device", {"device": 0}, "EQUOTA")
        device = devices[0]
        buffers = [device.call("buffer_create", {"size": 16384})["buffer"] for _ in range(8)]
        refused(device, "buffer_create", {"size": 4096}, "EQUOTA")
        for _ in range(8):
            device.plan(small_problem(buffers[0]))
        refused(device, "plan", {"problem": small_problem(buffers[0])}, "EQUOTA")
        for device in devices:
            device.close()
        assert until(lambda: not _is_refused(client))


def _is_refused(client):
    try:
        client.open_device().close()
    except fmha_wire.WireError:
        return True
    return False


def test_descriptors_run_out():
    """RLIMIT_NOFILE is nearly used up: who is there is served, newcomers wait or are refused."""
    with Daemon({"limits": {"reserved_fds": 16}}) as small, small.client() as early:
        in_use = small.fd_counts()[0]
        resource.prlimit(small.pid, resource.RLIMIT_NOFILE, (in_use + 20, in_use + 20))
        socks = []
        for _ in range(100):
            try:
                socks.append(small.raw())
            except (BlockingIOError, ConnectionRefusedError):
                break
        for _ in range(100):
            early.ping()
        ticks = _cpu_seconds(small.pid)
        time.sleep(0.5)
        assert _cpu_seconds(small.pid) - ticks < 0.25, "it spins"
        for sock in socks:
            sock.close()
        assert len(small.log().splitlines()) < 40
        early.ping()
        with small.client() as late:
            late.ping()


def _cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_log_stays_small(daemon):
    """Everything above was misbehaviour, thousands of times: a line or two a second, not more."""
    assert len(daemon.log().splitlines()) < 80
