"""LongBench's metrics, as its published code computes them (THUDM/LongBench, metrics.py). All give 0..1."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence

from kvthaw.errors import ConfigError

_PUNCTUATION = frozenset(string.punctuation)
_CHINESE = frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def overlap(predicted: Sequence[str], gold: Sequence[str]) -> float:
    """Return the F1 score of two bags of words, 0 if they share no word."""
    same = sum((Counter(predicted) & Counter(gold)).values())
    return 2 * same / (len(predicted) + len(gold)) if same else 0.0


def words(text: str) -> list[str]:
    """SQuAD's words: lower case, without punctuation and the articles."""
    bare = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def qa_f1(output: str, gold: str) -> float:
    """F1 over words."""
    return overlap(words(output), words(gold))


def qa_f1_zh(output: str, gold: str) -> float:
    """F1 over Chinese words, without punctuation."""
    return overlap(*(_bare(text) for text in (output, gold)))


def _bare(text: str) -> list[str]:
    bare = ("".join(c for c in "".join(word.lower().split()) if c not in _PUNCTUATION | _CHINESE) for word in _cut(text))
    return [word for word in bare if word]


def rouge_l(output: str, gold: str) -> float:
    """ROUGE-L's F over whole summaries, as the `rouge` package has it, which LongBench uses.

    Sentences end at full stops. The overlap is the set of words in the longest common subsequences of all pairs of
    sentences. Precision and recall divide it by the number of different words in either text. Blanks between two full stops
    are a sentence of one empty word there, and so they are here.
    """
    mine, theirs = (_sentences(text) for text in (output, gold))
    n, m = (len({word for sentence in text for word in sentence}) for text in (mine, theirs))
    if not n or not m:
        return 0.0
    united = {word for theirs_ in theirs for mine_ in mine for word in _common(theirs_, mine_)}
    precision, recall = len(united) / n, len(united) / m
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(output: str, gold: str) -> float:
    """ROUGE-L over Chinese words."""
    return rouge_l(*(" ".join(_cut(text)) for text in (output, gold)))


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(a: list[str], b: list[str]) -> list[str]:
    """Return the longest common subsequence of two sentences; of several, the one that skips words of `b` first, seen from the
    end."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if x == y else max(table[i - 1][j], table[i][j - 1])
    found, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def classification(output: str, gold: str, classes: Sequence[str]) -> float:
    """1 over how many classes the output names, if the right one is among them; parts of the right one's name do not count."""
    named = [name for name in classes if name in output]
    for name in named:  # published code removes while it goes, so the name after one removed is not looked at
        if name in gold and name != gold:
            named.remove(name)
    return 1 / len(named) if gold in named else 0.0


def count(output: str, gold: str) -> float:
    """Return the share of the output's numbers that are the right one."""
    numbers = re.findall(r"\d+", output)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def retrieval(output: str, gold: str) -> float:
    """Return the same for the number of a paragraph ("Paragraph 3", "段落3")."""
    which = re.search(r"(?:Paragraph |段落)(\d+)", gold)
    if which is None:
        raise ConfigError(f"answer is {gold!r}; it must name a paragraph by its number")
    return count(output, which.group(1))


def edit_similarity(output: str, gold: str) -> float:
    """Return the similarity of the first line of code to the right one: difflib's ratio in whole percent, as fuzzywuzzy
    without C."""
    lines = output.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(sign in line for sign in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, code, gold).ratio()) / 100 if code and gold else 0.0


def _cut(text: str) -> list[str]:
    try:
        import jieba
    except ImportError:
        raise ConfigError("Chinese text is cut into words by jieba: pip install jieba") from None
    return list(jieba.cut(text, cut_all=False))
