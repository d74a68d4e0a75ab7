"""Writes a checkpoint: the ranks agree on a plan and write their shards and tables, then rank 0 writes the manifest."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from hpctrain.api import Outcome, Piece, State, agree, attempt, gather_outcomes, scatter_outcomes, sync_directory
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.files import Output, created, write_file
from hpctrain.toolkit.checkpoint.rectangles import Dims, Rectangle
from hpctrain.toolkit.checkpoint.sealed import checksum_of
from hpctrain.toolkit.checkpoint.snapshot import collector_waits

from . import dtypes, index, manifest, table
from .manifest import Manifest, SavedTensor, Shard, ShardMap, ShardPart
from .plan import OfferedPiece, SavePlan, describe, make_plan, pack
from .template import Template, make_template

LOG = logging.getLogger("hpctrain")


@dataclass(frozen=True)
class Summary:
    """The constant parts of all saves of a plan: the tensors in the manifest, and the bytes of index.h5, if there is one."""

    tensors: dict[str, SavedTensor]
    index: bytes | None


@dataclass
class Agreement:
    """A rank's view of a plan, kept until the shape of any rank's pieces changes. Only rank 0 has `plan`, until it is
    summarized."""

    group: dist.ProcessGroup
    offers: list[OfferedPiece]
    mine: list[int]
    plan: SavePlan | None
    template: Template | None = None
    views: Views = field(default_factory=lambda: Views())

    @cached_property
    def summary(self) -> Summary:
        """The summary, on rank 0. Frees the plan: with many ranks it takes gigabytes."""
        assert self.plan is not None
        with collector_waits():
            shards = [shard_name(rank) for rank in range(self.group.size())]
            summary = Summary(entries(self.plan), index.make_index(self.plan, shards))
        self.plan = None
        return summary


class Views:
    """The bytes of pieces. A snapshot reuses the memory of its pieces, so that memory is looked up once."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._known: dict[int, memoryview] = {}

    def of(self, pieces: list[Piece], index: int) -> memoryview:
        """The current bytes of one of `pieces`."""
        if pieces is not self._pieces:
            self._pieces, self._known = pieces, {}
        known = self._known.get(index)
        if known is not None:
            return known
        plain = host_tensor(pieces[index].tensor)
        view = plain.reshape(-1).view(torch.uint8).numpy().data
        if plain.data_ptr() == pieces[index].tensor.data_ptr():
            self._known[index] = view
        return view


class HDF5Writer:
    """Writes checkpoints. Keeps the plan and the layout of this rank's file between them."""

    def __init__(self) -> None:
        self._agreement: Agreement | None = None
        self._described: tuple[list[Piece], list[OfferedPiece]] = ([], [])

    def write(self, state: State, directory: Path, group: dist.ProcessGroup) -> None:
        """Collective over `group`; an error on any rank is raised on all."""
        agreement = self._agree(state, group)
        tables = gather_outcomes(attempt(lambda: _write_shard(agreement, state.pieces, directory)), group)
        if isinstance(tables, Exception):
            agree(tables, group)
        elif group.rank() != 0:
            agree(None, group)
        else:
            agree(attempt(lambda: _finish(agreement.summary, tables, state, directory)), group)

    def _agree(self, state: State, group: dist.ProcessGroup) -> Agreement:
        """The previous plan, or a new plan if anything but values changed on any rank."""
        kept = self._agreement
        offers = attempt(lambda: self._describe(state.pieces))
        changed = torch.tensor(int(kept is None or kept.group is not group or kept.offers != offers))
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=group)
        if kept is not None and not changed.item():
            return kept
        packed = gather_outcomes(attempt(lambda: pack(self._describe(state.pieces))), group)
        plan: Outcome[SavePlan] | None = None
        if group.rank() == 0:
            plan = packed if isinstance(packed, Exception) else attempt(lambda: make_plan(packed))
        indices = [array("Q", one).tobytes() for one in plan.indices] if isinstance(plan, SavePlan) else plan or []
        mine = array("Q", scatter_outcomes(indices, group)).tolist()
        agreed = Agreement(group, self._describe(state.pieces), mine, plan if isinstance(plan, SavePlan) else None)
        self._agreement = agreed
        return agreed

    def _describe(self, pieces: list[Piece]) -> list[OfferedPiece]:
        """The offers of `pieces`. Those of a snapshot are reused."""
        if pieces is not self._described[0]:
            self._described = (pieces, describe(pieces))
        return self._described[1]


