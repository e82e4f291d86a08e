# SPDX-License-Identifier: MIT
"""The installed tree: what is there, what is exported, and programs built against it."""
import os
import re
import shutil
import subprocess

import pytest

from fmhad import ROOT, Daemon, build_dir, find_program

CONSUMER = ROOT / "tests/consumer/forward.c"
CMAKE_PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(consumer C)
find_package(fmha_client 0.1 REQUIRED)
add_executable(consumer consumer.c)
target_link_libraries(consumer PRIVATE fmha::client)
"""


def run(*command, **options):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def sanitized():
    cache = (build_dir() / "CMakeCache.txt").read_text()
    return re.search(r"^FMHA_SANITIZE:STRING=.+", cache, re.MULTILINE) is not None


pytestmark = pytest.mark.skipif(sanitized(), reason="consumers do not link the sanitizers")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", build_dir(), "--prefix", path)
    return path


@pytest.fixture(scope="module")
def library(prefix):
    (path,) = prefix.glob("lib/**/libfmha_client.so")
    return path


@pytest.fixture(scope="module")
def daemon():
    with Daemon() as running:
        yield running


def public_functions():
    """Every function that the public headers declare."""
    text = "".join(
        path.read_text()
        for path in (*sorted((ROOT / "client/include/fmha").glob("*.h")), ROOT / "proto/include/fmha/base.h")
    )
    names = re.findall(r"^FMHA_API [^;]*?\b(fmha_\w+)\(", text, re.MULTILINE)
    assert len(names) > 30 and len(names) == len(set(names))
    return sorted(names)


def environment(library, daemon=None):
    variables = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    variables["PKG_CONFIG_PATH"] = str(library.parent / "pkgconfig")
    if daemon:
        variables["FMHAD_SOCKET"] = daemon.socket
    return variables


def test_build_tree_needs_no_place_of_its_own():
    """Copied with its sources it is whole: links and libraries are found by where they lie."""
    build = build_dir()
    if ROOT not in build.parents:
        pytest.skip("the build tree lies outside of the sources")
    links = [path for folder in ("bin", "lib", "libexec", "share", "client/python") for path in [build / folder, *(build / folder).rglob("*")]
             if path.is_symlink()]
    assert len(links) > 10
    assert [str(path) for path in links if os.path.isabs(os.readlink(path))] == []
    for program in ("fmhactl", "fmhad", "fmhad-compile"):
        told = subprocess.run(["readelf", "-d", find_program(program)], capture_output=True, text=True, check=True).stdout
        for path in re.findall(r"(?:RUNPATH|RPATH).*\[(.*)\]", told):
            assert all(part.startswith("$ORIGIN") for part in path.rstrip(":").split(":")), path  # CMake pads with colons


def test_the_tree_is_complete(prefix, library):
    for name in ("bin/fmhad", "bin/fmhactl", "include/fmha/fmha.h", "include/fmha/base.h"):
        assert (prefix / name).is_file(), name
    assert (library.parent / "pkgconfig/fmha_client.pc").is_file()
    assert (library.parent / "cmake/fmha_client/fmha_client-config.cmake").is_file()
    assert os.readlink(library) == "libfmha_client.so.1"


def test_the_library_has_a_soname_and_few_needs(library):
    dynamic = run("readelf", "-d", library)
    assert "soname: [libfmha_client.so.1]" in dynamic
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\.so", dynamic))
    # The loader: where a thread keeps how its waits are interrupted.
    needed -= {name for name in needed if name.startswith("ld-linux")}
    assert needed <= {"libc", "libmsgpackc", "libmsgpack-c", "libm", "libpthread", "libdl"}


def test_exactly_the_headers_functions_are_exported(library):
    lines = run("nm", "-D", "--defined-only", library).splitlines()
    exported = sorted(
        line.split()[2].split("@")[0] for line in lines if line.split()[1] not in ("A", "a")
    )
    assert exported == public_functions()


def test_every_exported_function_links(prefix, library, tmp_path):
    source = tmp_path / "all.c"
    table = "\n".join(f"\t(void (*)(void)){name}," for name in public_functions())
    source.write_text(
        "#include <fmha/fmha.h>\n#include <fmha/fmha_local.h>\n"
        f"static void (*const volatile table[])(void) = {{\n{table}\n}};\n"
        "int main(void)\n{\n"
        "\tfor (unsigned i = 0; i < sizeof(table) / sizeof(*table); i++)\n"
        "\t\tif (!table[i])\n\t\t\treturn 1;\n"
        "\treturn 0;\n}\n"
    )
    program = tmp_path / "all"
    run(
        "gcc", "-std=c17", "-Wall", "-Wextra", "-Werror", source, "-o", program,
        f"-I{prefix}/include", f"-L{library.parent}", "-lfmha_client",
    )  # fmt: skip
    run(program, env=environment(library))


@pytest.mark.parametrize("standard", ["c11", "c17", "c++17"])
def test_the_header_stands_alone(prefix, tmp_path, standard):
    compiler = "g++" if standard.startswith("c++") else "gcc"
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    source = tmp_path / ("alone.cpp" if compiler == "g++" else "alone.c")
    source.write_text("#include <fmha/fmha.h>\n#include <fmha/fmha.h>\nint main(void) { return 0; }\n")
    run(
        compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
        f"-I{prefix}/include", source,
    )  # fmt: skip


def test_a_consumer_builds_with_pkg_config(library, daemon, tmp_path):
    variables = environment(library, daemon)
    flags = run("pkg-config", "--cflags", "--libs", "fmha_client", env=variables).split()
    program = tmp_path / "consumer"
    run("gcc", "-Wall", "-Wextra", CONSUMER, "-o", program, *flags, env=variables)
    assert "o[0] =" in run(program, env=variables)


def test_a_consumer_builds_with_cmake(prefix, library, daemon, tmp_path):
    shutil.copy(CONSUMER, tmp_path / "consumer.c")
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_PROJECT)
    variables = environment(library, daemon)
    # Ninja is what this project needs anyway: a minimal Debian has no make.
    run("cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "build")
    del variables["LD_LIBRARY_PATH"]  # CMake wrote the path into the program
    assert "o[0] =" in run(tmp_path / "build/consumer", env=variables)


def test_the_installed_programs_run_from_their_prefix(prefix, daemon):
    variables = {**os.environ, "FMHAD_SOCKET": daemon.socket}
    assert re.match(r"fmhactl \d+\.\d+\.\d+", run(prefix / "bin/fmhactl", "--version"))
    assert "front fmhad/" in run(prefix / "bin/fmhactl", "ping", env=variables)
    assert "usage: fmhad" in run(prefix / "bin/fmhad", "--help")


def test_a_moved_tree_finds_its_own_files(prefix, tmp_path):
    """No path of the build, the sources or the first prefix is in what is installed."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(prefix, moved, symlinks=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("FMHA")}
    listed = run(moved / "bin/fmhactl", "build", "--arch", "sm_80", "--list", "--filter", "hdim_q == 64", env=variables)
    assert "sm_80" in listed and "gfx942" in run(moved / "bin/fmhactl", "archs", env=variables)
    (moved / "share/fmhad/specs/words.json").unlink()
    done = subprocess.run([moved / "bin/fmhactl", "archs"], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode != 0 and str(moved / "share/fmhad/specs") in done.stderr
    for path in (*moved.glob("bin/*"), *moved.glob("libexec/fmhad/*"), *moved.glob("lib/**/*.so*")):
        text = path.read_bytes()
        for foreign in (str(ROOT), str(prefix)):
            assert foreign.encode() not in text, (path, foreign)


def test_the_unit_is_written_for_its_prefix(tmp_path):
    for prefix in ("/opt/fmhad", "/usr"):
        stage = tmp_path / prefix.strip("/").replace("/", "-")
        run("cmake", "--install", build_dir(), "--prefix", prefix, env={**os.environ, "DESTDIR": str(stage)})
        unit = (stage / prefix.strip("/") / "lib/systemd/system/fmhad.service").read_text()
        assert f"ExecStart={prefix}/bin/fmhad\n" in unit


def test_uninstall_leaves_nothing(tmp_path):
    prefix = tmp_path / "prefix"
    other = prefix / "bin/other"
    other.parent.mkdir(parents=True)
    other.write_text("not ours")
    run("cmake", "--install", build_dir(), "--prefix", prefix)
    assert (prefix / "share/fmhad/specs").is_dir()
    run("cmake", "--build", build_dir(), "--target", "uninstall")
    assert [path for path in prefix.rglob("*") if not path.is_dir()] == [other]
    assert not [path for path in prefix.rglob("*") if path.name.startswith("fmha")]


def test_the_readme_shows_the_consumer():
    blocks = re.findall(r"```c\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if not blocks:
        pytest.skip("README.md has no program yet")
    assert CONSUMER.read_text() in blocks
