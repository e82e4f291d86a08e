# SPDX-License-Identifier: MIT
"""Pools of a GPU's memory, on a fake driver whose memory is that of files, which tests can look into."""
import os
import signal
import time

import fmha_wire
import pytest
from test_bounds import ATTACKER, OTHER, in_child
from test_gpu_layer import compiler  # noqa: F401
from test_gpu_layer import make_gpu as make_starting_gpu  # noqa: F401
from test_pool import PAGE, Pool, in_process, state

GPU = {"on_device": 1}


def client_of(daemon):
    return fmha_wire.Client.connect(daemon.socket)


@pytest.fixture
def make_gpu(make_starting_gpu):  # noqa: F811
    """One whose worker is ready: a pool's memory does not wait for it."""

    def make(**options):
        daemon = make_starting_gpu(**options)
        with client_of(daemon) as client:
            client.open_device(0).close()
        return daemon

    return make


def wait_for(what, found):
    until = time.monotonic() + 20
    while not found():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def kill_worker(daemon):
    before = daemon.worker_pid()
    os.kill(before, signal.SIGKILL)

    def is_another():
        (device,) = daemon.status()["devices"]
        return device["state"] == "ready" and device["worker_pid"] != before

    wait_for("another worker", is_another)


def test_pages_outlive_the_process_and_the_worker(make_gpu):
    daemon = make_gpu()

    def writes():
        pool = Pool(client_of(daemon), **GPU)
        pages = pool.lease(3)
        for page in pages:
            pool.write(page, b"of page %d" % page)
        pool.seal(pages[:2], ["one", "two"])
        return pages

    pid, pages = in_process(writes)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kill_worker(daemon)
    pool = Pool(client_of(daemon), **GPU)
    assert not pool.opened.get("created")
    found = pool.find("one", "two", "three")
    assert found == pages[:2]
    assert [pool.read(page, 12) for page in found] == [(b"of page %d" % page).ljust(12, b"\0") for page in found]
    # What it had not sealed is cleared by a worker before anybody gets it.
    wait_for("the page is free", lambda: state(daemon)["lost"] == 0 and state(daemon)["leased"] == 0)
    assert pool.read(pages[2], 12) == bytes(12)
    assert sorted(pool.lease(16)) == sorted(set(range(16)) - set(found))


def test_a_page_is_cleared_by_the_next_worker_when_there_is_none(make_gpu):
    daemon = make_gpu()
    pool = Pool(client_of(daemon), **GPU)

    def writes():
        mine = Pool(client_of(daemon), **GPU)
        (page,) = mine.lease(1)
        mine.write(page, b"secret")
        return page

    pid, page = in_process(writes)
    worker = daemon.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    time.sleep(0.2)
    assert state(daemon)["lost"] == 1 and pool.read(page, 6) == b"secret"
    os.kill(worker, signal.SIGKILL)
    wait_for("the page is free", lambda: state(daemon)["lost"] == 0 and state(daemon)["leased"] == 0)
    assert pool.read(page, 6) == bytes(6)


