"""Context parallelism: each sequence is cut over several ranks, which communicate in attention.

`ring` passes keys and values from rank to rank (Liu et al., "Ring Attention with Blockwise Transformers", 2023). `ulysses`
exchanges tokens for heads (Jacobs et al., "DeepSpeed Ulysses", 2023).
"""
