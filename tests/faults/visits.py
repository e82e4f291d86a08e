# SPDX-License-Identifier: MIT
"""What a campaign asks of a daemon while one of its calls fails: every method, on connections of its own.

A visit does its work and returns what has to be the same with a fault, or raises what the daemon said.
What it leaves behind in the registry, `tidy` puts back once the fault is gone.
"""
import contextlib
import json
import mmap
import os
import pathlib
import re
import signal
import socket

import fmha_wire
import fmhad
import numpy

METHODS_H = fmhad.ROOT / "proto/include/proto/methods.h"
SEALS = 1 | 2 | 4
TINY, LARGER = (1, 16, 2, 32), (1, 160, 2, 32)
KERNELS = "family == 'fwd' and hdim_q == 32 and hdim_v == 32 and data_type == 'fp32'"

VISITS = []


class Lie(Exception):
    """An answer that is not true."""


class Visit:
    def __init__(self, function, methods, **options):
        self.function, self.name, self.methods = function, function.__name__, methods
        self.device, self.ready, self.tidy = options["device"], options["ready"], options["tidy"]
        self.most, self.patience = options["most"], options["patience"]

    def __call__(self, daemon):
        return self.function(daemon)


def visit(*methods, device="fake", ready=None, tidy=None, most=3000, patience=3):
    """methods: that this one has the daemon answer, or that the daemon uses for it. ready: what is done
    before a fault is armed. most: of calls of a class that fail, spread evenly. patience: seconds for an
    answer."""

    def add(function):
        options = {"device": device, "ready": ready, "tidy": tidy, "most": most, "patience": patience}
        VISITS.append(Visit(function, methods, **options))
        return function

    return add


def all_methods():
    """Every method of proto/methods.h."""
    return set(re.findall(r'X\([A-Z_]+, "(\w+)"', METHODS_H.read_text(encoding="ascii")))


# ---- what results are compared by ----


def paths(value, at=""):
    """The places of a document that hold something, whatever that is."""
    if isinstance(value, dict):
        found = {at + "{}"}
        for key, part in value.items():
            # What there is once something has run, or was refused, is not there in a new worker.
            found |= {at} if key in ("errors", "families") else paths(part, f"{at}.{key}")
        return found
    if isinstance(value, list):
        found = {at + "[]"}
        for part in value:
            found |= paths(part, at + "[]")
        return found
    return {at}


def missing(expected, value):
    """What a value lacks that is one of AtLeast, or has such parts."""
    if isinstance(expected, AtLeast) and isinstance(value, AtLeast):
        return f" without {expected - value}"
    if isinstance(expected, tuple) and isinstance(value, tuple):
        return "".join(missing(a, b) for a, b in zip(expected, value))
    return ""


class AtLeast:
    """A document that has all of the places that it has without a fault; equal to one that has more."""

    def __init__(self, text=None, of=()):
        self.paths = paths(json.loads(text)) if text else set(of)

    def __eq__(self, other):
        return isinstance(other, AtLeast) and self.paths <= other.paths

    def __repr__(self):
        return f"a document of {len(self.paths)} places"

    def __sub__(self, other):
        return sorted(self.paths - other.paths)[:5]


# ---- problems ----


def inputs(shape, seed=1):
    rng = numpy.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=numpy.float32) for _ in range(3)]


def reference(q, k, v):
    s = numpy.einsum("bihd,bjhd->bhij", q.astype(float), k.astype(float)) / numpy.sqrt(q.shape[-1])
    p = numpy.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return numpy.einsum("bhij,bjhd->bihd", p, v.astype(float))


INPUTS = {shape: inputs(shape) for shape in (TINY, LARGER)}
EXPECTED = {shape: reference(*INPUTS[shape]) for shape in INPUTS}


def forward(daemon, shape=TINY):
    """One forward run on a new connection; a result that is wrong is a lie."""
    with daemon.device() as device:
        o = device.forward(*INPUTS[shape])
    if not numpy.allclose(o, EXPECTED[shape], atol=1e-5):
        raise Lie(f"O is wrong by {abs(o - EXPECTED[shape]).max()}")
    return "right"


def sizes(shape):
    batch, rows, heads, hdim = shape
    return {"batch": batch, "nhead_q": heads, "nhead_k": heads, "seqlen_q": rows, "seqlen_k": rows,
            "hdim_q": hdim, "hdim_v": hdim}


