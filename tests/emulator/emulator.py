# SPDX-License-Identifier: MIT
"""Loads AMD code objects and executes them on the emulator of a tinygrad checkout ($TINYGRAD).

The emulator decodes and executes real machine code, one wave after the other up to the next
barrier, every load complete at once. It therefore says nothing about missing waits or races; what
it can be made to show, this loader makes it show: LDS starts poisoned, and waves can run in
reverse order, so that a kernel that reads what another wave has not written yet gives wrong
numbers in one of the orders.
"""
import ctypes
import functools
import io
import mmap
import os
import struct
import sys

import msgpack
from elftools.elf.elffile import ELFFile

import corrections

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

LDS_GRANULE = 512  # bytes, in which the emulator reads a kernel's LDS size
MACHINES = (("gfx9", "cdna"), ("gfx11", "rdna3"), ("gfx12", "rdna4"))


@functools.cache
def load_emulator():
    root = os.environ["TINYGRAD"]
    if root not in sys.path:
        sys.path.insert(0, root)
    from test.mockgpu.amd import emu
    build = os.environ.get("FMHA_BUILD", os.path.join(ROOT, "build", "release"))
    return corrections.apply(emu, os.path.join(build, "emulator"))


class PoisoningCtypes:
    """ctypes as the emulator sees it: where it clears LDS between workgroups and vector registers
    before a wave starts, poison them instead (all ones: a NaN in every type)."""

    def __init__(self, lds_address, wave):
        self.lds_address, self.register_bytes = lds_address, 256 * wave * 4

    def __getattr__(self, name):
        return getattr(ctypes, name)

    def memset(self, to, value, n):
        poison = to == self.lds_address or n == self.register_bytes
        return ctypes.memset(to, 0xff if poison else value, n)


LDS_SPAN = 1 << 32  # bytes that a 32-bit LDS address can name
MAP_NORESERVE = 0x4000  # Linux; Python 3.11 has no name for it


class SpaciousLds:
    """Buffer as the emulator sees it, except that LDS is a reservation of 4 GiB of address space.
    The emulator computes LDS accesses of inactive lanes too and drops the result; their addresses
    may be anything. Real hardware never issues them."""

    def __init__(self, emu, lds_bytes):
        self.emu, self.real, self.calls = emu, emu.Buffer, 0
        self.memory = mmap.mmap(-1, LDS_SPAN + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS |
                                MAP_NORESERVE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.address, 0xff, lds_bytes)

    def __call__(self, device, size, dtype, *rest, **options):
        self.calls += 1
        if dtype == self.emu.dtypes.uint8:  # the only bytes
            return PrivateScratch(size)
        if self.calls == 2:  # run_asm() makes memory, then LDS, then the waves' registers
            assert dtype == self.emu.dtypes.uint32 and not rest and not options
            return self.real(device, LDS_SPAN // 4, dtype,
                             options=self.emu.BufferSpec(external_ptr=self.address))
        return self.real(device, size, dtype, *rest, **options)


class PrivateScratch:
    """Scratch memory as the emulator sees it. It asks for the address once a wave and would give all
    waves of a block the same; here every wave gets its own, poisoned."""

    def __init__(self, size):
        self.size, self.buffers = size, []
        self._buf = self

    def ensure_allocated(self):
        return self

    @property
    def va_addr(self):
        self.buffers.append(ctypes.create_string_buffer(b"\xff" * self.size, self.size))
        return ctypes.addressof(self.buffers[-1])


def set_wave_order(emu, reverse):
    """Makes `enumerate(waves)` of the emulator's scheduler run backwards (and forwards again)."""
    import builtins

    def reversed_enumerate(items, *start):
        pairs = list(builtins.enumerate(items, *start))
        if pairs and isinstance(pairs[0][1], tuple) and isinstance(pairs[0][1][0], emu.WaveState):
            pairs.reverse()
        return iter(pairs)

    if reverse:
        emu.enumerate = reversed_enumerate
    elif "enumerate" in vars(emu):
        del emu.enumerate


class NeedsScratch(Exception):
    """A kernel of gfx90a that spills: its buffer instructions interleave lanes, which the emulator does not know."""


