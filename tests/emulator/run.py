# SPDX-License-Identifier: MIT
"""Every GPU kernel family on an instruction-level emulator of AMD GPUs, judged by the reference.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/run.py [--arch gfx942] [--match TEXT] [--quick] [--jobs N]
        [--random 40 [--seed S] [--first I]]

--random: so many problems an arch that random_problems.py draws, judged by its oracle, instead of the suite's.

Skipped (exit 77), saying so, when TINYGRAD is unset. Needs python3-pyelftools and a clang that knows the arch.
"""
import argparse
import collections
import concurrent.futures
import functools
import hashlib
import os
import signal
import sys
import time
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu"))

import numpy as np  # noqa: E402

import abi  # noqa: E402
import clangs  # noqa: E402
import suite  # noqa: E402

PASSED, FAILED, ASIDE = "ok", "FAIL", "aside"  # what became of a case; set aside: its kernel cannot run here
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


@functools.cache
def sources_digest():
    """Of everything that a kernel is made of, so that code objects outlive a run."""
    digest = hashlib.sha256()
    for top in (os.path.join(abi.ROOT, "kernels", "gpu"), os.path.join(abi.INCLUDE, "kernels")):
        for folder, folders, names in os.walk(top):
            folders[:] = sorted(set(folders) - {"host", "include"})
            for name in sorted(names):
                if name.endswith((".h", ".hip")):
                    with open(os.path.join(folder, name), "rb") as f:
                        digest.update(f.read())
    return digest.hexdigest()


def kernel_folder():
    folder = os.path.join(clangs.build_folder(), "emulator", "kernels")
    os.makedirs(folder, exist_ok=True)
    return folder


def compile_kernel(kernel, arch, folder):
    options, clang = abi.kernel_options(kernel), clangs.find(arch)
    words = [sources_digest(), arch, *clang, *clangs.standing_options(clang.command), *options]
    key = hashlib.sha256(" ".join(words).encode()).hexdigest()[:24]
    out = os.path.join(folder, key + ".co")
    if os.path.exists(out):
        return out
    source = os.path.join(abi.ROOT, "kernels", "gpu", kernel.source.decode())
    clangs.compile_object(arch, source, options, f"{out}.{os.getpid()}")
    os.rename(f"{out}.{os.getpid()}", out)
    return out


class EmulatedDevice:
    """Runs a kernel on the memory that the argument struct points to."""

    def __init__(self, lib, arch, folder, reverse):
        import emulator
        self.lib, self.arch, self.folder, self.reverse = lib, arch, folder, reverse
        self.digest = 0  # of what kernels wrote
        self.emulator = emulator

    def run(self, kernel, args, problem):
        grid = abi.kernel_grid(self.lib, kernel, args)
        if 0 in grid:
            return
        code = self.emulator.CodeObject(compile_kernel(kernel, self.arch, self.folder), self.arch)
        code.launch(kernel.entry.decode(), grid, kernel.block[0], args, kernel.lds_bytes,
                    self.reverse)
        for name in sorted(problem.outputs):
            self.digest = zlib.crc32(np.ascontiguousarray(problem.outputs[name]), self.digest)


def run_case(case, lib, arch, folder, pipeline, seconds):
    """Both orders of waves; returns what became of it and a text."""
    import emulator

    def stop(*_):
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        devices = [EmulatedDevice(lib, arch, folder, reverse) for reverse in (False, True)]
        texts = [suite.run(case, lib, device, arch, pipeline) for device in devices]
        assert devices[0].digest == devices[1].digest, "other bits when waves come in another order"
    except emulator.NeedsScratch as error:
        if pipeline or case.pipeline:
            return ASIDE, str(error)
        return run_case(case, lib, arch, folder, "gpu_mfma", seconds)  # as fmhad does with what spills
    except (AssertionError, RuntimeError, ValueError, TimeoutError) as error:
        return FAILED, f"{type(error).__name__}: {str(error)[:160]}"
    finally:
        signal.alarm(0)
    return PASSED, texts[1]


@functools.cache
def library():
    return abi.load_library()


def try_case(task):
    """(what became of it, a text, seconds)"""
    arch, case, options = task
    start = time.time()
    verdict, text = run_case(case, library(), arch, kernel_folder(), options.pipeline, options.timeout)
    return verdict, text, time.time() - start


def cases(options, arch):
    if not options.random:
        return suite.emulated(options.quick)
    import random_problems
    return [random_problems.Drawn(library(), arch, options.seed, number, options.pipeline)
            for number in range(options.first, options.first + options.random)]


def check_archs(name, archs, check, well):
    """main() of a program that checks one kernel. check(arch, folder) says what is wrong, well what holds otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append")
    options = parser.parse_args()
    if not os.environ.get("TINYGRAD"):
        print(f"{name}: skipped, TINYGRAD is not set (a checkout of github:tinygrad/tinygrad)")
        return 77
    archs = clangs.known(options.arch or archs, name)
    found = {arch: check(arch, kernel_folder()) for arch in archs}
    for arch, wrong in found.items():
        print(f"{'FAIL' if wrong else 'ok  '} {arch}: {', '.join(wrong) or well}")
    return 1 if any(found.values()) or not archs else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append")
    parser.add_argument("--match", default="", help="only cases whose line holds this")
    parser.add_argument("--quick", action="store_true", help="every twelfth case")
    parser.add_argument("--pipeline", help="the tile that is forced: gpu_scalar, ...")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a case may take")
    parser.add_argument("--random", type=int, metavar="N", help="so many random problems an arch")
    parser.add_argument("--seed", type=int, default=1, help="of random problems")
    parser.add_argument("--first", type=int, default=0, help="number of the first random problem")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if not os.environ.get("TINYGRAD"):
        print("emulator: skipped, TINYGRAD is not set (a checkout of github:tinygrad/tinygrad)")
        return 77
    verdicts = collections.Counter()
    tasks = [(arch, case, options) for arch in clangs.known(options.arch or ARCHS, "emulator")
             for case in cases(options, arch) if options.match in f"{arch} {case}"]
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for (arch, case, _), (verdict, text, seconds) in zip(tasks, pool.map(try_case, tasks)):
            verdicts[verdict] += 1
            print(f"{verdict:4} {arch} {case}: {text} ({seconds:.1f} s)", flush=True)
    print(f"emulator: {verdicts[PASSED]} of {verdicts.total()} passed, {verdicts[ASIDE]} set aside; waves in both orders, LDS "
          "and registers poisoned")
    return 1 if verdicts[FAILED] or not verdicts[PASSED] else 0


if __name__ == "__main__":
    sys.exit(main())
