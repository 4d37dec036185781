"""The order of the samples: the same on every rank, each rank its share, resumable anywhere."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from torch.utils.data import Sampler

from trainer.errors import ConfigError

__all__ = ["ShardedSampler"]

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

# Indices turned into Python integers at once: a million of them would be 32 MB.
_CHUNK = 16_384


class ShardedSampler(Sampler[int]):
    """Indices 0..size-1 for this rank, in an order that (seed, epoch) decide.

    Every rank computes the same global order and takes each world_size-th sample of it. As with
    ``DistributedSampler``, the order is filled up from its beginning until every rank has the
    same number, because a rank with fewer batches would leave the others waiting. With `weights`
    samples are drawn with replacement in proportion to them instead, and `shuffle` has no
    meaning; an epoch is as long as without.

    The order comes from Philox's raw stream, which NumPy promises never to change, and the
    beginning of it does not depend on the number of ranks: training can go on inside an epoch
    under another NumPy and another world size.
    """

    def __init__(
        self,
        size: int,
        *,
        world_size: int,
        rank: int,
        seed: int = 0,
        weights: Floats | None = None,
        shuffle: bool = True,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        if weights is not None and (
            weights.shape != (size,)
            or not np.isfinite(weights).all()
            or (weights < 0).any()
            or not (weights > 0).any()
        ):
            raise ValueError(f"weights must be {size} numbers from 0, not all 0")
        self.size = size
        self.world_size = world_size
        self.rank = rank
        self.seed = seed
        self.shuffle = shuffle
        self.weights = weights
        self.samples = -(-size // world_size)
        """Of this rank in a whole epoch."""
        self.repeated = 0 if weights is not None else self.samples * world_size - size
        """Samples that fill up an epoch, over all ranks."""
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Choose the order, and how many samples of it this rank has consumed already."""
        if not 0 <= position <= self.samples:
            raise ValueError(f"position {position} is not within 0 to {self.samples}")
        self.epoch = epoch
        self.position = position

    def __len__(self) -> int:
        """Samples still to come in this epoch."""
        return self.samples - self.position

    def __iter__(self) -> Iterator[int]:
        own = self._order()[self.rank :: self.world_size][self.position :]
        for start in range(0, len(own), _CHUNK):
            yield from own[start : start + _CHUNK].tolist()

    def state(self, consumed: int) -> dict[str, int | str | bool]:
        """What `load_state` needs to go on after `consumed` samples of this rank in this epoch
        (those before a resume included). The same on every rank; all of it is JSON.
        """
        if not 0 <= consumed <= self.samples:
            raise ValueError(f"{consumed} consumed samples are not within 0 to {self.samples}")
        return {
            "epoch": self.epoch,
            # Global, so that another number of ranks can go on from it.
            "position": consumed * self.world_size,
            "seed": self.seed,
            "size": self.size,
            "world_size": self.world_size,
            "shuffle": self.shuffle,
            "weights": self._weights_digest(),
        }

    def load_state(self, state: Mapping[str, int | str | bool]) -> None:
        """Go on where `state` was taken. Raises `ConfigError` where the order would be another:
        other data, seed or weights, or a position that this number of ranks cannot share equally.
        """
        for key, mine, what in (
            ("size", self.size, "training samples"),
            ("seed", self.seed, "train.seed"),
            ("shuffle", self.shuffle, "shuffling"),
        ):
            if state.get(key) != mine:
                raise ConfigError(
                    f"the checkpoint's order cannot be continued: {what} was {state.get(key)} and "
                    f"is {mine}"
                )
        if state.get("weights") != self._weights_digest():
            raise ConfigError(
                "the checkpoint's order cannot be continued: its samples were drawn with other "
                "weights (data.balance, or other labels)"
            )
        done, epoch = state.get("position"), state.get("epoch")
        if not isinstance(done, int) or not isinstance(epoch, int) or done < 0 or epoch < 0:
            raise ConfigError("the checkpoint's order cannot be continued: its position is missing")
        if done >= self.size:
            # The rest was filling, which depends on the number of ranks.
            self.set_epoch(epoch, self.samples)
        elif done % self.world_size == 0:
            self.set_epoch(epoch, done // self.world_size)
        else:
            raise ConfigError(
                f"the checkpoint is {done:,} samples into an epoch, which {self.world_size} ranks "
                f"cannot share equally: resume with {state.get('world_size')} ranks, or from the "
                "end of an epoch"
            )

    def _order(self) -> Integers:
        """The global order of the whole epoch, filling included."""
        total = self.samples * self.world_size
        if self.weights is not None:
            # 53 bits to [0, 1), then each sample's stretch of the summed weights. Longer epochs
            # begin with the same draws.
            uniform = (self._raw(total) >> np.uint64(11)) * 2.0**-53
            ends = np.cumsum(self.weights, dtype=np.float64)
            drawn: Integers = np.searchsorted(ends / ends[-1], uniform, side="right")
            return drawn
        order: Integers = np.arange(self.size)
        if self.shuffle:
            order = np.argsort(self._raw(self.size), kind="stable")
        return np.resize(order, total)

    def _raw(self, count: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        sequence = np.random.SeedSequence((self.seed, self.epoch))
        return np.random.Philox(sequence).random_raw(count)

    def _weights_digest(self) -> str:
        if self.weights is None:
            return ""
        data = np.ascontiguousarray(self.weights, dtype="<f8").tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()
