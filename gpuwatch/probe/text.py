"""Text of the user's on its way to the wire."""

__all__ = ["NAME", "TEXT", "wire_text"]

NAME = 256
TEXT = 4096
"""The lengths that `gpuwatch.schema` allows for a name and for a text."""


def wire_text(value: object, limit: int = NAME) -> str:
    """Return text that can be encoded: cut to `limit`, without lone surrogates.

    A path that is not UTF-8 reaches Python with surrogates in it, and no encoder takes those.
    """
    return str(value)[:limit].encode("utf-8", "replace").decode("utf-8")
