"""Stand-in for image transforms, functional form."""

from _cpu_standin import names

__getattr__ = names(__name__)
