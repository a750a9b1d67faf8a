"""What a child gives up before it touches what is hostile: rights, calls, paths, network.

Everything acts on the calling process and cannot be undone; it is called in a forked child alone.
"""