def shard_name(rank: int) -> str:
    """The name of the file that `rank` writes."""
    return f"shard-{rank:05d}.h5"


def _write_shard(agreement: Agreement, pieces: list[Piece], directory: Path) -> str | None:
    """Write and fsync this rank's shard and table; return the table's checksum, or None without anything to write."""
    if not agreement.mine:
        return None
    offers = [agreement.offers[index] for index in agreement.mine]
    if agreement.template is None:
        agreement.template = make_template(offers)
    template, rank = agreement.template, agreement.group.rank()
    path = directory / shard_name(rank)
    checksums: list[tuple[str, ...]] = [()] * len(offers)
    with created(path, rank) as fd:
        output = Output(fd)
        for what in template.sequence:
            if isinstance(what, bytes):
                output.add(memoryview(what))
            else:
                content = agreement.views.of(pieces, agreement.mine[what])
                checksums[what] = _write_chunk(output, content, offers[what])
        output.flush()
    places = zip((offer.name for offer in offers), template.positions, checksums, strict=True)
    with collector_waits():
        raw = table.dump(template.size, template.checksum, places)
    write_file(directory / table.table_name(path.name), raw, rank)
    return checksum_of(raw)


def _write_chunk(output: Output, content: memoryview, offer: OfferedPiece) -> tuple[str, ...]:
    """Write a tensor's bytes block by block; return the blocks' checksums."""
    if len(content) <= table.BLOCK_BYTES:
        output.add(content)
        return (xxhash.xxh3_64_hexdigest(content),)
    checksums = []
    for block in table.blocks(offer.part, 0, offer.nbytes // offer.part.volume):
        part = content[block.at : block.at + block.nbytes]
        checksums.append(xxhash.xxh3_64_hexdigest(part))
        output.add(part)
    return tuple(checksums)


def host_tensor(tensor: Tensor) -> Tensor:
    """The values in C order in host memory, without a copy if possible."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _finish(summary: Summary, tables: list[str | None], state: State, directory: Path) -> None:
    """Write the manifest, with the checksums of the ranks' tables, and the index. Rank 0 only."""
    shards = [Shard(shard_name(rank), checksum) for rank, checksum in enumerate(tables) if checksum is not None]
    with collector_waits():
        content = manifest.dump(Manifest(shards, summary.tensors, values.encode(state.values)))
    write_file(directory / manifest.FILE_NAME, content, rank=0)
    if summary.index is not None:
        _write_index(directory / index.FILE_NAME, summary.index)
    sync_directory(directory)


def entries(plan: SavePlan) -> dict[str, SavedTensor]:
    """The plan in the manifest's form. Shards are numbered in rank order, without ranks that write nothing."""
    cuts: dict[str, list[int]] = {name: [] for name in plan.tensors}
    rectangles: dict[int, Rectangle] = {}
    # By identity: many tensors of a plan share one object, and comparing millions of them takes long.
    for file, offers in enumerate(offers for offers in plan.offers if offers):
        for offer in offers:
            cuts[offer.name] += (file, id(offer.part))
            rectangles[id(offer.part)] = offer.part
    layouts: dict[tuple[Dims, tuple[int, ...]], ShardMap] = {}
    found = {}
    for name, (dtype, shape) in plan.tensors.items():
        key = (shape, tuple(cuts.pop(name)))
        if key not in layouts:
            files, parts = key[1][::2], (rectangles[known] for known in key[1][1::2])
            layouts[key] = ShardMap(shape, tuple(map(ShardPart, files, parts)))
        found[name] = SavedTensor(dtypes.by_name(dtype), layouts[key])
    return found


def _write_index(path: Path, content: bytes) -> None:
    """Write index.h5. The checkpoint is complete without it, so a full disk here is only a warning."""
    try:
        write_file(path, content, rank=0)
    except OSError as error:
        LOG.warning("index.h5 could not be written; the checkpoint is complete without it: %s", error)
        path.unlink(missing_ok=True)
