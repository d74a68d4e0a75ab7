"""The guards of a training run: steps that must not change the model, replicas that differ, a GPU without memory."""
