#!/usr/bin/env python
"""Writes data/corpus: conversations made by a program from a seed (arithmetic, sorting, tables, quotations, code, free
text), whose answers can be checked. `make corpus` runs this, from the root.

A task is a function of a source of random choices that returns one prompt and its answer, both with `[one|two]` groups
that `spin` resolves."""

import ast
import json
import random
import re
import string
import zlib
from pathlib import Path


def spin(rng: random.Random, text: str) -> str:
    """Resolve every `[a|b|…]` group of a text to one of its members, innermost first. Brackets without a bar are left
    alone."""
    while found := re.search(r"\[([^\[\]]*\|[^\[\]]*)\]", text):
        text = text[: found.start()] + rng.choice(found[1].split("|")) + text[found.end() :]
    return text


words = str.split  # a text to its words
ANIMALS = words("fox owl hare goose badger mouse otter cat heron pony")
NAMES = words("Ada Ben Cleo Dora Finn Gus Hana Ivo Juno Kit Lena Milo Nora Otto Pia Rosa")
PLACES = words("harbour mill forest market station garden library bridge orchard tower")
THINGS = words("lantern map kite drum letter key basket clock boat coat")
FOODS = words("apples bread cheese dates eggs figs grapes honey jam kale lemons milk nuts olives pears rice")
QUALITIES = words("old small quiet bright cold green narrow busy pale tall")
TRAITS = words("kind patient clever shy brave hungry lazy polite")


def addition(rng: random.Random) -> tuple[str, str]:
    "A two-digit sum, tens and ones apart."
    a, b = rng.randint(11, 69), rng.randint(11, 69)
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    prompt = (
        f"[What is {a} + {b}?|Add {a} and {b}.|Work out {a} + {b} step by step.|I need the "
        f"sum of {a} and {b}.|A [shop|farm|school] has {a} [pens|bags|chairs] and gets {b} "
        "more. How many is that?]"
    )
    answer = (
        f"[Split|Break up|Take apart] both numbers: {a} = {a // 10 * 10} + {a % 10} and {b} = "
        f"{b // 10 * 10} + {b % 10}. [The tens give|For the tens we have|Tens first:] "
        f"{a // 10 * 10} + {b // 10 * 10} = {tens}, [the ones|and the ones] {a % 10} + "
        f"{b % 10} = {ones}. [The sum is|That makes|Altogether it is] {tens} + {ones} = "
        f"{tens + ones}."
    )
    return prompt, answer


def subtraction(rng: random.Random) -> tuple[str, str]:
    "A two-digit difference that is never negative, taken away in two steps."
    b, a = sorted((rng.randint(11, 79), rng.randint(11, 79)))
    tens, ones = b // 10 * 10, b % 10
    prompt = (
        f"[What is {a} - {b}?|Take {b} away from {a}.|Work out {a} - {b} step by step.|"
        f"There were {a} [birds|boats|coins] and {b} [are gone|were lost]. How many are left?]"
    )
    answer = (
        f"[Take away|Subtract|Remove] {b} in two steps, because {b} = {tens} + {ones}. "
        f"[First|To begin with], {a} - {tens} = {a - tens}. [Then|After that], {a - tens} - "
        f"{ones} = {a - b}. [What is left is|The difference is|So the answer is] {a - b}."
    )
    return prompt, answer


def multiplication(rng: random.Random) -> tuple[str, str]:
    "One digit times two digits, by splitting off the tens."
    a, b = rng.randint(2, 6), rng.randint(11, 39)
    tens, ones = b // 10 * 10, b % 10
    prompt = (
        f"[What is {a} times {b}?|Multiply {b} by {a}.|Work out {a} × {b}.|"
        f"[Ada|Ben|Rosa|Otto] buys {a} boxes with {b} [nails|cups|stamps] in each. How many in "
        "all?]"
    )
    answer = (
        f"[Split|Break|Cut] {b} into {tens} and {ones}. {a} × {tens} = {a * tens} and {a} × "
        f"{ones} = {a * ones}. [Add the two parts|Together they make|The total is]: "
        f"{a * tens} + {a * ones} = {a * b}."
    )
    return prompt, answer


