# SPDX-License-Identifier: MIT
"""What only a GPU shows: graphs, streams, waiting, processes that share it. With FMHA_TEST_DEVICE=cuda."""
import gc
import os
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha  # noqa: E402
import fmha.flash_attn  # noqa: E402
import fmha.torch  # noqa: E402
from fmha import _local  # noqa: E402
from test_numpy import status  # noqa: E402
from test_torch import DEVICE, normal  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="FMHA_TEST_DEVICE=cuda runs it, on a GPU")
F16 = torch.float16


def qkv(batch=1, rows=512, heads=4, hdim=64, grad=False):
    return [normal(batch, rows, heads, hdim, dtype=F16, seed=n, grad=grad) for n in range(3)]


def captured(work):
    """(its result, a graph that makes it again)."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    return found, graph


def test_a_graph_of_fifty_layers_has_the_same_bits():
    q, k, v = qkv(rows=300)

    def layers():
        x = q
        for _ in range(50):
            x = fmha.flash_attn.flash_attn_func(x, k, v, causal=True)
        return x

    want = layers()
    found, graph = captured(layers)
    for _ in range(2):
        found.zero_()
        graph.replay()
        assert torch.equal(found, want)


def test_a_training_step_in_a_graph():
    q, k, v = qkv(grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        def step():
            return torch.autograd.grad(fmha.torch.attention(q, k, v, causal=True).float().square().sum(), (q, k, v))

        want = step()
        found, graph = captured(step)
        with torch.no_grad():
            q *= 0.5
        changed = step()
        graph.replay()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(found, changed))
    assert not torch.equal(found[0], want[0])


def test_replays_drop_other_elements():
    q, k, v = qkv()
    found, graph = captured(lambda: fmha.torch.attention(q, k, v, dropout_p=0.5))
    graph.replay()
    first = found.clone()
    graph.replay()
    assert not torch.equal(first, found)


def test_a_call_seen_before_does_not_wait_for_the_gpu():
    q, k, v = qkv(grad=True)

    def step():
        torch.autograd.grad(fmha.torch.attention(q, k, v, causal=True, dropout_p=0.1).sum(), (q, k, v))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    done = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    step()
    done.record()
    assert not done.query()


def test_two_threads_on_two_streams_run_at_once():
    q, k, v = qkv()
    want, outs = fmha.attention(q, k, v), [torch.empty_like(q) for _ in range(2)]
    blocked, other_done, wrong = torch.cuda.Event(), threading.Event(), []

    def work(out, first):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            if first:
                torch.cuda._sleep(1_000_000_000)
                blocked.record()
            for _ in range(200):
                fmha.attention(q, k, v, out=out)
            if not first:
                stream.synchronize()
                if blocked.query():
                    wrong.append("the second stream waited for the first")
                other_done.set()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(out, n == 0)) for n, out in enumerate(outs)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    torch.cuda.synchronize()
    assert other_done.is_set() and not wrong
    assert all(torch.equal(out, want) for out in outs)


def test_tensors_on_the_stream_that_made_them():
    """No call waits for work that was queued on another stream, and none overtakes its own."""
    q, k, v = qkv()
    want = fmha.attention(q * 2, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = fmha.attention(q * 2, k, v)
    stream.synchronize()
    assert torch.equal(found, want)


def test_sizes_that_change_leave_nothing_behind():
    """10,000 tensors of a caching allocator: plans, descriptors and memory stop growing, and the daemon keeps nothing."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(8192, 1, 64, generator=generator).to(DEVICE, F16)[None]

    def round_of(n):
        for _ in range(n):
            rows = int(torch.randint(1, 8192, (), generator=generator))
            q = torch.empty(1, 2, 1, 64, dtype=F16, device=DEVICE).normal_()
            fmha.attention(q, keys[:, :rows].clone(), keys[:, :rows].clone())
        torch.cuda.synchronize()
        gc.collect()
        resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        kept = [s[n] for d in status()["devices"] for s in d["worker"]["sessions"] if s["pid"] == os.getpid()
                for n in ("buffers", "memory_bytes", "plans", "events")]
        return len(_local._plans), len(os.listdir("/proc/self/fd")), resident >> 20, torch.cuda.memory_reserved() >> 20, kept

    round_of(5000)
    before = round_of(1000)
    after = round_of(4000)
    assert after[0] <= _local.KEPT and after[1] <= before[1] + 2, (before, after)
    assert after[2] <= before[2] + 64 and after[3] <= before[3] + 64 and after[4] == before[4], (before, after)


def share(rank, socket, folder):
    os.environ["FMHAD_SOCKET"] = socket
    q, k, v = qkv(grad=True)
    for _ in range(50):
        o = fmha.torch.attention(q, k, v, causal=True, deterministic=True)
        grads = torch.autograd.grad(o.float().sum(), (q, k, v))
    torch.save([t.detach().cpu() for t in (o, *grads)], f"{folder}/{rank}")


