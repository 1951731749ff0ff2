"""Stand-in for image files."""

from _cpu_standin import names

__getattr__ = names(__name__)
