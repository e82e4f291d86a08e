# SPDX-License-Identifier: MIT
"""Masks of transformers, kept as what they are made of for as long as nobody looks into them.

transformers describes a mask by a function of (batch, head, row, key), padding and offsets. A Mask stands for the tensor [batch, 1,
rows, keys] that its eager attention would add to the scores, but holds only the description: attention() takes bands (causal,
windows, packed sequences, padding at an end) from there, at no cost in memory, and on a CPU any other as fmha.masks has it (chunks,
images, holes in the padding). Whoever computes with a Mask (a model's own attention, a slice) computes with the tensor, which
transformers then makes itself.
"""
from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from . import masks


class Band(NamedTuple):
    """Row i sees key j where i - left <= j <= i + right, None: all, and where their segments are the same."""

    left: int | None = None
    right: int | None = None
    segments: Tensor | None = None  # [batch, rows]
    remapped: bool = False  # distances count within segments


def _least(a, b):
    return a if b is None else b if a is None else min(a, b)


def _meet(bands) -> Band | None:
    """What all of them let through, if that is a band."""
    met = Band()
    for band in bands:
        if band is None or (met.segments is not None and band.segments is not None):
            return None
        segments = met.segments if band.segments is None else band.segments
        met = Band(_least(met.left, band.left), _least(met.right, band.right), segments, met.remapped or band.remapped)
    return met


def _cells(function) -> dict:
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))


def _of(make, *samples):
    """The code of the functions that @make makes; None where this transformers has no such maker."""
    maker = getattr(masking_utils, make, None)
    return maker(*samples).__code__ if maker is not None else None


_NOTHING = torch.zeros((1, 1), dtype=torch.int64)
_AND = _of("and_masks")
_READERS = {
    getattr(masking_utils, "causal_mask_function").__code__: lambda cells: Band(right=0),
    getattr(getattr(masking_utils, "bidirectional_mask_function", None), "__code__", None): lambda cells: Band(),
    _of("sliding_window_overlay", 1): lambda cells: Band(left=cells["sliding_window"] - 1),
    _of("sliding_window_bidirectional_overlay", 1): lambda cells: Band(cells["sliding_window"], cells["sliding_window"]),
    _of("packed_sequence_mask_function", _NOTHING): lambda cells: Band(segments=cells["packed_sequence_mask"]),
    # A band is the same wherever counting begins, and within a segment positions follow each other.
    _of("remap_positions_for_packed_sequence", None, _NOTHING): lambda cells: _remapped(band_of(cells["mask_function"])),
    _AND: lambda cells: _meet(map(band_of, cells["mask_functions"])),
}
_READERS.pop(None, None)


def _remapped(band):
    return None if band is None or band.segments is not None else band._replace(remapped=True)


def band_of(function) -> Band | None:
    """@function as a band; None: it is another one, or unknown here."""
    read = _READERS.get(getattr(function, "__code__", None))
    return read(_cells(function)) if read is not None else None


def forget_what_differs() -> None:
    """Functions that this transformers defines otherwise than what is read above are not known."""
    ids = torch.arange(9)
    row, key = ids[:, None], ids[None]
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    samples = [("causal_mask_function",), ("bidirectional_mask_function",), ("sliding_window_overlay", 3),
               ("sliding_window_bidirectional_overlay", 2), ("packed_sequence_mask_function", segments)]
    for name, *said in samples:
        function = getattr(masking_utils, name, None)
        if function is None:
            continue
        function = function(*said) if said else function
        band, zero = band_of(function), torch.zeros((), dtype=torch.int64)
        want = torch.ones(9, 9, dtype=torch.bool)
        want &= row - key <= (9 if band.left is None else band.left)
        want &= key - row <= (9 if band.right is None else band.right)
        if band.segments is not None:
            want &= segments[0, :, None] == segments[0, None]
        if not torch.equal(function(zero, zero, row, key).expand(9, 9), want):
            del _READERS[function.__code__]


class Whole(NamedTuple):
    """No row and key is left out but keys behind the first @used ones."""

    used: int
    left: int
    right: int


class Packed(NamedTuple):
    """Sequences of rows and keys that see each other, in order. rows, keys: which of batch * rows, batch * keys; None: all."""

    rows: Tensor | None
    keys: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    left: int
    right: int


@dataclasses.dataclass
class _Kept:
    """What all aliases of one Mask share."""

    said: dict  # for transformers' eager_mask()
    shape: tuple  # [batch, 1, rows, keys]
    band: Band | None  # None: the function is another one
    offset: int  # row 0 is at key @offset
    padding: Tensor | None  # [batch, keys], True: in use
    dense: Tensor | None = None
    is_shown: bool = False  # somebody has, or had, a view of @dense and may write to it
    form: Any = None


