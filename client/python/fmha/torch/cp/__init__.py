# SPDX-License-Identifier: MIT
"""torch: attention over sequences that several processes share, each with some of the rows.

    import torch.distributed as dist
    from fmha.torch import cp

    dist.init_process_group("nccl")
    shares = cp.head_tail(131072, dist.get_world_size())          # who has which rows
    x = shares.take(x, dist.get_rank())                           # this rank's, of all inputs and labels
    o = cp.attention(q, k, v, shares=shares, causal=True, cp_comm_type="all_gather")

The traffic is torch.distributed's, in this process: NCCL, RCCL, gloo, MPI. Which way (cp_comm_type, TransformerEngine's names):

    all_gather      every rank gets all keys, some KV heads at a time, while the ones before are computed on
    a2a             rows are exchanged for heads: each rank computes all rows of some heads (Ulysses)
    p2p             keys go around a ring, results are merged
    a2a+p2p, a2a+all_gather     a2a within groups (a host), the other between them

`python -m fmha.torch.cp plan --help` estimates which is fastest where.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .._functions import _autocast
from . import groups as _groups
from . import local as _local
from . import schedules as _schedules
from .shares import Shares, balanced, checked, contiguous, head_tail, travel
from ... import _check, _problem, _tensors
from ..._attention import merge_states
from ..._lib import invalid

__all__ = ["Shares", "attention", "balanced", "contiguous", "head_tail", "merge", "two_level"]

COMM_TYPES = ("all_gather", "a2a", "p2p", "a2a+p2p", "a2a+all_gather")
CHUNKS = 4  # of KV heads, at most


def two_level(inner: int, group=None) -> tuple:
    """(the group of @inner neighbouring ranks that this one is in, the group of those with its place in theirs), for a2a+p2p and
    a2a+all_gather. Every rank of @group, default all, has to call it."""
    handle = group if group is not None else dist.group.WORLD
    ranks = dist.get_process_group_ranks(handle)
    if inner < 1 or len(ranks) % inner:
        raise invalid(f"{len(ranks)} ranks are no multiple of {inner}", "inner")
    near = [ranks[i : i + inner] for i in range(0, len(ranks), inner)]
    mine, found = dist.get_rank(), []
    for sets in (near, list(zip(*near))):
        made = [dist.new_group(list(members)) for members in sets]
        found.append(next(h for h, members in zip(made, sets) if mine in members))
    return tuple(found)


def _levels(group, kind: str) -> tuple:
    """(who exchanges heads, who shares keys) as groups.Group."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        group = group.get_group() if group.ndim == 1 else (group.get_group(1), group.get_group(0))
    if "+" in kind:
        if not isinstance(group, (tuple, list)) or len(group) != 2:
            raise invalid(f"{kind} takes two groups, (who exchanges heads, who shares keys): cp.two_level() makes them", "group")
        return _groups.group_of(group[0]), _groups.group_of(group[1])
    if isinstance(group, (tuple, list)):
        raise invalid(f"{kind} takes one group", "group")
    one = _groups.group_of(group if group is not None else dist.group.WORLD)
    return (one, _groups.ALONE) if kind == "a2a" else (_groups.ALONE, one)


def _default_shares(q, axis, packed, cu_seqlens, n, causal) -> Shares:
    make = head_tail if causal else contiguous
    return make(cu_seqlens if packed else q.shape[axis] * n, n)


def _state(seed, q, *levels) -> Tensor:
    """Dropout's seed and offset, the first rank's in all."""
    if seed is None:
        return _groups.agreed(torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device), *levels)
    pair = (seed, 0) if isinstance(seed, int) else tuple(seed)
    _check.whole(pair[0], "seed")
    _check.whole(pair[1], "offset")
    return torch.tensor(pair, dtype=torch.int64, device=q.device)


def _chunks(asked, heads: int, size: int) -> int:
    if asked is not None:
        _check.count(asked, "chunks")
        if asked == 0 or heads % asked:
            raise invalid(f"chunks is {asked}: {heads} KV heads (of this rank) are no multiple of it", "chunks")
        return asked
    return 1 if size == 1 else max(n for n in range(1, CHUNKS + 1) if heads % n == 0)


