# SPDX-License-Identifier: MIT
"""The GPU layer without a GPU: fmhad-cuda.so on a libcuda.so.1 that keeps everything in host memory.

The stub (tests/gpu/stub/cuda_stub.c) "runs" a kernel by copying q to o and fails on command; the
compile helper is a shell script. What is real is everything in between: the module, the worker's
uploads, deferred plans, the front's compile queue and cache, imports, supervision.
"""
import fcntl
import json
import mmap
import os
import re
import socket
import stat
import subprocess
import time

import fmha_wire
import fmhad
import numpy
import pytest

F_ADD_SEALS, SEALS = 1033, 1 | 2 | 4
FORWARD = {
    "batch": 1,
    "nhead_q": 2,
    "nhead_k": 2,
    "seqlen_q": 64,
    "seqlen_k": 64,
    "hdim_q": 64,
    "hdim_v": 64,
}
SHAPE = (1, 64, 2, 64)
TENSOR_BYTES = 64 * 2 * 64 * 4


def stub_folder():
    found = list(fmhad.build_dir().rglob("libcuda.so.1"))
    if not found:
        pytest.skip("the build has no libcuda stub")
    if not list(fmhad.build_dir().rglob("fmhad-cuda.so")):
        pytest.skip("the build has no fmhad-cuda.so")
    return found[0].parent


class Compiler:
    """A compile helper of a few lines, which counts its runs and does what `body` says."""

    def __init__(self, folder):
        self.path, self.runs = folder / "helper", folder / "runs"
        self.does("printf 'stub code' >\"$5\"")

    def does(self, body):
        new = self.path.with_suffix(".new")  # the daemon may be starting the old one
        new.write_text(
            "#!/bin/sh\n"
            '[ "$1" = --version ] && echo "nvrtc 0.0" && exit 0\n'
            f'echo "$*" >>{self.runs}\n{body}\n'
        )
        new.chmod(new.stat().st_mode | stat.S_IXUSR)
        new.replace(self.path)

    def count(self):
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0


@pytest.fixture
def compiler(tmp_path):
    return Compiler(tmp_path)


@pytest.fixture
def make_gpu(make_daemon, compiler, tmp_path):
    def make(limits=None, **environment):
        config = {
            "devices": [{"backend": "cuda", "stall_ms": 600}],
            "compile": {"helper": str(compiler.path), "cache": str(tmp_path / "cache")},
            "supervision": {"heartbeat_ms": 100, "heartbeat_timeout_ms": 1500, "restart_ms": 20},
            "limits": limits or {},
        }
        return make_daemon(
            config, env={**os.environ, "LD_LIBRARY_PATH": str(stub_folder()), **environment}
        )

    return make


@pytest.fixture
def gpu(make_gpu):
    return make_gpu()


