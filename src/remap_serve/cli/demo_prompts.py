# SPDX-License-Identifier: Apache-2.0
"""The demo's 48 requests: code, prose, questions and long contexts, written for this project.

They arrive together. Kinds are interleaved and lengths vary (about 30 to 900 prompt tokens, 24 to 200 new tokens), so
that requests start, grow and finish at different times, as traffic does.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROMPTS", "Prompt"]


@dataclass(frozen=True)
class Prompt:
    """One user message. `max_tokens` bounds the answer; the model may end it earlier."""

    kind: str  # "code", "prose", "question" or "long"
    text: str
    max_tokens: int


LIGHTHOUSE = """\
The light on Corran Head stands on a shelf of black rock, four miles from the village by water and eleven by the road
that the county stopped mending after the war. It was built in the summer of 1868 by thirty-one men from the quarries
inland, who lived in tents on the turf above and lost two of their number to the sea and one to drink. The tower is
ninety-four feet high. The walls are six feet thick at the base and a little under two at the lantern, and in a westerly
gale they hum, a low note that the keepers' children learned to sleep through and never afterwards slept well without.

There were three keepers at a time, and each had a watch of four hours. The man on watch wound the clockwork every forty
minutes, for the lens turned on a bath of mercury and was driven by a weight that fell down the hollow middle of the
stair. He trimmed the wick, noted the barometer, wrote down every vessel that passed and the direction of the wind, and
at the end of his watch he rang a bell that was fixed to the wall of the next man's bedroom. It is said that in
seventy years the bell was never rung late. The logs, which are kept in the county library in nineteen leather volumes,
do not contradict this, but it was of course the keepers who wrote them.

The worst night was the ninth of January 1901. The steamer Halcyon, carrying slate and forty passengers from the
northern ports, lost her rudder off the skerries a little after two in the morning. Thomas Arkell had the watch. He saw
her lights swing the wrong way and understood at once. He woke the others, and while the second keeper burned blue
flares from the gallery, Arkell and his daughter Ruth, who was nineteen, launched the station's boat from the lee side.
They made three journeys. On the third the boat was thrown against the landing and stove in, and they waded the last
yards with a child each. Thirty-six people were brought to the tower and lay that night in the store room among the oil
casks, wrapped in signal flags and sacking. Four were never found.

Ruth Arkell was sent a silver medal by the insurers and a letter by the owners. She gave the medal to her brother, and
the letter she used, for years, to mark her place in the tide tables. Asked about the night when she was old, she said
only that the boat had pulled to the left, that it had always pulled to the left, and that she had told them so in the
autumn.

The clockwork was taken out in 1938 and an electric motor put in. The last keepers left in 1984. The lamp is now the
size of a thumb and is minded from an office two hundred miles away by someone who has never seen it, and it has not
failed either."""

OUTAGE = """\
Incident report 2147: orders delayed in the northern region

Summary. On Tuesday between 09:42 and 13:05 about 61,000 orders in the northern region were accepted but not passed on
to the warehouses. No order was lost and no customer was charged twice. The delay was caused by a queue that had stopped
draining, and it lasted as long as it did because the alarm that should have told us was watching the wrong queue.

Timeline. At 09:30 the nightly export, which was late, finished and freed the replica that it had been reading. At 09:42
the dispatcher of the northern region lost its connection to the database for eleven seconds while the replica was
promoted. It connected again, but to the old address, which now answered reads and refused writes. From then on every
message that the dispatcher took from the queue failed, was put back, and was taken again. At 09:58 the number of
messages waiting passed ten thousand. The alarm for this is set at five thousand, but it had been copied from the
southern region in March and still named the southern queue. At 11:20 a warehouse manager telephoned to ask why the
morning had been so quiet. At 11:34 the person on call found the dispatcher busy and the logs full of the word
"retrying", and at first took the retries for the cause. At 12:10 the dispatcher was restarted; it came back with the
same address from its cache and nothing changed. At 12:41 a second engineer compared the addresses of two dispatchers
side by side and saw the difference. At 12:48 the cache was cleared and the queue began to drain. At 13:05 it was empty.

Causes. First, the dispatcher keeps the address of the database for as long as the process lives, and on restart reads
it from a file that the process itself had written. Secondly, a write that is refused because the server only reads is
treated like a network failure, which is tried again for ever, and not like a mistake, which is reported. Thirdly, the
alarm named the wrong queue, and no one had ever seen it fire.

What went well. Messages were put back and not dropped, so that nothing had to be repaired by hand. The second engineer
was called early and not out of politeness late. The warehouse had the telephone number of a person.

