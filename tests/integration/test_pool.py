# SPDX-License-Identifier: MIT
"""Pools: pages that outlive their users, whatever ends these, and that only one user's processes have."""
import contextlib
import json
import mmap
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import time

import fmha_wire
import fmhad
import pytest
from test_bounds import ATTACKER, OTHER, SANITIZED, in_child

PAGE = 4096
sys.path.insert(0, str(fmhad.ROOT / "tests/demo"))


def numbers(data):
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def pack(pages):
    return struct.pack(f"<{len(pages)}I", *pages)


def key_of(word):
    return str(word).encode().ljust(32, b".")


class Pool:
    """One that a connection has open."""

    def __init__(self, client, name="p", pages=16, page_bytes=PAGE, **params):
        self.client = client
        if pages:
            params.update(n_pages=pages, page_bytes=page_bytes)
        self.opened, (fd,) = client.call_with_fds("pool_open", {"name": name, **params})
        self.number, self.page_bytes = self.opened["pool"], self.opened["page_bytes"]
        prot = mmap.PROT_READ if self.opened.get("read_only") else mmap.PROT_READ | mmap.PROT_WRITE
        self.map = mmap.mmap(fd, self.opened["n_pages"] * self.page_bytes, prot=prot)
        self.fd = fd

    def lease(self, n):
        return numbers(self.client.call("pool_lease", {"pool": self.number, "n": n})["pages"])

    def seal(self, pages, words):
        return numbers(self.client.call("pool_seal", {"pool": self.number, "pages": pack(pages),
                                                      "keys": b"".join(map(key_of, words))})["pages"])

    def find(self, *words):
        found = self.client.call("pool_find", {"pool": self.number, "keys": b"".join(map(key_of, words))})
        self.coming = found.get("coming", 0)
        return numbers(found["pages"])

    def give_back(self, pages):
        self.client.call("pool_give_back", {"pool": self.number, "pages": pack(pages)})

    def write(self, page, text):
        self.map[page * self.page_bytes:page * self.page_bytes + len(text)] = text

    def read(self, page, n):
        return self.map[page * self.page_bytes:page * self.page_bytes + n]


def state(daemon, name="p"):
    found = [pool for pool in daemon.status()["front"]["pools"] if pool["name"] == name]
    return found[0] if found else None


