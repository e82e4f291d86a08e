# SPDX-License-Identifier: MIT
"""libfmha_client's fmha_local.h through ctypes, for tests: problems are the wire's maps (PROTOCOL.md).

    lib = Library(path)                      # libfmha_client.so
    device = lib.open(socket, 0)
    plan = device.plan(problem, {"q": address, ...})
    plan.run({"q": address, ...}, workspace=address, stream=0)
"""
import ctypes
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = re.sub(r"/\*.*?\*/", " ", (ROOT / "proto/include/fmha/base.h").read_text(), flags=re.S)
ROLES = re.findall(r"X\(\w+, (\w+), \d,[\s\\]*\"", BASE)
NAMES = {
    "dtype": ["f32", "f16", "bf16", "e4m3", "e5m2", "i32", "u8", "i64", "i8"],
    "op": ["forward", "backward", "append_kv", "merge_states"],
    "mode": ["batch", "group"],
    "mask": ["none", "top_left", "bottom_right"],
    "rope": ["none", "interleaved", "half_rotated"],
    "kv_layout": ["linear", "vectorized"],
}
_TYPES = {"CHOICE": ctypes.c_uint32, "FLAG": ctypes.c_uint32, "SIZE": ctypes.c_int32, "NUMBER": ctypes.c_int32,
          "COUNTER": ctypes.c_uint64, "REAL": ctypes.c_float, "ABSENT_REAL": ctypes.c_float}
_FIELDS = [(name, _TYPES[kind]) for kind, name in re.findall(rf"X\(({'|'.join(_TYPES)}), (\w+),", BASE)]


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("field", ctypes.c_char * 48), ("msg", ctypes.c_char * 256)]


class Tensor(ctypes.Structure):
    _fields_ = [("buffer", ctypes.c_uint64), ("offset", ctypes.c_uint64), ("data", ctypes.c_void_p),
                ("dtype", ctypes.c_uint32), ("n_dims", ctypes.c_uint32), ("stride", ctypes.c_int64 * 5),
                ("extent", ctypes.c_int64 * 5)]


class Problem(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), *_FIELDS, ("tensor", Tensor * len(ROLES))]


class Options(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("timeout_ms", ctypes.c_uint32), ("refresh_ms", ctypes.c_uint32),
                ("pinned", ctypes.c_uint32)]


class Run(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("n_tensors", ctypes.c_uint32), ("tensors", ctypes.c_void_p),
                ("workspace", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("has_dropout_state", ctypes.c_uint32),
                ("reserved", ctypes.c_uint32), ("dropout_seed", ctypes.c_uint64), ("dropout_offset", ctypes.c_uint64),
                ("dropout_seed_at", ctypes.c_void_p), ("dropout_offset_at", ctypes.c_void_p), ("keys", ctypes.c_void_p)]


class Keys(ctypes.Structure):
    _fields_ = [("seqlen_k", ctypes.c_int32), ("reserved", ctypes.c_uint32), *((f"{t}_stride_{axis}", ctypes.c_int64)
                                                                               for t in "kv" for axis in ("batch", "head"))]


class Launch(ctypes.Structure):
    _fields_ = [("family", ctypes.c_char * 64), ("kernel", ctypes.c_char * 256), ("code", ctypes.c_uint8 * 32),
                ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("lds_bytes", ctypes.c_uint32),
                ("reserved", ctypes.c_uint32)]


class Info(ctypes.Structure):
    _fields_ = [("workspace_bytes", ctypes.c_uint64), ("workspace_alignment", ctypes.c_uint32),
                ("n_launches", ctypes.c_uint32), ("flops", ctypes.c_double), ("n_runs", ctypes.c_uint64),
                ("seqlen_k_least", ctypes.c_int32), ("seqlen_k_most", ctypes.c_int32), ("key_stride_unit", ctypes.c_uint32),
                ("reserved", ctypes.c_uint32), ("launches", Launch * 6)]


class TensorInfo(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint64), ("alignment", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]


class ClientOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("timeout_ms", ctypes.c_uint32), ("path", ctypes.c_char_p),
                ("name", ctypes.c_char_p), ("spin_us", ctypes.c_uint32)]


