# SPDX-License-Identifier: MIT
"""Masks as data: which keys each row sees, as intervals or as bits, made once and given to attention(mask=...) as often as wanted.

    mask = fmha.masks.document_mask([0, 700, 1000, 4096], causal=True)
    o = fmha.attention(q, k, v, mask=mask)
    print(mask)                                     # extents, and how much work it leaves
    fmha.masks.plot(mask, "mask.svg")

Builders need numpy alone and no daemon. What intervals do not hold (more than 31 of them in a row) becomes bits, a 32nd of a float
bias; both skip tiles that nobody sees. Rows and keys count within a sequence: a mask of packed sequences (cu_seqlens) has the rows of
all of them, one after another.
"""
from __future__ import annotations

import threading
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from ._lib import invalid

__all__ = [
    "BitMask", "IntervalMask", "chunked", "document_mask", "from_block_mask", "from_dense", "from_function", "image_spans", "natten_1d",
    "natten_2d", "plot", "prefix_lm", "shared_question", "sliding", "svg", "tree",
]

MOST_ENDPOINTS = 63
_SLICE = 1 << 24  # pairs of a row and a key that are looked at together


class _Mask:
    """keys: of the longest sequence. shape: [batch or 1, heads or 1, rows, keys]."""

    role = ""

    def __init__(self, data: np.ndarray, keys: int):
        self.data, self.keys = data, int(keys)
        self._placed: dict = {}
        self._lock = threading.Lock()

    def beside(self, array) -> Any:
        """The mask's data where @array lies: numpy's, or a torch tensor on its device, made once for each."""
        from . import _arrays

        if not _arrays.is_torch(array):
            return self.data
        with self._lock:
            placed = self._placed.get(array.device)
            if placed is None:
                import torch

                placed = self._placed[array.device] = torch.from_numpy(self.data).to(array.device)
            return placed

    def slices(self) -> Iterator[tuple]:
        """(batch, head, first row, bool [some rows, keys]), all of the mask in slices of bounded size."""
        batch, heads, rows, keys = self.shape
        step = max(_SLICE // max(keys, 1), 1)
        for b in range(batch):
            for h in range(heads):
                for first in range(0, rows, step):
                    yield b, h, first, self._seen(b, h, first, min(first + step, rows))

    def dense(self) -> np.ndarray:
        """bool [batch or 1, heads or 1, rows, keys]; for looking at: attention never makes it."""
        seen = np.zeros(self.shape, bool)
        for b, h, first, part in self.slices():
            seen[b, h, first : first + len(part)] = part
        return seen

    def work(self, tile: tuple = (128, 128)) -> tuple:
        """(share of pairs that are seen, share of tiles of @tile rows and keys in which some are): the second is the cost."""
        _, _, rows, keys = self.shape
        pairs = tiles = n_tiles = 0
        height, width = tile
        for b in range(self.shape[0]):
            for h in range(self.shape[1]):
                for first in range(0, rows, height):
                    part = self._seen(b, h, first, min(first + height, rows))
                    pairs += int(part.sum())
                    columns = np.add.reduceat(part.any(0), np.arange(0, keys, width)) if keys else np.zeros(0)
                    tiles += int((columns > 0).sum())
                    n_tiles += len(columns)
        total = self.shape[0] * self.shape[1] * rows * keys
        return (pairs / total if total else 0.0), (tiles / n_tiles if n_tiles else 0.0)

    def __repr__(self):
        pairs, tiles = self.work()
        return f"{type(self).__name__}({list(self.shape)}, sees {pairs:.1%}, tiles {tiles:.1%})"


class IntervalMask(_Mask):
    """A row sees the keys in [0, F0) and [F1, F2) and [F3, F4) ..., F being its endpoints.

    Args:
        endpoints: int32 [n, rows], [heads or 1, n, rows] or [batch or 1, heads or 1, n, rows]; n odd, at most 63. Anything is an
            endpoint: those beyond the keys are cut, and an interval that ends before it begins is empty.
        keys: of the longest sequence.
    """

    role = "mask_intervals"

    def __init__(self, endpoints: Any, keys: int):
        endpoints = np.asarray(endpoints)
        if endpoints.dtype.kind not in "iu":
            raise invalid(f"endpoints hold {endpoints.dtype}: integers are wanted", "tensor.mask_intervals")
        if not 2 <= endpoints.ndim <= 4 or not endpoints.shape[-2] % 2 or endpoints.shape[-2] > MOST_ENDPOINTS:
            raise invalid(f"endpoints are {list(endpoints.shape)}: [batch, heads, n, rows] with n odd and at most {MOST_ENDPOINTS}",
                          "tensor.mask_intervals")
        limits = np.iinfo(np.int32)
        endpoints = np.clip(endpoints, limits.min, limits.max).astype(np.int32)
        super().__init__(np.ascontiguousarray(endpoints.reshape((1,) * (4 - endpoints.ndim) + endpoints.shape)), keys)

    @property
    def shape(self) -> tuple:
        batch, heads, _, rows = self.data.shape
        return batch, heads, rows, self.keys

    def _seen(self, b, h, first, end):
        f = np.clip(self.data[b, h, :, first:end], 0, self.keys)
        step = np.zeros((f.shape[1], self.keys + 1), np.int16)
        row = np.arange(f.shape[1])
        for e in range(0, len(f), 2):
            begin = f[e - 1] if e else np.zeros_like(f[0])
            np.add.at(step, (row, begin), 1)
            np.add.at(step, (row, np.maximum(f[e], begin)), -1)
        return step.cumsum(1)[:, :-1] > 0


class BitMask(_Mask):
    """Bit j % 8 of byte j / 8 says whether a row sees key j.

    Args:
        bits: uint8 [rows, ceil(keys / 8)], with heads and batch before them; each but the last may be 1.
        keys: of the longest sequence.
    """

    role = "mask_bits"

    def __init__(self, bits: Any, keys: int):
        bits = np.asarray(bits)
        if bits.dtype != np.uint8 or not 2 <= bits.ndim <= 4 or bits.shape[-1] != (keys + 7) // 8:
            raise invalid(f"bits are {bits.dtype} {list(bits.shape)}: uint8 [batch, heads, rows, {(keys + 7) // 8}]", "tensor.mask_bits")
        super().__init__(np.ascontiguousarray(bits.reshape((1,) * (4 - bits.ndim) + bits.shape)), keys)

    @property
    def shape(self) -> tuple:
        return *self.data.shape[:3], self.keys

    def _seen(self, b, h, first, end):
        return np.unpackbits(self.data[b, h, first:end], axis=-1, bitorder="little", count=self.keys).astype(bool)


# ---- from what people have ----


def _runs(seen: np.ndarray) -> tuple:
    """Where runs of True begin and end, as (rows, first columns, ends), row by row."""
    padded = np.zeros((seen.shape[0], seen.shape[1] + 2), np.int8)
    padded[:, 1:-1] = seen
    change = np.diff(padded, axis=1)
    rows, begins = np.nonzero(change == 1)
    return rows, begins, np.nonzero(change == -1)[1]


def _endpoints(rows, begins, ends, n_rows: int) -> np.ndarray:
    """[n, rows] of runs in order; a first run that begins at 0 is F0's."""
    at_zero = begins == 0
    number = np.arange(len(rows)) - np.searchsorted(rows, rows)
    has_zero = np.zeros(n_rows, bool)
    has_zero[rows[at_zero]] = True
    number = number - has_zero[rows] + 1  # 0: F0; k: F(2k - 1), F(2k)
    endpoints = np.zeros((2 * int(number.max(initial=0)) + 1, n_rows), np.int32)
    endpoints[2 * number, rows] = ends
    later = ~at_zero
    endpoints[2 * number[later] - 1, rows[later]] = begins[later]
    return endpoints


def _of_slices(parts: Iterator[tuple], shape: tuple, bits: bool | None) -> _Mask:
    """A mask of what @parts gives, as _Mask.slices() does. @bits: True: as bits; False: as intervals or not at all."""
    batch, heads, rows, keys = shape
    packed = np.zeros((batch, heads, rows, (keys + 7) // 8), np.uint8)
    found: dict = {}
    for b, h, first, seen in parts:
        packed[b, h, first : first + len(seen)] = np.packbits(seen, axis=-1, bitorder="little")
        if not bits and found is not None:
            endpoints = _endpoints(*_runs(seen), len(seen))
            if len(endpoints) <= MOST_ENDPOINTS:
                found[b, h, first] = endpoints
            elif bits is False:
                raise invalid(f"a row of the mask sees {len(endpoints) // 2} intervals and more: {MOST_ENDPOINTS // 2} are the most, bits hold it",
                              "tensor.mask_intervals")
            else:
                found = None
    if bits or found is None:
        return BitMask(packed, keys)
    n = max((len(e) for e in found.values()), default=1)
    endpoints = np.zeros((batch, heads, n, rows), np.int32)
    for (b, h, first), part in found.items():
        endpoints[b, h, : len(part), first : first + part.shape[1]] = part
    return IntervalMask(endpoints, keys)


def from_dense(mask: Any, bits: bool | None = None) -> _Mask:
    """A boolean mask of numpy's or torch's, True: seen, [rows, keys] with heads and batch before them.

    Args:
        bits: None: intervals where they hold it, else bits; True, False: only the one or the other.
    """
    if hasattr(mask, "detach"):
        mask = mask.detach().cpu().numpy()
    mask = np.asarray(mask)
    if mask.dtype != bool or not 2 <= mask.ndim <= 4:
        raise invalid(f"the mask is {mask.dtype} {list(mask.shape)}: bool [batch, heads, rows, keys]", "mask")
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    batch, heads, rows, keys = mask.shape
    step = max(_SLICE // max(keys, 1), 1)
    parts = ((b, h, i, mask[b, h, i : i + step]) for b in range(batch) for h in range(heads) for i in range(0, rows, step))
    return _of_slices(parts, mask.shape, bits)


def from_function(function: Callable, rows: int, keys: int, batch: int = 1, heads: int = 1, bits: bool | None = None) -> _Mask:
    """@function(batch, head, row, key) -> bool, on integer arrays that broadcast, evaluated here, some rows at a time.

    numpy arrays where torch is not loaded by the caller's function: see from_block_mask() for torch's.
    """
    def part(b, h, first, end):
        row, key = np.arange(first, end)[:, None], np.arange(keys)[None]
        return np.broadcast_to(np.asarray(function(b, h, row, key), bool), (end - first, keys))

    return _of_slices(_evaluated(part, batch, heads, rows, keys), (batch, heads, rows, keys), bits)


def _evaluated(part, batch, heads, rows, keys):
    step = max(_SLICE // max(keys, 1), 1)
    for b in range(batch):
        for h in range(heads):
            for first in range(0, rows, step):
                yield b, h, first, part(b, h, first, min(first + step, rows))


def from_block_mask(block_mask: Any, bits: bool | None = None) -> _Mask:
    """torch's BlockMask: its mask_mod is evaluated here, in slices, and never leaves this process."""
    import torch

    (batch, heads, rows, keys), function = block_mask.shape, block_mask.mask_mod
    device = block_mask.kv_num_blocks.device

    def part(b, h, first, end):
        row = torch.arange(first, end, device=device)[:, None]
        key = torch.arange(keys, device=device)[None]
        seen = function(torch.tensor(b, device=device), torch.tensor(h, device=device), row, key)
        return seen.expand(end - first, keys).cpu().numpy()

    return _of_slices(_evaluated(part, batch, heads, rows, keys), (batch, heads, rows, keys), bits)


# ---- masks that people know by name ----


def _lengths(values: Any, name: str) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    values = np.atleast_1d(np.asarray(values))
    if values.ndim != 1 or values.dtype.kind not in "iu" or (values < 0).any():
        raise invalid(f"{name}: whole numbers, 0 or more, are wanted", name)
    return values.astype(np.int64)


def _size(value: Any, name: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least or value >= 2**31:
        raise invalid(f"{name} is {value!r}: a whole number, {least} or more", name)
    return int(value)


def document_mask(cu_seqlens: Any, causal: bool = False) -> IntervalMask:
    """Documents behind each other in one sequence: a row sees its own. cu_seqlens: [0, ..., rows], where each begins."""
    starts = _lengths(cu_seqlens, "cu_seqlens")
    if len(starts) < 2 or starts[0] != 0 or (np.diff(starts) < 0).any():
        raise invalid("cu_seqlens: 0 first, and none below the one before", "cu_seqlens")
    rows = int(starts[-1])
    i = np.arange(rows)
    document = np.searchsorted(starts, i, side="right") - 1
    return IntervalMask(np.stack([0 * i, starts[document], i + 1 if causal else starts[document + 1]]), rows)


def prefix_lm(prefixes: Any, rows: int) -> IntervalMask:
    """Causal but for a prefix that sees itself whole. prefixes: one length, or one for each of the batch."""
    prefixes, i = _lengths(prefixes, "prefixes"), np.arange(_size(rows, "rows"))
    return IntervalMask(np.maximum(prefixes[:, None], i + 1)[:, None, None], rows)


def sliding(left: int, right: int, rows: int, keys: int | None = None) -> IntervalMask:
    """Row i sees keys i - left to i + right; -1: all on that side. The last row lies on the last key."""
    rows, keys = _size(rows, "rows"), _size(rows if keys is None else keys, "keys")
    left, right = _size(left, "left", -1), _size(right, "right", -1)
    i = np.arange(rows) + keys - rows
    end = i + right + 1 if right >= 0 else 0 * i + keys
    return IntervalMask(end[None] if left < 0 else np.stack([0 * i, np.maximum(i - left, 0), end]), keys)


def chunked(chunk: int, rows: int, keys: int | None = None) -> IntervalMask:
    """Llama 4's local layers: causal, and within chunks of so many positions."""
    rows, keys = _size(rows, "rows"), _size(rows if keys is None else keys, "keys")
    i = np.arange(rows) + keys - rows
    return IntervalMask(np.stack([0 * i, i // _size(chunk, "chunk", 1) * chunk, i + 1]), keys)


def shared_question(question: int, answers: Sequence[int]) -> IntervalMask:
    """A question and answers to it behind each other: all causal, and no answer sees another."""
    question, answers = _size(question, "question"), _lengths(answers, "answers")
    starts = question + np.concatenate([[0], np.cumsum(answers)])
    rows = int(starts[-1])
    i = np.arange(rows)
    start = starts[np.maximum(np.searchsorted(starts, i, side="right") - 1, 0)]
    answer = i >= question
    return IntervalMask(np.stack([np.where(answer, question, i + 1), np.where(answer, start, 0), np.where(answer, i + 1, 0)]), rows)


def image_spans(spans: Any, rows: int) -> IntervalMask:
    """Causal, and each image's tokens see all of it. spans: [(begin, end), ...], or a list of those for each of the batch."""
    rows = _size(rows, "rows")
    spans = list(spans)
    each = [spans] if not spans or np.ndim(spans[0]) == 1 and not (len(spans[0]) and np.ndim(spans[0][0])) else spans
    ends = np.tile(np.arange(rows) + 1, (len(each), 1))
    for b, those in enumerate(each):
        for begin, end in those:
            if not 0 <= begin <= end <= rows:
                raise invalid(f"span ({begin}, {end}): within 0 to {rows}, and none that ends before it begins", "spans")
            ends[b, begin:end] = np.maximum(ends[b, begin:end], end)
    return IntervalMask(ends[:, None, None], rows)


def tree(parents: Any, context: int = 0) -> _Mask:
    """A tree of drafted tokens behind a context: each sees the context, its ancestors and itself.

    Args:
        parents: the number of each token's parent, which comes before it; -1: none.
    """
    context = _size(context, "context")
    parents = np.atleast_1d(np.asarray(parents))
    n = len(parents)
    if parents.ndim != 1 or parents.dtype.kind not in "iu" or (parents >= np.arange(n)).any() or (parents < -1).any():
        raise invalid("parents: each -1, or the number of a token before", "parents")
    seen = np.zeros((n, context + n), bool)
    seen[:, :context] = True
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] = seen[parent]
        seen[i, context + i] = True
    return from_dense(seen)


def _neighbours(length: int, kernel: int, dilation: int, causal: bool, name: str) -> np.ndarray:
    """[length, kernel]: whom each position sees, -1: nobody. As NATTEN: a window that leaves the edge is pushed back in."""
    kernel, dilation = _size(kernel, f"kernel of {name}", 1), _size(dilation, f"dilation of {name}", 1)
    if kernel * dilation > length:
        raise invalid(f"{name}: a kernel of {kernel} with dilation {dilation} does not fit into {length}", "kernel")
    i = np.arange(length)
    group, at = i % dilation, i // dilation
    room = (length - group + dilation - 1) // dilation  # positions of its group
    first = at - kernel + 1 if causal else np.clip(at - kernel // 2, 0, room - kernel)
    found = first[:, None] + np.arange(kernel)
    return np.where(found >= 0, found * dilation + group[:, None], -1)


def _dense_neighbours(length, kernel, dilation, causal, name):
    found = _neighbours(length, kernel, dilation, causal, name)
    seen = np.zeros((length, length), bool)
    rows, columns = np.nonzero(found >= 0)
    seen[rows, found[rows, columns]] = True
    return seen


def natten_1d(length: int, kernel: int, dilation: int = 1, causal: bool = False) -> _Mask:
    """Neighbourhood attention: each sees the @kernel nearest, at the edges those that there are."""
    length = _size(length, "length")
    if dilation == 1:
        found = _neighbours(length, kernel, 1, causal, "length")
        return IntervalMask(np.stack([0 * found[:, 0], np.maximum(found[:, 0], 0), found[:, -1] + 1]), length)
    return from_dense(_dense_neighbours(length, kernel, dilation, causal, "length"))


def natten_2d(height: int, width: int, kernel: tuple, dilation: tuple = (1, 1), causal: tuple = (False, False)) -> _Mask:
    """The same of pictures, position y * width + x, along both axes."""
    height, width = _size(height, "height"), _size(width, "width")
    down = _dense_neighbours(height, kernel[0], dilation[0], causal[0], "height")
    across = _dense_neighbours(width, kernel[1], dilation[1], causal[1], "width")
    rows = height * width

    def part(b, h, first, end):
        i = np.arange(first, end)
        return (down[i // width][:, :, None] & across[i % width][:, None, :]).reshape(len(i), rows)

    return _of_slices(_evaluated(part, 1, 1, rows, rows), (1, 1, rows, rows), None)


# ---- to look at ----


def svg(mask: _Mask, size: int = 64, batch: int = 0, head: int = 0) -> str:
    """A picture: rows downwards, keys to the right, darker where more is seen; below it the share of work."""
    _, _, rows, keys = mask.shape
    height, width = min(size, rows), min(size, keys)
    cells = []
    for y in range(height):
        first, end = y * rows // height, (y + 1) * rows // height
        part = mask._seen(batch, head, first, end).mean(0)
        x = 0
        while x < width:
            shade = _shade(part, x, width)
            run = x + 1
            while run < width and _shade(part, run, width) == shade:
                run += 1
            if shade:
                cells.append(f'<rect x="{x}" y="{y}" width="{run - x}" height="1" fill-opacity="{shade / 8:g}"/>')
            x = run
    pairs, tiles = mask.work()
    said = f"{rows} rows, {keys} keys: {pairs:.1%} seen, {tiles:.1%} of 128 x 128 tiles"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {height + 6}" width="{6 * width}" role="img">'
            f'<title>{said}</title><rect width="{width}" height="{height}" fill="none" stroke="#888" stroke-width="0.2"/>'
            f'<g fill="#2a5db0" shape-rendering="crispEdges">{"".join(cells)}</g>'
            f'<text y="{height + 3}" font-size="2.5" font-family="sans-serif" fill="#555">{said}</text></svg>\n')


def _shade(part, x, width):
    """Eighths, rounded up: what is seen at all shows."""
    return int(np.ceil(8 * part[x * len(part) // width : (x + 1) * len(part) // width].mean()))


def plot(mask: _Mask, path: Any = None, size: int = 32, batch: int = 0, head: int = 0) -> str:
    """svg() written to @path; returned is a sketch in letters, '#': all seen, '+': some, '.': nothing."""
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(svg(mask, max(size, 64), batch, head))
    _, _, rows, keys = mask.shape
    height, width = min(size, rows), min(size, keys)
    lines = []
    for y in range(height):
        part = mask._seen(batch, head, y * rows // height, (y + 1) * rows // height)
        cells = (part[:, x * keys // width : (x + 1) * keys // width] for x in range(width))
        lines.append("".join("#" if c.all() else "+" if c.any() else "." for c in cells))
    return "\n".join(lines)


# ---- for attention() ----


def data_of(mask: Any, q: Any, rows: int, batch: int) -> tuple:
    """(role, array) of what a caller gave as mask=: one from here, or an array: int32 endpoints, uint8 bits.

    Args:
        rows: of a sequence, or of all that are packed. batch: 1 where they are packed.
    """
    if isinstance(mask, _Mask):
        return mask.role, mask.beside(q)
    kind = str(getattr(mask, "dtype", type(mask).__name__)).removeprefix("torch.")
    if kind == "uint8":
        return "mask_bits", mask
    if kind not in ("int32", "int64"):
        raise invalid(f"mask is {kind}: one of fmha.masks, int32 endpoints [heads, n, rows] or uint8 bits [heads, rows, keys / 8]; "
                      "a dense one goes through fmha.masks.from_dense(), or is a bias", "mask")
    if len(mask.shape) == 3 and batch > 1 and mask.shape[2] == batch * rows:
        heads, n, _ = mask.shape  # cuDNN's: the rows of all sequences
        mask = mask.reshape(heads, n, batch, rows)
        mask = mask.transpose(2, 0, 1, 3) if isinstance(mask, np.ndarray) else mask.permute(2, 0, 1, 3)
    return "mask_intervals", mask