def sorted_numbers(rng: random.Random) -> tuple[str, str]:
    "Three to six two-digit numbers with different tens, in rising or falling order."
    tens = rng.sample(range(1, 10), rng.randint(3, 6))
    numbers = [10 * t + rng.randint(0, 9) for t in tens]
    down = rng.random() < 0.4
    ordered = sorted(numbers, reverse=down)
    prompt = (
        f"[Sort these numbers|Put these numbers in order|Order this list], "
        f"[{'largest' if down else 'smallest'} first|{'falling' if down else 'rising'}]: "
        f"{', '.join(map(str, numbers))}."
    )
    answer = (
        f"[The list has|There are|I count] {len(numbers)} numbers. [The smallest is|The least "
        f"is] {min(numbers)} and the [largest|greatest] is {max(numbers)}, so [the list "
        "begins and ends there|the rest lies between]. [In order|Sorted|The result]: "
        f"{', '.join(map(str, ordered))}."
    )
    return prompt, answer


def sorted_words(rng: random.Random) -> tuple[str, str]:
    "Three to six words with different first letters, in the order of the alphabet."
    by_letter = {}
    for word in ANIMALS + PLACES + THINGS + FOODS:
        by_letter.setdefault(word[0], []).append(word)
    chosen = [rng.choice(by_letter[letter]) for letter in rng.sample(sorted(by_letter), rng.randint(3, 6))]
    prompt = (
        "[Put these words in alphabetical order|Sort these words from a to z|Alphabetise "
        f"this list]: {', '.join(chosen)}."
    )
    answer = (
        f"[The list has|There are|I count] {len(chosen)} words. [Compare|Look at|Go by] the "
        f"first letters: {', '.join(sorted(w[0] for w in chosen))}. [That gives the order|So "
        f"the words are|Written out, that is] {', '.join(sorted(chosen))}."
    )
    return prompt, answer


def table(rng: random.Random, n: int) -> list[tuple[str, str]]:
    "A small table in the first prompt, and `n` questions that look up a cell or a row."
    foods = rng.sample(FOODS, rng.randint(3, 5))
    columns = rng.sample(["price", "stock", "weight"], 2)
    values = {column: dict(zip(foods, rng.sample(range(2, 99), len(foods)))) for column in columns}
    rows = "\n".join(f"{food} | {values[columns[0]][food]} | {values[columns[1]][food]}" for food in foods)
    turns = []
    for food in rng.sample(foods, n):
        place = rng.randrange(2)
        column = columns[place]
        row = f"{food} | {values[columns[0]][food]} | {values[columns[1]][food]}"
        if rng.random() < 0.7:
            prompt = (
                f"[What is the {column} of {food}?|Give me the {column} of {food}.|Look up "
                f"{food}: what is the {column}?]"
            )
            answer = (
                f"[The row of {food} reads|We need the row|The table says] {row}. [Its|The] "
                f"{('first', 'second')[place]} number "
                f"is the {column}[, so the answer is|: it is|, which is] "
                f"{values[column][food]}."
            )
        else:
            prompt = f"[Read me the row of {food}.|What do we know about {food}?|Tell me everything about {food}.]"
            answer = (
                f"[The row of {food} reads|We need the row|The table says] {row}. [That "
                f"is|This means] a {columns[0]} of {values[columns[0]][food]} and a "
                f"{columns[1]} of {values[columns[1]][food]}."
            )
        counted = f"[The table has|There are|I see] {len(foods)} rows. "
        turns.append((spin(rng, prompt), spin(rng, counted + answer)))
    lead = spin(rng, "[Here is a table.|Use this table.|Look at these goods.]")
    return [
        (f"{lead}\n\nfood | {' | '.join(columns)}\n{rows}\n\n{turns[0][0]}", turns[0][1]),
        *turns[1:],
    ]


def quotation(rng: random.Random) -> tuple[str, str]:
    "A passage to be given back word for word."
    n = rng.randint(6, 10)
    things = [f"{q} {w}" for q, w in zip(rng.sample(QUALITIES, n), rng.sample(ANIMALS + THINGS + PLACES, n))]
    seen = ", ".join("a " + w for w in things[:-1])
    passage = f"{rng.choice(NAMES)} saw {seen} and a {things[-1]}.".replace("a old", "an old")
    prompt = f'[Repeat this line exactly|Copy this sentence|Say this back to me|Quote this word for word]: "{passage}"'
    answer = (
        f'[Here it is again|Word for word|As you wrote it|The line reads]: "{passage}"'
        "[ Nothing was changed.| That is all of it.|]"
    )
    return prompt, answer


