"""Typed errors survive what is done to errors: they travel between processes and are caught by what they are."""

import copy
import pickle

import pytest

import hsxfer

ERRORS = [
    hsxfer.ConfigError("option 'x'"),
    hsxfer.HandleError("rows"),
    hsxfer.StoreFull("no room", 100, 20, 64),
    hsxfer.SampleFailed("sample 'a' failed: gap", "gap", {"hidden_states": [(64, 128)]}),
    hsxfer.SampleLost("sample 'a' is gone: expired", "expired"),
    hsxfer.IntegrityError("row 3"),
    hsxfer.TransferTimeout("30 s"),
    hsxfer.TransportUnavailable("no shm"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_travels_whole(error: hsxfer.HsxferError, again: object) -> None:
    other = again(error)  # type: ignore[operator]
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_every_error_is_an_hsxfer_error_and_what_python_calls_it() -> None:
    public = {kind for kind in vars(hsxfer.errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {type(error) for error in ERRORS} == public - {hsxfer.HsxferError}
    assert all(issubclass(kind, hsxfer.HsxferError) for kind in public)
    assert issubclass(hsxfer.TransferTimeout, TimeoutError)
    assert issubclass(hsxfer.ConfigError, ValueError)
    assert issubclass(hsxfer.HandleError, ValueError)