class Failure(Exception):
    def __init__(self, name, error):
        super().__init__(f"{name}: {error.msg.decode()}")
        self.name, self.field, self.code = name, error.field.decode(), error.code


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        for name in ("fmha_local_plan_free", "fmha_local_pack_free", "fmha_device_free", "fmha_client_free"):
            function = getattr(self.lib, name)
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
        self.lib.fmha_error_name.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        error = Error()
        code = getattr(self.lib, name)(*arguments, ctypes.byref(error))
        if code < 0:
            raise Failure(self.lib.fmha_error_name(code).decode(), error)
        return code

    def open(self, socket, index, timeout_ms=0):
        return Device(self, socket, index, timeout_ms)

    def problem(self, problem, addresses):
        """The wire's map as a struct; tensors lie at `addresses`, whatever buffers the map names."""
        room = ctypes.create_string_buffer(max(2 * ctypes.sizeof(Problem), 1 << 16))
        self.lib.fmha_problem_init(room)
        p = Problem.from_buffer_copy(room)
        assert p.struct_size == ctypes.sizeof(p), "struct fmha_problem has changed"
        for key, value in problem.items():
            if key != "tensors":
                setattr(p, key, NAMES[key].index(value) if isinstance(value, str) else value)
        for role, tensor in problem["tensors"].items():
            t = p.tensor[ROLES.index(role)]
            t.data, t.dtype = addresses[role], NAMES["dtype"].index(tensor["dtype"])
            for i, stride in enumerate(tensor.get("stride", [])):
                t.stride[i] = stride
        return p


class Device:
    def __init__(self, library, socket, index, timeout_ms):
        self.library, self.client, self.device = library, ctypes.c_void_p(), ctypes.c_void_p()
        options = ClientOptions(ctypes.sizeof(ClientOptions), timeout_ms, str(socket).encode(), None, 0)
        library.call("fmha_connect", ctypes.byref(options), ctypes.byref(self.client))
        library.call("fmha_device_open", self.client, ctypes.c_uint32(index), ctypes.byref(self.device))

    def plan(self, problem, addresses, **options):
        """options: of struct fmha_local_options."""
        return Plan(self.library, self, self.library.problem(problem, addresses), **options)

    def write_pack(self, problems, path):
        """@problems: of Library.problem()."""
        array = (Problem * len(problems))(*problems)
        self.library.call("fmha_local_pack_write", self.device, array, ctypes.c_size_t(len(problems)), None, str(path).encode())

    def close(self):
        self.library.lib.fmha_device_free(self.device)
        self.library.lib.fmha_client_free(self.client)
        self.device = self.client = None


class Pack:
    """A file that Device.write_pack(), or fmhactl warm --pack, has written."""

    def __init__(self, library, path):
        self.library, self.pack = library, ctypes.c_void_p()
        library.call("fmha_local_open_pack", str(path).encode(), ctypes.byref(self.pack))

    def plan(self, problem, addresses):
        return Plan(self.library, self, self.library.problem(problem, addresses))

    def free(self):
        self.pack = self.library.lib.fmha_local_pack_free(self.pack)


class Plan:
    def __init__(self, library, origin, problem, **options):
        self.library, self.plan = library, ctypes.c_void_p()
        options = Options(ctypes.sizeof(Options), **options)
        if isinstance(origin, Pack):
            library.call("fmha_local_pack_plan", origin.pack, ctypes.byref(problem), ctypes.byref(self.plan))
        else:
            library.call("fmha_local_plan_new", origin.device, ctypes.byref(problem), ctypes.byref(options),
                         ctypes.byref(self.plan))
        self.info = self.read_info()

    def read_info(self):
        info = Info()
        self.library.call("fmha_local_plan_info", self.plan, ctypes.byref(info))
        return info

    def launches(self):
        return self.info.launches[: self.info.n_launches]

    def tensor(self, role):
        info = TensorInfo()
        self.library.call("fmha_local_plan_tensor", self.plan, ctypes.c_uint32(ROLES.index(role)), ctypes.byref(info))
        return info

    def bind(self, addresses, workspace=None, stream=None, keys=None, **dropout):
        """A struct fmha_local_run, to be run any number of times. keys: of struct fmha_local_keys."""
        keys = Keys(**keys) if keys else None
        tensors = (ctypes.c_void_p * len(ROLES))(*[addresses.get(role) for role in ROLES])
        run = Run(ctypes.sizeof(Run), len(ROLES), ctypes.addressof(tensors), workspace, stream,
                  has_dropout_state=bool(dropout), keys=ctypes.addressof(keys) if keys else None, **dropout)
        run.keep = tensors, keys
        return run

    def run_bound(self, run):
        self.library.call("fmha_local_plan_run", self.plan, ctypes.byref(run))

    def run(self, addresses, workspace=None, stream=None, keys=None, **dropout):
        self.run_bound(self.bind(addresses, workspace, stream, keys, **dropout))

    def free(self):
        self.plan = self.library.lib.fmha_local_plan_free(self.plan)
