# SPDX-License-Identifier: MIT
"""Which compiled kernels stay loaded: those of plans, in their users' accounts, and the last few that nobody has."""
import os
import resource
import threading
import time

import fmha_wire
import fmhad
import numpy
import pytest
from test_gpu_layer import FORWARD, SHAPE, TENSOR_BYTES, compiler, device_buffer, host_buffer, make_gpu, problem, stub_folder  # noqa: F401
from test_tuning import as_user, fmhactl

PER_USER, IDLE = 6, 4
CODE_OF_ITS_OWN = "printf 'stub code %s' \"$*\" >\"$5\""  # so that hashes tell kernels apart
LIMITS = {"kernels": 2 * PER_USER, "kernels_idle": IDLE}
# Each has a kernel of its own.
VARIANTS = [dict(hdim_q=d, hdim_v=d, logits_soft_cap=cap) for d in (32, 64, 96, 128, 160, 192) for cap in (0.0, 5.0)]
MOST_BYTES = 4 * 3 * TENSOR_BYTES


def make_problem(number, buffer):
    tensors = {role: {"buffer": buffer, "offset": i * 3 * TENSOR_BYTES, "dtype": "f32"} for i, role in enumerate("qkvo")}
    return {**FORWARD, **VARIANTS[number], "tensors": tensors}


def backward_problem():
    roles = ("q", "k", "v", "o", "lse", "d_o", "dq", "dk", "dv")
    return {**FORWARD, "op": "backward",
            "tensors": {role: {"buffer": 1, "offset": i * 3 * TENSOR_BYTES, "dtype": "f32"} for i, role in enumerate(roles)}}


def make_plans(device, numbers):
    """Plans of one user's; the kernel names, and the refusal of the first that was refused."""
    buffer, plans = host_buffer(device, MOST_BYTES), []
    for number in numbers:
        try:
            plans.append(device.plan(make_problem(number, buffer.id)))
        except fmha_wire.WireError as error:
            return buffer, plans, error
    return buffer, plans, None


def code(daemon):
    return daemon.status()["devices"][0]["worker"]["code"]


def plan_local(device, number):
    """The hash of the code of a plan that is launched elsewhere: the worker has it for nobody."""
    (launch,) = [launch for launch in device.call("local_plan", {"problem": make_problem(number, 1)})["launches"]
                 if launch["family"] == "fwd"]
    return launch["code"]


def is_kept(device, number_of_code):
    try:
        _, (fd,) = device.call_with_fds("code", {"hash": number_of_code})
    except fmha_wire.WireError as error:
        assert error.name == "ENOENT"
        return False
    os.close(fd)
    return True


def test_a_user_has_so_many_and_pays_for_each_once(make_gpu):  # noqa: F811
    gpu = make_gpu(LIMITS)
    gpu.worker_pid()
    before = gpu.settled_fds()
    with gpu.device() as device:
        buffer, plans, refusal = make_plans(device, [n for number in range(len(VARIANTS)) for n in (number, number)])
        assert len(plans) == 2 * PER_USER, "a kernel that two plans have is one"
        assert refusal.name == "EQUOTA" and "limits.kernels_per_uid" in str(refusal)
        assert code(gpu) == {"kernels": PER_USER + 1, "bytes": 9 * (PER_USER + 1), "idle": 1, "unloaded": 0}
        for planned in plans[::2]:
            device.call("plan_release", {"plan": planned["plan"]})
        assert code(gpu)["idle"] == 1, "the other plan has it still"
        for planned in plans[1::2]:
            device.call("plan_release", {"plan": planned["plan"]})
        assert code(gpu) == {"kernels": IDLE, "bytes": 9 * IDLE, "idle": IDLE, "unloaded": PER_USER + 1 - IDLE}
        metrics = fmhactl("metrics", FMHAD_SOCKET=gpu.socket)
        for line in (f"kernels_loaded{{device=\"0\"}} {IDLE}", f"kernels_idle{{device=\"0\"}} {IDLE}",
                     f"kernel_code_bytes{{device=\"0\"}} {9 * IDLE}",
                     f"kernels_unloaded_total{{device=\"0\"}} {PER_USER + 1 - IDLE}"):
            assert f"\nfmhad_{line}\n" in metrics
        buffer.release()
        worker = gpu.status()["devices"][0]["worker"]
        assert worker["memory"]["bytes"] == 0
        assert make_plans(device, range(PER_USER))[2] is None, "there is room again"
    assert fmhad.until(lambda: gpu.status()["devices"][0]["worker"]["memory"]["bytes"] == 0)
    assert fmhad.until(lambda: gpu.settled_fds()[1] <= before[1] + IDLE)


