# SPDX-License-Identifier: MIT
"""One call: views of the arrays, the problem that they make, and who computes it.

What depends on shapes, strides and types alone is made once and kept: a call on shapes seen before fills in addresses.
"""
from __future__ import annotations

import secrets
import threading
from collections import OrderedDict

from . import _arrays, _problem
from ._lib import check, ffi, invalid, lib, new_error
from ._service import Device, default_client

KEPT = 256  # problems a thread keeps; the oldest goes first

_CALLS = {"forward": lib.fmha_forward, "backward": lib.fmha_backward, "append": lib.fmha_append_kv,
          "merge": lib.fmha_merge_states}


class _Prepared:
    """A problem without addresses, in C, and what runs it. Belongs to one thread."""

    __slots__ = ("problem", "tensors", "run", "error", "call", "bytes")

    def __init__(self, views, shape, options):
        self.problem = _problem.new_problem()
        _problem.fill(self.problem, views, shape, options)
        self.tensors = {name: ffi.addressof(self.problem.tensor[_problem.ROLES[name]]) for name in views}
        self.bytes = {name: _problem.extent_bytes(view) for name, view in views.items()}
        self.run = ffi.new("struct fmha_run_options *", {"struct_size": ffi.sizeof("struct fmha_run_options")})
        self.error = new_error()
        self.call = _CALLS[options.op]


class _Kept(threading.local):
    def __init__(self):
        self.problems: OrderedDict = OrderedDict()


_kept = _Kept()


def _key(views, options):
    return options, tuple((n, v.shape, v.strides, v.dtype) for n, v in views.items())


def _prepared(views, shape, options) -> _Prepared:
    key = _key(views, options)
    found = _kept.problems.get(key)
    if found is None:
        found = _kept.problems[key] = _Prepared(views, shape, options)
        if len(_kept.problems) > KEPT:
            _kept.problems.popitem(last=False)
    return found


def execute(views: dict, shape, options, *, dropout=None, device: Device | None = None) -> None:
    """Computes the problem; returns when the results are there (CPU) or queued on the caller's stream (GPU).

    Args:
        views: role -> View of each tensor, outputs included; the caller keeps their arrays alive.
        dropout: (seed, offset).
        device: the service's; None: the caller's GPU by a local launch, or the daemon's CPU.
    """
    place = _problem.place_of(views)
    if place is not None and device is None:
        from . import _local

        return _local.execute(views, shape, options, place, dropout)
    prepared = _prepared(views, shape, options)
    device = device or default_client().device()
    if place is not None:
        raise invalid("arrays on a GPU go by a local launch: leave device out, or share buffers with fmha.Device")
    for name, view in views.items():
        tensor = prepared.tensors[name]
        where = device.locate(view.pointer, prepared.bytes[name])
        if where is None:
            tensor.buffer, tensor.offset = 0, 0
            tensor.data = ffi.cast("void *", view.pointer or 1)
        else:
            tensor.data = ffi.NULL
            tensor.buffer, tensor.offset = where
    run = prepared.run
    run.has_dropout_state = dropout is not None
    if dropout is not None:
        run.dropout_seed, run.dropout_offset = dropout
    check(prepared.call(device.handle, prepared.problem, run, ffi.NULL, prepared.error), prepared.error)


def seed_of(seed) -> int:
    """A dropout seed: the caller's, or a fresh one."""
    return secrets.randbits(63) if seed is None else int(seed) & (2**64 - 1)


def viewed(arrays: dict, written: tuple = ()) -> tuple[dict, dict]:
    """(arrays that Views were taken of, Views) of those that are not None; @written: outputs among them."""
    kept = {n: _arrays.adopt(a, n) for n, a in arrays.items() if a is not None}
    for name in written:
        if name in kept:
            _arrays.check_writable(kept[name], name)
    return kept, {n: _arrays.view(a, n) for n, a in kept.items()}
