"""GPU code: every module in any bytes, its digest, whether it is known, and what it computes.

A library of its own: it knows nothing of the node and reads no file that it is not handed.
"""