def test_two_processes_share_the_gpu(daemon, tmp_path):
    torch.multiprocessing.spawn(share, (daemon, str(tmp_path)), nprocs=2)
    q, k, v = qkv(grad=True)
    o = fmha.torch.attention(q, k, v, causal=True, deterministic=True)
    want = [o, *torch.autograd.grad(o.float().sum(), (q, k, v))]
    for rank in "01":
        assert all(torch.equal(a, b.detach().cpu()) for a, b in zip(torch.load(tmp_path / rank), want))


# ---- sizes that people have: many tiles, blocks and splits, where small problems agree in every layout ----


def gold(q, k, v, seen, g):
    """(O, dQ, dK, dV) by the definition in float64; rows first. @seen: [heads or 1, rows, keys]."""
    tensors = [t.detach().double().transpose(1, 2).requires_grad_(True) for t in (q, k, v)]
    s = tensors[0] @ tensors[1].repeat_interleave(q.shape[2] // k.shape[2], 1).transpose(2, 3) / q.shape[3] ** 0.5
    p = s.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    o = p @ tensors[2].repeat_interleave(q.shape[2] // k.shape[2], 1)
    return [t.transpose(1, 2) for t in (o, *torch.autograd.grad(o, tensors, g.double().transpose(1, 2)))]


def spans(rows, keys, n, heads):
    """bool [heads, rows, keys]: unions of @n intervals of any length, some rows without."""
    import numpy as np

    draw = np.random.default_rng(n)
    ends = np.sort(draw.integers(0, keys + 1, (heads, rows, 2 * n)), axis=-1)
    ends[draw.random((heads, rows)) < 0.02] = 0
    at = np.arange(keys)
    return sum((at >= ends[..., i, None]) & (at < ends[..., i + 1, None]) for i in range(0, 2 * n, 2)).astype(bool)


@pytest.mark.parametrize("name, rows, hdim, dtype", [
    ("documents", 4096, 128, torch.bfloat16), ("documents", 3001, 64, torch.float16), ("spans", 2304, 128, torch.bfloat16),
    ("spans", 2049, 64, torch.float16), ("bits", 2100, 128, torch.float16), ("chunks", 4096, 256, torch.bfloat16),
])
def test_masks_as_data_of_long_sequences(name, rows, hdim, dtype):
    masks, heads = fmha.masks, 4
    if name == "documents":
        mask = masks.document_mask([0, 7, rows // 3, rows // 3 + 700, rows], causal=True)
    elif name == "chunks":
        mask = masks.chunked(1000, rows)
    else:
        mask = masks.from_dense(spans(rows, rows, 3, heads)[None], bits=name == "bits")
    seen = torch.from_numpy(mask.dense())[0].cuda()
    q, k, v = (normal(1, rows, h, hdim, dtype=dtype, seed=n) for n, h in enumerate((heads, 2, 2)))
    g = normal(1, rows, heads, hdim, dtype=dtype, seed=9, grad=False)
    o = fmha.torch.attention(q, k, v, mask=mask)
    found = [o, *torch.autograd.grad(o, (q, k, v), g)]
    for what, mine, want in zip(("o", "dq", "dk", "dv"), found, gold(q, k, v, seen, g)):
        # Rounding of the result and of P and dS, by how large the tensor's elements are.
        bar = (2.0 ** -7 if dtype == torch.bfloat16 else 2.0 ** -10) * want.abs().max().item() * 2
        assert (mine.double() - want).abs().max().item() <= bar, what
    hidden = ~seen.any(-1).expand(heads, rows).T
    assert not o[0][hidden].any() and not found[1][0][hidden].any()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("rows, keys", [(1, 20011), (4, 9000), (512, 8200)])
def test_long_caches_of_8_bits(kind, rows, keys):
    """Values of one sign, so that a wrong sum of many cannot hide; pages in any order, NaN, or int8's least, in what is not used."""
    heads, kv_heads, hdim, size, factor = 8, 2, 128, 64, torch.tensor(0.02, device="cuda")
    q = normal(1, rows, heads, hdim, dtype=torch.bfloat16, grad=False)
    blocks = -(-keys // size)
    table = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(1))[:blocks][None].int().cuda()
    pages = [torch.full((blocks + 3, size, kv_heads, hdim), -128 if kind == torch.int8 else float("nan"), device="cuda").to(kind) for _ in range(2)]
    most = 127 if kind == torch.int8 else 400
    flat = [(normal(blocks * size, kv_heads, hdim, seed=n, grad=False).abs() / factor).clamp(0.1, most).to(kind) for n in (3, 4)]
    for page, x in zip(pages, flat):
        x.view(torch.uint8)[keys:] = page.view(torch.uint8)[0, 0, 0, 0]
        page.view(torch.uint8)[table[0].long()] = x.view(torch.uint8).view(blocks, size, kv_heads, hdim)
    o = fmha.flash_attn.flash_attn_with_kvcache(q, *pages, cache_seqlens=torch.tensor([keys], dtype=torch.int32, device="cuda"),
                                                block_table=table, causal=True, k_descale=factor, v_descale=factor)
    k, v = (x[:keys].double() * factor.double() for x in flat)
    seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)[None]
    want = gold(q, k[None], v[None], seen, torch.zeros_like(q))[0]
    assert (o.double() - want).abs().max().item() <= 2.0 ** -7 * want.abs().max().item()
