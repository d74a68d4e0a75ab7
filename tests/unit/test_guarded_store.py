"""The guarded store: TCPStore's semantics for those who know the secret, nothing for anybody else."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.store import credentials
from hpctrain.base.store.client import Connection, GuardedStore, open_store
from hpctrain.base.store.credentials import find_secret, make_credential
from hpctrain.base.store.gloo import create_group
from hpctrain.base.store.messages import (
    DIGEST_BYTES,
    GREETING_HEADER,
    MAGIC,
    NONCE_BYTES,
    ProtocolError,
    pack,
    unpack,
)  # fmt: skip
from hpctrain.base.store.network import LOOPBACK, listeners
from hpctrain.base.store.server import StoreServer

SECRET = secrets.token_bytes(32)
TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    one = StoreServer(SECRET, listeners([LOOPBACK]), 4)
    yield one
    one.close()


@pytest.fixture
def told(server: StoreServer) -> list[str]:
    """The server's sentences about strangers."""
    return server.refused


@pytest.fixture
def store(server: StoreServer) -> Iterator[GuardedStore]:
    one = join(server)
    yield one
    one.close()


def join(server: StoreServer, secret: bytes = SECRET, timeout: timedelta = TIMEOUT) -> GuardedStore:
    return open_store(server.addresses, lambda _: secret, 5, timeout)


# ------------------------------------------------------------------ as a store

KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.binary(max_size=20)
REQUESTS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("add"), st.sampled_from(["n", "m"]), st.integers(-5, 5)),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("check"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("compare_set"), KEYS, VALUES.map(bytes.hex), VALUES.map(bytes.hex)),
    st.tuples(st.just("num_keys")),
)


@given(st.lists(REQUESTS, max_size=30))
@settings(max_examples=60, deadline=None)
def test_it_answers_as_torch_s_own_store_in_memory(requests: list[tuple]) -> None:
    server = StoreServer(SECRET, listeners([LOOPBACK]), 1)
    store, reference = join(server), HashStore()
    try:
        for name, *arguments in requests:
            assert getattr(store, name)(*arguments) == getattr(reference, name)(*arguments), (name, arguments)
    finally:
        store.close()
        server.close()


def test_values_of_any_size_and_kind_come_back(store: GuardedStore) -> None:
    big = os.urandom(3 * 2**20 + 1)
    store.multi_set(["big", "text", "empty"], [big, "über", b""])
    assert store.multi_get(["empty", "text", "big"]) == [b"", "über".encode(), big]
    assert PrefixStore("x", store).add("n", 2**40) == 2**40


def test_ranks_wait_for_each_other_s_keys(server: StoreServer, store: GuardedStore) -> None:
    other = join(server)
    threading.Timer(0.3, lambda: other.set("late", "1")).start()
    begin = time.monotonic()
    store.wait(["late"])
    assert store.get("late") == b"1" and time.monotonic() - begin < 5
    with pytest.raises(dist.DistStoreError, match=r"waited 0\.2 s in the store for: never, nor this$"):
        store.wait(["late", "never", "nor this"], timedelta(seconds=0.2))
    other.close()


def test_a_thread_that_waits_does_not_hold_up_the_others(store: GuardedStore) -> None:
    waiting = threading.Thread(target=store.wait, args=(["door"],))
    waiting.start()
    for number in range(50):
        assert store.add("n", 1) == number + 1
    store.set("door", "open")
    waiting.join(5)
    assert not waiting.is_alive()


