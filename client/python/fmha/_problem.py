# SPDX-License-Identifier: MIT
"""struct fmha_problem from arrays: who is batch, who is heads, in which order strides go."""
from __future__ import annotations

import math
from typing import Any, NamedTuple

from . import _arrays
from ._arrays import View
from ._lib import ffi, invalid, lib

# Where batch, row, head and element of a dense tensor lie in each layout.
LAYOUTS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}
_ROLES = ffi.typeof("enum fmha_tensor_role").relements
ROLES = {name.removeprefix("FMHA_T_").lower(): role for name, role in _ROLES.items()
         if name.startswith("FMHA_T_") and name != "FMHA_T_WORKSPACE"}
N_TENSORS = lib.FMHA_N_TENSORS
MASK_NONE, MASK_TOP_LEFT, MASK_BOTTOM_RIGHT = lib.FMHA_MASK_NONE, lib.FMHA_MASK_TOP_LEFT, lib.FMHA_MASK_BOTTOM_RIGHT
OPS = {"forward": lib.FMHA_FORWARD, "backward": lib.FMHA_BACKWARD, "append": lib.FMHA_APPEND_KV,
       "merge": lib.FMHA_MERGE_STATES}


class Options(NamedTuple):
    """What a problem says besides its tensors; hashable, so that it keys caches."""

    op: str = "forward"
    layout: str = "bshd"
    mask: int = 0  # FMHA_MASK_*
    window: tuple = (-1, -1)
    sink_tokens: int = 0
    scale: float | None = None
    softcap: float = 0.0
    softcap_approx: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    n_splits: int = 0
    split_size: int = 0
    max_seqlen_q: int = 0  # packed sequences
    max_seqlen_k: int = 0  # packed sequences and paged caches
    min_seqlen_q: int = 0  # packed sequences with fewer rows are left alone
    rope: int = 0  # FMHA_ROPE_*
    rotary_dim: int = 0
    n_parts: int = 0  # merge
    dropout_row: int = 0  # where a part of a longer sequence begins there
    dropout_column: int = 0
    descale_block_q: int = 0  # 0: one, or one a row where there are as many
    descale_block_k: int = 0
    descale_per_page: bool = False
    descale_computed: bool = False
    v_in_k: bool = False  # there is no v: it is the first `values` elements of k
    values: int = 0
    kv_layout: int = 0  # FMHA_KV_*
    in_slots: bool = False  # indices are slots of pages


class Shape(NamedTuple):
    """The sizes that outputs are made of; group: packed sequences, whose total is in rows_q, rows_k."""

    batch: int
    rows_q: int
    rows_k: int
    nhead_q: int
    nhead_k: int
    hdim_q: int
    hdim_v: int
    group: bool


# Options that are fields of struct fmha_problem as they are.
_FIELDS = sorted({name for name, _ in ffi.typeof("struct fmha_problem").fields}.intersection(Options._fields) - {"op", "scale"})


def masking(causal: bool, window: tuple, align: str) -> tuple:
    """(FMHA_MASK_*, (left, right)) of flash-attn's words."""
    if align not in ("bottom_right", "top_left"):
        raise invalid(f"align is {align!r}: bottom_right or top_left", "mask")
    left, right = (-1 if w is None else int(w) for w in window)
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return MASK_NONE, (-1, -1)
    kind = MASK_BOTTOM_RIGHT if align == "bottom_right" else MASK_TOP_LEFT
    return kind, (max(left, -1), max(right, -1))


def dense(view, layout: str, group: bool, name: str):
    """(extents, strides) of [batch, rows, heads, hdim], whatever the layout; packed tensors are [rows, heads, hdim]."""
    if group:
        if len(view.shape) != 3:
            raise invalid(f"{name} has {len(view.shape)} dimensions: packed sequences are [total rows, heads, hdim]",
                          f"tensor.{name}")
        return (1, *view.shape), (0, *view.strides)
    if len(view.shape) != 4:
        raise invalid(f"{name} has {len(view.shape)} dimensions: {layout} needs 4", f"tensor.{name}")
    order = LAYOUTS[layout]
    return tuple(view.shape[i] for i in order), tuple(view.strides[i] for i in order)


