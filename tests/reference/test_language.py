"""The generated language: p is exact, and the sampler draws from it."""

import itertools
import math
import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from reference.data.grammar import Derivation, Description, Grammar, Sentence
from reference.data.language import LANGUAGES, Language, language

# "and", "the" and "of" as words on trial: a parser that searches for them would go wrong.
TINY_GRAMMAR = Grammar(
    names=("Ann", "and", "of"),
    things=("the", "lamp"),
    adjectives=("red", "and"),
    verbs=("took", "the"),
    places=("home", "of"),
    num_people=1,
    max_sentences=2,
)
TINY = {
    people: Language(replace(TINY_GRAMMAR, num_people=people), skew=1.3, stop=0.4, keep=0.7)
    for people in (1, 2)
}


def every_derivation(grammar: Grammar) -> list[Derivation]:
    """All choices combined, written down without the sampler and without the probabilities."""
    sizes = map(len, (grammar.adjectives, grammar.things, grammar.names))
    descriptions = [Description(*choice) for choice in itertools.product(*map(range, sizes))]
    sentences = [
        Sentence(*choice)
        for choice in itertools.product(
            range(grammar.num_people), range(len(grammar.verbs)), range(len(grammar.places))
        )
    ]
    return [
        Derivation(people, said)
        for people in itertools.product(descriptions, repeat=grammar.num_people)
        if len({person.name for person in people}) == grammar.num_people
        for num_sentences in range(1, grammar.max_sentences + 1)
        for said in itertools.product(sentences, repeat=num_sentences)
    ]


@pytest.fixture(scope="module", params=[1, 2])
def tiny(request: pytest.FixtureRequest) -> tuple[Language, list[bytes]]:
    tiny = TINY[request.param]
    return tiny, [tiny.grammar.render(one).text for one in every_derivation(tiny.grammar)]


def test_no_text_has_two_derivations(tiny):
    tiny, texts = tiny
    assert len(texts) == (240 if tiny.grammar.num_people == 1 else 6912)
    assert len(set(texts)) == len(texts)


def test_parse_finds_the_derivation_of_every_text():
    for tiny in TINY.values():
        for derivation in every_derivation(tiny.grammar):
            assert tiny.grammar.parse(tiny.grammar.render(derivation).text) == derivation


def test_probabilities_of_all_documents_sum_to_one(tiny):
    tiny, texts = tiny
    assert math.fsum(math.exp(-tiny.nats(text)) for text in texts) == pytest.approx(1, abs=1e-12)


def test_entropy_is_the_mean_of_minus_log_p(tiny):
    tiny, texts = tiny
    all_nats = [tiny.nats(text) for text in texts]
    mean = math.fsum(nats * math.exp(-nats) for nats in all_nats)
    assert tiny.entropy_nats == pytest.approx(mean, rel=1e-12)


def test_recall_cost_is_the_entropy_of_what_is_recalled(tiny):
    tiny, texts = tiny
    joint: Counter = Counter()  # by person, thing and name of one sentence
    for text in texts:
        derivation = tiny.grammar.parse(text)
        for sentence in derivation.sentences:
            said = derivation.people[sentence.person]
            joint[sentence.person, said.thing, said.name] += math.exp(-tiny.nats(text))
    given: Counter = Counter()  # what a model that sees the sentence alone knows without recall
    for (person, _, name), p in joint.items():
        given[(person, name) if tiny.grammar.num_people == 2 else person] += p
    recall = -sum(
        p * math.log(p / given[(person, name) if tiny.grammar.num_people == 2 else person])
        for (person, _, name), p in joint.items()
    )
    assert tiny.recall_nats == pytest.approx(recall, rel=1e-12)


def test_sampler_draws_every_document_with_its_probability(tiny):
    tiny, texts = tiny
    rng = random.Random(1)
    num_draws = 40_000
    counts = Counter(tiny.sample(rng).text for _ in range(num_draws))
    assert set(counts) <= set(texts)
    expected = {text: num_draws * math.exp(-tiny.nats(text)) for text in texts}
    # Chi-square over the documents that are expected often enough, the others as one.
    often = [text for text in texts if expected[text] >= 10]
    rest = num_draws - sum(expected[text] for text in often)
    got_rest = num_draws - sum(counts[text] for text in often)
    chi_square = sum((counts[text] - expected[text]) ** 2 / expected[text] for text in often)
    if rest >= 10:
        chi_square += (got_rest - rest) ** 2 / rest
    degrees = len(often)
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_hand_computed_document():
    tiny = TINY[1]
    # skew 1.3: with two choices the likelier one has 1 / (1 + 2 ** -1.3).
    first, second = 1 / (1 + 2**-1.3), 2**-1.3 / (1 + 2**-1.3)
    weights = [1.0, 2**-1.3, 3**-1.3]
    # "red" first; "the" after "red"; "Ann" after "the"; "took" after "Ann"; "of" after "the"; end.
    p = first * first * weights[0] / sum(weights) * first * second * 0.4
    assert tiny.nats(b"The red the of Ann. Ann took the the of.") == pytest.approx(-math.log(p))


