"""The contracts between the trainer and plugins: a file for each slot, or for two that go together. `hpctrain.api` has them."""
