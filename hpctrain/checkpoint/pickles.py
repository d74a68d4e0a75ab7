"""Checks a pickle before an unpickler reads it, by walking through its operations once.

An unpickler trusts every number, so a few bytes can ask for a memo of 2^32 places. It also hashes every key. Hashing a
tuple that holds another twice, which holds another twice, and so on, never ends; hashing one nested a million deep
overflows the C stack. Neither can be interrupted, so such pickles are refused.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile

from hpctrain.base.errors import CheckpointError

_MOST_IN_A_TUPLE = 1000
"""Objects in a tuple and the tuples within it, each counted as often as it occurs."""
_MOST_AT_A_TIME = 2**20
"""Objects on the unpickler's stack at a time."""
_LONGEST_NUMBER = 40
"""Characters or bytes of an integer."""

_FIXED, _COUNTED, _LINE, _GET, _PUT, _TAKE, _TUPLE, _CALL, _MARK, _TO_MARK, _MEMOIZE, _OTHER, _NO = range(13)
_OPCODES = {one.code.encode("latin-1")[0]: one for one in pickletools.opcodes}
_GETS = {pickle.GET[0]: 0, pickle.BINGET[0]: 1, pickle.LONG_BINGET[0]: 4}
_PUTS = {pickle.PUT[0]: 0, pickle.BINPUT[0]: 1, pickle.LONG_BINPUT[0]: 4}
_TAKES = {pickle.APPEND[0]: 1, pickle.SETITEM[0]: 2, pickle.BUILD[0]: 1, pickle.BINPERSID[0]: 0}
_TUPLES = {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
_CALLS = {pickle.REDUCE[0]: 2, pickle.NEWOBJ[0]: 2, pickle.NEWOBJ_EX[0]: 3, pickle.STACK_GLOBAL[0]: 2}
_TO_MARKS = {pickle.APPENDS[0]: 0, pickle.SETITEMS[0]: 0, pickle.POP_MARK[0]: 0, pickle.LIST[0]: 1, pickle.DICT[0]: 1}
_OTHERS = b"".join((pickle.TUPLE, pickle.DUP, pickle.STOP, pickle.PROTO, pickle.FRAME))
_REFUSED = b"0\x8f\x90\x91ioP\x82\x83\x84\x97\x98"
"""POP, sets, instances, extensions and out-of-band buffers: tables and tensor files have none of these."""
_NUMBERS = b"".join((pickle.INT, pickle.LONG, pickle.LONG1, pickle.LONG4, pickle.FLOAT))
_MAKING = b"".join((pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.BYTEARRAY8))
_BY_KIND = {_GET: _GETS, _PUT: _PUTS, _TAKE: _TAKES, _TUPLE: _TUPLES, _CALL: _CALLS, _TO_MARK: _TO_MARKS}


def _kind(code: int) -> tuple[int, int]:
    """How the walk treats an operation, and a number that belongs to it."""
    for kind, codes in _BY_KIND.items():
        if code in codes:
            return kind, codes[code]
    if code in _REFUSED or code not in _OPCODES:
        return _NO, 0
    if code in pickle.MARK + pickle.MEMOIZE:
        return (_MARK if code == pickle.MARK[0] else _MEMOIZE), 0
    if code in _OTHERS:
        return _OTHER, 0
    argument = _OPCODES[code].arg
    size = argument.n if argument else 0
    if size >= 0:
        return _FIXED, size
    return (
        (_LINE, 2 if code == pickle.GLOBAL[0] else 1) if size == -1 else (_COUNTED, {-2: 1, -3: 4, -4: 4, -5: 8}[size])
    )


_TAKING = (_TAKE, _TUPLE, _CALL)
_KINDS = [_kind(code) for code in range(256)]


def check_pickle(raw: bytes, at: int = 0) -> int:
    """The end of the pickle that begins at byte `at`; CheckpointError if it asks for more than its length can justify."""
    try:
        return _walk(raw, at)
    except (IndexError, ValueError) as error:
        raise CheckpointError(f"malformed content: it is no whole pickle: {error}") from error


def _walk(raw: bytes, at: int) -> int:
    """Tracks a weight for each object on the stack and in the memo: 1, or the number of objects in a tuple."""
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    made, most_made = 0, 2**20 + len(raw) // 8
    kinds = _KINDS
    while True:
        code = raw[at]
        at += 1
        kind, number = kinds[code]
        if kind in _TAKING and len(stack) - number < (marks[-1] if marks else 0):
            raise ValueError(f"byte {at - 1} takes what lies before a mark")
        if kind == _FIXED:
            stack.append(1)
            at += number
            made += code in _MAKING
        elif kind == _MEMOIZE:
            memo[len(memo)] = stack[-1]
            continue
        elif kind == _OTHER:
            if code == pickle.TUPLE[0]:
                begin = marks.pop()
                weight = 1 + sum(stack[begin:])
                del stack[begin:]
                stack.append(_checked(weight, at))
                made += 1
            elif code == pickle.STOP[0]:
                stack.pop()
                return at
            elif code == pickle.DUP[0]:
                stack.append(stack[-1])
            else:
                at += 1 if code == pickle.PROTO[0] else 8
        elif kind == _GET:
            place, at = _place(raw, at, number)
            stack.append(memo[place] if place in memo else _no_place(place))
        elif kind == _COUNTED:
            asked = int.from_bytes(raw[at : at + number], "little")
            if asked > len(raw) or (asked > _LONGEST_NUMBER and code in _NUMBERS):
                raise CheckpointError(
                    f"it asks for room for {asked} things or bytes at byte {at}, and has {len(raw)} bytes"
                )
            at += number + asked
            stack.append(1)
        elif kind == _MARK:
            marks.append(len(stack))
        elif kind == _TO_MARK:
            del stack[marks.pop() :]
            stack.extend([1] * number)
            made += number
        elif kind == _CALL:
            weight = stack[-1]
            del stack[-number:]
            stack.append(weight)
            made += 1
        elif kind == _TUPLE:
            weight = 1 + sum(stack[-number:])
            del stack[-number:]
            stack.append(_checked(weight, at))
            made += 1
        elif kind == _TAKE:
            if number:
                del stack[-number:]
            else:
                stack[-1] = 1
        elif kind == _PUT:
            place, at = _place(raw, at, number)
            if place > len(raw):
                raise CheckpointError(
                    f"it asks for room for {place} things or bytes at byte {at}, and has {len(raw)} bytes"
                )
            memo[place] = stack[-1]
        elif kind == _LINE:
            begin = at
            for _ in range(number):
                at = raw.index(b"\n", at) + 1
            if at - begin > _LONGEST_NUMBER and code in _NUMBERS:
                raise CheckpointError(f"it has a number of {at - begin} digits at byte {begin}")
            stack.append(1)
        else:
            raise CheckpointError(f"malformed content: it is no whole pickle: byte {at - 1} is no operation of a table")
        if len(stack) > _MOST_AT_A_TIME or len(marks) > _MOST_AT_A_TIME or made > most_made:
            raise CheckpointError(f"it makes too many things at once at byte {at}: it is crafted")


def _place(raw: bytes, at: int, nbytes: int) -> tuple[int, int]:
    """A place in the memo, and the end of the operation."""
    if nbytes:
        return int.from_bytes(raw[at : at + nbytes], "little"), at + nbytes
    end = raw.index(b"\n", at, at + _LONGEST_NUMBER)
    return int(raw[at:end]), end + 1


def _no_place(place: int) -> int:
    raise IndexError(f"its memo has no place {place}")


def _checked(weight: int, at: int) -> int:
    if weight > _MOST_IN_A_TUPLE:
        raise CheckpointError(
            f"a tuple holds more than {_MOST_IN_A_TUPLE} things at byte {at}, some of them twice or deep within it"
        )
    return weight


def check_records(records: zipfile.ZipFile, nbytes: int) -> None:
    """CheckpointError for a zip of `nbytes` bytes that torch.save wouldn't write, or whose pickles `check_pickle` refuses."""
    listed = records.infolist()
    packed = next((one for one in listed if one.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:  # a few bytes may unpack to any size
        raise CheckpointError(
            f"its records are compressed ({packed.filename}), expected uncompressed ones, as torch.save writes"
        )
    held = sum(one.file_size for one in listed)
    if held > nbytes:
        raise CheckpointError(
            f"its {len(listed)} records hold {held} bytes, more than the {nbytes} there are: it is crafted"
        )
    for one in listed:
        if one.filename.endswith("data.pkl"):
            check_pickle(records.read(one))
