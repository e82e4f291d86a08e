#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A paged cache over the GPUs of one host (fmha.torch.peers): the bits of one card's pages, and what reading the others' costs.

    tests/gpu/peers.py            on a host with two GPUs or more

Two ranks, each with 64 query heads on 8, head dim 128, bfloat16, pages of 64 rows; a share of each sequence's pages is the other
card's. Times are of CUDA graphs, both ranks at once and one alone; the tables of a share are measured in turns, in one run. A rate of
a copy from one card to the other stands beside. A daemon's restart and the death of the process that made pages are tried, too.
A short table comes last.
"""
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", HERE.parents[1] / "build/release"))
if (BUILD / "client/python/fmha/_abi.py").exists():
    sys.path.append(str(BUILD / "client/python"))

HEADS, KV_HEADS, HDIM, PAGE = 64, 8, 128, 64
SHARES = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)  # of pages that are the other card's
WAYS = (*SHARES, "near")  # which: all of them, copied before they are read
CASES = {  # name: (sequences, keys of each, rows of each)
    "decode, 16 x 8k": (16, 8192, 1),
    "decode, 64 x 2k": (64, 2048, 1),
    "4 rows, 16 x 8k": (16, 8192, 4),
    "chunk of 512 rows, 4 x 16k": (4, 16384, 512),
    "chunk of 2048 rows, 1 x 16k": (1, 16384, 2048),
}
ROUNDS, REPEATS = 7, 10


class Rank:
    def __init__(self):
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.cuda.set_device(self.rank)
        dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=90), device_id=torch.device("cuda", self.rank))

    def make_pages(self):
        from fmha.torch.peers import PeerPages

        pages = max(b * keys // PAGE for b, keys, _ in CASES.values())
        self.caches = [PeerPages(pages, (PAGE, KV_HEADS, HDIM)) for _ in "kv"]
        generator = self.torch.Generator("cuda").manual_seed(self.rank)
        for cache in self.caches:
            own = cache.tensor[cache.own.start:cache.own.stop]
            for part in own.split(1024):
                part.copy_(self.torch.randn(part.shape, device="cuda", generator=generator, dtype=self.torch.bfloat16))
        self.torch.cuda.synchronize()
        self.dist.barrier()

    def table(self, sequences, keys, share):
        """[sequences, pages]: page p of a sequence is the other card's for so many of each 16, spread evenly."""
        pages = keys // PAGE
        other = self.caches[0].own.start + len(self.caches[0].own)
        other = other % (self.n * len(self.caches[0].own))
        number = self.torch.arange(sequences * pages, device="cuda", dtype=self.torch.int32).view(sequences, pages)
        from_other = (self.torch.arange(pages, device="cuda") * int(share * 16)) % 16 < int(share * 16)
        return self.torch.where(from_other, other + number, self.caches[0].own.start + number).to(self.torch.int32)

    def attend(self, q, table, keys, causal, caches=None):
        from fmha.flash_attn import flash_attn_with_kvcache

        k, v = caches or [c.tensor for c in self.caches]
        lengths = self.torch.full((q.shape[0],), keys, dtype=self.torch.int32, device="cuda")
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=causal)

    def query(self, sequences, rows):
        generator = self.torch.Generator("cuda").manual_seed(7)
        return self.torch.randn(sequences, rows, HEADS, HDIM, device="cuda", generator=generator, dtype=self.torch.bfloat16)

    def is_equal(self, name, share):
        """The same bits as over copies of the pages in memory of torch's, on this card."""
        sequences, keys, rows = CASES[name]
        table, q = self.table(sequences, keys, share), self.query(sequences, rows)
        found = self.attend(q, table, keys, rows > 1)
        copies = [c.tensor.index_select(0, table.flatten()) for c in self.caches]
        dense = self.torch.arange(table.numel(), device="cuda", dtype=self.torch.int32).view(table.shape)
        wanted = self.attend(q, dense, keys, rows > 1, copies)
        return bool(self.torch.equal(found, wanted)) and bool(self.torch.isfinite(found).all()) and bool(found.any())

    def attend_near(self, q, table, keys, causal):
        (k, dense), (v, _) = (c.near(table) for c in self.caches)
        return self.attend(q, dense, keys, causal, (k, v))

    def graph(self, name, share):
        """Of pages that are all the other card's, copied first, where @share is "near"."""
        sequences, keys, rows = CASES[name]
        attend = self.attend_near if share == "near" else self.attend
        table, q = self.table(sequences, keys, 1.0 if share == "near" else share), self.query(sequences, rows)
        lengths_kept = attend(q, table, keys, rows > 1)
        stream = self.torch.cuda.Stream()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.stream(stream):
            attend(q, table, keys, rows > 1)
        stream.synchronize()
        with self.torch.cuda.graph(graph, stream=stream):
            for _ in range(REPEATS):
                attend(q, table, keys, rows > 1)
        return graph, (table, q, lengths_kept)

    def timed(self, graph):
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / REPEATS

    def measure(self, name, alone):
        """{share: us}, medians of rounds in which each share has a turn; @alone: this rank while the other waits."""
        graphs = {share: self.graph(name, share) for share in WAYS}
        times = {share: [] for share in WAYS}
        for turn in range(self.n if alone else 1):
            self.dist.barrier()
            if not alone or turn == self.rank:
                for _ in range(ROUNDS):
                    for share in WAYS:
                        if not alone:
                            self.dist.barrier()
                        self.torch.cuda.synchronize()
                        times[share].append(self.timed(graphs[share][0]))
                self.torch.cuda.synchronize()
        self.dist.barrier()
        return {share: statistics.median(t) for share, t in times.items()}

    def copy_rate(self):
        """GB/s at which this card copies the other's pages, and its own."""
        cache, found = self.caches[0], []
        own = cache.tensor[cache.own.start:cache.own.stop]
        first = (cache.own.start + len(cache.own)) % (self.n * len(cache.own))
        other, target = cache.tensor[first:first + len(cache.own)], self.torch.empty_like(own)
        for turn in range(self.n):
            self.dist.barrier()
            if turn == self.rank:
                for source in (other, own):
                    # Torch would take a copy between cards for one within this card: a kernel reads, as attention does.
                    self.torch.add(source, 0, out=target)
                    begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(5):
                        self.torch.add(source, 0, out=target)
                    end.record()
                    end.synchronize()
                    found.append(source.numel() * 2 * 5 / begin.elapsed_time(end) / 1e6)
        self.dist.barrier()
        return found


