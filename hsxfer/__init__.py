"""hsxfer: hidden states out of an LLM inference engine and into a trainer.

Follow a hidden state: `engines.sglang` takes it, `sink` writes it, `arena` holds it, `source` reads it.
"""

from .config import Options
from .errors import (
    ConfigError,
    HandleError,
    HsxferError,
    IntegrityError,
    SampleFailed,
    SampleLost,
    StoreFull,
    TransferTimeout,
    TransportUnavailable,
)
from .handle import Handle, TensorSpec
from .ranks import Rank
from .sample import Sample
from .sink import Sink, open_sink
from .source import Source, open_source
from .ticket import Ticket

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Handle",
    "HandleError",
    "HsxferError",
    "IntegrityError",
    "Options",
    "Rank",
    "Sample",
    "SampleFailed",
    "SampleLost",
    "Sink",
    "Source",
    "StoreFull",
    "TensorSpec",
    "Ticket",
    "TransferTimeout",
    "TransportUnavailable",
    "__version__",
    "open_sink",
    "open_source",
]
