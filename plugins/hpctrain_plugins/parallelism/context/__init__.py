"""Context parallelism: one sequence lies on several ranks, which exchange what attention needs.

`ring` passes keys and values round (Liu et al., "Ring Attention with Blockwise Transformers", 2023); `ulysses` exchanges
tokens for heads (Jacobs et al., "DeepSpeed Ulysses", 2023).
"""