def row_extents(q, layout: str, packed: bool) -> tuple:
    """LSE's extents: [batch, heads, rows], or packed [heads, total rows]. @q: q's shape."""
    if len(q) != (3 if packed else 4):
        dense(View(0, tuple(q), tuple(q), 0, None), layout, packed, "q")
    if packed:
        return q[1], q[0]
    if layout not in LAYOUTS:
        raise invalid(f"layout is {layout!r}: one of {', '.join(LAYOUTS)}", "layout")
    order = LAYOUTS[layout]
    return q[order[0]], q[order[2]], q[order[1]]


def shape_of(views: dict, options: Options) -> Shape:
    """The problem's sizes; what does not fit together is refused here, where arrays have names."""
    if options.op == "append":
        return _append_shape(views, options)
    if options.op == "merge":
        return _merge_shape(views, options)
    if options.layout not in LAYOUTS:
        raise invalid(f"layout is {options.layout!r}: one of {', '.join(LAYOUTS)}", "layout")
    group = "seqstart_q" in views
    paged = "block_table" in views or "kv_indptr" in views or options.in_slots
    (batch, rows_q, heads_q, hdim_q), _ = dense(views["q"], options.layout, group, "q")
    if group:
        batch = max(views["seqstart_q"].shape[0] - 1, 0)
    if paged:
        hdim_v = options.values if options.v_in_k else _paged(views["v"], "v")[3]
        heads_k, rows_k = _paged(views["k"], "k")[2], options.max_seqlen_k
    elif options.v_in_k:
        keys, _ = dense(views["k"], options.layout, group, "k")
        (_, rows_k, heads_k, _), hdim_v = keys, options.values
    else:
        keys, _ = dense(views["k"], options.layout, group, "k")
        values, _ = dense(views["v"], options.layout, group, "v")
        (_, rows_k, heads_k, hdim_k), hdim_v = keys, values[3]
        if hdim_k != hdim_q:
            raise invalid(f"k's heads have {hdim_k} elements and q's {hdim_q}", "tensor.k")
        if values[:3] != keys[:3]:
            raise invalid(f"v is {tuple(views['v'].shape)} and k {tuple(views['k'].shape)}", "tensor.v")
    if not heads_k or heads_q % heads_k:
        raise invalid(f"{heads_q} query heads are no multiple of {heads_k} key heads", "nhead_k")
    return Shape(batch, rows_q, rows_k, heads_q, heads_k, hdim_q, hdim_v, group)


def _append_shape(views, options):
    (batch, _, heads_k, hdim), _ = dense(views["k_new"], options.layout, False, "k_new")
    hdim_v = options.values if options.v_in_k else dense(views["v_new"], options.layout, False, "v_new")[0][3]
    if "slot_mapping" in views:  # nothing else says how long sequences are
        rows_q, heads_q = dense(views["q"], options.layout, False, "q")[0][1:3] if "q" in views else (1, heads_k)
        return Shape(batch, rows_q, 0, heads_q, heads_k, hdim, hdim_v, False)
    rows_k = options.max_seqlen_k or dense(views["k"], options.layout, False, "k")[0][1]
    rows_q, heads_q = dense(views["q"], options.layout, False, "q")[0][1:3] if "q" in views else (1, heads_k)
    return Shape(batch, rows_q, rows_k, heads_q, heads_k, hdim, hdim_v, False)


def _merge_shape(views, options):
    (batch, rows, heads, hdim), _ = dense(views["o"], options.layout, False, "o")
    return Shape(batch, rows, 1, heads, heads, hdim, hdim, False)


def _paged(view, name):
    if len(view.shape) != 4:
        raise invalid(f"{name} has {len(view.shape)} dimensions: a paged cache is [pages, page size, heads, hdim]",
                      f"tensor.{name}")
    return view.shape


def fill(p, views: dict, shape: Shape, options: Options) -> None:
    """All of the problem but the tensors' addresses. @p: struct fmha_problem *."""
    try:
        _fill(p, views, shape, options)
    except OverflowError as error:
        raise invalid(f"a size of the problem: {error}") from None