def in_process(function, *arguments):
    """A child that says what it found, and lives until it is killed: (pid, what it said)."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(send, json.dumps(function(*arguments)).encode() + b"\n")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(send)
    with open(receive, encoding="utf-8") as pipe:
        line = pipe.readline()
    assert line, "the child said nothing"
    return pid, json.loads(line)


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# ---- life and death ----


def fill(daemon):
    """Three pages sealed, two written and leased only."""
    pool = Pool(daemon.client())
    pages = pool.lease(5)
    for page in pages:
        pool.write(page, b"page %d" % page)
    pool.seal(pages[:3], ["a", "b", "c"])
    in_process.kept = pool  # for as long as the child lives
    return pages


def test_what_a_killed_process_had_sealed_stays_and_the_rest_is_emptied(daemon):
    pid, pages = in_process(fill, daemon)
    pool = Pool(daemon.client())
    assert not pool.opened.get("created")
    assert state(daemon)["leased"] == 2
    end(pid)
    assert pool.find("a", "b", "c", "d") == pages[:3]
    assert [pool.read(page, 6) for page in pages[:3]] == [b"page %d" % page for page in pages[:3]]
    assert fmhad.until(lambda: state(daemon)["free"] == 13)
    assert state(daemon)["lost"] == 0 and state(daemon)["users"] == 1
    leased = pool.lease(16)
    assert len(leased) == 13 and set(pages[3:]) <= set(leased)
    assert all(pool.read(page, PAGE) == bytes(PAGE) for page in pages[3:])


def leave(daemon):
    """The connection ends, the process goes on and has the memory."""
    client = daemon.client()
    pool = Pool(client)
    pages = pool.lease(2)
    client.close()
    in_process.kept = pool
    return pages


def test_pages_of_a_lost_connection_wait_for_the_end_of_its_process(daemon):
    pid, pages = in_process(leave, daemon)
    pool = Pool(daemon.client())
    assert fmhad.until(lambda: state(daemon)["lost"] == 2)
    assert not set(pages) & set(pool.lease(16))
    time.sleep(0.1)
    assert state(daemon)["lost"] == 2, "pages that somebody may write were given away"
    end(pid)
    assert fmhad.until(lambda: state(daemon)["lost"] == 0)
    assert set(pool.lease(16)) == set(pages)


def test_a_dropped_pool_waits_for_nobody(daemon):
    pid, _ = in_process(leave, daemon)
    assert fmhad.until(lambda: state(daemon)["lost"] == 2)
    assert any("fmhad pool" in name for name in fmhad.open_files(daemon.pid))
    with daemon.client() as client:
        client.call("pool_drop", {"name": "p"})
        assert fmhad.until(lambda: not any("fmhad pool" in name for name in fmhad.open_files(daemon.pid)))
    end(pid)


def test_who_closes_a_pool_has_done_with_its_pages(daemon):
    client = daemon.client()
    first, second = Pool(client), Pool(client)
    assert first.number != second.number
    pages = first.lease(4)
    first.write(pages[0], b"left")
    first.seal(pages[1:2], ["k"])
    client.call("pool_close", {"pool": first.number})
    assert fmhad.until(lambda: state(daemon)["free"] == 15)
    assert state(daemon)["pinned"] == 0 and state(daemon)["sealed"] == 1
    assert second.read(pages[0], 4) == bytes(4)
    with pytest.raises(fmha_wire.WireError, match="no pool"):
        first.lease(1)


def test_pages_go_in_the_order_in_which_they_were_let_go(daemon):
    pool = Pool(daemon.client(), pages=3)
    pages = pool.lease(3)
    pool.seal(pages, "abc")
    assert pool.lease(1) == []
    pool.give_back([pages[1]])
    pool.give_back([pages[0]])
    assert pool.find("a") == [pages[0]]
    assert pool.lease(3) == [pages[1]]
    assert pool.find("b") == [] and pool.find("a", "b") == [pages[0]]
    assert state(daemon)["evictions"] == 1


def test_the_second_to_seal_gets_the_first_ones_page(daemon):
    first, second = Pool(daemon.client()), Pool(daemon.client())
    (mine,), (theirs,) = first.lease(1), second.lease(1)
    assert first.seal([mine], ["same"]) == [mine]
    assert second.seal([theirs], ["same"]) == [mine]
    second.give_back([theirs])
    assert second.find("same") == [mine]
    second.give_back([mine])
    # Of a seal that is refused half way nobody hears which pages there are.
    (theirs,) = second.lease(1)
    with pytest.raises(fmha_wire.WireError, match="not leased"):
        second.seal([theirs, mine], ["same", "other"])
    second.give_back([theirs])
    # It stays for the second, who reads it, when the first needs it no more and others want pages.
    first.give_back([mine])
    assert mine not in first.lease(16) and state(daemon)["pinned"] == 1
    second.give_back([mine])
    assert first.lease(16) == [mine]


@pytest.mark.parametrize("kills", [60])
def test_kills_at_any_moment_lose_no_page(daemon, kills):
    """Processes that lease, write, seal, look up and give back until they are killed; what is found is whole."""
    kills = int(os.environ.get("FMHA_POOL_KILLS", kills))
    rng = random.Random(3)

    def work(seed):
        mine = random.Random(seed)
        pool = Pool(daemon.client(), pages=32)
        while True:
            for page in pool.lease(mine.randrange(1, 4)):
                word = mine.randrange(40)
                pool.write(page, key_of(word))
                if mine.random() < 0.7:
                    sealed = pool.seal([page], [word])
                    pool.give_back(sealed)
                    if sealed == [page]:
                        continue
                pool.give_back([page])
            found = pool.find(*mine.sample(range(40), 3))
            pool.give_back(found)

    judge, alive, killed = Pool(daemon.client(), pages=32), {}, 0
    while killed < kills:
        while len(alive) < 4:
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    work(rng.random() + killed + len(alive))
                os._exit(1)
            alive[pid] = True
            rng.random()
        time.sleep(rng.uniform(0, 0.01))
        pid = rng.choice(list(alive))
        del alive[pid]
        end(pid)
        killed += 1
        word = rng.randrange(40)
        for page in judge.find(word):
            assert judge.read(page, 32) == key_of(word)
            judge.give_back([page])
    for pid in list(alive):
        end(pid)
    assert fmhad.until(lambda: state(daemon)["users"] == 1)
    found = state(daemon)
    assert found["free"] + found["sealed"] == 32 and found["pinned"] == found["leased"] == found["lost"] == 0


def test_a_daemon_stops_while_pools_are_open(make_daemon):
    daemon = make_daemon()
    pool = Pool(daemon.client())
    pool.lease(3)
    assert daemon.stop() in (0, None)
    pool.write(0, b"the memory is still here")


# ---- limits ----


def test_a_user_has_so_many_pools_and_bytes(make_daemon):
    daemon = make_daemon({"limits": {"pools_per_uid": 2, "pool_bytes_per_uid": 1 << 20}})
    client = daemon.client()
    Pool(client, "one", pages=100)
    for name, pages, what in (("two", 200, "bytes of pools"), ("two", 100, None), ("three", 1, "pools")):
        if what:
            with pytest.raises(fmha_wire.WireError, match=what) as refused:
                Pool(client, name, pages=pages)
            assert refused.value.name == "EQUOTA"
        else:
            Pool(client, name, pages=pages)
    client.close()
    assert fmhad.until(lambda: all(pool["users"] == 0 for pool in daemon.status()["front"]["pools"]))
    client = daemon.client()
    for name in ("one", "two"):
        client.call("pool_drop", {"name": name})
    Pool(client, "three", pages=200)  # all was given back
    assert [pool["name"] for pool in daemon.status()["front"]["pools"]] == ["three"]


def test_a_connection_has_so_many_open(daemon):
    client = daemon.client()
    for _ in range(64):
        Pool(client)
    with pytest.raises(fmha_wire.WireError, match="64 pools open"):
        Pool(client)


def test_a_pool_that_nobody_has_open_ends_after_a_time(make_daemon):
    daemon = make_daemon({"limits": {"pool_idle_s": 1}})
    client, other = daemon.client(), daemon.client()
    Pool(client, "open")
    Pool(other, "left")
    other.close()
    assert state(daemon, "left")
    assert fmhad.until(lambda: state(daemon, "left") is None)
    assert state(daemon, "open")


def test_one_that_is_open_is_not_dropped(daemon):
    client = daemon.client()
    Pool(client)
    with pytest.raises(fmha_wire.WireError) as refused:
        daemon.client().call("pool_drop", {"name": "p"})
    assert refused.value.name == "EBUSY"
    client.close()
    assert fmhad.until(lambda: state(daemon)["users"] == 0)
    daemon.client().call("pool_drop", {"name": "p"})
    assert state(daemon) is None


# ---- other users, and what is no request ----


def look_around(daemon):
    """What another user's process can do with the names, numbers and keys of this one's."""
    client = daemon.client()
    found = {"pools": daemon.status()["front"]["pools"]}
    for method, params in (("pool_open", {"name": "p"}), ("pool_drop", {"name": "p"}),
                           *((f"pool_{what}", {"pool": number, **more}) for number in (0, 1, 2) for what, more in (
                               ("lease", {"n": 1}), ("find", {"keys": key_of("a")}), ("close", {}),
                               ("give_back", {"pages": pack([0])}), ("seal", {"pages": pack([0]), "keys": key_of("x")})))):
        try:
            client.call(method, params)
            found[f"{method} {params}"] = "done"
        except fmha_wire.WireError as error:
            assert error.name == "ENOENT", (method, params, error)
    own = Pool(client, "p")
    found["own"] = [own.opened["created"], own.find("a"), own.read(0, 4) == bytes(4)]
    return found


def test_another_user_has_other_pools(make_daemon):
    daemon = make_daemon(open_to_all=True)

    def fill_as_owner():
        return fill(daemon) and json.dumps(state(daemon)["sealed"])

    assert in_child(OTHER, fill_as_owner) == "3"
    assert in_child(ATTACKER, look_around, daemon) == {"pools": [], "own": [True, [], True]}
    assert {pool["uid"] for pool in daemon.status()["front"]["pools"]} == {OTHER, ATTACKER}


# ---- users who are let in ----


def refused(function, *arguments, **words):
    """The name of the error."""
    try:
        function(*arguments, **words)
    except fmha_wire.WireError as error:
        return error.name
    return "done"


def read_what_is_shared(daemon, share, text):
    """What a user can do with what another has shared with somebody to be read."""
    client = daemon.client()
    if (why := refused(Pool, client, "", pages=0, share=share)) != "done":
        return why
    pool = Pool(client, "", pages=0, share=share)
    pages = pool.find("a")
    found = {"pages": len(pages), "text": pool.read(pages[0], len(text)) == text, "lease": refused(pool.lease, 1),
             "seal": refused(pool.seal, pages, ["x"]), "read_only": pool.opened["read_only"]}
    for what, attempt in (("map", lambda: mmap.mmap(pool.fd, PAGE)), ("write", lambda: os.pwrite(pool.fd, b"x", 0)),
                          ("reopen", lambda: os.open(f"/proc/self/fd/{pool.fd}", os.O_RDWR)), ("mode", lambda: os.fchmod(pool.fd, 0o666)),
                          ("truncate", lambda: os.ftruncate(pool.fd, 0))):
        try:
            attempt()
            found[what] = "done"
        except OSError:
            found[what] = "refused"
    pool.give_back(pages)
    return found


def test_only_who_is_let_in_reads_and_nobody_of_them_writes(make_daemon):
    daemon = make_daemon(open_to_all=True)

    def as_owner():
        client = daemon.client()
        pool = Pool(client)
        pages = pool.lease(2)
        pool.write(pages[0], b"the owner's")
        pool.seal(pages[:1], ["a"])
        share = client.call("pool_share", {"name": "p", "uid": ATTACKER, "access": "read"})["share"]
        in_process.kept = client, pool
        return share.hex()

    def as_owner_here():
        fmhad.become(OTHER)
        return as_owner()

    pid, share = in_process(as_owner_here)
    share = bytes.fromhex(share)
    try:
        assert len(share) == 32 and state(daemon)["shares"] == 1
        forged = [bytes(32), share[:31] + bytes([share[31] ^ 1]), share[:31], share + b"x", b"p"]
        for guess in forged:
            assert in_child(ATTACKER, read_what_is_shared, daemon, guess, b"") in ("ENOENT", "EINVAL"), guess
        assert in_child(ATTACKER - 2, read_what_is_shared, daemon, share, b"") == "ENOENT", "it is for one user alone"
        found = in_child(ATTACKER, read_what_is_shared, daemon, share, b"the owner's")
        assert found == {"pages": 1, "text": True, "lease": "EPERM", "seal": "EPERM", "read_only": True, "map": "refused", "write": "refused",
                         "reopen": "refused", "mode": "refused", "truncate": "refused"}
        for method, params in (("pool_share", {"name": "p", "uid": 5, "access": "write"}), ("pool_drop", {"name": "p"})):
            assert in_child(ATTACKER, lambda m=method, p=params: refused(daemon.client().call, m, p)) == "ENOENT"
        assert fmhad.until(lambda: state(daemon)["pinned"] == 1 and state(daemon)["users"] == 1), "what is left is the owner's own"
    finally:
        end(pid)


def test_who_is_let_in_to_write_does_and_loses_it_when_the_owner_says_so(make_daemon):
    daemon = make_daemon(open_to_all=True)
    client = daemon.client()
    own = Pool(client)

    def member(share):
        fmhad.become(OTHER)
        theirs = daemon.client()
        pool = Pool(theirs, "", pages=0, share=share)
        pages = pool.lease(3)
        pool.write(pages[0], b"a member's")
        in_process.kept = theirs, pool
        return pool.seal(pages[:1], ["m"])

    share = client.call("pool_share", {"name": "p", "uid": OTHER, "access": "write"})["share"]
    pid, pages = in_process(member, share)
    assert own.find("m") == pages and own.read(pages[0], 10) == b"a member's"
    assert refused(client.call, "pool_share", {"name": "p", "uid": os.getuid(), "access": "read"}) == "EINVAL"
    client.call("pool_share", {"name": "p", "uid": OTHER, "access": "none"})
    assert state(daemon)["shares"] == 0
    # What it had leased waits for its end, as with any other.
    assert fmhad.until(lambda: state(daemon)["lost"] == 2)
    assert in_child(OTHER, read_what_is_shared, daemon, share, b"") == "ENOENT"
    end(pid)
    assert fmhad.until(lambda: state(daemon)["lost"] == 0 and state(daemon)["users"] == 1)
    share = client.call("pool_share", {"name": "p", "uid": OTHER, "access": "write"})["share"]
    pid, _ = in_process(member, share)
    client.call("pool_close", {"pool": own.number})
    assert fmhad.until(lambda: refused(client.call, "pool_drop", {"name": "p"}) == "done")  # whoever was let in holds nobody up
    assert fmhad.until(lambda: not any("fmhad pool" in name for name in fmhad.open_files(daemon.pid)))
    end(pid)


def test_a_pool_is_shared_with_so_many(make_daemon):
    daemon = make_daemon()
    client = daemon.client()
    Pool(client)
    for uid in range(32):
        client.call("pool_share", {"name": "p", "uid": 1000 + uid, "access": "read"})
    assert refused(client.call, "pool_share", {"name": "p", "uid": 999, "access": "read"}) == "EQUOTA"
    client.call("pool_share", {"name": "p", "uid": 1007, "access": "write"})  # another for one who has one
    assert state(daemon)["shares"] == 32


# ---- files ----


@pytest.fixture(name="filed")
def make_filed(make_daemon, tmp_path):
    """A daemon whose pools have files, and how to start the next one."""
    def make(folder=tmp_path / "pools", **limits):
        return make_daemon({"pool_spill": str(folder), "limits": limits})

    return make


def put(pool, *words):
    """Pages that say which key they have, sealed and let go."""
    for word in words:
        (page,) = pool.lease(1)
        pool.write(page, key_of(word) * (PAGE // 32))
        pool.give_back(pool.seal([page], [word]))


def found_again(pool, *words):
    """Asks until nothing is coming any more; how many of the first are found, each with what was put there."""
    fmhad.until(lambda: pool.give_back(pool.find(*words)) or pool.coming == 0)
    pages = pool.find(*words)
    for page, word in zip(pages, words):
        assert pool.read(page, PAGE) == key_of(word) * (PAGE // 32), word
    pool.give_back(pages)
    return len(pages)


def test_what_memory_has_no_room_for_comes_back_from_the_file(filed):
    daemon = filed()
    pool = Pool(daemon.client(), pages=8, n_spill=64)
    for start in range(0, 40, 4):
        put(pool, *range(start, start + 4))
        assert fmhad.until(lambda n=start + 4: state(daemon)["filed"] == n)
    assert pool.find(0) == [] and pool.coming == 1
    for start in range(0, 40, 4):
        assert found_again(pool, *range(start, start + 4)) == 4
    found = state(daemon)
    assert found["restored"] >= 32 and found["file_failures"] == 0 and found["free"] + found["sealed"] == 8
    assert found["pinned"] == found["leased"] == 0


def test_a_full_file_keeps_what_went_last(filed):
    daemon = filed()
    pool = Pool(daemon.client(), pages=4, n_spill=6)
    for word in range(20):
        put(pool, word)
        assert fmhad.until(lambda n=word: state(daemon)["written"] == n + 1)
    assert state(daemon)["filed"] == 6
    assert found_again(pool, 15) == 1 and found_again(pool, 3) == 0


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_daemon_finds_what_is_whole(filed, signal_number, tmp_path):
    daemon = filed()
    pool = Pool(daemon.client(), pages=16, n_spill=32, layout="l")
    put(pool, *range(12))
    assert fmhad.until(lambda: state(daemon)["filed"] == 12)
    os.kill(daemon.pid, signal_number)
    daemon.process.wait()
    (file,) = (tmp_path / "pools").iterdir()
    whole = file.read_bytes()
    at = whole.index(key_of(7) * 3)
    with open(file, "r+b") as bent:  # one bit of one page
        bent.seek(at + 1000)
        bent.write(bytes([whole[at + 1000] ^ 4]))
    daemon = filed()
    pool = Pool(daemon.client(), pages=16, n_spill=32, layout="l")
    assert pool.opened["created"]
    assert fmhad.until(lambda: state(daemon)["filed"] == 12)
    assert found_again(pool, *range(7)) == 7 and found_again(pool, *range(8, 12)) == 4
    assert found_again(pool, 7) == 0 and state(daemon)["file_failures"] == 1
    assert state(daemon)["free"] == 5


@pytest.mark.parametrize("other", [{"pages": 17}, {"n_spill": 31}, {"layout": "m"}, {"page_bytes": 2 * PAGE}])
def test_a_file_of_another_pool_is_not_believed(filed, other):
    words = {"pages": 16, "n_spill": 32, "layout": "l"}
    daemon = filed()
    put(Pool(daemon.client(), **words), "a")
    assert fmhad.until(lambda: state(daemon)["filed"] == 1)
    daemon.stop()
    daemon = filed()
    pool = Pool(daemon.client(), **{**words, **other})
    if "pages" in other:  # how much of it was in memory is no matter
        assert fmhad.until(lambda: state(daemon)["filed"] == 1) and found_again(pool, "a") == 1
    else:
        put(pool, "b")
        assert fmhad.until(lambda: state(daemon)["filed"] == 1) and found_again(pool, "a") == 0


def test_files_have_limits_and_end_with_their_pools(filed, tmp_path, daemon):
    folder = tmp_path / "pools"
    assert refused(Pool, daemon.client(), n_spill=4) == "ENOTSUP"
    daemon = filed(pool_spill_bytes_per_uid=1 << 20)
    client = daemon.client()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert refused(Pool, client, n_spill=300) == "EQUOTA" and refused(Pool, client, n_spill=1 << 19) == "EINVAL"
    Pool(client, n_spill=200)
    assert refused(Pool, client, "q", n_spill=100) == "EQUOTA"
    assert fmhad.until(lambda: [f.name for f in folder.iterdir()] == [f"{os.getuid()}-p.pool"])
    client.close()
    assert fmhad.until(lambda: state(daemon)["users"] == 0)
    client = daemon.client()
    client.call("pool_drop", {"name": "p"})
    assert fmhad.until(lambda: not list(folder.iterdir()))
    pool = Pool(client, n_spill=200)  # all was given back
    put(pool, "a")
    assert fmhad.until(lambda: state(daemon)["filed"] == 1)
    daemon.stop()
    daemon = filed()
    daemon.client().call("pool_drop", {"name": "p"})  # of the daemon before
    assert fmhad.until(lambda: not list(folder.iterdir()))
    assert refused(daemon.client().call, "pool_drop", {"name": "p"}) == "ENOENT"


def test_files_that_no_pool_has_are_swept(filed, tmp_path):
    folder = tmp_path / "pools"
    folder.mkdir(mode=0o700)

    def names():
        return sorted(f.name for f in folder.iterdir())

    for name, age in (("5-old.pool", 5000), ("5-new.pool", 10), ("5-x.pool.gone", 0), ("notes", 5000)):
        (folder / name).write_bytes(b"x" * 1000)
        os.utime(folder / name, (time.time() - age,) * 2)
    filed(pool_spill_bytes=1999)
    assert fmhad.until(lambda: names() == ["5-new.pool", "notes"])
    daemon = filed(pool_idle_s=1)
    client = daemon.client()
    Pool(client, n_spill=4)
    assert fmhad.until(lambda: names() == [f"{os.getuid()}-p.pool", "notes"])


def test_copies_of_a_dropped_pool_leave_the_next_ones_file_alone(filed, tmp_path):
    big, n = 128 << 10, 64
    client = filed().client()
    for attempt in range(16):
        pool = Pool(client, pages=n, page_bytes=big, n_spill=n, layout="dropped")
        assert fmhad.until(lambda: list((tmp_path / "pools").glob("*.pool")))
        pages = pool.lease(n)
        for page in pages:
            pool.write(page, b"x" * big)
        pool.seal(pages, range(n))
        client.call("pool_close", {"pool": pool.number})
        time.sleep(attempt % 8 * 0.001)  # the copies are on their way
        client.call("pool_drop", {"name": "p"})
        pool = Pool(client, pages=n, page_bytes=big, n_spill=n, layout="next")
        (file,) = fmhad.until(lambda: list((tmp_path / "pools").glob("*.pool")))
        time.sleep(0.05)
        assert not any(file.read_bytes()[PAGE:2 * PAGE]), "entries that nobody has written"
        client.call("pool_close", {"pool": pool.number})
        client.call("pool_drop", {"name": "p"})


@contextlib.contextmanager
def small_disk(folder):
    folder.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", folder], capture_output=True).returncode:
        pytest.skip("no small disk can be made here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill_up(file):
    with contextlib.suppress(OSError), open(file, "wb", buffering=0) as stuff:
        while stuff.write(bytes(PAGE)):
            pass


def test_a_disk_that_was_full_when_a_pool_began_is_tried_again(filed, tmp_path):
    with small_disk(tmp_path / "small") as small:
        daemon = filed(small)
        fill_up(small / "stuff")
        pool = Pool(daemon.client(), n_spill=4)
        put(pool, "a")
        assert fmhad.until(lambda: "pages are not copied" in daemon.log())
        assert state(daemon)["filed"] == 0 and pool.find("a") == [0]
        (small / "stuff").unlink()
        assert fmhad.until(lambda: pool.find("b") or state(daemon)["filed"] == 1)
        daemon.stop()


def test_a_full_disk_costs_copies_alone(filed, tmp_path):
    with small_disk(tmp_path / "small") as small:
        daemon = filed(small)
        pool = Pool(daemon.client(), pages=64, n_spill=64)
        put(pool, *range(40))
        assert fmhad.until(lambda: state(daemon)["file_failures"] > 0)
        found = state(daemon)
        assert found["sealed"] == 40 and found["filed"] < 16
        assert found_again(pool, *range(40)) == 40, "memory has them all"
        assert "pages are not copied" in daemon.log()
        daemon.stop()


# ---- what is no request ----


def test_a_hostile_client_costs_only_itself(daemon):
    """Keys, pages and handles that it never had, of pools that others have open and of its own that have ended, while one goes on."""
    rng = random.Random(11)
    victim = Pool(daemon.client(), pages=64)
    held = victim.lease(20)
    for page in held:
        victim.write(page, key_of(page))
    victim.seal(held[:10], range(10))
    rivals = [daemon.client() for _ in range(3)]
    pools = [Pool(client, pages=64) for client in rivals]
    for step in range(3000):
        pool = pools[step % 3]
        number = rng.choice([pool.number, pool.number + rng.randrange(1, 5), 0, 2**32 - 1, victim.number])
        pages = pack([rng.choice([*held, 0, 63, 64, 2**31, 2**32 - 1]) for _ in range(rng.randrange(0, 6))])
        keys = b"".join(rng.choice([key_of(rng.randrange(12)), rng.randbytes(32), bytes(32), b"\xff" * 32])
                        for _ in range(len(pages) // 4 if rng.random() < 0.7 else rng.randrange(6)))
        method, params = rng.choice([("seal", {"pages": pages, "keys": keys}), ("find", {"keys": keys}), ("give_back", {"pages": pages}),
                                     ("lease", {"n": rng.choice([0, 1, 5, 1025])}), ("share", {"name": "q", "uid": 7, "access": "write"})])
        name = refused(pool.client.call, f"pool_{method}", params if method == "share" else {"pool": number, **params})
        assert name in ("done", "EINVAL", "ENOENT"), name
        if step % 100 == 0:
            pool.client.call("pool_close", {"pool": pool.number})
            pools[step % 3] = Pool(pool.client, pages=64)
    for page in held:
        assert victim.read(page, 32) == key_of(page)
    assert victim.find(*range(10)) == held[:10]
    victim.give_back(held[10:])  # still its own
    for client in rivals:
        client.close()
    # What the rivals had leased waits for the end of their process, which is this one.
    assert fmhad.until(lambda: state(daemon)["leased"] == 0 and state(daemon)["pinned"] == 10)
    found = state(daemon)
    assert found["free"] + found["sealed"] + found["lost"] == 64


@pytest.mark.parametrize("params, field", [
    ({"name": ""}, "name"), ({"name": "a/b"}, "name"), ({"name": "x" * 64}, "name"), ({"name": "p q"}, "name"),
    ({"name": "new"}, "name"), ({"name": "new", "n_pages": 4}, "page_bytes"),
    ({"name": "new", "n_pages": 4, "page_bytes": 4095}, "page_bytes"), ({"name": "new", "n_pages": 65537, "page_bytes": 4096}, "n_pages"),
    ({"name": "new", "n_pages": 65536, "page_bytes": 1 << 63}, "page_bytes"), ({"name": "p", "n_pages": 15, "page_bytes": 4096}, "n_pages"),
    ({"name": "new", "n_pages": 65536, "page_bytes": 1 << 46}, "n_pages"),
    ({"name": "new", "n_pages": (1 << 30) + 1, "page_bytes": 4096}, "n_pages"),
    ({"name": "new", "n_pages": (1 << 32) - 1, "page_bytes": 4096}, "n_pages"),
    ({"name": "p", "n_pages": 16, "page_bytes": 8192}, "page_bytes"), ({"name": "p", "layout": "other"}, "layout"),
])
def test_what_is_no_pool_is_refused(daemon, params, field):
    client = daemon.client()
    Pool(client, layout="mine")
    with pytest.raises(fmha_wire.WireError) as refused:
        client.call("pool_open", params)
    assert refused.value.field == field and refused.value.name in ("EINVAL", "ENOENT", "EQUOTA"), refused.value
    assert len(daemon.status()["front"]["pools"]) == 1


@pytest.mark.parametrize("method, params, field", [
    ("lease", {"n": 0}, "n"), ("lease", {"n": 1025}, "n"), ("lease", {"n": 1, "pool": 77}, "pool"),
    ("find", {"keys": b"x" * 33}, "keys"), ("find", {"keys": b"x" * 32800}, "keys"), ("seal", {"pages": b"123", "keys": b""}, "keys"),
    ("seal", {"pages": pack([0]), "keys": b"x" * 31}, "keys"), ("seal", {"pages": pack([99]), "keys": key_of("z")}, "pages"),
    ("seal", {"pages": pack([5]), "keys": key_of("z")}, "pages"), ("seal", {"pages": pack([0, 0]), "keys": key_of("y") + key_of("z")}, "pages"),
    ("give_back", {"pages": b"12345"}, "pages"), ("give_back", {"pages": pack([2**32 - 1])}, "pages"),
    ("give_back", {"pages": pack([5])}, "pages"), ("give_back", {"pages": pack([1, 1])}, "pages"),
])
def test_what_is_no_request_is_answered_and_leaves_the_pool_whole(daemon, method, params, field):
    client, other = daemon.client(), daemon.client()
    pool = Pool(client)
    assert pool.lease(2) == [0, 1]
    theirs = Pool(other).lease(1)
    try:
        client.call(f"pool_{method}", {"pool": pool.number, **params})
        raise AssertionError("it was taken")
    except fmha_wire.WireError as error:
        assert error.name in ("EINVAL", "ENOENT") and error.field == field, error
    except fmha_wire.Disconnected:
        assert len(params["keys"]) > 32768  # more than one bin may have: a broken frame
        return
    assert state(daemon)["leased"] + state(daemon)["free"] + state(daemon)["sealed"] == 16
    with pytest.raises(fmha_wire.WireError, match="not leased"):
        pool.give_back(theirs)


def test_nobody_changes_the_size_of_the_memory(daemon):
    pool = Pool(daemon.client())
    for size in (0, PAGE, 17 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)


# ---- the package and the demo ----


PACKAGE = fmhad.build_dir() / "client/python"
needs_package = pytest.mark.skipif(not (PACKAGE / "fmha/_abi.py").exists() or SANITIZED, reason="no Python package, or a sanitizer")


@needs_package
def test_a_server_is_killed_and_the_next_one_goes_on():
    import pool_demo

    found = pool_demo.run(160, 12)
    assert found["equal"] and found["whole"] and found["ended"] == 0, found
    assert found["hits"] == found["pages"] == 9 and found["longer_hits"] >= 9


@needs_package
def test_the_package(daemon):
    program = """
        import os, sys
        import numpy as np
        import fmha
        from fmha.pool import Pool, chain_keys, drop
        keys = chain_keys(range(40), 16, "m")
        assert len(keys) == 2 and keys == chain_keys(list(range(40)) + [7], 16, "m") and keys != chain_keys(range(40), 16, "n")
        with Pool("a", (16, 2, 32), "float16", 8, layout="l") as pool:
            assert pool.created and pool.pages.shape == (8, 16, 2, 32) and pool.pages.strides[0] == 4096
            mine = pool.lease(2)
            pool.pages[mine[0]] = 1.5
            assert pool.seal(mine[:1], keys[:1]) == mine[:1]
            with Pool("a", (16, 2, 32), "float16") as other:
                assert other.find(keys) == mine[:1] and (other.pages[mine[0]] == 1.5).all()
                for refused in (lambda: Pool("a", (16, 2, 32), "float32", 9), lambda: Pool("none", (16,)),
                                lambda: Pool("a", (4096, 2), "float32"), lambda: pool.seal([1], []), lambda: pool.find([b"short"]),
                                lambda: pool.give_back([7]), lambda: drop("a"), lambda: pool.give_back([float(mine[1])]),
                                lambda: Pool("a\\0b", (16, 2, 32), "float16"), lambda: drop("a\\0b"), lambda: pool.find(["k" * 32]),
                                lambda: Pool("b", (1 << 40, 1 << 40), pages=1), lambda: chain_keys([1.5, 2.5], 1, "m"), lambda: chain_keys([2**64 - 1], 1, "m"),
                                lambda: chain_keys([[1, 2]], 1, "m"), lambda: chain_keys([1], 1, "m", after=b"short")):
                    try:
                        refused()
                    except fmha.FmhaError:
                        continue
                    raise AssertionError("it was taken")
            q = np.random.randn(1, 1, 4, 32).astype(np.float16)
            table, lengths = np.array([[mine[0]]], np.int32), np.array([16], np.int32)
            shared = fmha.attention(q, pool.pages, pool.pages, block_table=table, seqlens_k=lengths)
            copied = fmha.attention(q, pool.pages.copy(), pool.pages.copy(), block_table=table, seqlens_k=lengths)
            assert (shared == copied).all()
            pid = os.fork()
            if pid == 0:  # a child has none of it
                os._exit(0 if "fmhad pool" not in open("/proc/self/maps").read() else 1)
            assert os.waitpid(pid, 0)[1] == 0
        drop("a")
        print("good")
    """
    import textwrap

    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "FMHA_CLIENT_LIBRARY": str(fmhad.build_dir() / "client/libfmha_client.so.1"),
           "FMHAD_SOCKET": daemon.socket}
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout == "good\n", result.stderr


@needs_package
def test_a_device_with_memory_of_its_own_has_no_pool(make_daemon):
    daemon = make_daemon(fmhad.FAKE)
    program = ("import fmha\nfrom fmha._lib import check, ffi, lib, new_error\nfrom fmha.pool import Pool\np = Pool('a', (1024,), pages=4)\n"
               "device, error = fmha.Client().device(), new_error()\ntry:\n"
               "    check(lib.fmha_pool_buffer(p.handle, device.handle, ffi.new('struct fmha_buffer **'), error), error)\n"
               "except fmha.NotSupportedError as e:\n    print(e)\n")
    assert "does not compute on" in run_with_package(daemon, program)


def run_with_package(daemon, program):
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "FMHA_CLIENT_LIBRARY": str(fmhad.build_dir() / "client/libfmha_client.so.1"),
           "FMHAD_SOCKET": daemon.socket}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_package
def test_the_package_shares_and_files(filed):
    daemon = filed()
    program = f"CTL = {str(fmhad.find_program('fmhactl'))!r}" + """
