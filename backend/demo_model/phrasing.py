"""The wording of questions: variants, typing noise, and filler text that the model must learn to ignore.

Every function takes the random generator that it draws from, so that one seed determines the whole corpus.
"""

import json
import random
import re
from pathlib import Path

import yaml

_TEXTS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "phrasings.yaml").read_text(encoding="utf-8"))
LINES = {name: text.splitlines() for name, text in _TEXTS.items() if not name.endswith("_words")}
WORDS = {name.removesuffix("_words"): text.split() for name, text in _TEXTS.items() if name.endswith("_words")}

# Appended to questions, including the separator.
TAILS = [" Please.", ", please", ", please?", " Thanks!", " Thank you.", " I am curious.", " I'm new to this.", "!"]
TAILS += [" ...", "??", " :)", " It is for a talk.", " I need it for my work.", " I keep hearing about it."]


def line(rng: random.Random, name: str) -> str:
    """A line of the list `name` in phrasings.yaml."""
    return rng.choice(LINES[name])


def word(rng: random.Random, name: str) -> str:
    """A word of the list `name`_words in phrasings.yaml."""
    return rng.choice(WORDS[name])


def made_up_word(rng: random.Random) -> str:
    """A random word of two to four syllables."""
    return "".join(rng.choices(WORDS["syllables"], k=rng.randint(2, 4)))


def city(rng: random.Random) -> str:
    """A real city, or sometimes an invented name, so that the model must copy it."""
    return line(rng, "cities") if rng.random() < 0.85 else made_up_word(rng).capitalize()


def unknown_question(rng: random.Random, template: str) -> str:
    """A question outside the domain: a template with its slots filled at random."""
    noun = word(rng, "nouns")
    return template.format(
        a="an" if noun[0] in "aeiou" else "a",
        n=noun,
        n2=word(rng, "nouns"),
        adj=word(rng, "adjectives"),
        v=word(rng, "verbs"),
        c=city(rng),
        c2=city(rng),
        p=line(rng, "people"),
        w=made_up_word(rng),
        w2=made_up_word(rng),
        land=word(rng, "countries"),
        lang=word(rng, "languages"),
        f=line(rng, "foreign"),
        s=filler_sentence(rng),
        num=rng.randint(2, 5000),
        num2=rng.randint(2, 99),
        year=rng.randint(1200, 2030),
    )


def filler_sentence(rng: random.Random) -> str:
    """A line of text unrelated to any question: prose, a rule, a record, code or another script."""
    noun, other, verb = word(rng, "nouns"), word(rng, "nouns"), word(rng, "verbs")
    rule = f"{rng.choice(['Always', 'Never', 'First', 'Then', 'Do not'])} {verb} the {noun} before the {other}."
    match rng.randrange(11):
        case 0 | 1 | 2:
            return f"The {word(rng, 'adjectives')} {noun} is {word(rng, 'prepositions')} the {other}."
        case 3 | 4:
            return rule
        case 5:
            return f"{rng.randint(1, 40)}. {rule}"
        case 6:
            return json.dumps(
                {"id": f"{rng.getrandbits(48):012x}", noun: rng.randint(0, 999), other: made_up_word(rng)}
            )
        case 7:
            day = f"{rng.randint(2019, 2031)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
            return f"The date is {day}, ticket {rng.getrandbits(32):08x}."
        case 8:
            return f"def {noun}_{verb}({other}): return {other} + {rng.randint(0, 9)}"
        case 9:
            return f"{made_up_word(rng).capitalize()} {verb}s {made_up_word(rng)}."
        case _:
            return line(rng, "foreign")


def filler(rng: random.Random, sentences: int) -> str:
    """Several lines of filler text."""
    return "".join(filler_sentence(rng) + rng.choice([" ", " ", " ", "\n", "\n\n"]) for _ in range(sentences)).strip()


def typo(rng: random.Random, text: str) -> str:
    """Swaps, drops or doubles one letter inside a word of five letters or more."""
    long_words = list(re.finditer(r"[A-Za-z]{5,}", text))
    if not long_words:
        return text
    chosen = rng.choice(long_words)
    at = rng.randrange(chosen.start() + 1, chosen.end() - 1)
    here, following = text[at], text[at + 1]
    return text[:at] + rng.choice([following + here, following, here + here + following]) + text[at + 2 :]


def as_typed(rng: random.Random, question: str) -> str:
    """Varies a question as people type it: greeting, courtesy, case, punctuation, typing errors."""
    if rng.random() < 0.15:
        first_word = question.split(" ", 1)[0]
        if first_word[1:].islower() or len(first_word) == 1:
            question = question[0].lower() + question[1:]
        question = f"{line(rng, 'leads')} {question}"
    if rng.random() < 0.3:
        question = question.rstrip("?.!")
    if rng.random() < 0.1:
        question += rng.choice(TAILS)
    case = rng.random()
    if case < 0.25:
        question = question.lower()
    elif case < 0.29:
        question = question.upper()
    return typo(rng, question) if rng.random() < 0.08 else question
