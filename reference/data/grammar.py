"""The texts of the generated language: which there are, and the one derivation of each.

    document    = "The " description [ " and the " description ] "." sentence { sentence }
    description = adjective " " thing " of " name
    sentence    = " " name " " verb " the " thing " " place "."

A document has `num_people` descriptions, one or two, of different names, and at most
`max_sentences` sentences. The thing of a sentence belongs to the person whom the sentence names: it
is recalled from the description and is no choice. With one person the name is recalled too.

Every choice stands at its own place in the text, so two derivations never give the same text.
Every document begins with the same byte.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Description:
    """`adjective thing of name`, as indices into the word classes."""

    adjective: int
    thing: int
    name: int


@dataclass(frozen=True)
class Sentence:
    """`name verb the thing place`; person is the index of the description with the name."""

    person: int
    verb: int
    place: int


@dataclass(frozen=True)
class Derivation:
    """Every choice that makes one document."""

    people: tuple[Description, ...]
    sentences: tuple[Sentence, ...]


@dataclass(frozen=True)
class LanguageDocument:
    """A document's bytes; `recall_spans` are the [start, stop) bytes of its recalled words."""

    text: bytes
    recall_spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Grammar:
    """The word classes.

    Raises ValueError for an empty class, a word that is twice in its class or not a run of ASCII
    letters, other than one or two people with a name for each, or no sentence: a document would be
    ambiguous or impossible.
    """

    names: tuple[str, ...]
    things: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]
    places: tuple[str, ...]
    num_people: int
    max_sentences: int

    def __post_init__(self) -> None:
        for field in ("names", "things", "adjectives", "verbs", "places"):
            words = getattr(self, field)
            if not words or len(set(words)) != len(words):
                raise ValueError(f"{field} must hold at least one word and none twice, got {words}")
            for word in words:
                if not (word.isascii() and word.isalpha()):
                    raise ValueError(f"{field}: {word!r} is not a run of ASCII letters")
        if not 1 <= self.num_people <= min(2, len(self.names)):
            raise ValueError(f"num_people {self.num_people} must be 1 or 2, with a name for each")
        if self.max_sentences < 1:
            raise ValueError(f"max_sentences {self.max_sentences} must be at least 1")

    @property
    def max_bytes(self) -> int:
        """No document has more bytes: every word is counted as its class's longest."""
        classes = (self.adjectives, self.things, self.names, self.verbs, self.places)
        adjective, thing, name, verb, place = (max(map(len, words)) for words in classes)
        opening = self.num_people * (len("The   of ") + adjective + thing + name) + len(".")
        opening += (self.num_people - 1) * len(" and ")
        return opening + self.max_sentences * (len("   the  .") + name + verb + thing + place)

    def render(self, derivation: Derivation) -> LanguageDocument:
        """The document of a derivation."""
        descriptions = (
            f"{self.adjectives[one.adjective]} {self.things[one.thing]} of {self.names[one.name]}"
            for one in derivation.people
        )
        text = "The " + " and the ".join(descriptions) + "."
        spans: list[tuple[int, int]] = []
        for sentence in derivation.sentences:
            person = derivation.people[sentence.person]
            name, thing = self.names[person.name], self.things[person.thing]
            if self.num_people == 1:
                spans.append((len(text) + 1, len(text) + 1 + len(name)))
            text += f" {name} {self.verbs[sentence.verb]} the "
            spans.append((len(text), len(text) + len(thing)))
            text += f"{thing} {self.places[sentence.place]}."
        return LanguageDocument(text.encode("ascii"), tuple(spans))

    def parse(self, text: bytes) -> Derivation:
        """The derivation of a document. Raises ValueError if there is none."""
        try:
            derivation = self._read(text.decode("ascii"))
        except (ValueError, IndexError) as error:
            raise ValueError(f"{text!r} is not a document of this language: {error}") from error
        names = {person.name for person in derivation.people}
        if (
            len(names) != self.num_people
            or not 1 <= len(derivation.sentences) <= self.max_sentences
            or self.render(derivation).text != text
        ):
            raise ValueError(f"{text!r} is not a document of this language")
        return derivation

    def _read(self, text: str) -> Derivation:
        """Reads each choice at its place. What is between them is left to the caller."""
        opening, *sentences = text.split(".")
        words = opening.split(" ")
        people = tuple(
            Description(
                self.adjectives.index(words[start]),
                self.things.index(words[start + 1]),
                self.names.index(words[start + 3]),
            )
            for start in range(1, 6 * self.num_people, 6)  # "The A T of N and the A T of N"
        )
        names = [self.names[person.name] for person in people]
        said = []
        for sentence in sentences[:-1]:
            _, name, verb, _, _, place = sentence.split(" ")
            person = names.index(name)
            said.append(Sentence(person, self.verbs.index(verb), self.places.index(place)))
        return Derivation(people, tuple(said))
