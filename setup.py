"""Builds csrc/ into hsxfer/libhsxfer.so: a plain C ABI without Python headers, so one wheel serves every Python from 3.10.

HSXFER_SANITIZE=address|undefined|thread builds with that sanitizer; CXX names another compiler.
"""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "hsxfer/__init__.py").read_text(), re.MULTILINE).group(1)
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))

COMPILE = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
LINK = ["-shared", "-pthread", "-ldl", "-Wl,-z,nodelete", "-Wl,-z,defs", "-Wl,--gc-sections", "-Wl,--version-script=csrc/exports.map"]
SANITIZER = os.environ.get("HSXFER_SANITIZE", "")
if SANITIZER not in ("", "address", "undefined", "thread"):
    raise SystemExit(f"HSXFER_SANITIZE={SANITIZER!r} is not address, undefined or thread")
if SANITIZER:
    COMPILE += [f"-fsanitize={SANITIZER}", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-Wno-tsan"]
    LINK = [f"-fsanitize={SANITIZER}", *(flag for flag in LINK if flag != "-Wl,-z,defs")]
else:
    # The C++ runtime comes along and stays hidden: torch brings one of its own.
    COMPILE += ["-ffunction-sections", "-fdata-sections"]
    LINK += ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,-s"]


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        compiler = os.environ.get("CXX", "g++")
        objects = Path(self.build_temp, SANITIZER or "plain")
        objects.mkdir(parents=True, exist_ok=True)
        shared = [__file__, *(ROOT / "csrc").glob("*.h")]

        def compile_one(source):
            target = objects / (Path(source).stem + ".o")
            newest = max(os.path.getmtime(path) for path in [source, *shared])
            if not target.exists() or target.stat().st_mtime < newest:
                subprocess.run([compiler, *COMPILE, "-c", source, "-o", str(target)], check=True)
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = list(pool.map(compile_one, ext.sources))
        library = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(library), exist_ok=True)
        # Under another name first: a process that has the library mapped keeps the old one.
        subprocess.run([compiler, *built, *LINK, "-o", library + ".new"], check=True)
        os.replace(library + ".new", library)


class TagWheel(bdist_wheel):
    """cp310-abi3, and manylinux by the newest glibc symbol that the library needs."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        library = ROOT / "hsxfer/libhsxfer.so"
        for built in Path(self.bdist_dir or "").glob("hsxfer/libhsxfer.so"):
            library = built
        if platform.startswith("linux_") and library.exists() and not SANITIZER:
            needs = re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())
            platform = platform.replace("linux", f"manylinux_2_{max(int(minor) for minor in needs)}", 1)
        return python, abi, platform


setup(
    version=VERSION,
    packages=find_packages(include=["hsxfer", "hsxfer.*"]),
    package_data={"hsxfer": ["py.typed"]},
    ext_modules=[Extension("hsxfer.libhsxfer", SOURCES, py_limited_api=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagWheel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
