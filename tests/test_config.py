"""Store URLs."""

import pytest

from hsxfer import ConfigError, open_sink, open_source
from hsxfer.config import Options, parse_size, parse_url

SCHEMES = ("shm", "file")


def options(query: str) -> Options:
    return parse_url(f"shm://spec-train?{query}", SCHEMES).options


def test_a_name_alone_gives_the_defaults() -> None:
    url = parse_url("shm://spec-train", SCHEMES)
    assert (url.scheme, url.name, url.options, str(url)) == ("shm", "spec-train", Options(), "shm://spec-train")


def test_every_option() -> None:
    query = "capacity=8GiB&on_full=drop&block_s=1.5&unread_ttl_s=60&digest=off&slots=9&dir=%2Fmnt%2Fhuge+pages"
    assert options(query) == Options(8 << 30, "drop", 1.5, 60.0, False, 9, "/mnt/huge pages")


def test_the_identity_of_a_store_has_no_options() -> None:
    assert str(parse_url("shm://a.b_C-1?capacity=1MB", SCHEMES)) == "shm://a.b_C-1"


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1kib", 1024), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("2 TiB", 2 << 40), ("3B", 3)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "many", "-1", "0", "0.1", "1XiB", "8 GiB of it", "1e9", "nan", "9" * 400, "99999999TiB", "٣MiB"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("shm:///", "NAME"),
        ("shm://", "NAME"),
        ("shm://a/b", "NAME"),
        ("shm://../a", "NAME"),
        ("shm://..", "NAME"),
        ("shm://user@a", "NAME"),
        ("shm://a:80", "NAME"),
        ("shm://a#b", "NAME"),
        ("shm://" + "n" * 65, "NAME"),
        ("shm://n\u00e4me", "NAME"),
        ("shm://[a", "not a store URL"),
        ("spec-train", "scheme ''"),
        ("", "scheme ''"),
        ("smh://a", "did you mean 'shm'"),
        ("shm://a?capcity=1GiB", "did you mean 'capacity'"),
        ("shm://a?zzz=1", "unknown option 'zzz'"),
        ("shm://a?capacity=1GiB&capacity=2GiB", "twice"),
        ("shm://a?capacity", "not a store URL"),
        ("shm://a?capacity=", "capacity"),
        ("shm://a?on_full=blok", "did you mean 'block'"),
        ("shm://a?block_s=soon", "block_s"),
        ("shm://a?block_s=nan", "block_s"),
        ("shm://a?block_s=-1", "block_s"),
        ("shm://a?unread_ttl_s=inf", "unread_ttl_s"),
        ("shm://a?digest=maybe", "digest"),
        ("shm://a?slots=1.5", "slots"),
        ("shm://a?slots=-1", "slots"),
        ("shm://a?slots=99999999999", "slots"),
        ("shm://a?dir=", "dir"),
        ("shm://a?dir=here", "dir"),
    ],
)
def test_what_is_wrong_is_named(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match="^.*" + named.replace("(", r"\(")):
        parse_url(url, SCHEMES)
    for opening in (open_sink, open_source):
        with pytest.raises(ConfigError):
            opening(url)


@pytest.mark.parametrize("url", [None, 7, b"shm://a", ["shm://a"]])
def test_a_url_is_a_string(url: object) -> None:
    with pytest.raises(ConfigError, match="string"):
        parse_url(url, SCHEMES)  # type: ignore[arg-type]
