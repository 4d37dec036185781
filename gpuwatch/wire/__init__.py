"""Sockets, pipes and the node process. Ranks use `publish`, everyone else `collect`."""
