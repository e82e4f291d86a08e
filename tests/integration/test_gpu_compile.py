# SPDX-License-Identifier: MIT
"""Every kernel family compiles for GPUs that are not here, the way the daemon compiles: through the
helper process, the queue and the cache, with each compiler that this machine has. What spills registers is named.
"""
import os
import re
import resource
import subprocess
import sys

import fmhad
import pytest

sys.path.insert(0, str(fmhad.ROOT / "tests/gpu"))
import clangs  # noqa: E402

# compiler, arch: the pipeline of its matrix core
TARGETS = {
    ("nvrtc", "sm_80"): "gpu_mma",
    ("nvrtc", "sm_90a"): "gpu_mma",
    ("hiprtc", "gfx90a"): "gpu_mfma",
    ("clang", "gfx90a"): "gpu_mfma",
    ("clang", "gfx942"): "gpu_mfma",
    ("clang", "gfx950"): "gpu_mfma",
    ("clang", "gfx1100"): "gpu_wmma",
    ("clang", "gfx1201"): "gpu_wmma",
}
FAMILIES = [
    "fwd",
    "fwd_splitkv",
    "fwd_splitkv_combine",
    "fwd_pagedkv",
    "fwd_appendkv",
    "batch_prefill",
    "bwd_dot_do_o",
    "bwd_dq_dk_dv",
    "bwd_convert_dq",
]
PLAIN = (  # what takes any head dims has the largest in its name
    "data_type == 'bf16' and (hdim_q == 64 and hdim_v == 64 or "
    "family in ('fwd_splitkv_combine', 'fwd_appendkv', 'bwd_dot_do_o', 'bwd_convert_dq')) and mask in ('no', 'generic') "
    "and bias == 'no' and not logits and not dropout and not sink and qscale == 'no' "
    "and not skip_min_seqlen_q and page_size in (1, 16)"
)


def fmhactl(*arguments):
    return subprocess.run(
        [fmhad.find_program("fmhactl"), *arguments], text=True, capture_output=True, check=False
    )


def has_compiler(compiler, clang=""):
    helper = fmhad.find_program("fmhad-compile")
    found = subprocess.run(
        [helper, "--version", compiler, clang], capture_output=True, check=False
    )
    return found.returncode == 0


def kernels_of(arch, core):
    """One kernel a family: on the matrix core where the family has one."""
    listed = fmhactl("build", "--arch", arch, "--list", "--filter", PLAIN)
    assert listed.returncode == 0, listed.stderr
    chosen = {}
    for name in listed.stdout.splitlines():
        if name == f"fmha_prepare_{arch}":  # has no type
            chosen["prepare"] = name
            continue
        family = re.match(r"fmha_(.*?)_bf16_", name).group(1)
        if f"_{core}_h" in name or family not in chosen:
            chosen.setdefault(family + ("" if f"_{core}_h" in name else "?"), name)
    return {f: chosen.get(f) or chosen.get(f + "?") for f in [*FAMILIES, "prepare"]}


@pytest.mark.parametrize("compiler, arch", TARGETS, ids=lambda word: word)
def test_every_family_compiles(compiler, arch, tmp_path):
    if not has_compiler(compiler):
        pytest.skip(f"{compiler} is not installed here")
    clang = clangs.find(arch) if compiler == "clang" else clangs.Clang("", "")
    if not clang:
        pytest.skip(f"no clang here knows {arch}")
    kernels = kernels_of(arch, TARGETS[compiler, arch])
    missing = [family for family, name in kernels.items() if not name]
    assert not missing, f"{arch} has no kernel of {missing}"
    arguments = ["build", "--arch", arch, "--compiler", compiler, "--cache", str(tmp_path / "cache")]
    arguments += ["--filter", PLAIN, "--pack", str(tmp_path / "pack")]
    arguments += ["--clang", clang.command] * bool(clang.command) + ["--linker", clang.linker] * bool(clang.linker)
    for name in kernels.values():
        arguments += ["--kernel", name]
    built = fmhactl(*arguments)
    assert built.returncode == 0, built.stdout + built.stderr
    assert f"{len(kernels)} built, 0 in the cache already, 0 failed" in built.stdout
    spilling = re.findall(r"^spills [1-9]\d* bytes: (\S+)", built.stderr, re.M)
    assert set(spilling) <= set(kernels.values())
    assert f"0 failed, {len(spilling)} spill registers" in built.stdout
    again = fmhactl(*arguments)
    assert f"0 built, {len(kernels)} in the cache already" in again.stdout