def host_buffer(device, size):
    """A memfd of ours, imported: the worker keeps a copy of it on the device."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
    buffer = device.buffer_import(fd, size)
    os.close(fd)
    return buffer


def problem(buffer_id, **options):
    tensors = {
        role: {"buffer": buffer_id, "offset": i * TENSOR_BYTES, "dtype": "f32"}
        for i, role in enumerate("qkvo")
    }
    return {**FORWARD, **options, "tensors": tensors}


def run_once(device):
    """A forward run on host tensors; returns whether o became q."""
    buffer = host_buffer(device, 4 * TENSOR_BYTES)
    q = buffer.array("f32", SHAPE)
    o = buffer.array("f32", SHAPE, 3 * TENSOR_BYTES)
    q[...] = numpy.random.default_rng(1).standard_normal(SHAPE)
    planned = device.plan(problem(buffer.id))
    device.run(planned["plan"])
    good = numpy.array_equal(o, q)
    device.call("plan_release", {"plan": planned["plan"]})
    del q, o
    buffer.release()
    return good


def test_a_batch_by_rows_runs_in_the_worker(gpu):
    """Decodes beside a chunk over pages of fp8: lengths that a stage writes on the device are nothing that the host reads."""
    rows, keys, page = [1] * 40 + [300], 2048, 16
    batch, total, pages = len(rows), sum(rows), keys // page
    sizes = {"q": (total * 8 * 128, 2), "k": (pages * page * 2 * 128, 1), "v": (pages * page * 2 * 128, 1), "o": (total * 8 * 128, 2),
             "seqstart_q": (batch + 1, 4), "seqlen_k_per_batch": (batch, 4), "block_table": (batch * pages, 4)}
    kinds = {"q": "bf16", "o": "bf16", "k": "e4m3", "v": "e4m3"}
    tensors, at = {}, 0
    for role, (count, width) in sizes.items():
        tensors[role] = {"offset": at, "dtype": kinds.get(role, "i32")}
        at += -(-count * width // 256) * 256
    with gpu.device() as device:
        buffer = host_buffer(device, at)
        for tensor in tensors.values():
            tensor["buffer"] = buffer.id
        for role, values in (("seqstart_q", numpy.cumsum([0, *rows])), ("seqlen_k_per_batch", [keys] * batch),
                             ("block_table", numpy.tile(numpy.arange(pages), batch))):
            buffer.array("i32", (len(values),), tensors[role]["offset"])[...] = values
        asked = {"batch": batch, "nhead_q": 8, "nhead_k": 2, "seqlen_q": max(rows), "seqlen_k": keys, "hdim_q": 128, "hdim_v": 128,
                 "mode": "group", "total_q": total, "page_size": page, "n_pages": pages, "max_blocks": pages, "mask": "bottom_right",
                 "window_right": 0, "tensors": tensors}
        planned = device.plan(asked)
        assert [s["family"] for s in planned["stages"]][:3] == ["fwd_appendkv", "fwd_splitkv", "fwd_splitkv_combine"] and len(planned["stages"]) > 3
        for _ in range(2):  # a worker that ends is an error of the run
            device.run(planned["plan"])
        device.call("plan_release", {"plan": planned["plan"]})
        buffer.release()


def reopen(daemon):
    """The device of a worker that has just died: until the front has noticed, opening it fails."""

    def attempt():
        try:
            return daemon.device()
        except (fmha_wire.WireError, fmha_wire.Disconnected):
            return None

    return fmhad.until(attempt)


def test_the_roof_follows_from_what_the_driver_says(gpu):
    assert fmhad.until(lambda: gpu.status()["devices"][0]["worker"])
    roof = gpu.status()["devices"][0]["worker"]["roof"]
    assert roof["source"] == {"gbs": "device", "tflops": "device"}
    # Of the stub: 132 units at 1.98 GHz with Hopper's rates, 6144 bits of memory at 3.201 GHz, twice a clock.
    assert roof["tflops"] == pytest.approx({"f32": 66.908, "f16": 1070.53, "fp8": 2141.05}, rel=1e-4)
    assert roof["gbs"] == pytest.approx(4916.7, rel=1e-4)


def test_host_tensors_are_copied_around_a_run(gpu, compiler):
    with gpu.device() as device:
        assert device.info["backend"] == "cuda" and device.info["arch"] == "sm_90a"
        assert run_once(device) and run_once(device)
    assert compiler.count() == 1


def test_a_plan_that_is_run_again_sees_what_has_changed(gpu):
    rng = numpy.random.default_rng(2)
    with gpu.device() as device:
        host = host_buffer(device, 4 * TENSOR_BYTES)
        own, words = device_buffer(device, 4 * TENSOR_BYTES)
        view = words.view(numpy.float32)[: TENSOR_BYTES].reshape(4, *SHAPE)
        q = host.array("f32", SHAPE)
        o = host.array("f32", SHAPE, 3 * TENSOR_BYTES)
        plans = [device.plan(problem(b))["plan"] for b in (host.id, own)]
        for i in range(6):  # the launch that is kept for the next run goes from plan to plan
            q[...], view[0] = rng.standard_normal(SHAPE), rng.standard_normal(SHAPE)
            for plan in plans if i % 2 else plans[::-1]:
                device.run(plan)
                device.run(plan)
            assert numpy.array_equal(o, q) and numpy.array_equal(view[3], view[0])
            o[...], view[3] = 0, 0


def test_tables_are_uploaded_when_they_change(make_gpu):
    """What a run has uploaded serves all later ones of the session with the same words: the third upload fails."""
    daemon = make_gpu(CUDA_STUB_FAIL="cuMemcpyHtoDAsync", CUDA_STUB_AFTER="2")
    with daemon.device() as device:
        at = 4 * TENSOR_BYTES
        own, words = device_buffer(device, at + 4)
        asked = problem(own, seqlen_q=1)
        asked["tensors"]["seqlen_k_per_batch"] = {"buffer": own, "offset": at, "dtype": "i32"}
        words[at // 4] = 64
        plans = [device.plan(asked)["plan"] for _ in range(2)]
        for length in (64, 40):
            words[at // 4] = length
            for plan in plans + plans:
                device.run(plan)
            words[at // 4] = 65
            with pytest.raises(fmha_wire.WireError, match="65"):
                device.run(plans[0])
        words[at // 4] = 40
        device.run(plans[1])
        words[at // 4] = 64  # which lies there no more
        with pytest.raises((fmha_wire.WireError, fmha_wire.Disconnected)):
            device.run(plans[0])


def test_runs_in_flight_judge_their_own_words(gpu):
    """Integers are fetched while runs before are with the device; one of those may be what writes them."""
    with gpu.device() as device:
        at = 4 * TENSOR_BYTES
        own, words = device_buffer(device, at + 2 * TENSOR_BYTES)
        asked = problem(own, seqlen_q=1)
        asked["tensors"]["seqlen_k_per_batch"] = {"buffer": own, "offset": at, "dtype": "i32"}
        writes = problem(own)
        writes["tensors"]["o"] = {"buffer": own, "offset": at, "dtype": "f32"}  # q, whose words are lengths
        plans = [device.plan(asked)["plan"], device.plan(writes)["plan"]]
        for length in (64, 3, 65):
            words[0], words[at // 4] = length, 1
            numbers = [device.submit("run", {"plan": plans[i]}) for i in (0, 0, 0, 1, 0)]
            for number in numbers[:4]:
                device.wait(number, 5)
            if length == 65:
                with pytest.raises(fmha_wire.WireError, match="65"):
                    device.wait(numbers[4], 5)
            else:
                device.wait(numbers[4], 5)


def test_a_copy_engine_takes_what_is_aligned(gpu):
    """Tensor maps need 16 bytes: a plan's tensors that are not get another kernel, a rebind that is not is
    refused."""
    n = 1 << 25
    shape = {"batch": 32, "nhead_q": 2, "nhead_k": 2, "seqlen_q": 512, "seqlen_k": 512, "hdim_q": 128, "hdim_v": 128,
             "n_splits": 1}
    with gpu.device() as device:
        own, _ = device_buffer(device, 8 * n)

        def plan(offset, **stride):
            tensors = {r: {"buffer": own, "offset": i * n + offset, "dtype": "bf16", **stride} for i, r in enumerate("qkvo")}
            made = device.plan({**shape, "tensors": tensors})
            return made["plan"], made["stages"][0]["kernel"]

        fast, kernel = plan(0)
        assert "gpu_wgmma" in kernel
        for _ in range(2):
            device.run(fast)
        device.run(fast, rebinds=[{"role": "k", "buffer": own, "offset": 5 * n + 16}])
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(fast, rebinds=[{"role": "k", "buffer": own, "offset": 5 * n + 8}])
        assert (caught.value.name, caught.value.field) == ("EINVAL", "tensor.k.offset")
        assert "16 bytes" in str(caught.value)
        slow, kernel = plan(8)
        assert "gpu_mma" in kernel
        device.run(slow, rebinds=[{"role": "k", "buffer": own, "offset": 5 * n + 2}])
        odd = [2 * 512 * 130, 2 * 130, 130, 1]  # bytes of rows that are no multiple of 16
        assert "gpu_mma" in plan(0, stride=odd)[1]


def test_device_memory_goes_out_as_a_descriptor(gpu):
    with gpu.device() as device:
        result, (fd,) = device.call_with_fds("buffer_create", {"size": 4 * TENSOR_BYTES})
        assert result["kind"] == "vmm_fd" and result["allocation_bytes"] == 2 << 20
        # The stub's device memory is a memfd: what a client's GPU would see.
        view = numpy.frombuffer(mmap.mmap(fd, 2 << 20), numpy.float32)
        assert not view.any(), "new memory is clear"
        view[: TENSOR_BYTES // 4] = 7
        device.run(device.plan(problem(result["buffer"]))["plan"])
        first = 3 * TENSOR_BYTES // 4
        assert (view[first : first + TENSOR_BYTES // 4] == 7).all()
        # And back in, as memory of the client's.
        again = device.call(
            "buffer_import",
            {"kind": "vmm_fd", "size": TENSOR_BYTES, "base_offset": TENSOR_BYTES},
            [fd],
        )
        assert again["size"] == TENSOR_BYTES
        os.close(fd)


def test_memory_beyond_the_device_is_refused(gpu):
    with gpu.device() as device:
        for size in (0, 1 << 40, (1 << 64) - 1):
            with pytest.raises(fmha_wire.WireError):
                device.buffer_create(size)
        device.ping()


def test_everyone_waits_for_one_build(gpu, compiler):
    compiler.does("sleep 2; printf 'stub code' >\"$5\"")
    devices = [gpu.device() for _ in range(3)]
    buffers = [host_buffer(d, 4 * TENSOR_BYTES) for d in devices]
    numbers = [
        d.submit("plan", {"problem": problem(b.id)}) for d, b in zip(devices, buffers)
    ]
    with gpu.device() as other:
        other.ping()
    assert not any(device.is_answered(n) for device, n in zip(devices, numbers)), "a build keeps nobody else waiting"
    for device, number in zip(devices, numbers):
        assert device.wait(number)[0]["stages"]
    assert compiler.count() == 1
    for device in devices:
        device.close()


def test_the_cache_outlives_the_daemon(make_gpu, compiler):
    for _ in range(2):
        daemon = make_gpu()
        with daemon.device() as device:
            assert run_once(device)
        daemon.stop()
    assert compiler.count() == 1


FIRST, SECOND = "16x32", "16x16"  # tiles of f32, hdim 64, the cheapest first


def tile_of(planned):
    return re.search(r"-t(\d+x\d+)x", planned["stages"][0]["kernel"]).group(1)


def spilling(*tiles):
    """A compile helper's body: code for these tiles spills 152 bytes, and each compile takes a while."""
    cases = "|".join("*'_M={} -DFMHA_TILE_N={} '*".format(*tile.split("x")) for tile in tiles)
    code = "sleep 0.2; printf 'stub code' >\"$5\""
    return f'case "$*" in {cases}) echo spills 152;; esac; {code}'


