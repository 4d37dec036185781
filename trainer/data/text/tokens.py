"""Texts to token ids: two tokenizers, and the set of ids that loaders read."""

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.data.synthetic import locked
from trainer.data.text.files import require_datasets
from trainer.data.text.texts import Corpus
from trainer.errors import DataError, MissingPackageError

__all__ = ["ByteTokenizer", "TokenSet", "Tokenizer", "tokenize", "train_wordpiece"]

# Part of the names in the cache: what was made by other rules is something else.
_RULES = 1
# Texts that are encoded at a time: enough for the threads of the tokenizer, little memory.
_TEXTS_AT_ONCE = 1000

Item = tuple[torch.Tensor, int]
Array = np.ndarray[tuple[int], np.dtype[Any]]


class Tokenizer(Protocol):
    """Texts to ids below `size`. The first and last id of a text mark its ends."""

    @property
    def size(self) -> int:
        """Different ids."""

    @property
    def pad_id(self) -> int:
        """The id that fills up rows."""

    @property
    def name(self) -> str:
        """Equal for tokenizers that give equal ids, and only for those."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8 between a begin and an end; any text in any script, nothing to train."""

    size: int = 259
    pad_id: int = 256
    name: str = "bytes"

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids 0 to 255 are the bytes, 257 begins and 258 ends a text."""
        return [[257, *text.encode(errors="replace"), 258] for text in texts]


class _WordPiece:
    """A tokenizer of the package tokenizers, with a name that its content decides."""

    pad_id = 0

    def __init__(self, trained: Any, name: str) -> None:
        self._trained = trained
        self.size: int = trained.get_vocab_size()
        self.name = name

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._trained.encode_batch(texts)]


def train_wordpiece(texts: Sequence[str], vocabulary: int, cache: Path) -> Tokenizer:
    """A WordPiece tokenizer in BERT's way ([CLS] ... [SEP], lower case) with `vocabulary` pieces.

    Trained on `texts` once: it is kept in `cache` under a digest of them, and processes that
    start at once wait for the one that trains. Fewer pieces where the texts do not have as many.
    Raises `MissingPackageError` without the package tokenizers, `DataError` where the cache cannot
    be written.
    """
    # Set, so that a fork after its threads ran is not warned of: loader workers do not tokenize,
    # and processes of `tokenize` turn threads off for themselves.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except ImportError:
        raise MissingPackageError(
            "the wordpiece tokenizer needs Hugging Face tokenizers: "
            'pip install "gpuwatch-trainer[text]" (model.name=gpt can do with text.tokenizer=bytes)'
        ) from None
    digest = _digest(str(_RULES), tokenizers.__version__, str(vocabulary), *texts)
    file = cache / "tokenizers" / f"wordpiece-{vocabulary}-{digest}.json"
    with _made_once(file) as missing:
        if missing:
            trained = _train(texts, vocabulary)
            with _replacing(file) as unfinished:
                unfinished.write_text(trained.to_str(), encoding="utf-8")
    try:
        content = file.read_text(encoding="utf-8")
        trained = tokenizers.Tokenizer.from_str(content)
    # tokenizers raises bare Exception on what it cannot read.
    except Exception as error:
        raise DataError(f"cannot read the tokenizer {file}: {error}; delete the file") from None
    return _WordPiece(trained, f"wordpiece-{vocabulary}-{_digest(content)}")


def _train(texts: Sequence[str], vocabulary: int) -> Any:
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


class TokenSet(Dataset[Item]):
    """Item i: (ids as an int32 tensor (T,), label, -1 without one).

    Indexed with a list of indices it gives a list of items, so that a batch sampler may draw
    nested batches. All ids are in one array: loader workers are forks, and a list of lists would
    be copied into each of them as its reference counts are touched.
    """

    def __init__(
        self,
        ids: Array,
        lengths: Array,
        labels: Array,
        *,
        truncated: int = 0,
        split: int = 0,
    ) -> None:
        self.ids = ids
        self.lengths = lengths
        """Tokens of each item, int32."""
        self.labels = labels
        self.truncated = truncated
        """Texts whose end was cut off."""
        self.split = split
        """Texts that were cut into several items."""
        self._ends = np.cumsum(lengths, dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of all items."""
        return len(self.ids)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: list[int]) -> list[Item]: ...
    def __getitem__(self, index: int | list[int]) -> Item | list[Item]:
        if isinstance(index, list):
            return [self[one] for one in index]
        end = int(self._ends[index])
        start = end - int(self.lengths[index])
        return torch.from_numpy(self.ids[start:end]), int(self.labels[index])

    def __getitems__(self, rows: list[list[int]]) -> list[list[Item]]:
        """The rows of a batch, each a list of items: what `Collate` takes."""
        return [self[row] for row in rows]


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    split_long: bool,
    num_proc: int,
    cache: Path,
) -> TokenSet:
    """The ids of all texts, none longer than `max_tokens`.

    A longer text is cut into several items with `split_long`, so that no token is lost; else its
    end is cut off, but for the token that marks it, and it is counted. With a trained tokenizer
    the result is kept in `cache` under a digest of the texts, the tokenizer and the lengths, and
    `num_proc` processes share the work. Raises `MissingPackageError` without the package datasets,
    which does that; bytes need neither.
    """
    if max_tokens < 2:
        raise ValueError("max_tokens must be at least 2: the two that mark a text's ends")
    encode = functools.partial(_encode, tokenizer, max_tokens, split_long)
    if isinstance(tokenizer, ByteTokenizer):
        parts = [
            encode(list(corpus.texts[start : start + _TEXTS_AT_ONCE]), range(start, len(corpus)))
            for start in range(0, len(corpus), _TEXTS_AT_ONCE)
        ]
        ids = np.concatenate([item for part in parts for item in part["ids"]] or [_NO_IDS])
        lengths = np.array([len(item) for part in parts for item in part["ids"]], dtype=np.int32)
        rows = np.array([row for part in parts for row in part["row"]], dtype=np.int64)
        cut = np.array([row for part in parts for row in part["cut"]], dtype=np.bool_)
    else:
        ids, lengths, rows, cut = _mapped(corpus, tokenizer, encode, num_proc, cache)
    labels = np.full(len(corpus), -1, dtype=np.int64) if corpus.labels is None else corpus.labels
    shortened = len(np.unique(rows[cut]))
    return TokenSet(
        ids,
        lengths,
        labels[rows],
        truncated=0 if split_long else shortened,
        split=shortened if split_long else 0,
    )