class CodeObject:
    """An ELF code object, copied into this process at its own layout."""

    def __init__(self, path, arch):
        self.arch, self.machine = arch, next(m for prefix, m in MACHINES if arch.startswith(prefix))
        with open(path, "rb") as f:
            data = f.read()
        elf = ELFFile(io.BytesIO(data))
        segments = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
        top = max(s["p_vaddr"] + s["p_memsz"] for s in segments)
        self.image = mmap.mmap(-1, (top + 0xffff) & ~0xffff)
        for s in segments:
            self.image[s["p_vaddr"]:s["p_vaddr"] + s["p_filesz"]] = s.data()
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.image))
        self.symbols = {s.name: s["st_value"]
                        for s in elf.get_section_by_name(".dynsym").iter_symbols()}
        self.kernels = {}
        for section in elf.iter_sections():
            if section["sh_type"] != "SHT_NOTE":
                continue
            for note in section.iter_notes():
                if note["n_name"] == "AMDGPU":
                    raw = note["n_descdata"] if "n_descdata" in note else note["n_desc"]
                    raw = raw if isinstance(raw, bytes) else raw.encode("latin-1")
                    for k in msgpack.unpackb(raw, strict_map_key=False)["amdhsa.kernels"]:
                        self.kernels[k[".name"]] = k

    def launch(self, name, grid, threads, argument, lds_bytes, reverse=False):
        """One struct argument, by value. Blocks run one after the other."""
        emu = load_emulator()
        at = self.symbols[name + ".kd"]
        descriptor = bytes(self.image[at:at + 64])
        lds, scratch, kernarg_bytes, _, entry = struct.unpack_from("<IIIIq", descriptor, 0)
        rsrc2, = struct.unpack_from("<I", descriptor, 52)
        properties, = struct.unpack_from("<H", descriptor, 56)

        kernarg = ctypes.create_string_buffer(kernarg_bytes + 256)
        hidden = {"hidden_block_count_x": ("<I", grid[0]), "hidden_block_count_y": ("<I", grid[1]),
                  "hidden_block_count_z": ("<I", grid[2]), "hidden_group_size_x": ("<H", threads),
                  "hidden_group_size_y": ("<H", 1), "hidden_group_size_z": ("<H", 1),
                  "hidden_grid_dims": ("<H", 3), "hidden_dynamic_lds_size": ("<I", lds_bytes)}
        for a in self.kernels[name].get(".args", []):
            if a[".value_kind"] in hidden:
                code, value = hidden[a[".value_kind"]]
                struct.pack_into(code, kernarg, a[".offset"], value)
            elif not a[".value_kind"].startswith("hidden_"):
                raw = bytes(argument)
                if len(raw) != a[".size"]:
                    raise ValueError(f"{name}: {len(raw)} bytes of arguments, {a['.size']} wanted")
                kernarg[a[".offset"]:a[".offset"] + len(raw)] = raw

        blocks = (lds + lds_bytes + LDS_GRANULE - 1) // LDS_GRANULE
        rsrc2 = (rsrc2 & ~(0x1ff << 15)) | blocks << 15
        address = ctypes.addressof(kernarg)
        if scratch and properties & 1:
            raise NeedsScratch(f"{name} spills {scratch} bytes")
        user = []
        for bit, words in ((1, 4), (2, 2), (4, 2)):
            user += [0] * words if properties & bit else []
        user += [address & 0xffffffff, address >> 32] if properties & 8 else []
        user += [0] * (((rsrc2 >> 1) & 0x1f) - len(user))
        corrections.choose_floats(emu, self.arch)
        set_wave_order(emu, reverse)
        real_buffer = emu.Buffer
        emu.Buffer = SpaciousLds(emu, lds + lds_bytes)
        emu.ctypes = PoisoningCtypes(emu.Buffer.address, 64 if self.machine == "cdna" else 32)
        try:
            emu.run_asm(self.base + at + entry, 0, *grid, threads, 1, 1, address, rsrc2, scratch,
                        self.machine, user)
        finally:
            emu.ctypes = ctypes
            emu.Buffer = real_buffer
            set_wave_order(emu, False)