def test_a_kernel_that_spills_gives_way_to_the_next(make_gpu, compiler):
    compiler.does(spilling(FIRST))
    daemon = make_gpu()
    devices = [daemon.device() for _ in range(2)]
    buffers = [host_buffer(d, 4 * TENSOR_BYTES) for d in devices]
    numbers = [d.submit("plan", {"problem": problem(b.id)}) for d, b in zip(devices, buffers)]
    assert [tile_of(d.wait(n)[0]) for d, n in zip(devices, numbers)] == [SECOND, SECOND]
    assert compiler.count() == 2, "each is compiled once, for all who wait"
    assert run_once(devices[0])
    (selection,) = json.loads(devices[1].explain(problem(buffers[1].id)))["selections"]
    (aside,) = [c for c in selection["candidates"] if c["verdict"] == "set aside"]
    assert f"-t{FIRST}x" in aside["name"] and aside["reason"] == "spills 152 bytes of registers"
    for device in devices:
        device.close()
    shape = "--dtype f32 --heads 2 --hdim 64 --seqlen 64"
    shown = subprocess.run(
        [fmhad.find_program("fmhactl"), "plan", "--socket", daemon.socket, *shape.split()],
        capture_output=True, text=True, timeout=60,
    )
    assert "spills 152 bytes of registers" in shown.stdout, shown.stdout + shown.stderr
    daemon.stop()
    # The cache knows it, too, for another daemon.
    with make_gpu().device() as device:
        assert tile_of(device.plan(problem(host_buffer(device, 4 * TENSOR_BYTES).id))) == SECOND
    assert compiler.count() == 2


