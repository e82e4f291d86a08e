# SPDX-License-Identifier: MIT
"""Attention on a GPU, launched by this process on torch's current stream: fmha_local.h.

Nothing is copied, nothing waits, and a call may be captured in a CUDA graph. Plans are kept by everything that chooses
kernels: options, extents, strides, types and the last four bits of addresses. Many of them hold for a range of key lengths:
those are kept by all of this but the length and the strides that go with it, and a cache that grows takes a plan a range.
"""
from __future__ import annotations

import threading

import torch

from . import _problem
from ._lib import check, ffi, lib, new_error, not_supported
from ._start import default_client

KEPT = 4096  # plans; at more than that the oldest half goes

_plan_run = lib.fmha_local_plan_run
_RUN_BYTES = ffi.sizeof("struct fmha_local_run")
_plans: dict = {}
_ranges: dict = {}  # plans that hold for more than one length, the newest first
_lock = threading.Lock()
# Below torch.cuda's functions of those names, which look whether CUDA is initialised: that it is, a tensor on it shows.
_current_device, _raw_stream, _is_capturing = (
    getattr(torch._C, name, None)  # not in builds for the CPU
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream", "_cuda_isCurrentStreamCapturing"))


class Plan:
    """A problem's kernels in this process. Any number of threads may run it."""

    __slots__ = ("handle", "workspace", "flag", "index", "least", "most", "unit")

    def __init__(self, views, shape, options, place):
        problem = _problem.new_problem()
        _problem.fill(problem, views, shape, options)
        for name, view in views.items():
            problem.tensor[_problem.ROLES[name]].data = ffi.cast("void *", view.pointer or 64)
        found, error = ffi.new("struct fmha_local_plan **"), new_error()
        with torch.cuda.device(place[1]):
            torch.cuda.current_stream().query()  # the context exists
            check(lib.fmha_local_plan_new(_device(place).handle, problem, ffi.NULL, found, error), error)
        self.handle = ffi.gc(found[0], lib.fmha_local_plan_free)
        info = ffi.new("struct fmha_local_plan_info *")
        check(lib.fmha_local_plan_info(self.handle, info, error), error)
        self.workspace = None
        if info.workspace_bytes:  # one byte, seen as all of it, for torch.empty_like()
            self.workspace = torch.empty(1, dtype=torch.uint8, device=f"cuda:{place[1]}").expand(info.workspace_bytes)
        self.flag = ffi.new("uint8_t *")
        self.index = place[1]
        self.least, self.most, self.unit = info.seqlen_k_least, info.seqlen_k_most, info.key_stride_unit

    @property
    def captured(self) -> bool:
        """Whether a graph may have it: until then it can be freed."""
        return self.flag[0] != 0

    def holds(self, keys) -> bool:
        """@keys: struct fmha_local_keys' fields."""
        return self.least <= keys[0] <= self.most and all(step > 0 and step % self.unit == 0 for step in keys[1:])


class Run:
    """What one thread fills in to run one plan."""

    __slots__ = ("plan", "c", "tensors", "roles", "error", "stream", "workspace", "keys")

    def __init__(self, key, views, shape, options, place):
        plan, keys = _plan(key, views, shape, options, place)
        self._fill(plan, [_problem.ROLES[n] for n in views], keys)

    def with_keys(self, keys):
        """The same over other keys, which the plan holds for: struct fmha_local_keys' fields."""
        other = Run.__new__(Run)
        other._fill(self.plan, self.roles, keys)
        return other

    def _fill(self, plan, roles, keys):
        self.plan, self.roles = plan, roles
        self.tensors = ffi.new("uintptr_t[]", _problem.N_TENSORS)
        self.c = ffi.new("struct fmha_local_run *", {"struct_size": _RUN_BYTES, "n_tensors": _problem.N_TENSORS})
        self.c.tensors = ffi.cast("const void *const *", self.tensors)
        self.keys = ffi.NULL if keys is None else ffi.new("struct fmha_local_keys *", (keys[0], 0, *keys[1:]))
        self.c.keys = self.keys
        # The fields as numbers: no pointer to make at each launch.
        self.stream, self.workspace = (ffi.cast("uintptr_t *", ffi.addressof(self.c, n)) for n in ("stream", "workspace"))
        self.error = new_error()

    def execute(self, pointers, dropout, dropout_at):
        c, tensors = self.c, self.tensors
        for role, pointer in zip(self.roles, pointers):
            tensors[role] = pointer
        if dropout is not None:
            c.has_dropout_state = 1
            c.dropout_seed, c.dropout_offset = dropout
            seed_at, offset_at = dropout_at or (0, 0)
            c.dropout_seed_at, c.dropout_offset_at = ffi.cast("uint64_t *", seed_at), ffi.cast("uint64_t *", offset_at)
        self.launch()

    def launch(self):
        """On torch's current stream; @tensors have their addresses."""
        plan = self.plan
        index = plan.index
        if _current_device() != index:
            with torch.cuda.device(index):
                return self.launch()
        if plan.workspace is not None:
            # Freed at once: the allocator gives it to nobody before the stream has got past this run.
            workspace = torch.empty_like(plan.workspace)
            self.workspace[0] = workspace.data_ptr()
        self.stream[0] = _raw_stream(index)
        if _is_capturing():
            plan.flag[0] = 1
        code = _plan_run(plan.handle, self.c, self.error)
        if code:
            check(code, self.error)


def _device(place):
    """The daemon's device for this GPU, or one of the same name: kernels are chosen by model."""
    client = default_client()
    device = client.found.get(place)
    if device is None:  # one round trip, not one a plan
        device = client.found[place] = _find_device(client, place)
    return device


def _find_device(client, place):
    infos = [d for d in client.devices() if d.backend == place[0]]
    if not infos:
        raise not_supported(f"the daemon at {client.path} serves no {place[0]} device: `fmhactl devices` lists what it has")
    known = torch.cuda.get_device_properties(place[1])
    at = address_of(known)
    same = [d for d in infos if at and d.pci == at] or [d for d in infos if d.name == known.name]
    return client.device((same or infos)[0].index)


def address_of(properties) -> str:
    """Of torch's device properties: the address on the PCI bus, or "" where this torch does not tell it."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


# Of what depends on the number of keys, nothing but K and V.
_GROWS = frozenset(("q", "k", "v", "o", "lse", "sink", "alibi_slopes")).issuperset


def _growth(views, options, place):
    """(what a plan for a range of lengths is kept by, struct fmha_local_keys' fields), or (None, None)."""
    if options.op != "forward" or not _GROWS(views):
        return None, None
    kind, keys = [options, place], []
    for name, view in views.items():
        extents, strides = view.shape, view.strides
        if name in ("k", "v"):
            (batch, rows, heads, hdim), (of_batch, of_row, of_head, of_element) = _problem.dense(view, options.layout, False, name)
            extents, strides = (batch, heads, hdim), (of_row, of_element)
            keys += (of_batch, of_head) if keys else (rows, of_batch, of_head)
        kind += (name, extents, strides, view.dtype, view.pointer & 15)
    return tuple(kind), tuple(keys)


def _plan(key, views, shape, options, place):
    """(the plan, the keys that it is to be run with or None: those that it was made for)."""
    plan = _plans.get(key)
    if plan is not None:
        return plan, None
    kind, keys = _growth(views, options, place)
    with _lock:
        plan = _plans.get(key)
        if plan is not None:
            return plan, None
        for plan in _ranges.get(kind, ()):
            if plan.holds(keys):
                return plan, keys
        _shrink()
        plan = _plans[key] = Plan(views, shape, options, place)
        if kind is not None and plan.holds(keys):
            _ranges[kind] = (plan, *_ranges.get(kind, ()))
        return plan, None


def _shrink():
    """Frees the oldest plans that no graph has; their work has to be over first."""
    if len(_plans) < KEPT or _is_capturing():
        return
    for index in {p.index for p in _plans.values()}:
        torch.cuda.synchronize(index)
    for key in [k for k, p in list(_plans.items())[: KEPT // 2] if not p.captured]:
        del _plans[key]
    kept = set(_plans.values())
    for kind, plans in list(_ranges.items()):
        _ranges[kind] = tuple(p for p in plans if p in kept)
        if not _ranges[kind]:
            del _ranges[kind]
