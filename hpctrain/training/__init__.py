"""The way of a rank from a job to a trained model, and what one does with it: evaluate, predict, sample."""
