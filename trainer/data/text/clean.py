"""Texts from the web made readable: tags, entities, mojibake, white space, repeats.

Nothing that a reader would miss is taken: case, punctuation, digits, every script and emoji stay.
"""

import functools
import hashlib
import html
import html.parser
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.data.text.texts import Corpus

__all__ = ["CleaningReport", "clean_corpus", "clean_text"]

# What separates words on a page. Other tags do not: <i>Titanic</i>'s is one word.
_BLOCKS = (
    "address|article|aside|blockquote|body|br|button|caption|center|dd|details|dialog|div|dl|dt|"
    "fieldset|figcaption|figure|footer|form|h[1-6]|head|header|hr|html|iframe|img|input|legend|li|"
    "link|main|menu|meta|nav|ol|optgroup|option|pre|section|select|summary|table|"
    "tbody|td|textarea|tfoot|th|thead|title|tr|ul|video"
)
_INLINES = (
    "abbr|acronym|audio|bdi|bdo|big|canvas|cite|code|data|del|dfn|em|font|ins|kbd|label|map|mark|"
    "nobr|object|output|picture|rp|rt|ruby|samp|small|source|span|strike|strong|sub|sup|svg|time|"
    "tt|var|wbr"
)
# Only these are tags: <class 'str'>, List<String>, <https://...> and a < b are text. A name of one
# letter counts only where nothing or an attribute with a value follows: "a <b and c> d" is text.
_TAG = re.compile(
    rf"</?(?:(?P<hidden>script|style)(?=[\s/>])|(?P<block>(?:{_BLOCKS})(?=[\s/>])|p(?=\s*/?>|\s[^<>]*=))"
    rf"|(?P<inline>(?:{_INLINES})(?=[\s/>])|[abiqsu](?=\s*/?>|\s[^<>]*=)))[^<>]*>"
    r"|<!doctype\b[^<>]*>",
    re.IGNORECASE,
)
# Only with the semicolon: the rule of browsers, which take &copy of "?a=1&copy=2" for a sign, is
# for broken pages and hurts sound text.
_ENTITY = re.compile(r"&(?:[A-Za-z][A-Za-z0-9]{1,31}|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});")
_ESCAPED_TWICE = re.compile(r"&(?:(?:amp|AMP|#0*38|#[xX]0*26);)+")
# Control characters, halves of surrogate pairs, and marks of byte order and direction overrides.
_UNREADABLE = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufeff\ufff9-\ufffb\ud800-\udfff]")
# Each pass takes one layer of escaping off; no sound text has that many.
_PASSES_MAX = 16


@dataclass(frozen=True)
class CleaningReport:
    """What `clean_corpus` found and dropped, in texts."""

    rows: int
    """Texts before."""
    with_tags: int
    with_entities: int
    mojibake_fixed: int | None
    """None where ftfy is not installed, so that nobody looked."""
    empty_dropped: int
    duplicates_dropped: int
    """Exactly equal to an earlier text after cleaning."""
    conflicts: int
    """Of the duplicates, those with another class than the text that was kept."""
    histogram: tuple[tuple[str, int], ...]
    """Texts kept of each class, empty without classes."""
    parser: str
    """What parsed the tags: "selectolax" or "html.parser"."""

    @property
    def kept(self) -> int:
        """Texts after."""
        return self.rows - self.empty_dropped - self.duplicates_dropped

    def sentence(self) -> str:
        """All of it in one line for a person."""
        parts = [f"{self.with_tags:,} with tags", f"{self.with_entities:,} with entities"]
        if self.mojibake_fixed is not None:
            parts.append(f"{self.mojibake_fixed:,} with mojibake")
        line = (
            f"cleaned {self.rows:,} texts ({', '.join(parts)}): {self.kept:,} kept, "
            f"{self.empty_dropped:,} empty and {self.duplicates_dropped:,} repeated dropped"
        )
        if self.conflicts:
            line += f", {self.conflicts:,} of them in another class than before"
        if self.histogram:
            most = max(self.histogram, key=lambda pair: pair[1])
            least = min(self.histogram, key=lambda pair: pair[1])
            line += f"; {len(self.histogram)} classes, from {least[0]} ({least[1]:,})"
            line += f" to {most[0]} ({most[1]:,})"
        if self.mojibake_fixed is None:
            line += "; mojibake was not looked for: pip install ftfy"
        return line


@dataclass(slots=True)
class _Found:
    tags: bool = False
    entities: bool = False
    mojibake: bool = False


def clean_text(text: str) -> str:
    """The text without tags, scripts, entities, mojibake and control characters.

    Unicode is NFC, white space is single spaces. Cleaning twice is cleaning once: what is escaped
    twice is unescaped twice. Tags are parsed with selectolax, or html.parser where that is not
    installed; without ftfy mojibake stays.
    """
    return _clean(text, _Found())


