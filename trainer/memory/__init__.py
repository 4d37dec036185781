"""Memory: leaks while training, what is in use, and the largest batch that fits.

Nothing is imported here: the search for the batch size runs without torch in its own process.
"""
