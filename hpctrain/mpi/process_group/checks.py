"""Checks of a caller's arguments before anything is sent: one dtype, sizes that fit, ranks that exist."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpctrain.mpi.transfer.buffers import ready


def views_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, ready to be sent. Requires at least one tensor, all of one dtype."""
    if len(tensors) == 1:
        return [ready(tensors[0])]
    views = [ready(tensor) for tensor in tensors]
    if not views:
        raise ValueError("found an empty list, expected at least one tensor")
    if any(view.dtype != views[0].dtype for view in views):
        raise ValueError(f"found tensors of {', '.join(sorted({str(v.dtype) for v in views}))}, expected one dtype")
    return views


def check_root(rank: int, size: int) -> int:
    """The rank, if a group of `size` has it."""
    if not 0 <= rank < size:
        raise ValueError(f"found root {rank}, expected a rank of the group, 0 to {size - 1}")
    return rank


def check_size(name: str, large: Tensor, other: str, small: Tensor, factor: int) -> None:
    """Require that `large` has `factor` times as many elements as `small`."""
    check_dtype(large, small)
    if large.numel() != small.numel() * factor:
        raise ValueError(
            f"found an {name} of {large.numel()} elements {tuple(large.shape)}, expected {small.numel() * factor}: "
            f"{factor} times {other}'s {small.numel()} {tuple(small.shape)}"
        )


def check_list(name: str, tensors: Sequence[Tensor], like: Tensor, size: int, *, any_size: bool = False) -> None:
    """Require one tensor for each of `size` ranks, like `like`."""
    if len(tensors) != size:
        raise ValueError(f"found {len(tensors)} {name}, expected {size}: one for each rank")
    check_dtype(tensors[0], like)
    sizes = [tensor.numel() for tensor in tensors]
    if not any_size and any(elements != like.numel() for elements in sizes):
        raise ValueError(f"found {name} of {sizes} elements, expected {like.numel()} in each")


def split_sizes(name: str, tensor: Tensor, sizes: Sequence[int] | None, ranks: int) -> list[int]:
    """The number of rows for each rank: as given, else equal."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if tensor.dim() == 0 or rows % ranks:
            raise ValueError(
                f"found an {name} of shape {tuple(tensor.shape)}, expected a first dim that {ranks} ranks divide; "
                f"or pass {name}_split_sizes"
            )
        return [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"found {name}_split_sizes {list(sizes)}, expected {ranks} sizes, one for each rank, "
            f"that add up to the first dim, {rows}"
        )
    return list(sizes)


def check_dtype(one: Tensor, other: Tensor) -> None:
    """Require one dtype for input and output."""
    if one.dtype != other.dtype:
        raise ValueError(f"found {one.dtype} and {other.dtype}, expected input and output of one dtype")
