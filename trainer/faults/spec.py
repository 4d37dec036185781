"""Faults by name: `NAME[:strength][@rank]`, as `trainer train --fault` takes them."""

from typing import NamedTuple

from trainer.errors import ConfigError

__all__ = ["FAULTS", "Fault", "Kind", "parse_fault", "parse_faults"]


class Kind(NamedTuple):
    """One kind of fault: its strength if none is said, and a sentence with the strength in it."""

    strength: float
    says: str


FAULTS: dict[str, Kind] = {
    "slow_dataset": Kind(20.0, "each item waits {:g} ms, as for a remote store"),
    "cpu_decode": Kind(20.0, "each item computes for {:g} ms"),
    "slow_worker": Kind(40.0, "each item of the first loader worker waits {:g} ms"),
    "slow_storage": Kind(48.0, "each item reads {:g} MB from the disk, past the page cache"),
    "cold_epoch": Kind(40.0, "each item waits {:g} ms the first time it is read"),
    "burst": Kind(400.0, "each batch waits {:g} ms at once, so workers finish together"),
    "slow_collate": Kind(60.0, "collating a batch computes for {:g} ms"),
    "slow_data": Kind(30.0, "each fetch blocks the training thread {:g} ms"),
    "slow_forward": Kind(30.0, "each forward sleeps {:g} ms"),
    "slow_backward": Kind(30.0, "each backward sleeps {:g} ms"),
    "slow_optimizer": Kind(30.0, "each optimizer step sleeps {:g} ms"),
    "jitter": Kind(40.0, "in each step another rank sleeps {:g} ms"),
    "comm_heavy": Kind(48.0, "the model has {:g} MB of gradients more to reduce"),
    "all_reduce": Kind(48.0, "the loop reduces {:g} MB by itself in each step"),
    "sync_every_step": Kind(30.0, "the loop writes a log for {:g} ms after each step"),
    "ckpt_every": Kind(20.0, "a checkpoint of 96 MB is written every {:g} steps"),
    "eval_every": Kind(20.0, "an evaluation of 40 batches runs every {:g} steps"),
    "retain_graph": Kind(1.0, "the loss of each step is kept with its graph, {:g} times"),
    "grow_list": Kind(4.0, "each step keeps {:g} MB"),
    "hang": Kind(30.0, "the loop stands still after {:g} steps"),
    "oversub": Kind(4.0, "each loader worker computes on {:g} threads per CPU"),
    "affinity1": Kind(1.0, "the process and its workers may use {:g} CPU"),
    "respawn_workers": Kind(8.0, "the loader starts its workers anew every {:g} steps"),
}


class Fault(NamedTuple):
    """One fault; `rank` None means every rank."""

    name: str
    strength: float
    rank: int | None = None

    def on(self, rank: int) -> bool:
        """Whether it acts on this rank."""
        return self.rank is None or self.rank == rank

    @property
    def sentence(self) -> str:
        """What it does, in words."""
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{FAULTS[self.name].says.format(self.strength)}{where}"


def parse_fault(text: str) -> Fault:
    """Read `NAME[:strength][@rank]`.

    Raises:
        ConfigError: no such name, or a strength or rank that is none.
    """
    body, at, where = text.strip().partition("@")
    name, colon, number = body.partition(":")
    if name not in FAULTS:
        import difflib

        near = difflib.get_close_matches(name, FAULTS, 1)
        meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(FAULTS)}"
        raise ConfigError(f"no such fault: {name!r}{meant}")
    strength = FAULTS[name].strength
    if colon:
        try:
            strength = float(number)
        except ValueError:
            raise ConfigError(f"the strength of {text!r} is no number") from None
        if not 0.0 < strength < 1e6:
            raise ConfigError(f"the strength of {text!r} must be above 0 and below a million")
    if not at:
        return Fault(name, strength)
    if not where.isdecimal() or len(where) > 6:
        raise ConfigError(f"the rank of {text!r} is no number")
    return Fault(name, strength, int(where))


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read several faults between commas; none for an empty text.

    Raises:
        ConfigError: one of them is none.
    """
    return tuple(parse_fault(part) for part in text.split(",") if part.strip())