@pytest.mark.skipif(bool(fmhad.NO_OTHER_USERS), reason=fmhad.NO_OTHER_USERS)
def test_the_next_user_is_served(make_gpu, compiler, tmp_path):  # noqa: F811
    """One user holds all that one user may and names more; another one's plans, local ones, too, are made all the same."""
    compiler.does(CODE_OF_ITS_OWN)
    with make_open_gpu(compiler, tmp_path) as gpu:
        def attack():
            with gpu.device() as device:
                for number in range(len(VARIANTS)):
                    plan_local(device, number)
                plans = len(make_plans(device, range(len(VARIANTS)))[1])
                try:
                    plan_local(device, PER_USER)
                except fmha_wire.WireError as error:
                    return plans, error.name
                return plans, "served"

        with gpu.device() as mine:
            kept = plan_local(mine, 0)
            assert as_user(1001, attack) == [PER_USER, "EQUOTA"]
            assert is_kept(mine, kept), "a flood takes the places of its own user's"
            assert len(make_plans(mine, range(PER_USER))[1]) == PER_USER


def make_open_gpu(compiler, tmp_path):  # noqa: F811
    os.chmod(tmp_path, 0o755)
    return fmhad.Daemon(
        {"devices": [{"backend": "cuda", "stall_ms": 600}], "limits": LIMITS,
         "compile": {"helper": str(compiler.path), "cache": str(tmp_path / "cache")}},
        env={**os.environ, "LD_LIBRARY_PATH": str(stub_folder())}, open_to_all=True)


def test_those_that_were_had_longest_ago_go_first(make_gpu, compiler):  # noqa: F811
    compiler.does(CODE_OF_ITS_OWN)
    with make_gpu(LIMITS).device() as device:
        codes = [plan_local(device, number) for number in range(IDLE - 1)]  # and the one that makes tables
        assert all(is_kept(device, one) for one in codes)
        assert plan_local(device, 0) == codes[0], "had again: the second one is the oldest now"
        plan_local(device, IDLE)
        assert [is_kept(device, one) for one in codes] == [True, False] + [True] * (IDLE - 3)


def test_what_was_unloaded_comes_back(make_gpu, compiler):  # noqa: F811
    """A plan has its kernel whatever became of it meanwhile, and nothing is compiled again."""
    gpu = make_gpu({"kernels_idle": 1})
    with gpu.device() as device:
        for attempt in range(3):
            for number in (2, 3):
                buffer = host_buffer(device, 4 * TENSOR_BYTES)
                cap = VARIANTS[number]["logits_soft_cap"]
                planned = device.plan(problem(buffer.id, logits_soft_cap=cap))
                q, o = (buffer.array("f32", SHAPE, i * TENSOR_BYTES) for i in (0, 3))
                q[...] = numpy.random.default_rng(attempt).standard_normal(SHAPE)
                device.run(planned["plan"])
                assert numpy.array_equal(o, q)
                device.call("plan_release", {"plan": planned["plan"]})
                del q, o
                buffer.release()
                assert code(gpu)["kernels"] == 1
        assert compiler.count() == 2


def test_idle_ones_make_room_on_a_device_without_memory(make_gpu):  # noqa: F811
    gpu = make_gpu(CUDA_STUB_MODULES="3")
    with gpu.device() as device:
        for number in range(len(VARIANTS)):
            _, plans, refusal = make_plans(device, [number])
            assert refusal is None, number
            device.call("plan_release", {"plan": plans[0]["plan"]})
            assert code(gpu)["kernels"] <= 3
        _, plans, refusal = make_plans(device, range(len(VARIANTS)))
        assert len(plans) == 3 and refusal.name == "ENOMEM"
    assert fmhad.until(lambda: code(gpu)["idle"] == code(gpu)["kernels"])


@pytest.mark.skipif(bool(fmhad.NO_OTHER_USERS), reason=fmhad.NO_OTHER_USERS)
def test_code_that_two_users_waited_for_keeps_its_hash(make_gpu, compiler, tmp_path):  # noqa: F811
    """The front answers each of them; what the first answer has told a client holds after the second one."""
    go, (told, tell) = tmp_path / "go", os.pipe()
    threading.Thread(target=lambda: os.read(told, 1) and (time.sleep(0.2), go.touch()), daemon=True).start()
    compiler.does(f"until [ -e {go} ]; do sleep 0.02; done; {CODE_OF_ITS_OWN}")
    with make_open_gpu(compiler, tmp_path) as gpu:
        def other():
            with gpu.device() as device:
                number = device.submit("local_plan", {"problem": make_problem(0, 1)})
                device.ping()
                os.write(tell, b"x")
                return all(is_kept(device, launch["code"]) for launch in device.wait(number)[0]["launches"])

        with gpu.device() as mine:
            number = mine.submit("local_plan", {"problem": make_problem(0, 1)})
            assert as_user(1001, other) is True
            launches = mine.wait(number)[0]["launches"]
            assert all(is_kept(mine, launch["code"]) for launch in launches)
        os.close(told)
        os.close(tell)
        assert compiler.count() == 2, "with the one that makes tables"


