"""Writing through torch.distributed.checkpoint.save, with a planner that takes pieces instead of a state dict."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hpctrain.api import CheckpointError, Piece, State, agree, attempt, sync_directory
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.files import naming, write_file
from hpctrain.toolkit.checkpoint.rectangles import Rectangle, tiling_fault
from hpctrain.toolkit.checkpoint.sealed import seal

from . import PREFIX, VALUES_FILE
from .metadata import read_bytes


def write(state: State, directory: Path, group: dist.ProcessGroup) -> None:
    """Collective over `group`; an error on any rank is raised on all."""
    writer = _Writer(directory, group.rank())
    planner = PiecePlanner(state)
    try:
        save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:  # not an Exception: torch derives it from BaseException
        raise _reason(error) from error
    agree(attempt(lambda: _write_values(state, directory)) if group.rank() == 0 else None, group)


def _write_values(state: State, directory: Path) -> None:
    """The small values beside DCP's files, with the checksum that `.metadata` lacks."""
    checksum = xxhash.xxh3_64_hexdigest(read_bytes(directory))
    content = seal({"metadata_xxh3": checksum, "values": values.encode(state.values)})
    write_file(directory / VALUES_FILE, content, rank=0)
    sync_directory(directory)


def _reason(error: CheckpointException) -> Exception:
    """The error of the lowest failing rank."""
    rank = min(error.failures)
    found = error.failures[rank][0]
    if isinstance(found, (OSError, CheckpointError, TypeError)):
        return found
    return CheckpointError(f"DCP failed on rank {rank}: {type(found).__name__}: {found}")


class _Writer(FileSystemWriter):
    """DCP's own writer, with errors that name the file, the rank and the node."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(directory, sync_files=True)
        self._directory, self._rank = directory, rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names of files by which `verify` knows that hpctrain.json belongs to them."""
        planned = super().prepare_global_plan(plans)
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"{PREFIX}{plan.storage_data.prefix}"))
            for plan in planned
        ]

    def storage_meta(self) -> dcp.StorageMeta:
        """The directory as text: ranks send each other no paths, which are objects with code of their own."""
        return dcp.StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, in this thread, so that errors are raised here."""
        with naming(self._directory, self._rank):
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:  # raised at the end of torch.save's zip; it hides the system's error
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """`.metadata`."""
        with naming(self._directory, self._rank):
            super().finish(metadata, results)


class PiecePlanner(SavePlanner):
    """Offers every piece, and lets one holder of each rectangle, the least loaded one, write it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tensors: dict[dcp.MetadataIndex, Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: dcp.StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to do: the pieces are known."""

    def create_local_plan(self) -> SavePlan:
        """This rank's pieces. Values are checked here, so that all ranks learn of a value that can't be saved."""
        values.encode(self._state.values)
        items = []
        for piece in self._state.pieces:
            if piece.tensor.numel() == 0 and math.prod(piece.shape) > 0:
                continue
            data = _describe(piece)
            index = dcp.MetadataIndex(piece.name, data.chunk.offsets)
            self._tensors[index] = piece.tensor.detach().reshape(data.chunk.sizes)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
        """Raises CheckpointError for holes, overlaps and contradictions."""
        tensors: dict[str, dcp.TensorStorageMetadata] = {}
        holders: dict[tuple[str, Rectangle], list[tuple[int, WriteItem]]] = defaultdict(list)
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                name, data = item.index.fqn, item.tensor_data
                assert data is not None  # create_local_plan makes only such items
                known = tensors.setdefault(name, dcp.TensorStorageMetadata(data.properties, data.size, []))
                if (known.size, known.properties.dtype) != (data.size, data.properties.dtype):
                    raise CheckpointError(
                        f"{name} is {data.properties.dtype} {list(data.size)} on rank {rank} and {known.properties.dtype} "
                        f"{list(known.size)} on a lower rank; a tensor has one dtype and one full shape"
                    )
                holders[name, Rectangle(tuple(data.chunk.offsets), tuple(data.chunk.sizes))].append((rank, item))
        for name, part in holders:
            tensors[name].chunks.append(dcp.ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)))
        for name, tensor in tensors.items():
            values.check_printable(name)
            parts = [Rectangle(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
            fault = tiling_fault(tuple(tensor.size), parts)
            if fault is not None:
                raise CheckpointError(f"{name} can't be saved: {fault}")
        work = _assign(list(holders.values()), len(all_plans))
        plans = [replace(plan, items=items) for plan, items in zip(all_plans, work, strict=True)]
        return plans, dcp.Metadata(dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan that rank 0 returned."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of an item of this rank."""
        return self._tensors[write_item.index]


def _assign(shared: Sequence[list[tuple[int, WriteItem]]], ranks: int) -> list[list[WriteItem]]:
    loads, work = [0] * ranks, [list[WriteItem]() for _ in range(ranks)]
    for held_by in sorted(shared, key=len):
        rank, item = min(held_by, key=lambda holder: loads[holder[0]])
        loads[rank] += _nbytes(item)
        work[rank].append(item)
    return work


def _nbytes(item: WriteItem) -> int:
    data: Any = item.tensor_data
    nbytes: int = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
    return nbytes


def _describe(piece: Piece) -> TensorWriteData:
    """The place of a piece in its tensor. Any part of an empty tensor counts as the full tensor."""
    empty = math.prod(piece.shape) == 0
    offsets = torch.Size((0,) * len(piece.shape) if empty else piece.offsets)
    sizes = torch.Size(piece.shape) if empty else piece.tensor.shape
    properties = dcp.TensorProperties(dtype=piece.tensor.dtype)
    return TensorWriteData(dcp.ChunkStorageMetadata(offsets, sizes), properties, torch.Size(piece.shape))