import json, os, subprocess, time
import fmha
from fmha.pool import Pool, chain_keys, share
keys = chain_keys(range(64), 16, "m")
assert keys[2:] == chain_keys(range(32, 64), 16, "m", after=keys[1])
with Pool("a", (1024,), pages=4, spill_pages=16) as pool:
    for n, key in enumerate(keys + [bytes([n]) * 32 for n in range(4)]):
        (page,) = pool.lease(1)
        pool.pages[page] = n
        pool.give_back(pool.seal([page], [key]))
        while json.loads(subprocess.check_output([CTL, "pool", "--json", "--socket", os.environ["FMHAD_SOCKET"]]))[0]["filed"] <= n:
            time.sleep(0.01)
    assert pool.find(keys) == [] and pool.coming > 0
    while pool.coming:
        pool.give_back(pool.find(keys[:2]))
    assert [pool.pages[page][7] for page in pool.find(keys[:2])] == [0, 1]
    for refused in (lambda: share("none", 5), lambda: share("a", -1), lambda: share("a", 1 << 32), lambda: share("a\\0b", 5),
                    lambda: share("a", 5, "all"), lambda: share("a", os.getuid()), lambda: Pool("", (1024,), share=b"x"),
                    lambda: Pool("", (1024,), share=bytes(32))):
        try:
            refused()
        except fmha.FmhaError:
            continue
        raise AssertionError("it was taken")
    assert len(share("a", os.getuid() + 1, "write")) == 32 and share("a", os.getuid() + 1, "none") == bytes(32)
print("good")
"""
    assert run_with_package(daemon, program) == "good\n"


@needs_package
def test_a_pool_whose_daemon_has_gone_says_so(make_daemon):
    daemon = make_daemon()
    program = ("import sys, fmha\nfrom fmha.pool import Pool\np = Pool('a', (1024,), pages=4)\np.lease(1)\nprint('open', flush=True)\n"
               "sys.stdin.readline()\np.pages[0] = 1\ntry:\n    p.lease(1)\nexcept fmha.UnreachableError as e:\n    print(e)\n")
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "FMHA_CLIENT_LIBRARY": str(fmhad.build_dir() / "client/libfmha_client.so.1"),
           "FMHAD_SOCKET": daemon.socket}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    daemon.stop()
    said, _ = process.communicate("\n", timeout=60)
    assert "went away" in said or "was lost" in said