def test_kernels_are_paid_for_while_their_plan_waits_for_others(make_gpu, compiler, tmp_path):  # noqa: F811
    """A backward pass whose last kernel is still being compiled: what is loaded for it is in the account already."""
    go = tmp_path / "go"
    compiler.does(f'case "$*" in *dq_dk_dv*) until [ -e {go} ]; do sleep 0.02; done;; esac; {CODE_OF_ITS_OWN}')
    gpu = make_gpu(LIMITS)

    def charged():
        return gpu.status()["devices"][0]["worker"]["memory"]["bytes"]

    for is_built in (False, True):
        with gpu.device() as device:
            number = device.submit("local_plan", {"problem": backward_problem()})
            assert fmhad.until(lambda: 0 < charged() == code(gpu)["bytes"])
            assert code(gpu)["idle"] == 0
            if is_built:
                go.touch()
                assert len(device.wait(number)[0]["launches"]) >= 2
                assert fmhad.until(lambda: charged() == 0)
        assert fmhad.until(lambda: charged() == 0 and code(gpu)["idle"] == code(gpu)["kernels"]), "the client has gone"


def leave_one_descriptor(gpu, pid):
    """As if something had taken all others that the process may have."""
    gpu.settled_fds()
    taken = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = [fd for fd in range(len(taken) + 2) if fd not in taken]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[1], limits[1]))
    return limits


def test_idle_ones_make_room_without_descriptors(make_gpu, compiler):  # noqa: F811
    """Code comes in one descriptor and is kept in another: for that an idle kernel goes."""
    compiler.does(CODE_OF_ITS_OWN)
    gpu = make_gpu({"kernels_idle": 3})
    with gpu.device() as device:
        plan_local(device, 0)
        worker = gpu.worker_pid()
        assert fmhad.until(lambda: code(gpu)["idle"] == 2)
        limits = leave_one_descriptor(gpu, worker)
        plan_local(device, 1)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)
        assert code(gpu)["kernels"] < 3, "it had room for three"
        assert is_kept(device, plan_local(device, 1))
        buffer, plans, refusal = make_plans(device, [0, 1])
        assert refusal is None and code(gpu)["idle"] == 1
        limits = leave_one_descriptor(gpu, worker)
        device.plan(make_problem(3, buffer.id))  # in the place of the one that makes tables
        # With nobody to make room the plan that lacks it fails, and only that one; later it is made.
        for _ in range(2):
            with pytest.raises(fmha_wire.WireError) as caught:
                device.plan(make_problem(2, buffer.id))
            assert caught.value.name == "ENOMEM"
        resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)
        device.plan(make_problem(2, buffer.id))
    assert gpu.worker_pid() == worker


def have_idle(device, numbers):
    for number in numbers:
        _, plans, refusal = make_plans(device, [number])
        assert refusal is None
        device.call("plan_release", {"plan": plans[0]["plan"]})


def test_idle_ones_are_bounded_by_bytes_too(make_gpu):  # noqa: F811
    gpu = make_gpu({"kernels_idle_bytes": 30})
    with gpu.device() as device:
        have_idle(device, range(5))
        assert code(gpu) == {"kernels": 3, "bytes": 27, "idle": 3, "unloaded": 2}
        _, plans, _ = make_plans(device, range(5))
        assert len(plans) == 5 and code(gpu)["bytes"] == 45, "those that plans have are no idle ones"


@pytest.mark.parametrize("make", [lambda device: device_buffer(device, 2 << 20), lambda device: host_buffer(device, 1 << 20)],
                         ids=["created", "a copy of the client's"])
def test_idle_ones_make_room_for_a_buffer(make_gpu, make):  # noqa: F811
    """On a device that is full of them; not for what it could never have."""
    gpu = make_gpu(CUDA_STUB_GRANULES="16")
    with gpu.device() as device:
        have_idle(device, range(4))
        assert fmhad.until(lambda: code(gpu)["idle"] == 4)
        with pytest.raises(fmha_wire.WireError) as caught:
            device_buffer(device, 5 << 30)
        assert caught.value.name in ("ENOMEM", "EQUOTA") and code(gpu)["idle"] == 4
        made = 0
        while code(gpu)["idle"] > 0:
            make(device)
            made += 1
            assert made < 32, "the device is full, and they are there still"
        with pytest.raises(fmha_wire.WireError) as caught:
            for _ in range(32):
                make(device)
        assert caught.value.name == "ENOMEM"
        device.ping()
    assert fmhad.until(lambda: gpu.status()["devices"][0]["worker"]["memory"]["bytes"] == 0)
    with gpu.device() as device:
        have_idle(device, range(4))
    assert gpu.status()["devices"][0]["deaths"] == 0
