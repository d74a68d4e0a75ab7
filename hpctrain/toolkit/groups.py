"""Process groups of torch's interface that a program makes and drives itself, beside those of torch.distributed.

Over gloo, whose members prove each other, and over what torch has for an accelerator; `hpctrain.mpi.create_group` makes one
over MPI. With streams beside the one that computes, and what torch has no public name for: the options of an all-gather, and
a copy of many tensors at once. Imports torch, and nothing of plugins.
"""

from hpctrain.base.devices import nccl_version
from hpctrain.base.side_stream import Done, SideStream
from hpctrain.base.store.gloo import create_group as create_gloo_group
from hpctrain.base.torch_groups import AllgatherOptions, accelerator_group
from hpctrain.base.torch_private import foreach_copy_

__all__ = [
    "AllgatherOptions", "Done", "SideStream", "accelerator_group", "create_gloo_group", "foreach_copy_", "nccl_version",
]  # fmt: skip