@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_sampled_entropy_agrees_with_the_closed_form(difficulty):
    chosen = language(difficulty)
    rng = random.Random(2)
    nats = [chosen.nats(chosen.sample(rng).text) for _ in range(20_000)]
    standard_error = statistics.stdev(nats) / math.sqrt(len(nats))
    assert abs(statistics.fmean(nats) - chosen.entropy_nats) < 4 * standard_error


def test_hard_costs_more_than_easy():
    assert language("hard").entropy_nats > 1.5 * language("easy").entropy_nats


@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_documents_fit_their_bound_and_begin_alike(difficulty):
    chosen = language(difficulty)
    rng = random.Random(3)
    texts = [chosen.sample(rng).text for _ in range(5_000)]
    assert max(map(len, texts)) <= chosen.max_bytes
    assert {text[:1] for text in texts} == {b"T"}


def test_longest_document_is_within_the_bound():
    for tiny in TINY.values():
        longest = max(len(tiny.grammar.render(d).text) for d in every_derivation(tiny.grammar))
        assert longest <= tiny.max_bytes


@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_recall_spans_mark_words_that_stand_at_the_start(difficulty):
    chosen = language(difficulty)
    rng = random.Random(4)
    for _ in range(200):
        document = chosen.sample(rng)
        opening, _, rest = document.text.partition(b".")
        num_sentences = rest.count(b".")
        per_sentence = 2 if chosen.grammar.num_people == 1 else 1
        assert len(document.recall_spans) == per_sentence * num_sentences
        for start, stop in document.recall_spans:
            assert start > len(opening)
            assert document.text[start:stop] in opening.split(b" ")


def test_a_recalled_word_costs_nothing_and_no_other_is_possible():
    tiny = TINY[1]
    one = tiny.nats(b"The red lamp of Ann. Ann took the lamp home.")
    two = tiny.nats(b"The red lamp of Ann. Ann took the lamp home. Ann took the lamp home.")
    verb = tiny.verb_table[0][0]
    place = tiny.place_table[1][0]
    assert two - one == pytest.approx(-math.log(0.6 / 0.4 * verb * place))
    with pytest.raises(ValueError, match="not a document"):
        tiny.nats(b"The red lamp of Ann. Ann took the the home.")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"The red lamp of Ann.",
        b"The red lamp of Ann. Ann took the lamp home",
        b"The red lamp of Ann. Ann took the lamp home. ",
        b"The red lamp of Ann.  Ann took the lamp home.",
        b"the red lamp of Ann. Ann took the lamp home.",
        b"The red lamp of Bob. Bob took the lamp home.",
        b"The red lamp of Ann. of took the lamp home.",
        b"The red lamp of Ann. Ann took the lamp home." * 2,
        b"The red lamp of Ann." + b" Ann took the lamp home." * 3,
        "The red lamp of Ann. Ann took the lamp hom\u00e9.".encode(),
    ],
)
def test_a_text_outside_the_language_is_refused(text):
    with pytest.raises(ValueError, match="not a document"):
        TINY[1].nats(text)


def test_two_people_of_one_name_are_refused():
    with pytest.raises(ValueError, match="not a document"):
        TINY[2].nats(b"The red lamp of Ann and the red the of Ann. Ann took the lamp home.")


def test_same_seed_same_documents():
    draws = [[LANGUAGES["hard"].sample(random.Random(7)) for _ in range(3)] for _ in range(2)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"names": ()}, "names"),
        ({"verbs": ("took", "took")}, "verbs"),
        ({"places": ("at home",)}, "places"),
        ({"things": ("",)}, "things"),
        ({"num_people": 0}, "num_people"),
        ({"num_people": 3}, "num_people"),
        ({"names": ("Ann",), "num_people": 2}, "num_people"),
        ({"max_sentences": 0}, "max_sentences"),
    ],
)
def test_an_impossible_grammar_names_its_field(change, field):
    with pytest.raises(ValueError, match=field):
        replace(TINY_GRAMMAR, **change)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"stop": 0.0}, "stop"), ({"keep": 1.0}, "keep"), ({"skew": math.nan}, "skew")],
)
def test_an_impossible_probability_names_its_field(change, field):
    with pytest.raises(ValueError, match=field):
        replace(TINY[1], **change)


def test_unknown_difficulty_names_the_known_ones():
    with pytest.raises(ValueError, match="easy, hard"):
        language("medium")
