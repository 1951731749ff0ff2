"""Stand-in for image transforms, second form, functional."""

from _cpu_standin import names

__getattr__ = names(__name__)
