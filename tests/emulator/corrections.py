# SPDX-License-Identifier: MIT
"""Where the emulator departs from the hardware, put right from outside, and its programs kept on disk.

Each correction names what is wrong; tests/emulator/instructions.py shows the ones that can be shown
with a kernel of a few instructions. Nothing here changes what is right already: when the emulator
learns one of these itself, the correction does no harm and can go.
"""
import functools
import hashlib
import inspect
import os
import pickle
import re
import textwrap
import types


def correct_context(emu):
    """The handlers of instructions read operands through a context; this one knows the instruction."""
    add, where = emu.Ops.ADD, emu.Ops.WHERE
    no_scalar_base = (emu.irc.FLAT,)
    upper_half = (emu.irc.VOP1, emu.irc.VOP2, emu.irc.VOPC)

    def is_halved_sum(reg):
        return reg.op is add and where in (reg.src[0].op, reg.src[1].op)

    def unhalved(reg):
        """The operand that `high.where(operand - 128, operand)` was made from, and `high`."""
        if is_halved_sum(reg):  # comparisons add the other way round
            halved, other = reg.src if reg.src[0].op is where else reg.src[::-1]
            operand, high = unhalved(halved)
            return operand + other, high
        high, less, other = reg.src
        return (other if less.src[0] is other else less.src[0] - emu._c(256)), high

    class Context(emu._Ctx):
        __slots__ = ("inst", "is_wmma", "data_registers")

        def rsrc_dyn(self, off, lane, bits=32, literal=None, *rest, **named):
            # Instructions across lanes (v_permlanex16, v_writelane, ...) read literals as zero.
            if literal is None and hasattr(type(self.inst), "literal"):
                literal = self.inst_field(type(self.inst).literal)
            if isinstance(self.inst, upper_half) and is_halved_sum(off):
                operand, high = unhalved(off)
                value = super().rsrc_dyn(operand, lane, bits, literal, *rest, **named)
                return high.where(value << emu._c(16), value)
            return super().rsrc_dyn(off, lane, bits, literal, *rest, **named)

        def optional_field(self, inst, name):
            # FLAT of CDNA has bits where GLOBAL names a scalar base, but no scalar base.
            if name == "saddr" and isinstance(inst, no_scalar_base):
                return None
            return super().optional_field(inst, name)

        def rvgpr_dyn(self, reg, lane, valid=None):
            # On CDNA registers from 128 on are registers, not the upper halves of others as in 16-bit
            # instructions of RDNA. The caller shifts what it takes for an upper half.
            if isinstance(self.inst, upper_half) and reg.op is where:
                operand, high = unhalved(reg)
                value = super().rvgpr_dyn(operand, lane, valid)
                return high.where(value << emu._c(16), value)
            # The accumulator of WMMA may be a constant; the number of one is not that of a register.
            if self.is_wmma and where in (reg.op, reg.src[0].op):
                chosen = reg if reg.op is where else reg.src[0]
                is_register, _, operand = chosen.src
                safe = is_register.where(operand - emu._c(256), emu._c(0))
                value = super().rvgpr_dyn(safe + reg.src[1] if reg.op is add else safe, lane, valid)
                return is_register.where(value, super().rsgpr_dyn(operand, is_register.ne(True)))
            # Data of LDS stores and operands of MFMA may lie in accumulation registers.
            first = reg.src[0] if reg.op is add else reg
            if first in self.data_registers:
                return super().raccvgpr_dyn(reg, lane, valid)
            return super().rvgpr_dyn(reg, lane, valid)

        def compile_vop_pcode(self, op, srcs, lane, vdst_reg, exec_mask, opsel_dst_hi=False, **named):
            if isinstance(self.inst, upper_half) and vdst_reg.op is where:
                vdst_reg, opsel_dst_hi = unhalved(vdst_reg)[0], False
            return super().compile_vop_pcode(op, srcs, lane, vdst_reg, exec_mask, opsel_dst_hi, **named)

        def begin(self, inst):
            self.inst, self.data_registers = inst, ()
            self.is_wmma = "WMMA" in emu._op_name(inst)
            kind, acc = type(inst), int(getattr(inst, "acc", 0) or 0)
            if isinstance(inst, emu.irc.DS) and acc:
                self.data_registers = (self.inst_field(kind.data0), self.inst_field(kind.data1))
            elif hasattr(kind, "acc_cd") and acc:
                self.data_registers = tuple(
                    self.inst_field(field) for n, field in enumerate((kind.src0, kind.src1)) if acc >> n & 1)

    def knowing(handler):
        def handle(inst, context):
            context.begin(inst)
            return handler(inst, context)
        return handle

    emu._Ctx = Context
    emu._INST_HANDLERS = {kind: knowing(handler) for kind, handler in emu._INST_HANDLERS.items()}