def test_last_tiles_in_parts_are_measured_as_plans_have_them(gpu):
    """Without splits, but for the tiles of a last round: what tuning measures is that plan, not one of whole tiles."""
    wanted = {"batch": 1, "nhead_q": 16, "nhead_k": 4, "seqlen_q": 3456, "seqlen_k": 3456, "hdim_q": 128, "hdim_v": 128,
              "tensors": {role: {"buffer": 1 + i, "dtype": "bf16"} for i, role in enumerate("qkvo")}}
    with gpu.device() as device:
        plan = json.loads(device.explain(wanted))["plan"]
        assert "the last 36 in 3 parts" in plan["split_why"] and plan["n_splits"] == 0, plan
        said = device.call("tune", {"problem": wanted, "thorough": True}, timeout=60)
        assert said["n_measured"] == said["n_candidates"] > 0, said
        assert said["kernel"].startswith("fwd_splitkv-"), said


def test_where_every_kernel_spills_the_first_runs(gpu, compiler):
    compiler.does(spilling(FIRST, SECOND, "32x32", "64x32"))
    with gpu.device() as device:
        planned = device.plan(problem(host_buffer(device, 4 * TENSOR_BYTES).id))
        assert tile_of(planned) == FIRST
        n_tried = compiler.count()
        assert n_tried > 1
        assert run_once(device)
    assert compiler.count() == n_tried, "they are not tried again"


def test_what_spills_runs_where_the_better_one_cannot_be_built(gpu, compiler):
    body = spilling(FIRST)
    second = "*'_M={} -DFMHA_TILE_N={} '*".format(*SECOND.split("x"))
    compiler.does(f'case "$*" in {second}) echo "error: no" >&2; exit 1;; esac; {body}')
    with gpu.device() as device:
        buffer = host_buffer(device, 4 * TENSOR_BYTES)
        planned = device.plan(problem(buffer.id))
        assert tile_of(planned) == FIRST
        device.run(planned["plan"])
    assert compiler.count() == 2


def test_a_plan_that_is_being_built_cannot_run(gpu, compiler):
    """Its number can be guessed; what it will be is not settled before its answer."""
    with gpu.device() as device:
        buffer = host_buffer(device, 4 * TENSOR_BYTES)
        other = device.plan(problem(buffer.id))["plan"]
        compiler.does(spilling(FIRST, SECOND))
        number = device.submit("plan", {"problem": problem(buffer.id, hdim_q=32, hdim_v=32)})
        while True:  # its kernels are chosen in slices: until then there is no such plan
            with pytest.raises(fmha_wire.WireError) as caught:
                device.run(other + 1)
            if caught.value.name != "ENOENT":
                break
        assert (caught.value.name, caught.value.field) == ("ENOKERNEL", "plan")
        assert device.wait(number)[0]["plan"] == other + 1
        device.run(other + 1)


def test_a_build_that_fails_says_why_and_can_be_repeated(gpu, compiler):
    compiler.does("echo 'fmha.hip(3): error: no such tile' >&2; exit 1")
    with gpu.device() as device:
        with pytest.raises(fmha_wire.WireError) as caught:
            run_once(device)
        assert caught.value.name == "ENOKERNEL"
        assert "no such tile" in str(caught.value)
        compiler.does("printf 'stub code' >\"$5\"")
        assert run_once(device)


def test_code_that_does_not_load_is_an_error(gpu, compiler):
    compiler.does("printf garbage >\"$5\"")
    with gpu.device() as device:
        with pytest.raises(fmha_wire.WireError):
            run_once(device)
        device.ping()


def test_a_client_that_leaves_during_a_build_is_forgotten(gpu, compiler):
    compiler.does("sleep 0.4; printf 'stub code' >\"$5\"")
    device = gpu.device()
    buffer = host_buffer(device, 4 * TENSOR_BYTES)
    device.submit("plan", {"problem": problem(buffer.id)})
    assert fmhad.until(compiler.count)
    device.close()
    with gpu.device() as other:
        assert run_once(other)
    assert compiler.count() == 2, "the first one was ended"


def test_bad_ipc_handles_are_refused(gpu):
    with gpu.device() as device:
        for handle in (os.urandom(64), b"", b"short", bytes(64)):
            with pytest.raises(fmha_wire.WireError) as caught:
                device.call(
                    "buffer_import", {"kind": "ipc_handle", "size": 64, "handle": handle}
                )
            assert caught.value.field == "handle"
        # A good one, but an extent that the allocation does not have.
        good = b"good".ljust(64, b"\0")
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call(
                "buffer_import",
                {"kind": "ipc_handle", "size": 64, "base_offset": (2 << 20) - 63, "handle": good},
            )
        assert caught.value.field == "size"
        parameters = {"kind": "ipc_handle", "size": 64, "base_offset": 64, "handle": good}
        first, second = (device.call("buffer_import", parameters) for _ in range(2))
        assert first["buffer"] != second["buffer"]