_NO_IDS: Array = np.empty(0, dtype=np.int32)


def _encode(
    tokenizer: Tokenizer,
    max_tokens: int,
    split_long: bool,
    texts: list[str],
    rows: Sequence[int],
    *,
    alone: bool = True,
) -> dict[str, list[Any]]:
    """Items of some texts: their ids, the row each is of, and whether that one was too long."""
    if not alone:
        # A fork of a process whose tokenizer had threads: it has none, and would wait for them.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    items: dict[str, list[Any]] = {"ids": [], "row": [], "cut": []}
    for row, ids in zip(rows, tokenizer.encode(texts), strict=False):
        if len(ids) <= max_tokens:
            pieces = [ids]
        elif split_long:
            pieces = _pieces(ids, max_tokens)
        else:
            pieces = [[*ids[: max_tokens - 1], ids[-1]]]
        items["ids"] += [np.array(piece, dtype=np.int32) for piece in pieces]
        items["row"] += [row] * len(pieces)
        items["cut"] += [len(ids) > max_tokens] * len(pieces)
    return items


def _pieces(ids: list[int], max_tokens: int) -> list[list[int]]:
    cuts = list(range(0, len(ids), max_tokens))
    if len(ids) - cuts[-1] == 1 and max_tokens > 2:
        # One token alone predicts nothing: it gets company.
        cuts[-1] -= 1
    return [ids[a:b] for a, b in zip(cuts, [*cuts[1:], len(ids)], strict=True)]


def _mapped(
    corpus: Corpus, tokenizer: Tokenizer, encode: Any, num_proc: int, cache: Path
) -> tuple[Array, Array, Array, Array]:
    datasets = require_datasets()
    max_tokens, split_long = encode.args[1:]
    digest = _digest(
        str(_RULES), datasets.__version__, tokenizer.name, str(max_tokens), str(split_long),
        str(num_proc), *corpus.texts,
    )  # fmt: skip
    features = datasets.Features(
        {
            "ids": datasets.List(datasets.Value("int32")),
            "row": datasets.Value("int64"),
            "cut": datasets.Value("bool"),
        }
    )
    file = cache / "tokens" / f"{digest}.arrow"
    with _made_once(file), _unreadable(file):
        # It looks for its file itself, and puts it there complete or not at all.
        table = (
            datasets.Dataset.from_dict({"text": list(corpus.texts)})
            .map(
                functools.partial(encode, alone=num_proc == 1),
                batched=True,
                batch_size=_TEXTS_AT_ONCE,
                with_indices=True,
                input_columns="text",
                remove_columns=["text"],
                num_proc=num_proc if num_proc > 1 else None,
                features=features,
                cache_file_name=str(file),
                load_from_cache_file=True,
                new_fingerprint=digest,
            )
            .data.table
        )
    lists = table.column("ids").combine_chunks()
    # Copies, because those of Arrow cannot be written, which torch warns of.
    return (
        np.array(lists.flatten(), dtype=np.int32),
        np.array(lists.value_lengths(), dtype=np.int32),
        np.array(table.column("row"), dtype=np.int64),
        np.array(table.column("cut"), dtype=np.bool_),
    )


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.hexdigest()


@contextlib.contextmanager
def _made_once(file: Path) -> Iterator[bool]:
    """Whether `file` is missing; other processes that ask for it wait until the block is left."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_name(f"{file.name}.lock")):
            yield not file.exists()
    except OSError as error:
        raise DataError(
            f"cannot write {file.parent}: {error.strerror}; name another cache with XDG_CACHE_HOME"
        ) from None


@contextlib.contextmanager
def _unreadable(file: Path) -> Iterator[None]:
    try:
        yield
    # pyarrow's error for a damaged file.
    except ValueError as error:
        raise DataError(
            f"cannot read the kept tokens {file}: {' '.join(str(error).split())}; delete the file"
        ) from None


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """A path beside `file` that takes its place when the block ends well."""
    handle, name = tempfile.mkstemp(prefix=f"{file.name}.tmp-", dir=file.parent)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
