"""Pipeline parallelism (Huang et al., "GPipe", 2019): each rank of the axis pp holds some of the blocks.

The schedules are those of torch.distributed.pipelining. This package cuts the model and gives the micro batches to them.
"""