# gfx90a's numbers of v_mfma_f32_16x16x16_bf16_1k and 32x32x8, which the emulator knows by gfx942's, and of buffer_wbinvl1_vol,
# which is made buffer_wbl2: it has no caches.
RENUMBERED = {0xd3e7: 0xd3e1, 0xd3e6: 0xd3e0, 0xe0fc: 0xe0a0}


SCALE_PREFIX = (0xd3ac).to_bytes(2, "little")


def correct_decoder(emu):
    from tinygrad.renderer import amd
    decode, matches = emu.decode_inst, amd._matches

    def decode_renumbered(data, arch):
        new = RENUMBERED.get(int.from_bytes(data[2:4], "little")) if arch == "cdna" else None
        return decode(data[:2] + new.to_bytes(2, "little") + data[4:] if new else data, arch)

    # A scaled MFMA begins with its scales; the emulator takes whatever is in front of one without.
    amd._matches = lambda data, kind: matches(data, kind) and (kind is not emu.irc.VOP3PX2 or data[2:4] == SCALE_PREFIX)
    emu.decode_inst = decode_renumbered


def correct_mfma(emu):
    """Of 32 x 32 results, register r of a lane is row r / 4 * 8 + lane / 32 * 4 + r % 4; the emulator has lane / 32 * 16
    + r, which is what the instruction's wider sisters with blocks of 16 rows would give."""
    source = textwrap.dedent(inspect.getsource(emu._compile_mfma))
    wrong = "c_grp * UOp.const(16, dtypes.int) + UOp.const((out_reg // 4) * 4 + out_reg % 4, dtypes.int)"
    right = "c_grp * UOp.const(4, dtypes.int) + UOp.const((out_reg // 4) * 8 + out_reg % 4, dtypes.int)"
    exec(source.replace(wrong, right), vars(emu))  # its caller finds it by name


def correct_wmma(emu):
    """Products of 8-bit floats, whose elements the emulator reads as f16."""
    source = textwrap.dedent(inspect.getsource(emu._compile_wmma))
    wrong = "mat_a, mat_b = read_mat(src0_r), read_mat(src1_r)"
    right = "mat_a, mat_b = (read_mat(src) for src in operands())"
    operands = """
  def operands():
    nonlocal cvt
    kinds = re.findall("_([FB][PF]8)", op_name) or (None, None)
    for src, kind in zip((src0_r, src1_r), kinds):
      cvt = _FUNCS[f"{kind.lower()}_to_f32"] if kind else cvt
      yield src
"""
    exec(source.replace("\n  " + wrong, operands + "  " + right), vars(emu))


# Of 8-bit floats: bits of the exponent and of the fraction, exponent bias, the largest value's bits, what is made of
# a larger one, of a NaN; with FNUZ, the kind of gfx942, one bias more and neither infinities nor a negative zero.
FLOATS = {"fp8": (4, 3, 7, 0x7e, 0x7f, 0xff), "bf8": (5, 2, 15, 0x7b, 0x7c, 0xfe)}
FNUZ = {"fp8": (4, 3, 8, 0x7f, 0x80, 0x80), "bf8": (5, 2, 16, 0x7f, 0x80, 0x80)}


def widen_float(emu, form, x):
    """The f32 that an 8-bit float means; its subnormals are numbers."""
    c, floating = emu._c, emu.dtypes.float32
    exponent_bits, fraction_bits, bias, largest, _, _ = form
    x = x.cast(emu.dtypes.uint32) & c(0xff)
    sign, size = (x & c(0x80)) << c(24), x & c(0x7f)
    normal = (size << c(23 - fraction_bits)) + c((127 - bias) << 23)
    small = size.cast(floating) * emu.UOp.const(2.0 ** (1 - bias - fraction_bits), floating)
    bits = sign | (size < c(1 << fraction_bits)).where(small.bitcast(emu.dtypes.uint32), normal)
    if largest == 0x7f:
        bits = x.eq(c(0x80)).where(c(0x7fc00000), bits)
    else:
        infinite = size.eq(c(0x7c)) if exponent_bits == 5 else c(0).ne(c(0))
        bits = (size > c(largest)).where(infinite.where(sign | c(0x7f800000), c(0x7fc00000)), bits)
    return bits.bitcast(floating)


