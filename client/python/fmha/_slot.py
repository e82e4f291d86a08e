# SPDX-License-Identifier: MIT
"""fmhad in torch's own slot for flash attention.

    import fmha.torch
    torch.nn.attention.activate_flash_attention_impl("fmha")

From then on, until restore_flash_attention_impl(), torch's operators behind scaled_dot_product_attention, varlen_attn, nested
tensors and context_parallel are these: the choice of a backend, autograd, autocast and torch.compile stay torch's. What fmhad
does not take (float64, head dims beyond 256, empty tensors) goes on to the kernel that torch had there.
"""
from __future__ import annotations

import collections
import functools
import warnings

import torch

from . import _again, _arrays, _problem, _run, _slot_native
from ._lib import invalid, not_supported
from .torch import _functions as ft

NAME = "fmha"
served = collections.Counter()  # calls that came to Python, by the operator's name
left_to_torch = collections.Counter()
_MAX_HDIM = 256
_KINDS = frozenset((torch.float32, torch.float16, torch.bfloat16))
_own: dict = {}  # torch's kernels, by operator


def _torchs(q, operator, *args, **words):
    """What torch's own kernel says to a call that _takes() does not."""
    key = "CUDA" if q.is_cuda else "CPU"
    kernel = _own.get((operator, key))
    if kernel is None:
        raise not_supported(f"{operator} on the CPU of {q.dtype}, {tuple(q.shape)}: float32, float16 and bfloat16, head dims up to "
                            f"{_MAX_HDIM} are known, and torch has no kernel of its own there", "tensor.q")
    left_to_torch[operator] += 1
    return kernel.call_boxed(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **words)


def _takes(q, k, v) -> bool:
    return (q.dtype in _KINDS and q.dtype == k.dtype == v.dtype and q.shape[-1] <= _MAX_HDIM and v.shape[-1] <= _MAX_HDIM
            and q.numel() > 0 and k.numel() > 0 and v.numel() > 0)


# ---- the CPU's two operators: [batch, heads, rows, hdim], the causal band begins at the top left ----


@functools.lru_cache(maxsize=4096)
def _cpu_call(is_causal, scale, deterministic):
    mask, right = (_problem.MASK_TOP_LEFT, 0) if is_causal else (_problem.MASK_NONE, -1)
    return ft.Call("bhsd", mask, -1, right, scale, deterministic=deterministic)


def _cpu_takes(q, k, v, dropout_p, attn_mask) -> bool:
    return (dropout_p == 0 and q.dim() == k.dim() == v.dim() == 4 and _takes(q, k, v) and k.shape == v.shape and q.shape[-1] == k.shape[-1]
            and q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0
            and (attn_mask is None or (attn_mask.dim() in (2, 4) and attn_mask.dtype in (q.dtype, torch.float32))))


def _rows_before_heads(t, dtype=None):
    """[batch, heads, rows, ..] whose memory is [batch, rows, heads, ..], as torch's own kernels on the CPU give it."""
    order = (0, 2, 1, 3) if t.dim() == 4 else (0, 2, 1)
    return torch.empty_permuted(t.shape, order, dtype=dtype or t.dtype)


