"""Stand-in for image transforms."""

import enum

from _cpu_standin import names

__getattr__ = names(__name__)


class InterpolationMode(enum.Enum):  # real: transformers builds tables from its members at import
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