PASSES_ON = """#!/bin/sh
[ "$1" = --version ] && echo version 1 && exit 0
case "$*" in *' /dev/null') exit 1;; esac
echo code
"""


def quick_clang(tmp_path):
    """A clang that takes everything, and no time."""
    clang = tmp_path / "clang"
    clang.write_text(PASSES_ON)
    clang.chmod(0o755)
    return ["--clang", str(clang), "--cache", str(tmp_path / "cache")]


def test_build_takes_kernels_by_either_name(tmp_path):
    plan = fmhactl("plan", "forward", "--arch", "gfx942", "--rules", "gpu")
    planned = re.search(r"^stage 1 +(\S+)$", plan.stdout, re.M).group(1)
    arguments = ["build", "--arch", "gfx942", *quick_clang(tmp_path)]
    built = fmhactl(*arguments, "--kernel", planned)
    assert built.returncode == 0 and "1 kernels: 1 built" in built.stdout, built.stderr
    listed = fmhactl("build", "--arch", "gfx942", "--list", "--kernel", planned)
    name = listed.stdout.strip()
    assert name.startswith("fmha_") and "\n" not in name
    built = fmhactl(*arguments, "--kernel", name, "--kernel", planned)
    assert built.returncode == 0 and "1 kernels: 0 built, 1 in the cache already" in built.stdout
    for wrong in ("typo", name + "_typo", planned.replace("gfx942", "gfx90a")):
        built = fmhactl(*arguments, "--kernel", name, "--kernel", wrong)
        assert built.returncode == 2 and built.stdout == ""
        assert built.stderr == f"fmhactl build: --kernel {wrong[:120]}: gfx942 has no such kernel; --list names them\n"


def test_a_plans_append_is_built_with_all_its_code():
    """Its name does not say how rows turn, which is other code."""
    plan = fmhactl("plan", "append", "--arch", "sm_90a", "--rope", "half")
    planned = re.search(r"^stage 1 +(fwd_appendkv\S+)$", plan.stdout, re.M).group(1)
    listed = fmhactl("build", "--arch", "sm_90a", "--list", "--kernel", planned).stdout.split()
    assert [name.rpartition("_b7")[2] for name in listed] == ["", "_turns", "_turns2"]


def test_build_from_a_warm_cache_is_quick(tmp_path):
    arguments = ["build", "--arch", "gfx942", "--profile", "flash_bwd", *quick_clang(tmp_path)]
    (tmp_path / "clang").write_text(PASSES_ON.replace("#!/bin/sh", f"#!/bin/sh\necho >>{tmp_path}/started"))

    def seconds():  # of processors: who else is busy does not count
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = [seconds()]
    assert fmhactl(*arguments).returncode == 0
    times.append(seconds())
    n_started = len((tmp_path / "started").read_text())
    again = fmhactl(*arguments)
    times.append(seconds())
    count = int(re.search(r": (\d+) kernels: 0 built", again.stdout).group(1))
    assert count > 200 and n_started > count
    assert len((tmp_path / "started").read_text()) - n_started < 10, "it asks for the version, and compiles nothing"
    assert times[2] - times[1] < (times[1] - times[0]) / 2, times


def test_every_listed_arch_takes_a_kernel(tmp_path):
    """Where a compiler here knows it. Nightly compiles more of each."""
    tried = []
    for line in fmhactl("archs").stdout.splitlines():
        arch, vendor = line.split()[:2]
        clang = clangs.find(arch) if vendor == "amd" else None
        if vendor not in ("amd", "nvidia") or (vendor == "amd" and not clang) or (vendor == "nvidia" and not has_compiler("nvrtc")):
            continue
        listed = fmhactl("build", "--arch", arch, "--list", "--filter", PLAIN + " and family == 'fwd'").stdout.split()
        options = [word for name in ("command", "linker") if getattr(clang, name, "")
                   for word in (f"--{name}".replace("command", "clang"), getattr(clang, name))]
        built = fmhactl("build", "--arch", arch, "--cache", str(tmp_path / arch), "--kernel", listed[0], *options)
        assert built.returncode == 0 and "1 built" in built.stdout, f"{arch} {listed[0]}: {built.stdout}{built.stderr}"
        tried.append(arch)
    if not tried:
        pytest.skip("no compiler for GPUs here")


@pytest.mark.parametrize("arch,said", [
    ("gfx942:sramecc+:xnack-", "code for gfx942 serves it whatever its features are"),
    ("gfx9-4-generic", "there is none; `fmhactl archs` lists them"),
    ("gfx942,gfx950", "there is none; `fmhactl archs` lists them"),
])
def test_archs_that_are_none_are_refused_at_once(arch, said):
    for arguments in ((), ("--list",)):
        built = fmhactl("build", "--arch", arch, *arguments)
        assert (built.returncode, built.stdout) == (2, "")
        assert built.stderr == f"fmhactl build: arch {arch}: {said}\n"