def test_a_handle_that_blocks_the_driver_blocks_nobody_else(gpu):
    device, other = gpu.device(), gpu.device()
    number = device.submit(
        "buffer_import", {"kind": "ipc_handle", "size": 64, "handle": b"hang".ljust(64, b"\0")}
    )
    for _ in range(5):
        other.ping()
    assert not device.is_answered(number), "others do not wait for it"
    with pytest.raises(fmha_wire.WireError) as caught:
        device.wait(number)
    assert caught.value.name == "ETIMEDOUT"
    device.close()
    other.close()


def device_buffer(device, size):
    """A buffer in the stub's device memory, and this process's view of its words."""
    result, (fd,) = device.call_with_fds("buffer_create", {"size": size})
    words = numpy.frombuffer(mmap.mmap(fd, result["allocation_bytes"]), numpy.uint32)
    os.close(fd)
    return result["buffer"], words


def test_fences_order_runs_without_the_host(gpu):
    with gpu.device() as device:
        buffer, words = device_buffer(device, 5 * TENSOR_BYTES)
        at = 4 * TENSOR_BYTES
        plan = device.plan(problem(buffer))["plan"]
        words[at // 4] = 4294967290  # counters wrap
        device.run(
            plan,
            waits=[{"buffer": buffer, "offset": at, "value": 3}],
            signals=[{"buffer": buffer, "offset": at + 4, "value": 77}],
        )
        assert words[at // 4 + 1] != 77, "answered when queued"
        device.ping()
        words[at // 4] = 3
        device.run(plan)  # behind the first one on the same stream
        assert words[at // 4 + 1] == 77


def test_a_stuck_fence_has_a_deadline(gpu):
    with gpu.device() as device:
        buffer, words = device_buffer(device, 5 * TENSOR_BYTES)
        fence = {"buffer": buffer, "offset": 4 * TENSOR_BYTES, "value": 1}
        plan = device.plan(problem(buffer))["plan"]
        pid = device.worker_pid
        device.run(plan, waits=[fence], timeout_ms=300)
        assert fmhad.until(lambda: words[TENSOR_BYTES] == 1), "the wait was let go"
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(plan)
        assert caught.value.name == "ETIMEDOUT" and caught.value.field == "waits"
        device.run(plan)
        assert gpu.children() == [pid], "no worker had to die for it"


class Event:
    """An interprocess event of this process, as the stub knows them: two counters in a memfd."""

    def __init__(self):
        self.fd = os.memfd_create("event")
        os.ftruncate(self.fd, 4096)
        self.map = mmap.mmap(self.fd, 4096)
        self.words = numpy.frombuffer(self.map, numpy.uint32)
        self.handle = self.handle_in(os.getpid())

    def handle_in(self, pid):
        return b"event %d %d" % (pid, self.fd) + bytes(64 - len(b"event %d %d" % (pid, self.fd)))

    def record(self):
        """Recorded, behind work that has not ended."""
        self.words[0] += 1

    def reach(self):
        self.words[1] = self.words[0]

    @property
    def n_recorded(self):
        return int(self.words[0])

    @property
    def n_done(self):
        return int(self.words[1])


def import_event(device, event):
    return device.call("event_import", {"handle": event.handle})["event"]


def test_events_order_runs_without_the_host(gpu):
    before, after = Event(), Event()
    with gpu.device() as device:
        assert device.info["events"] and device.info["fences"]
        buffer, words = device_buffer(device, 5 * TENSOR_BYTES)
        at = 4 * TENSOR_BYTES
        plan = device.plan(problem(buffer))["plan"]
        numbers = [import_event(device, e) for e in (before, after)]
        assert numbers[0] != numbers[1]
        fences = {"waits": [{"event": numbers[0]}], "signals": [{"event": numbers[1]}]}
        device.run(plan, **fences)  # an event that was never recorded is reached
        assert fmhad.until(lambda: after.n_done == 1)
        for i in range(2, 5):  # the second event is recorded by the run, and reached behind it
            before.record()
            device.run(plan, **fences)  # answered when queued
            assert after.n_recorded == i and after.n_done == i - 1
            time.sleep(0.02)
            assert after.n_done == i - 1
            before.reach()
            assert fmhad.until(lambda i=i: after.n_done == i)
        # As it was recorded when the run was queued: later records mean nothing to that run.
        before.record()
        device.run(plan, **fences)
        before.reach()
        before.record()
        assert fmhad.until(lambda: after.n_done == 5)
        before.reach()
        # Counters and events in one run: all have to be reached.
        before.record()
        device.run(
            plan,
            waits=[{"buffer": buffer, "offset": at, "value": 1}, {"event": numbers[0]}],
            signals=[{"event": numbers[1]}, {"buffer": buffer, "offset": at + 4, "value": 7}],
        )
        before.reach()
        time.sleep(0.02)
        assert after.n_done == 5 and words[at // 4 + 1] == 0
        words[at // 4] = 1
        device.run(plan)  # behind it
        assert after.n_done == 6 and words[at // 4 + 1] == 7
        for number in numbers:
            device.call("event_release", {"event": number})
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("event_release", {"event": numbers[0]})
        assert caught.value.name == "ENOENT" and caught.value.field == "event"


def test_a_stuck_event_has_a_deadline(gpu):
    event, after = Event(), Event()
    with gpu.device() as device, gpu.device() as other:
        buffer, _ = device_buffer(device, 4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer))["plan"]
        wait = {"waits": [{"event": import_event(device, event)}]}
        signal = {"signals": [{"event": import_event(device, after)}]}
        pid = device.worker_pid
        for _ in range(3):  # each time something that nobody ends
            event.record()
            done = after.n_done
            device.run(plan, **wait, **signal, timeout_ms=300)
            other.ping()
            assert fmhad.until(lambda done=done: after.n_done == done + 1), "let go"
            with pytest.raises(fmha_wire.WireError) as caught:
                device.run(plan)
            assert caught.value.name == "ETIMEDOUT" and caught.value.field == "waits"
            device.run(plan)
        # What was given up on is reached after all: the streams that waited for it are not used.
        event.reach()
        device.run(plan, **wait, **signal)
        assert fmhad.until(lambda: after.n_done == 4)
        assert gpu.children() == [pid], "no worker had to die for it"


def test_several_runs_behind_a_stuck_event_are_let_go(gpu):
    event, after = Event(), Event()
    with gpu.device() as device:
        buffer, _ = device_buffer(device, 4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer))["plan"]
        waits = [{"event": import_event(device, event)}]
        signals = [{"event": import_event(device, after)}]
        event.record()
        for _ in range(16):  # as many as the device has at once of one client
            device.run(plan, waits=waits, signals=signals, timeout_ms=2000)
        assert after.n_done == 0, "all are answered when they are queued"
        assert fmhad.until(lambda: after.n_done == 16)
        event.reach()
        with pytest.raises(fmha_wire.WireError):
            device.run(plan)
        device.run(plan, waits=waits, signals=signals)
        assert fmhad.until(lambda: after.n_done == 17)


def test_too_many_stuck_events_cost_the_worker(gpu):
    """Each holds one of the few queues that a GPU has: a new worker gets them back."""
    event = Event()
    event.record()
    worker = gpu.children()
    devices = [gpu.device() for _ in range(9)]
    with pytest.raises((fmha_wire.WireError, fmha_wire.Disconnected)) as caught:
        for i, device in enumerate(devices):
            buffer, _ = device_buffer(device, 4 * TENSOR_BYTES)
            plan = device.plan(problem(buffer))["plan"]
            waits = [{"event": import_event(device, event)}]
            # The last one is more than a user may have there at a time: it gets a place later.
            device.run(plan, waits=waits, timeout_ms=100 if i < 8 else 600)
        time.sleep(1)
        for device in devices:
            device.ping(timeout=3)
    assert "events" in str(caught.value) or isinstance(caught.value, fmha_wire.Disconnected)
    assert fmhad.until(lambda: gpu.children() not in ([], worker))
    for device in devices:
        device.close()
    with reopen(gpu) as device:
        assert run_once(device)


def test_bad_events_are_refused(gpu, daemon):
    event = Event()
    with gpu.device() as device:
        own = event.handle_in(device.worker_pid)  # the worker's own event, as far as it can tell
        for handle in (os.urandom(64), b"", b"short", bytes(64), b"x" * 65, own):
            with pytest.raises(fmha_wire.WireError) as caught:
                device.call("event_import", {"handle": handle})
            assert caught.value.name == "EINVAL" and caught.value.field == "handle"
        buffer, _ = device_buffer(device, 4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer))["plan"]
        number = import_event(device, event)
        for name, bad in (
            ("ENOENT", {"event": number + 1}),
            ("ENOENT", {}),
            ("EINVAL", {"event": number, "buffer": buffer}),
            ("EINVAL", {"event": number, "value": 1}),
            ("EINVAL", {"event": number, "offset": 4}),
        ):
            for field in ("waits", "signals"):
                with pytest.raises(fmha_wire.WireError) as caught:
                    device.run(plan, **{field: [bad]})
                assert caught.value.field == field and caught.value.name == name
        with gpu.device() as other:  # ids mean nothing on another connection
            with pytest.raises(fmha_wire.WireError) as caught:
                other.call("event_release", {"event": number})
            assert caught.value.name == "ENOENT"
        device.run(plan, waits=[{"event": number}])
    with daemon.device() as device:  # the CPU
        assert "events" not in device.info
        with pytest.raises(fmha_wire.WireError) as caught:
            import_event(device, event)
        assert caught.value.name == "ENOTSUP"
        buffer = device.buffer_create(4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer.id))["plan"]
        for field in ("waits", "signals"):
            with pytest.raises(fmha_wire.WireError) as caught:
                device.run(plan, **{field: [{"event": 1}]})
            assert caught.value.name == "ENOTSUP" and caught.value.field == field


def test_an_event_that_is_released_while_a_run_uses_it(gpu):
    event, after = Event(), Event()
    with gpu.device() as device:
        buffer, _ = device_buffer(device, 4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer))["plan"]
        numbers = [import_event(device, e) for e in (event, after)]
        event.record()
        device.run(plan, waits=[{"event": numbers[0]}], signals=[{"event": numbers[1]}])
        for number in numbers:
            device.call("event_release", {"event": number})
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(plan, waits=[{"event": numbers[0]}])
        assert caught.value.name == "ENOENT"
        event.reach()
        assert fmhad.until(lambda: after.n_done == 1)
        device.run(plan)


def test_one_event_on_two_connections(gpu):
    event = Event()
    with gpu.device() as device, gpu.device() as other:
        numbers = [import_event(d, event) for d in (device, device, other)]
        device.call("event_release", {"event": numbers[0]})
        buffer, _ = device_buffer(other, 4 * TENSOR_BYTES)
        plan = other.plan(problem(buffer))["plan"]
        other.run(plan, signals=[{"event": numbers[2]}])
        assert fmhad.until(lambda: event.n_done == 1)


def test_a_client_that_dies_while_its_run_waits_for_an_event(gpu):
    with gpu.device() as other:
        assert run_once(other)
        before = gpu.settled_fds()
        event = Event()
        event.record()
        device = gpu.device()
        buffer, _ = device_buffer(device, 4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer))["plan"]
        number = import_event(device, event)
        device.run(plan, waits=[{"event": number}], timeout_ms=500)
        device.close()
        worker = gpu.children()
        assert run_once(other), "others go on"
        assert gpu.has_no_more_than(before), (before, gpu.fd_counts())
        assert run_once(other) and gpu.children() == worker


def test_a_client_has_so_many_events_and_no_more(make_daemon, make_gpu, compiler, tmp_path):
    event = Event()
    config = {
        "devices": [{"backend": "cuda"}],
        "compile": {"helper": str(compiler.path), "cache": str(tmp_path / "cache")},
        "limits": {"events_per_connection": 2, "events_per_uid": 3},
    }
    daemon = make_daemon(config, env={**os.environ, "LD_LIBRARY_PATH": str(stub_folder())})
    with daemon.device() as device, daemon.device() as other:
        numbers = [import_event(device, event) for _ in range(2)]
        for client, sentence in ((device, "connection"), (other, "user")):
            with pytest.raises(fmha_wire.WireError) as caught:
                for _ in range(2):
                    import_event(client, event)
            assert caught.value.name == "EQUOTA" and sentence in str(caught.value)
        device.call("event_release", {"event": numbers[0]})
        import_event(other, event)


def test_an_event_handle_that_blocks_the_driver_blocks_nobody_else(gpu):
    hang = {"handle": b"hang".ljust(64, b"\0")}
    with gpu.device() as device, gpu.device() as other:
        numbers = [device.submit("event_import", hang), device.submit("event_import", hang)]
        memory = {"kind": "ipc_handle", "size": 64, "handle": b"good".ljust(64, b"\0")}
        for _ in range(5):
            released = other.call("buffer_import", memory)["buffer"]
            os.close(other.call_with_fds("buffer_create", {"size": 3 << 20})[1][0])
            other.call("buffer_release", {"buffer": released})
        assert not device.is_answered(numbers[1]), "other clients' imports go on"
        for number in numbers:
            with pytest.raises(fmha_wire.WireError) as caught:
                device.wait(number)
            assert caught.value.name == "ETIMEDOUT" and caught.value.field == "handle"
        assert import_event(device, Event())


def test_bad_fences_are_refused(gpu, daemon):
    with gpu.device() as device:
        buffer, _ = device_buffer(device, 4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer))["plan"]
        size = 4 * TENSOR_BYTES
        for bad in (
            {"buffer": buffer, "offset": size - 3, "value": 1},
            {"buffer": buffer, "offset": size, "value": 1},
            {"buffer": buffer, "offset": 2, "value": 1},
            {"buffer": buffer, "offset": (1 << 64) - 4, "value": 1},
            {"buffer": buffer + 1, "offset": 0, "value": 1},
        ):
            for field in ("waits", "signals"):
                with pytest.raises(fmha_wire.WireError) as caught:
                    device.run(plan, **{field: [bad]})
                assert caught.value.field == field
        device.run(plan)
    with daemon.device() as device:  # the CPU
        buffer = device.buffer_create(4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer.id))["plan"]
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(plan, waits=[{"buffer": buffer.id, "offset": 0, "value": 1}])
        assert caught.value.name == "ENOTSUP"