What we change. The dispatcher will ask for the address again after any refused write, and will stop with an error after
twenty refusals in a row. Each alarm will be fired on purpose once a month, by a job that fails if nobody is told. The
export will no longer read from the replica that is next in line to be promoted. The file in which the address was kept
will go. Owners and dates are in the table of the tracker; the last of them is due on the thirtieth."""

GARDEN = """\
Notes for whoever has the garden after us

The ground slopes to the south-east and is heavier than it looks. Under a spade's depth of brown loam there is yellow
clay, and under the clay, at about four feet, a bed of gravel that carries water from the field above. In a wet spring
the lowest bed stands under water until the middle of April, and nothing that you plant there before May will thank you.
The top bed, along the wall, is two weeks ahead of the rest. We have had lettuces from it in March and lost tomatoes in
it in June, because the wall gives the heat back at night and the blight likes that as much as the fruit does.

The old pear against the shed is a Catillac. It is a cooking pear and will break your teeth in October. Pick it on the
first dry day of November, lay the fruit in the loft so that no two touch, and stew it in February with a little wine;
then you will see why anybody ever planted it. The apple beside the gate was sold to us as a Cox and is not. It bears
every second year, so heavily that the long branch must be propped, and the year between it sulks. Prune neither in
summer. The plums want nothing from you at all except that you should be quicker than the wasps.

Water comes from the butt first, then from the well, and from the tap only when you have been away. The well has never
gone dry, not even in the summer when the river did, but its water is cold enough to check young beans: let it stand in
the cans until evening. The pump leathers are spare sheets cut with the kitchen scissors; there is one left in the
drawer with the string.

Slugs: go out with a lamp at ten. Everything else that you will be told to do is for the comfort of the person telling
you. Mice take the first sowing of peas every year, so sow twice as many and do not mind it. The hedgehog lives under
the second compost heap, which is why the second compost heap has not been turned since we came.