@pytest.mark.parametrize("compiler,end,said", [
    ("clang", "echo \"clang: error: invalid target ID 'gfx950'\" >&2; exit 1", "this clang does not know gfx950; a newer one may"),
    ("hiprtc", "kill -ABRT $$", "died of signal 6, as hipRTC does when it does not know the arch"),
    ("clang", "kill -ABRT $$", "died of signal 6\n"),
])
def test_a_compiler_that_does_not_know_the_arch(tmp_path, compiler, end, said):
    helper = tmp_path / "helper"
    helper.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{compiler} 1.0" && exit 0\n{end}\n')
    helper.chmod(0o755)
    built = fmhactl("build", "--arch", "gfx950", "--kernel", "fmha_prepare_gfx950", "--compiler", compiler,
                    "--helper", str(helper), "--cache", str(tmp_path / "cache"))
    assert built.returncode == 1 and said in built.stderr + built.stdout, built


def test_a_missing_compiler_is_said_once_and_where_it_is(tmp_path):
    helper = tmp_path / "helper"
    helper.write_text("#!/bin/sh\necho 'libnvrtc.so.12: cannot open' >&2\nexit 3\n")
    helper.chmod(0o755)
    for arch, compiler, origin in (("sm_90a", "nvrtc", "CUDA toolkit"), ("gfx942", "clang", "clang-19")):
        built = fmhactl("build", "--arch", arch, "--profile", "flash_bwd", "--helper", str(helper),
                        "--cache", str(tmp_path / "cache"))
        assert built.returncode == 1 and built.stdout == ""
        assert built.stderr.startswith(f"fmhactl build: {compiler} is not installed: ")
        assert origin in built.stderr and built.stderr.count("\n") == 1


def test_where_the_compiler_lies_can_be_said(tmp_path):
    helper = tmp_path / "helper"
    helper.write_text(f'#!/bin/sh\necho "$LD_LIBRARY_PATH" >{tmp_path}/said\nexit 3\n')
    helper.chmod(0o755)
    built = fmhactl("build", "--arch", "sm_90a", "--profile", "flash_bwd", "--helper", str(helper), "--cache", str(tmp_path / "cache"),
                    "--library-path", "/somewhere/lib:/elsewhere")
    assert built.returncode == 1 and (tmp_path / "said").read_text() == "/somewhere/lib:/elsewhere\n"


def test_an_arch_that_the_compiler_does_not_know_is_an_error(tmp_path):
    """Debian's hipRTC 5.2 aborts on gfx942: that costs the helper process and nothing else."""
    if not has_compiler("hiprtc"):
        pytest.skip("hiprtc is not installed here")

    def build(arch, core):
        name = kernels_of(arch, core)["bwd_dot_do_o"]
        return name, fmhactl(
            "build", "--arch", arch, "--compiler", "hiprtc", "--cache", str(tmp_path / "cache"),
            "--filter", PLAIN, "--kernel", name,
        )

    name, result = build("gfx942", "gpu_mfma")
    if result.returncode != 0:  # a hipRTC that knows gfx942 builds it
        assert result.returncode == 1 and "0 built, 0 in the cache already, 1 failed" in result.stdout
        assert f"failed: {name}: " in result.stderr
    name, result = build("gfx90a", "gpu_mfma")
    assert "1 built, 0 in the cache already, 0 failed" in result.stdout, result.stderr


HOPPER = [("hopper.py", "bf16_128x128_t128x128_mask1", 2), ("hopper_bwd.py", "bf16_128x128_t64x128_mask1_logits1_bias1", 1)]
HOPPER_NIGHTLY = [("hopper.py", "128x128_t128x128", 18), ("hopper_bwd.py", "128x128_t64x128_mask1", 6)]


@pytest.mark.parametrize("program, match, n", HOPPER_NIGHTLY if "FMHA_NIGHTLY" in os.environ else HOPPER)
def test_hoppers_loops_neither_spill_nor_serialise(tmp_path, program, match, n):
    """ptxas says C7510 to C7515 where it makes one matrix product wait for another."""
    if not has_compiler("nvrtc"):
        pytest.skip("nvrtc is not installed here")
    built = subprocess.run(
        [sys.executable, fmhad.ROOT / "tests" / "gpu" / program, "build", tmp_path, "--match", match],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stdout.count(" 0 bytes of spills") >= n