def test_many_ranks_count_to_the_right_number(server: StoreServer) -> None:
    def count() -> None:
        store = join(server)
        for _ in range(100):
            store.add("n", 1)
        store.close()

    threads = [threading.Thread(target=count) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert join(server).add("n", 0) == 1600


def test_a_store_whose_server_is_gone_says_so_at_once_each_time(server: StoreServer, store: GuardedStore) -> None:
    server.close()
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(
            dist.DistNetworkError, match=r"the store on rank 0 \(127\.0\.0\.1 port \d+\) does not answer"
        ):
            store.set("a", "b")
    assert time.monotonic() - begin < 5


def test_what_the_store_can_t_do_is_told_and_it_goes_on(store: GuardedStore) -> None:
    store.set("text", "a")
    store.add("most", 2**62)
    for key, amount in (("text", 1), ("most", 2**62)):
        with pytest.raises(dist.DistStoreError, match="the store can't do that"):
            store.add(key, amount)
    assert store.get("text") == b"a" and store.add("most", 0) == 2**62
    with pytest.raises(dist.DistStoreError, match="waited 0 s"):
        store.wait(["never"], timedelta(0))
    threading.Timer(0.2, lambda: store.set("late", "1")).start()
    store.wait(["late"], timedelta.max)


def test_a_forked_process_ends(server: StoreServer, store: GuardedStore) -> None:
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            server.close()
            os._exit(7)
        os._exit(1)
    give_up = time.monotonic() + 10
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(found[1]) == 7 and store.add("n", 1) == 1


# ------------------------------------------------------------------ strangers


def test_a_group_of_gloo_names_the_ranks_that_do_not_come(store: GuardedStore) -> None:
    options = SimpleNamespace(
        store=store, group_rank=0, group_size=3, global_ranks_in_group=[4, 5, 6], group_id="odd",
        timeout=timedelta(seconds=0.2),
    )  # fmt: skip
    store.set("1/here/1", "")
    with pytest.raises(
        dist.DistStoreError, match=r"group 'odd' of ranks 4-6 was not complete within 0.2 s: rank 6 did"
    ):
        create_group(options)


def raw(server: StoreServer) -> socket.socket:
    one = socket.create_connection(server.addresses[0], 5)
    one.settimeout(5)
    return one


def is_hung_up(one: socket.socket) -> bool:
    with suppress(ConnectionError):
        while one.recv(4096):
            pass
    return True


TCPSTORE_SET = b"\x00" + b"".join(len(part).to_bytes(8, "little") + part for part in (b"hpctrain/job", b"{}"))
PICKLE = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."


@pytest.mark.parametrize(
    "message",
    [
        os.urandom(64), bytes(64), os.urandom(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64), TCPSTORE_SET + bytes(64),
        PICKLE + bytes(64), b"\xff" * 2**16, MAGIC + bytes(64),
    ],
    ids=["64 random bytes", "64 zeros", "4096 random bytes", "HTTP", "a TCPStore's set", "a pickle", "ones", "no secret"],
)  # fmt: skip
def test_whoever_lacks_the_secret_is_hung_up_on_and_told_of_once(
    server: StoreServer, store: GuardedStore, told: list[str], message: bytes
) -> None:
    store.set("job", "mine")
    for _ in range(3):
        stranger = raw(server)
        stranger.sendall(message)
        assert is_hung_up(stranger)
    assert store.get("job") == b"mine" and store.num_keys() == 1
    assert (
        len(told) == 1
        and "a connection from 127.0.0.1 port" in told[0]
        and "does not know this job's secret" in told[0]
    )


def test_a_wrong_secret_is_refused_on_both_sides(server: StoreServer) -> None:
    with pytest.raises((ProtocolError, ConnectionError)):
        Connection(server.addresses[0], lambda _: bytes(32), 5)


def impostor(answer: Callable[[bytes], bytes], introduction: bytes = b"") -> tuple[socket.socket, threading.Thread]:
    """Greets as a server would, and answers a rank's proof by what `answer` makes of it."""
    (listener,) = listeners([LOOPBACK])

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as rank:
            rank.settimeout(5)
            rank.sendall(GREETING_HEADER.pack(MAGIC, bytes(NONCE_BYTES), len(introduction)) + introduction)
            rank.sendall(answer(rank.recv(NONCE_BYTES + DIGEST_BYTES)))

    thread = threading.Thread(target=serve)
    thread.start()
    return listener, thread


@pytest.mark.parametrize("answer", [lambda proof: proof[-DIGEST_BYTES:], lambda _: bytes(DIGEST_BYTES), lambda _: b""])
def test_a_rank_believes_no_impostor(answer: Callable[[bytes], bytes]) -> None:
    listener, thread = impostor(answer)
    with pytest.raises((ProtocolError, ConnectionError)):
        Connection(listener.getsockname()[:2], lambda _: SECRET, 5)
    listener.close()
    thread.join(5)


def test_a_stranger_who_passes_everything_on_gets_nothing(server: StoreServer, told: list[str]) -> None:
    """It took a port that ranks try before rank 0's."""
    (listener,) = listeners([LOOPBACK])
    seen: list[bytes] = []

    def relay() -> None:
        with suppress(OSError), listener.accept()[0] as rank, socket.create_connection(server.addresses[0]) as there:
            back = threading.Thread(target=copy, args=(there, rank), daemon=True)
            back.start()
            copy(rank, there)

    def copy(source: socket.socket, into: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(65536):
                seen.append(chunk)
                into.sendall(chunk)
            into.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    store = open_store([listener.getsockname()[:2], *server.addresses], lambda _: SECRET, 5, TIMEOUT)
    store.set("job", "secret job")
    listener.close()
    thread.join(5)
    assert store.address == server.addresses[0] and b"secret job" not in b"".join(seen)
    assert len(told) == 1 and "does not know this job's secret" in told[0]


@pytest.mark.thorough
def test_a_flood_of_connections_keeps_nobody_out_and_takes_no_memory(
    server: StoreServer, store: GuardedStore, told: list[str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = []
    for number in range(3000):
        with suppress(OSError):
            one = raw(server)
            one.sendall(b"\xff" * 40)
            held = [*held[-100:], one]
        if number % 500 == 0:
            other = join(server)
            assert other.add("n", 1) == number // 500 + 1 and store.add("m", 1)
            other.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000, f"{grown} KB more"
    assert len(told) == 1


@pytest.mark.thorough
def test_a_flood_at_once_leaves_files_to_the_process(server: StoreServer, store: GuardedStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    flood = "import socket, sys\nheld = []\nfor _ in range(900):\n one = socket.socket(); one.setblocking(False)\n" \
            " one.connect_ex(('127.0.0.1', int(sys.argv[1]))); held.append(one)\ninput()"  # fmt: skip
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    floods = [
        subprocess.Popen([sys.executable, "-c", flood, str(server.addresses[0][1])], stdin=subprocess.PIPE)
        for _ in range(3)
    ]
    try:
        give_up = time.monotonic() + 4
        while time.monotonic() < give_up:
            with open(os.devnull):
                store.add("n", 1)
    finally:
        for one in floods:
            one.communicate(b"\n", timeout=20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.thorough
def test_a_rank_that_has_the_server_s_proof_stays_in_a_flood(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that are still in their handshake make room for newer ones, 16 at a time."""
    monkeypatch.setattr("hpctrain.base.store.server._UNPROVEN", 16)
    server, over = StoreServer(SECRET, listeners([LOOPBACK]), 1), threading.Event()
    (address,) = server.addresses

    def flood() -> None:
        while not over.is_set():
            held = []
            for _ in range(100):
                with suppress(OSError):
                    held.append(socket.create_connection(address, 5))
            for one in held:
                one.close()

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        give_up = time.monotonic() + 5
        while time.monotonic() < give_up:
            store = join(server)
            store.set("a", "b")  # DistNetworkError if the server has hung up
            store.close()
        server.close()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert {record.name for record in caplog.records} <= {"hpctrain"}, "asyncio reported an error"


@pytest.mark.parametrize("drip", [b"", b"x"])
def test_a_server_that_never_comes_to_an_end_is_given_up_in_time(drip: bytes) -> None:
    (listener,) = listeners([LOOPBACK])

    def serve() -> None:
        with suppress(OSError):
            rank = listener.accept()[0]
            rank.sendall(GREETING_HEADER.pack(MAGIC, bytes(NONCE_BYTES), 4000))
            while drip:
                rank.sendall(drip)
                time.sleep(0.1)

    threading.Thread(target=serve, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(OSError):
        Connection(listener.getsockname()[:2], lambda _: SECRET, 1.0)
    assert time.monotonic() - begin < 3
    listener.close()


def test_half_open_connections_give_way(server: StoreServer) -> None:
    held = [raw(server) for _ in range(400)]
    assert join(server).add("n", 1) == 1
    assert sum(is_hung_up(one) for one in held[:100]) == 100
    for one in held:
        one.close()


# ------------------------------------------------------------------ its parts


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_parts_come_back(parts: list[bytes]) -> None:
    assert unpack(pack(parts)) == parts


# ------------------------------------------------------------------ the secret


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(credentials.shutil, "which", lambda _: None)  # a machine without MUNGE
    return tmp_path


def test_a_file_carries_the_secret_to_this_user_only(home: Path) -> None:
    made = make_credential("start 1", None)
    (file,) = (home / ".hpctrain").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert find_secret("start 1", None, made.introduction) == made.secret
    assert find_secret("start 2", None, made.introduction) is None
    made.remove()
    assert not file.exists()


def _open_to_group(file: Path) -> None:
    file.chmod(0o640)


def _link(file: Path) -> None:
    file.rename(file.with_suffix(".real"))
    file.symlink_to(file.with_suffix(".real"))


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _cut(file: Path) -> None:
    file.write_text(file.read_text()[:-1])


def _longer(file: Path) -> None:
    file.write_text(file.read_text() + "0")


@pytest.mark.parametrize("spoil", [_open_to_group, _link, _fifo, _cut, _longer])
def test_a_file_that_others_could_have_made_is_not_believed(home: Path, spoil: Callable[[Path], None]) -> None:
    made = make_credential("start", None)
    (file,) = (home / ".hpctrain").iterdir()
    spoil(file)
    assert find_secret("start", None, made.introduction) is None


def test_no_way_to_recognize_each_other_is_told(home: Path) -> None:
    (home / ".hpctrain").write_text("in the way")
    with pytest.raises(
        EnvironmentUnfitError, match=r"runs no MUNGE, and .* cannot be written .*; expected one of the two"
    ):
        make_credential("start", None)
