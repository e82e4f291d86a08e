# SPDX-License-Identifier: MIT
"""What a rank computes on keys that it has: which rows against which keys, under which mask, in how few calls.

A piece is rows of one sequence that lie together, and keys of it that lie together. In its own coordinates its mask is a band again,
tied to another corner, so every kernel takes it. Pieces of packed sequences whose rows and keys follow each other and whose bands are
the same go into one call.
"""
from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from .shares import PATCH, Held, by_document
from ... import _problem
from ..._lib import not_supported


class Piece(NamedTuple):
    """Rows [q0, q1) and keys [k0, k1) of what a rank holds; left, right: of a band at the bottom right corner or, with top, the top left
    one, -1: all. document: its number; row, key: where q0 and k0 are in it."""

    q0: int
    q1: int
    k0: int
    k1: int
    left: int
    right: int
    top: bool
    document: int
    row: int
    key: int

    @property
    def band(self):
        return self.left, self.right, self.top

    @property
    def mask(self) -> int:
        if self.left < 0 and self.right < 0:
            return _problem.MASK_NONE
        return _problem.MASK_TOP_LEFT if self.top else _problem.MASK_BOTTOM_RIGHT


def _piece(q: Held, k: Held, first: int, document: int, left: int, right: int) -> Piece | None:
    """Rows @q against keys @k where row i sees keys [i - left, i + right], -1: all; None: they see none of them."""
    a, b, c, d = q.begin, q.end, k.begin, k.end
    if right >= 0:
        a = max(a, c - right)
        d = min(d, b + right)
    if left >= 0:
        b = min(b, d + left)
        c = max(c, a - left)
    if right >= 0:
        d = min(d, b + right)  # b may have come down
    if a >= b or c >= d:
        return None
    n_q, n_k, corner = b - a, d - c, a - c
    of_left = -1 if left < 0 or left - corner >= n_q - 1 else left - corner  # from the top left corner
    of_right = -1 if right < 0 or right + corner >= n_k - 1 else right + corner
    top = True
    shift = n_k - n_q
    if (of_left < 0 or of_left + shift >= 0) and (of_right < 0 or of_right - shift >= 0):
        of_left = of_left if of_left < 0 else of_left + shift
        of_right = of_right if of_right < 0 else of_right - shift
        top = False
    return Piece(q.at + a - q.begin, q.at + b - q.begin, k.at + c - k.begin, k.at + d - k.begin, of_left, of_right, top, document,
                 a - first, c - first)


def _all_seen(piece) -> bool:
    return piece.left < 0 and piece.right < 0


def _join(pieces):
    """Neighbours as one where everything is seen: rows against the same keys, keys against the same rows."""
    found: list = []
    for p in pieces:
        for i, o in enumerate(found):
            if not (_all_seen(p) and _all_seen(o) and p.document == o.document):
                continue
            if (o.k0, o.k1) == (p.k0, p.k1) and o.q1 == p.q0:
                found[i] = o._replace(q1=p.q1)
                break
            if (o.q0, o.q1) == (p.q0, p.q1) and o.k1 == p.k0:
                found[i] = o._replace(k1=p.k1)
                break
        else:
            found.append(p)
    return found


@functools.lru_cache(maxsize=4096)
def pieces(documents: tuple, rows: tuple, keys: tuple, left: int, right: int, alone: bool = False) -> tuple:
    """All pieces of @rows against @keys (Held). @alone: none is joined to others, as dropout wants it."""
    if (len(documents) == 2 and rows == keys and (left, right) == (-1, 0) and not alone and rows and _is_dense(rows)):
        # The order among rows is that among keys: cut or not, it is one triangle.
        n = rows[-1].at + rows[-1].end - rows[-1].begin
        return (Piece(0, n, 0, n, -1, 0, False, 0, 0, 0),)
    of_rows, of_keys, found = by_document(documents, rows), by_document(documents, keys), []
    for document, mine in of_rows.items():
        made = [_piece(q, k, documents[document], document, left, right) for q in mine for k in of_keys.get(document, ())]
        made = [p for p in made if p is not None]
        found += made if alone else _join(_join(made))
    return tuple(found)


def _is_dense(intervals) -> bool:
    at = 0
    for begin, end, start in intervals:
        if start != at:
            return False
        at += end - begin
    return all(x.end <= y.begin for x, y in itertools.pairwise(intervals))


class Call(NamedTuple):
    """Pieces that one call computes. sums: None of one piece; of packed ones (seqstart_q, seqlen_q, seqstart_k, seqlen_k) as tuples,
    lengths empty where sums say them; and the longest rows and keys."""

    pieces: tuple
    sums: tuple | None = None
    longest_q: int = 0
    longest_k: int = 0

    @property
    def rows(self):
        return self.pieces[0].q0, self.pieces[-1].q1

    @property
    def keys(self):
        return self.pieces[0].k0, self.pieces[-1].k1


@functools.lru_cache(maxsize=4096)
def calls(found: tuple, packed: bool, total_q: int, total_k: int) -> tuple:
    """@found in as few calls as their bands and places allow."""
    if not packed:
        return tuple(Call((p,)) for p in found)
    groups: list = []
    for p in sorted(found):
        for group in groups:
            last = group[-1]
            if last.band == p.band and last.q1 <= p.q0 and last.k1 <= p.k0:
                group.append(p)
                break
        else:
            groups.append([p])
    return tuple(_packed(tuple(g), total_q, total_k) for g in groups)


def _packed(group, total_q, total_k):
    starts_q, starts_k = [p.q0 for p in group] + [total_q], [p.k0 for p in group] + [total_k]
    lengths_q, lengths_k = [p.q1 - p.q0 for p in group], [p.k1 - p.k0 for p in group]
    most = max(lengths_q), max(lengths_k)
    lengths_q, lengths_k = (() if all(a + n == b for a, n, b in zip(s, of, s[1:])) else tuple(of)
                            for s, of in ((starts_q, lengths_q), (starts_k, lengths_k)))
    return Call(group, (tuple(starts_q), lengths_q, tuple(starts_k), lengths_k), *most)


@functools.lru_cache(maxsize=4096)
def sums_on(sums: tuple, device: torch.device) -> tuple:
    """A call's sums and lengths as int32 there; @device "cuda" with its index."""
    flat = torch.tensor([i for part in sums for i in part], dtype=torch.int32)
    if device.type != "cpu":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return tuple(t.clone() if t.data_ptr() % 16 and device.type != "cpu" else t for t in flat.split([len(part) for part in sums]))


def check_patches(found, name: str) -> None:
    """Dropout's random numbers are a patch's: a cut inside one has no call that draws them."""
    for p in found:
        if p.row % 16 or p.key % PATCH:
            raise not_supported(f"dropout: {name} cuts a sequence at row {p.row}, key {p.key}: multiples of {PATCH} are wanted, as "
                                "cp.balanced() cuts long sequences", "dropout_p")