# task, names of the function, what is kept of an item, and under which condition
CODE_TASKS = [
    ("[multiplies every number by {k}|scales a list by {k}]", ["scale", "multiply_all", "times"], "{item} * {k}", ""),
    ("[adds {k} to every number|raises every number by {k}]", ["shift", "add_to_all", "increase"], "{item} + {k}", ""),
    (
        "[keeps only the numbers above {k}|drops everything up to {k}]",
        ["keep_large", "above", "filter_high"],
        "{item}",
        "{item} > {k}",
    ),
    (
        "[keeps only the numbers below {k}|drops everything from {k} on]",
        ["keep_small", "below", "filter_low"],
        "{item}",
        "{item} < {k}",
    ),
    (
        "[keeps the even numbers|drops the odd numbers]",
        ["evens", "keep_even", "only_even"],
        "{item}",
        "{item} % 2 == 0",
    ),
    ("[keeps the odd numbers|drops the even numbers]", ["odds", "keep_odd", "only_odd"], "{item}", "{item} % 2 == 1"),
]


def function(rng: random.Random) -> tuple[str, str]:
    "A Python function over a list, as a loop or as a comprehension."
    k = rng.randint(2, 9)
    item = rng.choice(["item", "value", "number", "x"])
    items = rng.choice(["items", "values", "numbers"])
    task, names, kept, test = rng.choice(CODE_TASKS)
    slots = dict(k=k, item=item)
    task, kept, test = (text.format(**slots) for text in (task, kept, test))
    name, head = rng.choice(names), f"for {item} in {items}"
    if rng.random() < 0.5:
        body = f"    return [{kept} {head}{' if ' + test if test else ''}]"
    else:
        guard, pad = (f"        if {test}:\n", "    ") if test else ("", "")
        body = f"    result = []\n    {head}:\n{guard}{pad}        result.append({kept})\n    return result"
    prompt = f"[Write a Python function that|Please write a function that|Show me Python code that] {task}."
    answer = (
        f"[Here is one way|This does it|You can write]:\n\n```python\ndef {name}({items}):\n"
        f"{body}\n```\n\n"
        "[It returns a new list|The result is a new list|It builds a new list], [so|and] "
        f"{items} "
        f"[stays as it was|is not changed|can be used again]."
    )
    return prompt, answer


STORY = [
    [
        "[One morning|Late in autumn|On a windy evening|Before sunrise] a {trait} {animal} "
        "called {name} [set out to find|went looking for|left home to fetch] a "
        "[lost|silver|broken|borrowed|blue] {thing}.",
        "There was once a {trait} {animal} named {name} who [lived near|slept behind|looked "
        "after] the {place} and [owned|kept|had found] a [silver|broken|painted|blue] {thing}.",
        "{name} was a {trait} {animal} with [one wish|a plan|a secret|no money at all]: to "
        "[carry|sell|mend|hide] the {thing} [of an old friend|from the hill|that nobody "
        "wanted].",
    ],
    [
        "The [road|path] to the {place} was [long and muddy|covered with snow|full of "
        "holes|steeper than it looked], "
        "[but|and yet] nobody [turned back|complained|wanted to wait].",
        "At the {place} [a tired|a cheerful|a very tall|an angry] {other} [asked for "
        "help|blocked the way|shared a "
        "piece of bread|told a strange tale].",
        "[All day long|For three days|Until the moon rose] the {animal} [walked along the "
        "river|followed the sound of bells|counted the stones by the road|waited under a "
        "tree].",
    ],
    [
        "Then [the rain began|a door opened|the wind dropped|a bell rang], and [everything "
        "changed|the {other} laughed|the lights went out|it was suddenly quiet].",
        '["Take it," said the {other}, "|"Listen," whispered the {other}, "][you will need it '
        "more than I do|the "
        'way back is shorter than you think|it only works in the dark]."',
        "The {thing} [fell into the water|began to shine|was heavier than before|broke in "
        "two], [so|and] they [worked together until noon|had to start again|sat down and "
        "laughed|took turns carrying it].",
    ],
    [
        "[In the end|At last|That night] they [shared a warm supper|went home by another "
        "road|hung the {thing} above the door|became the best of friends].",
        "[From then on|Since that day|Every winter after that] the {thing} [stood in the "
        "window|was never lost again|belonged to both of them], and {name} [slept well|told "
        "the story to everyone|smiled whenever it rained].",
        "And that is [how|why] the {place} [got its name|has a {thing} on its wall|is never empty].",
    ],
]


