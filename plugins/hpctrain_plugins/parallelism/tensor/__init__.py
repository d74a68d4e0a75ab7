"""Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): the matrices of a block are cut over the ranks of a node.

torch's parallelize_module cuts them, by DTensors. This package finds the plan (plan.py, blocks.py) and defines the styles
of its entries (styles.py).
"""
