"""A generated language in which the probability of every document is known exactly.

`reference.data.grammar` has the texts. What each choice depends on stands after the bar:

    adjective | the name before it; the first description has no word before it
    thing     | the adjective before it
    name      | the thing before it, and not the other person's name
    name      | in a sentence: the person last named with probability `keep`, else the other one
    verb      | the name before it
    place     | the thing before it
    end       | after a sentence with probability `stop`; after `max_sentences` for certain

Choice j after choice i has probability proportional to (1 + (j - 3 i) mod n) ** -skew, n being the
number of choices: fixed and skewed, in another order after each word. A recalled word has
probability one. It costs nothing to a model that attends to the document's start, and a model that
does not attend pays for it at every sentence.

A model that predicts each byte after the first and then the end of the document is asked for
exactly -log p, since all documents begin with the same byte. On documents that it has not seen, the
mean of (model - true) is in expectation at least 0 (Gibbs' inequality). Documents are independent
draws: removing duplicates would change p.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from reference.data.grammar import Derivation, Description, Grammar, LanguageDocument, Sentence

Row = tuple[float, ...]  # the probabilities of all choices of one kind
Table = tuple[Row, ...]  # a row for each choice before


@dataclass(frozen=True)
class Language:
    """A grammar with its probabilities. Raises ValueError for a probability outside (0, 1)."""

    grammar: Grammar
    skew: float
    stop: float
    keep: float

    def __post_init__(self) -> None:
        for field in ("stop", "keep"):
            if not 0.0 < getattr(self, field) < 1.0:
                raise ValueError(f"{field} {getattr(self, field)} is not between 0 and 1")
        if not math.isfinite(self.skew):
            raise ValueError(f"skew {self.skew} must be finite")

    @cached_property
    def adjective_table(self) -> Table:
        """Row 0 is for the first description; row 1 + i follows name i."""
        return _skewed(1 + len(self.grammar.names), len(self.grammar.adjectives), self.skew)

    @cached_property
    def thing_table(self) -> Table:
        return _skewed(len(self.grammar.adjectives), len(self.grammar.things), self.skew)

    @cached_property
    def name_table(self) -> Table:
        return _skewed(len(self.grammar.things), len(self.grammar.names), self.skew)

    @cached_property
    def verb_table(self) -> Table:
        return _skewed(len(self.grammar.names), len(self.grammar.verbs), self.skew)

    @cached_property
    def place_table(self) -> Table:
        return _skewed(len(self.grammar.things), len(self.grammar.places), self.skew)

    @property
    def max_bytes(self) -> int:
        """No document has more bytes. With the end it takes one token more."""
        return self.grammar.max_bytes

    def sample(self, rng: random.Random) -> LanguageDocument:
        """One document, drawn from p."""
        people: list[Description] = []
        before = 0
        for _ in range(self.grammar.num_people):
            adjective = _choose(rng, self.adjective_table[before])
            thing = _choose(rng, self.thing_table[adjective])
            name = _choose(rng, _without(self.name_table[thing], [one.name for one in people]))
            people.append(Description(adjective, thing, name))
            before = 1 + name
        sentences: list[Sentence] = []
        person = len(people) - 1
        while not sentences or rng.random() >= self.stop:
            if len(people) == 2 and rng.random() >= self.keep:
                person = 1 - person
            verb = _choose(rng, self.verb_table[people[person].name])
            place = _choose(rng, self.place_table[people[person].thing])
            sentences.append(Sentence(person, verb, place))
            if len(sentences) == self.grammar.max_sentences:
                break
        return self.grammar.render(Derivation(tuple(people), tuple(sentences)))

    def nats(self, text: bytes) -> float:
        """-log p(text) in nats, from the text alone: nothing that the sampler drew is looked at.

        Raises ValueError if the text is not a document of the language: its p is 0.
        """
        derivation = self.grammar.parse(text)
        factors: list[float] = []
        before = 0
        for number, one in enumerate(derivation.people):
            names = self.name_table[one.thing]
            taken = math.fsum(names[earlier.name] for earlier in derivation.people[:number])
            factors.append(self.adjective_table[before][one.adjective])
            factors.append(self.thing_table[one.adjective][one.thing])
            factors.append(names[one.name] / (1.0 - taken))
            before = 1 + one.name
        last_named = len(derivation.people) - 1
        for sentence in derivation.sentences:
            person = derivation.people[sentence.person]
            if len(derivation.people) == 2:
                factors.append(self.keep if sentence.person == last_named else 1.0 - self.keep)
            factors.append(self.verb_table[person.name][sentence.verb])
            factors.append(self.place_table[person.thing][sentence.place])
            last_named = sentence.person
        num_sentences = len(derivation.sentences)
        factors += [1.0 - self.stop] * (num_sentences - 1)
        if num_sentences < self.grammar.max_sentences:
            factors.append(self.stop)
        return -math.fsum(map(math.log, factors))

    @cached_property
    def entropy_nats(self) -> float:
        """The mean of -log p over all documents, in closed form.

        The chain rule: the entropy of each choice, weighted by how often it is made. The verb
        depends on the name alone and the place on the thing alone, so each person's marginal
        over (thing, name) is enough.
        """
        opening, people = self._people()
        costs = []
        for person in people:
            cost = sum(
                p * (_entropy(self.verb_table[name]) + _entropy(self.place_table[thing]))
                for (thing, name), p in person.items()
            )
            if len(people) == 2:
                cost += _entropy((self.keep, 1.0 - self.keep))
            costs.append(cost)
        num_ends = sum((1.0 - self.stop) ** n for n in range(self.grammar.max_sentences - 1))
        ends = num_ends * _entropy((self.stop, 1.0 - self.stop))
        return opening + self._mean_over_sentences(costs) + ends

    @cached_property
    def recall_nats(self) -> float:
        """What a document's recalled words cost a model that sees one sentence at a time: the mean
        in nats, at least. They are H(thing, name) a sentence with one person; with two people the
        name is no recalled word and H(thing | name) is left.
        """
        costs = []
        for person in self._people()[1]:
            cost = _entropy(tuple(person.values()))
            if self.grammar.num_people == 2:
                cost -= _entropy(_names(person))
            costs.append(cost)
        return self._mean_over_sentences(costs)

    def _mean_over_sentences(self, costs: Sequence[float]) -> float:
        """The mean of a document's cost, if a sentence costs what its person says."""
        total, p_said, p_last = 0.0, 1.0, 1.0  # p_last: the last person is named
        for _ in range(self.grammar.max_sentences):
            if len(costs) == 2:
                p_last = p_last * self.keep + (1.0 - p_last) * (1.0 - self.keep)
            total += p_said * (p_last * costs[-1] + (1.0 - p_last) * costs[0])
            p_said *= 1.0 - self.stop
        return total

    def _people(self) -> tuple[float, list[dict[tuple[int, int], float]]]:
        """The entropy of the opening; for each person the probability of each (thing, name)."""
        opening, first = self._describe(before=0, taken=[])
        if self.grammar.num_people == 1:
            return opening, [first]
        second: dict[tuple[int, int], float] = {}
        for name, p_name in enumerate(_names(first)):
            cost, after = self._describe(before=1 + name, taken=[name])
            opening += p_name * cost
            for pair, p in after.items():
                second[pair] = second.get(pair, 0.0) + p_name * p
        return opening, [first, second]

    def _describe(
        self, before: int, taken: list[int]
    ) -> tuple[float, dict[tuple[int, int], float]]:
        """The entropy of one description, and the probability of each (thing, name)."""
        adjectives = self.adjective_table[before]
        cost = _entropy(adjectives)
        cost += math.fsum(p * _entropy(self.thing_table[a]) for a, p in enumerate(adjectives))
        pairs: dict[tuple[int, int], float] = {}
        for thing in range(len(self.grammar.things)):
            p_thing = math.fsum(p * self.thing_table[a][thing] for a, p in enumerate(adjectives))
            names = _without(self.name_table[thing], taken)
            cost += p_thing * _entropy(names)
            pairs.update({(thing, name): p_thing * p for name, p in enumerate(names)})
        return cost, pairs