def problem(buffer, shape=TINY, **options):
    part = 4 * int(numpy.prod(shape))
    tensors = {role: {"buffer": buffer, "offset": i * part, "dtype": "f32"}
               for i, role in enumerate("qkvo")}
    return {**sizes(shape), **options, "tensors": tensors}


def kernels(device):
    return json.loads(device.call_json("registry_export", {"filter": KERNELS}))["kernels"]


def kernel_names(daemon):
    """What the registry offers: the same after every fault."""
    with daemon.device() as device:
        return sorted((k["name"], k.get("priority", 0)) for k in kernels(device))


def refusal(function):
    """What a call that has to be refused is refused with."""
    try:
        function()
        return "done"
    except fmha_wire.WireError as error:
        if error.name in ("ENOTSUP", "ENOENT", "ECANCELED", "EINVAL"):
            return error.name
        raise


# ---- the front ----


@visit("hello", "ping", "devices")
def front_calls(daemon):
    with daemon.client() as client:
        client.ping()
        return [(d["name"], d["arch"], d["backend"]) for d in client.devices()]


@visit("status", "worker_status")
def status(daemon):
    with daemon.client() as client:
        document = client.status()
    if not json.loads(document)["devices"][0]["worker"]:
        raise fmha_wire.Disconnected("of the worker nothing is told, and null says so")
    return AtLeast(document)


@visit("open_device", "worker_attach")
def open_devices(daemon):
    with daemon.client() as client, client.open_device(0) as one, client.open_device(0) as two:
        one.ping()
        two.ping()
        return one.info["name"], two.info["name"]


RAN = "fmhad_(errors|family|flops|kernel_seconds)"  # only once something has run, or was refused


@visit()
def metrics(daemon):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(2)
        sock.connect(str(daemon.folder / "metrics"))
        answer = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n")
            while part := sock.recv(65536):
                answer += part
    head = answer.decode().split("\r\n")[0]
    if " 200 " not in head:
        raise fmha_wire.Disconnected(head)
    if not answer.endswith(b"# EOF\n"):
        raise fmha_wire.Disconnected("cut off")
    if b"\nfmhad_buffer_bytes" not in answer:
        raise fmha_wire.Disconnected("of the worker nothing is told, as of one that is silent")
    return AtLeast(of={line.split("{")[0].split(" ")[0] for line in answer.decode().splitlines()
                       if line.startswith("fmhad_") and not re.match(RAN, line)})


# ---- buffers, plans, runs ----


@visit("buffer_create", "buffer_release")
def buffers(daemon):
    with daemon.device() as device:
        buffer = device.buffer_create(4096)
        view = buffer.array("u8", (4096,))
        if view.any():
            raise Lie("a new buffer is not zero")
        del view
        buffer.release()
        return refusal(lambda: device.call("buffer_release", {"buffer": buffer.id}))


@visit("buffer_import")
def imported(daemon):
    fd = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 1 << 16)
        import fcntl

        fcntl.fcntl(fd, 1033, SEALS)
        with daemon.device() as device:
            buffer = device.buffer_import(fd, 1 << 16)
            planned = device.plan(problem(buffer.id))
            q, k, v = INPUTS[TINY]
            part = q.nbytes
            for i, array in enumerate((q, k, v)):
                buffer.array("f32", TINY, i * part)[...] = array
            device.run(planned["plan"])
            o = buffer.array("f32", TINY, 3 * part).copy()
            os.close(buffer.fd)
    finally:
        os.close(fd)
    if not numpy.allclose(o, EXPECTED[TINY], atol=1e-5):
        raise Lie("O is wrong")
    return "right"


@visit("plan", "plan_release", "run")
def run_tiny(daemon):
    return forward(daemon)


@visit("run")
def run_larger(daemon):
    return forward(daemon, LARGER)


@visit("run")
def run_split(daemon):
    """Two stages with a workspace, on tables that are judged off the loop."""
    rng = numpy.random.default_rng(3)
    keys, rows, heads, hdim = 512, 1, 2, 32
    q = rng.standard_normal((1, rows, heads, hdim), dtype=numpy.float32)
    k, v = (rng.standard_normal((1, keys, heads, hdim), dtype=numpy.float32) for _ in range(2))
    with daemon.device() as device:
        o = device.forward(q, k, v, n_splits=4)
    if not numpy.allclose(o, reference(q, k, v), atol=1e-5):
        raise Lie("O is wrong")
    return "right"


