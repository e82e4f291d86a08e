# SPDX-License-Identifier: MIT
"""Memory of several GPUs as one range: fmha_view_new() and its exchange between processes, on the stub of CUDA's driver."""
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import fmhad
import pytest
from test_gpu_layer import compiler, stub_folder  # noqa: F401

PACKAGE = fmhad.build_dir() / "client/python"
MIB = 1 << 20

PRELUDE = """
import ctypes, json, os, socket, sys
sys.path.insert(0, os.environ["PACKAGE"])
cuda = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
assert cuda.cuInit(0) == 0
import fmha
from fmha import _view
from fmha._service import Buffer
MIB = 1 << 20
client = fmha.Client()
def write(at, text):
    ctypes.memmove(at, text, len(text))
def read(at, n):
    return ctypes.string_at(at, n)
"""

pytestmark = pytest.mark.skipif(not (PACKAGE / "fmha/_abi.py").exists(), reason="the build has no Python package")


@pytest.fixture
def daemon(make_daemon, compiler, tmp_path):  # noqa: F811
    cards = tmp_path / "cards"
    cards.write_text("27 58\n")
    config = {"devices": [{"backend": "cuda", "index": i} for i in range(2)] + [{"backend": "cpu", "threads": 1}],
              "compile": {"helper": str(compiler.path), "cache": str(tmp_path / "cache")}}
    return make_daemon(config, env={**os.environ, "LD_LIBRARY_PATH": str(stub_folder()), "CUDA_STUB_CARDS": str(cards)})


