"""The rank loop."""
