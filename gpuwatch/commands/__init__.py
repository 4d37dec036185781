"""The command line: one file a command, and the only place that wires the parts together."""

__all__ = ["main"]


def main() -> None:
    """Run the command line; the entry point of `gpuwatch`."""
    from gpuwatch.commands.cli import cli

    cli(prog_name="gpuwatch")
