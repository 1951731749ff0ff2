"""Stand-in for sglang's GPU kernels, which have no CPU build on PyPI."""

from _cpu_standin import names

__getattr__ = names(__name__)
