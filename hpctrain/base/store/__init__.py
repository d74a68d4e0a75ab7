"""The guarded store: keys and values that only the ranks of one job can read and write.

It replaces torch's TCPStore, which serves anybody who connects. Both ends of a connection first prove that they know the
job's secret, and every message is authenticated. Imports only hpctrain.base.errors from hpctrain.
"""
