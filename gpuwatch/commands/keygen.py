"""`gpuwatch keygen`: the key of a job."""

import click

__all__ = ["keygen"]


@click.command()
@click.argument("file", metavar="FILE")
def keygen(file: str) -> None:
    """Make a key for one job and write it to FILE, which must not exist yet.

    The door (gpuwatch agent --listen, gpuwatch run --listen) and everyone who attaches over TCP
    need the same file: copy it with scp. Whoever has it may watch your runs, and change what the
    training allows to be changed; so make one for each job.
    """
    from gpuwatch.frames import printable
    from gpuwatch.wire.collect import make_key

    make_key(file)
    click.echo(f"gpuwatch: the key is in {printable(file)}, for your eyes only", err=True)
