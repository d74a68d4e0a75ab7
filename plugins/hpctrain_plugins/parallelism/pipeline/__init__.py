"""Pipeline parallelism (Huang et al., "GPipe", 2019): each rank of the axis pp holds some of the blocks.

The schedules are torch.distributed.pipelining's; what is here cuts the model and hands them the micro batches.
"""
