"""Small tasks that SmolLM2-135M-Instruct solves with few-shot prompts only: items and rows of each.

    category    carrot -> vegetable             a word list, nothing of the answer stands in the question
    past        swim -> swam                    a word list, regular and irregular verbs
    sums        a word problem -> its number    templates filled at random, with a worked solution

A row holds `prompt` (the bare question), `completion`, `right` (what an answer must be, or of sums the number that it
must end with), `domain` (the task), `shots` (the task's examples as a text), `both` (half of them and half of another
task's) and, of sums, `solution`, which is their completion too. Training and held-out rows share no question, and the
examples are of neither.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

CATEGORIES = {
    "animal": "dog cat horse cow sheep goat pig lion tiger bear wolf fox rabbit mouse rat elephant giraffe zebra "
    "monkey camel deer donkey squirrel whale dolphin shark eagle owl parrot penguin duck goose chicken "
    "turtle snake lizard frog kangaroo koala panda leopard cheetah hippo rhino otter seal crow pigeon "
    "sparrow",
    "fruit": "apple banana orange grape pear peach plum cherry mango papaya pineapple lemon lime strawberry "
    "raspberry blueberry blackberry melon watermelon kiwi apricot fig grapefruit coconut pomegranate "
    "cranberry tangerine",
    "vegetable": "carrot potato onion garlic cabbage broccoli spinach lettuce celery cucumber cauliflower turnip "
    "radish beet leek asparagus zucchini eggplant kale pea pumpkin artichoke",
    "color": "red blue green yellow purple white black brown pink grey violet crimson turquoise maroon beige",
    "country": "France Germany Italy Spain Portugal Poland Greece Turkey Egypt Kenya Nigeria Morocco India China "
    "Japan Thailand Vietnam Indonesia Australia Canada Mexico Brazil Argentina Chile Peru Colombia Cuba "
    "Norway Sweden Finland Denmark Austria Switzerland Belgium Hungary Romania Ukraine Russia Iran Iraq "
    "Israel Pakistan Nepal Ireland Iceland",
    "city": "Paris London Berlin Madrid Rome Lisbon Vienna Athens Moscow Tokyo Beijing Delhi Mumbai Cairo Sydney "
    "Toronto Chicago Boston Seattle Dallas Miami Barcelona Munich Milan Prague Warsaw Budapest Dublin "
    "Oslo Stockholm Helsinki Amsterdam Brussels Zurich Geneva Istanbul Bangkok Manila Seoul Shanghai Lima "
    "Bogota Houston Denver",
    "vehicle": "car truck bus bicycle motorcycle train airplane helicopter boat ship tractor van scooter taxi tram "
    "submarine ambulance canoe ferry yacht",
    "instrument": "piano guitar violin drum flute trumpet cello clarinet saxophone harp trombone banjo accordion oboe "
    "tuba ukulele mandolin xylophone",
    "furniture": "chair table sofa bed desk couch bookcase wardrobe dresser stool bench cupboard armchair",
    "job": "doctor nurse teacher lawyer engineer farmer baker plumber carpenter electrician pilot chef dentist "
    "firefighter journalist architect accountant butcher tailor surgeon librarian",
}
PAST = (
    "go went, see saw, eat ate, drink drank, swim swam, run ran, sing sang, ring rang, begin began, come came, "
    "become became, give gave, take took, make made, break broke, speak spoke, steal stole, choose chose, freeze "
    "froze, write wrote, drive drove, ride rode, rise rose, know knew, grow grew, throw threw, blow blew, fly "
    "flew, draw drew, think thought, buy bought, bring brought, fight fought, catch caught, teach taught, sleep "
    "slept, keep kept, feel felt, leave left, meet met, lead led, feed fed, build built, send sent, spend spent, "
    "lend lent, lose lost, find found, hold held, stand stood, understand understood, tell told, sell sold, say "
    "said, pay paid, hear heard, sit sat, win won, get got, forget forgot, fall fell, wear wore, tear tore, bite "
    "bit, hide hid, shake shook, wake woke, walk walked, talk talked, play played, work worked, jump jumped, look "
    "looked, ask asked, help helped, open opened, close closed, live lived, love loved, hate hated, like liked, "
    "use used, move moved, want wanted, need needed, wait waited, start started, end ended, visit visited, paint "
    "painted, plant planted, cook cooked, clean cleaned, wash washed, watch watched, touch touched, reach "
    "reached, push pushed, pull pulled, kick kicked, laugh laughed, smile smiled, cry cried, try tried, study "
    "studied, carry carried, marry married, copy copied, stop stopped, plan planned, drop dropped, shop shopped, "
    "clap clapped, rain rained, snow snowed, call called, fill filled, kill killed, fix fixed, mix mixed, miss "
    "missed, kiss kissed, guess guessed, dance danced, change changed, arrive arrived, believe believed, receive "
    "received, save saved, serve served, share shared, decide decided, hope hoped, invite invited, agree agreed, "
    "turn turned, learn learned, burn burned, show showed, follow followed, answer answered, listen listened, "
    "happen happened, travel traveled, offer offered, order ordered, wonder wondered, remember remembered, "
    "discover discovered, allow allowed, enjoy enjoyed, stay stayed, pray prayed, park parked, bark barked, pick "
    "picked, lock locked, knock knocked, check checked, thank thanked, print printed, count counted, point "
    "pointed, repeat repeated, treat treated, create created, hunt hunted, melt melted, add added, land landed, "
    "mend mended, attend attended, defend defended, explain explained, complain complained, join joined, return "
    "returned, cover covered, enter entered, suffer suffered, climb climbed, rob robbed, hug hugged, beg begged, "
    "worry worried, hurry hurried, bury buried, deny denied, reply replied, apply applied, raise raised, promise "
    "promised"
)
PEOPLE = "Maria Tom Anna Peter Sofia Ben Clara Luis Emma Omar Julia Max Nina Paul Rosa Sam Lena Hugo Ivy Karl"
THINGS = "apples books coins pens stamps eggs cards shells"


class Item(NamedTuple):
    """A question, its answer, and of some tasks a worked solution."""

    prompt: str
    completion: str
    solution: str = ""


def _categories(draw: random.Random) -> list[Item]:
    return [Item(word, name) for name, words in CATEGORIES.items() for word in words.split()]


def _past(draw: random.Random) -> list[Item]:
    return [Item(*pair.split()) for pair in PAST.split(", ")]


def _sums(draw: random.Random) -> list[Item]:
    found = {}
    while len(found) < 700:
        name, other = draw.sample(PEOPLE.split(), 2)
        thing, a, b, c = draw.choice(THINGS.split()), draw.randint(6, 30), draw.randint(2, 9), draw.randint(2, 5)
        more, less = a + b, a - c
        item = draw.choice(
            (
                Item(
                    f"{name} has {a} {thing} and gets {b} more from {other}. How many {thing} does {name} have now?",
                    f"{more}",
                    f"{a} + {b} = {more}. The answer is {more}.",
                ),
                Item(
                    f"{name} has {a} {thing} and gives {c} to {other}. How many {thing} does {name} have left?",
                    f"{less}",
                    f"{a} - {c} = {less}. The answer is {less}.",
                ),
                Item(
                    f"{name} has {a} {thing}, gives {c} to {other} and then finds {b} more. How many {thing} does "
                    f"{name} have now?",
                    f"{less + b}",
                    f"{a} - {c} = {less}, and {less} + {b} = {less + b}. The answer is {less + b}.",
                ),
                Item(
                    f"{name} buys {c} bags with {b} {thing} in each bag. How many {thing} does {name} buy?",
                    f"{b * c}",
                    f"{c} x {b} = {b * c}. The answer is {b * c}.",
                ),
            )
        )
        found[item.prompt] = item
    return list(found.values())


class Task(NamedTuple):
    """Generation and prompting of a task's items.

    Attributes:
        items: all of them.
        question, answer: what stands before an item's question and after it.
        held_out: how many are held out.
        longest: tokens of an answer, at most.
        ends_with_number: the right answer is the last number that is said.
    """

    items: Callable[[random.Random], list[Item]]
    question: str
    answer: str
    held_out: int
    longest: int = 8
    ends_with_number: bool = False

    def asked(self, item: Item) -> str:
        """The bare question."""
        return f"{self.question}: {item.prompt}\n{self.answer}:"

    def is_right(self, answer: str, right: str) -> bool:
        """Return whether an answer is correct: its first line, or in long answers its last number."""
        line = answer.strip().partition("\n")[0].strip().rstrip(".")
        if self.ends_with_number:
            return (re.findall(r"\d+", line) or [""])[-1] == right
        return line.lower() == right.lower()

    def shown(self, items: Sequence[Item]) -> str:
        """Items with their answers: the examples that a prompt begins with."""
        return "\n\n".join(f"{self.asked(item)} {item.completion}" for item in items)


TASKS = {
    "category": Task(_categories, "Word", "Kind", 120),
    "past": Task(_past, "Verb", "Past tense", 90),
    "sums": Task(_sums, "Question", "Answer", 300, longest=28, ends_with_number=True),
}
SHOTS = 8


def rows_of(name: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to learn from, and rows that are held out, the same in every process."""
    task, draw = TASKS[name], random.Random(name)
    items = task.items(draw)
    draw.shuffle(items)
    shots = task.shown(items[:SHOTS])
    both = "\n\n".join(TASKS[other].shown(_first(other)) for other in MIXED)
    rows = [
        {
            "prompt": task.asked(item),
            "completion": f" {item.solution or item.completion}",
            "right": item.completion,
            "domain": name,
            "shots": shots,
            "both": both,
            "solution": f"Solution: {item.solution}",
        }
        for item in items[SHOTS:]
    ]
    return rows[task.held_out :], rows[: task.held_out]


MIXED = ("category", "past")  # the domains of two teachers; a mixed prompt holds examples of both


def _first(name: str) -> list[Item]:
    """Half of a task's examples, so that a mixed prompt has as many as one of a single task."""
    draw = random.Random(name)
    items = TASKS[name].items(draw)
    draw.shuffle(items)
    return items[: SHOTS // 2]