Onions go in at the equinox and come out when two tops in three have fallen. Garlic goes in on the shortest day, as
everyone says, though we have tried a month either way and could not tell the difference. Save your own beans: the
purple ones by the door came with the house, nobody knows their name, and they have never once failed. We leave you a
jar of them on the sill. Please sow them."""

LEDGER = '''\
from collections import OrderedDict, defaultdict


class Ledger:
    """Accounts, and transfers between them. Amounts are whole cents; an account never goes below its limit."""

    def __init__(self):
        self._balance = defaultdict(int)
        self._limit = {}
        self._journal = []
        self._held = OrderedDict()

    def open(self, name, limit=0):
        if name in self._limit:
            raise ValueError(f"account {name!r} is open already")
        if limit > 0:
            raise ValueError("a limit is zero or negative: the lowest balance that is allowed")
        self._limit[name] = limit

    def balance(self, name):
        return self._balance[name]

    def available(self, name):
        held = sum(h["amount"] for h in self._held.values() if h["source"] == name)
        return self._balance[name] - self._limit[name] - held

    def deposit(self, name, amount):
        self._check(name, amount)
        self._balance[name] += amount
        self._journal.append(("deposit", None, name, amount))

    def transfer(self, source, target, amount):
        self._check(source, amount)
        self._check(target, amount)
        if amount > self.available(source):
            raise ValueError(f"{source!r} has {self.available(source)} available, not {amount}")
        self._balance[source] -= amount
        self._balance[target] += amount
        self._journal.append(("transfer", source, target, amount))

    def hold(self, key, source, target, amount):
        self._check(source, amount)
        self._check(target, amount)
        if key in self._held:
            return self._held[key]
        if amount > self.available(source):
            raise ValueError(f"{source!r} has {self.available(source)} available, not {amount}")
        self._held[key] = {"source": source, "target": target, "amount": amount}
        return self._held[key]

    def settle(self, key):
        hold = self._held.pop(key)
        self.transfer(hold["source"], hold["target"], hold["amount"])

    def cancel(self, key):
        self._held.pop(key, None)

    def statement(self, name):
        running = 0
        for kind, source, target, amount in self._journal:
            if name not in (source, target):
                continue
            running += amount if target == name else -amount
            yield kind, amount, running

    def total(self):
        return sum(self._balance.values())

    def _check(self, name, amount):
        if name not in self._limit:
            raise KeyError(name)
        if not isinstance(amount, int) or amount <= 0:
            raise ValueError("amounts are positive whole cents")'''


def _about(document: str, task: str, paragraphs: int | None = None) -> str:
    """The task, then the document or its first paragraphs."""
    text = document if paragraphs is None else "\n\n".join(document.split("\n\n")[:paragraphs])
    return f"{task}\n\n{text}"


_CODE = (
    ("Write a Python function that returns the n-th Fibonacci number without recursion. Add a docstring.", 120),
    ("Write a SQL query that finds the three customers with the highest total of orders in 2023.", 96),
    ("Explain what this does, line by line:\n\nfor i in range(len(a) - 1, 0, -1):\n    j = random.randint(0, i)\n"
     "    a[i], a[j] = a[j], a[i]", 160),
    ("Write a C function that reverses a string in place.", 128),
    ("Write a bash one-liner that counts the lines of all .py files under the current folder.", 48),
    ("Find the bug:\n\ndef mean(values):\n    total = 0\n    for v in values:\n        total += v\n"
     "        return total / len(values)", 140),
    ("Write a Python class `Stack` with push, pop and peek. Popping an empty stack raises IndexError.", 180),
    ("Give me a regular expression that matches a date such as 2024-07-19, and explain its parts.", 150),
    ("Translate to JavaScript:\n\ndef evens(xs):\n    return [x * x for x in xs if x % 2 == 0]", 80),
    ("Write unit tests with pytest for a function `slugify(text)` that makes lower-case words joined by hyphens.", 200),
    ("What is the difference between a process and a thread? Show a small Python example of each.", 200),
    ("Write a binary search over a sorted list in Python. It returns the index, or -1.", 136),
)  # fmt: skip

_PROSE = (
    ("Write a short story about a clock that runs backwards in a railway station.", 200),
    ("Describe a market in the early morning, in one paragraph.", 144),
    ("Write a letter to a friend who has moved to another country.", 188),
    ("Write four lines of verse about rain on a tin roof.", 56),
    ("Write the opening of a mystery novel. It begins in a library after closing time.", 196),
    ("Write a polite note to a neighbour whose dog barks at night.", 112),
    ("Describe the taste of a lemon to somebody who has never had one.", 104),
    ("Write a dialogue between a teacher and a pupil about why the sky is blue.", 192),
    ("Write a recipe for vegetable soup in the voice of a grandmother.", 184),
    ("Write a product description for a wooden chair that lasts a hundred years.", 120),
    ("Tell me a fable with a fox, a crow and a moral at the end.", 172),
    ("Write a speech of six sentences for the opening of a small museum.", 132),
)

_QUESTION = (
    ("What is the capital of France?", 24),
    ("Why do we have seasons?", 110),
    ("How many legs does a spider have, and is a spider an insect?", 64),
    ("Explain photosynthesis to a child.", 128),
    ("What is the boiling point of water at sea level, in Celsius and in Fahrenheit?", 40),
    ("List five uses of a paper clip.", 100),
    ("Who was Ada Lovelace, and what is she remembered for?", 140),
    ("What is 17 times 6? Show the steps.", 72),
    ("What are the advantages and disadvantages of electric cars?", 200),
    ("Name the planets of the solar system in order from the sun.", 88),
    ("How does a bicycle stay upright when it moves?", 156),
    ("What is inflation, and whom does it hurt?", 148),
)

_LONG = (
    (_about(LIGHTHOUSE, "Summarise this text in five sentences."), 160),
    (_about(OUTAGE, "List the three causes of this incident, and for each the change that answers it."), 180),
    (_about(LEDGER, "Explain what this class does and name one weakness of its design."), 200),
    (_about(GARDEN, "Make a calendar from these notes: month by month, what is to be done."), 200),
    (_about(LIGHTHOUSE, "Who was Ruth Arkell? Answer from the text only."), 90),
    (_about(OUTAGE, "Write a message of three sentences to the customers about this incident."), 120),
    (_about(LEDGER, "Write a docstring for each public method of this class."), 196),
    (_about(GARDEN, "What do these notes say about water, and about pears?", 4), 110),
    (_about(LIGHTHOUSE, "What did the keeper on watch have to do? Give a list.", 2), 130),
    (_about(OUTAGE, "When did it begin, when did it end, and who noticed first?", 3), 76),
    (_about(GARDEN, "Which plants are named here, and what is said of each?", 3), 170),
    (
        _about(f"{LIGHTHOUSE}\n\n* * *\n\n{GARDEN[:1200]}", "Two texts follow. What do their writers have in common?"),
        200,
    ),
)

_KINDS = (("question", _QUESTION), ("code", _CODE), ("prose", _PROSE), ("long", _LONG))

PROMPTS: tuple[Prompt, ...] = tuple(Prompt(kind, *group[i]) for i in range(len(_QUESTION)) for kind, group in _KINDS)
