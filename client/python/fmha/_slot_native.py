# SPDX-License-Identifier: MIT
"""torch's two operators behind scaled_dot_product_attention in C: fmha/slot.h, for calls that were seen before.

_slot.py's functions stay what they are: they have operators of their own, which the C functions call with what they do not
know. There a call that went by a local launch of its tensors alone is told to them, by learn().
"""
from __future__ import annotations

import threading

import torch

from . import _local, _run
from ._lib import ffi as client_ffi
from ._lib import lib, native

try:
    from ._slot_abi import ffi
except ImportError:  # a build without a compiler of C++
    ffi = None

SERVED = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
# Their arguments and results, in torch's order. Others of another torch are left to Python.
_SCHEMAS = {
    SERVED[0]: "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
               "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
               "Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    SERVED[1]: "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, "
               "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) "
               "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
}
_VERSIONS = ((2, 11), (2, 15))  # of torch, first and last: exceptions are carried as these do
_LEARNED = ("struct fmha_local_plan *", "const struct fmha_local_keys *", "uint8_t *")
_held: list = []  # plans that the C functions may launch
_captured: list = []  # of those that were forgotten, what graphs have
_kept: list = []  # what the C functions point to
_lock = threading.Lock()
_functions = None  # the library, once it was opened
_library = None  # Python's operators


def _guarded(function, n_results):
    """@function, whose results are tensors alone and whose exceptions go by the C functions: torch's way from there to here takes neither
    numbers among tensors nor exceptions."""
    def run(q, *args, **words):
        try:
            results = function(q, *args, **words)
        except BaseException as error:  # noqa: BLE001: all of them go on
            _functions.fmha_slot_raise(id(type(error)), id(error), id(error.__traceback__))
            return (q,) * n_results
        return results if n_results == len(results) else (*results[:4], *results[6:])

    return run


def _define(functions) -> None:
    """Operators of Python's @functions."""
    global _library
    if _library is not None:
        _library._destroy()
    library = _library = torch.library.Library("fmha", "FRAGMENT")
    for name, n_results in zip(SERVED, (7, 3)):
        arguments = _SCHEMAS[name].split(" -> ")[0]
        library.define(f"_slot{name}{arguments} -> ({', '.join(['Tensor'] * n_results)})")
        for key in ("CPU", "CUDA"):
            library.impl(f"_slot{name}", _guarded(functions[name], n_results), key)


def why_not() -> str | None:
    """Why the slot stays in Python, or None."""
    if ffi is None or native("lib", "libfmha_slot.so") is None:
        return "this package was built without it"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not _VERSIONS[0] <= version <= _VERSIONS[1]:
        return f"torch {torch.__version__}: 2.11 to 2.15 are known"
    for name, schema in _SCHEMAS.items():
        if str(getattr(torch.ops.aten, name).default._schema) != f"aten::{name}{schema}":
            return f"torch's {name} has other arguments"
    return None


def _address(pointer) -> int:
    """Of something of libfmha_client's, whose types cffi keeps apart from the slot's."""
    return int(client_ffi.cast("uintptr_t", pointer))


def activate(functions, key: str, run=None) -> str | None:
    """Puts the C functions before what is registered for @key. Return: as why_not().

    @functions: Python's, by their operators' names. @run: instead of fmha_local_plan_run().
    """
    global _functions
    reason = why_not()
    if reason is not None:
        return reason
    if _functions is None:
        _functions = ffi.dlopen(str(native("lib", "libfmha_slot.so")))
    _define(functions)
    names = [ffi.new("char[]", name.encode()) for name in (key, *(f"fmha::_slot{n}" for n in SERVED))]
    options = ffi.new("struct fmha_slot_options *", dict(zip(("key", "forward", "backward"), names)))
    options.run = ffi.cast(ffi.typeof(options.run), _address(client_ffi.addressof(lib, "fmha_local_plan_run") if run is None else run))
    _kept.append((names, options))
    found = _functions.fmha_slot_open(options)
    return None if found == ffi.NULL else ffi.string(found).decode()


def deactivate() -> None:
    if _functions is not None:
        _functions.fmha_slot_close()


def learn(run) -> None:
    """In a call that the C functions handed over: @run, a _local.Run, is what it was."""
    if _functions is None:
        return
    with _lock:
        if len(_held) >= _run.KEPT and not _forget():
            return
        plan = run.plan
        workspace = 0 if plan.workspace is None else plan.workspace.numel()
        handle, keys, flag = (ffi.cast(kind, _address(p)) for kind, p in zip(_LEARNED, (plan.handle, run.keys, plan.flag)))
        if _functions.fmha_slot_learn(handle, workspace, keys, flag):
            _held.append(plan)


def _forget() -> bool:
    """Frees all plans that no graph has; their work has to be over first. Return: whether that can be now."""
    if _local._is_capturing():
        return False
    _functions.fmha_slot_forget()
    for index in {plan.index for plan in _held}:
        torch.cuda.synchronize(index)
    _captured.extend(plan for plan in _held if plan.captured)
    _held.clear()
    return True


def counts() -> dict:
    """Calls by operator that were launched by the C functions, and what else fmha_slot_count() says."""
    if _functions is None:
        return {}
    found = ffi.new("struct fmha_slot_counts *")
    _functions.fmha_slot_count(found)
    return {SERVED[0]: found.forward, SERVED[1]: found.backward, "asked": found.asked, "known": found.known}