def start(daemon, program, **environment):
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub_folder()), "PACKAGE": str(PACKAGE), "FMHAD_SOCKET": daemon.socket, **environment}
    return subprocess.Popen([sys.executable, "-c", PRELUDE + textwrap.dedent(program)], env=env, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(daemon, program, **environment):
    process = start(daemon, program, **environment)
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 0, complained
    return json.loads(said)


def test_parts_of_two_cards_are_one_range(daemon):
    found = run(daemon, """
        buffers = [Buffer(client.device(i), (2 + 2 * i) * MIB) for i in range(2)]
        parts = [_view.part_of(b) for b in buffers]
        whole, single = _view.View(parts), [_view.View([p]) for p in parts]
        write(whole.pointer + 2 * MIB - 3, b"across")  # the last of one card and the first of the other
        told = {"bytes": whole.bytes, "parts": [p.bytes for p in parts],
                "first": read(single[0].pointer + 2 * MIB - 3, 3).decode(), "second": read(single[1].pointer, 3).decode()}
        del buffers, single  # the daemon's buffers have gone, the range has not
        told["after"] = read(whole.pointer + 2 * MIB - 3, 6).decode()
        print(json.dumps(told))
    """)
    assert found == {"bytes": 6 * MIB, "parts": [2 * MIB, 4 * MIB], "first": "acr", "second": "oss", "after": "across"}


def test_what_is_no_part_is_refused(daemon):
    found = run(daemon, """
        def refusal(make):
            try:
                make()
            except fmha.FmhaError as error:
                return [error.code, error.field, str(error)]
            raise AssertionError("it was taken")
        buffer = Buffer(client.device(0), 2 * MIB)
        good = _view.part_of(buffer)
        own = os.memfd_create("own")
        from fmha._lib import check, ffi, lib, new_error

        def of_another_size():
            memory, found, error = ffi.new("struct fmha_memory *"), ffi.new("struct fmha_view **"), new_error()
            memory.kind, memory.fd, memory.size = lib.FMHA_MEMORY_VMM_FD, good.fd, good.bytes
            check(lib.fmha_view_new(memory, 1, found, error), error)

        print(json.dumps([refusal(lambda: _view.View([good, good._replace(bytes=0)])),
                          refusal(lambda: _view.View([good, good._replace(fd=-1)])),
                          refusal(lambda: _view.View([good, good._replace(bytes=4 * MIB)])),
                          refusal(lambda: _view.View([good, _view.Part(own, 1 << 63), _view.Part(own, 1 << 63)])),
                          refusal(lambda: _view.View([])),
                          refusal(lambda: _view.part_of(Buffer(client.device(2), 4096))), refusal(of_another_size)]))
    """)
    assert [(code, field) for code, field, _ in found] == [
        ("EINVAL", "size"), ("EINVAL", "kind"), ("EIO", "fd"), ("EINVAL", "size"), ("EINVAL", ""), ("EINVAL", ""), ("EINVAL", "struct_size")], found
    assert "part 1 of 2" in found[2][2] and "GPU's worker" in found[5][2]


@pytest.mark.parametrize("call, code", [("cuMemAddressReserve", "ENOMEM"), ("cuMemImportFromShareableHandle", "EIO"),
                                        ("cuMemMap", "EIO"), ("cuMemSetAccess", "ENOTSUP")])
def test_a_driver_that_refuses_leaves_nothing(daemon, call, code):
    found = run(daemon, """
        buffers = [Buffer(client.device(i), 2 * MIB) for i in range(2)]
        parts = [_view.part_of(b) for b in buffers]
        def state():
            with open("/proc/self/maps") as file:
                return len(os.listdir("/proc/self/fd")), sum("stub" in line for line in file)
        before = state()
        os.environ.update(CUDA_STUB_FAIL=os.environ["CALL"], CUDA_STUB_AFTER=os.environ["AFTER"])
        try:
            _view.View(parts)
            told = "taken"
        except fmha.FmhaError as error:
            told = error.code
        print(json.dumps([told, before == state()]))
    """, CALL=call, AFTER="1" if call != "cuMemAddressReserve" else "0")
    assert found == [code, True]


RANK = """
rank, size = int(os.environ["RANK"]), 3
def gather(thing):  # over the parent's pipes
    print(json.dumps(thing), flush=True)
    return json.loads(sys.stdin.readline())
buffer = Buffer(client.device(rank % 2), 2 * MIB)
part = _view.part_of(buffer)
parts = _view.exchange(part, rank, size, gather)
view = _view.View(parts)
write(view.pointer + rank * 2 * MIB, b"of rank %d" % rank)
gather(None)
print(json.dumps([read(view.pointer + r * 2 * MIB, 9).decode() for r in range(size)]), flush=True)
"""


def test_ranks_see_each_others_pages(daemon):
    ranks = [start(daemon, RANK, RANK=str(r)) for r in range(3)]
    paths = []
    for _ in range(3):  # the paths, that all have all, that all have written
        things = [json.loads(rank.stdout.readline()) for rank in ranks]
        paths = paths or things
        for rank in ranks:
            rank.stdin.write(json.dumps(things) + "\n")
            rank.stdin.flush()
    for rank in ranks:
        said, complained = rank.communicate(timeout=60)
        assert rank.returncode == 0, complained
        assert json.loads(said) == [f"of rank {r}" for r in range(3)]
    assert not any(pathlib.Path(path).parent.exists() for path in paths), "a rank left its socket"


def test_a_pool_of_a_card_by_the_library(daemon):
    """fmha_pool_memory() is what a view maps, fmha_pool_buffer() what that card's worker computes on, and no other device."""
    found = run(daemon, """
        from fmha._lib import check, ffi, lib, new_error
        error, name = new_error(), ffi.new("char[]", b"p")

        def open_pool(device, n_pages=3):
            options, pool = ffi.new("struct fmha_pool_options *"), ffi.new("struct fmha_pool **")
            options.struct_size, options.name, options.n_pages, options.page_bytes = ffi.sizeof("struct fmha_pool_options"), name, n_pages, 4096
            options.device = device.handle if device else ffi.NULL
            check(lib.fmha_pool_open(client.handle, options, pool, error), error)
            return pool[0]

        def refusal(call):
            try:
                check(call(), error)
            except fmha.FmhaError as refused:
                return [refused.code, refused.field]
            raise AssertionError("it was taken")

        def buffer_on(index):
            return lib.fmha_pool_buffer(pool, client.device(index).handle, buffer, error)

        memory, buffer, pool = ffi.new("struct fmha_memory *"), ffi.new("struct fmha_buffer **"), open_pool(client.device(1))
        check(lib.fmha_pool_memory(pool, memory, error), error)
        told = {"bytes": memory.size, "data": lib.fmha_pool_data(pool) == ffi.NULL, "elsewhere": [refusal(lambda: buffer_on(i)) for i in (0, 2)]}
        view = _view.View([_view.Part(memory.fd, memory.size)])
        write(view.pointer + 4096, b"page 1")
        check(buffer_on(1), error)
        lib.fmha_buffer_free(buffer[0])
        second = open_pool(client.device(1), 0)
        check(lib.fmha_pool_memory(second, memory, error), error)
        other = _view.View([_view.Part(memory.fd, memory.size)])
        told["second"] = read(other.pointer + 4096, 6).decode()
        lib.fmha_pool_close(second), lib.fmha_pool_close(pool)
        told["kept"] = read(view.pointer + 4096, 6).decode()
        told["where"] = [refusal(lambda: open_pool(device, 0) and 0) for device in (None, client.device(0))]
        name = ffi.new("char[]", b"own")
        own = open_pool(None)
        told["own"] = refusal(lambda: lib.fmha_pool_memory(own, memory, error))
        other = fmha.Client()
        told["other"] = refusal(lambda: open_pool(other.device(1), 0) and 0)
        print(json.dumps(told))
    """)
    assert found == {"bytes": 2 * MIB, "data": True, "elsewhere": [["ENOTSUP", "device"]] * 2, "second": "page 1", "kept": "page 1",
                     "where": [["EINVAL", "on_device"]] * 2, "own": ["ENOTSUP", "pool"], "other": ["EINVAL", "device"]}