def narrow_float(emu, form, x):
    """To nearest, ties to even, with subnormals. MODE.FP16_OVFL, which would clamp, is taken to be clear."""
    c = emu._c
    _, fraction_bits, bias, largest, beyond, nan = form
    x = x.bitcast(emu.dtypes.uint32) if x.dtype == emu.dtypes.float32 else x.cast(emu.dtypes.uint32)
    sign, size = (x >> c(24)) & c(0x80), x & c(0x7fffffff)
    exponent, least = size >> c(23), c(128 - bias)
    low = exponent < least
    below = low.where(least - exponent, c(0))
    shift = c(23 - fraction_bits) + (below < c(8)).where(below, c(8))
    whole = (size & c(0x7fffff)) | c(0x800000)
    rounded = (whole + (c(1) << (shift - c(1))) - c(1) + ((whole >> shift) & c(1))) >> shift
    code = rounded + low.where(c(0), (exponent - least) << c(fraction_bits))
    if largest == 0x7f:
        finite = code.eq(c(0)).where(c(0), sign | code)
        result = (code > c(largest)).where(c(beyond), finite)
    else:
        result = sign | (code > c(largest)).where(c(beyond), code)
    return (size > c(0x7f800000)).where(c(nan), result).cast(emu.dtypes.uint8)


def choose_floats(emu, arch):
    """What fp8 and bf8 are. The emulator knows CDNA as one machine, and what it compiled of it must go with a change."""
    forms, functions = FNUZ if arch == "gfx942" else FLOATS, vars(emu)["_FUNCS"]
    if getattr(emu, "fmha_floats", None) is forms:
        return
    for name, form in forms.items():
        functions[f"{name}_to_f32"] = functools.partial(widen_float, emu, form)
        functions[f"f32_to_{name}"] = functools.partial(narrow_float, emu, form)
    emu._get_runner.cache_clear()
    emu._canonical_runner_cache.clear()
    emu.fmha_floats = forms