PORTRAIT = [
    [
        "The {place} is a {q} [place|spot|corner of the town] [between two hills|at the "
        "end of the road|not far from the sea].",
        "You [reach|find] the {place} [after an hour on foot|by following the river|behind "
        "the last houses]; it is {q} and [smells of wood|full of voices|painted white].",
    ],
    [
        "[In the morning|At noon|Before dark] [children|travellers|two sisters|a few workers] "
        "[sit on the wall|sell fruit|repair nets|play chess] there and [talk about the "
        "weather|wait for news|drink tea].",
        "[Most people|Visitors|Neighbours] come for [the view|the music|the silence|the "
        "bread] and [stay longer than planned|leave with a smile|bring something to eat].",
    ],
    [
        "A {trait} {animal} [sleeps near the gate|watches from the roof|guards the steps], "
        "and [nobody minds|everyone knows its name|it never makes a sound].",
        "Above the door hangs a {q2} {thing} [that somebody forgot|from another century|made "
        "of glass], and [it still works|it moves in the wind|nobody knows why].",
    ],
    [
        "[When it rains|In winter|On Sundays] the {place} [is almost empty|feels like "
        "home|looks twice as large], and "
        "[that is the best time to visit|the lamps burn all day|you can hear the river].",
        "If you [go there|visit it], take [a warm coat|a good book|an apple|some time] and "
        "[do not hurry|greet the owner|look up now and then].",
    ],
]


def free_choice(rng: random.Random) -> tuple[str, str]:
    "A story or a description: the prompt gives the subject, the rest is free."
    animal, other = rng.sample(ANIMALS, 2)
    slots = dict(
        animal=animal,
        other=other,
        name=rng.choice(NAMES),
        place=rng.choice(PLACES),
        thing=rng.choice(THINGS),
        trait=rng.choice(TRAITS),
        **dict(zip(("q", "q2"), rng.sample(QUALITIES, 2))),
    )
    story = rng.random() < 0.6
    prompt = (
        (
            "[Tell me a [short|little] story about|Write a [short|little] story about|I would "
            "like a tale about] a[| {trait}] {animal}."
        )
        if story
        else "[Describe|Write a few lines about|Tell me about|What is it like at] the {place}."
    )
    answer = " ".join(spin(rng, rng.choice(beat)) for beat in (STORY if story else PORTRAIT))
    prompt, answer = (
        re.sub(r"\b([Aa])(?= [ao])", r"\1n", text.format(**slots)) for text in (spin(rng, prompt), answer)
    )
    return prompt, answer


def each_turn(*tasks):
    "A domain whose turns do not depend on each other: a function of (rng, n) that returns n of them, spun."
    return lambda rng, n: [tuple(spin(rng, text) for text in rng.choice(tasks)(rng)) for _ in range(n)]


DOMAINS = {
    "arithmetic": each_turn(addition, subtraction, multiplication),
    "sorting": each_turn(sorted_numbers, sorted_words),
    "table": table,
    "copying": each_turn(quotation),
    "code": each_turn(function),
    "free": each_turn(free_choice),
}


def conversation(rng: random.Random, domain: str) -> dict:
    'One conversation of one to three turns: {"domain", "messages": [{"role", "content"}, …]}.'
    turns = DOMAINS[domain](rng, rng.choices([1, 2, 3], [5, 3, 2])[0])
    messages = [dict(role=role, content=text) for turn in turns for role, text in zip(("user", "assistant"), turn)]
    return dict(domain=domain, messages=messages)


def is_heldout(conversation: dict) -> bool:
    """Whether a conversation belongs to the held-out part, about one in ten: a property of its first prompt, so no seed
    or size can mix the parts."""
    return zlib.crc32(conversation["messages"][0]["content"].encode()) % 10 == 0


def corpus(n: int, seed: int = 0, heldout: bool = False) -> list[dict]:
    """`n` conversations of one part, each {"id", "domain", "messages"}. The same seed gives the same conversations, a
    smaller `n` a prefix. Each domain comes once in every six rows, in shuffled order: no stride picks one."""
    rows, domains = [], tuple(DOMAINS)
    for i in range(n):
        block, place = divmod(i, len(domains))
        domain = random.Random(f"{seed} {block}").sample(domains, len(domains))[place]
        rng = random.Random(f"{seed} {i} {heldout}")
        while is_heldout(row := conversation(rng, domain)) != heldout:
            pass
        rows.append(dict(id=f"{'heldout' if heldout else 'train'}-{seed}-{i:05d}", **row))
    return rows