def rank_main(out):
    r = Rank()
    r.make_pages()
    wrong = [f"{name}, {share}" for name in CASES for share in SHARES if not r.is_equal(name, share)]
    found = {"wrong": wrong, "tried": len(CASES) * len(SHARES), "copy": r.copy_rate()}
    for name in CASES:
        found[name] = {way: r.measure(name, way == "alone") for way in ("alone", "both")}
    gathered = [None] * r.n
    r.dist.all_gather_object(gathered, found)
    if r.rank == 0:
        pathlib.Path(out).write_text(json.dumps(gathered))
    r.dist.barrier()
    r.dist.destroy_process_group()


def survives_main():
    """What a daemon's restart leaves of pages: the bytes. One process."""
    import fmha
    import torch
    from fmha.torch.peers import PeerPages

    pages = PeerPages(64, (PAGE, KV_HEADS, HDIM))
    pages.tensor.fill_(3)
    torch.cuda.synchronize()
    fmha.stop()
    fmha.start(config={"tuning": {"automatic": False}}, timeout=60)
    assert bool((pages.tensor == 3).all()), "pages did not outlive the daemon"
    more = PeerPages(64, (PAGE, KV_HEADS, HDIM))
    assert not bool(more.tensor.any()), "new pages are not zero"
    fmha.stop()
    print("survived")


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--rank":
        return rank_main(sys.argv[2])
    if sys.argv[1:] == ["--survives"]:
        import fmha

        fmha.start(config={"tuning": {"automatic": False}}, timeout=60)
        return survives_main()
    import fmha
    import torch

    if torch.cuda.device_count() < 2:
        print("two GPUs are needed", file=sys.stderr)
        return 77
    start = time.monotonic()
    fmha.start(config={"tuning": {"automatic": False}}, timeout=60)
    out = pathlib.Path(tempfile.mkdtemp(prefix="peers-")) / "found"
    status = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "--rank", out],
                            env={**os.environ, "NCCL_NVLS_ENABLE": "0"}, timeout=300).returncode
    fmha.stop()
    survived = subprocess.run([sys.executable, __file__, "--survives"], capture_output=True, text=True, timeout=120)
    good = status == 0 and survived.stdout.strip().endswith("survived")
    if not good:
        print(survived.stdout, survived.stderr[-2000:])
    print(f"\n2 x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {time.monotonic() - start:.0f} s in all")
    if out.exists():
        ranks = json.loads(out.read_text())
        good &= not any(r["wrong"] for r in ranks)
        print(f"equal to one card's pages: {sum(r['tried'] - len(r['wrong']) for r in ranks)} of {sum(r['tried'] for r in ranks)}",
              *(w for r in ranks for w in r["wrong"][:5]))
        print("read by a kernel, GB/s: other card " + ", ".join(f"{r['copy'][0]:.0f}" for r in ranks)
              + "; own " + ", ".join(f"{r['copy'][1]:.0f}" for r in ranks))
        print("| us, then of one's own pages | ranks | own | " + " | ".join(f"{share:.1%}" for share in SHARES[1:]) + " | 100 %, copied first |")
        for name in CASES:
            for way in ("alone", "both"):
                us = {share: max(r[name][way][str(share)] for r in ranks) for share in WAYS}
                print(f"| {name} | {way} | {us[0.0]:.1f} | " + " | ".join(f"{us[share] / us[0.0]:.2f}" for share in WAYS[1:]) + " |")
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
