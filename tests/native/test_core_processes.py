"""Several processes, some of which are killed: leases are kernel locks, and liveness is one too."""

import os
import signal
import subprocess
import time

import pytest
from native_tools import (
    SEALED,
    Consumer,
    CoreError,
    Producer,
    _native,
    bytes_of,
    probe,
    read_file,
    read_line,
    spawn,
    until,
)

READER = """
r = t.Consumer(sys.argv[1])
leases = [r.lease(key.encode(), timeout_s=5) for key in sys.argv[2:]]
print("leased", *[t.bytes_of(lease)[:4].decode() for lease in leases], flush=True)
for line in sys.stdin:
    if line.strip() == "release":
        for lease in leases:
            r.release(lease)
        print("released", flush=True)
    if line.strip() == "close":
        r.close()
        print("closed", flush=True)
"""


def tell(process, text):
    process.stdin.write(text + "\n")
    process.stdin.flush()
    return read_line(process)


def end(process):
    process.stdin.close()
    process.wait(10)


def test_another_process_reads(arena):
    arena.put(b"k", b"abcdefgh")
    child = spawn(READER, arena.path, "k")
    assert read_line(child) == "leased abcd"
    stats = arena.stats()
    assert (stats["readers_attached"], stats["num_consumed"], stats["num_live"]) == (1, 1, 1)
    assert tell(child, "release") == "released"
    assert arena.stats()["num_live"] == 0
    assert tell(child, "close") == "closed"
    assert arena.stats()["readers_attached"] == 0
    end(child)


def test_a_killed_reader_gives_its_memory_back(path):
    with Producer(path, capacity=1000) as arena:
        arena.put(b"k", b"1234" * 200)
        child = spawn(READER, path, "k")
        assert read_line(child) == "leased 1234"
        with pytest.raises(CoreError, match="800 of 1000"):
            arena.begin(b"next", 900)
        os.kill(child.pid, signal.SIGKILL)
        started = time.monotonic()
        arena.wait_space(5)
        arena.begin(b"next", 900)
        assert time.monotonic() - started < 1
        assert arena.stats()["readers_attached"] == 0
        child.wait()


def test_a_reader_of_this_process_and_one_of_another(arena, reader):
    arena.put(b"k", b"data", consumers=2)
    child = spawn(READER, arena.path, "k")
    assert read_line(child) == "leased data"
    mine = reader.lease(b"k")
    assert tell(child, "release") == "released"
    assert arena.stats()["num_live"] == 1
    assert bytes_of(mine) == b"data"
    reader.release(mine)
    assert arena.stats()["num_live"] == 0
    end(child)


def test_two_readers_of_one_process(arena, reader):
    """The second one's closing must not drop the first one's locks: the kernel would, at any close of the file."""
    arena.put(b"k", b"data")
    lease = reader.lease(b"k")
    with Consumer(arena.path):
        pass
    probe(arena.path)
    assert arena.stats()["num_live"] == 1
    reader.release(lease)
    assert arena.stats()["num_live"] == 0


def test_locks_of_a_reader_survive_a_second_one(path):
    """As above with the producer elsewhere, where only the kernel's locks count."""
    child = spawn(
        """
a = t.Producer(sys.argv[1])
a.put(b"k", b"data")
print("ready", flush=True)
for line in sys.stdin:
    print(a.stats()["num_live"], a.stats()["readers_attached"], flush=True)
a.close()
""",
        path,
    )
    assert read_line(child) == "ready"
    with Consumer(path) as reader:
        lease = reader.lease(b"k")
        with Consumer(path) as second:
            assert second.alive() == (True, False)
        assert probe(path)["alive"] == 1
        os.rename(path + ".ack", path + ".moved")
        os.link(path + ".moved", path + ".ack")
        with Consumer(path):
            pass
        assert tell(child, "?") == "1 1"
        reader.release(lease)
        assert tell(child, "?") == "0 1"
    assert tell(child, "?") == "0 0"
    end(child)


def test_the_producer_holds_its_lock_though_others_open_and_probe(arena):
    child = spawn(
        """
r = t.Consumer(sys.argv[1])
for line in sys.stdin:
    print(*r.alive(), t.probe(sys.argv[1])["alive"], flush=True)
""",
        arena.path,
    )
    with Consumer(arena.path):
        assert tell(child, "?") == "True False 1"
    probe(arena.path)
    assert tell(child, "?") == "True False 1"
    end(child)


