"""Builds csrc/ into hsxfer/libhsxfer.so: a plain C ABI without Python headers, so one wheel serves every Python from 3.10.

HSXFER_SANITIZE=thread (or address, undefined, both with a comma) builds with sanitizers; CXX names another compiler. Where nvcc is
found (NVCC names it, NVCC=none does without), csrc/kernels are compiled and embedded; else the library works, and says what it lacks.
"""

import os
import re
import shutil
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
LINK = [
    "-shared",
    "-pthread",
    "-ldl",
    "-Wl,-z,nodelete",
    "-Wl,-z,defs",
    "-Wl,--gc-sections",
    "-Wl,--version-script=csrc/exports.map",
]
SANITIZER = os.environ.get("HSXFER_SANITIZE", "")
if SANITIZER not in ("", "address", "undefined", "address,undefined", "thread"):
    raise SystemExit(f"HSXFER_SANITIZE={SANITIZER!r} is not address, undefined, address,undefined or thread")
if SANITIZER:
    COMPILE += [
        f"-fsanitize={SANITIZER}",
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-fno-sanitize-recover=all",
        "-Wno-tsan",
    ]
    LINK = [f"-fsanitize={SANITIZER}", *(flag for flag in LINK if flag != "-Wl,-z,defs")]
else:
    # The C++ runtime comes along and stays hidden: torch brings one of its own.
    COMPILE += ["-ffunction-sections", "-fdata-sections"]
    LINK += ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,-s"]


# What is sold now, each with its own code; the PTX is for what comes.
GPUS = ["80", "90", "100"]
EMBED = """.section .rodata
.balign 64
.globl hsx_fatbin, hsx_fatbin_bytes
.hidden hsx_fatbin, hsx_fatbin_bytes
hsx_fatbin:
{content}
0:
.balign 8
hsx_fatbin_bytes:
.quad 0b - hsx_fatbin
.section .note.GNU-stack,"",@progbits
"""


def find_nvcc():
    wanted = os.environ.get("NVCC", "")
    if wanted == "none":
        return None
    return shutil.which(wanted or "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def build_fatbin(nvcc, target):
    """csrc/kernels for every GPU of the list that this nvcc knows, or None."""
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    gpus = [gpu for gpu in GPUS if f"sm_{gpu}\n" in known + "\n"]
    if not gpus:
        return None
    codes = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in gpus]
    codes.append(f"-gencode=arch=compute_{gpus[-1]},code=compute_{gpus[-1]}")
    codes.append(f"-gencode=arch=compute_{gpus[0]},code=compute_{gpus[0]}")
    source = ROOT / "csrc/kernels/kernels.cu"
    subprocess.run([nvcc, "-std=c++17", "-O3", "-fatbin", *codes, str(source), "-o", str(target)], check=True)
    return target


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        compiler = os.environ.get("CXX", "g++")
        objects = Path(self.build_temp, SANITIZER or "plain")
        objects.mkdir(parents=True, exist_ok=True)
        shared = [__file__, *(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc/kernels").glob("*.h")]

        def compile_one(source):
            target = objects / (Path(source).stem + ".o")
            newest = max(os.path.getmtime(path) for path in [source, *shared])
            if not target.exists() or target.stat().st_mtime < newest:
                fresh = target.with_suffix(f".{os.getpid()}.o")  # two builds may run at once
                subprocess.run([compiler, *COMPILE, "-c", source, "-o", str(fresh)], check=True)
                fresh.replace(target)
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = list(pool.map(compile_one, ext.sources))
        built.append(self.embed_kernels(compiler, objects))
        library = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(library), exist_ok=True)
        # Under another name first: a process that has the library mapped keeps the old one.
        fresh = f"{library}.{os.getpid()}"
        subprocess.run([compiler, *built, *LINK, "-o", fresh], check=True)
        os.replace(fresh, library)

    def embed_kernels(self, compiler, objects):
        nvcc, fatbin = find_nvcc(), objects / "kernels.fatbin"
        sources = [*(ROOT / "csrc/kernels").glob("*"), Path(__file__)]
        if nvcc is None:
            fatbin.unlink(missing_ok=True)
        elif not fatbin.exists() or fatbin.stat().st_mtime < max(path.stat().st_mtime for path in sources):
            build_fatbin(nvcc, fatbin)
        content = f'.incbin "{fatbin.resolve()}"' if fatbin.exists() else ""
        assembly = objects / "fatbin.s"
        assembly.write_text(EMBED.format(content=content))
        subprocess.run([compiler, "-c", str(assembly), "-o", str(objects / "fatbin.o")], check=True)
        return str(objects / "fatbin.o")


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