@visit("run")
def run_packed(daemon):
    """Sequences packed on one axis, whose prefix sums are too many for the loop."""
    batch, total, heads, hdim = 12, 24, 2, 32
    rng = numpy.random.default_rng(4)
    part = 4 * total * heads * hdim
    with daemon.device() as device:
        buffer = device.buffer_create(4 * part + 4096)
        q, k, v = (rng.standard_normal((total, heads, hdim), dtype=numpy.float32) for _ in range(3))
        for i, array in enumerate((q, k, v)):
            buffer.array("f32", array.shape, i * part)[...] = array
        starts = numpy.arange(0, total + 1, 2, dtype=numpy.int32)
        buffer.array("i32", starts.shape, 4 * part)[...] = starts
        tensors = {role: {"buffer": buffer.id, "offset": i * part, "dtype": "f32"}
                   for i, role in enumerate("qkvo")}
        for role in ("seqstart_q", "seqstart_k"):
            tensors[role] = {"buffer": buffer.id, "offset": 4 * part, "dtype": "i32"}
        planned = device.plan({"mode": "group", "batch": batch, "nhead_q": heads, "nhead_k": heads,
                               "seqlen_q": 2, "seqlen_k": 2, "total_q": total, "total_k": total,
                               "hdim_q": hdim, "hdim_v": hdim, "tensors": tensors})
        device.run(planned["plan"])
        o = buffer.array("f32", q.shape, 3 * part).copy()
        os.close(buffer.fd)
    parts = [a.reshape(batch, 2, heads, hdim) for a in (q, k, v)]
    if not numpy.allclose(o.reshape(parts[0].shape), reference(*parts), atol=1e-5):
        raise Lie("O is wrong")
    return "right"


@visit("run")
def run_backward(daemon):
    rows, hdim = 48, 32
    part = 4 * rows * hdim
    rng = numpy.random.default_rng(5)
    roles = ["q", "k", "v", "o", "d_o", "dq", "dk", "dv"]
    with daemon.device() as device:
        buffer = device.buffer_create(9 * part)
        at = {role: i * part for i, role in enumerate([*roles, "lse"])}
        views = {r: buffer.array("f32", (rows, hdim), at[r]) for r in roles}
        for role in ("q", "k", "v", "d_o"):
            views[role][...] = rng.standard_normal((rows, hdim))
        q, k, v, d_o = (views[r].astype(float) for r in ("q", "k", "v", "d_o"))
        s = q @ k.T / numpy.sqrt(hdim)
        lse = numpy.log(numpy.exp(s).sum(1, keepdims=True))
        p = numpy.exp(s - lse)
        views["o"][...] = p @ v
        buffer.array("f32", (rows,), at["lse"])[:] = lse[:, 0]
        tensors = {r: {"buffer": buffer.id, "offset": at[r], "dtype": "f32"} for r in at}
        planned = device.plan({**sizes((1, rows, 1, hdim)), "op": "backward", "tensors": tensors})
        device.run(planned["plan"])
        dv = views["dv"].copy()
        views.clear()
        os.close(buffer.fd)
    if not numpy.allclose(dv, p.T @ d_o, atol=1e-4):
        raise Lie("dV is wrong")
    return "right"


@visit("run", "cancel")
def pipelined(daemon):
    """Runs that wait for one another, one of them given up, and answers that are read late."""
    with daemon.device() as device:
        buffer = device.buffer_create(1 << 20)
        plan = device.plan(problem(buffer.id, LARGER))["plan"]
        numbers = [device.submit("run", {"plan": plan}) for _ in range(6)]
        refusal(lambda: device.call("cancel", {"request": numbers[-1]}))  # it may have ended
        said = [refusal(lambda n=n: device.wait(n)) for n in numbers]
        os.close(buffer.fd)
    return said[:-1]


@visit("run")
def hung_up(daemon):
    """A client that leaves with runs under way."""
    with daemon.device() as device:
        buffer = device.buffer_create(1 << 20)
        plan = device.plan(problem(buffer.id, LARGER))["plan"]
        for _ in range(4):
            device.submit("run", {"plan": plan})
        os.close(buffer.fd)
    return "left"