def test_a_fault_costs_what_was_in_flight(make_gpu):
    daemon = make_gpu(CUDA_STUB_FAIL="cuLaunchKernel", CUDA_STUB_AFTER="1")
    worker = daemon.children()
    with daemon.device() as device:
        assert run_once(device)
        with pytest.raises((fmha_wire.WireError, fmha_wire.Disconnected)) as caught:
            run_once(device)
        if isinstance(caught.value, fmha_wire.WireError):
            assert caught.value.name == "EDEVICE"
    assert fmhad.until(lambda: daemon.children() not in ([], worker))
    with reopen(daemon) as device:
        assert run_once(device)


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventQuery", "cuStreamQuery"])
def test_a_fault_is_noticed_while_the_client_stays(make_gpu, call):
    daemon = make_gpu(CUDA_STUB_FAIL=call, CUDA_STUB_AFTER="1")
    worker = daemon.children()
    with daemon.device() as device:
        with pytest.raises((fmha_wire.WireError, fmha_wire.Disconnected)):
            for _ in range(3):
                run_once(device)
            buffer = host_buffer(device, 4 * TENSOR_BYTES)
            plan = device.plan(problem(buffer.id))["plan"]
            for _ in range(50):  # small enough to be run by the loop itself
                device.run(plan)
        assert fmhad.until(lambda: daemon.children() not in ([], worker))