def _skewed(num_before: int, num_choices: int, skew: float) -> Table:
    weights = [(1 + rank) ** -skew for rank in range(num_choices)]
    return tuple(
        tuple(
            weights[(j - 3 * before) % num_choices] / math.fsum(weights) for j in range(num_choices)
        )
        for before in range(num_before)
    )


def _without(row: Row, taken: list[int]) -> Row:
    """The row conditioned on none of `taken`."""
    free = [0.0 if choice in taken else p for choice, p in enumerate(row)]
    return tuple(p / math.fsum(free) for p in free)


def _choose(rng: random.Random, row: Row) -> int:
    """An index, drawn with the row's probabilities; an index of probability 0 is never drawn."""
    edges = list(accumulate(row))
    return bisect_right(edges, rng.random() * edges[-1])


def _names(person: dict[tuple[int, int], float]) -> Row:
    """The marginal of the name, of a probability by (thing, name)."""
    num_names = 1 + max(name for _, name in person)
    return tuple(
        sum(p for (_, other), p in person.items() if other == name) for name in range(num_names)
    )


def _entropy(row: Row) -> float:
    return -sum(p * math.log(p) for p in row if p > 0.0)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words("Ann Bob Cleo Dora Emil Finn Gus Hugo Ines Jon Kim Lars Mia Nora Otto Pia")
_THINGS = _words("lamp boat drum coat bell rope map ring vase kite rug flute clock cup fork pipe")
_ADJECTIVES = _words("red old wet tiny blue heavy green long")
_VERBS = _words("took sold hid lost kept drew left mended")
_PLACES = _words("home away inside north uphill ashore today again")

LANGUAGES = {
    "easy": Language(
        Grammar(
            names=_NAMES[:8],
            things=_THINGS[:8],
            adjectives=_ADJECTIVES[:4],
            verbs=_VERBS[:4],
            places=_PLACES[:4],
            num_people=1,
            max_sentences=3,
        ),
        skew=1.0,
        stop=0.4,
        keep=0.5,
    ),
    "hard": Language(
        Grammar(
            names=_NAMES,
            things=_THINGS,
            adjectives=_ADJECTIVES,
            verbs=_VERBS,
            places=_PLACES,
            num_people=2,
            max_sentences=4,
        ),
        skew=1.5,
        stop=0.3,
        keep=0.6,
    ),
}


def language(difficulty: str) -> Language:
    """A language by its difficulty; ValueError for another word.

    "easy": one person, at most 103 bytes. "hard": two people, at most 172 bytes; a recalled thing
    has to be found by its owner's name.
    """
    if difficulty not in LANGUAGES:
        raise ValueError(f"no difficulty {difficulty!r}; there are {', '.join(LANGUAGES)}")
    return LANGUAGES[difficulty]