@visit("explain")
def explain(daemon):
    with daemon.device() as device:
        buffer = device.buffer_create(1 << 16)
        document = device.explain(problem(buffer.id))
        os.close(buffer.fd)
        return AtLeast(document), json.loads(document)["plan"]["stages"][0]["kernel"]


def use_up(daemon):
    """What was injected, also when the first run comes to nothing."""
    with daemon.device() as device:
        for _ in range(2):
            with contextlib.suppress(fmha_wire.WireError):
                device.forward(*INPUTS[TINY])


@visit("inject", tidy=use_up)
def injected(daemon):
    with daemon.device() as device:
        device.call("inject", {"fault": "oom"})
    use_up(daemon)
    return forward(daemon)


@visit("local_plan", "local_runs", "code", "event_import", "event_release")
def local_on_a_cpu(daemon):
    with daemon.device() as device:
        buffer = device.buffer_create(1 << 16)
        os.close(buffer.fd)
        asked = {"problem": problem(1)}
        return [refusal(lambda m=m, p=p: device.call(m, p)) for m, p in [
            ("local_plan", asked), ("code", {"hash": bytes(32)}), ("event_import", {"handle": bytes(64)}),
            ("event_release", {"event": 1})]]


@visit("local_runs")
def local_runs(daemon):
    with daemon.device() as device:
        return refusal(lambda: device.call("local_runs", {"problem": problem(1), "runs": 3, "version": 1}))


# ---- the registry ----


@visit("registry_export")
def export(daemon):
    with daemon.device() as device:
        document = device.call_json("registry_export", {"filter": KERNELS})
        return AtLeast(document), len(json.loads(document)["kernels"])


@visit("registry_get")
def get(daemon):
    with daemon.device() as device:
        return AtLeast(device.call_json("registry_get", {"kernel": daemon.kernel}))


def stored_settings(daemon):
    """What the settings on disk say: priorities by kernel, and sets by name."""
    found = {"priorities": {}, "sets": {}}
    for path in pathlib.Path(daemon.config["tuning"]["state"]).glob("*settings.json"):
        document = json.loads(path.read_text())
        for key, part in found.items():
            part.update(document.get(key, {}))
    return found


def reset_priority(daemon):
    with daemon.device() as device:
        if not device.call("registry_set_priority", {"kernel": daemon.kernel, "priority": 0}).get("stored"):
            raise Lie("a priority is not stored, though nothing fails")


@visit("registry_set_priority", "registry_change", "worker_restore", tidy=reset_priority)
def set_priority(daemon):
    with daemon.device() as device:
        stored = device.call("registry_set_priority", {"kernel": daemon.kernel, "priority": 7}).get("stored")
        if stored and stored_settings(daemon)["priorities"].get(daemon.kernel) != 7:
            raise Lie(f"stored: {stored_settings(daemon)}")
        has = json.loads(device.call_json("registry_get", {"kernel": daemon.kernel})).get("priority", 0)
        if has != 7:
            raise Lie(f"priority {has} after it was set to 7")
    return "set"


def unload(daemon):
    with daemon.device() as device:
        refusal(lambda: device.call("registry_unload", {"set": "mine"}))


@visit("registry_load", "registry_unload", "registry_change", "worker_restore", tidy=unload, most=50, patience=120)
def sets(daemon):
    with daemon.device() as device:
        answer = device.call_with_text("registry_load", '["fwd-fp32-*-h32-*-portable"]', set="mine")
        if answer.get("stored") and "mine" not in stored_settings(daemon)["sets"]:
            raise Lie(f"stored: {stored_settings(daemon)}")
        document = json.loads(device.call_json("registry_export", {"filter": KERNELS}))
        if "mine" not in document["sets"]:
            raise Lie("a set that was loaded is not there")
        device.call("registry_unload", {"set": "mine"})
        document = json.loads(device.call_json("registry_export", {"filter": KERNELS}))
        if "mine" in document["sets"]:
            raise Lie("a set that was unloaded is there")
        return answer["n_kernels"] > 0


@visit("registry_import", "registry_change", "worker_restore", tidy=reset_priority, most=300)
def imports(daemon):
    with daemon.device() as device:
        document = device.call_json("registry_export", {"filter": KERNELS})
        answer = device.call_with_text("registry_import", document)
        return answer["n_kernels"] > 0


@visit("registry_lift", "registry_change")
def lift(daemon):
    with daemon.device() as device:
        return refusal(lambda: device.call("registry_lift", {"kernel": daemon.kernel}))