PRODUCER = """
a = t.Producer(sys.argv[1], capacity=64 << 20)
a.put(b"good", b"good" * 1000)
slot = a.begin(b"open", 1000)
sealed = a.begin(b"sealed", 1000)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_producer(path):
    child = spawn(PRODUCER, path)
    assert read_line(child) == "ready"
    with Consumer(path) as reader:
        assert reader.alive() == (True, False)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert reader.alive() == (False, False)
        started = time.monotonic()
        assert reader.code(b"open", timeout_s=0.2)[0] == _native.TIMEOUT
        assert time.monotonic() - started < 1
        assert reader.take(b"good") == b"good" * 1000
        info = probe(path)
        assert (info["alive"], info["closed"], info["num_open"], info["num_ready"], info["num_unread"]) == (
            0,
            0,
            2,
            1,
            0,
        )


KILLED_ANYWHERE = """
import os, random
rng = random.Random(int(sys.argv[2]))
a = t.Producer(sys.argv[1], capacity=2 << 20, slots=16)
print("ready", flush=True)
i = 0
while True:
    i += 1
    data = (b"%08d" % i) * rng.randrange(1, 30_000)
    while True:
        try:
            slot = a.begin(b"s%d" % i, len(data), consumers=1)
            break
        except t.CoreError as error:
            assert error.code == t._native.FULL
            a.wait_space(5)
    a.copy(slot, data)
    a.seal(slot)
    a.wait()
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_producer_killed_at_any_moment(path, seed):
    """Whatever it was doing: every sample that can be had is whole, and no wait lasts longer than it was asked to."""
    child = spawn(KILLED_ANYWHERE, path, seed)
    assert read_line(child) == "ready"
    with Consumer(path) as reader:
        count, kill_at = 0, time.monotonic() + 0.15 + 0.07 * seed
        killed = False
        while True:
            if not killed and time.monotonic() > kill_at:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                killed = True
            code, lease = reader.code(b"s%d" % (count + 1), timeout_s=0.05)
            if code == _native.TIMEOUT:
                if killed:
                    break
                continue
            count += 1
            data = bytes_of(lease)
            assert data == b"%08d" % count * (len(data) // 8)
            reader.release(lease)
        assert count > 10
        assert reader.alive() == (False, False)
        assert probe(path)["alive"] == 0


def test_a_directory_left_in_mid_change(path):
    """A producer that died between two entries leaves an odd version: readers go through the slot table instead."""
    child = spawn(PRODUCER, path)
    assert read_line(child) == "ready"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    data = read_file(path + ".arena")
    directory = int.from_bytes(data[48:56], "little")
    entries = int.from_bytes(data[56:60], "little")
    with open(path + ".arena", "r+b") as file:
        file.seek(192)
        file.write((7).to_bytes(4, "little"))
        file.seek(directory)
        file.write(bytes(16 * entries))
    with Consumer(path) as reader:
        assert reader.code(b"open")[0] == _native.TIMEOUT
        assert reader.take(b"good") == b"good" * 1000


def test_a_producer_killed_while_it_creates_leaves_nothing_big(path):
    for delay in (0.0, 0.02, 0.05):
        child = spawn(
            "print('go', flush=True); t.Producer(sys.argv[1], capacity=1 << 30); print('made', flush=True); sys.stdin.read()",
            path,
        )
        assert read_line(child) == "go"
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
        made = child.stdout.read()
        child.wait()
        left = os.listdir(os.path.dirname(path))
        if made:
            assert probe(path)["alive"] == 0
            os.unlink(path + ".arena")
            os.unlink(path + ".ack")
        else:
            assert [name for name in left if not name.endswith(".ack")] == []
            for name in left:
                os.unlink(os.path.join(os.path.dirname(path), name))


def test_a_sealed_sample_is_not_there_before_its_copies(path):
    arena = Producer(path, capacity=512 << 20)
    payload = os.urandom(1 << 20) * 200
    slot = arena.begin(b"k", len(payload))
    arena.copy(slot, payload)
    arena.seal(slot)
    state = int.from_bytes(read_file_slot(path), "little")
    with Consumer(path) as reader:
        code, _ = reader.code(b"k")
        if state == SEALED:
            assert code in (_native.TIMEOUT, _native.OK)
        lease = reader.lease(b"k", ack=False, timeout_s=10)
        assert bytes_of(lease) == payload
        reader.release(lease)
        reader.take(b"k")
    arena.close()


def read_file_slot(path):
    with open(path + ".arena", "rb") as file:
        file.seek(4096 + 4)
        return file.read(4)


FORK = """
import os
a = t.Producer(sys.argv[1])
r = t.Consumer(sys.argv[1])
a.put(b"k", b"data", consumers=2)
lease = r.lease(b"k")
slot = a.begin(b"open", 8)
child = os.fork()
if child == 0:
    codes = []
    for call in (
        lambda: a.begin(b"x"),
        lambda: a.copies([t.copy_of(slot, b"12345678")]),
        lambda: a.seal(slot),
        lambda: a.wait(1, 1),
        lambda: a.stats(),
        lambda: a.wait_space(1),
        lambda: a.data(slot),
        lambda: r.lease(b"k"),
        lambda: r.release(lease),
        lambda: r.alive(),
        lambda: a.close(),
        lambda: r.close(),
    ):
        try:
            call()
            codes.append(0)
        except t.CoreError as error:
            codes.append(error.code)
    own = t.Consumer(sys.argv[1])                   # what the child opens itself is its own
    assert own.alive() == (True, False)
    assert own.take(b"k") == b"data"
    own.close()
    with t.Producer(sys.argv[1] + "c") as mine:
        mine.put(b"m", b"mine")
        assert t.probe(sys.argv[1] + "c")["num_ready"] == 1
        with t.Consumer(sys.argv[1] + "c") as c:
            assert c.take(b"m") == b"mine"
    sys.stdout.write(" ".join(map(str, codes)) + "\\n")
    sys.stdout.flush()
    sys.exit(0)                                     # with every destructor
pid, status = os.waitpid(child, 0)
assert status == 0, status
assert t.probe(sys.argv[1])["alive"] == 1
stats = a.stats()
print(stats["num_live"], stats["num_consumed"], t.bytes_of(lease), flush=True)
a.copies([t.copy_of(slot, b"12345678")])
a.seal(slot)
print(r.take(b"open"), flush=True)
r.release(lease)
r.close()
a.close()
"""


def test_forked_children_are_refused_and_harm_nothing(path):
    child = spawn(FORK, path)
    assert read_line(child) == " ".join([str(_native.FORKED)] * 12)
    assert read_line(child) == "2 1 b'data'"
    assert read_line(child) == "b'12345678'"
    assert child.wait(10) == 0
    assert os.listdir(os.path.dirname(path)) == []


FORK_UNDER_LOAD = """
import os, threading
a = t.Producer(sys.argv[1])
stop = False
def work(n):
    r = t.Consumer(sys.argv[1])
    i = 0
    while not stop:
        i += 1
        key = b"%d-%d" % (n, i)
        a.put(key, b"x" * 100)
        r.take(key)
        t.probe(sys.argv[1])
    r.close()
threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
for thread in threads: thread.start()
for _ in range(40):
    child = os.fork()
    if child == 0:
        try:
            a.stats()
        except t.CoreError as error:
            assert error.code == t._native.FORKED
        with t.Consumer(sys.argv[1]) as r:
            assert r.alive() == (True, False)
        os._exit(0)
    pid, status = os.waitpid(child, 0)
    assert status == 0, status
stop = True
for thread in threads: thread.join()
a.close()
print("done", flush=True)
"""


def test_forks_under_load_do_not_hang(path):
    child = spawn(FORK_UNDER_LOAD, path)
    assert read_line(child) == "done"
    assert child.wait(10) == 0


def test_a_forked_helper_does_not_keep_its_producer_alive(path):
    """What open-file-description locks would do."""
    child = spawn(
        """
import os
a = t.Producer(sys.argv[1])
helper = os.fork()
if helper == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
""",
        path,
    )
    assert read_line(child) == "ready"
    assert probe(path)["alive"] == 1
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert probe(path)["alive"] == 0
    child.stdin.close()


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0, reason="no namespaces here"
)
def test_a_reader_killed_in_another_pid_namespace(arena):
    arena.put(b"k", b"data")
    child = spawn(READER, arena.path, "k", prefix=NAMESPACE)
    assert read_line(child) == "leased data"
    stats = arena.stats()
    assert (stats["num_live"], stats["readers_attached"]) == (1, 1)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    until(lambda: arena.stats()["num_live"] == 0)
    assert arena.stats()["readers_attached"] == 0


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0, reason="no namespaces here"
)
def test_a_producer_killed_in_another_pid_namespace(path):
    child = spawn(PRODUCER, path, prefix=NAMESPACE)
    assert read_line(child) == "ready"
    with Consumer(path) as reader:
        assert reader.alive() == (True, False)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        until(lambda: reader.alive() == (False, False))
        assert reader.take(b"good") == b"good" * 1000


def test_waiting_costs_no_processor_time(arena):
    child = spawn(
        """
import time
r = t.Consumer(sys.argv[1])
print("waiting", flush=True)
before = time.process_time()
print(r.take(b"late", timeout_s=10), time.process_time() - before < 0.1, flush=True)
""",
        arena.path,
    )
    assert read_line(child) == "waiting"
    time.sleep(0.5)
    arena.put(b"late", b"1")
    assert read_line(child) == "b'1' True"
    end(child)
