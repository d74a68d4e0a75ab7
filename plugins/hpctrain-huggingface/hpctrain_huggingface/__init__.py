"""Models of transformers, adapters of peft and data sets of Hugging Face, as plugins of hpctrain."""
