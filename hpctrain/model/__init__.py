"""The way from a model plugin to a module on this rank: seeded values, modules of users, given weights."""