@visit("tune", "tuned_result", "census")
def tune(daemon):
    """Measured, told to the front, and counted."""
    with daemon.device() as device:
        answer = device.call("tune", {"problem": problem(1), "again": True, "budget_ms": 20})
        census = AtLeast(device.call_json("census"))
        return answer["shape"], answer["n_candidates"], census


@visit("registry_forget", "registry_change")
def forget(daemon):
    with daemon.device() as device:
        return device.call("registry_forget", {"kernel": "*"}).get("n_kernels", 0) >= 0


def drop_pool(daemon):
    """Nothing of it is there when the next fault is tried; whoever had it open may not have been missed yet."""

    def is_dropped():
        try:
            with daemon.client() as client:
                client.call("pool_drop", {"name": "visit"})
        except fmha_wire.WireError as error:
            return error.name == "ENOENT"
        return True

    if not fmhad.until(is_dropped):
        raise Lie("a pool that nobody has open stays")


@visit("pool_open", "pool_close", "pool_lease", "pool_seal", "pool_find", "pool_give_back", "pool_drop", "pool_share", tidy=drop_pool)
def pools(daemon):
    """What one has sealed the next one finds, and nothing else of what it wrote."""
    keys = [bytes([n]) * 32 for n in range(3)]
    with daemon.client() as client:
        opened, (fd,) = client.call_with_fds("pool_open", {"name": "visit", "n_pages": 300, "page_bytes": 4096})
        with contextlib.closing(mmap.mmap(fd, 300 * 4096)) as memory:
            os.close(fd)
            pool = {"pool": opened["pool"]}
            pages = client.call("pool_lease", {**pool, "n": 280})["pages"]
            for at in range(0, len(pages), 4):
                page = int.from_bytes(pages[at:at + 4], "little")
                memory[page * 4096:page * 4096 + 4] = b"here"
            sealed = client.call("pool_seal", {**pool, "pages": pages[:8], "keys": keys[0] + keys[1]})["pages"]
            client.call("pool_give_back", {**pool, "pages": pages[8:12]})
            shared = len(client.call("pool_share", {"name": "visit", "uid": 5, "access": "read"})["share"])
            client.call("pool_close", pool)
    with daemon.client() as client:
        opened, (fd,) = client.call_with_fds("pool_open", {"name": "visit"})
        with contextlib.closing(mmap.mmap(fd, 300 * 4096)) as memory:
            os.close(fd)
            pool = {"pool": opened["pool"]}
            found = client.call("pool_find", {**pool, "keys": b"".join(keys)})["pages"]
            if found != sealed or len(found) != 8:
                raise Lie(f"pages {sealed} were sealed, {found} are found")
            for at in range(0, 8, 4):
                page = int.from_bytes(found[at:at + 4], "little")
                if memory[page * 4096:page * 4096 + 4] != b"here":
                    raise Lie("a sealed page has lost what was in it")
            client.call("pool_close", pool)
        return len(pages), shared, opened["n_pages"], refusal(lambda: client.call("pool_drop", {"name": "visit"}))


@visit("trace")
def trace(daemon):
    with daemon.device() as device:
        device.call_json("trace")
        device.forward(*INPUTS[TINY])
        document = json.loads(device.call_json("trace"))
        return sorted(document), len(document.get("runs", []))


# ---- signals ----


@visit("ping")
def reload(daemon):
    """SIGHUP: of front and worker."""
    os.kill(daemon.pid, signal.SIGHUP)
    with daemon.client() as client:
        client.ping()
    return forward(daemon)


# ---- a GPU: the stub of libcuda, with a script as compiler ----


def without_code(daemon):
    """A new worker, which has loaded no kernel, and a cache that has none."""
    daemon.restart_worker()
    for path in (daemon.folder / "cache").rglob("*"):
        if path.is_file():
            path.unlink()


@visit("compile", "plan", "run", device="cuda", ready=without_code)
def compiled(daemon):
    """A kernel that is in no cache: asked of the front, built by a helper, loaded, run."""
    with daemon.device() as device:
        result, (fd,) = device.call_with_fds("buffer_create", {"size": 1 << 18})
        os.close(fd)
        planned = device.plan(problem(result["buffer"], (1, 64, 2, 64)))
        device.run(planned["plan"])
        return planned["stages"][0]["family"]


