"""The module on this rank: mesh, construction, parameters; sums of gradients; checks that plugins keep their contracts."""