def test_a_fault_that_a_memory_call_tells_of_ends_the_worker(make_gpu):
    daemon = make_gpu(CUDA_STUB_FAIL="cuStreamSynchronize", CUDA_STUB_AFTER="2")
    worker = daemon.children()
    with daemon.device() as device:
        with pytest.raises((fmha_wire.WireError, fmha_wire.Disconnected)):
            for _ in range(4):  # the first may come out of stock
                device.buffer_create(4096)
        assert fmhad.until(lambda: daemon.children() not in ([], worker))


@pytest.mark.parametrize("n_before", [0, 20])  # after some it is run by the loop itself
def test_a_kernel_that_never_ends_is_given_up(make_gpu, tmp_path, n_before):
    flag = tmp_path / "hang"
    daemon = make_gpu(CUDA_STUB_HANG=str(flag))
    with daemon.device() as device:
        assert run_once(device)
        buffer = host_buffer(device, 4 * TENSOR_BYTES)
        plan = device.plan(problem(buffer.id))["plan"]
        for _ in range(n_before):
            device.run(plan)
        flag.touch()
        with pytest.raises((fmha_wire.WireError, fmha_wire.Disconnected)):
            device.run(plan)
    flag.unlink()
    with reopen(daemon) as device:
        assert run_once(device)


