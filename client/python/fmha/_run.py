# SPDX-License-Identifier: MIT
"""One call: the problem that arrays make, and who computes it.

What depends on shapes, strides, types and places alone is made once and kept by them: a call on what was seen before fills in
addresses, and looks at nothing else.
"""
from __future__ import annotations

import secrets
import threading

import numpy as np

from . import _arrays, _problem
from ._lib import check, ffi, heed_signals, invalid, lib, new_error
from ._service import Device
from ._start import default_client

KEPT = 4096  # problems a thread keeps
ALL = 1 << 30  # arrays

_CALLS = {"forward": lib.fmha_forward, "backward": lib.fmha_backward, "append": lib.fmha_append_kv,
          "merge": lib.fmha_merge_states}
_RUN_OPTIONS_BYTES = ffi.sizeof("struct fmha_run_options")


class _Kept(threading.local):
    def __init__(self):
        heed_signals()
        self.runs: dict = {}


_kept = _Kept()


class _Served:
    """A problem that the service computes; addresses are filled in at each run. Belongs to one thread."""

    __slots__ = ("problem", "tensors", "run", "error", "call")

    def __init__(self, views, shape, options):
        self.problem = _problem.new_problem()
        _problem.fill(self.problem, views, shape, options)
        self.tensors = [(ffi.addressof(self.problem.tensor[_problem.ROLES[n]]), _problem.extent_bytes(v)) for n, v in views.items()]
        self.run = ffi.new("struct fmha_run_options *", {"struct_size": _RUN_OPTIONS_BYTES})
        self.error = new_error()
        self.call = _CALLS[options.op]

    def execute(self, pointers, dropout, device):
        device = device or default_client().device()
        for (tensor, size), pointer in zip(self.tensors, pointers):
            where = device.locate(pointer, size)
            if where is None:
                tensor.buffer = tensor.offset = 0
                tensor.data = ffi.cast("void *", pointer or 64)
            else:
                tensor.data = ffi.NULL
                tensor.buffer, tensor.offset = where
        run = self.run
        run.has_dropout_state = dropout is not None
        if dropout is not None:
            run.dropout_seed, run.dropout_offset = dropout
        check(self.call(device.handle, self.problem, run, ffi.NULL, self.error), self.error)


def execute(arrays: dict, options, dropout=None, dropout_at=None, device: Device | None = None, n_said: int = ALL) -> None:
    """Computes the problem; returns when the results are there (CPU) or queued on torch's current stream (GPU).

    Args:
        arrays: role -> numpy array or torch tensor, outputs included.
        options: _problem.Options.
        dropout: (seed, offset). dropout_at: on a GPU, addresses of 64-bit words there that are added to them.
        device: the service's; None: the GPU that the arrays are on by a local launch, or the daemon's CPU.
        n_said: so many of the arrays, the first ones, say how the others lie: those are fresh memory of torch's, made after them.
    """
    run, pointers = find(arrays, options, dropout is None, n_said)
    if type(run) is _Served:
        run.execute(pointers, dropout, device)
    elif device is None:
        run.execute(pointers, dropout, dropout_at)
    else:
        raise invalid("arrays on a GPU go by a local launch: leave device out")


def find(arrays: dict, options, without_dropout: bool = True, n_said: int = ALL):
    """(what runs this problem in this thread: _Served or _local.Run, the arrays' addresses)."""
    parts, pointers = [options, without_dropout, n_said, *arrays], []
    for array in arrays.values():
        if type(array) is np.ndarray:
            pointer = array.__array_interface__["data"][0]
            parts += (array.shape, array.strides, array.dtype)
        else:
            pointer = array.data_ptr()
            if len(pointers) < n_said:
                parts += (array.shape, array.stride(), array.dtype, array.get_device(), pointer & 15)
        pointers.append(pointer)
    key = tuple(parts)
    return _kept.runs.get(key) or _prepare(key, arrays, options), pointers


def _prepare(key, arrays, options):
    views = {n: _arrays.view(a, n) for n, a in arrays.items()}
    shape = _problem.shape_of(views, options)
    place = _problem.place_of(views)
    if place is None:
        run = _Served(views, shape, options)
    else:
        from . import _local

        run = _local.Run(key, views, shape, options, place)
    if len(_kept.runs) >= KEPT:
        _kept.runs.clear()
    _kept.runs[key] = run
    return run


def seed_of(seed) -> int:
    """A dropout seed: the caller's, or a fresh one."""
    return secrets.randbits(63) if seed is None else int(seed) & (2**64 - 1)


_LONG = frozenset(("slot_mapping", "positions"))
_INTEGERS = frozenset(("seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k", "leftpad_k", "cache_batch_idx", "block_table", "kv_indptr",
                       "kv_page_indices", "kv_last_page_len", "mask_intervals", "indices"))


def adopted(arrays: dict, written: tuple = ()) -> dict:
    """Those that are not None as numpy's or torch's, lengths and tables as int32; @written: outputs among them."""
    kept = {}
    for name in written:
        _arrays.check_writable(arrays.get(name), name)
    for name, array in arrays.items():
        if array is not None:
            kept[name] = (_arrays.int32 if name in _INTEGERS else _arrays.int64 if name in _LONG else _arrays.adopt)(array, name)
            check_rank(name, kept[name].shape)
    return kept


# Of arrays whose axes say the problem's sizes; libfmha_client holds the others against those.
_RANKS = dict.fromkeys(("q", "k", "v", "k_new", "v_new"), (3, 4)) | dict.fromkeys(("mask_intervals", "mask_bits"), (2, 3, 4)) | dict.fromkeys(
    ("block_table", "rotary_cos", "rotary_sin"), (2,)) | dict.fromkeys(("seqstart_q", "seqstart_k", "kv_indptr", "kv_page_indices"), (1,))


def check_rank(name: str, shape) -> None:
    wanted = _RANKS.get(name)
    if wanted is not None and len(shape) not in wanted:
        raise invalid(f"{name} is {tuple(shape)}: {' or '.join(map(str, wanted))} dimensions are wanted", f"tensor.{name}")