def _cpu_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    name = "_scaled_dot_product_flash_attention_for_cpu"
    if not _cpu_takes(query, key, value, dropout_p, attn_mask):
        return _torchs(query, name, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    tensors = {"q": query, "k": key, "v": value}
    if attn_mask is not None:
        tensors["bias"] = attn_mask
    n_said = len(tensors)
    o = tensors["o"] = torch.empty_like(query)
    lse = tensors["lse"] = _rows_before_heads(query[..., 0], torch.float32)
    _run.execute(tensors, ft._options("forward", _cpu_call(is_causal, scale, False)), n_said=n_said)
    served[name] += 1
    return o, lse


def _cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    name = "_scaled_dot_product_flash_attention_for_cpu_backward"
    if grad_out is None or not _cpu_takes(query, key, value, dropout_p, attn_mask):
        return _torchs(query, name, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    tensors = {"q": query, "k": key, "v": value, "do": grad_out, "o": out, "lse": logsumexp}
    if attn_mask is not None:
        tensors["bias"] = attn_mask
    n_said = len(tensors)
    grads = tuple(map(_rows_before_heads, (query, key, value)))
    tensors["dq"], tensors["dk"], tensors["dv"] = grads
    call = _cpu_call(is_causal, scale, torch.are_deterministic_algorithms_enabled())
    _run.execute(tensors, ft._options("backward", call), n_said=n_said)
    served[name] += 1
    return grads


# ---- flash-attn's five: the causal band ends at the bottom right. On the CPU torch has no kernels of its own for them ----


@functools.lru_cache(maxsize=4096)
def _call(layout, is_causal, scale, left, right, dropout_p, longest_q, longest_k, deterministic):
    mask, (left, right) = _problem.masking(is_causal, (left, right), "bottom_right")
    return ft.Call(layout, mask, left, right, scale, 0.0, dropout_p, longest_q, longest_k, deterministic)


_constants: dict = {}  # what is returned but says nothing, by device and type


def _nothing(q):
    """(rng_state, philox_offset, debug_attn_mask) of a call without dropout: nobody reads them, and nobody writes to them."""
    key = q.get_device(), q.dtype
    found = _constants.get(key)
    if found is None:
        new = functools.partial(torch.empty, device=q.device)
        found = _constants[key] = new(2, dtype=torch.uint64), new((), dtype=torch.uint64), new(0, dtype=q.dtype)
    return found


class _Seen(_again.Seen):
    """A dense call that was seen before: O lies as Q does, and LSE is always made."""

    def __init__(self, q, v, call):
        super().__init__(q, v, ft._options("forward", call), ft._options("backward", call))

    def run_of(self, at, q, k, v):
        o, lse = torch.empty_like(q), torch.empty_like(self.lse)
        run = self.runs[True]
        if run is None:
            run = self.runs[True] = _run.find({"q": q, "k": k, "v": v, "o": o, "lse": lse}, self.options, n_said=3)[0]
        tensors = run.tensors
        tensors[_again.Q], tensors[_again.K], tensors[_again.V] = at
        tensors[_again.O], tensors[_again.LSE] = o.data_ptr(), lse.data_ptr()
        run.launch()
        _slot_native.learn(run)
        return o, lse


def _seen(layout, q, k, v, is_causal, scale, left=-1, right=-1):
    """The _Seen of a dense call without dropout, or None: the general way."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = _again._key((NAME, layout, is_causal, scale, left, right, deterministic), q, k, v)
    seen = _again._kept.seen.get(key)
    if seen is None:
        if not _takes(q, k, v) or q.shape[-1] != v.shape[-1]:
            return None
        seen = _Seen(q, v, _call(layout, is_causal, scale, left, right, 0.0, 0, 0, deterministic))
        _again._keep(_again._kept.seen, key, seen)
    return seen


def _dense(layout, q, k, v, is_causal, scale, left=-1, right=-1):
    """(O, LSE), or None."""
    at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (at[0] | at[1] | at[2]) % _again.ALIGNMENT or not q.is_cuda:
        return None
    seen = _seen(layout, q, k, v, is_causal, scale, left, right)
    return None if seen is None else seen.run_of(at, q, k, v)


def _general(q, k, v, call, extras, state, out=None, wants_bytes=False):
    """(O, LSE, dropout's bytes or None) of a call that is no _Seen."""
    tensors = ft._inputs(q, k, v, extras)
    packed = "seqstart_q" in tensors
    n_said = len(tensors) + (out is not None)
    o = tensors["o"] = out if out is not None else (torch.zeros_like if packed else torch.empty_like)(q)
    rows = _problem.row_extents(q.shape, call.layout, packed)
    lse = tensors["lse"] = torch.full(rows, float("-inf"), device=q.device) if packed else torch.empty(rows, device=q.device)
    randval = None
    if wants_bytes:
        keys = call.max_seqlen_k if packed else k.shape[_problem.LAYOUTS[call.layout][1]]
        randval = tensors["randval"] = torch.empty((*rows, keys), dtype=torch.uint8, device=q.device)
    ft._execute(tensors, ft._options("forward", call), state, n_said)
    return o, lse, randval


def _drawn(state):
    """Seed and offset, as torch's callers keep them."""
    return state.view(torch.uint64), state[1].view(torch.uint64)


def _kept_state(dropout_p, rng_state):
    return rng_state.view(torch.int64) if dropout_p > 0 else None


def _debug_mask(q, k, v, call, lse, randval):
    """softmax(S), negative where dropped: what torch's tests look at. @q, @k: in the call's layout."""
    from . import flash_attn

    if call.layout == "bhsd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    return flash_attn._probabilities(q, k, None, (None, None), (None, None), call._replace(layout="bshd", scale=scale), lse, randval)


def _sdpa(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    name = "_scaled_dot_product_flash_attention"
    found = _dense("bhsd", query, key, value, is_causal, scale) if dropout_p == 0 and not return_debug_mask else None
    if found is not None:
        served[name] += 1
        return *found, None, None, query.size(2), key.size(2), *_nothing(query)
    if not _takes(query, key, value):
        return _torchs(query, name, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
    o, lse, *rest = _with_dropout("bhsd", query, key, value, dropout_p, is_causal, return_debug_mask, scale)
    served[name] += 1
    return o, lse, None, None, query.size(2), key.size(2), *rest


def _with_dropout(layout, q, k, v, dropout_p, is_causal, return_debug_mask, scale, left=-1, right=-1):
    """(O, LSE, rng_state, philox_offset, debug_attn_mask) of dense tensors."""
    call = _call(layout, is_causal, scale, left, right, dropout_p, 0, 0, False)
    state = ft._state(q) if dropout_p > 0 else None
    wants_bytes = return_debug_mask and dropout_p > 0
    o, lse, randval = _general(q, k, v, call, ft._NO_EXTRAS, state, wants_bytes=wants_bytes)
    rng_state, offset, mask = _nothing(q)
    if state is not None:
        rng_state, offset = _drawn(state)
    return o, lse, rng_state, offset, _debug_mask(q, k, v, call, lse, randval) if wants_bytes else mask


def _sdpa_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
                   philox_offset, *, scale=None):
    name = "_scaled_dot_product_flash_attention_backward"
    if grad_out is None:
        return None, None, None
    if not _takes(query, key, value):
        return _torchs(query, name, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                       is_causal, philox_seed, philox_offset, scale=scale)
    served[name] += 1
    return _gradients("bhsd", grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale, philox_seed)


def _gradients(layout, grad, q, k, v, o, lse, dropout_p, is_causal, scale, rng_state, left=-1, right=-1):
    seen = _seen(layout, q, k, v, is_causal, scale, left, right) if dropout_p == 0 and q.is_cuda else None
    if seen is not None:
        # own: context_parallel's are sums of several calls.
        return seen.backward(grad, q, k, v, o, lse, own=False, tell=_slot_native.learn)
    call = _call(layout, is_causal, scale, left, right, dropout_p, 0, 0, torch.are_deterministic_algorithms_enabled())
    return ft._backward(grad, None, q, k, v, o, lse, ft._NO_EXTRAS, call, _kept_state(dropout_p, rng_state), False)[:3]


def _is_given(tensor) -> bool:
    return tensor is not None and tensor.numel() > 0


def _band(left, right):
    return (-1 if w is None else int(w) for w in (left, right))


def _flash(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
           window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):
    name = "_flash_attention_forward"
    if not _takes(query, key, value):
        words = {"block_table": block_table, "num_splits": num_splits}
        return _torchs(query, name, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
                       scale=scale, window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k,
                       alibi_slopes=alibi_slopes, **{n: w for n, w in words.items() if w is not None})
    left, right = _band(window_size_left, window_size_right)
    dense = cum_seq_q is None and seqused_k is None and alibi_slopes is None and block_table is None
    found = None
    if dense and dropout_p == 0 and not return_debug_mask and not num_splits:
        found = _dense("bshd", query, key, value, is_causal, scale, left, right)
    if found is not None:
        found = *found, *_nothing(query)
    elif dense and not num_splits:
        found = _with_dropout("bshd", query, key, value, dropout_p, is_causal, return_debug_mask, scale, left, right)
    else:
        found = _sequences(None, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale,
                           left, right, seqused_k, alibi_slopes, block_table, num_splits)
    served[name] += 1
    return found


def _flash_into(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
                window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):
    left, right = _band(window_size_left, window_size_right)
    lse = _sequences(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale, left,
                     right, seqused_k, alibi_slopes, block_table, num_splits)[1]
    served["_flash_attention_forward_no_dropout_inplace"] += 1
    return lse


def _sequences(out, q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale, left, right, seqused_k, slopes,
               block_table, num_splits):
    """All that _flash_attention_forward() takes: packed sequences, lengths in use, pages, ALiBi, a place for O."""
    if return_debug_mask and dropout_p > 0:
        raise not_supported("return_debug_mask with dropout is for dense tensors", "tensor.randval")
    # torch's backward is not told of these: gradients would be wrong.
    untold = [n for n, t in (("seqused_k", seqused_k), ("alibi_slopes", slopes), ("block_table", block_table)) if t is not None]
    if untold and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise not_supported(f"{untold[0]} with gradients: torch's backward is not given it; call under torch.no_grad()", untold[0])
    if block_table is not None:
        if dropout_p > 0:
            raise not_supported("dropout on a paged cache", "dropout_p")
        if seqused_k is None:
            if cu_k is None:
                raise invalid("block_table needs seqused_k or cum_seq_k: how much of each sequence's pages is in use", "seqlen_k")
            seqused_k = cu_k.diff()
        cu_k, longest_k = None, block_table.shape[1] * k.shape[1]
    else:
        longest_k = min(int(max_k), k.shape[0]) if cu_k is not None else 0
    longest_q = min(int(max_q), q.shape[0]) if cu_q is not None else 0
    call = _call("bshd", is_causal, scale, left, right, float(dropout_p), longest_q, longest_k, False)
    state = ft._state(q) if dropout_p > 0 else None
    if block_table is None and not num_splits:
        extras = ft._extras(None, slopes, None, *(c if c is None else _arrays.int32(c, "cum_seq") for c in (cu_q, cu_k)), None, seqused_k)
        o, lse, _ = _general(q, k, v, call, extras, state, out)
    else:
        o, lse = _paged(out, q, k, v, call, cu_q, cu_k, seqused_k, slopes, block_table, num_splits, state)
    rng_state, offset, mask = _nothing(q)
    if state is not None:
        rng_state, offset = _drawn(state)
    return o, lse, rng_state, offset, mask


def _paged(out, q, k, v, call, cu_q, cu_k, seqused_k, slopes, block_table, num_splits, state):
    """Forward with what ft.Call has no word for."""
    named = {"q": q, "k": k, "v": v, "alibi_slopes": slopes, "seqstart_q": cu_q, "seqstart_k": cu_k, "seqlen_k": seqused_k,
             "block_table": block_table}
    tensors = {n: _arrays.int32(t, n) if n in _run._INTEGERS else t for n, t in named.items() if t is not None}
    o = tensors["o"] = torch.zeros_like(q) if out is None else out
    rows = _problem.row_extents(q.shape, "bshd", cu_q is not None)
    lse = tensors["lse"] = torch.full(rows, float("-inf"), device=q.device)
    ft._execute(tensors, ft._options("forward", call)._replace(n_splits=int(num_splits or 0)), state)
    return o, lse


def _flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
                    unused, *, scale=None, window_size_left=None, window_size_right=None):
    name = "_flash_attention_backward"
    if grad_out is None:
        return None, None, None
    if not _takes(query, key, value):
        return _torchs(query, name, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                       is_causal, rng_state, unused, scale=scale, window_size_left=window_size_left,
                       window_size_right=window_size_right)
    left, right = _band(window_size_left, window_size_right)
    served[name] += 1
    if not _is_given(cum_seq_q):
        return _gradients("bshd", grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale, rng_state, left, right)
    call = _call("bshd", is_causal, scale, left, right, float(dropout_p), min(int(max_q), query.shape[0]), min(int(max_k), key.shape[0]),
                 torch.are_deterministic_algorithms_enabled())
    extras = ft._extras(None, None, None, *(_arrays.int32(c, "cum_seq") for c in (cum_seq_q, cum_seq_k)))
    return ft._backward(grad_out, None, query, key, value, out, logsumexp, extras, call, _kept_state(dropout_p, rng_state), False)[:3]


# ---- the slot ----


_FLASH = {
    "_scaled_dot_product_flash_attention": _sdpa, "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash, "_flash_attention_forward_no_dropout_inplace": _flash_into,
    "_flash_attention_backward": _flash_backward,
}
_OPERATORS = {
    "CPU": {"_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
            "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward, **_FLASH},
    "CUDA": _FLASH,
}


class _Handle:
    """What torch keeps while this is active."""

    def __init__(self, libraries):
        self._libraries = libraries

    def remove(self) -> None:
        _slot_native.deactivate()
        for library in self._libraries:
            library._destroy()
        self._libraries = ()


def _kernel(name, key):
    """torch's own, or None."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def activate() -> _Handle:
    """Puts fmhad's functions into torch's dispatcher, in front of torch's own."""
    libraries = []
    for key, operators in _OPERATORS.items():
        if key == "CUDA" and not torch.backends.cuda.is_built() and torch.version.hip is None:
            continue
        library = torch.library.Library("aten", "IMPL", key)
        for name, function in operators.items():
            if not hasattr(torch.ops.aten, name):
                continue  # a torch before it
            if (name, key) not in _own:
                _own[name, key] = _kernel(name, key)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel")
                library.impl(name, function, key)
        libraries.append(library)
    # After Python's, which stay beneath: and so torch's one warning of an operator that has a kernel already is caught above.
    if torch.backends.cuda.is_built():
        _slot_native.activate(_FLASH, "CUDA")
    return _Handle(libraries)


def calls() -> collections.Counter:
    """Calls that fmhad served, by the operator's name."""
    return served + collections.Counter({n: c for n, c in _slot_native.counts().items() if n in _slot_native.SERVED})


def register() -> None:
    """Makes the slot known to torch by its name; a torch without such a register has none."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        return
    register_flash_attention_impl(NAME, register_fn=activate)
