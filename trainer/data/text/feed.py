"""The loaders of a training on text: cleaned, tokenized, planned for all ranks alike."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from trainer import faults
from trainer.accumulate import PlannedAccumulation
from trainer.config import Config
from trainer.cpus import usable_cpus
from trainer.data.loader import LoaderPlan, plan_loader, replan, start_worker
from trainer.data.synthetic import cache_folder
from trainer.data.text.clean import CleaningReport, clean_corpus
from trainer.data.text.collate import Collate, PlannedBatches, Task
from trainer.data.text.corpus import bundled_prose
from trainer.data.text.files import load_corpus
from trainer.data.text.plan import EpochPlan, plan_epoch
from trainer.data.text.texts import Corpus
from trainer.data.text.tokens import ByteTokenizer, Tokenizer, TokenSet, tokenize, train_wordpiece
from trainer.distributed.group import Placement
from trainer.errors import DataError

__all__ = ["TextFeed", "build_text"]


@dataclass(eq=False)
class TextFeed:
    """Batches are dicts of tensors: `input_ids`, `attention_mask` (N, T), `labels`.

    Each epoch has a plan of its own, the same on every rank from (seed, epoch).
    """

    train: DataLoader[Any]
    held_out: DataLoader[Any] | None
    classes: tuple[str, ...]
    path: Path
    source: str
    """In words."""
    plan: LoaderPlan
    vocabulary: int
    tokens: TokenSet
    sampler: PlannedBatches
    cleaning: CleaningReport | None
    _config: Config
    _placement: Placement
    _make: Callable[[LoaderPlan], DataLoader[Any]]
    _every: int
    _start: int = 0
    _epoch: int = 0

    @property
    def accumulation(self) -> PlannedAccumulation:
        """The windows of the epoch that was set last."""
        return self._windows(self._epoch, self._every, self._start)

    def set_accumulation(self, every: int, first_batch: int) -> None:
        """In later epochs from their beginning on."""
        self._every, self._start = every, first_batch

    def set_workers(self, num_workers: int, prefetch_factor: int) -> None:
        """The texts and their order stay."""
        self.plan = replan(
            self.plan,
            self._config.loader,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
        )
        self.train = self._make(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Plan anew; before each epoch's iterator."""
        if epoch != self._epoch:
            self._start = 0
        self._epoch = epoch
        self.sampler.set_epoch(self._plan(epoch), first_batch)

    def steps(self, epochs: int) -> int:
        """Optimizer steps in so many epochs; packing may give one epoch more than another."""
        every = self._config.train.accumulate
        if self._config.text.padding != "pack":
            return epochs * -(-len(self._plan(0)) // every)
        return sum(-(-len(self._plan(epoch)) // every) for epoch in range(epochs))

    def set_strength(self, strength: float) -> None:
        """Nothing: text is not augmented."""

    def describe(self) -> list[str]:
        """What there is, what cleaning did, and how much of a batch will be padding."""
        text = self._config.text
        total = int(np.sum(self.tokens.lengths, dtype=np.int64))
        lines = [
            f"{len(self.tokens):,} texts of {total:,} tokens from {self.source}, "
            f"a vocabulary of {self.vocabulary:,}"
        ]
        if self.cleaning is not None:
            lines.append(self.cleaning.sentence())
        lines.append(f"{self._plan(0).waste:.1%} of a batch is padding ({text.padding})")
        return lines

    @functools.lru_cache(maxsize=4)  # noqa: B019 - one feed lives as long as the process
    def _plan(self, epoch: int) -> EpochPlan:
        text = self._config.text
        return plan_epoch(
            self.tokens.lengths,
            batch_size=self._config.loader.batch_size,
            world_size=self._placement.world_size,
            seed=self._config.train.seed,
            epoch=epoch,
            padding=text.padding,
            max_tokens=text.max_tokens,
            multiple=multiple_of(self._config, self._placement),
            bucket_batches=text.bucket_batches,
            drop_last=self._config.loader.drop_last,
        )

    @functools.lru_cache(maxsize=4)  # noqa: B019 - one feed lives as long as the process
    def _windows(self, epoch: int, every: int, start: int) -> PlannedAccumulation:
        plan, rank = self._plan(epoch), self._placement.rank
        language = self._config.model.name == "gpt"
        own = plan.of_rank(rank)
        return PlannedAccumulation(
            # A language model predicts each token of a text but its first.
            units=plan.targets if language else plan.samples,
            own_units=[b.targets if language else b.samples for b in own],
            own_samples=[b.samples for b in own],
            own_tokens=[b.tokens for b in own],
            ranks=self._placement.world_size,
            every=every,
            start=start,
        )


def multiple_of(config: Config, placement: Placement) -> int:
    """`text.multiple` with ``auto`` settled."""
    if config.text.multiple != "auto":
        return config.text.multiple
    return 8 if placement.device.type == "cuda" else 1


def build_text(config: Config, placement: Placement) -> TextFeed:
    """Read, clean, tokenize and plan.

    Raises:
        DataError: there is no text, or not enough for one batch on each rank.
        MissingPackageError: files, or the wordpiece tokenizer, need the extra `text`.
    """
    text = config.text
    task: Task = "lm" if config.model.name == "gpt" else "classify"
    corpus = _corpus(config, want_labels=task == "classify")
    cleaning = None
    if text.clean:
        corpus, cleaning = clean_corpus(corpus)
    train_texts, held_out_texts = corpus.split(text.eval_fraction)
    tokenizer = _tokenizer(config, train_texts)
    cache = cache_folder() / "text"
    make = functools.partial(
        tokenize,
        tokenizer=tokenizer,
        max_tokens=text.max_tokens,
        split_long=task == "lm",
        num_proc=text.num_proc,
        cache=cache,
    )
    tokens = make(train_texts)
    if not len(tokens):
        raise DataError(f"{corpus.source} has no text to train on")
    plan = plan_loader(
        config.loader,
        cpus=usable_cpus(),
        ranks_here=placement.ranks_here,
        cuda=placement.device.type == "cuda",
    )
    multiple = multiple_of(config, placement)
    collate = Collate(text.padding, text.max_tokens, tokenizer.pad_id, multiple, task)
    sampler = PlannedBatches(placement.rank)
    injected = faults.requested(config.faults)
    dataset = faults.dataset_with(tokens, injected, placement.rank, cache_folder())

    def common(plan: LoaderPlan) -> dict[str, Any]:
        return {
            **plan.arguments(),
            "in_order": config.loader.in_order,
            "worker_init_fn": start_worker if plan.num_workers else None,
            "collate_fn": collate,
        }

    def make_loader(plan: LoaderPlan) -> DataLoader[Any]:
        train: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, **common(plan))
        faults.loader_with(train, injected, placement.rank)
        return train

    feed = TextFeed(
        train=make_loader(plan),
        held_out=None,
        classes=corpus.classes if task == "classify" else (),
        path=_folder(config),
        source=corpus.source,
        plan=plan,
        vocabulary=tokenizer.size,
        tokens=tokens,
        sampler=sampler,
        cleaning=cleaning,
        _config=config,
        _placement=placement,
        _make=make_loader,
        _every=config.train.accumulate,
    )
    feed.held_out = _held_out(make(held_out_texts), config, placement, common(plan))
    feed.set_epoch(0)
    return feed


def _corpus(config: Config, *, want_labels: bool) -> Corpus:
    text = config.text
    if text.path is None:
        return bundled_prose()
    return load_corpus(
        text.path.expanduser(),
        format=text.format,
        column=text.column,
        label_column=text.label_column,
        want_labels=want_labels,
    )


def _folder(config: Config) -> Path:
    """Where the text lies, for whoever wants to know the disk."""
    if config.text.path is not None:
        return config.text.path.expanduser()
    import pydoc_data

    return Path(next(iter(pydoc_data.__path__)))


def _tokenizer(config: Config, corpus: Corpus) -> Tokenizer:
    if config.text.tokenizer == "bytes":
        return ByteTokenizer()
    return train_wordpiece(corpus.texts, config.text.vocabulary, cache_folder() / "text")


def _held_out(
    tokens: TokenSet, config: Config, placement: Placement, common: dict[str, Any]
) -> DataLoader[Any] | None:
    """Every text once over all ranks, in batches of alike lengths; never packed differently."""
    if not len(tokens):
        return None
    text = config.text
    # One rank's plan over all, whose batches are dealt out: repeating some, as the training plan
    # may do to make ranks even, would count them twice.
    plan = plan_epoch(
        tokens.lengths,
        batch_size=config.loader.batch_size,
        world_size=1,
        seed=0,
        epoch=0,
        padding=text.padding,
        max_tokens=text.max_tokens,
        multiple=multiple_of(config, placement),
        bucket_batches=text.bucket_batches,
        shuffle=False,
    )
    sampler = PlannedBatches(0)
    sampler.set_epoch(plan, 0, every=placement.world_size, offset=placement.rank)
    return DataLoader(tokens, batch_sampler=sampler, **common)
