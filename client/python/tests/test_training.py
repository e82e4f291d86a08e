# SPDX-License-Identifier: MIT
"""fmha::attention in training: selective checkpointing, FLOP counters, and two processes with DTensor, FSDP and autocast, by gloo."""
import os
import socket

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha.torch  # noqa: E402
from fmha import _run  # noqa: E402

RANKS = 2


def _inputs(kv_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    return (torch.randn(4, 12, 4, 16, dtype=dtype, requires_grad=True), torch.randn(4, 10, kv_heads, 16, dtype=dtype, requires_grad=True),
            torch.randn(4, 10, kv_heads, 16, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing_saves_the_operator_that_it_is_told_to(saved, monkeypatch):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    asked, own = [], _run.execute
    monkeypatch.setattr(_run, "execute", lambda tensors, options, *a, **w: asked.append(options.op) or own(tensors, options, *a, **w))

    def policy(context, operator, *args, **words):
        keep = saved and operator is torch.ops.fmha.attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = _inputs()
    want = torch.autograd.grad(fmha.torch.attention(*(t * 2 for t in inputs), causal=True).square().sum(), inputs)
    asked.clear()
    o = checkpoint(lambda *t: fmha.torch.attention(*(x * 2 for x in t), causal=True), *inputs, use_reentrant=False,
                   context_fn=lambda: create_selective_checkpoint_contexts(policy))
    found = torch.autograd.grad(o.square().sum(), inputs)
    assert asked.count("forward") == (1 if saved else 2) and asked.count("backward") == 1
    assert all(map(torch.equal, found, want))


def _rank(rank, port, name):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        globals()[name](rank)
    finally:
        torch.distributed.destroy_process_group()


def _two(name):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (port, name), nprocs=RANKS)


def _mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (RANKS,))


def split_by_batch_and_by_heads(rank):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = _mesh()
    inputs = _inputs()
    bias, sink = torch.randn(1, 1, 12, 10, requires_grad=True), torch.randn(4, requires_grad=True)
    leaves = (*inputs, bias, sink)
    words = {"bias": bias, "sink": sink, "window": (7, 3)}
    want, lse = fmha.torch.attention(*inputs, **words, return_lse=True)
    grad = torch.randn_like(want)
    gradients = torch.autograd.grad((want, lse), leaves, (grad, torch.ones_like(lse)))
    for axis in (0, 2):  # batch, heads
        cut = [distribute_tensor(t.detach(), mesh, [Shard(axis)]).requires_grad_() for t in inputs]
        whole = [distribute_tensor(t.detach(), mesh, [Replicate()]).requires_grad_() for t in (bias, sink)]
        o, l = fmha.torch.attention(*cut, bias=whole[0], sink=whole[1], window=(7, 3), return_lse=True)
        assert isinstance(o, DTensor) and o.placements == (Shard(axis),) and l.placements == (Shard(0 if axis == 0 else 1),)
        assert o.to_local().shape[axis] == want.shape[axis] // RANKS  # nothing was gathered
        found = torch.autograd.grad((o, l), (*cut, *whole), (distribute_tensor(grad, mesh, [Shard(axis)]), torch.ones_like(l)))
        torch.testing.assert_close(o.full_tensor(), want, atol=1e-6, rtol=1e-6)
        for a, b in zip(found, gradients):
            torch.testing.assert_close(a.full_tensor(), b, atol=5e-6, rtol=5e-6)


def heads_that_do_not_divide_are_gathered(rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh()
    inputs = _inputs(kv_heads=1)
    want = fmha.torch.attention(*inputs)
    cut = [distribute_tensor(t.detach(), mesh, [Shard(2 if t.shape[2] > 1 else 0)]) for t in inputs]
    with torch.no_grad():
        torch.testing.assert_close(fmha.torch.attention(*cut).full_tensor(), want.detach(), atol=1e-6, rtol=1e-6)


class _Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        return x + self.out(fmha.torch.attention(q, k, v, causal=True).flatten(2))


def fully_sharded_under_autocast(rank):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    alone = torch.nn.Sequential(_Block(), _Block())
    model = torch.nn.Sequential(_Block(), _Block())
    model.load_state_dict(alone.state_dict())
    x = torch.randn(RANKS * 2, 9, 32)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            want = alone(x).float().square().mean()
            loss = model(x[rank * 2 : rank * 2 + 2]).float().square().mean()
        alone.zero_grad()
        model.zero_grad()
        want.backward()
        loss.backward()
        bar = 3e-2 if autocast else 1e-5
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, atol=bar, rtol=bar)


def torchs_context_parallelism_by_the_slot(rank):
    """torch's context_parallel splits the operator of GPUs alone: on a CPU it is called by its name."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options
    from torch.nn import functional as F
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("fmha")
    own = F.scaled_dot_product_attention

    def scaled_dot_product_attention(q, k, v, is_causal):  # by its name torch finds what it wraps
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 16 * RANKS, 32) for _ in range(4)]
    try:
        for causal in (False, True):
            leaves = [t.clone().requires_grad_() for t in whole[:3]]
            want = own(*leaves, is_causal=causal)
            want.backward(whole[3])
            asked, execute = [], _run.execute
            _run.execute = lambda tensors, options, *a, **w: asked.append(options.op) or execute(tensors, options, *a, **w)
            F.scaled_dot_product_attention = scaled_dot_product_attention
            buffers = [t.clone() for t in (*whole, want.detach(), *(t.grad for t in leaves))]
            _cp_options.enable_load_balance = causal
            with context_parallel(_mesh(), buffers=buffers, buffer_seq_dims=[2] * len(buffers), no_restore_buffers=set(buffers)):
                q, k, v, grad, o, *gradients = buffers
                cut = [t.detach().requires_grad_() for t in (q, k, v)]
                found = F.scaled_dot_product_attention(*cut, is_causal=causal)
                found.backward(grad)
                torch.testing.assert_close(found.detach(), o, atol=1e-5, rtol=1e-5)
                for a, b in zip(cut, gradients, strict=True):
                    torch.testing.assert_close(a.grad, b, atol=2e-5, rtol=2e-5)
            _run.execute, F.scaled_dot_product_attention = execute, own
            assert asked.count("forward") >= RANKS and asked.count("backward") >= RANKS
    finally:
        restore_flash_attention_impl()


@pytest.mark.parametrize("name", ["split_by_batch_and_by_heads", "heads_that_do_not_divide_are_gathered", "fully_sharded_under_autocast",
                                  "torchs_context_parallelism_by_the_slot"])
def test_two_processes(name):
    pytest.importorskip("torch.distributed.tensor")
    _two(name)
