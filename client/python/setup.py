# SPDX-License-Identifier: MIT
"""The wheel: the package, cffi's tables of the headers, and, built from the tree, the library, the daemon, its modules and kernel
sources with the shared libraries that they need.

FMHA_WHEEL=bindings leaves the native part out: for an installed libfmha_client, from whose headers the tables are then made, and
an installed daemon.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEEDED = ("bin", "lib", "libexec", "share/fmhad")  # of an installed tree
BUNDLED = re.compile(r"lib(uv|msgpackc|msgpack-c|cjson|nettle)\.so")
LEFT_OUT = shutil.ignore_patterns("cmake", "pkgconfig", "systemd", "*.d")
RPATH = "$ORIGIN/../lib:$ORIGIN/../../lib:$ORIGIN:$ORIGIN/.."


BINDINGS = os.environ.get("FMHA_WHEEL") == "bindings"


def include_folders():
    """Of the library that the package will load."""
    if not BINDINGS:
        return [ROOT / "client/include", ROOT / "proto/include"]
    told = subprocess.run(["pkg-config", "--variable=includedir", "fmha_client"], capture_output=True, text=True)
    if told.returncode != 0:
        sys.exit(f"FMHA_WHEEL=bindings: pkg-config finds no libfmha_client: {told.stderr.strip()}")
    return [told.stdout.strip()]


class Build(build_py):
    def run(self):
        super().run()
        package = pathlib.Path(self.build_lib) / "fmha"
        options = [word for folder in include_folders() for word in ("--include", str(folder))]
        subprocess.run([sys.executable, str(HERE / "tools/make_abi.py"), *options, "--out", str(package / "_abi.py")], check=True)
        if not BINDINGS:
            self.native(package / "_native")

    def native(self, to):
        # In the tree, so that the next time builds what has changed.
        work = ROOT / "build/wheel" if os.access(ROOT, os.W_OK) else pathlib.Path(self.get_finalized_command("build").build_temp).absolute()
        installed = work / "installed"
        configure = ["cmake", "-S", str(ROOT), "-B", str(work), "-DCMAKE_BUILD_TYPE=Release", "-DFMHA_TESTS=OFF",
                     f"-DCMAKE_INSTALL_RPATH={RPATH.replace(':', ';')}", "-DCMAKE_INSTALL_LIBDIR=lib"]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(work), "--parallel", str(os.cpu_count() or 1)], check=True)
        shutil.rmtree(installed, ignore_errors=True)
        subprocess.run(["cmake", "--install", str(work), "--prefix", str(installed), "--strip"], check=True)
        shutil.rmtree(to, ignore_errors=True)
        for part in NEEDED:
            shutil.copytree(installed / part, to / part, ignore=LEFT_OUT, symlinks=True)
        os.rename((to / "lib/libfmha_client.so.1").resolve(), to / "lib/libfmha_client.so.1")  # zip files hold no links
        (to / "lib/libfmha_client.so").unlink()
        slot = work / "client/python/libfmha_slot.so"
        if slot.exists():  # where there was a compiler of C++
            subprocess.run(["strip", "-o", str(to / "lib/libfmha_slot.so"), str(slot)], check=True)
            shutil.copy(work / "client/python/fmha/_slot_abi.py", to.parent)
        bundle(to)


def bundle(to):
    """Copies the libraries that everything here is linked with beside libfmha_client; a HIP runtime is the machine's."""
    objects = [p for p in to.rglob("*") if p.is_file() and p.read_bytes()[:4] == b"\x7fELF"]
    for path in objects:
        for name, found in re.findall(r"(\S+) => (/\S+)", subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout):
            if BUNDLED.match(name) and not (to / "lib" / name).exists():
                shutil.copy(os.path.realpath(found), to / "lib" / name)
                licence(os.path.realpath(found), to / "licenses", name)


def licence(library, to, name):
    """Copies what Debian says of a library's licence, with the texts that it names by their place."""
    owner = subprocess.run(["dpkg", "-S", library], capture_output=True, text=True) if shutil.which("dpkg") else None
    if owner is None or owner.returncode != 0:
        print(f"warning: no package owns {library}: the wheel lacks its licence and is not to be passed on", file=sys.stderr)
        return
    text = pathlib.Path("/usr/share/doc", owner.stdout.split(":")[0], "copyright").read_text()
    to.mkdir(exist_ok=True)
    (to / name).write_text(text)
    for common in set(re.findall(r"/usr/share/common-licenses/[\w.-]*\w", text)):
        shutil.copy(common, to)


class Native(Distribution):
    """Wheels of one platform."""

    def has_ext_modules(self):
        return not BINDINGS


def any_python(bdist_wheel):
    class AnyPython(bdist_wheel):
        """What is native here is no module of Python's: any version takes it."""

        def get_tag(self):
            return "py3", "none", super().get_tag()[2]

    return AnyPython


commands = {"build_py": Build}
try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:
        bdist_wheel = None  # nobody can ask for a wheel
if bdist_wheel is not None:
    commands["bdist_wheel"] = any_python(bdist_wheel)
setup(license="MIT", cmdclass=commands, distclass=Native)
