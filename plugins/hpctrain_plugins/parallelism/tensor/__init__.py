"""Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): the matrices of a block are cut over the ranks of a node.

torch's own parallelize_module does the cutting, by DTensors; what is here is where the plan comes from (plan.py,
blocks.py) and what its entries mean (styles.py).
"""
