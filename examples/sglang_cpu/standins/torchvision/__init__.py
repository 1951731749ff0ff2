"""Stand-in for torchvision: PyPI's is a CUDA build, and its import fails beside a CPU build of torch."""

from _cpu_standin import names

__getattr__ = names(__name__)
__version__ = "0.28.0"  # transformers compares it