@visit("compile", "compile_cancel", device="cuda", ready=without_code)
def compile_given_up(daemon):
    """A client that leaves while its kernel is being built."""
    with daemon.device() as device:
        result, (fd,) = device.call_with_fds("buffer_create", {"size": 1 << 18})
        os.close(fd)
        device.submit("plan", {"problem": problem(result["buffer"], (1, 64, 2, 64))})
        device.ping()
    return "left"


@visit("pool_open", "worker_memory", "worker_clear", device="cuda", tidy=drop_pool)
def pools_on_a_gpu(daemon):
    """What was sealed is there, and of what was not nothing, once a handle is closed: a page that could not be cleared is nobody's."""
    def opened(client):
        answer, (fd,) = client.call_with_fds("pool_open", {"name": "visit", "n_pages": 4, "page_bytes": 4096, "on_device": 1})
        memory = mmap.mmap(fd, 4 * 4096)
        os.close(fd)
        return {"pool": answer["pool"]}, contextlib.closing(memory)

    def numbers(pages):
        return [int.from_bytes(pages[at:at + 4], "little") for at in range(0, len(pages), 4)]

    with daemon.client() as client:
        pool, closing = opened(client)
        with closing as memory:
            pages = client.call("pool_lease", {**pool, "n": 2})["pages"]
            for page in numbers(pages):
                memory[page * 4096:page * 4096 + 4] = b"here"
            client.call("pool_seal", {**pool, "pages": pages[:4], "keys": bytes(32)})
            client.call("pool_close", pool)
    with daemon.client() as client:
        pool, closing = opened(client)
        with closing as memory:
            (sealed,) = numbers(client.call("pool_find", {**pool, "keys": bytes(32)})["pages"])
            if memory[sealed * 4096:sealed * 4096 + 4] != b"here":
                raise Lie("a sealed page has lost what was in it")
            for _ in range(3):
                for page in numbers(client.call("pool_lease", {**pool, "n": 4})["pages"]):
                    if memory[page * 4096:page * 4096 + 4] != bytes(4):
                        raise Lie(f"page {page} was not cleared")
            client.call("pool_close", pool)
    return True


@visit("local_plan", "code", "local_runs", device="cuda")
def local_on_a_gpu(daemon):
    with daemon.device() as device:
        asked = problem(1, (1, 64, 2, 64))
        for i, tensor in enumerate(asked["tensors"].values()):
            tensor["buffer"], tensor["offset"] = i + 1, 0
        planned = device.call("local_plan", {"problem": asked})
        code, (fd,) = device.call_with_fds("code", {"hash": planned["launches"][0]["code"]})
        data = os.pread(fd, code["size"], 0)
        os.close(fd)
        if len(data) != code["size"]:
            raise Lie("code is shorter than it was said to be")
        told = device.call("local_runs", {"problem": asked, "runs": 1, "version": planned["version"]})
        return len(planned["launches"]), data, "version" in told


@visit("event_import", "event_release", device="cuda")
def events(daemon):
    counters = os.memfd_create("event")
    try:
        os.ftruncate(counters, 4096)
        name = b"event %d %d" % (os.getpid(), counters)
        with daemon.device() as device:
            event = device.call("event_import", {"handle": name + bytes(64 - len(name))})["event"]
            result, (fd,) = device.call_with_fds("buffer_create", {"size": 1 << 18})
            os.close(fd)
            plan = device.plan(problem(result["buffer"], (1, 64, 2, 64)))["plan"]
            device.run(plan, waits=[{"event": event}])
            device.run(plan)
            device.call("event_release", {"event": event})
    finally:
        os.close(counters)
    return "ran"


@visit("run", device="cuda")
def run_staged(daemon):
    """Host memory, copied around a run."""
    import fcntl

    fd = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    shape = (1, 64, 2, 64)
    part = 4 * int(numpy.prod(shape))
    try:
        os.ftruncate(fd, 4 * part)
        fcntl.fcntl(fd, 1033, SEALS)
        with daemon.device() as device:
            buffer = device.buffer_import(fd, 4 * part)
            buffer.array("f32", shape)[...] = 5
            planned = device.plan(problem(buffer.id, shape))
            device.run(planned["plan"])
            o = buffer.array("f32", shape, 3 * part).copy()
            os.close(buffer.fd)
    finally:
        os.close(fd)
    if not (o == 5).all():  # the stub's kernel copies q to o
        raise Lie("O is wrong")
    return "right"