class Mask(Tensor):
    """See above. Its values are 0 and the type's least number."""

    kept: _Kept

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, kept):
        self = Tensor._make_wrapper_subclass(cls, kept.shape, dtype=kept.said["dtype"], device=kept.said["device"])
        self.kept = kept
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].kept)
        shows = any(x.alias_info is not None for x in (*function._schema.arguments, *function._schema.returns))

        def opened(mask):
            mask.kept.is_shown |= shows
            return mask.dense()

        return function(*tree_map_only(Mask, opened, args), **tree_map_only(Mask, opened, kwargs or {}))

    def __repr__(self):
        return f"Mask({self.kept.band})"

    def __reduce_ex__(self, protocol):
        return self.dense().__reduce_ex__(protocol)

    def dense(self) -> Tensor:
        kept = self.kept
        if kept.dense is None:
            made = masking_utils.eager_mask(**kept.said)
            kept.dense = made.expand(self.shape).contiguous()  # somebody may write to it
        return kept.dense

    def form(self) -> Whole | Packed | masks.IntervalMask | masks.BitMask | None:
        """None: only the tensor says it."""
        kept = self.kept
        if kept.is_shown:
            return None
        if kept.form is None:
            band = self._find_band() if kept.band is not None else None
            kept.form = (_as_data(kept) if band is None and self.device.type == "cpu" else band,)
        return kept.form[0]

    def _find_band(self):
        batch, _, rows, keys = self.shape
        kept, (left, right, segments, remapped) = self.kept, self.kept.band
        words = -1 if left is None else left, -1 if right is None else right
        if segments is not None:
            return _segments(segments.expand(batch, rows), words) if rows == keys and kept.padding is None and kept.offset == 0 else None
        if remapped:
            return None
        used = kept.offset + rows if right == 0 else keys
        everything = left is None and right is None
        if not 0 < used <= keys or not (right == 0 or everything or kept.offset == keys - rows):
            return None
        padding = kept.padding[:, :used] if kept.padding is not None else None
        if padding is None or padding.all():
            return Whole(used, *words)
        if everything or (rows == 1 and right == 0 and (left is None or left >= used - 1)):
            return _keys_alone(padding, rows, keys)
        return _runs(padding, rows, keys, used - rows, words) if right == 0 else None


def _as_data(kept):
    """What transformers would make, some rows at a time, as intervals or bits."""
    batch, _, rows, keys = kept.shape
    step = max(masks._SLICE // max(batch * keys, 1), 1)

    def parts():
        for first in range(0, rows, step):
            end, said = min(first + step, rows), dict(kept.said)
            if "cache_position" in said:
                said["cache_position"] = said["cache_position"][first:end]
            else:
                said |= {"q_length": end - first, "q_offset": said["q_offset"] + first}
            seen = (masking_utils.eager_mask(**said) == 0).expand(batch, 1, end - first, keys).numpy()
            for b in range(batch):
                yield b, 0, first, seen[b, 0]

    with torch.no_grad():
        return masks._of_slices(parts(), (batch, 1, rows, keys), None)


def _sums(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _segments(segments, words):
    batch, rows = segments.shape
    numbered = segments - segments[:, :1] + torch.arange(batch, device=segments.device)[:, None] * rows
    cu = _sums(torch.unique_consecutive(numbered.flatten(), return_counts=True)[1])
    longest = int(cu.diff().max())
    return Packed(None, None, cu, cu, longest, longest, *words)


def _keys_alone(padding, rows, keys):
    """Each row sees all keys in use."""
    batch, used = padding.shape
    at = torch.nn.functional.pad(padding, (0, keys - used)).flatten().nonzero().flatten()
    lengths = padding.sum(-1, dtype=torch.int32)
    cu_q = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=padding.device)
    return Packed(None, at, cu_q, _sums(lengths), rows, int(lengths.max()), -1, -1)


def _runs(padding, rows, keys, offset, words):
    """Each sequence's keys in use lie together: rows before see nothing, rows behind are padding. None: they do not."""
    used = padding.shape[1]
    column = torch.arange(used, device=padding.device)
    n = padding.sum(-1)
    start = torch.where(n > 0, padding.int().argmax(-1), offset)
    end = start + n
    together = (((column >= start[:, None]) & (column < end[:, None])) == padding).all()
    # Rows behind the last key in use are left out where they are a prompt's own padding, not where they ask of a cache.
    if not together or (offset > 0 and not (end == used).all()):
        return None
    index = torch.arange(rows, device=padding.device) + offset
    kept = (index >= start[:, None]) & (index < end[:, None])
    n_rows = kept.sum(-1, dtype=torch.int32)
    at = torch.nn.functional.pad(padding, (0, keys - used)).flatten().nonzero().flatten()
    return Packed(kept.flatten().nonzero().flatten(), at, _sums(n_rows), _sums(n.int()), int(n_rows.max()), int(n.max()), *words)


def mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=masking_utils.causal_mask_function,
         attention_mask=None, cache_position=None, dtype=torch.float32, device=None, **options):
    """transformers' mask interface: a Mask, or the tensor itself where the function is no known band or a graph is recorded."""
    if attention_mask is not None and attention_mask.dim() != 2:
        return attention_mask  # the caller's own
    if device is None:
        device = next((t.device for t in (attention_mask, cache_position) if t is not None), torch.device("cpu"))
    # Numbers of now: a static cache counts in place, and the tensor may be made later.
    graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not graph:
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    said = dict(options, batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
                attention_mask=attention_mask, dtype=dtype, device=device, allow_is_bidirectional_skip=False)
    old = cache_position is not None and q_length is None  # before q_offset was passed
    said |= {"cache_position": cache_position} if old else {"q_length": q_length, "q_offset": q_offset}
    if graph:
        return masking_utils.eager_mask(**said)
    band = band_of(mask_function)
    if band is None and torch.device(device).type != "cpu":  # GPUs' own loops take a bias, and no such data yet
        return masking_utils.eager_mask(**said)
    if old:
        rows, q_offset = len(cache_position), int(cache_position[0])
    else:
        rows = q_length
    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
    shape = batch_size, 1, rows, kv_length
    return Mask(_Kept(said, shape, band, q_offset - kv_offset, padding))
