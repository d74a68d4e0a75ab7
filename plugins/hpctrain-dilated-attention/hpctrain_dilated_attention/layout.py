"""The places that a rank's attention reads and writes, and the keys and values that it needs of other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain_dilated_attention.pattern import Pattern, Place, Span, spans

Places = tuple[Tensor, Tensor]
"""Heads and tokens, which index dims 1 and 2 of `(batch, heads, seq, head_size)` together."""


@dataclass(frozen=True)
class Work:
    """A span, and its places in this rank's tensors, which broadcast to `(heads, segments, tokens)`.

    others: for each range of the span's tokens that other ranks have, the range and the places of these keys, `(heads, 1,
    tokens)`, among those that this rank receives.
    """

    span: Span
    here: Places
    others: list[tuple[tuple[int, int], Tensor]]


@dataclass(frozen=True)
class Traffic:
    """Selected keys and values that a rank receives and sends.

    received, sent: how many, of and to each rank. places: of those that are sent, in the order of the ranks that get them.
    pieces: lengths of the pieces of `places` in which none is named twice.
    """

    received: list[int]
    sent: list[int]
    places: Places
    pieces: list[int]


@dataclass(frozen=True)
class Layout:
    """The work of one rank for sequences of one length. traffic: None where no rank needs another's keys."""

    works: list[Work]
    traffic: Traffic | None


def layout(pattern: Pattern, places: list[Place], rank: int, device: torch.device) -> Layout:
    """The layout of `rank`. places: of all ranks, which have equally many tokens, one after the other."""
    mine = places[rank]
    asked = _requests(pattern, mine)
    owners = asked.tokens // (mine.end - mine.begin)
    arriving = np.empty_like(owners)
    arriving[np.argsort(owners, kind="stable")] = np.arange(len(owners))
    works, begin = [], 0
    for span in spans(pattern, mine):
        others = []
        for first, last in span.others(pattern.causal):
            end = begin + len(span.heads) * (last - first)
            where = arriving[begin:end].reshape(len(span.heads), 1, last - first)
            others.append(((first, last), torch.tensor(where, device=device)))
            begin = end
        heads = torch.tensor(span.heads, device=device)[:, None, None]
        tokens = torch.tensor(_tokens(span, span.begin, span.end) - mine.begin, device=device)
        works.append(Work(span, (heads, tokens), others))
    cuts = [place.begin for place in places[1:]]
    if not any(cut % length for cut in cuts for length in pattern.segment_lengths):
        return Layout(works, None)
    received = np.bincount(owners, minlength=len(places)).tolist()
    return Layout(works, _traffic(pattern, places, rank, received, device))


def _traffic(pattern: Pattern, places: list[Place], rank: int, received: list[int], device: torch.device) -> Traffic:
    mine, sent, pieces = places[rank], [], []
    wanted: list[_Requests] = []
    for place in places:
        asked = _requests(pattern, place)  # none of a rank's own
        owned = (asked.tokens >= mine.begin) & (asked.tokens < mine.end)
        wanted.append(_Requests(*(one[owned] for one in asked)))
        sent.append(int(owned.sum()))
        pieces += [count for count in np.bincount(wanted[-1].groups).tolist() if count]
    heads, tokens = (np.concatenate([getattr(one, name) for one in wanted]) for name in ("heads", "tokens"))
    at = (torch.tensor(heads, device=device), torch.tensor(tokens - mine.begin, device=device))
    return Traffic(received, sent, at, pieces)


class _Requests(NamedTuple):
    """Keys of other ranks that one needs, in the order of its spans: group, head and token of each."""

    groups: NDArray[np.int64]
    heads: NDArray[np.int64]
    tokens: NDArray[np.int64]


def _requests(pattern: Pattern, place: Place) -> _Requests:
    parts = [np.empty((3, 0), np.int64)]
    for span in spans(pattern, place):
        for first, last in span.others(pattern.causal):
            tokens = _tokens(span, first, last)
            heads = np.broadcast_to(np.array(span.heads)[:, None, None], tokens.shape)
            parts.append(np.stack([np.full(tokens.size, span.group), heads.ravel(), tokens.ravel()]))
    return _Requests(*np.concatenate(parts, axis=1))


def _tokens(span: Span, begin: int, end: int) -> NDArray[np.int64]:
    """The selected tokens `begin` to `end` of a span's segments, in the whole sequence: `(heads, segments, tokens)`."""
    phases, starts = np.array(span.phases)[:, None, None], np.array(span.starts)[None, :, None]
    tokens: NDArray[np.int64] = starts + phases + span.rate * np.arange(begin, end)[None, None, :]
    return tokens
