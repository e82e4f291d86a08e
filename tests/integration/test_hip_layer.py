# SPDX-License-Identifier: MIT
"""The GPU layer on HIP, without a GPU: fmhad-hip.so on a libamdhip64 that does what AMD's does, unkind things too
(tests/gpu/stub/hip_fake.h). This process is a client that has loaded it as well. What the two modules share is
tested with the tests of the other.
"""
import ctypes
import json
import mmap
import os
import re
import struct
import subprocess
import sys
import time

import fmha_wire
import fmhad
import numpy
import pytest
from test_gpu_layer import (  # noqa: F401
    SHAPE,
    TENSOR_BYTES,
    compiler,
    gpu,
    host_buffer,
    problem,
    reopen,
    run_once,
    test_a_build_that_fails_says_why_and_can_be_repeated,
    test_a_client_that_leaves_during_a_build_is_forgotten,
    test_code_that_does_not_load_is_an_error,
    test_everyone_waits_for_one_build,
    test_memory_beyond_the_device_is_refused,
)


WITH_64_KIB = "fwd-bf16-batch-h128-gpu_amd-t256x64x128x128x64x128-r8x1x1-w16x16x16-p1111-no-no-bpc1-gfx942"
DIED = (fmha_wire.WireError, fmha_wire.Disconnected)


def fake_folder():
    found = next(fmhad.build_dir().rglob("hip/libamdhip64.so"), None)
    if not found or not list(fmhad.build_dir().rglob("fmhad-hip.so")):
        pytest.skip("the build has no fmhad-hip.so")
    return found.parent


@pytest.fixture
def counts(tmp_path):
    """What each process that has loaded the fake has, by the process's number."""
    folder = tmp_path / "counts"
    folder.mkdir()

    def read(pid):
        data = (folder / str(pid)).read_bytes()
        records = (struct.unpack_from("24sq", data, i) for i in range(0, len(data), 32))
        return {name.rstrip(b"\0").decode(): value for name, value in records}

    read.folder = folder
    return read


@pytest.fixture
def make_gpu(make_daemon, compiler, counts, tmp_path):  # noqa: F811
    def make(limits=None, device=None, **environment):
        config = {
            "devices": [{"backend": "hip", "stall_ms": 600, **(device or {})}],
            "compile": {"helper": str(compiler.path), "cache": str(tmp_path / "cache")},
            "supervision": {"heartbeat_ms": 100, "heartbeat_timeout_ms": 1500, "restart_ms": 20},
            "limits": limits or {},
        }
        preset = {"LD_LIBRARY_PATH": str(fake_folder()), "HIP_FAKE_COUNTS": str(counts.folder)}
        return make_daemon(config, env={**os.environ, **preset, **environment})

    return make


class Hip:
    """The runtime as this process, a client, has it."""

    def __init__(self):
        self.library = ctypes.CDLL(str(fake_folder() / "libamdhip64.so"))

    def allocate(self, size):
        pointer = ctypes.c_void_p()
        assert self.library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
        return pointer

    def handle(self, pointer):
        handle = ctypes.create_string_buffer(64)
        assert self.library.hipIpcGetMemHandle(handle, pointer) == 0
        return handle.raw

    def free(self, pointer):
        assert self.library.hipFree(pointer) == 0


@pytest.fixture
def hip():
    return Hip()


