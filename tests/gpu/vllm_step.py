#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A layer's step as vLLM makes it, by its own FlashAttention-3 and by fmhad, on the same batches and caches.

    python3 tests/gpu/vllm_step.py VLLM [--only TEXT] [--rehearse]

VLLM: a folder with vLLM's wheel unpacked: its Python part and vllm_flash_attn/_vllm_fa3_C. Of the engine nothing else is needed:
builders of metadata, implementations and their arguments are vLLM's classes (fmha_vllm's for fmhad), a batch is what its model
runner makes of one, graphs are captured as that does: for the longest sequence that the model takes, by tokens of a batch. "piecewise":
attention outside of vLLM's graphs, where the host knows the batch; timed in a graph all the same. What vLLM
imports on the way and this machine lacks is a stand-in, and the cache is written by vLLM's Triton kernel on both sides.

A step is the builder's work and a replay of one graph of LAYERS layers, each writing its cache and attending. Per layer: cache update
and attention, microseconds on the device; build: until the builder returns. Tokens: steps of decoding by a small model whose layers
are these; the two have to choose the same.

--rehearse: on a CPU without graphs, FlashAttention's two functions by the formula: whether everything fits.
"""
import argparse
import math
import pathlib
import statistics
import sys
import time
import types

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/lib"))
import stand_ins  # noqa: E402

LAYERS, PAGE, LONGEST = 4, 16, 32768
MISSING = frozenset(
    "regex psutil zmq urllib3 cbor2 transformers huggingface_hub safetensors aiohttp requests openai_harmony openai PIL pybase64 uvloop cpuinfo "
    "prometheus_client xgrammar fastapi partial_json_parser llguidance tqdm einops".split())


def bring_vllm(folder, rehearse):
    """(vLLM's module flash_attn, fmha_vllm's module backend)."""
    sys.path[:0] = [folder, str(ROOT / "client/engines/vllm")]
    stand_ins.install(MISSING)
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules[name] = stand_ins.Module(name)
    import vllm.platforms
    from vllm.platforms import cuda

    vllm.platforms._current_platform = cuda.NonNvmlCudaPlatform() if rehearse else cuda.CudaPlatform()
    if rehearse:
        attention = types.ModuleType("vllm.vllm_flash_attn")
        attention.__path__ = []
        attention.FA2_AVAILABLE, attention.FA3_AVAILABLE = False, True
        attention.flash_attn_varlen_func, attention.get_scheduler_metadata = by_formula, lambda **_: torch.zeros(8, dtype=torch.int32)
        attention.compile_flash_attn_varlen_func_from_specs = None
        attention.is_fa_version_supported, attention.fa_version_unsupported_reason = lambda v: v == 3, lambda v: "rehearsed"
        sys.modules["vllm.vllm_flash_attn"] = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"] = attention
        cuda.NonNvmlCudaPlatform.get_device_capability = classmethod(lambda *_, **__: cuda.DeviceCapability(9, 0))
    import vllm._custom_ops
    import vllm.v1.attention.backends.fa_utils as fa_utils

    if rehearse:
        write = written
    else:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash as write
    vllm._custom_ops.reshape_and_cache_flash = fa_utils.reshape_and_cache_flash = write
    from fmha_vllm import backend

    if rehearse:
        backend._reads_in_place = lambda _: True
    from vllm.v1.attention.backends import flash_attn

    flash_attn.reshape_and_cache_flash = write
    return flash_attn, backend


def written(key, value, k_cache, v_cache, slots, *_):
    good = slots >= 0
    at = slots[good] // PAGE, slots[good] % PAGE
    k_cache[at], v_cache[at] = key[: len(slots)][good], value[: len(slots)][good]


def by_formula(q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, window_size, softcap, **_):
    assert causal and list(window_size) == [-1, -1] and not softcap
    starts = cu_seqlens_q.tolist()
    for b, n in enumerate(seqused_k.tolist()):
        rows = q[starts[b] : starts[b + 1]]
        if len(rows) and n:
            pages = block_table[b, : -(-n // PAGE)].long()
            keys, values = (t[pages].flatten(0, 1)[:n].float().repeat_interleave(q.shape[1] // t.shape[2], 1) for t in (k, v))
            s = torch.einsum("qhd,khd->hqk", rows.float(), keys) * softmax_scale
            s = s.masked_fill(torch.ones(len(rows), n, dtype=torch.bool).triu(n - len(rows) + 1), -math.inf)
            out.view(-1, *q.shape[1:])[starts[b] : starts[b + 1]] = torch.einsum("hqk,khd->qhd", s.softmax(-1), values).to(out.dtype)
    return out


class Batch:
    """What vLLM's model runner keeps of a batch in fixed places: graphs read them. Padded to @max_requests and @tokens."""

    def __init__(self, device, requests, tokens, max_requests, n_blocks):
        self.device, self.n, self.tokens = device, max_requests, tokens
        self.starts = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.table = torch.zeros(max_requests, LONGEST // PAGE, dtype=torch.int32, device=device)
        self.slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        pages = torch.randperm(n_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1  # 0 is padding's
        table, used = torch.zeros(self.table.shape, dtype=torch.int32), 0
        for b, (_, length) in enumerate(requests):
            n = -(-(length + 64) // PAGE)
            table[b, :n] = pages[used : used + n]
            used += n
        self.table.copy_(table)
        self.fill(requests)

    def fill(self, requests):
        """Rows of each request and its keys, these included."""
        rows = [r for r, _ in requests] + [0] * (self.n - len(requests))
        lengths = [n for _, n in requests] + [0] * (self.n - len(requests))
        self.starts_cpu = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.starts.copy_(self.starts_cpu)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        owners = torch.repeat_interleave(torch.arange(self.n), torch.tensor(rows))
        places = torch.cat([torch.arange(n - r, n) for r, n in zip(rows, lengths)])
        slots = self.table.cpu()[owners, places // PAGE].long() * PAGE + places % PAGE
        self.slots.fill_(-1)
        self.slots[: len(slots)].copy_(slots)
        self.longest = max(rows), max(lengths)

    def common(self, kind, capturing=False):
        longest_q, longest_k = self.longest
        if capturing:
            longest_q, longest_k = 1 if kind == "decode" else self.tokens, LONGEST
        from vllm.v1.attention.backend import CommonAttentionMetadata

        return CommonAttentionMetadata(
            query_start_loc=self.starts, query_start_loc_cpu=self.starts_cpu, seq_lens=self.lengths, num_reqs=self.n,
            num_actual_tokens=self.tokens, max_query_len=longest_q, max_seq_len=longest_k, block_table_tensor=self.table,
            slot_mapping=self.slots, causal=True)


def config_of(heads, max_requests, tokens):
    """What the builders read of vLLM's configuration."""
    space = types.SimpleNamespace
    return space(
        model_config=space(get_num_attention_heads=lambda _: heads, rswa_window=None, is_mm_prefix_lm=False,
                           hf_config=space(model_type="llama"), dtype=torch.bfloat16),
        parallel_config=space(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
        cache_config=space(cache_dtype="auto"), kernel_config=space(enable_jit_warmup=False),
        compilation_config=space(cudagraph_mode=space(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=tokens,
                                 static_forward_context={}),
        attention_config=space(flash_attn_max_num_splits_for_cuda_graph=32, flash_attn_version=None),
        scheduler_config=space(max_num_seqs=max_requests, max_num_batched_tokens=tokens), speculative_config=None)


class Side:
    """One backend over its own caches."""

    def __init__(self, module, names, shape, batch, kind, device, dtype, n_blocks):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        heads, kv_heads, hdim = shape
        flash_attn = sys.modules["vllm.v1.attention.backends.flash_attn"]
        flash_attn.get_layers_from_vllm_config = lambda *_: {}
        flash_attn.get_num_attention_heads_from_layers = lambda *_: heads
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=kv_heads, head_size=hdim, dtype=dtype)
        self.builder = getattr(module, names[1])(spec, ["layer"], config_of(heads, batch.n, batch.tokens), device)
        self.impl = getattr(module, names[0])(heads, hdim, hdim**-0.5, kv_heads, None, None, "auto")
        one = torch.ones(1, device=device)
        self.layer = types.SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        generator = torch.Generator(device=device).manual_seed(5)
        self.caches = [torch.randn(n_blocks, kv_heads, PAGE, 2 * hdim, generator=generator, device=device, dtype=dtype) for _ in range(LAYERS)]
        self.batch, self.kind, self.graph, self.exact = batch, kind, None, False
        self.out = torch.zeros(batch.tokens, heads, hdim, device=device, dtype=dtype)

    def build(self, capturing=False):
        common = self.batch.common(self.kind, capturing)
        return self.builder.build_for_cudagraph_capture(common) if capturing else self.builder.build(0, common)

    def layers(self, metadata, q, k, v):
        for cache in self.caches:
            self.impl.do_kv_cache_update(self.layer, k, v, cache, self.batch.slots)
            self.impl.forward(self.layer, q, k, v, cache, metadata, self.out)

    def capture(self, work):
        """Runs @work(metadata) once, then as a graph if this is a GPU."""
        metadata = self.build(capturing=not self.exact)
        work(metadata)
        if self.out.is_cuda:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                work(metadata)
        else:
            self.graph = types.SimpleNamespace(replay=lambda: work(metadata))

    def step(self):
        self.build()
        self.graph.replay()


class Case:
    def __init__(self, name, kind, requests, shape=(32, 8, 128), max_requests=None, tokens=None, exact=False):
        self.name, self.kind, self.requests, self.shape, self.exact = name, kind, requests, shape, exact
        self.max_requests = max_requests or len(requests)
        self.tokens = tokens or sum(r for r, _ in requests)


def lengths(n, least, most, seed=0):
    return torch.randint(least, most + 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def cases():
    decode = [(n, least, most) for n, least, most in ((1, 1024, 1024), (1, 16384, 16384), (8, 512, 8192), (32, 512, 4096), (64, 512, 8192), (128, 256, 2048),
                                                      (256, 256, 2048))]
    for n, least, most in decode:
        yield Case(f"decode {n} x {least}..{most}", "decode", [(1, k) for k in lengths(n, least, most)])
    yield Case("decode 64 x 512..8192, heads 64/8", "decode", [(1, k) for k in lengths(64, 512, 8192)], shape=(64, 8, 128))
    yield Case("decode 64 x 512..4096, heads 8/1", "decode", [(1, k) for k in lengths(64, 512, 4096)], shape=(8, 1, 128))
    for chunk, before, others in ((512, 1536, 31), (512, 15872, 31), (2048, 0, 63), (2048, 14336, 63)):
        requests = [*((1, k) for k in lengths(others, 512, 4096)), (chunk, before + chunk)]
        name = f"{chunk} rows of {before + chunk} and {others} x 512..4096"
        yield Case(f"mixed {name}", "mixed", requests, max_requests=64, tokens=-(-(chunk + others) // 64) * 64)
        yield Case(f"piecewise {name}", "mixed", requests, exact=True)
    yield Case("mixed prefill 4 x 2048", "mixed", [(2048, 2048)] * 4, max_requests=8)
    yield Case("piecewise prefill 4 x 2048", "mixed", [(2048, 2048)] * 4, exact=True)


def times(sides, n):
    """{name: (us of a layer on the device, us until build() returns, us of a step of all)}, medians of turns."""
    found = {name: ([], [], []) for name in sides}
    for _ in range(7):
        for name, side in sides.items():
            side.step()
            a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda.synchronize()
            a.record()
            for _ in range(n):
                side.graph.replay()
            b.record()
            for _ in range(n):
                side.step()
            c.record()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                side.build()
            host = (time.perf_counter() - start) / n
            torch.cuda.synchronize()
            for kept, us in zip(found[name], (a.elapsed_time(b) / n / LAYERS * 1e3, host * 1e6, b.elapsed_time(c) / n * 1e3)):
                kept.append(us)
    return {name: tuple(map(statistics.median, three)) for name, three in found.items()}


def made_sides(modules, case, device, dtype):
    n_blocks = 1 + sum(-(-(k + 64) // PAGE) for _, k in case.requests)
    names = {"fa3": ("FlashAttentionImpl", "FlashAttentionMetadataBuilder"), "fmha": ("FmhaImpl", "FmhaMetadataBuilder")}
    sides = {}
    for side, module in modules.items():
        batch = Batch(device, case.requests, case.tokens, case.max_requests, n_blocks)
        sides[side] = Side(module, names[side], case.shape, batch, case.kind, device, dtype, n_blocks)
        sides[side].exact = case.exact
    return sides


def compare(modules, case, device, dtype):
    """Prints the case's line. Return: whether outputs are equal enough."""
    sides = made_sides(modules, case, device, dtype)
    heads, kv_heads, hdim = case.shape
    q, k, v = (torch.randn(case.tokens, h, hdim, generator=torch.Generator().manual_seed(h + i)).to(device, dtype)
               for i, h in enumerate((heads, kv_heads, kv_heads)))
    for side in sides.values():
        side.capture(lambda metadata, side=side: side.layers(metadata, q, k, v))
        side.out.zero_()
        side.step()
    rows = sum(r for r, _ in case.requests)
    a, b = (sides[n].out[:rows].float() for n in ("fa3", "fmha"))
    worst = ((a - b).abs().max() / a.abs().max()).item()
    good = worst < 2e-2 and bool(a.abs().sum() > 0)
    said = f"{'' if good else 'WRONG '}{worst:.0e}"
    if device.type == "cuda":
        found = times(sides, 20)
        (fa3, fa3_build, fa3_step), (fmha, fmha_build, fmha_step) = found["fa3"], found["fmha"]
        print(f"| {case.name} | {fa3:.1f} | {fmha:.1f} | {fa3 / fmha:.2f} | {fa3_build:.0f} | {fmha_build:.0f} | {fa3_step:.0f} | {fmha_step:.0f} "
              f"| {fa3_step / fmha_step:.2f} | {said} |", flush=True)
    else:
        print(f"| {case.name} | {said} |", flush=True)
    return good


class Model:
    """A few random weights around a Side: enough that one wrong row changes what comes next."""

    WORDS = 512

    def __init__(self, side, shape, device, dtype):
        heads, kv_heads, hdim = shape
        generator = torch.Generator(device=device).manual_seed(11)

        def weight(*extents):
            return torch.randn(extents, generator=generator, device=device, dtype=dtype) * extents[0] ** -0.5

        width = 512
        self.side, self.shape = side, shape
        self.embedding, self.head = weight(self.WORDS, width) * self.WORDS**0.5, weight(width, self.WORDS)
        self.into = [weight(width, (heads + 2 * kv_heads) * hdim) for _ in range(LAYERS)]
        self.back = [weight(heads * hdim, width) for _ in range(LAYERS)]
        self.words = torch.zeros(side.batch.tokens, dtype=torch.int64, device=device)
        self.margin = torch.zeros(side.batch.tokens, device=device)

    def work(self, metadata):
        heads, kv_heads, hdim = self.shape
        x = self.embedding[self.words]
        for cache, into, back in zip(self.side.caches, self.into, self.back):
            q, k, v = (torch.nn.functional.rms_norm(x, x.shape[-1:]) @ into).split([heads * hdim, kv_heads * hdim, kv_heads * hdim], -1)
            q, k, v = (t.reshape(len(t), -1, hdim).contiguous() for t in (q, k, v))
            self.side.impl.do_kv_cache_update(self.side.layer, k, v, cache, self.side.batch.slots)
            self.side.impl.forward(self.side.layer, q, k, v, cache, metadata, self.side.out)
            x = x + 4 * (self.side.out.flatten(1) @ back)
        logits = torch.nn.functional.rms_norm(x, x.shape[-1:]).float() @ self.head.float()
        best = logits.topk(2, -1)
        self.words.copy_(best.indices[:, 0])
        self.margin.copy_(best.values[:, 0] - best.values[:, 1])


def tokens(modules, case, device, dtype, steps=24):
    """Prints how many tokens of both are the same, each decoding on its own. Return: whether all are, but where the two best words are near."""
    said = {}
    for name, side in made_sides(modules, case, device, dtype).items():
        for cache in side.caches:
            cache.mul_(0.5)
        model = Model(side, case.shape, device, dtype)
        model.words.copy_(torch.arange(case.tokens) % Model.WORDS)
        side.capture(model.work)
        model.words.copy_(torch.arange(case.tokens) % Model.WORDS)
        said[name] = []
        for i in range(steps):
            side.batch.fill([(r, n + i) for r, n in case.requests])
            side.step()
            said[name].append((model.words.tolist(), model.margin.tolist()))
    same = near = 0
    apart = set()
    for (a, margins), (b, _) in zip(said["fa3"], said["fmha"]):
        for row, (x, y, margin) in enumerate(zip(a, b, margins)):
            if row in apart:
                continue
            if x == y:
                same += 1
            else:
                apart.add(row)
                near += margin < 0.05
    distinct = len({w for words, _ in said["fa3"] for w in words})
    print(f"tokens, {case.name}: {same} the same, {len(apart)} requests parted, {near} of them where the two best were within 0.05; {distinct} words", flush=True)
    return len(apart) == near and same > steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vllm")
    parser.add_argument("--only", default="")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.rehearse:
        globals()["LONGEST"] = 1024
    modules = dict(zip(("fa3", "fmha"), bring_vllm(options.vllm, options.rehearse)))
    device, dtype = torch.device("cpu" if options.rehearse else "cuda"), torch.float32 if options.rehearse else torch.bfloat16
    chosen = [Case("decode 3 x 20..70", "decode", [(1, k) for k in (20, 33, 70)], shape=(4, 2, 16)),
              Case("mixed 9 rows of 40 and 2", "mixed", [(1, 20), (1, 50), (9, 40)], shape=(4, 2, 16), max_requests=5, tokens=16),
              Case("piecewise 9 rows of 400 and 2", "mixed", [(1, 20), (1, 500), (9, 400)], shape=(4, 2, 16), exact=True)
              ] if options.rehearse else list(cases())
    chosen = [c for c in chosen if options.only in c.name]
    if not options.rehearse:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {LAYERS} layers, pages of {PAGE}")
        print("| batch | FA3, us a layer | fmhad | ratio | FA3's build, us | fmhad's | FA3's step, us | fmhad's | ratio | difference |")
        print("|--|" + "--:|" * 9)
    good = True
    with torch.no_grad():
        for case in chosen:
            try:
                good &= compare(modules, case, device, dtype)
            except Exception as error:  # noqa: BLE001: the others are run
                good = False
                print(f"| {case.name} | failed: {type(error).__name__}: {error} |", flush=True)
        for case in [c for c in chosen if c.kind == "decode" and len(c.requests) in (3, 8, 64)][:2]:
            good &= tokens(modules, case, device, dtype)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
