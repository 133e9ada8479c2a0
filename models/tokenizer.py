"""Builds the tokenizer of the shipped model: byte-level BPE learnt from books, with the keys of the tasks as whole words.

Why it looks as it does: a model of this size finds a record by its key when the key is one or two tokens at a fixed
place. So every adjective of the word lists is one token with its leading space (" torpid"), every noun one token with
its leading hyphen ("-kid"), every digit, every character of a UUID and every letter of a capitalised name its own
token, and pieces split the same alone and in context.

    python models/tokenizer.py --books BOOKS.jsonl.gz --out src/kvthaw/assets/model
"""

import argparse
import gzip
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HEX = "[0-9a-f]"
LAST = f"(?!{HEX})"  # a UUID's last group ends here
SEEN = "|".join(f"-{HEX}{{4}}-{HEX}{{{n}}}" if n else f"-{HEX}{{4}}-" for n in range(12))
PATTERN = "|".join(
    [
        # the fixed phrases between a record's key and its value
        r": REGISTER_CONTENT is <",
        r"REGISTER_CONTENT",
        r">\n",
        r'": "',
        r'",\n "',
        r'\{"',
        r'"\}',
        r" ?VAR(?= )",
        # UUIDs: one token a character
        rf"{HEX}(?={HEX}{{0,7}}(?:-{HEX}{{4}}){{0,3}}-{HEX}{{12}}{LAST})",
        rf"-(?={HEX}{{4}}(?:-{HEX}{{4}}){{0,2}}-{HEX}{{12}}{LAST})",
        rf"-(?={HEX}{{12}}{LAST})",
        rf"(?<={SEEN}){HEX}",
        rf" (?={HEX}{{8}}-{HEX}{{4}}-)",
        # capitals in a row: one token a letter
        r" (?=\p{Lu}{2})",
        r"\p{Lu}(?=\p{Lu})",
        r"(?<=\p{Lu})\p{Lu}(?!\p{Ll})",
        # words with their leading space or hyphen, digits alone, marks alone, blanks alone
        r"['’](?:s|t|re|ve|m|ll|d)(?!\p{L})",
        r"[ -]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]",
        r"\s",
    ]
)
BOS, EOS = "<|begin|>", "<|end|>"
# the tasks' fixed wording, every word and phrase of which becomes one token
WORDING = """: REGISTER_CONTENT is <REGISTER_CONTENT REGISTER_CONTENT>
 <": "",
 "{"a"} = VAR A
VAR A
Some
A
One
What
There
The
Below
Now
Tell
Extract
JSON
Key
Corresponding
Memorize
Question
Answer
Find
I
The secret access code of a room, account, badge, locker, ticket, serial or phone number. Its password, price, score and
weight has been written. Remember that the code for a box
Some special magic numbers are hidden within the following text. Make sure to memorize it. A special magic number uuid
I will quiz you about the uuids afterwards. One of the special magic words for A is: 1. What are all the special magic
numbers for A mentioned in the provided text? The special magic number for A mentioned in the provided text is
What is the word
There is an important info hidden inside a lot of irrelevant text. Find it and memorize them.
The pass key is 1. Remember it. 1 is the pass key. What is the pass key?
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a
'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding
<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of a
certain line index. Now the record start: line Now the record is over. Tell me what is the line? I need the number.
Extract the value corresponding to the specified key in the JSON object below. JSON data: Key: "a" Corresponding value:
Memorize and track the chain(s) of variable assignment hidden in the following text. Question: Find all variables that
are assigned the value 1 in the text above. Answer: According to the chain(s) of variable assignment in the text above,
1 variables are assgined the value 1, they are:
"""


def parts(words: list[str], lead: str) -> list[str]:
    """The pretokens of `words` in a key: the first with `lead`, what follows a hyphen or a space with that."""
    found: list[str] = []
    for word in words:
        piece = lead
        for char in word:
            if char in " -" and piece:
                found.append(piece)
                piece = ""
            piece += char
        found.append(piece)
    return [piece for piece in found if len(piece) > 1]


def byte_level(text: str) -> str:
    """`text` in the alphabet that byte-level BPE writes its vocabulary in."""
    return "".join(
        piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    )


def phrases() -> list[str]:
    """The pretokens of WORDING that are longer than a character."""
    cut = pre_tokenizers.Split(Regex(PATTERN), "isolated").pre_tokenize_str(WORDING)
    return [piece for piece, _ in cut if len(piece) > 1]


def build(texts: list[str], adjectives: list[str], nouns: list[str], size: int) -> Tokenizer:
    """Learns BPE so that the vocabulary, whole words and phrases included, has `size` entries."""
    whole = list(dict.fromkeys(byte_level(w) for w in phrases() + parts(adjectives, " ") + parts(nouns, "-")))
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[BOS, EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    ordered = sorted(learnt["vocab"], key=learnt["vocab"].get)
    base = 2 + 256
    merges = [tuple(m) for m in learnt["merges"]]
    # keep as many merges as leave room for the whole words that they do not make themselves
    keep = len(merges)
    while True:
        made = set(ordered[: base + keep])
        extra = [w for w in whole if w not in made]
        over = base + keep + len(extra) - size
        if over <= 0:
            break
        keep -= max(1, over // 2)
    vocab = {token: i for i, token in enumerate(ordered[: base + keep] + extra)}
    for i in range(len(vocab), size):
        vocab[f"<|unused{i}|>"] = i
    made_by = [m for m in merges if m[0] + m[1] in made and m[0] in made and m[1] in made]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=made_by, ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    start = [(BOS, vocab[BOS])]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=start)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def words(path: Path) -> list[str]:
    """One word a line, blank lines and stray spaces dropped."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    root = Path(__file__).parents[1]
    assets, words_of = root / "src" / "kvthaw" / "assets", root / "lab" / "assets"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=assets / "model")
    parser.add_argument("--size", type=int, default=10752)
    args = parser.parse_args()
    texts: list[str] = []
    total = 0
    with gzip.open(args.books, "rt", encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"][:200_000])
            total += len(texts[-1])
            if total > 20_000_000:
                break
    tokenizer = build(texts, words(words_of / "adjectives.txt"), words(words_of / "nouns.txt"), args.size)
    save(tokenizer, args.out)
    book = (assets / "book.txt").read_text(encoding="utf-8")
    print(tokenizer.get_vocab_size(), len(tokenizer.encode(book).ids), len(book))


if __name__ == "__main__":
    main()
