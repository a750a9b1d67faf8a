"""gpuwarden: who is on the GPUs of this node, and do they belong there?"""

__version__ = "0.1.0"