def _arithmetic(prompt, answer, first):
    a, b = map(int, re.findall(r"\d+", prompt))
    if "take" in prompt.lower():
        a, b = b, a
    if re.search(r"times|ultiply|×|each", prompt):
        value = a * b
    elif re.search(r" - |away|gone|lost", prompt):
        value = a - b
    else:
        value = a + b
    return re.findall(r"\d+", answer)[-1:] == [str(value)]


def _sorting(prompt, answer, first):
    items = prompt.rstrip(".").split(": ")[-1].split(", ")
    key = int if items[0].isdigit() else str
    wanted = sorted(items, key=key, reverse="largest" in prompt or "falling" in prompt)
    return bool(re.search(r"\b" + ", ".join(wanted) + r"\.$", answer))


def _table(prompt, answer, first):
    header, *rows = [line.split(" | ") for line in first.splitlines() if " | " in line]
    question = re.findall(r"\w+", prompt.splitlines()[-1])
    row = next(row for row in rows if row[0] in question)
    requested = [value for column, value in zip(header, row) if column in question]
    wanted = f" a {header[1]} of {row[1]} and a {header[2]} of {row[2]}."
    if requested:
        wanted = f" {requested[0]}."
    return " | ".join(row) in answer and answer.endswith(wanted)


def _copying(prompt, answer, first):
    return re.findall('"(.*)"', prompt) == re.findall('"(.*)"', answer)


# task in the prompt -> what its code must do with an item
CODE_RULES = {
    "multiplies|scales": r" \* {k}\b",
    "adds|raises": r" \+ {k}\b",
    "above|up to": r" > {k}\b",
    "below|on\\.": r" < {k}\b",
    "keeps the even|drops the odd": " % 2 == 0",
    "keeps the odd|drops the even": " % 2 == 1",
}


def _code(prompt, answer, first):
    k = int((re.findall(r"\d+", prompt) or [2])[0])
    tests = (rule for task, rule in CODE_RULES.items() if re.search(task, prompt))
    wanted = next(tests).format(k=k)
    found = re.search(r"```python\n(def \w+\((\w+)\):.*?for (\w+) in (\w+).*?)\n```", answer, re.S)
    if not found or found[2] != found[4] or not re.search(rf"\b{found[3]}{wanted}", found[1]):
        return False
    names = {node.id for node in ast.walk(ast.parse(found[1])) if isinstance(node, ast.Name)}
    return names <= {found[2], found[3], "result"}


def _free(prompt, answer, first):
    words = {w for w in ANIMALS + PLACES if re.search(rf"\b{w}\b", prompt)}
    return answer[-1] in '."' and any(re.search(rf"\b{w}\b", answer) for w in words)


CHECKS = dict(arithmetic=_arithmetic, sorting=_sorting, table=_table, copying=_copying, code=_code, free=_free)


def is_right(domain: str, messages: list[dict]) -> bool:
    """Whether the last message answers the one before it, worked out from that prompt's text alone. A free answer is
    right if it keeps to its subject and ends."""
    return bool(CHECKS[domain](messages[-2]["content"], messages[-1]["content"], messages[0]["content"]))


def topics() -> list[str]:
    """Paragraphs of running English, in the order of the topics: the language reference that every Python carries
    (`pydoc_data.topics`), cleaned. Its text changes with Python's version."""
    from pydoc_data.topics import topics as pages

    paragraphs = (" ".join(p.split()) for _, page in sorted(pages.items()) for p in page.split("\n\n"))
    plain = (re.sub(r"[*`]+", "", p) for p in paragraphs)
    letters = set(string.ascii_letters + " ,.")
    return [p for p in plain if len(p.split()) >= 12 and p[-1] in ".:" and sum(c in letters for c in p) > 0.93 * len(p)]


def main(folder: Path = Path("data/corpus")) -> None:
    "Write the shipped corpus, always the same bytes."
    for name, rows in (("train", corpus(1800)), ("heldout", corpus(180, heldout=True))):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