def correct_buffers(emu):
    """Untyped buffer loads and stores, bounds by the byte: RDNA's, which the emulator leaves out, and of CDNA those of 16
    bits, which it takes for words. What all lanes add is no part of what is compared with the bounds."""
    bits_of = {"USHORT": 16, "SHORT": 16, "U16": 16, "B16": 16, "B32": 32, "B64": 64, "B96": 96, "B128": 128}

    def handle(inst, ctx):
        c, kind, wide = emu._c, type(inst), emu.dtypes.uint64
        name = emu._op_name(inst)
        bits = bits_of.get(name.rsplit("_", 1)[1])
        if not bits or "FORMAT" in name or "D16" in name or int(inst.idxen) or not int(inst.offen):
            raise RuntimeError(f"{name}: only untyped ones by offset")
        newer, stores = hasattr(kind, "rsrc"), []
        first = ctx.inst_field(kind.rsrc if newer else kind.srsrc) * c(1 if newer else 4)
        base = emu._u64(ctx.rsgpr_dyn(first), ctx.rsgpr_dyn(first + c(1))) & emu.UOp.const((1 << 48) - 1, wide)
        more = ctx.inst_field(kind.soffset)
        more = more.__lt__(c(128)).where(ctx.rsgpr_dyn(more), more - c(128))
        lane, mask = ctx.range(), ctx.rexec()
        at = ctx.rvgpr_dyn(ctx.inst_field(kind.vaddr), lane) + ctx.inst_field(kind.ioffset if newer else kind.offset)
        there = emu._lane_active(mask, lane) & at.__lt__(ctx.rsgpr_dyn(first + c(2)))
        address = there.where(base + at.cast(wide) + more.cast(wide), emu.UOp.const(0, wide))
        for i in range(max(bits // 32, 1)):
            register = ctx.inst_field(kind.vdata) + c(i)
            of_word = address + emu.UOp.const(4 * i, wide)
            if "STORE" in name:
                stores += emu._mem_store(ctx.vmem, of_word, ctx.rvgpr_dyn(register, lane), there, 64, min(bits, 32))
                continue
            word = (of_word >> emu.UOp.const(2, wide)).cast(emu.dtypes.int64)
            value = ctx.vmem.index(word.valid(there)).load()
            if bits == 16:
                value = value >> ((address.cast(emu.dtypes.uint32) & c(2)) << c(3)) & c(0xffff)
            stores.append(ctx.wvgpr_dyn(register, lane, there.where(value, c(0)), mask))
        return emu.UOp.sink(emu.UOp.group(*stores).end(lane), *ctx.inc_pc())

    others = emu._INST_HANDLERS[emu.irc.MUBUF]

    def handle_of_cdna(inst, ctx):
        return (handle if emu._op_name(inst).endswith("SHORT") else others)(inst, ctx)

    from tinygrad.renderer import amd
    formats, kinds = amd._load_formats(), {"rdna3": emu.ir3.MUBUF, "rdna4": emu.ir4.VBUFFER}
    for arch, kind in kinds.items():
        if kind not in formats[arch]:
            formats[arch].insert(0, kind)
        emu._INST_HANDLERS.setdefault(kind, handle)
    emu._INST_HANDLERS[emu.irc.MUBUF] = handle_of_cdna


def correct_hints(emu):
    """RDNA3's s_setprio, and v_nop, cannot be made into programs; they have no result."""
    names = ("S_SETPRIO", "V_NOP", "V_NOP_E32")

    def without_result(others):
        def handle(inst, ctx):
            return emu.UOp.sink(*ctx.inc_pc()) if emu._op_name(inst) in names else others(inst, ctx)
        return handle

    for kind in (emu.ir3.SOPP, emu.irc.VOP1, emu.ir3.VOP1, emu.ir4.VOP1):
        emu._INST_HANDLERS[kind] = without_result(emu._INST_HANDLERS[kind])


def correct_caches(emu):
    """What writes caches back or forgets them, which the emulator takes for loads or does not know: it has no caches."""
    names = ("BUFFER_WBL2", "BUFFER_INV", "BUFFER_GL0_INV", "BUFFER_GL1_INV", "GLOBAL_WB", "GLOBAL_INV", "GLOBAL_WBINV")

    def without_caches(others):
        def handle(inst, ctx):
            return emu.UOp.sink(*ctx.inc_pc()) if emu._op_name(inst) in names else others(inst, ctx)
        return handle

    for kind in (emu.irc.MUBUF, emu.ir3.MUBUF, emu.ir4.VGLOBAL):
        emu._INST_HANDLERS[kind] = without_caches(emu._INST_HANDLERS[kind])


def correct_widening(emu):
    """v_cvt_f32_fp8, v_cvt_pk_f32_fp8 and bf8's: the emulator has no number of a source register for RDNA4's, and stores
    a pair in one register."""
    kinds = (emu.irc.VOP1, emu.irc.VOP1_SDWA, emu.irc.VOP3, emu.ir4.VOP1, emu.ir4.VOP3)
    selected = {0: 0, 1: 8, 2: 16, 3: 24, 4: 0, 5: 16, 6: 0}  # bytes, words and the whole, by their numbers in SDWA

    def widening(others):
        def handle(inst, ctx):
            found, kind = re.match("V_CVT_(PK_)?F32_(FP8|BF8)", emu._op_name(inst)), type(inst)
            if not found:
                return others(inst, ctx)
            lane, mask, opsel = ctx.range(), ctx.rexec(), int(getattr(inst, "opsel", 0))
            if hasattr(kind, "src0_sel"):
                raw, shift = ctx.rvgpr_dyn(ctx.inst_field(kind.vsrc0), lane), selected[int(inst.src0_sel)]
            else:
                raw = ctx.rsrc_dyn(ctx.inst_field(kind.src0), lane, 32)
                shift = 16 * (opsel & 1) + (0 if found[1] else 4 * (opsel & 2))  # op_sel's first bit is the byte's second
            widen, first = emu._FUNCS[f"{found[2].lower()}_to_f32"], ctx.inst_field(kind.vdst)
            words = [widen(raw >> emu._c(shift + 8 * i)).bitcast(emu.dtypes.uint32) for i in range(2 if found[1] else 1)]
            stores = [ctx.wvgpr_dyn(first + emu._c(i), lane, word, mask) for i, word in enumerate(words)]
            return emu.UOp.sink(emu.UOp.group(*stores).end(lane), *ctx.inc_pc())
        return handle

    for kind in kinds:
        emu._INST_HANDLERS[kind] = widening(emu._INST_HANDLERS[kind])


def correct_sdwa(emu):
    """v_add_co_u32 with parts of registers, whose carry the emulator does not find."""
    kinds = (emu.irc.VOP2_SDWA, emu.irc.VOP2_SDWA_SDST)

    def adding(others):
        def handle(inst, ctx):
            if not emu._op_name(inst).startswith("V_ADD_CO_U32"):
                return others(inst, ctx)
            kind, mask, vcc = type(inst), ctx.rexec(), emu._c(emu.VCC_LO.offset)

            def parts(lane):
                for n in "01":
                    register = ctx.inst_field(getattr(kind, "vsrc" + n))
                    raw = ctx.rsgpr_dyn(register) if getattr(inst, "s" + n) else ctx.rvgpr_dyn(register, lane)
                    yield emu._sdwa_select(raw, ctx.inst_field(getattr(kind, f"src{n}_sel")),
                                           ctx.inst_field(getattr(kind, f"src{n}_sext")))

            def carry(lane):
                a, b = parts(emu._c(lane, emu.dtypes.int) if isinstance(lane, int) else lane.cast(emu.dtypes.int))
                return (a + b).__lt__(a).cast(emu.dtypes.uint32)

            carries = ctx.unroll_lanes(carry, mask, apply_exec=False) & mask
            lane = ctx.range()
            a, b = parts(lane)
            sums = ctx.wvgpr_dyn(ctx.inst_field(kind.vdst), lane, a + b, mask)
            return emu.UOp.sink(*ctx.wmask(vcc, carries), emu.UOp.sink(sums).end(lane), *ctx.inc_pc())
        return handle

    for kind in kinds:
        emu._INST_HANDLERS[kind] = adding(emu._INST_HANDLERS[kind])


class ProgramCache:
    """Turning one instruction into machine code takes the emulator half a second, so do it once."""

    def __init__(self, emu, folder):
        self.folder = folder
        self.to_program, self.get_runtime = emu.to_program, emu.get_runtime
        self.salt = digest_of(tinygrad_folder(emu)).encode() + os.uname().machine.encode()
        os.makedirs(folder, exist_ok=True)

    def find(self, sink, renderer):
        key = hashlib.sha256(self.salt + sink.key).hexdigest()
        path = os.path.join(self.folder, key)
        try:
            with open(path, "rb") as f:
                uses, elf = pickle.load(f)
        except (OSError, EOFError, pickle.UnpicklingError):
            program = self.to_program(sink, renderer)
            uses, elf = program.arg.globals, program.to_elf()
            with open(f"{path}.{os.getpid()}", "wb") as f:
                pickle.dump((uses, elf), f)
            os.rename(f.name, path)
        return types.SimpleNamespace(arg=types.SimpleNamespace(globals=uses), elf=elf)

    def load(self, emu, device, program):
        return emu.Device[device].runtime(program.elf)


def tinygrad_folder(emu):
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(emu.__file__))))


def digest_of(root):
    """Of the sources that make the programs, changed ones too, whether or not they are a clone."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(os.path.join(root, "tinygrad")):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as f:
                    digest.update(name.encode() + b"\0" + hashlib.sha256(f.read()).digest())
    return digest.hexdigest()


def apply(emu, cache_folder=None):
    """Once per process."""
    correct_mfma(emu)
    correct_wmma(emu)
    correct_buffers(emu)
    correct_caches(emu)
    correct_hints(emu)
    correct_sdwa(emu)
    correct_widening(emu)
    correct_context(emu)
    correct_decoder(emu)
    if cache_folder:
        cache = ProgramCache(emu, cache_folder)
        emu.to_program = cache.find
        emu.get_runtime = lambda device, program: cache.load(emu, device, program)
    return emu
