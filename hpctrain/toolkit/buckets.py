"""Flat buckets of parameters and their gradients, filled by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.api import BucketSum, GradientBucket, Piece, Span, foreach_copy_, move_local, pieces_of, shared_zeros
from hpctrain.contracts.pieces import laid_out_like

_ALIGNMENT = 64  # bytes: a rank's slice of a bucket begins at a multiple of it
_TOGETHER = 4_000_000  # bytes of gradients that are copied into a bucket at a time


@dataclass
class BucketEntry:
    """A trained parameter in a bucket; `pieces` are its parts on this rank, one after another in `local`."""

    name: str
    parameter: nn.Parameter
    pieces: list[Piece]
    offset: int = 0
    """The place of its first element in the flat buffer."""
    filled: bool = False
    """Whether its gradient lies in the bucket's buffer."""
    local: Tensor = field(init=False)
    """The plain tensor with this rank's values."""

    def __post_init__(self) -> None:
        self.local = Piece.of(self.name, self.parameter).tensor

    def cut(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of the shape of `local`, cut as the pieces are."""
        return [tensor] if len(self.pieces) == 1 else list(torch.split(tensor, [len(p.tensor) for p in self.pieces]))

    def spans(self) -> Iterator[Span]:
        """Yield the place of each piece in a flat buffer."""
        begin = self.offset
        for piece in self.pieces:
            yield Span(piece, begin)
            begin += piece.tensor.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The entry's part of a flat buffer."""
        return flat[self.offset : self.offset + self.local.numel()].view(self.local.shape)

    def move_to(self, view: Tensor) -> None:
        """Make `view` the memory of the values."""
        for piece, part in zip(self.pieces, self.cut(view), strict=True):
            piece.tensor.data = part
        self.local.data = view  # `data`: tensors stay the same objects, and autograd records nothing
        if isinstance(self.parameter, DTensor):
            move_local(self.parameter, view)

    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient in the parameter's placement, whatever autograd has chosen."""
        gradient = self.parameter.grad
        if isinstance(gradient, DTensor) and isinstance(self.parameter, DTensor):
            return gradient.redistribute(placements=self.parameter.placements).to_local()
        return gradient

    @property
    def is_to_be_summed(self) -> bool:
        """Whether autograd left a part of the gradient on each rank of another axis, as a norm's in sequence parallelism."""
        whole, gradient = self.parameter, self.parameter.grad
        return isinstance(whole, DTensor) and isinstance(gradient, DTensor) and gradient.placements != whole.placements

    def sum_parts(self) -> None:
        """Give the gradient the parameter's placement. Collective over that axis: its ranks call it in the same order."""
        whole, gradient = self.parameter, self.parameter.grad
        assert isinstance(whole, DTensor) and isinstance(gradient, DTensor)
        whole.grad = gradient.redistribute(placements=whole.placements)

    def point_gradient(self, view: Tensor) -> None:
        """Let backward add to `view` from now on."""
        self.parameter.grad = laid_out_like(self.parameter, view)


@dataclass
class Bucket:
    """Parameters of one dtype, one after another in a flat buffer that is cut into `slices` of one length."""

    entries: list[BucketEntry]
    group: dist.ProcessGroup
    """The ranks that sum it."""
    slices: int
    gradients: Tensor | None = None
    """(numel,): the buffer, while the gradients have one."""
    sum: BucketSum | None = None
    """The sum of the gradients over the group."""
    waiting: int = 0
    """The number of gradients that this backward has not made yet."""
    finish: Callable[[], None] | None = None
    """Waits for the reduction under way."""

    def __post_init__(self) -> None:
        self._taken: dict[int, BucketEntry] = {}
        self._taken_bytes = 0
        self._views: dict[tuple[int, int], Tensor] = {}
        end = 0
        for entry in self.entries:
            entry.offset, end = end, end + entry.local.numel()
        share = -(-end // self.slices)  # rounded up: collectives need slices of one length
        if self.slices > 1:
            unit = max(1, _ALIGNMENT // self.dtype.itemsize)
            share = -(-share // unit) * unit
        self.share, self.numel = share, share * self.slices

    @property
    def dtype(self) -> torch.dtype:
        return self.entries[0].local.dtype

    @property
    def content(self) -> GradientBucket:
        """The bucket's layout, for its sum."""
        spans = [span for entry in self.entries for span in entry.spans()]
        return GradientBucket(spans, self.numel, self.dtype, self.entries[0].local.device)

    def buffer(self) -> Tensor:
        """A new flat buffer for collectives of its group."""
        return flat_zeros(self.numel, self.entries[0].local, self.group)

    def zero_padding(self, flat: Tensor) -> Tensor:
        """Set the elements of `flat` that no parameter fills to zero; returns it."""
        last = self.entries[-1]
        flat[last.offset + last.local.numel() :].zero_()
        return flat

    def own_slice(self, flat: Tensor) -> Tensor:
        """The slice of `flat` that belongs to this rank of the group."""
        begin = self.group.rank() * self.share
        return flat[begin : begin + self.share]

    def take(self, entry: BucketEntry) -> None:
        """Move an entry's gradient into the buffer, soon: a GPU copies several in the time in which it begins one. Later backwards
        add to it there."""
        if not entry.filled and entry.offset not in self._taken:
            self._taken[entry.offset] = entry
            self._taken_bytes += entry.local.nbytes
        if self.waiting == 0 or self._taken_bytes >= _TOGETHER:
            self._fill(list(self._taken.values()))

    def fill_all(self) -> Tensor:
        """The buffer with every entry's gradient, zeros where there is none."""
        self._fill([entry for entry in self.entries if not entry.filled])
        assert self.gradients is not None
        return self.gradients

    @torch.no_grad()
    def _fill(self, entries: Sequence[BucketEntry]) -> None:
        assert self.gradients is not None
        self._drop_taken()
        views, gradients = [], []
        for entry in entries:
            view, gradient = self._view_of(entry, self.gradients), entry.gradient()
            if gradient is None:  # a parameter that this rank did not use
                view.zero_()
            else:
                views.append(view)
                gradients.append(gradient)
            entry.point_gradient(view)
            entry.filled = True
        if views:
            foreach_copy_(views, gradients)  # together: one launch on a GPU

    def _view_of(self, entry: BucketEntry, flat: Tensor) -> Tensor:
        """The entry's part of a buffer of gradients. Views are kept: there are few buffers, and many gradients in each step."""
        place = flat.data_ptr(), entry.offset  # stage 2's buckets take turns with a few buffers
        if place not in self._views:
            self._views[place] = entry.view(flat)
        return self._views[place]

    def _drop_taken(self) -> None:
        self._taken.clear()
        self._taken_bytes = 0

    def forget(self) -> None:
        """Forget the gradients: the next one of each entry is its first."""
        self._drop_taken()
        for entry in self.entries:
            entry.parameter.grad = None
            entry.filled = False


def flat_zeros(elements: int, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Memory for collectives of `group`, in the dtype and on the device of `like`. Collective.

    It is shared by the CPU ranks of a node, which read each other's values in place.
    """
    if like.device.type == "cpu" and group.size() > 1:
        return shared_zeros(elements, like.dtype, group)
    return like.new_zeros(elements)


def trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that get a gradient; those without elements have nothing to train."""
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel())


def make_buckets(
    module: nn.Module, nbytes: int, group_of: Callable[[Sequence[str]], dist.ProcessGroup], sliced: bool
) -> list[Bucket]:
    """Buckets of at most `nbytes` (or one parameter), in the order in which backward fills them: it reaches the last
    parameters first.

    group_of: the ranks that sum a parameter, by the axes of its pieces. sliced: whether each of them owns a slice.

    A bucket has one dtype, and parameters that are cut along the same mesh axes. So ranks with the same part of a
    parameter have the same buckets around it and slice it alike, even where their parts of other parameters are unequal.
    """
    filling: dict[tuple[torch.dtype, tuple[str, ...]], list[BucketEntry]] = {}
    sizes: dict[tuple[torch.dtype, tuple[str, ...]], int] = {}
    groups: list[list[BucketEntry]] = []
    place: dict[str, int] = {}
    entries = [BucketEntry(name, parameter, pieces_of(module, name, parameter)) for name, parameter in trained(module)]
    for entry in reversed(entries):
        if entry.local.numel() == 0:
            continue  # a DTensor of which nothing lies on this rank
        place[entry.name] = len(place)
        kind = entry.local.dtype, entry.pieces[0].axes
        if kind not in filling or sizes[kind] + entry.local.nbytes > nbytes:
            filling[kind], sizes[kind] = [], 0
            groups.append(filling[kind])
        filling[kind].append(entry)
        sizes[kind] += entry.local.nbytes
    groups.sort(key=lambda group: place[group[-1].name])  # a bucket is full with its last gradient
    sums = [group_of(group[0].pieces[0].axes) for group in groups]
    return [Bucket(group, ranks, ranks.size() if sliced else 1) for group, ranks in zip(groups, sums, strict=True)]
