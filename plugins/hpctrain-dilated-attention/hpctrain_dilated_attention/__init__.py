"""Dilated attention (Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens", 2023) as a plugin of hpctrain."""
