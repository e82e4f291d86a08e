# SPDX-License-Identifier: MIT
"""Which torch tensors attention reads itself, which go through torch's dispatcher, and which nobody can make sense of here."""
from __future__ import annotations

import torch
from torch import Tensor

from ._lib import invalid, not_supported

PLAIN = frozenset((Tensor, torch.nn.Parameter))
DEVICES = frozenset(("cpu", "cuda"))
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_tracing = torch._C._is_tracing
n_modes = torch._C._len_torch_dispatch_stack  # of what looks at each operator: selective checkpointing, FLOP counters


def _refuse(tensor, name: str) -> None:
    if not isinstance(tensor, Tensor):
        said = "None" if tensor is None else f"a {type(tensor).__name__}"
        raise invalid(f"{name} is {said}: a torch tensor is needed", f"tensor.{name}")
    if is_wrapped(tensor):
        raise not_supported(f"{name}: attention cannot be transformed by vmap or other functorch transforms: give it a batch dimension",
                            f"tensor.{name}")
    if tensor.is_nested:
        raise not_supported(f"{name} is a nested tensor: pack its sequences and give cu_seqlens", f"tensor.{name}")
    if tensor.layout != torch.strided:
        raise not_supported(f"{name} is {tensor.layout}: dense tensors are known", f"tensor.{name}")
    if tensor.device.type not in DEVICES and tensor.device.type != "meta":
        raise not_supported(f"{name} is on {tensor.device}: the CPU, CUDA and HIP are known", f"tensor.{name}")


def checked(names: tuple, *tensors) -> list:
    """@tensors with their signs written out (torch keeps some in a bit); None stays None."""
    found = []
    for name, tensor in zip(names, tensors):
        if tensor is not None:
            _refuse(tensor, name)
            if tensor.is_neg():
                tensor = tensor.resolve_neg()
        found.append(tensor)
    return found


NARROW = frozenset((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
WIDE = frozenset((torch.float16, torch.bfloat16))


def checked_inputs(names: tuple, q, k, v, *others) -> list:
    """checked(), and q, k and v are there, on one device, as all are, and of one type, but that a q of 16 bits looks at 8."""
    for name, tensor in zip(names, (q, k, v)):
        if tensor is None:
            raise invalid(f"{name} is None: a torch tensor is needed", f"tensor.{name}")
    found = checked(names, q, k, v, *others)
    for i, tensor in enumerate(found[1:], 1):
        if tensor is not None and tensor.device != found[0].device:
            raise invalid(f"{names[0]} is on {found[0].device} and {names[i]} on {tensor.device}", f"tensor.{names[i]}")
    narrow = found[1].dtype in NARROW and found[0].dtype in WIDE
    for like, name, tensor in zip((0, narrow), names[1:3], found[1:3]):
        if narrow and name == names[1]:
            continue
        if tensor.dtype != found[like].dtype and (tensor.is_meta or not torch.is_autocast_enabled(tensor.device.type)):
            raise invalid(f"{names[like]} holds {found[like].dtype} and {name} {tensor.dtype}: one type is needed", f"tensor.{name}")
    return found


def by_operator(*tensors) -> bool:
    """Whether a graph is recorded, or a mode looks on, or a tensor has no memory, or a class of its own: torch's dispatcher has to see
    the call."""
    if torch.compiler.is_compiling() or is_tracing() or n_modes():
        return True
    return any(t is not None and (type(t) not in PLAIN or t.device.type == "meta") for t in tensors)


def alone(tensor, name: str, written: bool = False) -> Tensor:
    """@tensor for a function that works on memory and does nothing else: no graph, no gradient. @written: it writes there."""
    _refuse(tensor, name)
    if is_tracing():
        raise not_supported(f"{name}: this function cannot be traced; fmha.torch's can", f"tensor.{name}")
    if type(tensor) not in PLAIN or tensor.device.type == "meta":
        raise not_supported(f"{name} is a {type(tensor).__name__} on {tensor.device} that holds no numbers of its own", f"tensor.{name}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise not_supported(f"{name} requires a gradient, and this function has none: fmha.torch's have, or call it under torch.no_grad()",
                            f"tensor.{name}")
    if not tensor.is_neg():
        return tensor
    if written:
        raise not_supported(f"{name} is written to, and torch keeps its sign in a bit: give it resolve_neg()", f"tensor.{name}")
    return tensor.resolve_neg()