def test_one_memory_for_all_who_open_it_at_once(make_gpu):
    daemon = make_gpu()
    clients = [client_of(daemon) for _ in range(4)]
    numbers = [client.submit("pool_open", {"name": "p", "n_pages": 8, "page_bytes": PAGE, **GPU}) for client in clients]
    answers = [client.wait(number) for client, number in zip(clients, numbers)]
    assert sum(bool(answer.get("created")) for answer, _ in answers) == 1
    assert len({(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for _, (fd,) in answers}) == 1
    for _, (fd,) in answers:
        os.close(fd)


def test_who_waits_and_goes_leaves_a_pool_that_others_find(make_gpu):
    daemon = make_gpu()
    client = client_of(daemon)
    client.submit("pool_open", {"name": "p", "n_pages": 8, "page_bytes": PAGE, **GPU})
    client.close()
    pool = Pool(client_of(daemon), pages=8, **GPU)
    assert sorted(pool.lease(9)) == list(range(8))


@pytest.mark.parametrize("params, name, field", [
    ({"on_device": 2}, "ENOENT", "on_device"),
    ({"on_device": 0xFFFFFFFF}, "ENOENT", "on_device"),
    ({"on_device": 1, "n_spill": 4}, "ENOTSUP", "n_spill"),
    ({"on_device": 1, "n_pages": 1 << 16, "page_bytes": 1 << 32}, "ENOMEM", "n_pages"),
])
def test_what_no_gpu_has_is_refused(make_gpu, params, name, field):
    daemon = make_gpu(limits={"pool_bytes_per_uid": 1 << 49})
    with pytest.raises(fmha_wire.WireError) as refused:
        client_of(daemon).call_with_fds("pool_open", {"name": "p", "n_pages": 8, "page_bytes": PAGE, **params})
    assert (refused.value.name, refused.value.field) == (name, field)
    assert state(daemon) is None


def test_memory_is_charged_in_granules_until_the_pool_is_dropped(make_gpu):
    granule = 2 << 20
    daemon = make_gpu(limits={"pool_bytes_per_uid": 3 * granule})
    client = client_of(daemon)
    first = Pool(client, "first", 4, **GPU)
    with pytest.raises(fmha_wire.WireError) as refused:
        Pool(client, "second", 1, page_bytes=granule + PAGE, **GPU)
    assert refused.value.name == "EQUOTA"
    client.call("pool_close", {"pool": first.number})
    client.call("pool_drop", {"name": "first"})
    Pool(client, "second", 1, page_bytes=granule, **GPU)


def test_the_driver_that_has_no_memory_leaves_no_pool(make_gpu):
    daemon = make_gpu(CUDA_STUB_GRANULES="8")
    client = client_of(daemon)
    with pytest.raises(fmha_wire.WireError):
        Pool(client, "large", 64, page_bytes=1 << 20, **GPU)
    assert state(daemon, "large") is None
    Pool(client, "small", 4, **GPU)


def test_who_is_let_in_is_said_once_the_memory_is_there(make_gpu):
    """Nobody waits for memory whom the owner has put out by the time that it comes."""
    daemon = make_gpu()
    client = client_of(daemon)
    worker = daemon.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    try:
        opening = client.submit("pool_open", {"name": "p", "n_pages": 8, "page_bytes": PAGE, **GPU})
        for method, params in (("pool_share", {"name": "p", "uid": OTHER, "access": "write"}), ("pool_drop", {"name": "p"})):
            with pytest.raises(fmha_wire.WireError) as refused:
                client.call(method, params)
            assert (refused.value.name, refused.value.field) == ("EBUSY", "name")
    finally:
        os.kill(worker, signal.SIGCONT)
    _, (fd,) = client.wait(opening)
    os.close(fd)
    assert len(client.call("pool_share", {"name": "p", "uid": OTHER, "access": "write"})["share"]) == 32


def test_where_a_pool_lies_is_not_mistaken(make_gpu):
    daemon = make_gpu()
    client = client_of(daemon)
    Pool(client, "gpu", 4, **GPU)
    Pool(client, "cpu", 4)
    for name, params in (("gpu", {}), ("cpu", GPU)):
        with pytest.raises(fmha_wire.WireError) as refused:
            Pool(client, name, 4, **params)
        assert (refused.value.name, refused.value.field) == ("EINVAL", "on_device")
    assert state(daemon, "gpu")["device"] == 0 and "device" not in state(daemon, "cpu")


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become other users")
def test_another_user_writes_it_or_has_none_of_it(make_gpu):
    daemon = make_gpu(limits={})
    client = client_of(daemon)
    pool = Pool(client, **GPU)
    with pytest.raises(fmha_wire.WireError) as refused:
        client.call("pool_share", {"name": "p", "uid": OTHER, "access": "read"})
    assert (refused.value.name, refused.value.field) == ("ENOTSUP", "access")
    word = client.call("pool_share", {"name": "p", "uid": OTHER, "access": "write"})["share"]
    (page,) = pool.lease(1)
    pool.write(page, b"given")
    pool.seal([page], ["key"])

    def other():
        theirs = Pool(client_of(daemon), name="", pages=0, share=word, **GPU)
        return theirs.read(theirs.find("key")[0], 5).decode()

    def attacker():
        try:
            Pool(client_of(daemon), name="", pages=0, share=word, **GPU)
        except fmha_wire.WireError as error:
            return error.name
        return "it is open"

    os.chmod(daemon.directory, 0o755)
    os.chmod(daemon.socket, 0o666)
    assert in_child(OTHER, other) == "given"
    assert in_child(ATTACKER, attacker) == "ENOENT"
