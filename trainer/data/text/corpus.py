"""Where texts come from: files, the prose that comes with Python, and templates."""

from collections import Counter

import numpy as np

from trainer.data.text.files import load_corpus
from trainer.data.text.texts import Corpus
from trainer.errors import DataError

__all__ = ["Corpus", "bundled_prose", "load_corpus", "made_reviews"]

# The topics of the bundled prose that are classes of their own; the rest share one.
_TOPICS = 8


def bundled_prose() -> Corpus:
    """The paragraphs of Python's own language reference, as ``help()`` shows it.

    The class of a paragraph is its topic, for the eight topics with the most paragraphs, else
    "other". Some 2,000 paragraphs, none twice, a few more or less in each Python. Raises
    `DataError` for a Python without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python comes without the prose of its help (pydoc_data.topics): name a file of "
            "texts with --text.path"
        ) from None
    paragraphs = {
        topic: [part for text in topics[topic].split("\n\n") if (part := text.strip())]
        for topic in sorted(topics)
    }
    # Topics contain others, down to the letter: a paragraph belongs to the largest it is in.
    topic_of: dict[str, str] = {}
    for topic in sorted(paragraphs, key=lambda topic: (-len(paragraphs[topic]), topic)):
        for paragraph in paragraphs[topic]:
            topic_of.setdefault(paragraph, topic)
    largest = sorted(topic for topic, _ in Counter(topic_of.values()).most_common(_TOPICS))
    label = {topic: index for index, topic in enumerate(largest)}
    return Corpus(
        list(topic_of),
        np.array([label.get(topic, len(largest)) for topic in topic_of.values()], dtype=np.int64),
        (*largest, "other"),
        "the prose of Python's help",
    )


_OPENINGS = (
    "I watched this with my sister on a rainy evening.",
    "We don't go to the cinema often, so this had to be worth it.",
    "Everybody at work talks about this one.",
    "A café near the theatre is the best part of the opening scene.",
    "我在飞机上看了这部电影。",
    "It runs for 2 hours & 10 minutes.",
)
_VERDICTS = (
    (
        "The plot is dull and the acting is worse.",
        "I'd have left early, but the doors were shut: 1/5.",
        "Such a waste of a good cast 😞.",
        "Boring, predictable and far too long.",
        "The budget was high, the result is poor (2 < 3, as they say).",
    ),
    (
        "The plot is clever and the acting is superb.",
        "I'd see it again tomorrow: 5/5.",
        "What a delightful cast 😀.",
        "Moving, surprising and never too long.",
        "The budget was low, the result is great (3 > 2, as they say).",
    ),
)
_CLOSINGS = (
    "The music stays with you — that's all I can say.",
    "Bring your own popcorn.",
    "The naïve hero reminded me of an old friend.",
    "See it in the original language, if you can.",
)


def made_reviews(count: int, seed: int) -> Corpus:
    """`count` reviews from templates, class 0 "negative" or 1 "positive", with the dirt of the web.

    About half carry tags, scripts and entities, a tenth are UTF-8 read as Latin-1, one in
    twenty-five is empty or only tags, one in fifteen repeats an earlier one. The words of the
    verdict tell the class, so that a model can learn it. The same arguments give the same texts.
    """
    chance = np.random.default_rng(seed)
    texts: list[str] = []
    labels: list[int] = []
    for _ in range(count):
        fate = chance.random()
        if fate < 0.04:
            texts.append(str(chance.choice(["", "   ", "<br /><br />", "<p>&nbsp;</p>"])))
            labels.append(int(chance.integers(2)))
            continue
        if fate < 0.11 and texts:
            earlier = int(chance.integers(len(texts)))
            texts.append(texts[earlier])
            labels.append(labels[earlier])
            continue
        label = int(chance.integers(2))
        verdicts = chance.permutation(_VERDICTS[label])[: int(chance.integers(1, 4))]
        sentences = [
            str(chance.choice(_OPENINGS)),
            *(str(verdict) for verdict in verdicts),
            str(chance.choice(_CLOSINGS)),
            f"Screen {int(chance.integers(1, 30))}, row {int(chance.integers(1, 40))}.",
        ]
        texts.append(_pollute(sentences, chance))
        labels.append(label)
    return Corpus(texts, np.array(labels, dtype=np.int64), ("negative", "positive"), "made reviews")


def _pollute(sentences: list[str], chance: np.random.Generator) -> str:
    tags, mojibake = chance.random() < 0.5, chance.random() < 0.1
    if tags:
        sentences = [
            sentence.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;")
            for sentence in sentences
        ]
        sentences[0] = f'<p class="lead">{sentences[0]}</p>'
        if chance.random() < 0.3:
            sentences.append("<script>track('review < 5');</script>")
    text = ("<br /><br />" if tags else " ").join(sentences)
    return text.encode().decode("cp1252", errors="replace") if mojibake else text