@torch.compiler.disable
def attention(q: Tensor, k: Tensor, v: Tensor, *, group=None, cp_comm_type: str = "all_gather", shares: Shares | None = None,
              cu_seqlens=None, causal: bool = False, window: tuple = (-1, -1), scale: float | None = None, softcap: float = 0.0,
              sink: Tensor | None = None, dropout_p: float = 0.0, seed: int | tuple | None = None, layout: str = "bshd",
              deterministic: bool | None = None, chunks: int | None = None, return_lse: bool = False):
    """fmha.torch.attention() of rows and keys that the ranks of @group share, with gradients for q, k, v and sink.

    Args:
        q, k, v: this rank's rows: in @layout, or [rows, heads, hdim] of packed sequences. All ranks call it with the same options.
        group: a ProcessGroup or a DeviceMesh; None: all processes. For two levels two groups (cp.two_level(), TransformerEngine's
            order), or a mesh of two dimensions, the inner one last.
        shares: who has which rows. None: head_tail() under a causal mask, contiguous() without, every rank having as many rows.
        cu_seqlens: of packed sequences, over all ranks' rows, numbers that the CPU sees; not needed where @shares has them.
        causal, window, scale, softcap, sink: as in fmha.torch.attention(). sink: all heads', the same on all ranks; its gradient is of
            this rank's rows and heads: add it up over the ranks as any other parameter's.
        dropout_p: P is dropped where one process with the same seed and offset would drop it.
        seed: a number, or (seed, offset); None: the first rank draws one for all.
        deterministic: the same bits on every run; None: what torch.use_deterministic_algorithms() says.
        chunks: into how many parts of KV heads all_gather cuts its traffic; None: up to 4. It has no influence on results.

    Returns:
        O of this rank's rows, or (O, LSE) as fmha.torch.attention() has them.
    """
    if cp_comm_type not in COMM_TYPES:
        raise invalid(f"cp_comm_type is {cp_comm_type!r}: one of {', '.join(COMM_TYPES)}", "cp_comm_type")
    _check.words(causal=causal, window=window, scale=scale, softcap=softcap, dropout_p=dropout_p, layout=layout, return_lse=return_lse)
    q, k, v, sink = _tensors.checked_inputs(("q", "k", "v", "sink"), q, k, v, sink)
    q, k, v = _autocast(q, k, v)
    inner, outer = _levels(group, cp_comm_type)
    packed = shares.packed if shares is not None else cu_seqlens is not None
    if q.dim() != (3 if packed else 4) or k.dim() != q.dim() or v.dim() != q.dim():
        raise invalid(f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: " + (
            "packed sequences are [rows, heads, hdim]" if packed else f"{layout} has 4 dimensions"), "tensor.q")
    axis = 0 if packed else _problem.LAYOUTS[layout][1]
    if shares is None:
        shares = _default_shares(q, axis, packed, cu_seqlens, inner.size * outer.size, causal)
    _check_shapes(q, k, v, shares, axis, inner, outer)
    if not packed:  # rows first
        order = _problem.LAYOUTS[layout]
        q, k, v = (t.permute(order[1], order[0], order[2], order[3]) for t in (q, k, v))
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    left, right = _problem.masking(causal, window, "bottom_right")[1]
    state = _state(seed, q, outer, inner) if dropout_p > 0 else None
    problem = _local.Problem(shares, outer.rank, left, right, scale, float(softcap), float(dropout_p), bool(deterministic), q.shape[-2])
    o, lse = _attend(q, k, v, sink, problem, inner, outer, state, cp_comm_type, chunks)
    if not packed:
        o = o.permute(*sorted(range(4), key=(order[1], order[0], order[2], order[3]).__getitem__))
    return (o, lse) if return_lse else o


def merge(o: Tensor, lse: Tensor, *, group=None, layout: str = "bshd") -> tuple:
    """(O, LSE) over all keys, from each rank's of its own share of them: decoding with a cache that the ranks of @group divide.

    Args:
        o, lse: as flash_attn_with_kvcache(..., return_softmax_lse=True) or attention(..., return_lse=True) give them, without a sink;
            a rank whose share a row sees nothing of has LSE = -inf there.

    Merged in float32, by the device's kernel; no gradient.
    """
    o, lse = _tensors.alone(o, "o"), _tensors.alone(lse, "lse")
    one = _groups.group_of(group if group is not None else dist.group.WORLD)
    if one.size == 1:
        return o, lse
    mine = [t.contiguous() for t in (o.float(), lse)]
    parts = [t.new_empty((one.size * t.shape[0], *t.shape[1:])) for t in mine]
    for work in [dist.all_gather_into_tensor(to, t, group=one.handle, async_op=True) for to, t in zip(parts, mine)]:
        work.wait()
    merged, lse = merge_states(*(to.unflatten(0, (one.size, -1)) for to in parts), layout=layout)
    return merged.to(o.dtype), lse


def _check_shapes(q, k, v, shares, axis, inner, outer):
    rank = outer.rank * inner.size + inner.rank
    if len(shares.ranks) != inner.size * outer.size:
        raise invalid(f"the shares are of {len(shares.ranks)} ranks, the group has {inner.size * outer.size}", "shares")
    checked(shares)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.shape[axis] != shares.rows(rank):
            raise invalid(f"{name} has {t.shape[axis]} rows: rank {rank} has {shares.rows(rank)} of {shares.total}", f"tensor.{name}")
    heads, kv_heads = q.shape[_heads(q, axis)], k.shape[_heads(k, axis)]
    if not kv_heads or heads % kv_heads:
        raise invalid(f"{heads} query heads are no multiple of {kv_heads} key heads", "nhead_k")
    if heads % inner.size:
        raise invalid(f"{heads} query heads are no multiple of {inner.size} ranks that exchange heads", "nhead_q")


def _heads(t, axis) -> int:
    return 1 if t.dim() == 3 or axis == 2 else 2


def _attend(q, k, v, sink, problem, inner, outer, state, kind, chunks):
    """Tensors with rows first."""
    deal = None
    if inner.size > 1:
        first = outer.rank * inner.size
        ranks, most = problem.shares.ranks[first : first + inner.size], problem.shares.most
        deal = _schedules.Deal(ranks, most, q.shape[0], inner)
        q, k, v = _schedules.ToHeads.apply(deal, q, k, v)
        heads = q.shape[-2]
        problem = problem._replace(shares=_united(problem.shares, inner.size), head0=inner.rank * heads)
        sink = None if sink is None else sink[problem.head0 : problem.head0 + heads]
    if kind.endswith("p2p") and travel(problem.shares).shares.most:  # where no key travels there is nothing to merge
        o, lse = _schedules.Ring.apply(problem, outer, state, q, k, v, sink)
    else:
        o, lse = _schedules.AllGather.apply(problem, outer, _chunks(chunks, k.shape[-2], outer.size), state, q, k, v, sink)
    return (o, lse) if deal is None else _schedules.ToRows.apply(deal, o, lse)


def _united(shares: Shares, inner: int) -> Shares:
    """Of groups of @inner neighbouring ranks: the rows of all of them, in rising order."""
    from .shares import joined

    sets = [shares.ranks[i : i + inner] for i in range(0, len(shares.ranks), inner)]
    return shares._replace(ranks=tuple(joined(i for intervals in s for i in intervals) for s in sets))
