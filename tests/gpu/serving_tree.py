#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The daemon in a serving engine's tree of processes, on one GPU: workers that are spawned, each with its share of the heads, which capture
graphs before they serve; the daemon is killed under them, and work goes on; it comes back, and what was never asked is planned.

    FMHA_BIN=... python3 tests/gpu/serving_tree.py
"""
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "lib"))
os.environ["FMHA_BUILD"] = os.environ.get("FMHA_BIN") or os.environ.get("FMHA_BUILD", "build/release")
import fmhad  # noqa: E402

HEADS, KV_HEADS, HDIM, PAGE, LENGTHS, WORKERS = 8, 4, 64, 16, (70, 200, 33, 512), 2


def inputs(seed, batch=len(LENGTHS)):
    """q [batch, 1, heads, hdim] and a cache of pages, as all workers make them."""
    generator = torch.Generator().manual_seed(seed)
    pages = sum(-(-n // PAGE) for n in LENGTHS[:batch])
    q = torch.randn(batch, 1, HEADS, HDIM, generator=generator)
    k, v = (torch.randn(pages, PAGE, KV_HEADS, HDIM, generator=generator) for _ in range(2))
    table, used = torch.zeros(batch, 32, dtype=torch.int32), 0
    for b, n in enumerate(LENGTHS[:batch]):
        table[b, : -(-n // PAGE)] = torch.arange(used, used := used + -(-n // PAGE))
    return q, k, v, table


def exact(q, k, v, table):
    found = []
    for b, n in enumerate(LENGTHS[: len(q)]):
        keys, values = (t[table[b].long()].flatten(0, 1)[:n].double().repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        s = torch.einsum("hd,khd->hk", q[b, 0].double(), keys) * HDIM**-0.5
        found.append(torch.einsum("hk,khd->hd", s.softmax(-1), values))
    return torch.stack(found)


def worker(rank, socket, orders, answers):
    os.environ["FMHAD_SOCKET"] = socket
    import fmha.flash_attn

    share, kv_share = HEADS // WORKERS, KV_HEADS // WORKERS
    mine, mine_kv = slice(rank * share, (rank + 1) * share), slice(rank * kv_share, (rank + 1) * kv_share)

    def on_card(seed, batch=len(LENGTHS)):
        q, k, v, table = inputs(seed, batch)
        return [t.cuda().half().contiguous() for t in (q[:, :, mine], k[:, :, mine_kv], v[:, :, mine_kv])] + [table.cuda()]

    def attend(q, k, v, table, used):
        return fmha.flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, block_table=table)

    q, k, v, table = on_card(0)
    used = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    attend(q, k, v, table, used)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend(q, k, v, table, used)
    for order in iter(orders.get, None):
        try:
            kind, seed = order
            if kind == "sleep":  # contents go, addresses stay, as with vLLM's allocator
                for t in (q, k, v, o):
                    t.fill_(float("nan"))
                torch.cuda.empty_cache()
                answers.put((rank, "asleep"))
                continue
            batch = 3 if kind == "new" else len(LENGTHS)
            fresh = on_card(seed, batch)
            if kind == "graph":
                for place, t in zip((q, k, v, table), fresh):
                    place.copy_(t)
                graph.replay()
                found = o
            else:  # "seen": outside of graphs, of a shape that was seen; "new": of one that was not
                found = attend(*fresh, used[:batch])
            torch.cuda.synchronize()
            answers.put((rank, found[:, 0].float().cpu().numpy()))
        except Exception as error:  # noqa: BLE001: it is the answer
            answers.put((rank, f"{type(error).__name__}: {error}"))


def main():
    context = torch.multiprocessing.get_context("spawn")
    answers, failed = context.Queue(), []
    with fmhad.Daemon({"devices": [{"backend": "cuda"}]}) as daemon:
        orders = [context.Queue() for _ in range(WORKERS)]
        workers = [context.Process(target=worker, args=(rank, daemon.socket, orders[rank], answers)) for rank in range(WORKERS)]
        [w.start() for w in workers]

        def ask(said, kind, seed, fails=False):
            [o.put((kind, seed)) for o in orders]
            found = dict(answers.get(timeout=120) for _ in range(WORKERS))
            told = [found[rank] for rank in range(WORKERS)]
            if kind == "sleep":
                good, said_more = told == ["asleep"] * WORKERS, ""
            elif any(isinstance(t, str) for t in told):
                good, said_more = fails and all("UnreachableError" in t for t in told if isinstance(t, str)), told[0][:90]
            else:
                want = exact(*inputs(seed, 3 if kind == "new" else len(LENGTHS)))
                worst = (torch.cat([torch.from_numpy(t) for t in told], 1).double() - want).abs().max().item()
                good, said_more = worst < 4e-3 and not fails, f"{worst:.1e}"
            print(f"{'ok' if good else 'FAILED'}: {said} {said_more}", flush=True)
            if not good:
                failed.append(said)

        ask("graphs captured before serving", "graph", 1)
        ask("asleep", "sleep", 0)
        ask("awake again, by the same graphs", "graph", 2)
        daemon.kill()
        ask("the daemon was killed: graphs", "graph", 3)
        ask("without it, a shape that was seen", "seen", 4)
        ask("without it, a shape that was not: refused", "new", 5, fails=True)
        daemon.start()
        ask("it is back: a shape that was not seen", "new", 6)
        ask("graphs", "graph", 7)
        daemon.kill()
        [o.put(None) for o in orders]
        [w.join(60) for w in workers]
        failed.extend(f"a worker ended with {w.exitcode}" for w in workers if w.exitcode != 0)
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