CALLS = [
    "cuMemAlloc",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuStreamSynchronize",
    "cuStreamCreate",
    "cuModuleLoadData",
    "cuEventQuery",
    "cuInit",
]


@pytest.mark.parametrize("call", CALLS)
def test_any_call_of_the_driver_may_fail(make_gpu, call):
    daemon = make_gpu(CUDA_STUB_FAIL=call)
    with pytest.raises((fmha_wire.WireError, fmha_wire.Disconnected)):
        with daemon.device() as device:
            run_once(device)
    assert daemon.process.poll() is None
    with daemon.client() as client:
        client.ping()


def mps_of(daemon):
    return fmhad.until(lambda: daemon.status()["devices"][0]["worker"])


def test_cuda_mps_is_found_and_reported(make_gpu, tmp_path):
    folder = tmp_path / "nvidia-mps"
    folder.mkdir()
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as control:
            control.bind(str(folder / "control"))
            control.listen()
            daemon = make_gpu(CUDA_MPS_PIPE_DIRECTORY=str(folder))
            status = mps_of(daemon)
            assert status["mps"] == "in use" and status["mps_directory"] == str(folder)
            assert "MPS" not in daemon.log()
            daemon.stop()
        os.unlink(folder / "control")
    os.mkfifo(folder / "control")
    reader = os.open(folder / "control", os.O_RDONLY | os.O_NONBLOCK)
    assert mps_of(make_gpu(CUDA_MPS_PIPE_DIRECTORY=str(folder)))["mps"] == "in use"
    os.close(reader)


def test_a_missing_mps_is_said_once(make_gpu, tmp_path):
    folder = tmp_path / "nvidia-mps"
    daemon = make_gpu(CUDA_MPS_PIPE_DIRECTORY=str(folder))
    assert mps_of(daemon)["mps"] == "absent"
    assert daemon.log().count(f"no CUDA MPS control daemon answers at {folder}") == 1
    # What a control daemon that died leaves behind.
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(folder / "control"))
    assert mps_of(make_gpu(CUDA_MPS_PIPE_DIRECTORY=str(folder)))["mps"] == "absent"
    os.unlink(folder / "control")
    os.mkfifo(folder / "control")
    assert mps_of(make_gpu(CUDA_MPS_PIPE_DIRECTORY=str(folder)))["mps"] == "absent"


def test_a_machine_without_the_driver_says_so(make_daemon, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    daemon = make_daemon(
        {"devices": [{"backend": "cpu"}, {"backend": "cuda"}], "supervision": {"restart_ms": 10}},
        env={**os.environ, "LD_LIBRARY_PATH": str(empty)},
    )
    with daemon.client() as client:
        if client.devices()[1]["state"] == "ready":
            pytest.skip("this machine has the driver")
        assert "cuda driver" in daemon.status()["devices"][1]["last_death"]
    with daemon.device(0) as device:
        device.ping()


def test_nothing_is_left_of_a_client(gpu):
    with gpu.device() as device:
        assert run_once(device)
    with gpu.device() as device:
        device.ping()
    before = gpu.settled_fds()
    for _ in range(10):
        device = gpu.device()
        host_buffer(device, 4 * TENSOR_BYTES)
        os.close(device.call_with_fds("buffer_create", {"size": 64})[1][0])
        device.close()
    assert gpu.has_no_more_than(before), (before, gpu.fd_counts())


def test_verify_fails_where_nothing_could_run(make_gpu, compiler):
    """No compiler, every problem refused: that is not a success, and the reason is told."""
    compiler.path.write_text("#!/bin/sh\necho 'NVRTC is not installed' >&2\nexit 1\n")
    daemon = make_gpu()
    done = subprocess.run(
        [fmhad.find_program("fmhactl"), "verify", "--socket", daemon.socket, "--cases", "3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert ": 0 ok, 3 not supported, 0 failed" in done.stdout
    assert "nothing was verified" in done.stderr and "NVRTC is not installed" in done.stderr
