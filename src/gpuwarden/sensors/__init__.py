"""Facts, a file a source: ``read`` looks, ``parse`` knows the format, nothing here judges."""
