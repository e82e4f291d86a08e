#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast a pool's pages go to its file and come back, beside writes and reads past the page cache on the same disk in the same run.

    tests/bench/pool_disk.py [--mib 256] [--page-kib 256] [--folder build/bench]
"""
import argparse
import mmap
import os
import pathlib
import struct
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "lib"))
import fmhad

RUN = 4 << 20


def disk_itself(path, data):
    """Seconds to write and to read as much, as dd oflag=direct bs=4M does; with the page cache where there is no other way."""
    times, memory = [], mmap.mmap(-1, RUN)
    for flags, move in ((os.O_WRONLY | os.O_CREAT, os.writev), (os.O_RDONLY, os.readv)):
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            fd = os.open(path, flags, 0o600)
        begin = time.perf_counter()
        for at in range(0, len(data), RUN):
            if move is os.writev:
                memory[:] = data[at:at + RUN]
            move(fd, [memory])
        times.append(time.perf_counter() - begin)
        os.close(fd)
    os.unlink(path)
    return times


def call(client, pool, method, **params):
    found = client.call(f"pool_{method}", {"pool": pool, **params})
    return found.get("pages", b""), found.get("coming", 0)


def in_batches(items, size, n=1024):
    return (items[at:at + n * size] for at in range(0, len(items), n * size))


def pool_on(folder, data, page_bytes):
    """Seconds until all of @data is in the file, and until it is back."""
    n = len(data) // page_bytes
    keys = b"".join(struct.pack("<Q24x", i) for i in range(n))
    with fmhad.Daemon({"pool_spill": str(folder), "limits": {"pool_bytes_per_uid": 1 << 40, "pool_bytes": 1 << 40}}) as daemon:
        client = daemon.client()
        opened, (fd,) = client.call_with_fds("pool_open", {"name": "disk", "n_pages": n, "page_bytes": page_bytes, "n_spill": n})
        pool = opened["pool"]
        pages = b"".join(call(client, pool, "lease", n=len(some) // 32)[0] for some in in_batches(keys, 32))
        with mmap.mmap(fd, n * page_bytes) as memory:
            memory[:] = data
        begin = time.perf_counter()
        for some, named in zip(in_batches(pages, 4), in_batches(keys, 32)):
            call(client, pool, "seal", pages=some, keys=named)
            call(client, pool, "give_back", pages=some)
        while (found := daemon.status()["front"]["pools"][0])["filed"] < n:
            assert not found["file_failures"], found
            time.sleep(0.005)
        written = time.perf_counter() - begin
        assert found["written"] == n, found
        pages = b"".join(call(client, pool, "lease", n=len(some) // 32)[0] for some in in_batches(keys, 32))
        for some in in_batches(pages, 4):
            call(client, pool, "give_back", pages=some)
        begin, here = time.perf_counter(), b""
        for some in in_batches(keys, 32):
            while True:
                here, coming = call(client, pool, "find", keys=some)
                if not coming:
                    break
                call(client, pool, "give_back", pages=here)
                time.sleep(0.002)
            assert len(here) == len(some) // 8, "not all came back"
        read = time.perf_counter() - begin
        assert daemon.status()["front"]["pools"][0]["restored"] == n, "they had not left memory"
        return written, read


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--page-kib", type=int, default=256)
    parser.add_argument("--folder", default="build/bench")
    o = parser.parse_args()
    pathlib.Path(o.folder).mkdir(parents=True, exist_ok=True)
    data = os.urandom(RUN) * (o.mib // 4)
    with tempfile.TemporaryDirectory(dir=o.folder) as folder:
        # A folder each: a daemon finds what the one before it has written there, and would write nothing.
        rounds = [(disk_itself(f"{folder}/itself", data), pool_on(pathlib.Path(folder) / f"pools{i}", data, o.page_kib << 10)) for i in range(3)]
    print(f"{o.mib} MiB of pages of {o.page_kib} KiB, GB/s, the best of three   pool's file   disk itself")
    for i, what in enumerate(("sealed pages to the file", "back into memory")):
        pool, disk = (len(data) / min(r[part][i] for r in rounds) / 1e9 for part in (1, 0))
        print(f"{what:60} {pool:9.2f} {disk:13.2f}   {pool / disk:.2f} of it")


if __name__ == "__main__":
    main()
