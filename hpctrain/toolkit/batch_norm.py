"""A door to batch normalization over several processes. Starts no MPI when it is imported."""

from hpctrain.base.batch_norm import SynchronizedBatchNorm

__all__ = ["SynchronizedBatchNorm"]
