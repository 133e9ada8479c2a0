"""LongBench's metrics against values worked out by hand, and ROUGE-L against the package that LongBench uses."""

from __future__ import annotations

import random

import pytest

from kvthaw.errors import ConfigError
from lab.evaluate.published import text_metrics as metrics


def test_f1_is_over_words_without_articles_and_punctuation() -> None:
    assert metrics.qa_f1("The Grand-Canal!", "a grandcanal") == 1.0
    # cat sat here | cat sat on mat: 2 in common, precision 2/3, recall 1/2
    assert metrics.qa_f1("the cat sat here", "A cat sat on the mat.") == pytest.approx(2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2))
    assert metrics.qa_f1("cat cat cat", "cat") == pytest.approx(0.5)  # of three the gold answer has one
    assert metrics.qa_f1("dog", "cat") == metrics.qa_f1("", "cat") == 0.0


def test_rouge_l_unites_what_sentences_share() -> None:
    # gold "a b c d e"; "a b x" shares a b, "a c e" shares a c e: united a b c e, 4 of 5 words; the output has a b x c e: 4 of 5
    assert metrics.rouge_l("a b x.a c e", "a b c d e") == pytest.approx(0.8)
    assert metrics.rouge_l("b. a", "a b") == pytest.approx(1.0)  # a sentence each
    assert metrics.rouge_l("b a", "a b") == pytest.approx(0.5)  # order counts
    assert metrics.rouge_l("a a a a", "a b") == pytest.approx(2 / 3)  # different words count: 1 of 1 and 1 of 2
    assert metrics.rouge_l("y x. y", "x y") == pytest.approx(
        0.5
    )  # of y and x, as long, the one that skips fewer of the output's
    assert metrics.rouge_l("", "a") == metrics.rouge_l("a", "...") == 0.0


def test_rouge_l_is_that_of_the_package_longbench_uses() -> None:
    theirs = pytest.importorskip("rouge").Rouge()
    rng = random.Random(0)
    for _ in range(200):
        pair = [" ".join(rng.choice(["a", "b", "c", "d", "e.", ". ", "\n"]) for _ in range(rng.randint(1, 20))) for _ in "ab"]
        try:
            expected = theirs.get_scores([pair[0]], [pair[1]])[0]["rouge-l"]["f"]
        except ValueError:  # no sentence
            expected = 0.0
        assert metrics.rouge_l(*pair) == pytest.approx(expected), pair


def test_classification_shares_the_point_among_the_classes_named() -> None:
    classes = ("Food", "Date", "Order, rank", "rank")
    assert metrics.classification("Type: Food", "Food", classes) == 1.0
    assert metrics.classification("Food or Date", "Food", classes) == 0.5
    assert metrics.classification("Order, rank", "Order, rank", classes) == 1.0  # "rank" is part of the right one's name
    assert metrics.classification("Date", "Food", classes) == metrics.classification("", "Food", classes) == 0.0


def test_counting_and_retrieval_take_the_share_of_right_numbers() -> None:
    assert metrics.count("There are 7.", "7") == 1.0
    assert metrics.count("7 or 8 or 17", "7") == pytest.approx(1 / 3)
    assert metrics.count("seven", "7") == 0.0
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == metrics.retrieval("段落3", "段落3") == 1.0
    assert metrics.retrieval("Paragraph 1 and 12", "Paragraph 12") == 0.5
    with pytest.raises(ConfigError, match="'12'; it must name a paragraph"):
        metrics.retrieval("12", "12")


def test_edit_similarity_is_of_the_first_line_of_code() -> None:
    assert metrics.edit_similarity("\n```python\n# a comment\nreturn x\nmore", "return x") == 1.0
    # "abcd" and "bcde" share "bcd": 2 * 3 / 8
    assert metrics.edit_similarity("abcd", "bcde") == 0.75
    assert metrics.edit_similarity("# only a comment", "return x") == 0.0


def test_chinese_words_need_a_package_that_cuts_them() -> None:
    pytest.importorskip("jieba")
    assert metrics.qa_f1_zh("北京。", "北京") == 1.0