def _fill(p, views, shape, options):
    lib.fmha_problem_init(p)
    p.op, p.mode = OPS[options.op], lib.FMHA_GROUP if shape.group else lib.FMHA_BATCH
    p.batch, p.nhead_q, p.nhead_k = shape.batch, shape.nhead_q, shape.nhead_k
    p.hdim_q, p.hdim_v = shape.hdim_q, shape.hdim_v
    if shape.group:
        p.total_q, p.seqlen_q = shape.rows_q, options.max_seqlen_q
        p.seqlen_k = options.max_seqlen_k
        if "kv_indptr" not in views and "block_table" not in views:
            p.total_k = shape.rows_k
    else:
        p.seqlen_q, p.seqlen_k = shape.rows_q, shape.rows_k
    p.window_left, p.window_right = options.window
    p.scale = math.nan if options.scale is None else options.scale
    p.logits_soft_cap = options.softcap
    for name in _FIELDS:
        setattr(p, name, getattr(options, name))
    _fill_cache(p, views, shape, options)
    if "mask_intervals" in views:
        p.mask_endpoints = views["mask_intervals"].shape[-2]
    if "indices" in views:
        p.topk = views["indices"].shape[-1]
    for name, view in views.items():
        _fill_tensor(p, name, view, views, shape, options)


def _fill_cache(p, views, shape, options):
    if _in_pages(views, options):
        p.n_pages, p.page_size = views["k"].shape[:2]
        if "block_table" in views:
            p.max_blocks = views["block_table"].shape[1]
        elif "kv_indptr" in views:
            p.n_page_indices = views["kv_page_indices"].shape[0]
    elif "cache_batch_idx" in views:
        p.cache_batch = dense(views["k"], options.layout, shape.group, "k")[0][0]
    if "k_new" in views:
        p.seqlen_new = dense(views["k_new"], options.layout, shape.group, "k_new")[0][1]
    if "rotary_cos" in views:
        p.rotary_max_pos = views["rotary_cos"].shape[0]
    for name, length in (("q", shape.rows_q), ("k", p.page_size if options.descale_per_page else shape.rows_k)):
        block = f"descale_block_{name}"
        if getattr(options, block) == 0 and any(_is_for_each(views.get(n + "_descale"), length) for n in (name, "v")[: 1 + (name == "k")]):
            setattr(p, block, 1)


def _is_for_each(factors, length) -> bool:
    """Are there as many blocks of factors as rows or keys?"""
    return factors is not None and len(factors.shape) == 3 and factors.shape[2] == length > 1


def _in_pages(views, options) -> bool:
    return options.in_slots or not views.keys().isdisjoint(("block_table", "kv_indptr", "slot_mapping"))


# Their dimensions are in the caller's layout.
_DENSE = frozenset(("q", "k", "v", "o", "k_new", "v_new", "q_rotated", "do", "dq", "dk", "dv"))
_CACHE = frozenset(("k", "v"))


def _fill_tensor(p, name, view, views, shape, options):
    """Type, extents and strides: libfmha_client says which extents do not fit, and what broadcasts."""
    tensor = p.tensor[ROLES[name]]
    tensor.dtype = view.dtype
    paged = name in _CACHE and _in_pages(views, options)
    if name == "k" and options.kv_layout == lib.FMHA_KV_LATENT_FP8:
        tensor.dtype = _arrays.E4M3
    extents, strides = view.shape or (1,), view.strides or (0,)
    if name in _DENSE and not paged:
        extents, strides = dense(view, options.layout, shape.group and name not in ("k_new", "v_new"), name)
    elif name == "o_parts" and len(extents) == 5:
        extents, strides = ((of[0], *(of[1 + i] for i in LAYOUTS[options.layout])) for of in (extents, strides))
    if len(extents) > 5:
        raise invalid(f"{name} has {len(extents)} dimensions", f"tensor.{name}")
    tensor.n_dims = len(extents)
    for i, (extent, stride) in enumerate(zip(extents, strides)):
        tensor.extent[i], tensor.stride[i] = extent, stride


def extent_bytes(view) -> int:
    """Bytes from element 0 to one past the last one."""
    if not all(view.shape):
        return 0
    return (1 + sum((e - 1) * s for e, s in zip(view.shape, view.strides))) * _arrays.ELEMENT_BYTES[view.dtype]


def place_of(views: dict) -> Any:
    """The one place that all arrays lie in."""
    places = {name: view.place for name, view in views.items()}
    found = set(places.values())
    if len(found) > 1:
        told = ", ".join(f"{n} on {'the CPU' if p is None else f'{p[0]}:{p[1]}'}" for n, p in places.items())
        raise invalid(f"arrays lie in different places: {told}")
    return found.pop()


def new_problem():
    return ffi.new("struct fmha_problem *")


