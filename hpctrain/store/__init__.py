"""The guarded store: keys and values that only the ranks of one job can read and write.

It takes the place of torch's TCPStore, which serves whoever connects. Both ends of a connection prove that they know the
job's secret before anything is believed, and every message is authenticated. It imports nothing of hpctrain but
hpctrain.errors.
"""
