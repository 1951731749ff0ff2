"""The files' bytes, at the offsets that docs/format.md gives."""

import struct
import subprocess

import pytest
from native_tools import OPEN, READY, RETIRED, Consumer, Producer, copy_of, read_file


def field(data, offset, kind):
    return struct.unpack_from("<" + kind, data, offset)[0]


def fnv1a(key):
    value = 0xCBF29CE484222325
    for byte in key:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def test_arena_header(path):
    with Producer(path, capacity=10_000_000, ttl_s=12.5, slots=100):
        data = read_file(path + ".arena")
        assert data[:8] == b"HSXARENA"
        assert (field(data, 8, "I"), field(data, 12, "I")) == (0, 4096)
        assert field(data, 16, "Q") == len(data)
        assert field(data, 24, "Q") == 10_000_000
        slots, num_slots, slot_bytes = field(data, 32, "Q"), field(data, 40, "I"), field(data, 44, "I")
        directory, entries, entry_bytes = field(data, 48, "Q"), field(data, 56, "I"), field(data, 60, "I")
        region, region_bytes = field(data, 64, "Q"), field(data, 72, "Q")
        assert (num_slots, slot_bytes, entries, entry_bytes) == (100, 64, 256, 16)
        assert slots >= 4096
        assert slots + 64 * 100 <= directory
        assert directory + 16 * 256 <= region
        assert region % 4096 == 0
        assert region + region_bytes == len(data)
        assert 10_000_000 * 33 / 32 + 2**20 <= region_bytes < 10_000_000 * 33 / 32 + 2**20 + 4096
        assert 1.7e15 < field(data, 80, "Q") < 4e15
        assert field(data, 88, "Q") == 12_500_000
        assert not any(data[96:4096])
        stat = subprocess.run(["stat", "-c", "%a", path + ".arena", path + ".ack"], capture_output=True, text=True)
        assert stat.stdout.split() == ["600", "600"]
        ack = read_file(path + ".ack")
        assert ack[:8] == b"HSXACK00"
        assert (field(ack, 8, "I"), field(ack, 12, "I")) == (0, 100)
        assert len(ack) == 8192
        assert not any(ack[16:])


def test_a_sample(path):
    key, head, tail, payload = b"req-7-1", b'{"h":1}', b'{"t":2}', bytes(range(200)) * 3
    with Producer(path, slots=100) as producer, Consumer(path) as consumer:
        slot = producer.begin(key, 600, head, payload=590, tail_capacity=100, consumers=3)
        data = read_file(path + ".arena")
        at = field(data, 32, "Q") + 64 * slot.index
        assert (field(data, at, "I"), field(data, at + 4, "I")) == (0x31585348, OPEN)
        assert field(data, at + 8, "Q") == slot.generation == 1
        assert field(data, 128, "I") == 1, "the publish counter"
        producer.copies([copy_of(slot, payload)])
        producer.seal(slot, tail)
        producer.wait()
        data = read_file(path + ".arena")
        assert data[at : at + 4] == b"HSX1"
        assert field(data, at + 4, "I") == READY
        assert field(data, at + 16, "Q") == 1
        extent, extent_bytes = field(data, at + 24, "Q"), field(data, at + 32, "Q")
        assert extent % 256 == extent_bytes % 256 == 0
        assert field(data, at + 40, "Q") == fnv1a(key)
        assert (field(data, at + 48, "H"), field(data, at + 50, "H")) == (len(key), 3)
        assert (field(data, at + 52, "I"), field(data, at + 56, "I")) == (len(head), len(tail))
        assert data[at + 60 : at + 64] == bytes(4)
        base = field(data, 64, "Q") + extent
        tail_at, tail_capacity, data_at, data_bytes = struct.unpack_from("<IIQQ", data, base)
        assert (tail_capacity, data_bytes, data_at % 256) == (100, 600, 0)
        assert field(data, base + 40, "Q") == 590
        assert not any(data[base + 24 : base + 40])
        assert not any(data[base + 48 : base + 64])
        assert data[base + 64 :][: len(key) + len(head)] == key + head
        assert data[base + tail_at :][: len(tail)] == tail
        assert data[base + data_at :][:600] == payload
        assert (field(data, 128, "I"), field(data, 132, "I"), field(data, 136, "Q")) == (3, 0, 1)
        entry = field(data, 48, "Q") + 16 * (fnv1a(key) % 256)
        assert struct.unpack_from("<QII", data, entry) == (fnv1a(key), slot.index + 1, 0)
        assert field(data, 192, "I") == 2
        assert field(read_file(path + ".ack"), 4096 + 8 * slot.index, "Q") == slot.generation << 32
        for count in (1, 2, 3):
            lease = consumer.lease(key)
            assert field(read_file(path + ".ack"), 4096 + 8 * slot.index, "Q") == slot.generation << 32 | count
            consumer.release(lease)
            assert field(read_file(path + ".ack"), 64, "I") >= count
        producer.stats()
        data = read_file(path + ".arena")
        assert (field(data, at + 4, "I"), field(data, at + 60, "H")) == (RETIRED, 1)


@pytest.mark.parametrize(("capacity", "slots"), [(1, 1024), (1 << 26, 1024), (1 << 27, 2048)])
def test_default_slots(path, capacity, slots):
    with Producer(path, capacity=capacity) as producer:
        assert producer.stats()["num_slots"] == slots
