"""Facts, a file a source: ``read`` looks, ``parse`` knows the format, nothing here judges.

The list is in ``registry.py``, apart from here, so that a replay need not import what looks.
"""
