"""Check how the pages read: reading grade, passive voice, length of sentences, length of pages.

    python docs/prose.py README.md docs

Code, tables and headings count only for the length of a page. The grade is that of Flesch and Kincaid: years of school.
"""

import pathlib
import re
import sys

import textstat

GRADE = 8.0
SENTENCE, LONGEST_SENTENCE = 16.0, 32  # words: on average, at most
SITE, PAGE = "docs", 800  # words of each page of the site, at most
PASSIVE, PASSIVE_SENTENCES = 0.2, 2  # sentences in the passive: their share, or as many on a page of less than ten

# The rule of Vale's write-good.Passive, in our own lines: no maintained Python package counts passives.
IRREGULAR = (
    "become begun bent bought bound broken brought built burnt caught chosen cut dealt done drawn driven fed felt "
    "forbidden forgotten found frozen given gone ground grown held hidden hit kept known laid led left lent let lost "
    "made meant met paid put read run said seen sent set shown shut spent split spread sold taken taught thought told "
    "understood won worn written"
)
PARTICIPLE = rf"(?:\w+ed|{'|'.join(IRREGULAR.split())})"
ADVERB = r"(?:not|also|only|then|still|never|always|therefore|again|both|all|\w+ly)"
IN_PASSIVE = re.compile(rf"\b(?:am|are|is|was|were|be|been|being) (?:{ADVERB} )?{PARTICIPLE}\b", re.IGNORECASE)


def main(paths: list[str]) -> int:
    """Print what is too hard or too long, and return 1 if anything is."""
    files = [file for path in map(pathlib.Path, paths) for file in ([path] if path.is_file() else path.rglob("*.md"))]
    problems = [f"{file}: {problem}" for file in sorted(files) for problem in problems_of(file)]
    print(*problems, sep="\n")
    return int(bool(problems))


def problems_of(file: pathlib.Path) -> list[str]:
    page = file.read_text(encoding="utf-8")
    problems = []
    if SITE in file.parts and (words := len(page.split())) > PAGE:
        problems.append(f"{words} words, at most {PAGE}")
    sentences = sentences_of(page)
    lengths = [len(sentence.split()) for sentence in sentences]
    problems += [
        f"a sentence of {length} words, at most {LONGEST_SENTENCE}: {sentence}"
        for length, sentence in zip(lengths, sentences, strict=True)
        if length > LONGEST_SENTENCE
    ]
    if sentences and (mean := sum(lengths) / len(lengths)) > SENTENCE:
        problems.append(f"{mean:.1f} words in a sentence on average, at most {SENTENCE}")
    if sentences and (grade := textstat.flesch_kincaid_grade(". ".join(sentences))) > GRADE:
        problems.append(f"grade {grade:.1f}, at most {GRADE}")
    passive = [sentence for sentence in sentences if IN_PASSIVE.search(sentence)]
    if len(passive) > max(PASSIVE_SENTENCES, PASSIVE * len(sentences)):
        share = f"{len(passive)} of {len(sentences)} sentences"
        problems.append(f"{share} in the passive, at most {PASSIVE:.0%}:\n  " + "\n  ".join(passive))
    return problems


def sentences_of(page: str) -> list[str]:
    """Return the sentences of a page's prose, without their last marks; code and numbers are one short word."""
    page = re.sub(r"^ *```.*?^ *```$|<!--.*?-->|<[^>]+>", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^ *(\||#|===|!!!|:::|\[[^]]+\]:).*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"!\[[^]]*\]\([^)]*\)|^ *> ?", "", page, flags=re.MULTILINE)
    page = re.sub(r"\[([^]]*)\](\([^)]*\)|\[[^]]*\])", r"\1", page)
    page = re.sub(r"`[^`]+`|\b\d[\d,.]*(?<!\.)|https?:\S+", "x", page)
    blocks = re.split(r"\n\s*\n|^ *(?:\*|\d+\.|-) ", page, flags=re.MULTILINE)
    split = (re.split(r"[.!?][)*\"”]*(?:\s+|$)", " ".join(block.split())) for block in blocks)
    return [sentence for sentences in split for sentence in sentences if len(sentence.split()) > 2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
