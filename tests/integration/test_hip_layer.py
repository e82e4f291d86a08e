# SPDX-License-Identifier: MIT
"""The GPU layer on HIP, without a GPU: fmhad-hip.so on a libamdhip64 that is the stub of test_gpu_layer.py with HIP's
names. What the two modules share is tested with the tests of the other.
"""
import json
import os

import fmha_wire
import fmhad
import pytest
from test_gpu_layer import (  # noqa: F401
    TENSOR_BYTES,
    compiler,
    gpu,
    host_buffer,
    problem,
    run_once,
    stub_folder,
    test_a_build_that_fails_says_why_and_can_be_repeated,
    test_a_client_that_leaves_during_a_build_is_forgotten,
    test_a_fault_costs_what_was_in_flight,
    test_a_handle_that_blocks_the_driver_blocks_nobody_else,
    test_bad_ipc_handles_are_refused,
    test_code_that_does_not_load_is_an_error,
    test_everyone_waits_for_one_build,
    test_memory_beyond_the_device_is_refused,
)


WITH_64_KIB = "fwd-bf16-batch-h128-gpu_amd-t256x64x128x128x64x128-r8x1x1-w16x16x16-p1111-no-no-bpc1-gfx942"


@pytest.fixture
def make_gpu(make_daemon, compiler, tmp_path):  # noqa: F811
    if not list(fmhad.build_dir().rglob("fmhad-hip.so")):
        pytest.skip("the build has no fmhad-hip.so")

    def make(limits=None, **environment):
        config = {
            "devices": [{"backend": "hip", "stall_ms": 600}],
            "compile": {"helper": str(compiler.path), "cache": str(tmp_path / "cache")},
            "supervision": {"heartbeat_ms": 100, "heartbeat_timeout_ms": 1500, "restart_ms": 20},
            "limits": limits or {},
        }
        return make_daemon(config, env={**os.environ, "LD_LIBRARY_PATH": str(stub_folder() / "hip"), **environment})

    return make


def test_the_device_is_what_its_properties_say(gpu):  # noqa: F811
    (device,) = gpu.status()["devices"]
    assert (device["backend"], device["arch"], device["name"]) == ("hip", "gfx942", "Stub Instinct")


def test_runs_read_and_write_what_the_client_sees(gpu, compiler):  # noqa: F811
    with gpu.device() as device:
        assert run_once(device) and run_once(device)
    assert compiler.count() == 1


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


def imported(device):
    """Memory that a client has shared by handle: of one handle a worker has one mapping."""
    return device.call("buffer_import", {"kind": "ipc_handle", "size": 1 << 20, "handle": b"good".ljust(64, b"\0")})["buffer"]


def test_memory_goes_out_by_no_descriptor(gpu):  # noqa: F811
    with gpu.device() as device, pytest.raises(fmha_wire.WireError) as caught:
        device.call("buffer_create", {"size": 4096})
    assert caught.value.name == "ENOTSUP"


def test_fences_order_runs_of_two_clients(gpu):  # noqa: F811
    with gpu.device() as device, gpu.device() as other:
        mine, theirs = imported(device), imported(other)
        waits, signals = device.plan(problem(mine))["plan"], other.plan(problem(theirs))["plan"]
        at = 4 * TENSOR_BYTES
        other.run(signals, signals=[{"buffer": theirs, "offset": at, "value": 5}])
        device.run(waits, waits=[{"buffer": mine, "offset": at, "value": 6}], timeout_ms=5000)
        other.run(signals, signals=[{"buffer": theirs, "offset": at, "value": 6}])
        device.run(waits)  # behind the one that waited


def test_a_fence_that_nobody_signals_has_a_deadline(gpu):  # noqa: F811
    with gpu.device() as device:
        buffer = imported(device)
        plan, pid = device.plan(problem(buffer))["plan"], device.worker_pid
        at = 4 * TENSOR_BYTES
        device.run(plan, signals=[{"buffer": buffer, "offset": at, "value": 5}])
        device.run(plan, waits=[{"buffer": buffer, "offset": at, "value": 6}], timeout_ms=300)

        def told():
            try:
                device.run(plan)
            except fmha_wire.WireError as error:
                return error.name, error.field

        assert fmhad.until(told, 3) == ("ETIMEDOUT", "waits")
        device.run(plan)
        assert gpu.children() == [pid], "no worker had to die for it"


def test_events_are_not_imported(gpu):  # noqa: F811
    """An imported event is done for HIP's query as soon as it is recorded."""
    with gpu.device() as device, pytest.raises(fmha_wire.WireError) as caught:
        device.call("event_import", {"handle": b"good".ljust(64, b"\0")})
    assert caught.value.name == "ENOTSUP"


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuLaunchKernel"])
def test_a_call_that_fails_ends_no_daemon(make_gpu, call):
    daemon = make_gpu(CUDA_STUB_FAIL=call, CUDA_STUB_AFTER="1")
    with pytest.raises((fmha_wire.WireError, fmha_wire.Disconnected)):
        for _ in range(20):
            with daemon.device() as device:
                run_once(device)
    assert daemon.status()["devices"]