def clean_corpus(corpus: Corpus) -> tuple[Corpus, CleaningReport]:
    """Every text cleaned, without those that are empty then or repeat an earlier one."""
    rows = len(corpus)
    tags = entities = mojibake = empty = conflicts = duplicates = 0
    texts: list[str] = []
    kept: list[int] = []
    # Digests: the texts themselves may be gigabytes.
    first: dict[bytes, int] = {}
    labels: Sequence[int] = [-1] * rows if corpus.labels is None else corpus.labels.tolist()
    for index, (raw, label) in enumerate(zip(corpus.texts, labels, strict=True)):
        found = _Found()
        text = _clean(raw, found)
        tags += found.tags
        entities += found.entities
        mojibake += found.mojibake
        if not text:
            empty += 1
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in first:
            duplicates += 1
            conflicts += first[digest] != label
            continue
        first[digest] = label
        texts.append(text)
        kept.append(index)
    remaining = None if corpus.labels is None else corpus.labels[np.array(kept, dtype=np.int64)]
    histogram: tuple[tuple[str, int], ...] = ()
    if remaining is not None:
        counts = np.bincount(remaining, minlength=len(corpus.classes)).tolist()
        histogram = tuple(zip(corpus.classes, counts, strict=True))
    report = CleaningReport(
        rows=rows,
        with_tags=tags,
        with_entities=entities,
        mojibake_fixed=mojibake if _ftfy() else None,
        empty_dropped=empty,
        duplicates_dropped=duplicates,
        conflicts=conflicts,
        histogram=histogram,
        parser="selectolax" if _selectolax() else "html.parser",
    )
    return Corpus(texts, remaining, corpus.classes, corpus.source), report


def _clean(text: str, found: _Found) -> str:
    for _ in range(_PASSES_MAX):
        before = text
        text = _pass(text, found)
        if text == before:
            break
    return text


def _pass(text: str, found: _Found) -> str:
    if "&" in text:
        decoded = _ENTITY.sub(_decoded, _ESCAPED_TWICE.sub("&", text))
        found.entities |= decoded != text
        text = decoded
    if "<" in text:
        bare = _without_comments(text)
        if _TAG.search(bare):
            bare = _without_tags(bare)
        found.tags |= bare != text
        text = bare
    if not text.isascii():
        text = _readable(text, found)
    return " ".join(_UNREADABLE.sub("", text).split())


def _decoded(match: re.Match[str]) -> str:
    # A no-break space is white space here.
    return html.unescape(match[0])


def _readable(text: str, found: _Found) -> str:
    ftfy = _ftfy()
    if ftfy is not None:
        # By line, because each may have its own history; nothing else of what ftfy offers: it
        # would straighten quotes and change full-width characters.
        fixed = "\n".join(ftfy.fix_encoding(line) for line in text.split("\n"))
        found.mojibake |= fixed != text
        text = fixed
    return unicodedata.normalize("NFC", text)


def _without_tags(text: str) -> str:
    """The text of a page, a space where a block begins or ends."""
    # All but the tags is escaped, so that the parser sees as a tag only what is one here. It is
    # left to find where they end, and shown none that has content: it takes the square of the time
    # for deeply nested ones, and moves text out of tables.
    text = text.replace("&", "&amp;")
    pieces: list[str] = []
    end = 0
    for match in _TAG.finditer(text):
        pieces.append(text[end : match.start()].replace("<", "&lt;"))
        if match["block"] or match["inline"]:
            pieces.append(" <br" if match["block"] else "<wbr")
            pieces.append(text[match.end(match.lastgroup or 0) : match.end()])
        else:
            pieces += (" ", match[0])
        end = match.end()
    pieces.append(text[end:].replace("<", "&lt;"))
    page = "".join(pieces)
    for name in ("script", "style"):
        # One that is never closed would hide the rest of the text: a text about it, more likely.
        closed = page.lower().rfind(f"</{name}") + 1
        page = page[:closed] + re.sub(rf"(?i)<{name}\b[^<>]*>", " ", page[closed:])
    if not _selectolax():
        return _standard(page)
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(page)
    tree.strip_tags(["script", "style"])
    root = tree.root
    return root.text(separator="") if root is not None else ""


def _without_comments(text: str) -> str:
    pieces: list[str] = []
    end = 0
    while (start := text.find("<!--", end)) >= 0 and (close := text.find("-->", start + 4)) >= 0:
        pieces.append(text[end:start])
        end = close + 3
    return " ".join((*pieces, text[end:]))


class _Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(data)


def _standard(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    parser.close()
    return "".join(parser.pieces)


@functools.cache
def _selectolax() -> bool:
    try:
        import selectolax.lexbor  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _ftfy() -> Any:
    """The module, None where it is not installed; kept, because a failed import takes its time."""
    try:
        import ftfy
    except ImportError:
        return None
    return ftfy
