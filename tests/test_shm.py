"""Shared memory passes what every transport passes."""

from stores import new_store
from transport_suite import TransportSuite


class TestShm(TransportSuite):
    new_store = staticmethod(new_store)