class Memory:
    """Memory of this process on the fake's device, and its words."""

    def __init__(self, hip, size):
        self.hip, self.size, self.pointer = hip, size, hip.allocate(size)
        self.words = numpy.ctypeslib.as_array(ctypes.cast(self.pointer, ctypes.POINTER(ctypes.c_uint32)), (size // 4,))
        self.words[:] = 0

    def import_to(self, device, **options):
        parameters = {"kind": "ipc_handle", "size": self.size, "handle": self.hip.handle(self.pointer), **options}
        return device.call("buffer_import", parameters)["buffer"]

    def tensor(self, i):
        return self.words.view(numpy.float32)[i * TENSOR_BYTES // 4 : (i + 1) * TENSOR_BYTES // 4].reshape(SHAPE)


@pytest.fixture
def memory(hip):
    made = []

    def make(size=5 * TENSOR_BYTES):
        made.append(Memory(hip, size))
        return made[-1]

    yield make
    for each in made:
        hip.free(each.pointer)


def nothing_is_left(counts, worker):
    """Until what is given back on a thread of its own is. A worker has a piece of memory to spare."""
    def gone():
        now = counts(worker)
        left = now["imports"], now["allocations"], now["bytes"]
        return left in ((0, 0, 0), (0, 1, 2 << 20)) and now["modules"] <= 1

    assert fmhad.until(gone), counts(worker)
    assert counts(worker)["unpinned copies"] == 0


def test_the_device_is_what_its_properties_say(gpu):  # noqa: F811
    (device,) = gpu.status()["devices"]
    assert (device["backend"], device["arch"], device["name"]) == ("hip", "gfx942", "Fake Instinct")


def test_runs_read_and_write_what_the_client_sees(gpu, compiler, counts):  # noqa: F811
    with gpu.device() as device:
        worker = device.worker_pid
        assert run_once(device) and run_once(device)
    assert compiler.count() == 1
    nothing_is_left(counts, worker)


def test_imported_memory_is_the_clients_own(gpu, memory, counts):  # noqa: F811
    shared = memory()
    with gpu.device() as device:
        worker = device.worker_pid
        buffer = shared.import_to(device)
        shared.tensor(0)[...] = numpy.random.default_rng(1).standard_normal(SHAPE)
        device.run(device.plan(problem(buffer))["plan"])
        assert numpy.array_equal(shared.tensor(3), shared.tensor(0))
    nothing_is_left(counts, worker)


def test_bad_ipc_handles_are_refused(gpu, memory):  # noqa: F811
    good = memory()
    handle = bytearray(good.hip.handle(good.pointer))
    larger = handle[:32] + struct.pack("Q", 1 << 30) + handle[40:]
    own = handle[:48] + struct.pack("i", 0) + handle[52:]
    with gpu.device() as device:
        own[48:52] = struct.pack("i", device.worker_pid)  # the worker's own memory, as far as it can tell
        for bad in (b"", b"short", bytes(64), bytes(larger), bytes(own)):
            with pytest.raises(fmha_wire.WireError) as caught:
                device.call("buffer_import", {"kind": "ipc_handle", "size": 64, "handle": bad})
            assert (caught.value.name, caught.value.field) == ("EINVAL", "handle")
        with pytest.raises(fmha_wire.WireError) as caught:
            good.import_to(device, size=64, base_offset=good.size - 63)
        assert caught.value.field == "size"
        first, second = (good.import_to(device, size=64, base_offset=64) for _ in range(2))
        assert first != second


def test_a_handle_that_blocks_the_driver_blocks_nobody_else(gpu, memory):  # noqa: F811
    """The runtime asks the process that a handle names for ten seconds, whether or not it lives."""
    good = memory()
    handle = bytearray(good.hip.handle(good.pointer))
    handle[8:12] = struct.pack("I", 0x7FFFFFFF)
    with gpu.device() as device, gpu.device() as other:
        number = device.submit("buffer_import", {"kind": "ipc_handle", "size": 64, "handle": bytes(handle)})
        for _ in range(5):
            other.call("buffer_release", {"buffer": good.import_to(other)})
        assert not device.is_answered(number), "others do not wait for it"
        with pytest.raises(fmha_wire.WireError) as caught:
            device.wait(number)
        assert caught.value.name == "ETIMEDOUT"


CLIENT = '''
import ctypes, json, mmap, os, sys
sys.path.insert(0, os.environ["PACKAGE"])
hip = ctypes.CDLL("libamdhip64.so.6", mode=ctypes.RTLD_GLOBAL)
import fmha
from fmha import _view
from fmha._lib import check, ffi, lib, new_error
from fmha._service import Buffer
MIB = 1 << 20
device, error, told = fmha.Client().device(0), new_error(), {}
pointer = ctypes.c_void_p()
assert hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(3 * MIB)) == 0
memory, buffer = ffi.new("struct fmha_memory *"), ffi.new("struct fmha_buffer **")
check(lib.fmha_memory_from_gpu(ffi.cast("void *", pointer.value + MIB), MIB, memory, error), error)
told["kind"], told["fd"], told["offset"] = memory.kind, memory.fd >= 0, memory.base_offset
check(lib.fmha_buffer_import(device.handle, memory, buffer, error), error)
if memory.fd >= 0:
    os.close(memory.fd)
print(json.dumps(told), flush=True)
sys.stdin.readline()
lib.fmha_buffer_free(buffer[0])
told = {}
try:
    made = Buffer(device, 2 * MIB)
    part = _view.part_of(made)
    view = _view.View([part])
    ctypes.memmove(view.pointer + 5, b"seen", 4)
    with mmap.mmap(part.fd, part.bytes) as other:
        told["seen"] = other[5:9].decode()
    del made
    told["kept"] = ctypes.string_at(view.pointer + 5, 4).decode()
    del view
except fmha.FmhaError as caught:
    told["code"] = caught.code
print(json.dumps(told))
'''


@pytest.mark.parametrize("what, imports, then", [("", 2, {"seen": "seen", "kept": "seen"}), ("deaf", 1, {"code": "ENOTSUP"})])
def test_a_client_shares_by_what_the_device_takes(make_gpu, counts, tmp_path, what, imports, then):
    """The library names both; a descriptor is two imports of the fake's, a handle one. What the worker makes it maps."""
    package = fmhad.build_dir() / "client/python"
    if not (package / "fmha/_abi.py").exists():
        pytest.skip("the build has no Python package")
    daemon = make_gpu(HIP_FAKE_DMABUF=what)
    (worker,) = daemon.children()
    env = {**os.environ, "LD_LIBRARY_PATH": str(fake_folder()), "PACKAGE": str(package), "FMHAD_SOCKET": daemon.socket}
    client = subprocess.Popen([sys.executable, "-c", CLIENT], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    told = json.loads(client.stdout.readline())
    assert told == {"kind": 3, "fd": True, "offset": 1 << 20}
    assert counts(worker)["imports"] == imports
    said, _ = client.communicate("\n", timeout=60)
    assert client.returncode == 0 and json.loads(said) == then, said
    nothing_is_left(counts, worker)


def test_memory_given_again_at_the_same_address_is_the_new_one(gpu, hip):  # noqa: F811
    with gpu.device() as device:
        handles = set()
        for i in range(3):
            shared = Memory(hip, 4 * TENSOR_BYTES)
            shared.tensor(0)[...] = i + 1
            handles.add(hip.handle(shared.pointer))
            buffer = shared.import_to(device)
            device.run(device.plan(problem(buffer))["plan"])
            assert (shared.tensor(3) == i + 1).all()
            device.call("buffer_release", {"buffer": buffer})
            hip.free(shared.pointer)
        assert len(handles) == 1


def test_a_kernel_with_more_lds_than_nvidia_grants_unasked(gpu):  # noqa: F811
    """hipFuncSetAttribute() knows no function of a module: nothing has to be allowed on AMD."""
    with gpu.device() as device:
        buffer = host_buffer(device, 8 * TENSOR_BYTES)
        wide = problem(buffer.id, seqlen_q=256, seqlen_k=256, nhead_q=1, nhead_k=1, hdim_q=128, hdim_v=128)
        for tensor in wide["tensors"].values():
            tensor.update(dtype="bf16", offset=2 * tensor["offset"])
        asked = {"problem": wide, "kernels": [{"kernel": WITH_64_KIB}]}
        (stage,) = json.loads(device.call_json("explain", asked))["plan"]["stages"]
        assert stage["lds_bytes"] > 48 << 10, stage
        device.run(device.call("plan", asked)["plan"])


def test_memory_goes_out_and_comes_in_as_a_dma_buf(gpu, counts):  # noqa: F811
    with gpu.device() as device:
        worker = device.worker_pid
        result, (fd,) = device.call_with_fds("buffer_create", {"size": 4 * TENSOR_BYTES})
        assert result["kind"] == "vmm_fd" and result["allocation_bytes"] == 2 << 20
        view = numpy.frombuffer(mmap.mmap(fd, 2 << 20), numpy.float32)
        assert not view.any(), "new memory is clear"
        parameters = {"kind": "vmm_fd", "size": 4 * TENSOR_BYTES, "base_offset": 4096}
        again = device.call("buffer_import", parameters, [fd])["buffer"]
        view[1024 : 1024 + TENSOR_BYTES // 4] = 7
        device.run(device.plan(problem(again))["plan"])
        first = 1024 + 3 * TENSOR_BYTES // 4
        assert (view[first : first + TENSOR_BYTES // 4] == 7).all()
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("buffer_import", {**parameters, "size": 2 << 20}, [fd])
        assert (caught.value.name, caught.value.field) == ("EINVAL", "fd")
        os.close(fd)
    assert fmhad.until(lambda: counts(worker)["imports"] == 0), counts(worker)


@pytest.mark.parametrize("variable, what, way, said", [
    ("DMABUF", "zeros", "descriptors", "another process does not read what its owner writes"),
    ("DMABUF", "aborts", "descriptors", "a process that tried it ended by signal 6"),
    ("IPC", "deaf", "handles", "its owner does not read what another process writes"),
])  # fmt: skip
def test_a_way_of_sharing_that_fails_is_refused(make_gpu, memory, variable, what, way, said):
    """Seen before a client relies on it, by processes that are not the worker; the other way goes on."""
    daemon = make_gpu(**{f"HIP_FAKE_{variable}": what})
    assert said in daemon.log()
    worker = fmhad.until(lambda: daemon.status()["devices"][0]["worker"])
    assert worker["sharing"] == {"by": ["IPC handles" if variable == "DMABUF" else "descriptors"], f"no_{way}": said}
    with daemon.device() as device:
        with pytest.raises(fmha_wire.WireError) as caught:
            if variable == "DMABUF":
                device.call("buffer_create", {"size": 4096})
            else:
                memory().import_to(device)
        assert caught.value.name == "ENOTSUP" and said in caught.value.message
        if variable == "DMABUF":
            memory().import_to(device)
        else:
            _, (fd,) = device.call_with_fds("buffer_create", {"size": 4096})
            os.close(fd)
    _, found = doctor_of(daemon)
    assert found["memory"]["verdict"] == ("note" if variable == "DMABUF" else "ok"), found["memory"]
    assert ("by IPC handle" if variable == "DMABUF" else "by descriptor") in found["shared memory"]["found"]


def test_fences_order_runs_of_two_clients(gpu, memory):  # noqa: F811
    shared, at = memory(), 4 * TENSOR_BYTES
    with gpu.device() as device, gpu.device() as other:
        mine, theirs = shared.import_to(device), shared.import_to(other)
        waits, signals = device.plan(problem(mine))["plan"], other.plan(problem(theirs))["plan"]
        shared.tensor(0)[...], shared.tensor(3)[...] = 5, 0
        device.run(waits, waits=[{"buffer": mine, "offset": at, "value": 6}], timeout_ms=5000)
        time.sleep(0.1)
        assert (shared.tensor(3) == 0).all(), "it waits"
        other.run(signals, waits=[], signals=[{"buffer": theirs, "offset": at, "value": 6}])
        device.run(waits)  # behind the one that waited
        assert (shared.tensor(3) == 5).all() and shared.words[at // 4] == 6


def test_a_fence_that_nobody_signals_has_a_deadline(gpu, memory):  # noqa: F811
    shared, at = memory(), 4 * TENSOR_BYTES
    with gpu.device() as device:
        buffer = shared.import_to(device)
        plan, pid = device.plan(problem(buffer))["plan"], device.worker_pid
        device.run(plan, signals=[{"buffer": buffer, "offset": at, "value": 5}])
        device.run(plan, waits=[{"buffer": buffer, "offset": at, "value": 6}], timeout_ms=300)

        def told():
            try:
                device.run(plan)
            except fmha_wire.WireError as error:
                return error.name, error.field

        assert fmhad.until(told) == ("ETIMEDOUT", "waits")
        device.run(plan)
        assert gpu.children() == [pid], "no worker had to die for it"


def test_who_waits_for_a_fence_holds_up_nobodys_memory(gpu, memory):  # noqa: F811
    """hipFree() and its like wait for every stream, a fence of somebody else's too; and streams share queues."""
    shared, at = memory(), 4 * TENSOR_BYTES
    waiting = [gpu.device() for _ in range(12)]
    for device in waiting:
        buffer = shared.import_to(device)
        plan = device.plan(problem(buffer))["plan"]
        device.run(plan, waits=[{"buffer": buffer, "offset": at, "value": 1}], timeout_ms=20000)
    pids, began = gpu.children(), time.monotonic()
    with gpu.device() as other:
        for _ in range(3):
            assert run_once(other)
        assert time.monotonic() - began < 15, "before any fence is given up"
    shared.words[at // 4] = 1
    for device in waiting:
        device.close()
    assert gpu.children() == pids


def ordered(daemon, shared):
    """Whether a run with a counter waits for it, and another client's run writes it."""
    at = 4 * TENSOR_BYTES
    with daemon.device() as device, daemon.device() as other:
        mine, theirs = shared.import_to(device), shared.import_to(other)
        waits, signals = device.plan(problem(mine))["plan"], other.plan(problem(theirs))["plan"]
        shared.tensor(0)[...], shared.tensor(3)[...] = 5, 0
        device.run(waits, waits=[{"buffer": mine, "offset": at, "value": 6}], timeout_ms=20000)
        time.sleep(0.1)
        early = (shared.tensor(3) != 0).any()
        other.run(signals, waits=[], signals=[{"buffer": theirs, "offset": at, "value": 6}])
        device.run(waits)  # behind the one that waited
        return not early and (shared.tensor(3) == 5).all() and shared.words[at // 4] == 6


BROKEN = [{"HIP_FAKE_LAX": "1"}, {"HIP_FAKE_FAIL": "hipStreamWaitValue32:1+:801"}, {"HIP_FAKE_DEAF": "1"}]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: "-".join(broken))
def test_a_kernel_waits_where_the_runtime_cannot(make_gpu, memory, compiler, broken):  # noqa: F811
    """Compiled and tried before the device is announced; what is waited for, and how, is the same for clients."""
    daemon = make_gpu(**broken)
    assert "a kernel waits for counters: " in daemon.log() and "runs with counters are refused" not in daemon.log()
    assert ordered(daemon, memory())
    assert "words.hip" in compiler.runs.read_text()
    _, found = doctor_of(daemon)
    assert found["fences"]["verdict"] == "ok", found["fences"]


def test_a_fence_that_a_kernel_waits_for_has_a_deadline(make_gpu, memory):
    daemon, shared, at = make_gpu(HIP_FAKE_LAX="1"), memory(), 4 * TENSOR_BYTES
    with daemon.device() as device:
        buffer = shared.import_to(device)
        plan = device.plan(problem(buffer))["plan"]
        device.run(plan, waits=[{"buffer": buffer, "offset": at, "value": 6}], timeout_ms=300)

        def told():
            try:
                device.run(plan)
            except fmha_wire.WireError as error:
                return error.name, error.field

        assert fmhad.until(told) == ("ETIMEDOUT", "waits")
        device.run(plan)


@pytest.mark.parametrize("why", ["does not compile", "does not wait"])
def test_without_a_kernel_that_waits_there_are_no_fences(make_gpu, memory, compiler, why):  # noqa: F811
    """Counters are refused, and said to be, rather than read too early."""
    if why == "does not compile":
        compiler.does("echo no such target >&2; exit 1")
    daemon, shared = make_gpu(HIP_FAKE_LAX="1" if why == "does not compile" else "2"), memory()
    assert "runs with counters are refused: a stream does not wait for a word" in daemon.log()
    assert ("no such target" if why == "does not compile" else "a kernel does not do better") in daemon.log()
    compiler.does("printf 'stub code' >\"$5\"")
    with daemon.device() as device:
        buffer = shared.import_to(device)
        plan = device.plan(problem(buffer))["plan"]
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(plan, waits=[{"buffer": buffer, "offset": 4 * TENSOR_BYTES, "value": 1}])
        assert (caught.value.name, caught.value.field) == ("ENOTSUP", "waits") and "does not wait" in caught.value.message
        device.run(plan)
    _, found = doctor_of(daemon)
    assert (found["fences"]["verdict"], found["fences"]["found"]) == ("note", "refused"), found["fences"]


def test_events_are_not_imported(gpu):  # noqa: F811
    """An imported event is done for HIP's query as soon as it is recorded."""
    with gpu.device() as device, pytest.raises(fmha_wire.WireError) as caught:
        device.call("event_import", {"handle": b"good".ljust(64, b"\0")})
    assert caught.value.name == "ENOTSUP"


def test_first_uses_are_no_hang(make_gpu):
    """Each first use takes 400 ms, memory when it is touched 300: heartbeats are missed after 1.5 s, a kernel is
    stuck after 0.6."""
    daemon = make_gpu(HIP_FAKE_FIRST_MS="400", HIP_FAKE_TOUCH_MS="300")
    with daemon.device() as device:
        pid = device.worker_pid
        for _ in range(3):
            assert run_once(device)
    assert daemon.children() == [pid]


@pytest.mark.parametrize("fault", ["2:abort", "2:late"])
def test_a_fault_costs_what_was_in_flight(make_gpu, fault):
    """ROCr ends the process; other faults are told of by whatever is called next."""
    daemon = make_gpu(HIP_FAKE_FAULT=fault)
    worker = daemon.children()
    with daemon.device() as device:
        assert run_once(device)
        with pytest.raises(DIED) as caught:
            run_once(device)
        if isinstance(caught.value, fmha_wire.WireError):
            assert caught.value.name == "EDEVICE"
    assert fmhad.until(lambda: daemon.children() not in ([], worker))
    with reopen(daemon) as device:
        assert run_once(device)


def test_a_kernel_that_never_ends_is_given_up(make_gpu, tmp_path):
    flag = tmp_path / "hang"
    daemon = make_gpu(HIP_FAKE_HANG=str(flag))
    with daemon.device() as device:
        assert run_once(device)
        buffer = host_buffer(device, 4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer.id))["plan"]
        flag.touch()
        with pytest.raises(DIED):
            device.run(plan)
    flag.unlink()
    with reopen(daemon) as device:
        assert run_once(device)


@pytest.mark.parametrize("call", ["hipModuleLaunchKernel:2", "hipMalloc:4", "hipEventQuery:2", "hipHostRegister:3"])
def test_a_call_that_does_not_come_back(make_gpu, call):
    """On the loop it costs the worker; on other threads its own caller. Opening the device makes one or two of some calls,
    and an idle worker has a piece of memory to spare."""
    daemon = make_gpu(HIP_FAKE_BLOCK=call)
    with daemon.device() as device, pytest.raises(DIED):
        for _ in range(5):
            run_once(device)
    with reopen(daemon) as device:
        device.ping()


@pytest.mark.parametrize("version, good", [("19.1.7", False), ("22.1.8", True)])
def test_gfx12_is_refused_to_a_clang_that_makes_wrong_code_for_it(make_daemon, tmp_path, version, good):
    """Before a plan waits for anything, with what to install; doctor and build say the same."""
    clang = tmp_path / "clang"
    clang.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "clang version {version}" && exit 0\nexit 1\n')
    clang.chmod(0o755)
    config = {"devices": [{"backend": "hip"}], "compile": {"clang": str(clang), "cache": str(tmp_path / "cache")}}
    daemon = make_daemon(config, env={**os.environ, "LD_LIBRARY_PATH": str(fake_folder()), "HIP_FAKE_ARCH": "gfx1201"})
    with daemon.device() as device:
        buffer = host_buffer(device, 4 * TENSOR_BYTES)
        with pytest.raises(fmha_wire.WireError) as caught:
            device.plan(problem(buffer.id))
        told = caught.value.message
    assert caught.value.name == ("ENOKERNEL" if good else "ENOTSUP"), told  # the script compiles nothing
    command = [fmhad.find_program("fmhactl")]
    doctor = subprocess.run([*command, "doctor", "--json", "--socket", daemon.socket], capture_output=True, text=True, check=False)
    found = [item for item in json.loads(doctor.stdout) if item["check"] == "device 0"]
    build = subprocess.run([*command, "build", "--arch", "gfx1201", "--kernel", "fmha_prepare_gfx1201", "--clang", str(clang),
                            "--cache", str(tmp_path / "cache")], capture_output=True, text=True, check=False)  # fmt: skip
    assert build.returncode == 1
    for text in (told, build.stderr, *(item["found"] for item in found if item["verdict"] == "WRONG")):
        assert good != (f"clang {version} may leave out s_wait_alu" in text and "ziglang" in text), text
    assert [item["verdict"] for item in found] == ["ok", "ok" if good else "WRONG"], found
    assert doctor.returncode == (0 if good else 1)


def test_a_machine_without_the_runtime_says_so(make_daemon, tmp_path):
    config = {"devices": [{"backend": "cpu"}, {"backend": "hip"}], "supervision": {"restart_ms": 10}}
    for name in ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"):
        (tmp_path / name).write_bytes(b"")  # found first, and none
    daemon = make_daemon(config, env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    if os.path.exists("/opt/rocm/lib/libamdhip64.so"):
        pytest.skip("this machine has ROCm")
    said = fmhad.until(lambda: daemon.status()["devices"][1]["last_death"])
    assert "opening the hip driver: hipErrorNoDevice" in said and "libamdhip64.so.7, .6 or .5" in said
    with daemon.device(0) as device:
        device.ping()


CALLS = ("hipInit", "hipGetDeviceCount", "hipSetDevice", "hipGetDeviceProperties", "hipStreamCreateWithFlags",
         "hipStreamCreateWithPriority", "hipMalloc", "hipHostRegister", "hipMemsetD8Async", "hipMemcpyHtoDAsync",
         "hipMemcpyDtoHAsync", "hipStreamSynchronize", "hipEventCreateWithFlags", "hipEventRecord", "hipEventQuery",
         "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel")


@pytest.mark.parametrize("code", [2, 719])
@pytest.mark.parametrize("call", CALLS)
def test_any_call_may_fail_for_good(make_gpu, call, code):
    """Out of memory, and what a fault leaves behind. test_hip_device has every single call."""
    daemon = make_gpu(HIP_FAKE_FAIL=f"{call}:1+:{code}")
    with pytest.raises(DIED):
        for _ in range(4):
            with daemon.device() as device:
                run_once(device)
    assert daemon.process.poll() is None
    with daemon.client() as client:
        client.ping()


def test_out_of_memory_is_an_error_and_no_end(make_gpu):
    daemon = make_gpu(HIP_FAKE_FAIL="hipModuleLaunchKernel:2:2,hipMalloc:4:2,hipMemcpyHtoDAsync:4:2")
    refused = 0
    with daemon.device() as device:
        pid = device.worker_pid
        for _ in range(6):
            try:
                assert run_once(device)
            except fmha_wire.WireError as error:
                assert error.name == "ENOMEM", error
                refused += 1
    # An allocation is tried again when some memory is on its way back.
    assert 2 <= refused <= 3 and daemon.children() == [pid]


@pytest.mark.parametrize("local", [[], ["--local"]])
def test_verify_brings_its_memory_where_the_runtime_shares_none(make_gpu, local):
    """The fake's kernels compute nothing that is right: that is found, here and in the worker."""
    daemon = make_gpu()
    command = [fmhad.find_program("fmhactl"), "verify", "--socket", daemon.socket, "--features", "f32", "--cases", "5", *local]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": str(fake_folder())})
    assert done.returncode == 1 and "seed 1: 0 ok, 0 not supported, 5 failed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("WRONG (element") >= 5


def doctor_of(daemon):
    """What doctor finds of device 0, by check."""
    command = [fmhad.find_program("fmhactl"), "doctor", "--json", "--device", "0", "--seconds", "0.2", "--socket", daemon.socket]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "LD_LIBRARY_PATH": str(fake_folder())})  # fmt: skip
    return done.returncode, {item["check"]: item for item in json.loads(done.stdout)}


def test_doctor_finds_what_a_device_does_wrong(make_gpu):
    """The fake's kernels copy Q to O: that is found, by name. Its memory is shared, and its fences order."""
    code, found = doctor_of(make_gpu())
    assert code == 1
    for name in ("forward bf16", "tails", "backward f16", "pages"):
        assert found[name]["verdict"] == "WRONG" and re.search(r"element \d+ is .* expected .*gfx942", found[name]["found"]), found[name]
        assert "do not use" in found[name]["advice"]
    assert "by descriptor" in found["shared memory"]["found"] and "shared by descriptors" in found["memory"]["found"]
    assert found["fences"]["verdict"] == found["races"]["verdict"] == "ok", found
