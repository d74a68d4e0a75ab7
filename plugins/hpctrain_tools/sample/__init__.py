"""Text that a trained language model continues: `hpctrain sample`."""
