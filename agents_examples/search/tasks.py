"""A small world, and questions about it. `python -m agents_examples.search.tasks` writes `documents.txt`, which
describes it, and `tasks.jsonl`.

Who works for whom, and who lives where, is drawn at random: no model knows it, and documents have to be found.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

WORKERS = (
    *("Ada", "Alma", "Amir", "Anna", "Anton", "Arne", "Bella", "Ben", "Bruno", "Carla", "Cesar", "Clara"),
    *("Dario", "David", "Diana", "Edgar", "Elena", "Elias", "Emma", "Erik", "Eva", "Felix", "Fiona", "Frida"),
    *("Greta", "Gustav", "Hanna", "Hugo", "Ida", "Igor", "Irene", "Ivan", "Jakob", "Jana", "Jonas", "Julia"),
    *("Karin", "Karl", "Lara", "Lena", "Leo", "Linda", "Luca", "Lucy", "Marco", "Maria", "Max", "Mila"),
)
BOSSES = (
    *("Nadia", "Nils", "Nina", "Olga", "Oscar", "Otto", "Paula", "Peter"),
    *("Petra", "Rosa", "Sara", "Simon", "Tanja", "Tim", "Vera", "Viktor"),
)
CITIES = (
    *("Bergen", "Bilbao", "Cork", "Dublin", "Gdansk", "Krakow", "Lisbon", "Lyon"),
    *("Madrid", "Naples", "Nice", "Oslo", "Porto", "Rome", "Turin", "Warsaw"),
)
COUNTRIES = ("Brazil", "Chile", "Egypt", "Ghana", "India", "Japan", "Kenya", "Peru")
"""Which country a city is in is drawn as well."""
NAMES = (*WORKERS, *BOSSES, *CITIES, *COUNTRIES)


class Kind(StrEnum):
    """What is asked of a person: the documents to find are one for `HOME`, two for the next two, and three."""

    HOME = "home"
    COUNTRY = "country"
    BOSS_HOME = "boss_home"
    BOSS_COUNTRY = "boss_country"


_TEXTS = {
    Kind.HOME: "Where does {} live?",
    Kind.COUNTRY: "In which country does {} live?",
    Kind.BOSS_HOME: "Where does the boss of {} live?",
    Kind.BOSS_COUNTRY: "In which country does the boss of {} live?",
}


@dataclass(frozen=True, kw_only=True)
class World:
    """The boss of each worker, the city of each person, and the country of each city."""

    bosses: Mapping[str, str]
    cities: Mapping[str, str]
    countries: Mapping[str, str]

    def documents(self) -> list[str]:
        """Return all sentences about the world."""
        return [
            *(_employed(worker, boss) for worker, boss in self.bosses.items()),
            *(_lives(person, city) for person, city in self.cities.items()),
            *(_lies(city, country) for city, country in self.countries.items()),
        ]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Words to search for, and the one document that has them all."""

    words: str
    document: str
    found: str
    """The last name of the document, which leads to the next search or is the answer."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, and the searches that lead to its answer, in order."""

    text: str
    searches: tuple[Search, ...]

    @property
    def answer(self) -> str:
        return self.searches[-1].found


def random_world(rng: random.Random) -> World:
    return World(
        bosses={worker: rng.choice(BOSSES) for worker in WORKERS},
        cities={person: rng.choice(CITIES) for person in (*WORKERS, *BOSSES)},
        countries={city: rng.choice(COUNTRIES) for city in CITIES},
    )


def question(world: World, kind: Kind, worker: str) -> Question:
    """Return a question about a worker."""
    searches = []
    person = worker
    if kind in {Kind.BOSS_HOME, Kind.BOSS_COUNTRY}:
        person = world.bosses[worker]
        searches.append(Search(words=f"{worker} works", document=_employed(worker, person), found=person))
    city = world.cities[person]
    searches.append(Search(words=f"{person} lives", document=_lives(person, city), found=city))
    if kind in {Kind.COUNTRY, Kind.BOSS_COUNTRY}:
        country = world.countries[city]
        searches.append(Search(words=f"{city} lies", document=_lies(city, country), found=country))
    return Question(text=_TEXTS[kind].format(worker), searches=tuple(searches))


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer is the expected name and nothing else; case and a full stop do not count."""
    return answer.strip().removesuffix(".").casefold() == expected.casefold()


def _employed(worker: str, boss: str) -> str:
    return f"{worker} works for {boss}."


def _lives(person: str, city: str) -> str:
    return f"{person} lives in {city}."


def _lies(city: str, country: str) -> str:
    return f"{city} lies in {country}."


def write_tasks(path: Path) -> None:
    """Write a question of each kind about each worker as tasks, one JSON object per line, in random order. Write the
    documents beside them, one per line."""
    rng = random.Random(0)
    world = random_world(rng)
    asked = [question(world, kind, worker) for kind in Kind for worker in WORKERS]
    rng.shuffle(asked)
    lines = [
        json.dumps({"id": one.text, "question": one.text, "answer": one.answer, "hops": len(one.searches)})
        for one in asked
    ]
    path.write_text("\n".join(lines) + "\n")
    documents = world.documents()
    rng.shuffle(documents)
    path.with_name("documents.txt").write_text("\n".join(documents) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
